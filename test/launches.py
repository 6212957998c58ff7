"""Counts what would be launched on a device, in Triton's interpreter.

A launch is a Triton kernel, or an operation of torch that is no view and does more than allocate.
"""

import contextlib
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from op_calls import kernels, replaced

NONE = {"empty", "empty_like", "new_empty", "_unsafe_view"}  # of torch's, beside views


class Launches(TorchDispatchMode):
    """``with Launches() as counted: ...`` leaves names in ``counted.names``."""

    def __enter__(self):
        self.names, self._stack = [], contextlib.ExitStack()
        launch, of_device = interpreter.GridExecutor.__call__, kernels()

        def kernel(executor, *args, **kwargs):
            self.names.append(executor.fn.__name__)
            with _disable_current_modes():
                return launch(executor, *args, **kwargs)

        self._stack.enter_context(replaced(lambda name, run: of_device.get(name, run)))
        self._stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", kernel))
        return super().__enter__()

    def __exit__(self, *error):
        self._stack.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        name = func.overloadpacket.__name__
        if not is_view and name not in NONE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
