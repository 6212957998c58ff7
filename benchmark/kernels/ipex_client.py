"""Starts ipex_server.py in its own environment and hands it the same inputs."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.kernels.implementations import Inputs, Shape

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache" / "ipex-venv" / "bin" / "python"
ABSENT = "no .cache/ipex-venv; scripts/setup_ipex.sh makes it"
TIMEOUT_S = 120.0


class BaselineError(RuntimeError):
    """The process failed or is silent."""


class IpexClient:
    """The process, which makes the same pool from the same seed, and one memory file shared with it: int32 page ids,
    float32 q and out.

    Raises:
        BaselineError: from every method.
    """

    def __init__(self, shapes: Sequence[Shape], pool_bytes: int, log: Path) -> None:
        ids = max(2 * (pool_bytes // 2 // s.page_bytes) + s.B * s.R for s in shapes)
        queries = max(s.B * s.H * s.G * s.D for s in shapes)
        self._fd = os.memfd_create("scout-benchmark", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 4 * (ids + 2 * queries))
        words = np.frombuffer(mmap.mmap(self._fd, 4 * (ids + 2 * queries)), np.int32)
        self._ids = words[:ids]
        self._q, self._out = words[ids:].view(np.float32).reshape(2, queries)
        self._shape: Shape | None = None
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmark.kernels.ipex_server"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                pass_fds=[self._fd], bufsize=1,
            )  # fmt: skip
        self._ask(op="init", fd=self._fd, ids=ids, queries=queries, pool_bytes=pool_bytes)

    def run(self, inputs: Inputs, starts: list[int], threads: int) -> int:
        """Nanoseconds of the calls."""
        s = inputs.shape
        if s is not self._shape:
            self._ids[: len(inputs.stream.ids)] = inputs.stream.ids
            self._q[: inputs.q.numel()] = inputs.q.flatten().numpy()
            self._ask(op="shape", B=s.B, R=s.R, S=s.S, H=s.H, G=s.G, D=s.D, scale=s.scale)
            self._shape = s
        return int(self._ask(op="run", threads=threads, starts=starts)["ns"])

    def output(self) -> np.ndarray:
        """float32 [B, HQ, D] of the last run."""
        assert self._shape is not None
        s = self._shape
        return self._out[: s.B * s.H * s.G * s.D].copy().reshape(s.B, s.H * s.G, s.D)

    def __enter__(self) -> IpexClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._fd)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except OSError as error:
            raise BaselineError(f"the process has ended, see {self._log}") from error
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise BaselineError(f"{request['op']}: no answer within {TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended, see {self._log}"}
        if "error" in answer:
            raise BaselineError(f"{request['op']}: {answer['error']}")
        return answer
