"""Names and versions of the files that servers write and commands read, for both sides."""

from __future__ import annotations

from typing import NamedTuple


class FileFormat(NamedTuple):
    """What the head of such a file says of itself. A reader refuses another name or version."""

    name: str
    version: int


TRACE = FileFormat("sglang-scout-trace", 1)
STEP_LOG = FileFormat("sglang-scout-steps", 1)
