"""Whether and on which device a kernel benchmark can run; the shared command line of such benchmarks."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_scout.ops import triton


def device() -> str:
    """Where kernels run: "cpu" in Triton's interpreter, "cuda" otherwise."""
    return "cpu" if triton.interpreted() else "cuda"


def refusal(*, check_only: bool, needs_worker: bool = False) -> str:
    """Why it cannot run here, "" if it can. The interpreter supports only checks, no timing."""
    if needs_worker:
        try:
            from sglang_scout import _native  # noqa: F401
        except ImportError as error:
            return f"the native module is absent ({error}): no worker could answer"
    if device() == "cuda" and not torch.cuda.is_available():
        return "no CUDA device: nothing can be measured here"
    if device() == "cpu" and not check_only:
        return "TRITON_INTERPRET is set: unset it to measure"
    return ""


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A captured graph of a call, after one warm-up run that compiles and loads its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # it may still be writing the arguments
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    gc.collect()  # freeing an earlier graph during capture would abort it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def run(
    description: str | None,
    check: Callable[[str], int],
    measure: Callable[[argparse.Namespace], int],
    *,
    needs_worker: bool = False,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """``--check-only`` or ``--out FILE``. Returns the exit code: 2 where it cannot run here.

    Args:
        check: takes "cpu" or "cuda" and returns an exit code.
        measure: takes the options, with ``out``, the file for rows, and returns an exit code.
        add_options: adds options that only the measurement has.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--out", type=Path, help="JSON lines file, appended to")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    if why := refusal(check_only=arguments.check_only, needs_worker=needs_worker):
        print(why, file=sys.stderr)
        return 2
    if arguments.check_only:
        return check(device())
    if arguments.out is None:
        parser.error("--out FILE is missing")
    return measure(arguments)


def say(wrong: str) -> int:
    """Prints the problem ("" if there is none) and returns the exit code."""
    print(wrong or "equal")
    return 1 if wrong else 0
