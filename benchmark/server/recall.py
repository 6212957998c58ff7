"""How much of a real text's decoding is left to the CPU, and how often layers recall: the paper's Figure 6, on servers.

    python -m benchmark.server.recall --json docs/results/recall.jsonl

A pair decodes --requests real texts at once (scripts/texts.py). A grammar forces their tokens, so that every setting
sees the same queries. First without recall, which makes the profile of each setting; then with the profile's intervals
(recall "fixed") and "adaptive". A row is one setting, budget and mode, from its step log and counters:

    setting, config, budget_tokens, recall, requests, input_tokens, steps
    ratio, ratio_by_layer, ratio_by_step   CPU compute ratio, without the first steps, as the profile; of whole requests
    intervals                              steps between recalls by layer: the profile's, or in the last step
    selected_pages, cpu_pages, recalled_pages, recall_bytes, cpu_us      per step; cpu_us: CPU time of the attention
                                           process. With ``grain: head`` pages are those of single KV heads
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.accuracy.policies import PROFILES
from benchmark.accuracy.questions import FORCING_ENVIRONMENT, FORCING_FLAGS, forcing_grammar
from benchmark.progress import Progress
from benchmark.rows import ROOT, Row, RowFile, argument_parser, environment, weights_digest
from servers.group import flags
from servers.pd_cluster import PDCluster
from servers.server_process import ends_orderly
from sglang_scout.cli.profile import profile_of
from sglang_scout.core.config import FLAGS
from sglang_scout.core.profile import COLD_STEPS, ratios_by_age, read_step_log, save_profile

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"paper": True},
    "head": {"grain": "head"},
}
SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m"
PACKAGES = ("sglang", "torch", "sglang-scout")
CHUNK_TOKENS = 1024  # whole prompts would take gigabytes of attention scores
THRESHOLD = 0.12  # the paper's
COUNTED = "selected_pages cpu_pages recalled_pages recall_bytes".split()


def prompts_of(folder: str, count: int, tokens: int) -> list[list[int]]:
    """Real texts, of each source in turn."""
    from tokenizers import Tokenizer

    from texts import SOURCES, load_text

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    texts = [tokenizer.encode(load_text(x), add_special_tokens=False).ids for x in SOURCES]
    places = (divmod(i, len(texts)) for i in range(count))
    return [texts[which][turn * tokens : (turn + 1) * tokens] for turn, which in places]


class Servers(PDCluster):
    """Decode servers of several settings beside one prefill server, all with the same mode of recall.

    Args:
        cases: name to setting and budget; ``logs``/NAME.jsonl is its step log.
    """

    def __init__(
        self, args: argparse.Namespace, cases: dict[str, tuple[str, int]], mode: str, logs: Path
    ) -> None:
        self._texts = prompts_of(args.model_path, args.requests, args.input_tokens + args.steps)
        self._steps, self._logs, self._mode = args.steps, logs, mode
        self._profiles: Path = args.profiles
        self._profiles.mkdir(parents=True, exist_ok=True)
        self._server_of = dict(zip(cases, ["decode", *list(cases)[1:]], strict=True))
        room = args.requests * (args.input_tokens + args.steps + 256)
        chunks = flags(chunked_prefill_size=CHUNK_TOKENS)
        servers = {"prefill": [*chunks, *flags(kv_offload="scout")]}
        for name, (setting, budget) in cases.items():
            keys = SETTINGS[setting] | {"recall": mode, "step_log": str(logs / f"{name}.jsonl")}
            own = flags(kv_offload_budget=budget, kv_offload_config=json.dumps(keys))
            if mode == "fixed":
                own += [FLAGS["recall_profile"], str(self._profiles / f"{name}.json")]
            servers[self._server_of[name]] = [*flags(kv_offload="scout"), *own]
        sizes = flags(max_running_requests=args.requests, max_total_tokens=room)
        super().__init__(
            args.model_path,
            servers,
            server_args=[*sizes, *flags(mem_fraction_static=0.85), *FORCING_FLAGS],
            router_args=None,
            env={"OMP_NUM_THREADS": "1", **FORCING_ENVIRONMENT},
        )

    def prefill(self) -> None:
        """Into the prefill server's cache, so that later requests run together."""
        for text in self._texts:
            self._ask("decode", 2, text)

    def _ask(self, server: str, tokens: int, text: list[int]) -> None:
        forced = text[-self._steps :][:tokens]
        how = {"temperature": 0.0, "max_new_tokens": tokens, "ebnf": forcing_grammar(forced)}
        payload = {"input_ids": text[: -self._steps], "sampling_params": how}
        answer = self.ask_pair(payload, server)
        assert list(answer["output_ids"]) == forced, answer["meta_info"]

    def measure(self, name: str) -> Row:
        """Decode all texts at once; what the step log and the counters say about it."""
        server = self._server_of[name]
        before = self._counted(server)
        with ThreadPoolExecutor(len(self._texts)) as pool:
            list(pool.map(partial(self._ask, server, self._steps), self._texts))
        after, log = self._counted(server), read_step_log(self._logs / f"{name}.jsonl")
        steps = after["steps"] - before["steps"]
        curves, requests = (x[..., COLD_STEPS:] for x in ratios_by_age(log))
        by_layer = curves @ requests / requests.sum()
        intervals = after["recall"].get("intervals")
        if self._mode == "off":
            profile = profile_of(log, THRESHOLD)
            save_profile(profile, str(self._profiles / f"{name}.json"))
            intervals = profile.intervals
        return {
            "steps": steps,
            **{key: round((after[key] - before[key]) / steps, 2) for key in (*COUNTED, "cpu_us")},
            "ratio": round(float(by_layer.mean()), 4),
            "ratio_by_layer": by_layer.round(4).tolist(),
            "ratio_by_step": curves.mean(axis=0).round(4).tolist(),
            "intervals": intervals,
        }

    def _counted(self, server: str) -> dict[str, Any]:
        state = self.kv_offload(server)
        times = psutil.Process(state["worker"]["pid"]).cpu_times()
        return {**state, "cpu_us": (times.user + times.system) * 1e6}


