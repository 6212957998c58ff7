"""Shared by all tests: environment, generated examples, order, the comparison with an op and the tiny models."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Their helper modules; test modules are imported by file, see below.
for folder in ("", "e2e", "engine", "ops", "policy/hgca", "ring", "worker"):
    sys.path.insert(0, str(ROOT / "test" / folder))

# Before anything imports triton: without a GPU its kernels run in the interpreter, on CPU tensors.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tensors of unit tests are small: torch's thread pool costs more than it saves, most of all where
# several processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shapes and dtypes in the signatures of ops are checked at every call. Not those of their kernels, which are compiled.
PACKAGE = ROOT / "python"
with_shapes = [
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("ops", "policy")
    for path in (PACKAGE / "sglang_scout" / folder).rglob("*.py")
    if "from jaxtyping" in path.read_text(encoding="utf-8")
]
hook = install_import_hook(with_shapes, "beartype.beartype").hook
hook.should_instrument = with_shapes.__contains__  # and no modules within a package

# After the hook, as it imports the package; before SGLang's kernels.
from sglang_scout.core.no_driver import stand_in_for_the_driver  # noqa: E402

stand_in_for_the_driver()

pytest_plugins = ["op_fixtures"]

# The same examples in every run: a change is judged by what it does, not by luck. Those who look for
# faults run `pytest --hypothesis-profile=explore`. No deadline: the first case loads kernels.
settings.register_profile(
    "repeatable", max_examples=40, deadline=None, derandomize=True, print_blob=True
)
settings.register_profile(
    "explore", max_examples=400, deadline=None, database=None, print_blob=True
)
settings.load_profile("repeatable")

E2E_TIMEOUT_S = 1500  # two clusters started on two busy cores, and what the test does with them


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in its background with SIGINT ignored, which children inherit: Ctrl-C,
    # which several tests send them, would not be heard.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Test files mirror the package, so two folders may hold files of the same name.
    config.option.importmode = "importlib"
    for policy in ("hgca", "rheo", "sparda"):
        config.addinivalue_line("markers", f"{policy}: needs this policy")
    config.addinivalue_line(
        "markers", "e2e: starts real servers (minutes); deselect with -m 'not e2e'"
    )
    config.addinivalue_line(
        "markers",
        "slow: what others cover but for a model's name, a program or time; run with -m slow",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under test/e2e and run it last; what starts programs first, as its files take longest and
    one of several processes would be left alone with them."""

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(ROOT / "test").parts[0]

    for item in items:
        if folder(item) == "e2e":
            item.add_marker("e2e")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    first = ("scripts", "benchmark", "ring")
    items.sort(key=lambda item: (folder(item) == "e2e", folder(item) not in first))


@pytest.fixture(scope="session")
def populates() -> None:
    """Skips where the system has no MADV_POPULATE_WRITE: before Linux 5.14, and in some sandboxes."""
    from sglang_scout.worker.host_memory import populate

    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        if error := populate(ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE):
            pytest.skip(f"MADV_POPULATE_WRITE: {os.strerror(error)}")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """A real language model."""
    from smollm2 import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Path]:
    """``tiny_model("qwen3", layers=2, dtype="bfloat16")`` -> folder of such a model.

    Keywords are the fields of ``TinyModelSpec`` in scripts/make_tiny_model.py. Models are kept in
    ``.cache/models`` of the repository and written only once.
    """
    from make_tiny_model import TinyModelSpec, cached_tiny_model

    def make(arch: str = "qwen3", **sizes: int | str) -> Path:
        return cached_tiny_model(TinyModelSpec(arch=arch, **sizes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make():
    """``make(budget_tokens=128, ...)``: a ``MiniWorker``, or one of another ``kind``; closed at the end of the test."""
    from mini_worker import MiniWorker

    made = []

    def build(kind=MiniWorker, **kwargs):
        made.append(kind(**kwargs))
        return made[-1]

    yield build
    for worker in made:
        worker.close()


@pytest.fixture(scope="session")
def agree() -> Callable[..., None]:
    """agree(op, actual, expected, dtype): fail unless equal within the op's own tolerance.

    ``times`` widens it where the inputs are larger than those it was declared for.
    """

    from benchmark.kernels.tolerances import tolerance_of

    def check(op, actual, expected, dtype="float32", times=1.0):
        actual = actual if isinstance(actual, tuple) else (actual,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        declared = tolerance_of(op, dtype)
        tolerance = declared._replace(atol=times * declared.atol, rtol=times * declared.rtol)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            mismatch = tolerance.mismatch(a.double(), e.double())
            assert not mismatch, f"{op.__name__}, result {index}: {mismatch}"

    return check
