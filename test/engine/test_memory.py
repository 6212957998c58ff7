"""The memory plan: limits and refusals."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from page_weights import identity, pilot_weights, rule_of
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.memory import HEADROOM_BYTES, ServerSize, check_memory
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy import Context, make_policy, policies

SHAPE = ModelShape(40, 40, 8, 128, 32, torch.bfloat16, 128**-0.5)  # Qwen3-14B
PAGE_BYTES = 2 * 32 * 8 * 128 * 2 * 40
EACH = PAGE_BYTES + PAGE_BYTES // 32 + 32 * 48
"""Of a page on a device: KV, digest, and SGLang's words per token."""


def config(keys=None, **kwargs):
    """With digests and a budget for simple arithmetic by default."""
    kwargs = {"budget_tokens": 2048, "available_cpus": {0}} | kwargs
    keys = {"digest": "minmax"} | (keys or {})
    return parse_config(policy="scout", policies=policies(), config=keys, **kwargs)


def size(settings=None, shape=SHAPE, **changes):
    sizes = {"max_batch": 8, "context_tokens": 131072, "node_cpus": [8]} | changes
    settings = settings or config()
    policy = sizes.pop("policy", None) or make_policy(Context(settings, shape.num_layers, 1))
    return ServerSize(settings, policy, shape, **sizes)


def test_bytes_follow_the_model():
    made = size().plan(4097)
    assert made.bytes_of("host pages") == 4097 * PAGE_BYTES
    assert made.num_slots == 8 * 64 + 8 + 64
    assert made.bytes_of("resident slots") == made.num_slots * PAGE_BYTES
    # No more slots than pages, and no more budget than context.
    assert size(config(budget_tokens=32768), max_batch=64).plan(129).num_slots == 129
    assert size(config({"resident_tokens": 1 << 40})).plan(4097).num_slots == 4097
    assert size(config({"resident_tokens": 32})).plan(4097).num_slots >= 8 * (1 + 1 + 1)
    assert size(config(budget_tokens=1 << 32), context_tokens=4096).plan(4097).budget_pages == 128


@pytest.mark.parametrize(
    ("digest", "dtype", "of_head"),
    [
        ("minmax", torch.bfloat16, 512),
        ("minmax", torch.float32, 1024),
        ("rotated-2", torch.float32, 1264),
        pytest.param("pilot", torch.bfloat16, 2 * 96 + 4, marks=pytest.mark.rheo),
    ],
)
def test_bytes_of_digests_are_those_of_their_pool(digest, dtype, of_head):
    shape = dataclasses.replace(SHAPE, num_layers=3, dtype=dtype)
    rule = rule_of(digest, weights=pilot_weights(identity(3, 40, 8, 128), rank=96))
    policy = dataclasses.replace(make_policy(Context(config(), 3, 1)), rule=rule)
    made = size(policy=policy, shape=shape, max_batch=1, context_tokens=100, node_cpus=[1])
    held = DigestPool(shape, 7, "cpu", rule)
    planned = made.plan(7).bytes_of("digests")
    assert planned == sum(part.nbytes for part in held.parts) == 7 * 24 * of_head


FILES = {"sparda": '{"forecast_file": "w"}', "rheo": '{"pilot_file": "w"}'}


@pytest.mark.parametrize("policy", ["scout", "infinigen", *FILES])
def test_bytes_of_a_step_are_those_of_its_buffers(make, policy):
    engine = (made := make(policy=policy, config=FILES.get(policy, "{}"))).engine
    candidates, lists = engine._inputs.candidates, made.config.lists(made.shape.num_kv_heads)
    held = [engine.transport._staged] if engine.parts.policy.route == "fetch" else []
    if lists > 1:
        scores = torch.zeros(candidates.list_table.shape)
        held += [candidates.list_table, candidates.digest_rows, scores, engine._results._both]
    context = 32 * engine.parts.sizes.max_pages
    planned = ServerSize(
        made.config, made.policy, made.shape, made.settings.max_batch, context, [1]
    )
    assert planned.step_bytes == sum(x.nbytes for x in held)


# -- host memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_little_memory_is_refused_with_what_fits(ranks):
    large, available = size(max_batch=16), 30 << 30
    assert check_memory(large, 4097, 1 << 45, ranks=ranks).num_pages == 4097
    with pytest.raises(ConfigError) as caught:
        check_memory(large, 1 << 14, available, ranks=ranks)
    text = str(caught.value)
    found = "on each of 2 ranks" if ranks > 1 else "short by 5"
    for part in ("host pages 80.0", "30.000 GiB are available", "HOST_MEMORY_GB=N", found):
        assert part in text
    says = r"(?:--context-length (\d+) with )?--kv-offload-host-gb (\S+) fits"
    context, host_gb = re.search(says, text.splitlines()[0]).groups()
    large = dataclasses.replace(large, context_tokens=int(context or large.context_tokens))
    host_gb = float(host_gb)
    pages = int(host_gb * 2**30) // ranks // PAGE_BYTES + 1
    check_memory(large, pages, available, ranks=ranks)
    with pytest.raises(ConfigError, match="short by 0.0"):
        check_memory(large, pages + 2, available, ranks=ranks)


