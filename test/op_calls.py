"""Replaces what ops run on CPU tensors, to record it or to run something else."""

import contextlib
import importlib
import pkgutil
import re
from unittest import mock

from sglang_scout import ops, policy
from sglang_scout.ops import triton


def modules(package):
    return [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@contextlib.contextmanager
def replaced(replacement):
    """Inside, an op calls ``replacement(name of the op, function)`` instead of its C++ function or its reference."""
    with contextlib.ExitStack() as stack:
        for module in modules(ops) + modules(policy):
            for name, function in list(vars(module).items()):
                op = re.fullmatch(r"_?(\w+)_(native|reference)", name)
                if op and function.__module__ == module.__name__:
                    instead = replacement(op[1], function)
                    stack.enter_context(mock.patch.object(module, name, instead))
        yield


def kernels():
    """The functions that launch kernels, by name; of ops, those have the names of the ops."""
    every = [*modules(triton), *(x for x in modules(policy) if x.__name__.endswith(".kernels"))]
    return {name: x for module in every for name, x in vars(module).items() if callable(x)}