def run(args: argparse.Namespace, file: RowFile, logs: Path) -> None:
    progress, budgets = Progress(), args.budgets
    cases = {f"{name}-{budget}": (name, budget) for name in args.settings for budget in budgets}
    shared = {"input_tokens": args.input_tokens, "requests": args.requests}
    for mode in args.modes:
        progress.say(f"starting servers with recall {mode} for {', '.join(cases)}")
        with Servers(args, cases, mode, logs) as servers:
            servers.prefill()
            for name, (setting, budget) in cases.items():
                found = servers.measure(name)
                keys = {"setting": setting, "budget_tokens": budget, "recall": mode}
                file.add(setting, **keys, config=SETTINGS[setting], **shared, **found)
                mean = np.mean(found["intervals"])
                progress.say(f"{name}, {mode}: ratio {found['ratio']}, mean interval {mean:.1f}")


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write rows to FILE")
    add("--model-path", default=str(SMOLLM2), metavar="DIR")
    add(
        "--profiles",
        type=Path,
        default=PROFILES,
        metavar="DIR",
        help="where SETTING-BUDGET.json go",
    )
    add("--settings", nargs="+", default=["default", "paper"], choices=SETTINGS)
    add("--budgets", nargs="+", type=int, default=[1024, 2048], metavar="TOKENS")
    add("--modes", nargs="+", default=["off", "fixed", "adaptive"])
    add("--requests", type=int, default=4)
    add("--input-tokens", type=int, default=7680)
    add("--steps", type=int, default=128)
    args = parser.parse_args(argv)
    fields = {"untimed": True, "model": Path(args.model_path).name}
    fields["weights"] = weights_digest(args.model_path)
    file = RowFile(args.json, environment("recall", PACKAGES), fields)
    with ends_orderly(), tempfile.TemporaryDirectory() as logs:
        run(args, file, Path(logs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
