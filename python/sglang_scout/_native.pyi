"""The C++ module of sgl-kernel; its signatures and docstrings are those of src/bind*.cpp."""

from typing import Any

def __getattr__(name: str) -> Any: ...
