"""Page copies by copy engines: the calls to the CUDA runtime, with a stand-in that copies immediately."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_scout.ops import memcpy
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.pages import copy_layer_pages

L, P, SLOTS, PAGE = 3, 5, 4, (32, 8, 128)  # 64 KiB of bfloat16
IDS = torch.tensor([[2, 0, 0, 1, 2], [4, -1, 0, 3, 4], [1, 2, 3, 0, 2]])


class Runtime:
    """cudaMemcpyBatchAsync of a device whose memory is the host's."""

    def __init__(self, code=0):
        self.code, self.calls = code, 0

    def __call__(self, dsts, srcs, sizes, count, attributes, first, num_attributes, stream):
        def read(address, kind, n):
            return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (n,)).tolist()

        assert stream == 7 and num_attributes == 1 and read(first, ctypes.c_size_t, 1) == [0]
        # cudaMemcpySrcAccessOrderStream, two empty cudaMemLocation, cudaMemcpyFlagPreferOverlapWithCompute
        assert read(attributes, ctypes.c_int, 6) == [1, 0, 0, 0, 0, 1]
        self.calls += 1
        all_sizes = read(sizes, ctypes.c_size_t, count)
        assert set(all_sizes) == {65536}
        addresses = (read(x, ctypes.c_size_t, count) for x in (dsts, srcs))
        for one in zip(*addresses, all_sizes, strict=True):
            ctypes.memmove(*one)
        return self.code


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(memcpy, "runtime", lambda: made)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def pages(*shape, dtype=torch.bfloat16, apart=0):
    memory = torch.randn(2 * L, int(np.prod(shape)) + apart).to(dtype)
    planes = [x[: x.numel() - apart].view(shape) for x in memory]
    return LayerPages.of(planes[:L], planes[L:], "cpu")


def targets(*shape, dtype=torch.bfloat16):
    return [torch.zeros(L, SLOTS, *shape, dtype=dtype) for _ in "kv"]


def test_one_call_copies_what_the_reference_does(runtime):
    source, got, expected = pages(P, *PAGE), targets(*PAGE), targets(*PAGE)
    memcpy.copy(source, IDS, *got)
    copy_layer_pages(source, IDS, *expected, impl="reference")
    assert all(map(torch.equal, got, expected)) and runtime.calls == 1
    memcpy.copy(source, IDS[:, 1:2], *got)
    assert runtime.calls == 1, "nothing to copy"
    # Arrays too large for numpy's cache of small ones.
    memcpy.copy(source, IDS[:, :1].repeat(1, 500), *got)
    assert all(map(torch.equal, got, expected)) and runtime.calls == 2


def test_an_error_of_the_runtime_is_raised(runtime):
    runtime.code = 1
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync of 8 pages: CUDA error 1"):
        memcpy.copy(pages(P, *PAGE), IDS, *targets(*PAGE))


@pytest.mark.parametrize(("which", "bad"), [(0, L), (1, P), (2, SLOTS), (2, -1)])
def test_nothing_outside_is_written(runtime, which, bad):
    ids = IDS.clone()
    ids[which, 0] = bad
    with pytest.raises(ValueError, match=f"copy_layer_pages: .* has {bad}, expected"):
        memcpy.copy(pages(P, *PAGE), ids, *targets(*PAGE))
    assert runtime.calls == 0


def test_when_it_leaves_the_copies_to_the_kernel(runtime, monkeypatch):
    def reason(source, to):
        return memcpy.unless(source, IDS, *to)

    assert reason(pages(P, *PAGE), targets(*PAGE)) == ""
    assert reason(pages(P, 16, 8, 128), targets(16, 8, 128)).startswith("pages of 32768 bytes")
    assert reason(pages(P, 32, 8, 192), targets(32, 8, 192)).startswith("pages of 98304 bytes")
    # As with the context pages of `hgca` after each plane.
    assert "whole pages apart" in reason(pages(P, *PAGE, apart=64), targets(*PAGE))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "capture" in reason(pages(P, *PAGE), targets(*PAGE))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    assert "default one" in reason(pages(P, *PAGE), targets(*PAGE))


def test_it_is_for_copies_from_locked_memory_to_a_device():
    source, to = pages(P, *PAGE), targets(*PAGE)
    assert copy_layer_pages.reasons(source, IDS, *to)["memcpy"] == [
        "source.k is on cpu; memcpy supports cuda"
    ]
    assert "not page-locked" in memcpy.unless(source, IDS, *to)


def test_the_runtime_that_torch_has_loaded_has_the_call():
    if not (torch.version.cuda or "").startswith("13."):
        pytest.skip(f"torch is built for CUDA {torch.version.cuda}")
    # Without a device it fails, which shows that it is found and called as declared.
    if not torch.cuda.is_available():
        assert memcpy.runtime()(*[0] * 8) != 0
