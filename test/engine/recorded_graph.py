"""A CUDA graph on CPU tensors: the launches of its capture, with their captured arguments.

A replay repeats the recorded operations on the same memory, and runs no Python of the engine. So a step that depends on
re-reading host state, or on a new tensor in every step, gives wrong results here as it would on a device. Operations
that a capture forbids are refused: reading a value from the device, or a result whose size depends on values.

Launches on the side stream (`ForkedStream`, replaced by the graph) are replayed as late as possible: when joined. So a
step that overwrites inputs of a forked part, or uses results before the join, is detected.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from op_calls import replaced

_WAITS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.repeat_interleave,
    torch.ops.aten.bincount,
)
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_COPIES = ("tolist", "numpy", "cpu")

_LAUNCH = interpreter.GridExecutor, "__call__"


class RecordedGraph(TorchDispatchMode):
    """``with graph.capture(): ...`` runs and records; ``graph.replay()`` repeats it."""

    def __init__(self):
        super().__init__()
        self._calls = []  # part or None, call, results; a join is a set of parts, None, None
        self._part, self._open = None, []

    @contextlib.contextmanager
    def capture(self):
        kernel_call = getattr(*_LAUNCH)

        def op(_name, run):
            return lambda *args: self._do(lambda: run(*args))

        def kernel(*args, **kwargs):
            return self._do(lambda: kernel_call(*args, **kwargs))

        def refusing(name):
            original = getattr(torch.Tensor, name)

            def copy(tensor, *args, **kwargs):
                if not self._nested:
                    raise RuntimeError(f"captured: {name} waits for the device")
                return original(tensor, *args, **kwargs)

            return mock.patch.object(torch.Tensor, name, copy)

        self._nested = False
        with (
            contextlib.ExitStack() as stack,
            replaced(op),
            mock.patch.object(*_LAUNCH, kernel),
            self,
        ):
            for name in _COPIES:
                stack.enter_context(refusing(name))
            yield

    @contextlib.contextmanager
    def fork(self, key, *given):
        self._part = key
        self._open.append(key)
        yield
        self._part = None

    def join(self, *keys):
        keys = {key for key in keys or self._open if key in self._open}
        self._open = [key for key in self._open if key not in keys]
        self._calls.append((keys, None, None))

    def replay(self):
        assert not self._open, "captured: a part was never joined"
        beside = []
        for part, call, kept in self._calls:
            if call is None:
                due = 1 + max((i for i, of in enumerate(beside) if of[0] in part), default=-1)
                for _, *launched in beside[:due]:
                    _again(*launched)
                del beside[:due]
            elif part is None:
                _again(call, kept)
            else:
                beside.append((part, call, kept))

    def _do(self, call):
        """An op or a kernel as a whole: its inner operations are not recorded."""
        if self._nested:
            return call()
        self._nested = True
        try:
            with _disable_current_modes():
                result = call()
        finally:
            self._nested = False
        self._calls.append((self._part, call, _tensors(result)))
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_masked = func.overloadpacket in _INDEXED and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if is_masked or func.overloadpacket in _WAITS:
            raise RuntimeError(f"captured: {func} waits for the device")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view:  # a view of persistent memory need not be repeated
            self._calls.append((self._part, lambda: func(*args, **kwargs), _tensors(result)))
        return result


def _again(call, kept):
    for old, new in zip(kept, _tensors(call()), strict=True):
        # The same memory if the call wrote into an argument and returned it.
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _tensors(result):
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
