"""Servers on this machine that start and end together, and the environment that SGLang's servers need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from servers.server_process import (
    CLUSTER_VARIABLE,
    LOCKED_SETTLE_S,
    SETTLE_S,
    ServerProcess,
    processes_of,
    stop_all,
    title_of,
)
from sglang_scout.core.flags import SOCKET_PATH_BYTES

HOST = "127.0.0.1"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cpu_env.sh"


def server_environment(device: str) -> dict[str, str]:
    """Our own environment plus what SGLang needs with ``--device device``, which ``scripts/cpu_env.sh`` knows."""
    given = {**os.environ, "VIRTUAL_ENV": sys.prefix, "SCOUT_FORCE_CPU": str(int(device == "cpu"))}
    if device != "cpu":  # what the script set for a CPU
        for name, value in (("SGLANG_USE_CPU_ENGINE", "1"), ("SGLANG_NCCL_SO_PATH", "no-gpu")):
            if given.get(name) == value:
                del given[name]
    command = ["bash", "-c", f'. "{SCRIPT}" && env -0']
    said = subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(item.split("=", 1) for item in said.split("\0") if "=" in item)


def make_scratch_dir() -> str:
    """A new folder for the sockets that SGLang creates and leaves: in TMPDIR, unless their paths would be too long."""
    parent = tempfile.gettempdir()
    fits = len(os.fsencode(parent)) + len("/scout-abcdefgh/tmpabcdefgh") <= SOCKET_PATH_BYTES
    return tempfile.mkdtemp(prefix="scout-", dir=parent if fits else "/tmp")


def flags(**options: Any) -> list[str]:
    """``flags(page_size=32, quiet=True)`` -> ``["--page-size", "32", "--quiet"]``."""
    words: list[str] = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


class ServerGroup:
    """A context manager; all processes are gone after ``stop`` or when this process dies.

    Args:
        model: folder or name. A folder has all files, so nothing is looked up online.
        devices: of the servers; ending on a GPU takes long, as it may have page-locked memory.
        environment: variables on top of those of :func:`server_environment`.
        ready_timeout_s: for all servers together.
    """

    def __init__(
        self,
        model: str | Path,
        devices: tuple[str, ...],
        environment: Mapping[str, str] | None,
        ready_timeout_s: float,
    ) -> None:
        self.model_dir = Path(model)
        self.cluster_id = uuid.uuid4().hex
        self.scratch_dir = make_scratch_dir()
        self.ready_timeout_s = ready_timeout_s
        self.settle_s = SETTLE_S if set(devices) == {"cpu"} else LOCKED_SETTLE_S
        self._variables = dict(environment or {})

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when requests can be sent.

        Raises ServerFailed, with the log's tail, for a server that ends or does not answer in time. Call it from the
        main thread: the servers die with the thread that started them.
        """
        raise NotImplementedError

    def all_servers(self) -> list[ServerProcess]:
        raise NotImplementedError

    def stop(self) -> dict[int, str]:
        """Kill everything at once; may be called twice. Returns what did not end by itself: {}.

        Not by SIGTERM, after which running requests may finish.
        """
        try:
            return stop_all(self.all_servers()[::-1], self.cluster_id, settle_s=self.settle_s)
        finally:
            shutil.rmtree(self.scratch_dir, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Every live process of this group: pid to command line."""
        sessions = [server.pid for server in self.all_servers() if server.started]
        return {p.pid: title_of(p) for p in processes_of(self.cluster_id, sessions)}

    def tails(self, lines: int) -> str:
        return "\n".join(server.tail(lines) for server in self.all_servers())

    def environment(self, device: str) -> dict[str, str]:
        """Of a server on ``device``, or of a client on this machine."""
        environment = server_environment(device)
        if self.model_dir.is_dir():
            environment.setdefault("HF_HUB_OFFLINE", "1")
        # A busy prefill server on a CPU answers late; after 2 such heartbeats a decode server drops its requests.
        environment.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "100")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # would compile SGLang at every start
        environment.pop("TRITON_INTERPRET", None)  # the unit tests' setting, not the servers'
        return environment | {
            **self._variables,
            CLUSTER_VARIABLE: self.cluster_id,
            "TMPDIR": self.scratch_dir,
        }
