"""Two graphs for each batch size: SGLang's own capture and choice, with the hooks around them."""

import argparse
import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

hooks = pytest.importorskip("sglang_scout.plugin.hooks", reason="needs SGLang")

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode  # noqa: E402
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as sglang_runner  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from benchmark.server import gpu_server  # noqa: E402
from sglang_scout.engine.device_step import DeviceStepEngine  # noqa: E402
from sglang_scout.plugin import backend as backend_module  # noqa: E402

Runner = sglang_runner.DecodeCudaGraphRunner
LATE = backend_module._LATE_STEP


def engine_of(lead, exact_steps):
    engine = object.__new__(DeviceStepEngine)
    predictor = SimpleNamespace(lead=lead, exact_steps=exact_steps)
    engine.policy, engine._late = SimpleNamespace(predictor=predictor), False
    engine.begin_capture = lambda: engine.begun.append(len(engine.begun))
    engine.begun = []
    return engine


@pytest.fixture
def runner(monkeypatch):
    """runner(engine): SGLang's runner with the hooks; ``captured`` lists what it captured."""

    def make(engine):
        backend = object.__new__(backend_module.ScoutAttnBackend)
        backend.engine = engine
        monkeypatch.setattr(backend_module, "current_backend", lambda: backend)
        made = object.__new__(Runner)
        made.captured = []

        def capture(self, size, forward, stream_idx=None, variant_label=None):
            is_late = getattr(engine, "is_late", False)
            made.captured.append((self._make_graph_key(size, stream_idx, variant_label), is_late))

        for name, hook, original in (
            ("capture_one_shape", hooks.around_capture_one_shape, capture),
            ("_resolve_lora_variant", hooks.around_resolve_variant, Runner._resolve_lora_variant),
        ):
            monkeypatch.setattr(
                Runner, name, lambda *args, h=hook, o=original: h(o, *args), raising=True
            )
        return made

    @contextmanager
    def as_it_is(model, *_args, **_kwargs):
        yield model

    monkeypatch.setattr(sglang_runner, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(sglang_runner, "get_available_gpu_memory", lambda *_, **__: 0.0)
    monkeypatch.setattr(sglang_runner.torch_compile_decoration, "patch_model", as_it_is)
    return make


def capture(runner):
    runner.model_runner = SimpleNamespace(device="cpu", gpu_id=0, model=None, tp_group=None)
    runner.capture_bs, runner.compile_bs, runner.num_tokens_per_bs = [1, 2], [], 1
    runner._capture_one_stream()
    return [(key.size, key.variant_label, is_late) for key, is_late in runner.captured]


def test_each_batch_size_is_captured_for_both_kinds_of_step(runner):
    engine = engine_of(lead=1, exact_steps=1)
    made = runner(engine)
    both = [(2, None, False), (2, LATE, True), (1, None, False), (1, LATE, True)]
    assert capture(made) == both
    assert len(engine.begun) == 2, "of the requests that there are none may be reached"
    assert not engine.is_late
    keys = {key for key, _ in made.captured}
    for is_late in (False, True):
        engine._late = is_late
        label = made._resolve_lora_variant(None)
        assert label == (LATE if is_late else None)
        assert made._make_graph_key(2, None, label) in keys


@pytest.mark.parametrize("engine", [engine_of(0, 1), engine_of(1, 0), SimpleNamespace()])
def test_one_graph_where_all_steps_are_alike(runner, engine):
    made = runner(engine)
    assert capture(made) == [(2, None, False), (1, None, False)]
    assert made._resolve_lora_variant(None) is None


def test_every_batch_that_is_checked_on_a_device_finds_a_graph():
    """With the flags of benchmark/server/gpu_server.py, by SGLang's own choice of sizes and of graphs."""
    options = argparse.Namespace(
        batch=[1, 2, 3, 5, 8, 16], context=1500, kill_tokens=1000, device="cuda"
    )
    flags = gpu_server.server_flags(options, "bfloat16")
    unpadded = flags.get("disable_cuda_graph_padding", False)
    asked = SimpleNamespace(disable_cuda_graph_padding=unpadded, speculative_algorithm=None)
    most = flags["cuda_graph_max_bs_decode"]
    sizes = ServerArgs._generate_decode_cuda_graph_batch_sizes(asked, most)
    runner = object.__new__(Runner)
    graphs = {runner._make_graph_key(size) for size in sizes}
    runner.__dict__ |= dict(
        backend=SimpleNamespace(can_run=lambda _, key: key in graphs), disable_padding=unpadded,
        max_bs=max(sizes), num_tokens_per_bs=1, capture_hidden_mode=CaptureHiddenMode.NULL,
        require_mlp_tp_gather=False, enable_pdmux=False, require_mlp_sync=False,
        is_encoder_decoder=False, enable_two_batch_overlap=False,
        model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
    )  # fmt: skip
    for size in options.batch:
        batch = SimpleNamespace(
            replace_embeds=None, batch_size=size, spec_info=None,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        assert runner.can_run_graph(batch), size
    assert sizes == [1, 2, 4, 8, 12, 16], "3 and 5 are padded"
