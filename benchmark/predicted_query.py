"""How good predicted queries are, per layer, on any model that the servers load (paper Table 1).

    python benchmark/predicted_query.py --model-path DIR --json FILE [--predictor-file OUT.npz]

Starts a prefill and a decode server with ``--kv-offload scout`` twice. The first run decodes ``--fit-tokens`` tokens
and keeps their layer inputs, from which a learned correction is fitted (``sglang_scout.core.fit``). The second
decodes other prompts with the recorder on (key ``quality``, ``engine/quality.py``), which compares all predictors on
the same steps: `next_layer` (the paper's), `extrapolate` and `learned`. What serves meanwhile is `next_layer`.

Workloads: ``text``, the files of --dataset in turn, or prose and code of Python's standard library; ``retrieval``, the
questions of benchmark/accuracy/tasks.py, of which only the answers are decoded, for a model that was trained on them.
The prompts of the two runs differ.

Rows (format: rows.py, untimed), one for each layer from 1 on; impl is the predictor:
    model, weights, workload, text, layer, layers, dtype
    steps, tokens             decode steps, and tokens (rows of steps), in the means
    cosine                    of predicted and real query, mean over query heads and tokens
    at                        per k (pages), where the context has more: tokens; overlap of the page sets that predicted
                              and real query select, without the pages that are always selected; and the share of the
                              attention weight that lies in the selected pages and the page being filled: mass (by the
                              predicted query), mass_real (by the real one), mass_best (the k best pages)
    fit_tokens, rank, ridge   of the learned correction; ridge null: the layer's is zero, because none helped
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "accuracy"))

import tasks  # noqa: E402

from prompts import describe  # noqa: E402
from recall_modes import mixed_prompts, weights_digest  # noqa: E402
from rows import Row, Writer, environment  # noqa: E402
from servers.pd_cluster import PDCluster, flags  # noqa: E402
from sglang_scout.core.correction import save_correction  # noqa: E402
from sglang_scout.core.errors import ScoutError  # noqa: E402
from sglang_scout.core.fit import LayerFit, fit_correction, read_inputs  # noqa: E402

BENCHMARK = "predicted_query"
FIT_NEW_TOKENS = 48
WRITE_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts and how many tokens to decode after each."""

    prompts: list[list[int]]
    new_tokens: list[int]


