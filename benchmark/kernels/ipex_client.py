"""Starts ipex_server.py in its own environment and hands it the same inputs."""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache" / "ipex-venv" / "bin" / "python"
ABSENT = "no .cache/ipex-venv; scripts/setup_ipex.sh makes it"
_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 120.0


class RivalError(RuntimeError):
    """The rival's process failed or is silent."""


class Exchange:
    """Named arrays in one memory file, for two processes."""

    def __init__(self, **arrays: tuple[str, int]) -> None:
        """name = (dtype, elements)."""
        self.places: dict[str, tuple[int, str, int]] = {}
        at = 0
        for name, (dtype, count) in arrays.items():
            self.places[name] = (at, dtype, count)
            at += math.ceil(np.dtype(dtype).itemsize * count / 4096) * 4096
        self.nbytes = at
        self.fd = os.memfd_create("scout-benchmark", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, at)
        self._map = mmap.mmap(self.fd, at)

    def array(self, name: str) -> np.ndarray:
        offset, dtype, count = self.places[name]
        return np.frombuffer(self._map, dtype, count, offset)

    def close(self) -> None:
        os.close(self.fd)


class IpexClient:
    """Start-up takes seconds: ``connect`` waits for it.

    Raises:
        RivalError: from every method.
    """

    def __init__(self, exchange: Exchange, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._exchange = exchange
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmark.kernels.ipex_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=[exchange.fd],
                text=True,
                bufsize=1,
            )

    def connect(self, pool_bytes: int) -> dict[str, Any]:
        """Versions of the libraries and the backing of its pool."""
        return self._ask(
            _START_TIMEOUT_S,
            op="init",
            fd=self._exchange.fd,
            nbytes=self._exchange.nbytes,
            places=self._exchange.places,
            pool_bytes=pool_bytes,
        )

    def shape(self, **sizes: float) -> None:
        self._ask(_CALL_TIMEOUT_S, op="shape", **sizes)

    def run(self, threads: int, starts: list[int], keep: bool = False) -> int:
        """Nanoseconds of the calls; with ``keep`` the last output is in the exchange's "out"."""
        answer = self._ask(_CALL_TIMEOUT_S, op="run", threads=threads, starts=starts, keep=keep)
        return int(answer["ns"])

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> IpexClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except (OSError, ValueError) as e:
            raise RivalError(f"the process has ended; {self._last_words()}") from e
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise RivalError(f"{request['op']}: no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RivalError(f"{request['op']}: the process ended; {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RivalError(f"{request['op']}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"
