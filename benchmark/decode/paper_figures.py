"""Figures 8, 9, 11 and 12 of the ScoutAttention paper as the step model (sglang_scout/cli/step_model.py) predicts them
on the paper's hardware, beside the numbers that the paper's text states.

    python -m benchmark.decode.paper_figures --out docs/results/paper_figures.jsonl    # prints the table
    python -m benchmark.plot docs/results/paper_figures.jsonl docs/results/paper_figures.png

Nothing is measured; `note` says what a prediction is worth. Rows (format: rows.py, untimed), of two kinds: a system at
a length, as many requests as fit (`context`, `assumes`, and as [low end, high end] `batch`, `tokens_per_s`,
`over_full`, `idle`); and a number of the paper's text (impl "claim": `figure`, `claim`, `paper`, `bound` "at most " or
"", `form` of the numbers, and by assumption `model`). The text has no bars.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmark import rows
from benchmark.decode.model import SIZES, ModelSize, write_config
from benchmark.decode.predictions import span
from sglang_scout.cli.sizes import GIB, Plan, Server, make_plan
from sglang_scout.cli.step_model import (
    CAVEAT,
    DEVICES,
    Device,
    Step,
    low_end,
    offload_step,
    predict,
)

PAPER = DEVICES["paper"]
CONTEXTS = (8192, 16384, 32768, 65536)
CHANGED = 0.15  # of the important blocks, "on average less than" (3.2): InfiniGen fetches them
WINDOW = 0.25  # of the tokens, on HGCA's GPU (2.3)
FETCH_GB_S = 15  # of the link, in blocks of 128 KB (2.3)
BATCH, CONTEXT = 40, 32768  # of Figures 11 and 12, if 2.3's batch has Figure 9's length
SCOUT, HGCA, INFINIGEN = "ScoutAttention", "HGCA", "InfiniGen"
ASSUMES = {
    SCOUT: "min/max digests, budget of 2,048, 8.2 % of it on the CPU a layer ahead",
    HGCA: "25 % of the tokens on the GPU, the CPU attends to 2,048 others in the same layer",
    INFINIGEN: "budget of 2,048, 15 % of it fetched a layer ahead at 15 GB/s",
}
"""The time that the low end adds to a layer is added to all three. InfiniGen's scores cost as ScoutAttention's."""


class Assumption(NamedTuple):
    device: Device = PAPER
    host_tokens: int = 64 * 32768  # the largest batch that the text names
    share: float = 0.082  # of the budget, on the CPU: the mean with recall (Figure 6b)


def _reaching(share: float, *parts: str) -> Assumption:
    return Assumption(replace(PAPER, reached={**PAPER.reached, **dict.fromkeys(parts, share)}))


ASSUMPTIONS = {
    "low end": Assumption(low_end(PAPER)),
    "high end": Assumption(),
    "11 requests at 64k": Assumption(host_tokens=11 * 65536),
    "0.9 ms more a layer": Assumption(replace(PAPER, unexplained_us=900.0)),
    "GPU memory at 37 %": _reaching(0.37, "weights", "look-ahead", "scores", "attention"),
    "CPU at 12 GB/s": _reaching(0.12, "worker"),
    "low end, 12 % on the CPU": Assumption(low_end(PAPER), share=0.12),
}
"""The two ends, and the high end with one change each that makes 64k about the paper's 5.1 times FullKV."""


def in_turn(server: Server, device: Device, batch: int, share: float) -> Step:
    """Without pre-computation: the CPU works while the GPU attends."""
    ahead = offload_step(server, device, batch, share)
    budget_bytes = batch * server.budget_tokens * server.kv_bytes_per_token
    worker = device.us("worker", device.host_gb_s, share * budget_bytes)
    wait = max(0.0, worker - ahead.parts_us["attention"])
    return Step(batch, ahead.parts_us | {"look-ahead": 0.0, "wait": wait}, ahead.beside_us)


def hgca(server: Server, device: Device, batch: int) -> Step:
    """The CPU attends to as many tokens as a budget has, the GPU to its window, and nothing is scored."""
    step = in_turn(server, device, batch, 1.0)
    window_bytes = WINDOW * batch * server.context_tokens * server.kv_bytes_per_token
    attention = device.us("attention", device.memory_gb_s, window_bytes)
    wait = max(0.0, step.parts_us["wait"] - attention)
    parts = step.parts_us | {"scores": 0.0, "attention": attention, "wait": wait}
    return Step(batch, parts, {"boundary": step.beside_us["boundary"]})


