"""Decode servers of several policies that share one prefill server, which keeps prefilled texts in its radix cache: a
text is prefilled once for any number of policies."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.accuracy.policies import Setting
from benchmark.accuracy.questions import FORCING_ENVIRONMENT, FORCING_FLAGS
from servers.group import flags
from servers.pd_cluster import PDCluster
from servers.sglang_http import RequestFailed

TRIES = 3
# How long the prefill server waits for a transfer that a decode server abandoned on a busy machine.
PATIENCE = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60"}


class Fleet(PDCluster):
    """A decode server for each of ``settings``, which are distinct; each runs one request at a time.

    Args:
        settings: of one ``prefill_policy``.
        args: of the suite: model_path, lengths, dtype, threads, config.
    """

    def __init__(self, settings: Sequence[Setting], args: argparse.Namespace) -> None:
        # Room for a text with its answer and the next one; on the prefill server for a few that are still in use.
        text_tokens = max(args.lengths) + 1152
        whole_prompts = flags(max_prefill_tokens=text_tokens, chunked_prefill_size=-1)
        model = Path(args.model_path).name
        names = "decode", *(setting.name for setting in settings[1:])
        self._server_of = dict(zip(settings, names, strict=True))
        servers = {
            name: setting.decode_flags(dict(args.config), model)
            for setting, name in self._server_of.items()
        }
        servers["prefill"] = whole_prompts + flags(
            kv_offload=settings[0].prefill_policy,
            max_running_requests=len(settings) + 1,
            max_total_tokens=4 * text_tokens,
        )
        sizes = flags(dtype=args.dtype, max_running_requests=1, max_total_tokens=2 * text_tokens)
        super().__init__(
            args.model_path,
            servers,
            server_args=[*sizes, *flags(mem_fraction_static=0.85), *FORCING_FLAGS],
            router_args=None,
            env={**PATIENCE, "OMP_NUM_THREADS": str(args.threads), **FORCING_ENVIRONMENT},
        )

    def ask(self, setting: Setting, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return the answer. Raises RequestFailed, OSError or ServerFailed.

        On a busy machine SGLang may abort the transfer of a prompt; then the request is retried.
        """
        said = ""
        for _ in range(TRIES):
            try:
                return dict(self.ask_pair(payload, self._server_of[setting]))
            except (RequestFailed, OSError) as error:
                for server in self.all_servers():
                    server.check()
                if "status 500" not in (said := str(error)):
                    raise
        raise RequestFailed(f"{TRIES} times: {said}")

    def counters(self, setting: Setting) -> dict[str, Any]:
        """The offload counters of a setting's decode server."""
        return dict(self.kv_offload(self._server_of[setting]))
