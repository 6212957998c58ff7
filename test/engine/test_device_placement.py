"""Every tensor of a device's step is on the device, and no copy from the host waits for it.

Tensors of torch's "meta" device have no values, but most operations refuse to mix them with the host's, as with CUDA's.
Our ops are not run: only their arguments are checked. Between steps, tensors are fake ones on "cuda".
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from op_calls import replaced
from page_weights import identity, pilot_weights
from sglang_scout.core.flags import parse_config
from sglang_scout.engine import digests
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import HostPages, ModelShape, Parts, Sizes
from sglang_scout.ops.pages import LayerPages
from sglang_scout.ops.select import Selection
from sglang_scout.ops.triton import doorbell
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker.ring import ArenaSpec, layout_of

LAYERS, HEADS, KV_HEADS, DIM, SIZE, HIDDEN, PAGES, BATCH = 3, 4, 2, 64, 32, 48, 60, 3
META = torch.device("meta")


def scored(q, first, second, table, *_):
    return torch.empty_like(table, dtype=torch.float32)


GIVEN = {
    "score_pages": scored,
    "score_rotated": scored,
    "score_embeddings": lambda q, _, table, *more: q.new_empty(len(q), table.shape[1]).float(),
    "mass_change_rotated": lambda q, *_: q.new_empty(q.shape[:2]).float(),
    "select_pages": lambda _, table, n_full, slot_of, k, *more: Selection(
        *table.new_empty(2, len(table), k), table.new_empty(len(table))
    ),
    "attend_pages": lambda q, *_: (torch.empty_like(q).float(), q.new_empty(q.shape[:2]).float()),
    "merge_states": lambda out, lse, *_: (out, lse),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, LayerPages):
        yield value.addresses
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def ring_on(device, lists=1):
    spec = ArenaSpec(
        *(LAYERS, PAGES, SIZE, KV_HEADS, HEADS, DIM, "bfloat16", 0.125, 8 * lists, 4096),
        lists=lists,
    )
    arena = SimpleNamespace(address=1 << 46, layout=layout_of(spec), spec=spec)
    words = torch.zeros(1, dtype=torch.int64)
    return GraphTransport(arena, lambda: 1, timeout_us=1000, device=device, faults=words)


@pytest.fixture
def posted(monkeypatch):
    """Layers that were posted by the ring's kernels, which are only called."""
    layers = []

    def post(ring, layer, *tensors):
        assert all(t.device == META for t in tensors)
        layers.append(layer)

    def merge(ring, layer, out, lse, change, dtype):
        assert all(t.device == META for t in (out, lse, change) if t is not None)
        return out.to(dtype)

    monkeypatch.setattr(doorbell, "post", post)
    monkeypatch.setattr(doorbell, "merge", merge)
    return layers