def infinigen(server: Server, device: Device, batch: int) -> Step:
    """The GPU attends to the whole budget; each layer has a layer's time to fetch what is new."""
    step = offload_step(server, device, batch, 0.0)
    parts = step.parts_us | {"unexplained": server.model.num_layers * device.unexplained_us}
    new_bytes = CHANGED * batch * server.budget_tokens * server.kv_bytes_per_token
    parts["wait"] = max(0.0, new_bytes / (FETCH_GB_S * 1e3) - sum(parts.values()))
    return Step(batch, parts, step.beside_us)


def idle(step: Step) -> float:
    """Share of the step in which the GPU waits."""
    return 1 - (sum(step.parts_us.values()) - step.parts_us["wait"]) / step.us


class Setting:
    """The paper's systems under an assumption. ``plans``: of Qwen3-14B, by context; ``large``: of Qwen3-32B."""

    def __init__(self, plans: dict[int, Plan], large: Plan, assumed: Assumption) -> None:
        self.plans, self.large, self.assumed = plans, large, assumed

    def step(self, system: str, context: int, batch: int | None = None) -> Step:
        """Without a batch: of as many requests as fit."""
        server, device = self.plans[context].server, self.assumed.device
        sizes = server, device, batch or self.fitting(system, context)
        if system == SCOUT:
            return offload_step(*sizes, self.assumed.share)
        return hgca(*sizes) if system == HGCA else infinigen(*sizes)

    def fitting(self, system: str, context: int) -> int:
        """GPU memory has HGCA's window of each request, and a budget of the others' requests."""
        plan = self.plans[context]
        by_gpu = plan.offload["by_gpu"]
        if system == HGCA:
            by_gpu = int((plan.gpu_kv_bytes or 0) / (WINDOW * plan.server.kv_bytes_per_request))
        return min(by_gpu, self.assumed.host_tokens // context)

    def over_full(self, system: str, context: int) -> float:
        """Tokens per second over FullKV's, which is the same under all assumptions."""
        full = predict(self.plans[context], PAPER)[1].stock
        return self.step(system, context).tokens_per_s / full.tokens_per_s

    def over_others(self) -> float:
        """ScoutAttention over the faster of the other two, at the length where it is the most."""
        rates = [[self.step(x, context).tokens_per_s for x in ASSUMES] for context in CONTEXTS]
        return max(scout / max(others) for scout, *others in rates)

    def scaling(self, system: str, fewer: int, more: int) -> float:
        rates = [self.step(system, CONTEXT, batch).tokens_per_s for batch in (fewer, more)]
        return rates[1] / rates[0]

    def idle_percent(self, system: str) -> float:
        return 100 * idle(self.step(system, CONTEXT, BATCH))

    def ablation(self, without: float) -> tuple[float, float]:
        """Speed-ups by pre-computation without recall, and then by recall, which lowers the CPU's share."""
        sizes = self.plans[CONTEXT].server, self.assumed.device, BATCH
        ahead, recalled = (offload_step(*sizes, share) for share in (without, self.assumed.share))
        return in_turn(*sizes, without).us / ahead.us, ahead.us / recalled.us

    def large_layer_us(self) -> float:
        sizes = self.large.server, self.assumed.device, self.large.offload["requests"]
        return offload_step(*sizes, self.assumed.share).us / self.large.server.model.num_layers


class Claim(NamedTuple):
    figure: str
    claim: str
    paper: float
    of: Callable[[Setting], float]
    form: str = ".2f"
    bound: str = ""


CLAIMS = [
    Claim("8", f"{SCOUT} over FullKV at 64k", 5.1, lambda s: s.over_full(SCOUT, 65536), ".1f"),
    Claim("8", f"{SCOUT} over the faster other", 2.1, Setting.over_others, ".1f", "at most "),
    Claim("9", f"{SCOUT}, batch 16 to 32", 1.78, lambda s: s.scaling(SCOUT, 16, 32)),
    Claim("9", f"{SCOUT}, batch 32 to 64", 1.48, lambda s: s.scaling(SCOUT, 32, 64)),
    Claim("9", f"{HGCA}, batch 16 to 32", 1.31, lambda s: s.scaling(HGCA, 16, 32)),
    Claim("9", f"{INFINIGEN}, batch 16 to 32", 1.21, lambda s: s.scaling(INFINIGEN, 16, 32)),
    Claim("11", f"{SCOUT}, GPU idle, %", 6, lambda s: s.idle_percent(SCOUT), ".0f"),
    Claim("11", f"{HGCA}, GPU idle, %", 57, lambda s: s.idle_percent(HGCA), ".0f"),
    Claim("11", f"{INFINIGEN}, GPU idle, %", 61, lambda s: s.idle_percent(INFINIGEN), ".0f"),
    Claim("12", "pre-computation, 15 % on the CPU", 1.39, lambda s: s.ablation(0.15)[0]),
    Claim("12", "recall, from 15 % on the CPU", 1.20, lambda s: s.ablation(0.15)[1]),
    Claim("12", "pre-computation, 33 % on the CPU", 1.39, lambda s: s.ablation(0.33)[0]),
    Claim("12", "recall, from 33 % on the CPU", 1.20, lambda s: s.ablation(0.33)[1]),
    Claim("3.3", "a layer of Qwen3-32B, us", 900, Setting.large_layer_us, ",.0f"),
]
"""Of Figure 12 the text has no share of the CPU without recall: 15 % as CHANGED, 33 % as ours had (gpu_h200.jsonl)."""


def settings(folder: Path) -> dict[str, Setting]:
    """By name of the assumption; models' configurations are written to the folder."""
    flags = {"gpu_gib": PAPER.memory_bytes / GIB, "host_gib": 512, "config": '{"digest": "minmax"}'}
    small = str(write_config(SIZES["qwen3-14b"], folder / "14b", CONTEXTS[-1]))
    plans = {x: make_plan(small, context_tokens=x, budget_tokens=2048, **flags) for x in CONTEXTS}
    size = ModelSize(64, 5120, 64, 8, 128, 25600)
    large = str(write_config(size, folder / "32b", CONTEXTS[-1]))
    plan = make_plan(large, context_tokens=CONTEXT, budget_tokens=4096, **flags)
    return {name: Setting(plans, plan, assumed) for name, assumed in ASSUMPTIONS.items()}


def add_rows(writer: rows.Writer, by_name: dict[str, Setting]) -> None:
    about = {"untimed": True, "note": CAVEAT}
    for system, context in itertools.product(ASSUMES, CONTEXTS):
        ends = [by_name[name] for name in ("low end", "high end")]
        steps = [end.step(system, context) for end in ends]
        found = {
            "batch": [step.batch for step in steps],
            "tokens_per_s": [round(step.tokens_per_s, 1) for step in steps],
            "over_full": [round(end.over_full(system, context), 3) for end in ends],
            "idle": [round(idle(step), 4) for step in steps],
        }
        writer.add(system, context=context, assumes=ASSUMES[system], **found, **about)
    for claim in CLAIMS:
        found = {name: round(claim.of(setting), 4) for name, setting in by_name.items()}
        said = {name: x for name, x in claim._asdict().items() if name != "of"}
        writer.add("claim", **said, model=found, **about)


def table(found: list[rows.Row]) -> str:
    """Markdown: Figure 8 by system, then the paper's numbers beside the model's."""
    lines = []
    for system, of in itertools.groupby(found, lambda row: row["impl"]):
        if system != "claim":
            own = list(of)
            lines.append([f"{system}: {own[0]['assumes']}"])
            lines[-1] += [span(row["over_full"], ".1f") for row in own]
    head = ["over FullKV, predicted", *(f"{context // 1024}k" for context in CONTEXTS)]
    claims = [row for row in found if row["impl"] == "claim"]
    numbers = [
        [f"{row['figure']}: {row['claim']}", row["bound"] + format(row["paper"], row["form"])]
        + [format(value, row["form"]) for value in row["model"].values()]
        for row in claims
    ]
    of_text = rows.markdown_table(["figure", "the paper", *claims[0]["model"]], numbers)
    return f"{rows.markdown_table(head, lines)}\n\n{of_text}"


def main() -> int:
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    options = parser.parse_args()
    writer = rows.Writer(options.out, rows.environment("paper_figures", ("sglang-scout",)))
    with tempfile.TemporaryDirectory() as scratch:
        add_rows(writer, settings(Path(scratch)))
    writer.close()
    print(f"{CAVEAT}\n\n{table(writer.rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
