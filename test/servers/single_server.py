"""One stand-alone SGLang server, for benchmarks and tests. This module never imports sglang."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from servers.group import HOST, ServerGroup, flags
from servers.server_process import ServerProcess, free_ports, wait_healthy


class SingleServer(ServerGroup):
    """``python -m sglang.launch_server`` on a free port.

    Args:
        name: for messages.
        model: its folder or name.
        arguments: flags, without model, host, port and device.
        device: as SGLang's flag.
        log: file for the server's output.
        environment, ready_timeout_s: see ServerGroup.
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
        super().__init__(model, (device,), environment, ready_timeout_s)
        self.settle_s = settle_s or self.settle_s
        port, nccl_port = free_ports(2)
        self.url = f"http://{HOST}:{port}"
        # An idle scheduler must not take a core. For the port, see PDCluster.
        own = dict(host=HOST, port=port, device=device, nccl_port=nccl_port, sleep_on_idle=True)
        command = [sys.executable, "-m", "sglang.launch_server", *flags(model_path=model)]
        command += [*arguments, *flags(**own)]
        self.process = ServerProcess(name, command, self.environment(device), log)

    def all_servers(self) -> list[ServerProcess]:
        return [self.process]

    def start(self) -> None:
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Start it and return at once."""
        self._deadline = time.monotonic() + self.ready_timeout_s
        self.process.start()

    def wait_ready(self) -> None:
        wait_healthy(self.process, self.url + "/health", self._deadline)
