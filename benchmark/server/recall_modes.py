"""Benefit of recall and pre-computation: one prefill server, a decode server per mode, the same prompts.

    python -m benchmark.server.recall_modes --modes off --logs LOGS               # the step log of a profile's run
    sglang-scout profile ...                                                      # makes PROFILE from LOGS/off.jsonl
    python -m benchmark.server.recall_modes --profile PROFILE --json docs/results/recall_modes.jsonl
    python -m benchmark.plot docs/results/recall_modes.jsonl

Modes are recall off, fixed, profile and adaptive, each with layer-ahead pre-computation, and off, profile and
adaptive without it: among them the four corners of the paper's Figure 12. All servers are started, sized as those of
scripts/demo.sh, and decode in turns, forward and backward, for --rounds rounds. Idle servers sleep.

A row is one run of one mode, from the decode server's step log (sglang_scout/engine/step_log.py):
    recall, precompute, round, budget_tokens, requests, input_tokens, steps, resident_tokens, threshold
    samples_us           from the start of a step to that of the next one, all requests running, after --skip steps;
                         the client's time per output token
    step_us, gpu_wait_us_per_step              means of the same steps
    ratio                                      CPU compute ratio of the steps after --skip (paper: tokens computed
                                               on the CPU over the budget)
    attempts             1, or more if requests had not run concurrently
    ratio_curve                                of all steps but a request's first; mean of the layers by step
    recalled_pages_per_step, recall_bytes_per_step              of all steps but the first

A model with random weights selects different pages at every step, regardless of recall. A trained retrieval model
does not: the default is benchmark/accuracy/recall_model, on texts of its training distribution.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmark.accuracy import tasks
from benchmark.progress import Progress
from benchmark.rows import ROOT, Row, Writer, environment, summary, weights_digest
from servers.pd_cluster import PDCluster, flags
from servers.server_process import ends_orderly
from servers.sglang_http import generate_payload
from sglang_scout.core.config import idle_keys
from sglang_scout.core.profile import FLAG, load_profile
from sglang_scout.core.step_log import Step, StepLogFile, ratios_by_age, read_step_log

RECALL_MODEL = ROOT / "benchmark" / "accuracy" / "recall_model"
THRESHOLD = 0.12  # the paper's, of the CPU compute ratio
PACKAGES = ("sglang", "torch", "sglang-scout")
READY_TIMEOUT_S = 1200.0
TASK_SEED = 777
ATTEMPTS = 3


class NotTogether(Exception):
    """An invalid run: the machine stalled, or not all requests fit."""


MODES: dict[str, dict[str, Any]] = {
    recall + suffix: {"recall": "fixed" if recall == "profile" else recall, **more}
    for suffix, more in (("", {}), ("-no-precompute", {"precompute": False}))
    for recall in ("off", "fixed", "profile", "adaptive")
    if recall + suffix != "fixed-no-precompute"
}


def task_prompts(count: int, length_tokens: int) -> list[list[int]]:
    """Texts of all retrieval tasks."""
    weights, seeds = dict.fromkeys(tasks.TASKS, 1.0), [[TASK_SEED, i] for i in range(count)]
    texts = [tasks.make_document(weights, length_tokens, seed, 0.05, 1) for seed in seeds]
    return [text.tokens.tolist() for text in texts]


def file_prompts(
    model_path: str, files: Sequence[Path], count: int, length_tokens: int
) -> list[list[int]]:
    """Pieces of the files' texts, each file in turn."""
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    texts = [tokenizer.encode(path.read_text(), add_special_tokens=False).ids for path in files]
    prompts = []
    for i in range(count):
        at = i // len(texts) * length_tokens
        prompts.append(texts[i % len(texts)][at : at + length_tokens])
        if len(prompts[-1]) < length_tokens:
            raise SystemExit(f"{files[i % len(texts)]} is too short for so many prompts")
    return prompts


def make_cluster(args: argparse.Namespace, prompts: list[list[int]], logs: Path) -> PDCluster:
    """All servers. The logs of the steps are ``logs``/MODE.jsonl."""
    longest = max(map(len, prompts)) + args.steps + 256
    total = (len(prompts) + 2) * longest
    decodes = {}
    for name in args.modes:
        config = MODES[name]
        idle = idle_keys({**args.config, **config})
        more = {key: value for key, value in args.config.items() if key not in idle}
        settings = {**more, **config, "step_log": str(logs / f"{name}.jsonl")}
        if args.resident_tokens:
            settings["resident_tokens"] = args.resident_tokens
        decodes[name] = flags(kv_offload_config=json.dumps(settings))
        if name.startswith(("profile", "adaptive")):
            decodes[name] += [FLAG, str(args.profile.resolve())]
    first, *others = decodes
    return PDCluster(
        args.model_path,
        router=False,
        dtype=args.dtype,
        log_dir=logs,
        max_running_requests=len(prompts),
        max_total_tokens=total,
        server_args=flags(
            mem_fraction_static=0.85, kv_offload="scout", kv_offload_budget=args.budget
        ),
        prefill_args=flags(max_prefill_tokens=total, chunked_prefill_size=-1),
        decode_args=decodes[first],
        more_decodes={name: decodes[name] for name in others},
        ready_timeout_s=READY_TIMEOUT_S,
    )


