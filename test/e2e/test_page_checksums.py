"""Bit flips in host memory while requests decode: the pages' owners fail, and no wrong token is returned."""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness import RANKS_ENV, PDCluster, assert_same_tokens, random_prompts, wait_idle, wait_until
from servers.group import flags
from servers.sglang_http import RequestFailed, generate_payload, sse_events
from worker_faults import arena_of

# Without recalls a missing page stays with the CPU, with the real query, so that tokens do not depend on residency.
CONFIG = {"page_checksums": True, "recall": "off", "precompute": False, "resident_tokens": 49152}
SCOUT = flags(kv_offload="scout", kv_offload_budget=256)
DECODE = flags(
    kv_offload_config=json.dumps(CONFIG),
    disaggregation_decode_enable_radix_cache=True,
    enable_metrics=True,
)

pytestmark = pytest.mark.slow  # more than a minute
NEW_TOKENS = 100
LAYER = 1


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def servers(request, tiny_model):
    ranks = request.param
    with PDCluster(
        tiny_model("qwen3"),
        {"decode": DECODE},
        server_args=SCOUT + flags(tp_size=ranks, max_total_tokens=49152),
        env=RANKS_ENV if ranks > 1 else {},
    ) as running:
        yield running


def last_rank(servers):
    """The rank whose pages are damaged; all ranks must learn of it."""
    state = servers.kv_offload()
    return state.get("ranks", [state])[-1]


@pytest.fixture
def arena(servers):
    with contextlib.closing(arena_of(last_rank(servers)["worker"]["pid"])) as attached:
        yield attached


def flip_a_bit(arena, page):
    words = arena.k_pages(LAYER)[page].reshape(-1).view(np.uint32)
    words[123] ^= 1 << 30  # of an exponent


def stream(servers, prompt, events):
    for event in sse_events(servers.url + "/generate", generate_payload(prompt, 2000, stream=True)):
        events.append(event)


def test_owners_of_a_damaged_page_fail_and_nobody_else(servers, arena):
    """Two that share it through the radix cache, one of them in a stream; the cache evicts it."""
    shared, *others = random_prompts([1500, 1300, 1100, 900], seed=31)
    [expected] = servers.generate([shared], max_new_tokens=NEW_TOKENS)
    expected_others = servers.generate(others, max_new_tokens=NEW_TOKENS)
    servers.flush()
    wait_until("pages are free", lambda: not arena.checksums().any(), 30)
    servers.generate([shared], max_new_tokens=1)  # for the radix cache
    own = np.flatnonzero(arena.checksums()[LAYER])
    assert len(own) == len(shared) // 32
    before = servers.kv_offload()
    assert before["checksum_failures"] == 0 and before["steps"] > 0

    events = []
    with ThreadPoolExecutor(3) as pool:
        streamed = pool.submit(stream, servers, shared, events)
        longer = generate_payload(shared + [7] * 40, 2000)
        failing = pool.submit(servers.ask_pair, longer)
        answers = pool.submit(servers.generate, others, max_new_tokens=NEW_TOKENS)
        wait_until("all decode", lambda: len(np.flatnonzero(arena.checksums()[LAYER])) > 140, 120)
        wait_until("some tokens", lambda: len(events) > 20, 60)
        for page in own[3:40]:
            flip_a_bit(arena, page)
        of_page = rf"page (\d+) of layer {LAYER}( \(and \d+ more\))?"
        sentence = re.compile(f"{of_page} does not match its checksum")
        with pytest.raises(RequestFailed, match="status 500") as failure:
            failing.result(60)
        streamed.result(60)
        assert_same_tokens(expected_others, answers.result(120))
    reason = events[-1]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    for text in (str(failure.value), reason["message"]):
        assert int(sentence.search(text)[1]) in own
    given = tuple(events[-1]["output_ids"])
    assert 20 < len(given) < 2000
    common = min(len(given), NEW_TOKENS)
    assert given[:common] == expected.output_ids[:common], "no token of a damaged page"

    state = servers.kv_offload()
    assert last_rank(servers)["checksum_failures"] > 0 and state["worker"]["refused"] == 0
    assert state["worker"]["restarts"] == state["fallback_pages"] == 0
    failures = last_rank(servers)["checksum_failures"]
    [again] = servers.generate([shared], max_new_tokens=NEW_TOKENS)
    assert_same_tokens([expected], [again])
    assert last_rank(servers)["checksum_failures"] == failures
    counted = lambda: "kv_offload_checksum_failures_total{" in servers.metrics()  # noqa: E731
    wait_until("the counter in /metrics", counted, 10)
    servers.flush()
    wait_idle(servers)
    assert not arena.checksums().any()
