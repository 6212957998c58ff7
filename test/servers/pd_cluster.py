"""A prefill server, decode servers and the SGLang router on this machine: for the demo, the benchmarks and the tests.

with PDCluster(model_dir, server_args=["--kv-offload", "scout"]) as cluster:
    answers = cluster.generate([[1, 2, 3], [4, 5]], max_new_tokens=32)
    print(cluster.kv_offload())
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from servers.group import HOST, Servers, flags
from servers.server_process import ServerProcess, free_ports, wait_healthy
from servers.sglang_http import Generation, generate, http_json

# ``python -m sglang_router.launch_router`` without its one costly import: the Python load balancer
# for debugging, which imports all of SGLang (10 s) and is not the router that we start.
ROUTER_MAIN = (
    "import sys, types;"
    "stub = types.ModuleType('sglang_router.mini_lb'); stub.MiniLoadBalancer = None;"
    "sys.modules[stub.__name__] = stub;"
    "from sglang_router.launch_router import main; main()"
)
SIZES = {"dtype": "float32", "max_total_tokens": 65536, "max_running_requests": 32}
"""Flags of all servers. The KV capacity is never left to SGLang: on a CPU it would take most of the RAM."""


class PDCluster(Servers):
    """See Servers.

    Args:
        servers: flags of "prefill", "decode" and, by any other name, of further decode servers of the same prefill
            server; :meth:`ask_pair` sends a request to one. The first two are always there.
        router_args: flags of the router; None: only the servers run.
        options: see Servers.
    """

    def __init__(
        self,
        model_dir: str | Path,
        servers: Mapping[str, Sequence[str]] | None = None,
        *,
        server_args: Sequence[str] = (),
        router_args: Sequence[str] | None = (),
        **options: Any,
    ) -> None:
        self.bootstrap_port, port, prometheus_port = free_ports(3)
        common = flags(
            **SIZES,
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=self.bootstrap_port,
        )
        every = {"prefill": (), "decode": (), **(servers or {})}
        modes = {name: "prefill" if name == "prefill" else "decode" for name in every}
        super().__init__(
            model_dir,
            {x: [*flags(disaggregation_mode=modes[x]), *more] for x, more in every.items()},
            server_args=[*common, *server_args],
            **options,
        )
        # Of the router and of clients, which would ask a proxy for the servers; the router reads NO_PROXY first.
        self._variables |= {"NO_PROXY": HOST, "no_proxy": HOST}
        self.router: ServerProcess | None = None
        if router_args is not None:
            command = [sys.executable, "-c", ROUTER_MAIN, "--pd-disaggregation"]
            command += flags(host=HOST, port=port, prometheus_port=prometheus_port)
            command += flags(policy="round_robin", worker_startup_check_interval=1)
            command += [*flags(decode=self._urls["decode"]), "--prefill", self._urls["prefill"]]
            command += [str(self.bootstrap_port), *router_args]
            self.router = self._process("router", port, command, "cpu")

    @property
    def url(self) -> str:
        """The router's URL, for requests."""
        return self._urls["router"]

    def all_servers(self) -> list[ServerProcess]:
        return [*super().all_servers(), *([self.router] if self.router is not None else [])]

    def start(self) -> None:
        super().start()
        if self.router is not None:
            # Only now: it checks its workers when it starts, and again only after a while.
            self.router.start()
            wait_healthy(self.router, self.url + "/readiness", self._deadline, self.all_servers())

    def restart(self, name: str) -> None:
        """Restart an ended server, or the ``router``, and return when it is ready.

        Same flags and ports. Call it like :meth:`start`. Raises ServerFailed.
        """
        server = self.servers[name] if name in self.servers else self.router
        assert server is not None
        server.restart()
        path = "/health" if name in self.servers else "/readiness"
        wait_healthy(server, self._urls[name] + path, time.monotonic() + self.ready_timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], which: str = "router", **options: Any
    ) -> list[Generation]:
        """`sglang_http.generate`, through the router or as :meth:`ask_pair`."""
        send = partial(self.ask_pair, which=which)
        if which == "router":
            send = partial(http_json, self.url + "/generate")
        return generate(send, prompts, **options)

    def ask_pair(
        self, payload: Mapping[str, Any], which: str = "decode", path: str = "/generate"
    ) -> Any:
        """The decode server's answer to a request, which both get as from the router. Raises one of NO_ANSWER."""
        meeting = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": uuid.uuid4().int >> 65,  # 63 bits
        }
        both = {**payload, **meeting}
        with ThreadPoolExecutor(max_workers=1) as pool:
            prefill = pool.submit(http_json, self._urls["prefill"] + path, both)
            answer = http_json(self.server_url(which) + path, both)
            prefill.result()
        return answer

    def flush(self, which: str = "decode") -> None:
        """Empty a server's prefix cache. Raises RequestFailed while it has running requests."""
        http_json(self.server_url(which) + "/flush_cache", {}, timeout_s=60)

    def metrics(self, which: str = "decode") -> str:
        """The Prometheus text of a server that was started with ``--enable-metrics``."""
        return http_json(self.server_url(which) + "/metrics", timeout_s=60)
