"""A pair of servers under random load for some minutes, while its worker meets one random fault after the other.

``scripts/soak.sh`` runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import shlex
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmark import rows
from harness import SCOUT, STEADY, Holdings, PDCluster, random_prompts
from load import Load
from make_tiny_model import TinyModelSpec, cached_tiny_model
from worker_faults import FAULTS, Victim

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, LAYERS, TOKENS = 14, 4, 24576
PROGRESS_S = 30.0
TOLERANCE = 1e-5  # of a layer's output, fp32
OPEN_FILES = 16  # growth, by clients and connections


@dataclass(frozen=True)
class Case:
    """The decode server's configuration.

    Attributes:
        settings: of ``--kv-offload-config``.
        environment: of both servers.
        is_deterministic: a request's tokens depend only on its prompt.
    """

    settings: dict
    environment: dict = field(default_factory=dict)
    is_deterministic: bool = False


_RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
CASES = {
    "tokens": Case(STEADY, is_deterministic=True),
    "recall": Case({"recall": "fixed", "recall_interval": 3, "resident_tokens": 192}, _RETRACTED),
    "device": Case(
        {"transport": "graph", "recall": "fixed", "recall_interval": 20, "resident_tokens": 64},
        _RETRACTED | {"TRITON_INTERPRET": "1"},
    ),
}


@dataclass
class Report:
    """Results of a run of ``seconds``; lists have a line for each case."""

    case: str
    seed: int
    seconds: float
    answered: int = 0
    dropped: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    retractions: int = 0
    steps: int = 0
    verify_checks: int = 0
    verify_max_rel_error: float = 0.0
    longest_stall_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Empty if the run passed."""
        found = [*self.lost, *self.wrong, *self.leaked]
        if not (self.answered and self.faults and self.restarts):
            found.append("the run was too short: no answer, no fault or no restart")
        if (self.retractions > 0) != bool(CASES[self.case].environment):
            found.append(f"{self.retractions} retractions")
        if self.verify_checks != LAYERS * self.steps or not self.verify_max_rel_error <= TOLERANCE:
            found.append(f"{self.verify_checks} checks, error {self.verify_max_rel_error:.1e}")
        return found

    def table(self) -> str:
        lines: dict[str, object] = {
            "case, seed, seconds": f"{self.case}, {self.seed}, {self.seconds:.0f}",
            "requests answered, dropped": f"{self.answered}, {self.dropped}",
            "decode steps, retractions": f"{self.steps}, {self.retractions}",
            "faults, processes replaced": f"{sum(self.faults.values())}, {self.restarts}",
            **{f"  {name}": count for name, count in sorted(self.faults.items())},
            "layers checked, largest error": f"{self.verify_checks}, {self.verify_max_rel_error:.1e}",
            "lost": len(self.lost),
            "wrong": len(self.wrong) if CASES[self.case].is_deterministic else "not compared",
            "leaked": len(self.leaked),
            "longest stall, s": f"{self.longest_stall_s:.1f}",
        }
        return "\n".join([*(f"{k:<32}{v}" for k, v in lines.items()), *self.problems()])


def soak(case: str, seconds: float, seed: int) -> Report:
    """Runs a case and reports progress. Raises ServerFailed when a server ends."""
    of, report = CASES[case], Report(case, seed, seconds)
    model = cached_tiny_model(TinyModelSpec(), ROOT / ".cache" / "models")
    config = json.dumps({"verify": True, **of.settings})
    with PDCluster(
        model,
        server_args=[*SCOUT, "--enable-priority-scheduling"],
        decode_args=["--kv-offload-config", config],
        max_running_requests=12,
        max_total_tokens=TOKENS,
        env=of.environment,
    ) as servers:
        # Warm-up: allocators reach their size.
        servers.generate(random_prompts([2000] * 12), max_new_tokens=20)
        prompts = random_prompts([150 * i for i in range(2, 12)], seed=seed)
        known = servers.generate(prompts, max_new_tokens=80) if of.is_deterministic else []
        before = Holdings.of(servers)
        load = Load(
            servers,
            CLIENTS,
            prompts=prompts if known else [],
            known=known,
            random_share=0.6,
            seed=seed,
            priorities=True,
        )
        with Victim(servers) as victim:
            _disturbed(load, victim, report)
        _after(servers, before, report)
        report.retractions = len(
            re.findall(r"retracted_reqs: [1-9]", servers.servers["decode"].log())
        )
    report.lost, report.wrong = load.lost, load.wrong
    report.answered, report.dropped = load.answered, load.dropped
    report.longest_stall_s = load.longest_stall_s
    return report


def _disturbed(load: Load, victim: Victim, report: Report) -> None:
    begin = time.monotonic()
    end, faults = begin + report.seconds, Counter[str]()
    over = threading.Event()

    def disturb() -> None:
        chance = random.Random(report.seed)
        is_recorded = CASES[report.case].settings.get("transport") == "graph"
        names = [
            name for name, fault in FAULTS.items() if not (is_recorded and fault.not_in_graphs)
        ]
        while not over.wait(min(chance.uniform(2, 10), report.seconds / 6)):
            name = chance.choice(names)
            try:
                FAULTS[name].strike(victim)
            except OSError:  # it ended meanwhile, from the last fault
                continue
            faults[name] += 1

    with ThreadPoolExecutor(1) as pool, load:
        trouble = pool.submit(disturb)
        while (left_s := end - time.monotonic()) > 0 and not trouble.done():
            time.sleep(min(left_s, PROGRESS_S))
            print(
                f"{time.monotonic() - begin:5.0f} s: {load.answered} answered, {load.dropped} dropped, "
                f"{sum(faults.values())} faults, {len(load.lost)} lost, {len(load.wrong)} wrong, "
                f"longest stall {load.longest_stall_s:.1f} s",
                flush=True,
            )
        over.set()
        trouble.result()
    report.faults = dict(faults)


def _after(servers: PDCluster, before: Holdings, report: Report) -> None:
    """Leftovers after the load has stopped."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = servers.kv_offload()
        if not state["host_pages_used"] and state["worker"]["state"] == "ready":
            break
        time.sleep(0.2)
    for name in ("host_pages_used", "resident_pages"):
        if state[name]:
            report.leaked.append(f"{name}: {state[name]}")
    report.leaked += Holdings.of(servers).beyond(before, OPEN_FILES)
    report.restarts, report.steps = state["worker"]["restarts"], state["steps"]
    report.verify_checks = state["verify_checks"]
    report.verify_max_rel_error = state["verify_max_rel_error"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, required=True, help="minutes of load; startup takes one more"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--case", choices=CASES, default="tokens", help="default: tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a row to FILE")
    args = parser.parse_args()
    print(f"{args.case}: {args.minutes:g} minutes, seed {args.seed}", flush=True)
    about = rows.environment("soak", ("sglang", "sglang-scout"))
    about["command"] = shlex.join(["scripts/soak.sh", *sys.argv[1:]])
    writer = rows.Writer(args.json, about, append=True)
    report = soak(args.case, 60 * args.minutes, args.seed)
    print(report.table())
    problems = report.problems()
    figures = dataclasses.asdict(report) | {"untimed": True}
    writer.add(figures.pop("case"), "failed" if problems else "ok", "; ".join(problems), **figures)
    writer.close()
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
