#!/usr/bin/env python3
"""Compiles every Triton kernel for a GPU, as its function launches it, on a machine without one.

    python scripts/compile_kernels.py [--arch 90] [--ptx FOLDER]

These functions run on tensors without data; instead of being launched, each kernel is compiled for the types,
alignments and constants of that launch. Fails if one does not compile, exceeds the shared memory limit, spills more
than a few words on the architecture that it was written for (90), or was not reached.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

if "TRITON_INTERPRET" in os.environ:  # before importing triton
    del os.environ["TRITON_INTERPRET"]

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from kernel_cases import cases, hgca, learned
from sglang_scout.ops import triton as kernels

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Maximum shared memory per program, by architecture: A100, A40, L40S, H100, B200, B300, RTX PRO 6000."""
FEW_SPILLED_BYTES = 32  # some words that ptxas trades for occupancy


def kernels_of_package() -> set[str]:
    modules = [f"{kernels.__name__}.{m.name}" for m in pkgutil.iter_modules(kernels.__path__)]
    loaded = [importlib.import_module(name) for name in modules] + [x for x in (hgca, learned) if x]
    found = [item for module in loaded for item in vars(module).items()]
    return {name for name, x in found if isinstance(x, JITFunction) and "_kernel" in name}


def resources(ptx: Path, arch: int) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, as the assembler reports them."""
    # With architecture-specific features, as triton does.
    target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    binary = ptx.with_suffix(".cubin")
    command = [get_ptxas(arch).path, "-v", f"-arch={target}", ptx, "-o", binary]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    binary.unlink()
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    return int(registers[1]) if registers else 0, sum(map(int, spilled))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--arch", type=int, default=90, choices=SHARED_KIB, help="90: H100 (default), 80: A100, ..."
    )
    parser.add_argument("--ptx", type=Path, help="keep the PTX of each kernel in this folder")
    arguments = parser.parse_args()
    try:
        print(f"ptxas: {get_ptxas(arguments.arch).path}")
    except RuntimeError as error:
        print(f"no ptxas: {error}")
        return 77
    with tempfile.TemporaryDirectory() as scratch:
        return compile_all(arguments.arch, arguments.ptx or Path(scratch))


def compile_all(arch: int, folder: Path) -> int:
    """Writes PTX to the folder; returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    asked_before_it_compiles = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
    )
    triton.runtime.driver.set_active(asked_before_it_compiles)
    compiled: list[tuple[str, object]] = []

    def instead_of_launch(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def compile_only(*args: object, **kwargs: object) -> None:
            result = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            compiled.append((kernel.__name__, result))

        return compile_only

    JITFunction.__getitem__ = instead_of_launch
    seen, errors, most = set(), set(), SHARED_KIB[arch] << 10
    for call, about, call_arguments in cases():
        compiled.clear()
        case = call.__name__ + about
        call(*call_arguments)
        for name, kernel in compiled:
            if (name, kernel.hash) in seen:
                continue
            seen.add((name, kernel.hash))
            ptx = folder / f"{name}-{len(seen)}.ptx"
            ptx.write_text(kernel.asm["ptx"])
            registers, spilled = resources(ptx, arch)
            warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
            used = f"{warps:2} warps {registers:4} registers {spilled:4} B spilled"
            print(f"{name:18} {used} {shared:7} B shared  {case}", flush=True)
            if arch == 90 and spilled > FEW_SPILLED_BYTES:  # what the kernels were written for
                errors.add(f"{name} spills more than {FEW_SPILLED_BYTES} bytes")
            if shared > most:
                errors.add(f"{name} needs more than {most} bytes of shared memory")
    missed = kernels_of_package() - {name for name, _ in seen}
    errors |= {f"{name} never compiled here" for name in missed}
    for error in sorted(errors):
        print(f"error: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
