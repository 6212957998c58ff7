"""What recall and pre-computation are worth: one prefill server, a decode server for each mode, the same prompts.

    python benchmark/recall_modes.py --json docs/results/recall_modes.jsonl
    python benchmark/plot.py docs/results/recall_modes.jsonl

Modes are recall off, fixed, profile and adaptive, each with layer-ahead pre-computation, and off, profile and
adaptive without it: among them the four corners of the paper's Figure 12. First a profile is made from the same
prompts and written beside the rows (--profile FILE takes one that is there). Then all servers are started, sized as
those of scripts/demo.sh, and decode in turns, forward and backward, for --rounds rounds. Idle servers sleep.

A row is one run of one mode, from the decode server's step log (sglang_scout/engine/step_log.py):
    recall, precompute, round, budget_tokens, requests, input_tokens, steps, resident_tokens, threshold
    samples_us           from the begin of a step to that of the next one, all requests running, after --skip steps;
                         what a client sees as time per output token
    step_us, gpu_wait_us_per_step, gpu_wait_us_by_layer, recall_wait_us_per_step     means of the same steps
    ratio, ratio_by_layer                      CPU compute ratio of the steps after --skip (paper: tokens computed
                                               on the CPU over the budget)
    attempts             1, or more where requests had not run together
    ratio_from_first, ratio_curve              of all steps but a request's first; mean of the layers by step
    recalled_pages_per_step, recall_bytes_per_step              of all steps but the first
The model's identity, a digest of its weights and the name of the prompts' text are in each row as well.

A model with random weights selects other pages at every step, whatever was recalled. One that has learned to look
things up does not: by default it is benchmark/accuracy/recall_model, with texts that it knows (--tasks).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sglang_scout.core.config_together import keys_without_effect

from progress import Progress
from prompts import describe, make_prompts
from rows import ROOT, Row, Writer, environment, summary
from servers.pd_cluster import PDCluster, flags
from servers.server_process import ends_orderly
from servers.sglang_http import generate_payload
from sglang_scout.cli import profile as profile_command
from sglang_scout.core.profile import FLAG, load_profile, save_profile
from sglang_scout.core.step_log import Step, StepLogFile, ratios_by_age, read_step_log

BENCHMARK = "recall_modes"
PACKAGES = ("sglang", "torch", "sglang-scout")
READY_TIMEOUT_S = 1200.0
TASK_SEED = 777
ATTEMPTS = 3


class NotTogether(Exception):
    """A run that is none: the machine stood still, or not all requests fit."""


def modes(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name to configuration; ``names`` are as in --modes."""
    known: dict[str, dict[str, Any]] = {}
    for recall in ("off", "fixed", "profile", "adaptive"):
        known[recall] = {"recall": recall}
        known[f"{recall}-no-precompute"] = {"recall": recall, "precompute": False}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise SystemExit(f"--modes: {wrong[0]!r} is unknown; choose of {', '.join(known)}")
    return {name: known[name] for name in names}


def task_prompts(count: int, length_tokens: int) -> list[list[int]]:
    """Texts of all retrieval tasks."""
    sys.path.insert(0, str(ROOT / "benchmark" / "accuracy"))
    import tasks

    weights, seeds = dict.fromkeys(tasks.TASKS, 1.0), [[TASK_SEED, i] for i in range(count)]
    texts = [tasks.make_document(weights, length_tokens, seed, 0.05, 1) for seed in seeds]
    return [text.tokens.tolist() for text in texts]


