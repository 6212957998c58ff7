#!/usr/bin/env python3
"""Where the driver's libcuda.so.1 is, and a folder in which the linker finds it as libcuda.so.

    scripts/driver_library.py FOLDER        then LIBRARY_PATH=FOLDER

What is compiled when it is first used, FlashInfer's kernels, is linked with -lcuda. An image that gets its driver
from the machine below it often has libcuda.so.1 alone, or in a place that the linker does not look at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NAME = "libcuda.so.1"
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/local/cuda/compat",
           "/usr/lib/wsl/lib", "/run/opengl-driver/lib")  # fmt: skip


def find(maps: str, known: str, folders: Iterable[str] = FOLDERS) -> Path | None:
    """The library: of a process that has loaded it, of what the loader knows, or of a folder.

    Args:
        maps: a process's ``/proc/PID/maps``.
        known: of ``ldconfig -p``.
    """
    loaded = re.findall(r"(/\S*/libcuda\.so(?:\.[\d.]+)?)$", maps, re.MULTILINE)
    listed = re.findall(rf"{re.escape(NAME)} \(.*x86-64.*\) => (\S+)", known)
    places = [*loaded, *listed, *(f"{folder}/{NAME}" for folder in folders)]
    return next((Path(place) for place in places if os.path.exists(place)), None)


def link(folder: Path) -> Path | None:
    """Make ``folder`` with libcuda.so in it; the library that it links to, None where none is found."""
    maps = Path("/proc/self/maps").read_text()
    try:
        done = subprocess.run(
            ["ldconfig", "-p"], capture_output=True, text=True,
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"},
        )  # fmt: skip
        known = done.stdout
    except OSError:
        known = ""
    if (library := find(maps, known)) is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libcuda.so", NAME):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library)
    return library


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 64
    library = link(Path(sys.argv[1]))
    print(library or f"{NAME} is nowhere to be found")
    return 0 if library else 1


if __name__ == "__main__":
    sys.exit(main())
