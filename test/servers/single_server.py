"""One stand-alone SGLang server, for benchmarks and tests. This module never imports sglang."""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from servers.environment import make_scratch_dir, started_environment
from servers.pd_cluster import HOST, flags
from servers.processes import CLUSTER_VARIABLE
from servers.server_process import ServerProcess, free_ports, settle_s_of, stop_all, wait_healthy


class SingleServer:
    """``python -m sglang.launch_server`` on a free port. A context manager; all processes are gone after it.

    Args:
        name: for messages.
        model: its folder or name.
        arguments: flags, without model, host, port and device.
        device: as SGLang's flag.
        log: file for the server's output.
        environment: variables in addition to the usual ones.
        ready_timeout_s: for the start.
        settle_s: how long ``stop`` lets the children end by themselves. Default: by device.
    """

    def __init__(
        self,
        name: str,
        model: str | Path,
        arguments: Sequence[str],
        *,
        device: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 240.0,
        settle_s: float | None = None,
    ) -> None:
        self._id = uuid.uuid4().hex
        self._scratch = make_scratch_dir()
        more = {**(environment or {}), CLUSTER_VARIABLE: self._id}
        variables = started_environment(device, model, self._scratch, more)
        port, nccl_port = free_ports(2)
        self.url = f"http://{HOST}:{port}"
        self._ready_timeout_s = ready_timeout_s
        self._settle_s = settle_s_of(device) if settle_s is None else settle_s
        self._deadline = 0.0
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            *flags(model_path=model),
            *arguments,
        ]
        # An idle scheduler must not take a core. For the port, see PDCluster.
        command += flags(
            host=HOST, port=port, device=device, nccl_port=nccl_port, sleep_on_idle=True
        )
        self.process = ServerProcess(name, command, variables, log)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and return at once; see ``ServerProcess.start``."""
        self._deadline = time.monotonic() + self._ready_timeout_s
        self.process.start()

    def wait_ready(self) -> None:
        """Raises ServerFailed, with the log's tail, if it ends or is not healthy in time."""
        wait_healthy(self.process, self.url + "/health", self._deadline)

    def stop(self) -> None:
        """Kill it at once; may be called twice, and without a start."""
        try:
            stop_all([self.process], self._id, settle_s=self._settle_s)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