def mixed_prompts(
    model_path: str,
    datasets: Sequence[str | None],
    count: int,
    length_tokens: int,
    skip_tokens: int = 0,
) -> list[list[int]]:
    """Prompts of each text in turn; the first ``skip_tokens`` of each are left out.

    Raises:
        ScoutError: too little text.
    """
    skipped = -(-skip_tokens // length_tokens)
    each = skipped + -(-count // len(datasets))
    sizes = dict(count=each, length_tokens=length_tokens, least_tokens=length_tokens)
    parts = [make_prompts(model_path, dataset, **sizes)[skipped:] for dataset in datasets]
    return [prompt for group in zip(*parts, strict=True) for prompt in group][:count]


def write_prompts(name: str, prompts: list[list[int]]) -> str:
    """A dataset of token ids. Returns its path."""
    path = Path(tempfile.mkdtemp(prefix="sglang-scout-prompts-")) / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    return str(path)


def weights_digest(model_path: str) -> str:
    """16 hex digits over the weights, in the order of the files' names."""
    digest = hashlib.sha256()
    for path in sorted(Path(model_path).glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def make_cluster(
    args: argparse.Namespace,
    names: Sequence[str],
    prompts: list[list[int]],
    logs: Path,
    profile: Path | None = None,
) -> PDCluster:
    """The servers of the modes ``names``. The logs of their steps are ``logs``/MODE.jsonl."""
    longest = max(map(len, prompts)) + args.steps + 256
    total = (len(prompts) + 2) * longest
    decodes = {}
    for name, config in modes(names).items():
        idle = keys_without_effect(precompute=config.get("precompute", True))
        more = {key: value for key, value in args.config.items() if key not in idle}
        settings = {**more, **config, "step_log": str(logs / f"{name}.jsonl")}
        if args.resident_tokens:
            settings["resident_tokens"] = args.resident_tokens
        decodes[name] = flags(kv_offload_config=json.dumps(settings))
        if config["recall"] in ("profile", "adaptive"):
            decodes[name] += [FLAG, str(profile)]
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
        NotTogether: a request came when others had nearly ended.
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
        "gpu_wait_us_by_layer": np.mean([s.gpu_wait_us for s in full], axis=0).round(1).tolist(),
        "recall_wait_us_per_step": mean(full, "recall_wait_us"),
        "ratio": round(float(after.mean()), 4),
        "ratio_by_layer": after.round(4).tolist(),
        "ratio_from_first": round(float(curves[:, 1:].mean()), 4),
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
    """Decode and measure; again, twice at most, where the requests did not run together."""
    attempt = 0
    while True:
        attempt += 1
        before = len(read_step_log(log_path).steps)
        decode(cluster, server, prompts, args.steps + 2)
        log = read_step_log(log_path)
        log = StepLogFile(log.facts, log.steps[before:])
        try:
            return {**measured(log, args.requests, args.steps, args.skip), "attempts": attempt}
        except NotTogether:
            if attempt == ATTEMPTS:
                raise


def make_profile(
    args: argparse.Namespace, prompts: list[list[int]], logs: Path, progress: Progress
) -> Path:
    """The profile of the same workload without recall, beside the rows, and its picture."""
    rows = args.json or Path(tempfile.mkdtemp()) / "recall_modes.jsonl"
    output = rows.with_name(f"{rows.stem}_profile.json")
    progress.say("making the profile")
    with make_cluster(args, ["off"], prompts, logs) as cluster:
        decode(cluster, "decode", prompts, args.steps + 2)
    profile = profile_command.profile_of(read_step_log(logs / "off.jsonl"), args.threshold)
    save_profile(profile, str(output))
    print(profile_command.as_text(profile))
    profile_command.draw(profile, output.with_suffix(".png"))
    return output


def run(args: argparse.Namespace, writer: Writer) -> None:
    progress = Progress()
    prompts = make_prompts(
        args.model_path,
        args.dataset,
        count=args.requests,
        length_tokens=args.input_len,
        least_tokens=args.budget + 64,  # some pages stay outside of the budget
    )
    logs = Path(tempfile.mkdtemp(prefix="sglang-scout-recall-"))
    path = (args.profile or make_profile(args, prompts, logs, progress)).resolve()
    profile = load_profile(str(path))
    shared = {
        "model": profile.model,
        "identity": msgspec.to_builtins(profile.identity),
        "weights": weights_digest(args.model_path),
        "text": describe(args.dataset),
        "budget_tokens": args.budget,
        "requests": args.requests,
        "input_tokens": args.input_len,
        "steps": args.steps,
        "skipped_steps": args.skip,
        "resident_tokens": args.resident_tokens or args.budget * args.requests,
        "threshold": profile.threshold,
        "intervals": profile.intervals,
        "config": args.config,
    }
    names = list(modes(args.modes))
    progress.say(f"starting {len(names) + 1} servers; logs are in {logs}")
    server_of = dict(zip(names, ["decode", *names[1:]], strict=True))
    with make_cluster(args, names, prompts, logs, path) as cluster:
        progress.say(f"ready after {cluster.startup_s:.0f} s")
        for name in names:
            decode(cluster, server_of[name], prompts, 4)
        progress.say("measuring")
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                config = modes([name])[name]
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
    add("--json", type=Path, metavar="FILE", help="rows; the profile is written beside them")
    add("--model-path", help="folder of a model (default: the retrieval model, with --tasks)")
    add("--dataset", nargs="+", metavar="FILE", help="texts, see prompts.py; in turn")
    add("--tasks", action="store_true", help="texts of benchmark/accuracy/tasks.py as prompts")
    add("--profile", type=Path, metavar="FILE", help="take this one (default: make one)")
    add("--threshold", type=float, default=0.12, help="of the profile that is made")
    add("--budget", type=int, default=512, metavar="TOKENS")
    add("--resident-tokens", type=int, metavar="TOKENS", help="default: budget x requests")
    add("--requests", type=int, default=16)
    add("--input-len", type=int, default=4096, metavar="TOKENS")
    add("--steps", type=int, default=256)
    add("--skip", type=int, default=128, help="steps before those that count")
    add("--rounds", type=int, default=3)
    add("--dtype", default="bfloat16")
    add(
        "--modes",
        nargs="+",
        default=["off", "fixed", "profile", "adaptive", "off-no-precompute",
                 "profile-no-precompute", "adaptive-no-precompute"],
    )  # fmt: skip
    add("--config", type=json.loads, default={}, metavar="JSON", help="more keys for every mode")
    add("--quick", action="store_true", help="one round")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds = 1
    if args.model_path is None:
        args.model_path = str(ROOT / "benchmark" / "accuracy" / "recall_model")
        args.tasks = args.tasks or args.dataset is None
    if args.tasks:
        prompts = task_prompts(args.requests, args.input_len)
        args.dataset = write_prompts("retrieval-tasks", prompts)
    elif args.dataset is not None:
        prompts = mixed_prompts(args.model_path, args.dataset, args.requests, args.input_len)
        args.dataset = write_prompts("-".join(map(describe, args.dataset)), prompts)
    writer = Writer(args.json, environment(BENCHMARK, PACKAGES))
    try:
        with ends_orderly():
            run(args, writer)
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
