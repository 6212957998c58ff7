"""A prefill server, a decode server and the SGLang router on this machine: for ``sglang-scout profile``,
the demo, the benchmarks and the tests.

    with PDCluster(model_dir, decode_args=["--kv-offload", "scout"]) as cluster:
        answers = cluster.generate([[1, 2, 3], [4, 5]], max_new_tokens=32)
        print(cluster.kv_offload())

Servers are started by ``python -m sglang.launch_server``, as by a user; this module never imports sglang.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from servers.group import HOST, ServerGroup, flags
from servers.server_process import ServerProcess, free_ports, wait_healthy
from servers.sglang_http import Generation, generate, http_json

NO_PROXY = ("NO_PROXY", "no_proxy")

# ``python -m sglang_router.launch_router`` without its one costly import: the Python load balancer
# for debugging, which imports all of SGLang (10 s) and is not the router that we start.
ROUTER_MAIN = (
    "import sys, types;"
    "stub = types.ModuleType('sglang_router.mini_lb'); stub.MiniLoadBalancer = None;"
    "sys.modules[stub.__name__] = stub;"
    "from sglang_router.launch_router import main; main()"
)


SIZES = {"dtype": "float32", "max_total_tokens": 65536, "max_running_requests": 32}
"""Flags of both servers. The KV capacity is never left to SGLang: on a CPU it would take most of the RAM."""


class PDCluster(ServerGroup):
    """Prefill server, decode servers and router; see ServerGroup.

    Args:
        model_dir: folder of the model, which also holds its tokenizer.
        prefill_args, decode_args: more flags of one server; a flag given here wins over a default.
        more_decodes: further decode servers of the same prefill server, name to flags; :meth:`ask_pair` sends a request
            to one.
        server_args: more flags for both servers.
        router: start the router and send requests through it; else only the servers run.
        device: as SGLang's flag.
        prefill_device: of the prefill server, if not ``device``.
        one_by_one: start a server only when the previous one is ready, the prefill server first. For servers that share
            a GPU: each takes a share of the free memory.
        env: environment variables of all servers.
        log_dir: for the log files. Default: a new temporary folder, whose path is reported after a failure, and
            which is removed after a ``with`` block without one.
        on_ready: called with the name of each server that answers.
        sizes: as ``SIZES``, in place of these.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        more_decodes: Mapping[str, Sequence[str]] | None = None,
        server_args: Sequence[str] = (),
        router: bool = True,
        router_args: Sequence[str] = (),
        device: str = "cpu",
        prefill_device: str | None = None,
        one_by_one: bool = False,
        env: Mapping[str, str] | None = None,
        log_dir: str | Path | None = None,
        ready_timeout_s: float = 600.0,
        on_ready: Callable[[str], None] = lambda name: None,
        **sizes: Any,
    ) -> None:
        prefill_device = prefill_device or device
        super().__init__(model_dir, (device, prefill_device), env, ready_timeout_s)
        self._owns_log_dir = log_dir is None
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="sglang-scout-logs-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.on_ready, self.one_by_one, self.startup_s = on_ready, one_by_one, 0.0

        wanted = {"prefill": prefill_args, "decode": decode_args, **(more_decodes or {})}
        ports = free_ports(3 + 2 * len(wanted))
        self.bootstrap_port, router_port, prometheus_port, *ports = ports
        common = flags(
            model_path=model_dir,
            host=HOST,
            **SIZES | sizes,
            # An idle SGLang scheduler busy-polls, and on two cores it would slow the other servers. It applies only
            # when the server holds no request.
            sleep_on_idle=True,
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=self.bootstrap_port,
        )
        self._urls: dict[str, str] = {}
        self.servers: dict[str, ServerProcess] = {}
        for name, more in wanted.items():
            mode = "prefill" if name == "prefill" else "decode"
            where, port = prefill_device if name == "prefill" else device, ports.pop()
            # SGLang's own NCCL port is free when its launcher starts, but is bound by the scheduler seconds later.
            own = dict(device=where, port=port, disaggregation_mode=mode, nccl_port=ports.pop())
            command = [sys.executable, "-m", "sglang.launch_server", *common, *server_args]
            command += [*flags(**own), *more]
            self._urls[name] = f"http://{HOST}:{port}"
            self.servers[name] = self._server(name, command, self.environment(where))
        # Of the router and of clients, which would ask a proxy for the servers; the router reads NO_PROXY first.
        self.client_environment = self.environment(device) | dict.fromkeys(NO_PROXY, HOST)
        self.router: ServerProcess | None = None
        if router:
            own = flags(port=router_port, prometheus_port=prometheus_port)
            self._add_router(router_port, [*own, *router_args])

    def _add_router(self, port: int, more: Sequence[str]) -> None:
        self._urls["router"] = f"http://{HOST}:{port}"
        command = [sys.executable, "-c", ROUTER_MAIN, "--pd-disaggregation", "--host", HOST]
        command += flags(policy="round_robin", worker_startup_check_interval=1)
        command += flags(decode=self._urls["decode"])
        command += ["--prefill", self._urls["prefill"], str(self.bootstrap_port), *more]
        self.router = self._server("router", command, self.client_environment)

    def _server(self, name: str, command: list[str], environment: dict[str, str]) -> ServerProcess:
        return ServerProcess(name, command, environment, self.log_dir / f"{name}.log")

    @property
    def url(self) -> str:
        """The router's URL, for requests."""
        return self._urls["router"]

    def server_url(self, which: str) -> str:
        return self._urls[which]

    def __exit__(self, *failure: object) -> None:
        self.stop()
        if failure[0] is not None:
            print(f"the servers' logs are in {self.log_dir}", file=sys.stderr)
        elif self._owns_log_dir:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def start(self) -> None:
        begin = time.monotonic()
        deadline = begin + self.ready_timeout_s
        if not self.one_by_one:
            for server in self.servers.values():
                server.start()
        for name, server in self.servers.items():
            if self.one_by_one:
                server.start()
            wait_healthy(server, self._urls[name] + "/health", deadline, self.all_servers())
            self.on_ready(name)
        if self.router is not None:
            # Only now: it checks its workers when it starts, and again only after a while.
            self.router.start()
            wait_healthy(self.router, self.url + "/readiness", deadline, self.all_servers())
        self.startup_s = time.monotonic() - begin

    def restart(self, name: str) -> None:
        """Restart an ended server, or the ``router``, and return when it is ready.

        Same flags and ports. Call it like :meth:`start`. Raises ServerFailed.
        """
        server = self.servers[name] if name in self.servers else self.router
        assert server is not None
        server.restart()
        path = "/health" if name in self.servers else "/readiness"
        wait_healthy(server, self._urls[name] + path, time.monotonic() + self.ready_timeout_s)

    def all_servers(self) -> list[ServerProcess]:
        return [*self.servers.values(), *([self.router] if self.router is not None else [])]

    def generate(
        self, prompts: Sequence[Sequence[int]], which: str = "router", **options: Any
    ) -> list[Generation]:
        """Send all prompts at once, through the router or as :meth:`ask_pair` to the decode server
        ``which``; see ``sglang_http.generate``."""
        send = partial(self.ask_pair, which=which)
        if which == "router":
            send = partial(http_json, self.url + "/generate")
        return generate(send, prompts, **options)

    def ask_pair(
        self, payload: Mapping[str, Any], which: str = "decode", path: str = "/generate"
    ) -> Any:
        """One request to the prefill server and the decode server ``which``, as the router would.

        Returns the decode server's answer. Raises RequestFailed or OSError.
        """
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

    def kv_offload(self, which: str = "decode") -> dict[str, Any]:
        """The offload counters of a server. KeyError when it runs without ``--kv-offload``."""
        info = http_json(self.server_url(which) + "/server_info", timeout_s=60)
        return info["internal_states"][0]["kv_offload"]

    def flush(self, which: str = "decode") -> None:
        """Empty a server's prefix cache. Raises RequestFailed while it has running requests."""
        http_json(self.server_url(which) + "/flush_cache", {}, timeout_s=60)

    def metrics(self, which: str = "decode") -> str:
        """The Prometheus text of a server that was started with ``--enable-metrics``."""
        return http_json(self.server_url(which) + "/metrics", timeout_s=60)
