"""How much of a real text's decoding is left to the CPU, and how often layers recall: the paper's Figure 6, on servers.

    python -m benchmark.server.recall --json docs/results/recall.jsonl

A pair decodes real texts (scripts/texts.py) one by one, with a device cache of the budget. A grammar forces their
tokens, so that every setting sees the same queries. Without recall first ("off"), which makes the setting's profile;
then with the profile's intervals ("fixed"), or "adaptive". A row is one setting, budget and mode, from its step log and
counters; one that is in the file is not measured again:

    setting, config, budget_tokens, recall, texts, input_tokens, steps
    ratio, ratio_by_layer, ratio_by_step   CPU compute ratio from a text's fourth step on, as in profiles
    intervals                              steps between recalls by layer: the profile's, or in the last step
    selected_pages, cpu_pages, recalled_pages, recall_bytes, cpu_us      per step; cpu_us: CPU time of the attention
                                           process. With ``grain: head`` pages are those of single KV heads
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
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
    """Decode servers of one setting with several budgets, and their prefill server.

    Args:
        mode: of recall. ``logs``/BUDGET.jsonl are step logs.
    """

    def __init__(self, args: argparse.Namespace, setting: str, mode: str, logs: Path) -> None:
        texts = prompts_of(args.model_path, args.texts, args.input_tokens + args.steps)
        self._texts, self._steps, self._logs, self._mode = texts, args.steps, logs, mode
        self._profiles = {x: args.profiles / f"{setting}-{x}.json" for x in args.budgets}
        args.profiles.mkdir(parents=True, exist_ok=True)
        names = "decode", *map(str, args.budgets[1:])
        self._server_of = dict(zip(args.budgets, names, strict=True))
        room = args.input_tokens + args.steps + 1024  # SGLang keeps tokens for decoding
        config, every = SETTINGS[setting], flags(kv_offload="scout")
        sizes = flags(chunked_prefill_size=CHUNK_TOKENS, max_total_tokens=args.texts * room)
        sizes += flags(kv_offload_config=json.dumps(config))
        servers = {"prefill": [*every, *sizes]}
        for budget, name in self._server_of.items():
            keys = config | {"recall": mode, "step_log": str(logs / f"{budget}.jsonl")}
            own = flags(kv_offload_budget=budget, kv_offload_config=json.dumps(keys))
            if mode == "fixed":
                own += [FLAGS["recall_profile"], str(self._profiles[budget])]
            servers[name] = [*every, *own, *flags(max_running_requests=1, max_total_tokens=room)]
        super().__init__(
            args.model_path,
            servers,
            server_args=[*flags(mem_fraction_static=0.85), *FORCING_FLAGS],
            router_args=None,
            env=FORCING_ENVIRONMENT,
        )

    def measure(self, budget: int) -> Row:
        """Decode the texts; what the step log and the counters say about it."""
        server = self._server_of[budget]
        before = self._counted(server)
        for text in self._texts:
            prompt, forced = text[: -self._steps], text[-self._steps :]
            how = {"temperature": 0.0, "max_new_tokens": len(forced)}
            payload = {
                "input_ids": prompt,
                "sampling_params": how | {"ebnf": forcing_grammar(forced)},
            }
            answer = self.ask_pair(payload, server)
            assert list(answer["output_ids"]) == forced, answer["meta_info"]
        after, log = self._counted(server), read_step_log(self._logs / f"{budget}.jsonl")
        steps = after["steps"] - before["steps"]
        curves, requests = (x[..., COLD_STEPS:] for x in ratios_by_age(log))
        by_layer = curves @ requests / requests.sum()
        intervals = after["recall"].get("intervals")
        if self._mode == "off":
            profile = profile_of(log, THRESHOLD)
            save_profile(profile, str(self._profiles[budget]))
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
    progress = Progress()
    shared = {"input_tokens": args.input_tokens, "texts": args.texts}
    for setting, mode in itertools.product(args.settings, args.modes):
        keys = [{"setting": setting, "budget_tokens": x, "recall": mode} for x in args.budgets]
        if all(file.has(**key, **shared) for key in keys):
            continue
        progress.say(f"starting servers for {setting} with recall {mode}")
        with Servers(args, setting, mode, logs) as servers:
            for key in keys:
                found = servers.measure(key["budget_tokens"])
                file.add(setting, **key, config=SETTINGS[setting], **shared, **found)
                mean = np.mean(found["intervals"])
                progress.say(f"{key}: ratio {found['ratio']}, mean interval {mean:.1f}")


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
    add("--texts", type=int, default=3)
    add("--input-tokens", type=int, default=4608)
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