def make_work(args: argparse.Namespace, fit: bool) -> Work:
    """The prompts of one of the two runs.

    Raises:
        ScoutError: too little text.
    """
    new = FIT_NEW_TOKENS if fit else args.steps
    count = -(-args.fit_tokens // new) if fit else args.requests
    length = args.fit_input_tokens if fit else args.input_tokens
    if args.workload == "retrieval":
        # Questions follow each other in the texts that the model has learned, so it can go on after an
        # answer; what is measured are answers only.
        names = [tasks.TASKS[i % len(tasks.TASKS)] for i in range(count)]
        samples = [
            tasks.make_sample(name, length, 10_000 * fit + seed) for seed, name in enumerate(names)
        ]
        lengths = [new if fit else len(sample.answer) for sample in samples]
        return Work([sample.prompt for sample in samples], lengths)
    # Each text is cut: the measured prompts come first, those of the fit after them.
    used = -(-args.requests // len(args.dataset)) * args.input_tokens if fit else 0
    prompts = mixed_prompts(args.model_path, args.dataset, count, length, used)
    return Work(prompts, [new] * count)


def decode(args: argparse.Namespace, work: Work, config: dict[str, Any], ready: Path) -> None:
    """Decode ``work`` on servers of our own, and wait until ``ready`` has been written."""
    longest = max(map(len, work.prompts)) + max(work.new_tokens)
    concurrency = min(args.concurrency, len(work.prompts))
    cluster = PDCluster(
        args.model_path,
        server_args=["--kv-offload", "scout", *args.server_args.split()],
        decode_args=[
            *flags(kv_offload_budget=args.budget),
            *("--kv-offload-config", json.dumps(config)),
        ],
        dtype=args.dtype,
        router_args=flags(health_failure_threshold=1000),  # a long prefill on a CPU is no failure
        max_total_tokens=(longest + 96) // 32 * 32 * (concurrency + 1),
        max_running_requests=concurrency,
    )
    with cluster:
        say(f"servers ready after {cluster.startup_s:.0f} s, {len(work.prompts)} prompts")
        cluster.generate(
            work.prompts, max_new_tokens=work.new_tokens, concurrency=concurrency, timeout_s=3600
        )
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while not ready.exists():
            if time.monotonic() > deadline:
                raise ScoutError(f"{ready.name} was not written; decode more tokens")
            time.sleep(0.2)


def fit(args: argparse.Namespace, folder: Path, output: Path) -> tuple[int, list[LayerFit]]:
    """First run: a learned correction in ``output``. Returns the tokens that it was fitted on."""
    quality = folder / "fit.jsonl"
    kept = folder / "fit.jsonl.npz"
    work = make_work(args, fit=True)
    # The last tokens of a request that is cut short may be missing: ask for a little less.
    wanted = int(0.9 * sum(n - 1 for n in work.new_tokens))
    config = {"quality": str(quality), "quality_inputs": wanted}
    decode(args, work, config, kept)
    about, inputs, source = read_inputs(str(kept))
    correction, fits = fit_correction(
        inputs, source, rank=args.rank, model=str(about["model"]), weights=str(about["weights"])
    )
    save_correction(correction, output)
    for layer in fits:
        say(
            f"  layer {layer.layer} -> {layer.layer + 1}: held-out error {layer.error:.4f}, "
            f"without a map {layer.plain_error:.4f}, ridge {layer.ridge}"
        )
    return correction.tokens, fits


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a quality file; a last one that was cut off by the server's end is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def summarize(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row per layer from 1 on and predictor: means over tokens."""
    rows = []
    for layer in sorted({r["layer"] for r in records} - {0}):
        mine = [r for r in records if r["layer"] == layer]
        tokens = sum(r["rows"] for r in mine)
        for name in mine[0]["cosine"]:
            at = {}
            for k in sorted({k for r in mine for k in r["at"]}, key=int):
                parts = [r["at"][k] for r in mine if k in r["at"]]
                count = sum(p["rows"] for p in parts)

                def mean(group: str, who: str, parts: Any = parts, count: int = count) -> float:
                    return round(sum(p[group][who] * p["rows"] for p in parts) / count, 4)

                at[k] = {
                    "tokens": count,
                    "overlap": mean("overlap", name),
                    "mass": mean("mass", name),
                    "mass_real": mean("mass", "real"),
                    "mass_best": mean("mass", "best"),
                }
            cosine = sum(r["cosine"][name] * r["rows"] for r in mine) / tokens
            rows.append(
                {
                    "impl": name,
                    "layer": layer,
                    "steps": len(mine),
                    "tokens": tokens,
                    "cosine": round(cosine, 4),
                    "at": at,
                }
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Per layer and predictor: cosine, and overlap and mass at every k."""
    ks = sorted({k for r in rows for k in r["at"]}, key=int)
    head = f"{'layer':>5} {'predictor':<18} {'cosine':>7}"
    head += "".join(f"   k={k:<3} overlap  mass  real  best" for k in ks)
    lines = [head]
    for r in rows:
        line = f"{r['layer']:>5} {r['impl']:<18} {r['cosine']:>7.3f}"
        for k in ks:
            a = r["at"].get(k)
            if a is None:
                line += " " * 34
                continue
            line += f"{a['overlap']:>16.3f} {a['mass']:>5.3f} {a['mass_real']:>5.3f}"
            line += f" {a['mass_best']:>5.3f}"
        lines.append(line)
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", required=True, metavar="DIR")
    parser.add_argument("--name", help="of the model in the rows (default: its folder's)")
    parser.add_argument("--workload", choices=("text", "retrieval"), default="text")
    parser.add_argument("--dataset", nargs="+", default=[None], metavar="FILE", help="texts")
    parser.add_argument("--requests", type=int, default=16, help="prompts that are measured")
    parser.add_argument("--input-tokens", type=int, default=3072, help="of each of them")
    parser.add_argument("--steps", type=int, default=48, help="tokens decoded after each (text)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at the same time")
    parser.add_argument("--budget", type=int, default=2048, help="tokens, as --kv-offload-budget")
    parser.add_argument("--fit-tokens", type=int, default=4000, help="0: no learned correction")
    parser.add_argument("--fit-input-tokens", type=int, default=512, help="of the fit's prompts")
    parser.add_argument("--rank", type=int, default=32, help="of the learned correction")
    parser.add_argument(
        "--predictor-file", type=Path, metavar="FILE", help="where to keep the learned correction"
    )
    parser.add_argument("--dtype", default="auto", help="as SGLang's flag")
    parser.add_argument("--server-args", default="", help="more flags of both servers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows; default: only a table")
    parser.add_argument("--append", action="store_true", help="keep the rows that FILE has")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    shared = environment(BENCHMARK, ("torch", "sglang", "sglang-scout"))
    shared |= {"model": args.name or Path(args.model_path).name, "workload": args.workload}
    shared |= {"weights": weights_digest(args.model_path)}
    if args.workload == "text":
        shared["text"] = ", ".join(map(describe, args.dataset))
    shared |= {"dtype": args.dtype, "budget_tokens": args.budget, "untimed": True}
    with tempfile.TemporaryDirectory(prefix="predicted-query-") as scratch:
        folder = Path(scratch)
        config = {"quality": str(folder / "quality.jsonl")}
        fit_tokens, fits = 0, list[LayerFit]()
        try:
            if args.fit_tokens:
                output = args.predictor_file or folder / "learned.npz"
                fit_tokens, fits = fit(args, folder, output.absolute())
                config["predictor_file"] = str(output.absolute())
            decode(args, make_work(args, fit=False), config, folder / "quality.jsonl")
        except ScoutError as error:
            say(str(error))
            return 1
        rows = summarize(list(read_records(folder / "quality.jsonl")))
    earlier = args.json.read_text() if args.append and args.json and args.json.exists() else ""
    writer = Writer(args.json, shared)
    layers = max(r["layer"] for r in rows) + 1
    for row in rows:
        learned = row["impl"].startswith("learned") and fits
        more = {"rank": args.rank, "fit_tokens": fit_tokens} if learned else {}
        if learned:
            more["ridge"] = fits[row["layer"] - 1].ridge
        writer.add(**row, **more, layers=layers)
    writer.close()
    if earlier and args.json:
        args.json.write_text(earlier + args.json.read_text())
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
