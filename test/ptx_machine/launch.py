"""Puts the machine behind Triton's launches: kernels compile for a device and run here, on CPU tensors."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from compile_kernels import Driver
from sglang_scout.ops import triton as kernels

from .machine import Machine
from .memory import Global
from .program import Program, parse

launches: dict[str, int] = {}
"""How often each kernel has run."""
_programs: dict[str, Program] = {}


def _flat(values: Any, kinds: Any) -> list[tuple[Any, str]]:
    if isinstance(kinds, tuple):
        return [pair for v, k in zip(values, kinds, strict=True) for pair in _flat(v, k)]
    return [(values, kinds)]


def _bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & ((1 << 64) - 1)


def run(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> None:
    compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
    options = set(kwargs) - set(kernel.arg_names)
    named = dict(zip(kernel.arg_names, args, strict=False))
    named |= {k: v for k, v in kwargs.items() if k not in options}
    for parameter in kernel.params:
        if parameter.name not in named:
            named[parameter.name] = parameter.default
    memory, arguments = Global(), []
    for name, kind in compiled.src.signature.items():
        for value, of in _flat(named[name], kind):
            if of == "constexpr":
                continue
            if isinstance(value, torch.Tensor):
                memory.add_tensor(value)
            arguments.append(_bits(value))
    program = _programs.get(compiled.hash)
    if program is None:
        program = _programs[compiled.hash] = parse(compiled.asm["ptx"])
    arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's scratch, unused
    if callable(grid):
        grid = grid(named)
    whole = tuple(int(x) for x in grid) + (1,) * (3 - len(grid))
    Machine(program, arguments, whole, compiled.metadata.shared, memory).run()
    launches[program.name] = launches.get(program.name, 0) + 1


def install(arch: str) -> None:
    """From now on each launch of a Triton kernel runs here, compiled for ``arch``: "sm_90"."""
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: Triton would compile nothing")
    triton.runtime.driver.set_active(Driver(int(arch.removeprefix("sm_"))))
    # To the package it is as if they were interpreted: they run on CPU tensors, when asked for by name.
    kernels.interpreted = lambda: True
    gc.freeze()  # what exists now need not be looked through for tensors

    def instead_of_launch(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: run(kernel, grid, args, kwargs)

    JITFunction.__getitem__ = instead_of_launch
