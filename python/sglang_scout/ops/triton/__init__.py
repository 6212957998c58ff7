"""Triton kernels and the functions that launch them, each with the name and the arguments of its op. An empty grid
launches nothing. Importing this package does not import triton; using a module of it does.

On CPU tensors they run in Triton's interpreter: TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any


def __getattr__(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"{__name__} has no {name}: {error}") from error


class Lazy:
    """A module of kernels elsewhere, imported when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


def interpreted() -> bool:
    """Whether triton, if imported now, would run kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")
