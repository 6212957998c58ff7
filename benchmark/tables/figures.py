"""Figures in sentences: what documents say, word for word but for line breaks, with values from the rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from benchmark.tables import extremes, find, one, rows
from benchmark.tables.accuracy import BY_BUDGET, CORRECTED, asked
from benchmark.tables.speed import GROUPS, MACHINES, of_read, shape, speed_ups, steps_of
from benchmark.tables.study import SERVER, mean, of, right

SHORT = {"`scout`": "scout", "Quest": "quest", "the paper": "paper"}
TEXTS = {
    "README.md": (
        "full attention finds {prompt[full]}. With budgets of 1,024 and 2,048 tokens, scout finds "
        "{prompt[scout 1024]} and {prompt[scout 2048]}. Quest's bounds",
        "find {prompt[quest 1024]} and {prompt[quest 2048]} (",
        "[{h200:.1f} times](docs/results/predictions.md#measured-on-an-h200)",
    ),
    "docs/results/README.md": (
        "full attention finds {prompt[full]}; scout with 1,024 and 2,048 tokens {prompt[scout 1024]} and "
        "{prompt[scout 2048]}; Quest's bounds {prompt[quest 1024]} and {prompt[quest 2048]}; the paper's choices "
        "{prompt[paper 1024]} and {prompt[paper 2048]} |",
        "{facts[full]}; {facts[scout 1024]} and {facts[scout 2048]}; {facts[quest 1024]} and {facts[quest 2048]}; "
        "{facts[paper 1024]} and {facts[paper 2048]} |",
        "a study finds {retrieval[server]} of 24 |",
        "{h200:.2f} times full attention's tokens per second |",
        "{h100} times stock SGLang |",
        "with recall {recall[default adaptive]:.0%} of the selected pages, without {recall[default off]:.0%} |",
        "{reads} of a read loop's bandwidth with grouped queries |",
        "medians of {vllm} times vLLM's kernel, {ipex} times IPEX |",
        "{ring[0]:.0f} us back to back, {ring[1]:.0f} us if the attention process sleeps |",
        "`scout` and `infinigen` answer {prompted[scout-rotated]}, `hgca`, `sparda` and `rheo` {others} |",
        "{minutes:.0f} minutes, {faults} faults",
    ),
    "docs/results/accuracy.md": (
        "SmolLM2-135M finds {facts[full]} with full attention. With scout's default, a budget of 1,024 tokens, it "
        "finds {prompt[scout 1024]} if the question is in the prompt, which is read with full attention, and "
        '{facts[scout 1024]} if decode steps read it ("decoded"). The paper\'s choices find {prompt[paper 2048]} and '
        "{facts[paper 2048]} with twice the budget.",
        "{kv[0]} nats per token in e4m3 and {kv[1]} in e5m2",
        "a study finds {retrieval[real]} of 24 with the real query (bounds {retrieval[bounds]}), {retrieval[server]} "
        "as the server does, {retrieval[exact]} with the real query in layers",
        "all {gate} questions of 4,096 tokens were right on servers",
        "without servers {lengths} of 24 at 2,048, 8,192 and 16,384 tokens",
    ),
    "docs/results/systems.md": (
        "`scout` and `infinigen` answer {prompted[scout-rotated]} of 8, `rheo` {prompted[rheo]}, `sparda` "
        "{prompted[sparda]} and `hgca` {prompted[hgca]}",
    ),
    "docs/results/recall.md": ("{join[hint]} pages instead of {join[none]} in its first 16 steps",),
    "docs/tuning.md": (
        "finds {prompt[scout 1024]} of 120 planted numbers, the paper's choices (the key `paper`) "
        "{prompt[paper 2048]}.",
        "plain text loses about {text[0]}, {text[1]} and {text[2]} nats per token at 512, 1,024 and 2,048 tokens",
        "[{kv[0]} nats per token in e4m3 and {kv[1]} in e5m2]",
    ),
    "docs/paper-map.md": (
        "mean [{cosine:.2f}](results/accuracy.md",
        "[{recall[paper fixed]:.1%}](results/",
    ),
    "docs/sizing.md": ("after a stop took {stop:.0f} s on two busy CPUs",),
    "docs/troubleshooting.md": ("takes {checksums} times the CPU time",),
    "docs/architecture.md": ("ready about {start:.1f} s after its start",),
    "docs/gpu-design.md": (
        "took {boundary[0]} ms with 16 requests and {boundary[1]} ms with 64",
        "at {copies:.0%} of the copy engines' rate",
    ),
}


def sentences() -> Iterator[tuple[str, str]]:
    """Of a document. A percentage has a space."""
    values = {**_accuracy(), **_systems(), **_speed()}
    for document, texts in TEXTS.items():
        for text in texts:
            yield document, text.format(**values).replace("%", " %").replace("  %", " %")


def _planted(part: str) -> dict[str, str]:
    """Right of 120, by setting and budget."""
    found = {}
    for line, setting in BY_BUDGET.items():
        file, _, name = setting.rpartition(": ")
        own = of(file or "study.jsonl", name, part)
        for start, short in SHORT.items():
            if line.startswith(start):
                found[f"{short} {own[0]['budget_tokens']}"] = right(own)
        found["full"] = right(own, "full_right")
    return found


def _accuracy() -> dict[str, Any]:
    exact = CORRECTED.replace("attends", "exact_layers=(1, 2) attends")
    retrieval = {
        "real": "rotated-2 512",
        "bounds": "minmax-32 512",
        "server": CORRECTED,
        "exact": exact,
    }
    text = mean("nats", "full_nats")
    budgets = 512, 1024, 2048
    weights = [text(of("study_weights.jsonl", f"rotated-2 {x} {SERVER}", "text")) for x in budgets]
    gate = {asked("gate_recall.jsonl", "scout-rotated+exact_layers=[1]", x, 4096) for x in budgets}
    lengths = {x["length_tokens"]: [] for x in rows("study_lengths.jsonl")}
    for row in rows("study_lengths.jsonl"):
        lengths[row["length_tokens"]].append(row)
    return {
        "facts": _planted("facts"),
        "prompt": _planted("prompt"),
        "kv": [
            text(of("study_kv.jsonl", f"full kv=float8_{x}", "text")) for x in ("e4m3fn", "e5m2")
        ],
        "text": [f"{float(x):.2f}" for x in weights],
        "retrieval": {
            name: right(of("study_recall.jsonl", setting, "facts"))
            for name, setting in retrieval.items()
        },
        "gate": extremes(gate),
        "lengths": extremes(int(right(own)) / 2 for own in lengths.values()),  # of two budgets
        "cosine": fmean(x["cosine"] for x in rows("real_model_predicted_query.jsonl")),
    }


def _systems() -> dict[str, Any]:
    file = "systems_prompt.jsonl"
    found = {x["policy"]: asked(file, x["policy"], x["budget_tokens"], 2048) for x in rows(file)}
    return {"prompted": found, "others": extremes(found[x] for x in ("hgca", "sparda", "rheo"))}


def _speed() -> dict[str, Any]:
    grouped = [shape(x) for x in GROUPS if x != "MHA"]
    sizes = [(file, n, x) for file in MACHINES.values() for n in (16, 64) for x in grouped]
    reads = [y for f, n, x in sizes for y in of_read(f, threads=2, pages=64, batch=n, **x)]
    theirs = {
        name: [median(speed_ups("cpu_attention.jsonl", name, threads=2, **x)) for x in grouped]
        for name in ("vllm", "ipex")
    }
    full, own = steps_of("bfloat16", 65536)
    recall = {
        f"{x['setting']} {x['recall']}": x["ratio"]
        for x in find("recall.jsonl", budget_tokens=1024)
    }
    attend = [
        one("checksums.jsonl", impl="attend-sealed", pages=x)["median_us"]
        / one("checksums.jsonl", impl="attend", pages=x)["median_us"]
        for x in (8, 32)
    ]
    boundary = [[x["median_us"] / 1e3 for x in find("boundary.jsonl", batch=n)] for n in (16, 64)]
    copies = find("gpu_h200.jsonl", op="copy_layer_pages", impl="triton")
    soak = one("soak.jsonl")
    return {
        "h200": own["tokens_per_s"] / full["tokens_per_s"],
        "h100": extremes(
            (y for x in find("predictions.jsonl", impl="h100") for y in x["speed_up"]), 1
        ),
        "recall": recall,
        "reads": extremes(reads, 2),
        **{name: extremes(ratios, 1) for name, ratios in theirs.items()},
        "ring": [
            one("ring_latency.jsonl", impl="client", gap_us=x)["median_us"] for x in (0, 1000)
        ],
        "join": {x: sum(find("join.jsonl", arrival=x)[0]["cpu_pages"]) for x in ("hint", "none")},
        "minutes": soak["seconds"] / 60,
        "faults": sum(soak["faults"].values()),
        "stop": one("teardown.jsonl", impl="stop")["median_us"] / 1e6,
        "start": one("control.jsonl", impl="start")["median_us"] / 1e6,
        "checksums": extremes(attend, 1),
        "boundary": [extremes(x) for x in boundary],
        "copies": max(x["bandwidth_share"] for x in copies),
    }
