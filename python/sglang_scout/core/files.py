"""Checks files at the start, before minutes of work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping

from sglang_scout.core.errors import ConfigError

SOCKET_PATH_BYTES = 107
"""Limit of Linux for the path of a socket."""


def check_socket_folder() -> None:
    """Refuse a folder for temporary files whose path is too long for the sockets that SGLang creates in it."""
    folder = tempfile.gettempdir()
    size, limit = len(os.fsencode(folder)), SOCKET_PATH_BYTES - len("/tmpabcdefgh")
    if size > limit:
        raise ConfigError(
            f"TMPDIR={folder}: its {size} bytes are too many for SGLang's sockets in it, whose paths may have "
            f"{SOCKET_PATH_BYTES} bytes; set TMPDIR to a folder whose path has at most {limit} bytes"
        )


def check_writable(what: str, path: str) -> None:
    """Refuse a file that cannot be opened for writing; ``what`` names the flag and its value.

    No side effects, except that the target of a dangling link is created.
    """
    # os.path, unlike pathlib, also returns False for paths that cannot be accessed.
    folder = os.path.dirname(path) or "."
    if not path or os.path.isdir(path) or not os.path.isdir(folder):
        raise ConfigError(
            f"{what}: is empty, a folder, or in a folder that does not exist; name a file"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        return  # a pipe, whose reader would see the open, or a device
    is_new = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{what}: cannot be written: {why}; name another file") from None
    if is_new:
        with contextlib.suppress(OSError):
            os.unlink(path)


def check_different(files: Mapping[str, str]) -> None:
    """Refuse one file under two names: one would overwrite the other.

    Args:
        files: paths by flag or key with its value.
    """
    taken: dict[str | tuple[int, int], str] = {}
    for what, path in files.items():
        try:
            found = os.stat(path)
            file: str | tuple[int, int] = found.st_dev, found.st_ino  # also equal for hard links
        except (OSError, ValueError):
            file = os.path.realpath(path)
        if (other := taken.setdefault(file, what)) != what:
            other = other.rpartition(": ")[2]
            raise ConfigError(f"{what}: {other} names the same file; name another")
