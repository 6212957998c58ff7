"""The memory plan: limits and refusals."""

import dataclasses
import functools
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hgca_worker import HgcaWorker
from page_weights import digest_weights, identity, pilot_weights
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.parse_config import parse_config
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.memory import (
    HEADROOM_BYTES,
    bytes_of_step,
    check_memory,
    most_host_pages,
    plan_memory,
)
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy.base import policies

SHAPE = ModelShape(40, 40, 8, 128, 32, torch.bfloat16, 128**-0.5)  # Qwen3-14B
PAGE_BYTES = 2 * 32 * 8 * 128 * 2 * 40


def config(config="{}", **kwargs):
    """With digests and a budget for simple arithmetic by default."""
    keys = {"digest": "minmax"} | (json.loads(config) if isinstance(config, str) else config)
    kwargs = {"budget_tokens": 2048, "available_cpus": {0}} | kwargs
    return parse_config(policy="scout", policies=policies(), config=keys, **kwargs)


def plan(settings, **kwargs):
    sizes = {"num_pages": 4097, "max_batch": 8, "context_tokens": 131072, "node_cpus": [8]} | kwargs
    return plan_memory(settings, SHAPE, **sizes)


def test_bytes_follow_the_model():
    made = plan(config())
    assert made.host_bytes == 4097 * PAGE_BYTES
    assert made.num_slots == 8 * 64 + 8 + 64
    assert made.resident_bytes == made.num_slots * PAGE_BYTES


@pytest.mark.parametrize(
    ("digest", "value_bytes", "of_head"),
    [("minmax", 2, 512), ("minmax", 4, 1024), ("calibrated", 2, 752), ("rotated-2", 4, 1264)],
)
def test_bytes_of_digests_are_those_of_their_pool(digest, value_bytes, of_head):
    dtype = {2: torch.bfloat16, 4: torch.float32}[value_bytes]
    shape = dataclasses.replace(SHAPE, num_layers=3, dtype=dtype)
    settings = dataclasses.replace(config(), digest=digest)
    made = plan_memory(settings, shape, num_pages=7, max_batch=1, context_tokens=100, node_cpus=[1])
    weights = digest_weights(identity(3, 40, 8, 128))
    held = DigestPool(shape, 7, "cpu", digest, weights)
    assert made.digest_bytes == sum(part.nbytes for part in held.parts) == 7 * 3 * 8 * of_head
    assert made.step_bytes == sum(x.nbytes for x in held._trained)


def test_bytes_of_a_pilot_are_those_of_its_rank():
    shape = dataclasses.replace(SHAPE, num_layers=3)
    settings = dataclasses.replace(config(), digest="pilot")
    weights = pilot_weights(identity(3, 40, 8, 128), rank=96)
    sizes = {"num_pages": 7, "max_batch": 1, "context_tokens": 100, "node_cpus": [1]}
    made = plan_memory(settings, shape, pilot_rank=96, **sizes)
    held = DigestPool(shape, 7, "cpu", "pilot", weights)
    assert made.digest_bytes == sum(part.nbytes for part in held.parts)


@pytest.mark.parametrize(
    ("policy", "keys"),
    [("scout", "{}"), ("infinigen", "{}"), ("sparda", '{"forecast_file": "w"}'), ("rheo", '{"pilot_file": "w"}')],
)  # fmt: skip
def test_bytes_of_a_step_are_those_of_its_buffers(make, policy, keys):
    engine = (made := make(policy=policy, config=keys)).engine
    offered, lists = engine._inputs.offered, made.config.lists(made.shape.num_kv_heads)
    held = [engine.transport._staged] if engine.policy.route == "fetch" else []
    if lists > 1:
        scores = torch.zeros(offered.list_table.shape)
        held += [offered.list_table, offered.digest_rows, scores, engine._results._both]
    context = 32 * engine.sizes.max_pages
    sizes = made.shape, made.max_batch, context, engine.policy.route
    assert bytes_of_step(made.config, *sizes) == sum(x.nbytes for x in held)


def test_bytes_of_a_window_s_step_are_those_of_its_buffers(make):
    made = make(HgcaWorker)
    older, feedback = made.engine.older, made.engine.policy.feedback
    held = sum(x.nbytes for x in (older._ids, older._queries, feedback._maw))
    config = dataclasses.replace(made.config, context_share=0.3)
    context = 32 * made.engine.sizes.max_pages
    assert bytes_of_step(config, made.shape, made.max_batch, context, "cpu") == held
    assert made.engine._results._both.numel() == 0 and made.engine._inputs.offered.lists == 1


def test_no_more_slots_than_pages_and_no_more_budget_than_context():
    assert plan(config(budget_tokens=32768), num_pages=129, max_batch=64).num_slots == 129
    assert plan(config(config='{"resident_tokens": 1099511627776}')).num_slots == 4097
    assert plan(config(config='{"resident_tokens": 32}')).num_slots >= 8 * (1 + 1 + 1)
    assert plan(config(budget_tokens=1 << 32), context_tokens=4096).budget_pages == 128