@pytest.fixture
def ran(monkeypatch):
    """Which ops were called; only host-page ops may access host pages."""
    names, host = set(), set()

    def op(name, _run):
        def call(*args):
            for tensor in tensors_in(args):
                is_host_s = tensor.device.type == "cpu" and tensor.data_ptr() in host
                # Recall's copy lists are on the host.
                is_host_s = is_host_s or (name == "copy_layer_pages" and tensor.shape[:1] == (3,))
                assert tensor.device == META or is_host_s, f"{name}: {tensor.shape} on the host"
                # The others read all elements in order, without strides.
                assert tensor.is_contiguous() or name in ("append_tokens", "rotate_heads"), name
            names.add(name)
            return GIVEN[name](*args) if name in GIVEN else None

        return call

    def upload(values, device):
        return torch.from_numpy(values).to(device)

    for name, module in list(sys.modules.items()):
        if name.startswith("sglang_scout.") and hasattr(module, "upload"):
            monkeypatch.setattr(module, "upload", upload)
    # Arrived digests are read from the device, with a wait, when requests join.
    monkeypatch.setattr(DigestPool, "accept", lambda self, pages: pages)
    with replaced(op):
        yield names, host


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("scout", {}),
        ("scout", {"digest": "rotated-2"}),
        ("scout", {"exact_layers": [1]}),
        ("infinigen", {}),
        ("infinigen", {"grain": "head"}),
        ("sparda", {"forecast_file": "w.npz"}),
        ("rheo", {"pilot_file": "w.npz"}),
        ("hgca", {}),
    ],
)
def test_every_tensor_of_a_step_is_on_the_device(ran, posted, monkeypatch, policy, settings):
    names, host_memory = ran
    flags = {"policy": policy, "budget_tokens": 4 * SIZE, "config": json.dumps(settings)}
    config = parse_config(policies=policies(), **flags)
    shape = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, SIZE, torch.bfloat16, 0.125)
    planes = torch.zeros(2 * LAYERS, PAGES * SIZE, KV_HEADS, DIM, dtype=shape.dtype).unbind()
    host_memory.update(plane.data_ptr() for plane in planes)
    kept = [torch.zeros(PAGES, SIZE, DIM, dtype=shape.dtype)] * LAYERS
    weights = pilot_weights(identity(LAYERS, HEADS, KV_HEADS, DIM))
    monkeypatch.setattr("sglang_scout.policy.load_weights", lambda *_: weights)
    made = make_policy(Context(config, LAYERS, 2 * shape.page_bytes))
    ring = ring_on(META, config.lists(KV_HEADS))
    ring.waited_ns = torch.zeros(LAYERS, dtype=torch.int64)  # only read back

    def predicted(x, positions):
        return x.new_empty(len(x), HEADS if made.query.attends else KV_HEADS, DIM)

    projector = SimpleNamespace(start=torch.add, finish=predicted, weight_bytes=0)
    parts = Parts(
        made,
        shape,
        Sizes(4, 4 * BATCH + BATCH + 4, BATCH, max_pages=20, lists=config.lists(KV_HEADS)),
        HostPages(shape, planes[:LAYERS], planes[LAYERS:], LayerPages.of(kept, kept, "cpu")),
        DigestPool(shape, PAGES, META, made.rule),
    )
    engine = StepEngine(parts, [projector] * LAYERS, ring)

    def layers():
        positions = torch.zeros(BATCH, dtype=torch.int64, device=META)
        for layer in range(LAYERS):
            x = torch.empty(BATCH, HIDDEN, dtype=shape.dtype, device=META)
            engine.layer_input(layer, x, x, positions)
            sizes = ((BATCH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            qkv = (torch.empty(size, dtype=shape.dtype, device=META) for size in sizes)
            engine.attend(layer, *qkv)

    engine.pause()
    layers()  # as SGLang captures it
    tables = 1 + np.arange(BATCH * 18, dtype=np.int32).reshape(BATCH, 18)
    engine.pages.allocate_pages(tables.flatten().astype(np.int64))
    lengths = np.array([542, 64, 33])  # with the second step a page leaves a window
    full = [row[: length // SIZE] for row, length in zip(tables, lengths, strict=True)]
    for row, length in enumerate(lengths.tolist()):
        engine.requests.admit(row, row, length)
    engine.pages.arrived(np.concatenate(full))
    for _ in range(2):  # a third would process these steps' selections, which do not exist
        lengths += 1
        engine.begin_step(tables, np.arange(BATCH), lengths)
        layers()
    engine.close()
    posts = list(range(LAYERS)) * 3 if made.route == "cpu" else []
    assert sorted(posted) == sorted(posts)
    chooses = {"decay_mass"} if policy == "hgca" else {"select_pages"}
    assert {"append_tokens", "attend_pages", "copy_layer_pages"} | chooses <= names


class NoCopies(TorchDispatchMode):
    """Refuses device operations with a host tensor argument: a scalar would be a copy that synchronizes the stream."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{function} of {devices}")
        return function(*args, **(kwargs or {}))


def test_nothing_between_steps_waits():
    """The ring, and pages that change hands."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        ring = ring_on("cuda")
        part = torch.zeros(3, 9, 2, 32, dtype=torch.uint8, device="cuda")
        ids = torch.zeros(5, dtype=torch.int64, device="cuda")
        with NoCopies():
            ring.begin_step(5)
            digests.unset((part, part), ids)
