"""Runs a workload on a prefill and a decode server of its own and returns the decode server's step log."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from sglang_scout.cli.device import CPU, Placement
from sglang_scout.cli.pd_cluster import PDCluster, flags
from sglang_scout.cli.progress import Progress
from sglang_scout.cli.server_process import ServerFailed
from sglang_scout.cli.sglang_http import RequestFailed, generate_payload, http_json
from sglang_scout.cli.step_log_file import StepLogFile, read_step_log
from sglang_scout.core.errors import ScoutError

POLL_S = 0.5
MARGIN_TOKENS = 256
PREFILL_BATCH_TOKENS = 131072
"""Up to so many, on the CPU, all prompts are prefilled in one batch, so that they begin to decode together."""


class RunFailed(ScoutError):
    """The servers or a request failed; the message says how."""


def run_workload(
    model_path: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    where: Placement,
    budget_tokens: int,
    config: dict[str, Any],
    decode_flags: Sequence[str] = (),
    dtype: str = "auto",
    server_args: Sequence[str] = (),
    progress: Progress,
) -> StepLogFile:
    """Decode ``steps`` steps after each request's first one, all requests together.

    Args:
        prompts: token ids.
        where: the servers' devices.
        config: of the decode server, without ``step_log``.
        server_args: more flags of both servers, word by word.
    Raises:
        RunFailed: with the end of the servers' logs.
        KeyboardInterrupt: after all processes have ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="sglang-scout-profile-"))
    kept = False
    cluster = make_cluster(
        model_path, prompts, steps, folder, where=where, budget_tokens=budget_tokens,
        config=config, decode_flags=decode_flags, dtype=dtype, server_args=server_args,
    )  # fmt: skip
    try:
        progress.say(f"starting the servers, {where}, recall {config['recall']!r}")
        try:
            cluster.start()
            progress.say(
                f"ready after {cluster.startup_s:.0f} s, prefilling {len(prompts)} prompts"
            )
            _decode(cluster, prompts, steps, folder / "steps.jsonl", progress)
        finally:
            cluster.stop(grace_s=0.0)
        return read_step_log(folder / "steps.jsonl")
    except (ServerFailed, RequestFailed, OSError) as error:
        kept = True
        tails = "" if isinstance(error, ServerFailed) else "\n" + cluster.tails(15)
        without = "" if where.decode == CPU else "; --device cpu runs it without the GPU"
        raise RunFailed(f"profile: {error}{tails}\nlogs are in {folder}{without}") from error
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def make_cluster(
    model_path: str,
    prompts: Sequence[Sequence[int]],
    steps: int,
    folder: Path,
    *,
    where: Placement,
    budget_tokens: int,
    config: dict[str, Any],
    decode_flags: Sequence[str],
    dtype: str,
    server_args: Sequence[str],
) -> PDCluster:
    """The servers of :func:`run_workload`; their logs and the step log go to ``folder``."""
    longest = max(map(len, prompts)) + steps + MARGIN_TOKENS
    total = (len(prompts) + 2) * longest
    prefill, decode = where.memory(cpu_share=0.85)
    if where.prefill == CPU and total <= PREFILL_BATCH_TOKENS:
        prefill |= {"max_prefill_tokens": total, "chunked_prefill_size": -1}
    prefill_args = [*flags(**prefill), *server_args]
    decode_args = [*flags(**decode), *server_args]
    # Of a decode server's keys this one concerns both.
    of_prefill = {key: config[key] for key in ("digest",) if key in config} | where.prefill_config
    if of_prefill:
        prefill_args += flags(kv_offload_config=json.dumps(of_prefill))
    settings = json.dumps({**config, "step_log": str(folder / "steps.jsonl")})
    decode_args += [*flags(kv_offload_config=settings), *decode_flags]
    return PDCluster(
        model_path,
        device=where.decode,
        prefill_device=where.prefill,
        one_by_one=where.one_gpu_for_both,
        dtype=dtype,
        log_dir=folder,
        max_running_requests=len(prompts),
        max_total_tokens=total,
        server_args=flags(kv_offload="scout", kv_offload_budget=budget_tokens),
        prefill_args=prefill_args,
        decode_args=decode_args,
        # Busy with a long prefill on a CPU, a server answers no health check for minutes.
        router_args=flags(health_failure_threshold=1000),
        ready_timeout_s=where.ready_timeout_s,
    )


def _decode(
    cluster: PDCluster,
    prompts: Sequence[Sequence[int]],
    steps: int,
    log_path: Path,
    progress: Progress,
) -> None:
    """Sends all prompts and reports until all are answered. Raises the first failure."""
    # The first token is the prefill server's, and the first step here is not one of ``steps``.
    payloads = [generate_payload(prompt, steps + 2) for prompt in prompts]
    pool = ThreadPoolExecutor(max_workers=len(prompts))
    try:
        url = cluster.url + "/generate"
        asked = [pool.submit(http_json, url, payload, timeout_s=86400) for payload in payloads]
        while True:
            done, pending = wait(asked, timeout=POLL_S, return_when=FIRST_EXCEPTION)
            for server in cluster.all_servers():
                server.check()
            _raise_failure(done)
            progress.update(_state(log_path, len(prompts), steps))
            if not pending:
                return
    finally:
        # Not waiting for them: the servers are about to be stopped, which ends the requests.
        pool.shutdown(wait=False, cancel_futures=True)


def _raise_failure(done: set[Future[Any]]) -> None:
    for answer in done:
        meta = answer.result()["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") != "length":
            raise RequestFailed(f"a request ended early: {reason}")


def _state(log_path: Path, requests: int, steps: int) -> str:
    """How far the requests are, from the last line of the log."""
    log = read_step_log(log_path)
    last = log.steps[-1] if log.steps else None
    # The servers' own warm-up requests fit the budget.
    ages = (
        [
            age
            for age, pages in zip(last.ages, last.full_pages, strict=True)
            if pages > log.budget_pages
        ]
        if last
        else []
    )
    if last is None or not ages:
        return f"prefilling {requests} prompts"
    ratio = sum(map(sum, last.cpu_pages)) / (len(ages) * log.num_layers * log.budget_pages)
    return (
        f"step {min(max(ages), steps)} of {steps}, {len(ages)} of {requests} requests, "
        f"CPU compute ratio {ratio:.3f}"
    )
