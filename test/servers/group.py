"""SGLang servers on this machine that start and end together, and the environment that they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from servers.server_process import (
    CLUSTER_VARIABLE,
    LOCKED_SETTLE_S,
    SETTLE_S,
    ServerProcess,
    free_ports,
    processes_of,
    stop_all,
    title_of,
    wait_healthy,
)
from servers.sglang_http import http_json
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


def device_of(arguments: Sequence[str]) -> str:
    """The last ``--device`` among a server's flags."""
    return dict(zip(arguments, arguments[1:], strict=False)).get("--device", "cpu")


class Servers:
    """``python -m sglang.launch_server`` on free ports; a context manager. All processes are gone after ``stop`` or
    when this process dies. This module never imports sglang.

    Args:
        model: folder or name. A folder has all files, so nothing is looked up online.
        servers: name to flags, of which a later one wins. Without ``--device`` it runs on the CPU.
        one_by_one: for servers that share a GPU, each of which takes a share of the memory that is free at its start.
        env: on top of :func:`server_environment`.
        log_dir: default: a new folder, which is removed after a ``with`` block without failure.
        ready_timeout_s: for all servers together.

    Attributes:
        on_ready: called with the name of each server that answers.
    """

    def __init__(
        self,
        model: str | Path,
        servers: Mapping[str, Sequence[str]],
        *,
        server_args: Sequence[str] = (),
        one_by_one: bool = False,
        env: Mapping[str, str] | None = None,
        log_dir: str | Path | None = None,
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.model_dir = Path(model)
        self.cluster_id = uuid.uuid4().hex
        self.scratch_dir = make_scratch_dir()
        self._owns_log_dir = log_dir is None
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="sglang-scout-logs-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.ready_timeout_s, self.one_by_one = ready_timeout_s, one_by_one
        self.on_ready: Callable[[str], None] = lambda name: None
        self.startup_s = 0.0
        self._variables = dict(env or {})
        self._urls: dict[str, str] = {}
        self.servers: dict[str, ServerProcess] = {}
        for name, more in servers.items():
            port, nccl_port = free_ports(2)
            # An idle SGLang scheduler busy-polls, and on two cores it would slow the other servers. It applies only
            # when the server holds no request. SGLang's own NCCL port is free when its launcher starts, but is bound
            # by the scheduler seconds later.
            own = dict(model_path=model, host=HOST, port=port, nccl_port=nccl_port)
            given = [*server_args, *more]
            command = [sys.executable, "-m", "sglang.launch_server", "--sleep-on-idle"]
            command += [*flags(**own, device=device_of(given)), *given]
            self.servers[name] = self._process(name, port, command, device_of(given))

    def _process(self, name: str, port: int, command: list[str], device: str) -> ServerProcess:
        self._urls[name] = f"http://{HOST}:{port}"
        environment = self.environment(device)
        return ServerProcess(name, command, environment, self.log_dir / f"{name}.log")

    def environment(self, device: str = "cpu") -> dict[str, str]:
        """Of a server on ``device``, or of a client on this machine."""
        environment = server_environment(device)
        if self.model_dir.is_dir():
            environment.setdefault("HF_HUB_OFFLINE", "1")
        # A busy prefill server on a CPU answers late; after 2 such heartbeats a decode server drops its requests.
        environment.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "100")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # would compile SGLang at every start
        environment.pop("TRITON_INTERPRET", None)  # the unit tests' setting, not the servers'
        own = {CLUSTER_VARIABLE: self.cluster_id, "TMPDIR": self.scratch_dir}
        return environment | self._variables | own

    def __enter__(self) -> Self:
        begin = time.monotonic()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()
        if failure[0] is not None:
            print(f"the servers' logs are in {self.log_dir}", file=sys.stderr)
        elif self._owns_log_dir:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def start(self) -> None:
        """Start everything and return when requests can be sent.

        Raises ServerFailed, with the log's tail, for a server that ends or does not answer in time. Call it from the
        main thread: the servers die with the thread that started them.
        """
        self._deadline = time.monotonic() + self.ready_timeout_s
        if not self.one_by_one:
            for server in self.servers.values():
                server.start()
        for name, server in self.servers.items():
            if self.one_by_one:
                server.start()
            wait_healthy(server, self._urls[name] + "/health", self._deadline, self.all_servers())
            self.on_ready(name)

    def all_servers(self) -> list[ServerProcess]:
        return list(self.servers.values())

    def stop(self) -> dict[int, str]:
        """Kill everything at once; may be called twice. Returns what did not end by itself: {}.

        Not by SIGTERM, after which running requests may finish.
        """
        # Ending on a GPU takes long, as it may have page-locked memory.
        on_cpu = all(device_of(server.command) == "cpu" for server in self.servers.values())
        settle_s = SETTLE_S if on_cpu else LOCKED_SETTLE_S
        try:
            return stop_all(self.all_servers()[::-1], self.cluster_id, settle_s)
        finally:
            shutil.rmtree(self.scratch_dir, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Every live process of this group: pid to command line."""
        sessions = [server.pid for server in self.all_servers() if server.started]
        return {p.pid: title_of(p) for p in processes_of(self.cluster_id, sessions)}

    def tails(self, lines: int) -> str:
        return "\n".join(server.tail(lines) for server in self.all_servers())

    def server_url(self, which: str) -> str:
        return self._urls[which]

    def info(self, which: str = "decode") -> dict[str, Any]:
        return http_json(self.server_url(which) + "/server_info", timeout_s=60)

    def kv_offload(self, which: str = "decode") -> dict[str, Any]:
        """The offload counters of a server. KeyError when it runs without ``--kv-offload``."""
        return self.info(which)["internal_states"][0]["kv_offload"]
