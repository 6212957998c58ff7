"""Between steps scalars reach a device as kernel arguments: a copy from host memory would synchronize the stream.

Tensors are torch's fake ones on "cuda", which need no device; their dispatched operations are a device's.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_scout.engine import digest_kinds
from sglang_scout.ops.doorbell import DeviceRing
from sglang_scout.worker.ring import layout_of
from sglang_scout.worker.spec import ArenaSpec


class NoCopies(TorchDispatchMode):
    """Refuses device operations with a host tensor argument."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{function} of {devices}")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def on_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_an_assignment_would_be_a_copy(on_cuda):
    state = torch.zeros(4, dtype=torch.int64, device="cuda")
    with NoCopies(), pytest.raises(RuntimeError, match="copy_"):
        state[1] = 5


def test_the_ring_between_steps(on_cuda):
    spec = ArenaSpec(2, 8, 32, 2, 4, 64, "bfloat16", 0.1, 4, 4)
    ring = DeviceRing(
        1 << 46, layout_of(spec), spec, parts=0, timeout_us=1000, device="cuda",
        faults=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    with NoCopies():
        ring.set_epoch(3, posts=17)
        ring.begin_step(5)


def test_pages_that_change_hands(on_cuda):
    part = torch.zeros(3, 9, 2, 32, dtype=torch.uint8, device="cuda")
    ids = torch.zeros(5, dtype=torch.int64, device="cuda")
    with NoCopies():
        digest_kinds.unset((part, part), ids)
