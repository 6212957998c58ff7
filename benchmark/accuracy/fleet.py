"""The servers of a comparison: stock SGLang, and decode servers of several policies sharing one prefill server.

The prefill server keeps prefilled texts in its radix cache, so a text is prefilled once for any number
of policies. `full` is a separate server, started without any of our flags.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.accuracy.policies import FULL, Setting
from benchmark.accuracy.questions import FORCING_ENVIRONMENT, FORCING_FLAGS
from servers.pd_cluster import PDCluster, flags
from servers.sglang_http import RequestFailed, http_json
from servers.single_server import SingleServer

READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 3600.0
TRIES = 3
# How long the prefill server waits for a transfer that a decode server abandoned on a busy machine.
PATIENCE = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60"}


class Fleet:
    """Context manager that starts and stops a server for each setting; each runs one request at a time.

    Args:
        model_dir: folder of the model.
        settings: not empty; names must be distinct.
        dtype: as for SGLang's flag.
        longest_tokens: of a request, prompt and answer.
        threads: of each server.
        config: further keys of every ``--kv-offload-config``.
    """

    def __init__(
        self,
        model_dir: str | Path,
        settings: Sequence[Setting],
        *,
        dtype: str,
        longest_tokens: int,
        threads: int,
        config: Mapping[str, Any],
    ) -> None:
        self.log_dir = Path(tempfile.mkdtemp(prefix="sglang-scout-accuracy-"))
        self.startup_s = 0.0
        # Room for a text and the next one; on the prefill server for a few that are still in use.
        text_tokens = longest_tokens + 1024
        sizes: dict[str, Any] = {"max_total_tokens": 2 * text_tokens, "dtype": dtype}
        whole_prompts = flags(max_prefill_tokens=text_tokens, chunked_prefill_size=-1)
        shared = [*flags(mem_fraction_static=0.85), *FORCING_FLAGS]
        environment = {"OMP_NUM_THREADS": str(threads), **FORCING_ENVIRONMENT}
        sparse = [setting for setting in settings if setting.policy != FULL]
        self._stock: SingleServer | None = None
        if len(sparse) < len(settings):
            # SGLang without --kv-offload, prefill and decode in one server.
            stock = flags(max_running_requests=1, attention_backend="torch_native", **sizes)
            self._stock = SingleServer(
                "stock",
                model_dir,
                [*stock, *whole_prompts, *shared],
                device="cpu",
                log=self.log_dir / "stock.log",
                environment=environment,
                ready_timeout_s=READY_TIMEOUT_S,
            )
        self._cluster: PDCluster | None = None
        self._server_of: dict[str, str] = {}
        if sparse:
            first, *others = (s.name for s in sparse)
            self._server_of = {first: "decode", **{name: name for name in others}}
            name = Path(model_dir).name
            decode_flags = {s.name: s.decode_flags(dict(config), name) for s in sparse}
            prefill = flags(
                kv_offload="scout",
                max_running_requests=len(sparse) + 1,
                max_total_tokens=4 * text_tokens,
            )
            self._cluster = PDCluster(
                model_dir,
                router=False,
                log_dir=self.log_dir,
                max_running_requests=1,
                server_args=shared,
                prefill_args=[*prefill, *whole_prompts],
                decode_args=decode_flags.pop(first),
                more_decodes=decode_flags,
                env={**PATIENCE, **environment},
                ready_timeout_s=READY_TIMEOUT_S,
                **sizes,
            )

    def __enter__(self) -> Fleet:
        begin = time.monotonic()
        try:
            if self._stock is not None:
                self._stock.begin()
            if self._cluster is not None:
                self._cluster.start()
            if self._stock is not None:
                self._stock.wait_ready()
        except BaseException as failure:
            self.__exit__(failure)
            raise
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()
        if failure[0] is None:
            shutil.rmtree(self.log_dir, ignore_errors=True)
        else:
            print(f"the servers' logs are in {self.log_dir}", file=sys.stderr)

    def stop(self) -> None:
        """Stop all servers; idempotent."""
        try:
            if self._stock is not None:
                self._stock.stop()
        finally:
            if self._cluster is not None:
                self._cluster.stop()

    def ask(self, setting: Setting, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return the answer. Raises RequestFailed, OSError or ServerFailed.

        On a busy machine SGLang may abort the transfer of a prompt; then the request is retried.
        """
        for _ in range(TRIES - 1):
            try:
                return self._ask(setting, payload)
            except RequestFailed as error:
                if "status 500" not in str(error):
                    raise
                self.check()
        return self._ask(setting, payload)

    def _ask(self, setting: Setting, payload: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if setting.policy == FULL:
                assert self._stock is not None
                url = self._stock.url + "/generate"
                return dict(http_json(url, dict(payload), timeout_s=REQUEST_TIMEOUT_S))
            assert self._cluster is not None
            return dict(self._cluster.ask_pair(payload, self._server_of[setting.name]))
        except OSError:
            self.check()
            raise

    def check(self) -> None:
        """Raises ServerFailed, with the end of its log, if a server has ended."""
        servers = self._cluster.all_servers() if self._cluster is not None else []
        for server in [*servers, *([self._stock.process] if self._stock is not None else [])]:
            server.check()

    def counters(self, setting: Setting) -> dict[str, Any]:
        """The offload counters of a setting's decode server; {} for `full`."""
        if setting.policy == FULL or self._cluster is None:
            return {}
        return dict(self._cluster.kv_offload(self._server_of[setting.name]))
