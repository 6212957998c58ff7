"""Which ops there are: to replace what they run on CPU tensors, and what policies add to tables of tests."""

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
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


@functools.cache
def kernels():
    """The functions that launch kernels, by name; of ops, those have the names of the ops."""
    every = [*modules(triton), *(x for x in modules(policy) if x.__name__.endswith(".kernels"))]
    return {name: x for module in every for name, x in vars(module).items() if callable(x)}


def of_policies(table):
    """The entries of this table in the policies' ``test/policy/*/op_cases.py``."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("policy/*/op_cases.py")):
        spec = importlib.util.spec_from_file_location(f"op_cases_of_{path.parent.name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= getattr(module, table, {})
    return found