def test_where_no_context_fits_fewer_requests_are_named_that_do():
    of_machine = {"context_tokens": 4096, "node_cpus": [36]}
    with pytest.raises(ConfigError) as caught:
        check_memory(size(max_batch=64, **of_machine), 4097, 2 << 30)
    pattern = r"--max-running-requests (\d+) with --kv-offload-host-gb (\S+) fits$"
    batch, host_gb = re.search(pattern, str(caught.value).splitlines()[0]).groups()
    pages = int(float(host_gb) * 2**30) // PAGE_BYTES + 1
    check_memory(size(max_batch=int(batch), **of_machine), pages, 2 << 30)
    with pytest.raises(ConfigError):
        check_memory(size(max_batch=int(batch) + 1, **of_machine), 129, 2 << 30)
    with pytest.raises(ConfigError, match=r"; lower --context-length \(4096\), or"):
        check_memory(size(max_batch=64, **of_machine), 4097, 1 << 28)


def test_of_an_arena_in_huge_pages_only_what_is_beside_it_is_asked():
    """400 GiB of a host of 512, which has 100 GiB beside its pool."""
    made = check_memory(size(), 81921, 100 << 30, in_pool=True, shared=False)
    assert 400 << 30 < made.arena_bytes < 401 << 30
    beside = made.bytes_of("hints", "partial results") + HEADROOM_BYTES
    check_memory(size(), 81921, beside, in_pool=True, shared=False)
    with pytest.raises(
        ConfigError, match="Needed beside the huge page pool: hints [^,]*, [^,]*, reserve 0.250 GiB"
    ):
        check_memory(size(), 81921, beside - 1, in_pool=True, shared=False)
    with pytest.raises(ConfigError, match="short by 30"):
        check_memory(size(), 81921, 100 << 30, shared=False)


RESULT_BYTES = 2 * 40 * 4 * 32 * -(-(40 * 129) // 32)
"""Out and lse of a sequence, whole cache lines, in all slots of the ring."""


@pytest.mark.parametrize(
    ("max_batch", "cpus", "results"),
    [
        (8, [1], 0),
        (8, [3, 2], 8 * 4),
        (8, [64], 8 * 8),
        # No more than sixteen runs for each CPU of the smallest node.
        (1024, [2], 32),
        (20, [2, 9], 32 * 2),
    ],
)
def test_partial_results_are_of_the_threads_that_may_share_a_sequence(max_batch, cpus, results):
    made = size(max_batch=max_batch, node_cpus=cpus).plan(4097)
    assert made.bytes_of("partial results") == results * RESULT_BYTES
    assert ("partial results" in [what for what, *_ in made.rows]) == bool(results)


# -- device memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_pages", "max_batch", "gib", "keys", "says"),
    [
        (81921, 64, 8, {}, r"--kv-offload-host-gb (\S+) fits, or raise --mem-.* by 0.074$"),
        (
            4097,
            64,
            6,
            {"resident_tokens": 65536},
            r"; --context-length \d+ with --kv-offload-host-gb (\S+) fits, .* resident_tokens \(65536\), or raise",
        ),
        (4097, 512, 6, {}, r"--max-running-requests (\d+) with --kv-offload-host-gb (\S+) fits"),
        (1281, 512, 6, {}, r"--max-running-requests (\d+) fits, or raise"),
    ],
)
def test_too_little_device_memory_is_refused_with_what_fits(
    monkeypatch, num_pages, max_batch, gib, keys, says
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 << 30))
    device = {"device_bytes": gib << 30, "shared": False}

    def check(max_batch, pages):
        made = size(config(keys), max_batch=max_batch, context_tokens=40960)
        return check_memory(made, pages, 1 << 45, **device)

    with pytest.raises(ConfigError, match="GPU memory is short by") as caught:
        check(max_batch, num_pages)
    answer, details = str(caught.value).splitlines()
    assert "digests" in details and f"{gib}.000 GiB are left beside the weights" in details
    found = re.search(says, answer).groups()
    batch = int(found[0]) if "requests" in says else max_batch
    pages = int(float(found[-1]) * 2**30) // PAGE_BYTES + 1 if "host-gb" in says else num_pages
    check(batch, pages)
    with pytest.raises(ConfigError):
        check(batch + ("requests" in says), min(pages + 2, num_pages))


def test_a_device_without_room_for_a_page_needs_more_of_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 1 << 30))
    for device_bytes, is_raised in ((0, True), (-(1 << 30), False)):
        with pytest.raises(
            ConfigError, match="GPU memory is short by .*; lower --context-length"
        ) as caught:
            check_memory(size(), 3, 1 << 45, device_bytes=device_bytes, shared=False)
        assert ("raise --mem-fraction-static by 0.0" in str(caught.value)) == is_raised
        assert "0.000 GiB are left beside" in str(caught.value)


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
    planned, device_bytes = size(config(keys), max_batch=64, context_tokens=40960), gib << 30
    room = planned.room(device_bytes)
    made = planned.plan(room.num_pages, device_bytes)
    assert made.num_slots == room.num_slots == min(num_slots, made.num_pages)
    if not keys and gib > 2:
        assert planned.plan(room.num_pages + 1, device_bytes).num_slots == num_slots - 1
    assert planned.wanted_slots == (num_slots if keys else 64 * 64 + 64 + 64)


@given(
    st.integers(0, 1 << 36), st.integers(1, 300), st.sampled_from([{}, {"resident_tokens": 65536}])
)
def test_as_many_pages_as_a_device_has_room_for_are_never_refused(device_bytes, max_batch, keys):
    planned = size(config(keys), max_batch=max_batch, context_tokens=40960)
    room = planned.room(device_bytes)
    assert 0 <= room.num_slots <= room.num_pages
    if room.num_pages:
        assert planned.plan(room.num_pages, device_bytes).num_slots == room.num_slots
    else:
        assert device_bytes < EACH
    # Where not even the least fits beside the digests, all pages are resident.
    assert planned.room(8 * EACH - 1) == (7, 7)
