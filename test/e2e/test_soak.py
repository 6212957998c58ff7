"""Load of all kinds for a while, with retractions, while workers are killed and stopped at random: every request
is answered to its full length, every layer of every step keeps to its pages, and nothing is left.

    SCOUT_SOAK_S=600 scripts/test.sh -m slow test/e2e/test_soak.py -s
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import (
    PDCluster,
    ProcessUsage,
    abort_after,
    random_prompts,
    scheduler_pid,
    wait_until,
)

pytestmark = pytest.mark.slow
SOAK_S = float(os.environ.get("SCOUT_SOAK_S", "60"))
CLIENTS, LAYERS = 14, 4
# Stopped: found out after 0.8 s.
FATAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP)

RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
CASES = {
    "recall": (
        "float32", 1e-5, RETRACTED, {"recall": "fixed", "recall_interval": 3, "resident_tokens": 192},
    ),
    "device": (
        "float32", 1e-5, {**RETRACTED, "TRITON_INTERPRET": "1"},
        {"transport": "graph", "recall": "fixed", "recall_interval": 20, "resident_tokens": 64},
    ),
}  # fmt: skip


class Load:
    """Clients that ask one request after the other, some of which lose interest, and who troubles the worker."""

    def __init__(self, servers: PDCluster, seed: int) -> None:
        self._servers = servers
        self._seed = seed
        self._end = time.monotonic() + SOAK_S
        self.answered = 0
        self.deaths = 0

    def run(self) -> None:
        trouble = threading.Thread(target=self._trouble)
        trouble.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            try:
                self.answered = sum(pool.map(self._client, range(CLIENTS)))
            finally:
                self._end = 0.0
                trouble.join()

    def _client(self, number: int) -> int:
        chance = random.Random(self._seed * CLIENTS + number)
        answered = 0
        while time.monotonic() < self._end:
            longest = chance.choice((64, 900, 2500))
            [prompt] = random_prompts(
                [chance.randrange(1, longest)], seed=chance.randrange(1 << 30)
            )
            new_tokens = chance.randrange(1, 120)
            if chance.random() < 0.15:
                abort_after(self._servers, prompt, chance.randrange(8), max_new_tokens=new_tokens)
                continue
            [answer] = self._servers.generate([prompt], max_new_tokens=new_tokens)
            assert len(answer.output_ids) == new_tokens
            answered += 1
        return answered

    def _trouble(self) -> None:
        chance = random.Random(self._seed)
        while time.monotonic() < self._end:
            worker = self._servers.kv_offload()["worker"]
            if worker["state"] == "ready":
                with contextlib.suppress(ProcessLookupError):  # of the last blow, in the meantime
                    os.kill(worker["pid"], chance.choice(FATAL))
                    self.deaths += 1
            time.sleep(min(chance.uniform(2, 10), SOAK_S / 4))


@pytest.mark.parametrize("case", CASES)
def test_soak(case, tiny_model):
    dtype, tolerance, environment, settings = CASES[case]
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{case}: seed {seed}, {SOAK_S:g} s")
    with PDCluster(
        tiny_model("qwen3", dtype=dtype),
        server_args=[
            *("--kv-offload", "scout", "--kv-offload-budget", "128"),
            *("--kv-offload-config", json.dumps({"verify": True, **settings})),
        ],
        max_running_requests=12,
        max_total_tokens=24576,
        dtype=dtype,
        env=environment,
    ) as servers:
        # Allocators reach their size.
        servers.generate(random_prompts([2000] * 12), max_new_tokens=20)
        before = ProcessUsage.of(scheduler_pid(servers))
        load = Load(servers, seed)
        load.run()
        wait_until("pages are free", lambda: servers.kv_offload()["host_pages_used"] == 0, 60)
        after = ProcessUsage.of(scheduler_pid(servers))
        state, log = servers.kv_offload(), servers.servers["decode"].log()
    retractions = len(re.findall(r"retracted_reqs: [1-9]", log))
    print(
        f"{load.answered} answers, {state['steps']} steps, {load.deaths} deaths, {retractions} retractions, "
        f"largest error {state['verify_max_rel_error']:.1e}; {before} {after}"
    )
    assert load.answered > 0 and load.deaths > 0
    assert state["worker"]["restarts"] > 0 and state["worker"]["refused"] == 0
    assert (retractions > 0) == ("SGLANG_TEST_RETRACT" in environment)
    assert state["verify_checks"] == LAYERS * state["steps"] and state["cpu_pages"] > 0
    assert 0 < state["verify_max_rel_error"] <= tolerance
    assert state["resident_pages"] == 0
    assert after.open_files <= before.open_files + 16 and after.threads <= before.threads + 8
    assert after.rss_bytes <= before.rss_bytes + 200 * 2**20