def decode(cluster: PDCluster, server: str, prompts: list[list[int]], tokens: int) -> None:
    """All prompts at once to one decode server. Raises RequestFailed or OSError."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        payloads = [generate_payload(prompt, tokens) for prompt in prompts]
        for answer in pool.map(lambda p: cluster.ask_pair(p, server), payloads):
            assert len(answer["output_ids"]) == tokens, answer["meta_info"]


def measured(log: StepLogFile, requests: int, steps: int, skip: int) -> Row:
    """The results of one run, whose steps are ``log``'s.

    Raises:
        NotTogether: a request arrived when others had nearly finished.
    """
    full = [s for s in log.steps if len(s.ages) == requests and min(s.ages) >= skip]
    starts = {s.step: s.start_us for s in log.steps}
    samples = [starts[s.step + 1] - s.start_us for s in full if s.step + 1 in starts]
    later = [s for s in log.steps if min(s.ages) >= 1]
    curves, rows = ratios_by_age(log, steps + 1)
    if not rows.all() or not samples:
        raise NotTogether("the requests did not all run together; fewer may fit than were sent")
    after = (curves[:, skip:] * rows[skip:]).sum(axis=1) / rows[skip:].sum()

    def mean(values: Sequence[Step], name: str) -> float:
        found = [getattr(s, name) for s in values]
        return round(float(np.mean([np.sum(x) for x in found])), 2)

    return {
        **summary(samples),
        "step_us": mean(full, "step_us"),
        "gpu_wait_us_per_step": mean(full, "gpu_wait_us"),
        "ratio": round(float(after.mean()), 4),
        "ratio_curve": curves[:, 1:].mean(axis=0).round(4).tolist(),
        "recalled_pages_per_step": mean(later, "recalled_pages"),
        "recall_bytes_per_step": mean(later, "recall_bytes"),
    }


def one_run(
    cluster: PDCluster,
    server: str,
    prompts: list[list[int]],
    log_path: Path,
    args: argparse.Namespace,
) -> Row:
    """Decode and measure; retried at most twice if the requests did not run concurrently."""
    attempt = 0
    while True:
        attempt += 1
        before = len(read_step_log(log_path).steps)
        # The first token is from the prefill server, and the last two steps are logged with the next steps.
        decode(cluster, server, prompts, args.steps + 4)
        log = read_step_log(log_path)
        steps = itertools.dropwhile(lambda step: min(step.ages) > 0, log.steps[before:])
        log = StepLogFile(log.facts, list(steps))
        try:
            return {**measured(log, args.requests, args.steps, args.skip), "attempts": attempt}
        except NotTogether:
            if attempt == ATTEMPTS:
                raise


def run(args: argparse.Namespace, prompts: list[list[int]], writer: Writer) -> None:
    progress = Progress()
    shared = {
        "model": Path(args.model_path).name,
        "weights": weights_digest(args.model_path),
        "text": [path.name for path in args.dataset] or "retrieval tasks",
        "budget_tokens": args.budget,
        "requests": args.requests,
        "input_tokens": args.input_len,
        "steps": args.steps,
        "skipped_steps": args.skip,
        "resident_tokens": args.resident_tokens or args.budget * args.requests,
        "threshold": THRESHOLD,
        "config": args.config,
    }
    if args.profile:
        shared["intervals"] = load_profile(str(args.profile)).intervals
    logs = args.logs or Path(tempfile.mkdtemp(prefix="sglang-scout-recall-"))
    logs.mkdir(parents=True, exist_ok=True)
    names = args.modes
    progress.say(f"starting {len(names) + 1} servers; logs are in {logs}")
    server_of = dict(zip(names, ["decode", *names[1:]], strict=True))
    with make_cluster(args, prompts, logs) as cluster:
        progress.say(f"ready after {cluster.startup_s:.0f} s")
        for name in names:
            decode(cluster, server_of[name], prompts, 4)
        progress.say("measuring")
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                config = MODES[name]
                row = writer.add(
                    name,
                    **shared,
                    **one_run(cluster, server_of[name], prompts, logs / f"{name}.jsonl", args),
                    recall=config["recall"],
                    precompute=config.get("precompute", True),
                    round=number,
                )
                progress.say(
                    f"round {number + 1}: {name:<24} ratio {row['ratio']:.3f}, "
                    f"{row['median_us']:.0f} us a token, GPU waits "
                    f"{row['gpu_wait_us_per_step']:.0f} us, "
                    f"{row['recalled_pages_per_step']:.1f} pages recalled a step"
                )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write rows to FILE")
    add("--model-path", default=str(RECALL_MODEL), help="folder (default: the retrieval model)")
    add(
        "--dataset",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="texts, used in turn (default: those of tasks.py)",
    )
    add("--profile", type=Path, metavar="FILE", help="intervals from `sglang-scout profile`")
    add(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="folder for server and step logs (default: a temporary folder)",
    )
    add("--budget", type=int, default=512, metavar="TOKENS")
    add("--resident-tokens", type=int, metavar="TOKENS", help="default: budget x requests")
    add("--requests", type=int, default=16)
    add("--input-len", type=int, default=4096, metavar="TOKENS")
    add("--steps", type=int, default=256)
    add("--skip", type=int, default=128, help="warm-up steps, not counted")
    add("--rounds", type=int, default=3)
    add("--dtype", default="bfloat16")
    add("--modes", nargs="+", default=list(MODES), choices=MODES)
    add("--config", type=json.loads, default={}, metavar="JSON", help="more keys for every mode")
    args = parser.parse_args(argv)
    if args.profile is None and any("profile" in name or "adaptive" in name for name in args.modes):
        parser.error("--profile is missing, which modes profile and adaptive start from")
    if args.dataset:
        prompts = file_prompts(args.model_path, args.dataset, args.requests, args.input_len)
    else:
        prompts = task_prompts(args.requests, args.input_len)
    writer = Writer(args.json, environment("recall_modes", PACKAGES))
    try:
        with ends_orderly():
            run(args, prompts, writer)
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
