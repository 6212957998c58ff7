"""One decode server without a prefill server, for benchmarks: SGLang's fake transfer, requests sent to it
directly. This module never imports sglang.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servers.group import Servers, flags
from servers.server_process import ServerFailed
from servers.sglang_http import RequestFailed, generate_payload, http_json, sse_events

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's marker of requests whose KV is never sent; a batch without an address ends the server."""

FAILURES = (RequestFailed, ServerFailed, RuntimeError, OSError)


def make_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(length)] for length in lengths]


def offload_flags(device: str, *, budget: int, host_gb: float, **config: Any) -> dict[str, Any]:
    if device == "cpu":
        config["transport"] = "graph"
    return {
        "device": device,
        "kv_offload": "scout",
        "kv_offload_budget": budget,
        "kv_offload_host_gb": host_gb,
        "kv_offload_config": json.dumps({"dummy_kv": True, **config}),
    }


class DecodeServer(Servers):
    """A decode server that receives requests directly.

    Args:
        options: flags of ``sglang.launch_server``, its device among them. On the CPU the ring's kernels run in Triton's
            interpreter.
        model_dir, logs, ready_timeout_s: see Servers.
    """

    def __init__(
        self, model_dir: Path, options: Mapping[str, Any], logs: Path, ready_timeout_s: float
    ) -> None:
        arguments = flags(
            disaggregation_mode="decode",
            disaggregation_transfer_backend="fake",
            skip_tokenizer_init=True,
            grammar_backend="none",
            sampling_backend="pytorch",
            **options,
        )
        env = {"TRITON_INTERPRET": "1"} if options["device"] == "cpu" else {}
        super().__init__(
            model_dir, {"decode": arguments}, env=env, log_dir=logs, ready_timeout_s=ready_timeout_s
        )
        self.url = self.server_url("decode")

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, timeout_s: float
    ) -> list[list[tuple[int, float]]]:
        """Greedy, all prompts in one call. Per prompt its tokens and their log-probabilities.

        The first token of each is SGLang's placeholder for what a prefill server would have sent. What decoding begins
        with is made of the request's id in some releases, so ids are the same in every call.
        """
        ids = [f"{len(prompts)}-{row}" for row in range(len(prompts))]
        payload = _payload(prompts, new_tokens, logprobs=True) | {"rid": ids}
        answers = http_json(self.url + "/generate", payload, timeout_s=timeout_s)
        return [
            [(entry[1], entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]
            for answer in answers
        ]

    def token_times(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        timeout_s: float,
        meanwhile: Callable[[], None],
    ) -> list[list[float]]:
        """Arrival times in seconds of each prompt's tokens, all prompts at once; calls ``meanwhile`` twice a second.

        Raises:
            RuntimeError: a request failed or was truncated.
        """
        times: list[list[float]] = [[] for _ in prompts]

        def one(row: int) -> None:
            payload = _payload(prompts[row], new_tokens, stream=True)
            for event in sse_events(self.url + "/generate", payload, timeout_s=timeout_s):
                now = time.monotonic()
                times[row] += [now] * (event["meta_info"]["completion_tokens"] - len(times[row]))

        threads = [
            threading.Thread(target=one, args=(row,), daemon=True) for row in range(len(prompts))
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.5)
        if any(len(row) < new_tokens for row in times):
            done = [len(row) for row in times]
            raise RuntimeError(f"of {new_tokens} tokens each there came {done}")
        return times


def _payload(prompts: Sequence[Any], new_tokens: int, **more: Any) -> dict[str, Any]:
    payload = generate_payload([], new_tokens, **more)
    payload["input_ids"] = prompts
    payload["bootstrap_host"] = FAKE_BOOTSTRAP_HOST
    return payload
