"""Figures in sentences: what documents must say, word for word but for line breaks."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from benchmark.tables import extremes, find, number, one, rows
from benchmark.tables.accuracy import BY_BUDGET, CORRECTED, asked
from benchmark.tables.speed import GROUPS, MACHINES, of_read, profile, shape, speed_ups, steps_of
from benchmark.tables.study import COLUMNS, SERVER, of, right
from benchmark.tables.study import nats as nats_of
from benchmark.tables.systems import SERVERS, hgca_heads

Sentences = Iterator[tuple[str, str]]
EXACT = CORRECTED.replace("attends", "exact_layers=(1, 2) attends")
RESULTS, TUNING = "docs/results/README.md", "docs/tuning.md"


def _planted(part: str) -> dict[str, str]:
    """Right of 120, by line of the table."""
    found = {}
    for line, setting in BY_BUDGET.items():
        file, _, name = setting.rpartition(": ")
        found[line] = right(of(file or "study_budgets.jsonl", name, part))
        found.setdefault("full", right(of("study_budgets.jsonl", name, part), "full_right"))
    return found


def _pair(found: dict[str, str], line: str, word: str = "and") -> str:
    return f"{found[f'{line}, 1,024']} {word} {found[f'{line}, 2,048']}"


def planted() -> Sentences:
    facts, prompt = _planted("facts"), _planted("prompt")
    scout, bounds, paper = "`scout`", "Quest's bounds", "the paper's choices"
    yield (
        "README.md",
        f"full attention finds {prompt['full']}. With budgets of 1,024 and 2,048 tokens, scout finds",
    )
    yield "README.md", f"scout finds {_pair(prompt, scout)}. Quest's bounds"
    yield "README.md", f"scout's digests) find {_pair(prompt, bounds)} "
    yield (
        RESULTS,
        f"full attention finds {prompt['full']}; scout with 1,024 and 2,048 tokens {_pair(prompt, scout)}; "
        f"Quest's bounds {_pair(prompt, bounds)}; the paper's choices {_pair(prompt, paper)} |",
    )
    both = "; ".join(_pair(facts, x) for x in (scout, bounds, paper))
    yield RESULTS, f"question decoded | {facts['full']}; {both} |"
    own, theirs = (
        f"{x[f'{y}']}" for x, y in ((prompt, f"{scout}, 1,024"), (prompt, f"{paper}, 2,048"))
    )
    yield (
        TUNING,
        f"it finds {own} of 120 planted numbers, the paper's choices (the key `paper`) {theirs}.",
    )
    page = "docs/results/accuracy.md"
    yield page, f"SmolLM2-135M finds {facts['full']} with full attention."
    yield page, f"it finds {own} if the question is in the prompt"
    yield page, f"and {facts[f'{scout}, 1,024']} if decode steps read it"
    yield page, f"choices find {theirs} and {facts[f'{paper}, 2,048']} with twice the budget"


def answers() -> Sentences:
    page = "docs/results/accuracy.md"
    cases = [asked("gate_recall.jsonl", "full", None, 4096, "asked")]
    cases += [
        asked("gate_recall.jsonl", "scout-rotated+exact_layers=[1]", x, 4096)
        for x in (512, 1024, 2048)
    ]
    assert len(set(cases)) == 1
    yield page, f"all {cases[0]} questions of 4,096 tokens were right on servers"
    counts = {
        sum(map(sum, [x for row in of_length for x in row["right"]]))
        for length in (2048, 8192, 16384)
        for setting in {row["setting"] for row in rows("study_lengths.jsonl")}
        for of_length in [find("study_lengths.jsonl", setting=setting, length_tokens=length)]
    }
    yield page, f"without servers {extremes(counts)} of 24 at 2,048, 8,192 and 16,384 tokens"
    found = {x: asked("systems_smollm2.jsonl", x, 512, 2048) for x in SERVERS.values()}
    most = {found[x] for x in ("scout-rotated", "infinigen")}
    others = extremes(found[x] for x in ("hgca", "sparda", "rheo"))
    yield (
        RESULTS,
        f"`scout` and `infinigen` answer {extremes(most)}, `hgca`, `sparda` and `rheo` {others} |",
    )
    found = {
        x: asked("systems_recall.jsonl", x, 512, 4096)
        for x in ("scout-rotated", "infinigen", "scout", "hgca")
    }
    most = extremes(found[x] for x in ("scout-rotated", "infinigen"))
    rest = f"`scout` with minimum and maximum {found['scout']}, `hgca` {found['hgca']} "
    yield "docs/results/systems.md", f"rotated digests answer {most}, {rest}"
    low, middle, high = (number(x) for x in hgca_heads())
    yield (
        "docs/results/systems.md",
        f"needs {low} to {high} % of the tokens (median {middle} %) for 99 %",
    )
    nats = [
        COLUMNS["text"].cell(of("study_weights.jsonl", f"rotated-2 {x} {SERVER}", "text"))
        for x in (512, 1024, 2048)
    ]
    yield (
        TUNING,
        "plain text loses about {:.2f}, {:.2f} and {:.2f} nats per token at 512".format(
            *map(float, nats)
        ),
    )
    e4m3, e5m2 = (
        COLUMNS["text"].cell(of("study_kv.jsonl", f"full kv=float8_{x}", "text"))
        for x in ("e4m3fn", "e5m2")
    )
    yield TUNING, f"[{e4m3} nats per token in e4m3 and {e5m2} in e5m2]"
    yield page, f"{e4m3} nats per token in e4m3 and {e5m2} in e5m2"
    by_share = {
        (how, far): nats_of(find("study_weights.jsonl", setting=setting, part="prompt"))
        for how in ("predicted", "reweighed")
        for far in (0.12, 0.5)
        for setting in [f"rotated-2 512 query=predicted attends={how} far={far}"]
    }
    few, many = (
        f"{by_share['reweighed', x]} nats instead of {by_share['predicted', x]}"
        for x in (0.12, 0.5)
    )
    yield page, f"with 12 % of the selected pages on the CPU to {few}, with 50 % to {many}"
    real, bounds, server, exact = (
        right(of("study_recall.jsonl", x, "facts"))
        for x in ("rotated-2 512", "minmax-32 512", CORRECTED, EXACT)
    )
    yield (
        page,
        f"a study finds {real} of 24 with the real query (bounds {bounds}), {server} as the server does, {exact} with",
    )
    layers = [x["cosine"] for x in rows("real_model_predicted_query.jsonl")]
    yield "docs/paper-map.md", f"mean [{number(fmean(layers), 2)}](results/accuracy.md"


def shares() -> Sentences:
    """Of the selected pages on the CPU."""
    row, mode = "real_model_recall_1024.jsonl", "recall_modes_two_boundaries.jsonl"
    curves = profile("real_model_recall_1024_profile.json")
    ratio = one(row)["ratio"]
    with_recall = [ratio, one(mode, recall="adaptive")["ratio"]]
    without = [fmean(fmean(x) for x in curves), one(mode, recall="off")["ratio"]]
    texts = [f"{100 * a:.0f} and {100 * b:.0f} %" for a, b in (with_recall, without)]
    yield RESULTS, f"with recall {texts[0]} of the selected pages, without {texts[1]} |"
    yield "docs/paper-map.md", f"[{100 * ratio:.1f} %](results/recall.md"


def speed() -> Sentences:
    full, own = steps_of("bfloat16", 65536)
    ratio = own["tokens_per_s"] / full["tokens_per_s"]
    yield RESULTS, f"{ratio:.2f} times full attention's tokens per second |"
    yield "README.md", f"[{ratio:.1f} times](docs/results/predictions.md#measured-on-an-h200)"
    ends = [x["speed_up"] for x in find("predictions.jsonl", impl="h100")]
    yield RESULTS, f"{extremes((x for pair in ends for x in pair), 1)} times stock SGLang |"
    grouped = [x for x in GROUPS if x != "MHA"]
    reads = [
        x
        for file in MACHINES.values()
        for batch in (16, 64)
        for group in grouped
        for x in of_read(file, threads=2, pages=64, batch=batch, **shape(group))
    ]
    yield RESULTS, f"{extremes(reads, 2)} of a read loop's bandwidth with grouped queries |"
    vllm, ipex = (extremes((median_of(x, group) for group in grouped), 1) for x in ("vllm", "ipex"))
    yield RESULTS, f"medians of {vllm} times vLLM's kernel, {ipex} times IPEX |"
    trips = [one("ring_latency.jsonl", impl="client", gap_us=x)["median_us"] for x in (0, 1000)]
    yield (
        RESULTS,
        "{:.0f} us back to back, {:.0f} us if the attention process sleeps |".format(*trips),
    )


def median_of(theirs: str, group: str) -> float:
    return median(speed_ups("cpu_attention.jsonl", theirs, threads=2, **shape(group)))


def machine() -> Sentences:
    soak = one("soak.jsonl")
    assert not soak["lost"] + soak["wrong"]
    yield RESULTS, f"{soak['seconds'] / 60:.0f} minutes, {sum(soak['faults'].values())} faults"
    few, many = (sum(find("join.jsonl", arrival=x)[0]["cpu_pages"]) for x in ("hint", "none"))
    yield "docs/results/recall.md", f"{few} pages instead of {many} in its first 16 steps"
    (stop,) = (x["median_us"] / 1e6 for x in find("teardown.jsonl", impl="stop"))
    yield "docs/sizing.md", f"after a stop took {stop:.0f} s on two busy CPUs"
    ratios = [
        one("checksums.jsonl", impl="attend-sealed", pages=x)["median_us"]
        / one("checksums.jsonl", impl="attend", pages=x)["median_us"]
        for x in (8, 32)
    ]
    yield "docs/troubleshooting.md", f"takes {extremes(ratios, 1)} times the CPU time"
    start = one("control.jsonl", impl="start")["median_us"] / 1e6
    yield "docs/architecture.md", f"ready about {start:.1f} s after its start"
    by_batch = [
        [x["median_us"] / 1e3 for x in find("boundary.jsonl", batch=batch)] for batch in (16, 64)
    ]
    few, many = (extremes(x) for x in by_batch)
    yield "docs/gpu-design.md", f"took {few} ms with 16 requests and {many} ms with 64"
    copies = [
        x["bandwidth_share"] for x in find("gpu_h200.jsonl", op="copy_layer_pages", impl="triton")
    ]
    yield "docs/gpu-design.md", f"at {100 * max(copies):.0f} % of the copy engines' rate"


def sentences() -> Sentences:
    for part in (planted, answers, shares, speed, machine):
        yield from part()