def check(settings, available, num_pages=4097, plans=None, **kwargs):
    """``plans``: of :func:`plan`."""
    plan_of = functools.partial(plan, settings, **plans or {})
    return check_memory(
        lambda pages: plan_of(num_pages=pages), num_pages, settings, available, **kwargs
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_little_memory_is_refused_with_what_fits(ranks):
    settings, available = config(host_gb=20), 30 << 30
    large = {"plans": {"max_batch": 16}, "ranks": ranks}
    assert check(settings, 1 << 45, **large).num_pages == 4097
    with pytest.raises(ConfigError) as caught:
        check(settings, available, num_pages=1 << 14, **large)
    text = str(caught.value)
    for part in ("host pages 80.0", "resident slots", "30.00 GiB are available", "HOST_MEMORY_GB=N",
                 "on each of 2 ranks" if ranks > 1 else "short by 5"):  # fmt: skip
        assert part in text
    host_gb = float(re.search(r"--kv-offload-host-gb (\S+) fits", text)[1])
    pages = int(host_gb * 2**30) // ranks // PAGE_BYTES + 1
    check(settings, available, num_pages=pages, **large)
    with pytest.raises(ConfigError, match="short by 0.0"):
        check(settings, available, num_pages=pages + 2, **large)


def test_where_no_size_fits_the_large_part_is_named():
    with pytest.raises(ConfigError) as caught:
        check(config(), 1 << 30, plans={"max_batch": 64, "node_cpus": [36]})
    assert (
        "0.79 GiB are needed for the partial results alone; lower --max-running-requests (64)"
        in str(caught.value)
    )


def test_of_an_arena_in_huge_pages_only_what_is_beside_it_is_asked():
    """400 GiB of a host of 512, which has 100 GiB beside its pool."""
    settings = config(host_gb=400)
    large = {"num_pages": 81921, "shared": False}
    made = check(settings, 100 << 30, in_pool=True, **large)
    assert 400 << 30 < made.arena_bytes < 401 << 30
    beside = made.hint_bytes + made.worker.partial_bytes + HEADROOM_BYTES
    check(settings, beside, in_pool=True, **large)
    with pytest.raises(ConfigError, match="GiB are needed beside the huge page pool"):
        check(settings, beside - 1, in_pool=True, **large)
    with pytest.raises(ConfigError, match="short by 30"):
        check(settings, 100 << 30, **large)


def test_a_device_gives_what_digests_leave_to_resident_pages():
    digests = 4097 * (PAGE_BYTES // 32 + 32 * 48)  # and SGLang's words per token
    made = plan(config(), device_bytes=digests + 700 * PAGE_BYTES + 5)
    assert made.num_slots == 700
    assert made.digest_bytes + made.input_bytes + made.resident_bytes <= digests + 700 * PAGE_BYTES
    assert plan(config(), device_bytes=1 << 45).num_slots == 4097, "a slot for every page"
    asked = config(config='{"resident_tokens": 3200}')
    assert plan(asked, device_bytes=1 << 45).num_slots == 100 + 8 + 64


@pytest.mark.parametrize("settings", ["{}", '{"resident_tokens": 65536}'])
def test_too_little_device_memory_is_refused_with_the_numbers(settings):
    digests = 4097 * PAGE_BYTES // 32
    wanted = config(config=settings)
    with pytest.raises(ConfigError) as caught:
        plan(wanted, device_bytes=digests + 50 * PAGE_BYTES)
    for part in ("device memory", "0.63 GiB for the digests of 4097 host pages", "8 requests need at least 88",
                 "--max-running-requests (8)", "resident_tokens", "--mem-fraction-static"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "gib", "num_slots"),
    [
        ({}, 64, 64 * 64 + 64 + 64),
        ({}, 10, (5 << 30) // PAGE_BYTES),  # half of it
        ({}, 2, 2 * 64 + 64 + 64),  # the least is more than half
        ({"resident_tokens": 16384}, 10, 512 + 64 + 64),
        ({"resident_tokens": 49152}, 10, 1536 + 64 + 64),
    ],
)
def test_a_device_has_room_for_the_digests_of_so_many_pages(keys, gib, num_slots):
    settings, device_bytes = config(config=json.dumps(keys)), gib << 30
    sizes = {"max_batch": 64, "context_tokens": 40960, "device_bytes": device_bytes}
    room = most_host_pages(settings, SHAPE, **sizes)
    made = plan(settings, num_pages=room.num_pages, **sizes)
    assert made.num_slots == room.num_slots == min(num_slots, made.num_pages)
    more = plan(settings, num_pages=room.num_pages + 1, **sizes) if not keys and gib > 2 else None
    assert more is None or more.num_slots == num_slots - 1
    assert (
        room.wanted_slots == (64 * 64 if "resident_tokens" not in keys else num_slots - 128) + 128
    )


@given(
    st.integers(0, 1 << 36),
    st.integers(1, 300),
    st.sampled_from(["{}", '{"resident_tokens": 65536}']),
)
def test_as_many_pages_as_a_device_has_room_for_are_never_refused(device_bytes, max_batch, keys):
    sizes = {"max_batch": max_batch, "context_tokens": 40960, "device_bytes": device_bytes}
    room = most_host_pages(config(config=keys), SHAPE, **sizes)
    assert 0 <= room.num_slots <= room.num_pages
    if room.num_pages:
        made = plan(config(config=keys), num_pages=room.num_pages, **sizes)
        assert made.num_slots == room.num_slots
    else:
        assert device_bytes < PAGE_BYTES + PAGE_BYTES // 32 + 32 * 48


def test_a_device_without_room_for_the_least_keeps_all_pages_resident():
    sizes = {"max_batch": 64, "context_tokens": 40960}
    each = PAGE_BYTES + PAGE_BYTES // 32 + 32 * 48
    for pages in (0, 1, 255):
        room = most_host_pages(config(), SHAPE, device_bytes=(pages + 1) * each - 1, **sizes)
        assert (room.num_pages, room.num_slots) == (pages, pages)


def test_a_device_of_its_own_does_not_take_host_memory():
    settings, shared = config(host_gb=20), {"shared": False, "plans": {"max_batch": 64}}
    made = plan(settings, max_batch=64)
    check(settings, made.host_bytes + (3 << 29), **shared)
    with pytest.raises(ConfigError, match="host pages 20.0"):
        check(settings, made.host_bytes, **shared)


def test_what_the_worker_needs_beside_the_pages_is_counted():
    settings = config(host_gb=20)
    made = plan(settings, max_batch=64, node_cpus=[36])
    result = 4 * 32 * -(-(40 * 129) // 32)  # out and lse of all heads, whole cache lines
    assert made.worker.partial_bytes == 2 * 40 * 64 * 8 * result == 849_346_560
    rows = 2 * 40 * 64
    requests, replies = rows * (40 * 128 * 2 + (64 + 1) * 4), rows * (40 * 128 * 2 + 40 * 4)
    assert requests + replies < made.worker.ring_bytes < requests + replies + 2**25, "and events"
    assert made.rows[-2:] == (
        ("ring", 64, made.worker.ring_bytes),
        ("partial results", 8, 849_346_560),
    )
    of_arena = made.host_bytes + made.worker.ring_bytes
    assert of_arena <= made.arena_bytes < of_arena + 2**21
    needed = made.arena_bytes + made.hint_bytes + made.worker.partial_bytes + HEADROOM_BYTES
    sizes = {"shared": False, "plans": {"max_batch": 64, "node_cpus": [36]}}
    check(settings, needed, **sizes)
    with pytest.raises(ConfigError) as caught:
        check(settings, needed - 1, **sizes)
    for part in ("ring 0.1", "partial results 0.79 GiB"):
        assert part in str(caught.value)


RESULT_BYTES = 2 * 40 * 4 * 32 * -(-(40 * 129) // 32)  # per sequence, in all slots of the ring


@pytest.mark.parametrize(
    ("threads", "node_cpus", "most", "results"),
    [(0, [1], 1, 0), (1, [36], 1, 0), (0, [5], 5, 8 * 5), (0, [36], 8, 8 * 8), (16, [2], 16, 8 * 16),
     (0, [3, 2], 2, 8 * 4), (1, [1, 2], 1, 8 * 2)],
)  # fmt: skip
def test_partial_results_are_of_the_threads_that_may_share_a_sequence(
    threads, node_cpus, most, results
):
    """For eight requests. With 16 runs per CPU, or more than possible; see below."""
    settings = config(config={"worker_threads_per_group": threads})
    made = plan(settings, node_cpus=node_cpus)
    assert (made.worker.threads, made.worker.partial_bytes) == (most, results * RESULT_BYTES)
    assert len(made.rows) == (7 if results else 6)


@pytest.mark.parametrize(
    ("max_batch", "node_cpus", "results"),
    [(1024, [2], 32), (1024, [36], 16 * 36), (20, [2, 9], 32 * 2), (64, [9, 2], 64 * 2)],
)
def test_partial_results_are_no_more_than_sixteen_runs_a_cpu(max_batch, node_cpus, results):
    """Of the smallest node; with several nodes every sequence has one of each."""
    made = plan(config(), max_batch=max_batch, node_cpus=node_cpus)
    assert made.worker.partial_bytes == results * RESULT_BYTES
