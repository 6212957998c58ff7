"""Host memory of the pages without --kv-offload-host-gb."""

import dataclasses
import json
import math
import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import pytest
import torch

from page_weights import forecast_weights, pilot_weights
from sglang_scout.cli.sizes import make_plan
from sglang_scout.core.config import parse_config
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import save_weights
from sglang_scout.core.page_bytes import digest_bytes, input_bytes
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.memory import arena_of, plan_memory, plan_worker
from sglang_scout.engine.stores import ModelShape
from sglang_scout.policy.base import policies
from sglang_scout.worker import host_memory
from sglang_scout.worker.arena_fits import pool_fits, pool_lacks

hooks = pytest.importorskip("sglang_scout.plugin.decode_hooks", reason="needs SGLang")
from sglang_scout.plugin import deployment, host_size, prefill_hooks  # noqa: E402
from sglang_scout.plugin import ranks as ranks_module  # noqa: E402
from sglang_scout.plugin.line import VERSION  # noqa: E402

SHAPE = ModelShape(40, 40, 8, 128, 32, torch.bfloat16, 128**-0.5)
PER_NODE = 5
RANKS_OF = {"0.5.23": {"num_dp_ranks": 1}}  # published by a server


def size(monkeypatch, *, available, ranks=1, nodes=2, host_gb=None, on_device=None):
    config = parse_config(
        policy="scout", policies={"scout": {}}, budget_tokens=2048, host_gb=host_gb
    )
    found = {node: list(range(PER_NODE)) for node in range(nodes)}
    group = SimpleNamespace(size=ranks, least=lambda own: own, gather=lambda own: [own] * ranks)
    monkeypatch.setattr(hooks, "parse", lambda args: config)
    monkeypatch.setattr(hooks, "AttentionRanks", lambda: group)
    monkeypatch.setattr(hooks, "model_shape", lambda runner: SHAPE)
    monkeypatch.setattr(host_size.adapter, "resolved", lambda args: args)
    plan = SimpleNamespace(threads=list(range(PER_NODE)))
    monkeypatch.setattr(ranks_module, "cpu_plan", lambda runner, config: plan)
    monkeypatch.setattr(ranks_module, "worker_nodes", lambda cpus: found)
    monkeypatch.setattr(host_size, "available_bytes", lambda: available)
    runner = SimpleNamespace(
        device="cpu" if on_device is None else "cuda",
        server_args=SimpleNamespace(max_running_requests=64),
        model_config=SimpleNamespace(context_len=40960),
    )
    return hooks.around_profile_available_bytes(lambda runner: on_device, runner)


@pytest.mark.parametrize(
    ("ranks", "nodes", "node_cpus"), [(1, 0, [5]), (4, 1, [5]), (1, 2, [5, 5]), (4, 2, [5, 5])]
)
def test_half_of_what_the_workers_do_not_need(monkeypatch, ranks, nodes, node_cpus):
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048)
    worker = plan_worker(config, SHAPE, 64, 40960, node_cpus).total_bytes
    assert worker > 2**27
    got = size(monkeypatch, available=100 << 30, ranks=ranks, nodes=nodes)
    assert got == ((100 << 30) - ranks * worker) // 2 // ranks


@pytest.mark.parametrize(
    ("ranks", "bound_to", "most"),
    [
        (1, [[1]], 30 << 30),  # of that node only
        (1, [[0, 1]], 60 << 30),
        (2, [[0], [1]], 60 << 30),
        (2, [[1], [1]], 30 << 30),  # divided
    ],
)
def test_no_more_than_the_nodes_have_that_it_is_bound_to(monkeypatch, ranks, bound_to, most):
    monkeypatch.setattr(host_size.numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(host_size.numa, "available_bytes", lambda node: 30 << 30)
    group = SimpleNamespace(size=ranks, gather=lambda own: bound_to)
    assert host_size._bound_bytes(bound_to[0], group) == most
    monkeypatch.setattr(host_size.numa, "available_bytes", lambda node: None)
    assert host_size._bound_bytes(bound_to[0], group) is None
    monkeypatch.setattr(host_size.numa, "nodes", lambda: [0])
    assert host_size._bound_bytes([0], group) is None


def test_the_default_is_half_of_the_node_that_the_pages_are_bound_to(monkeypatch):
    monkeypatch.setattr(host_size.numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(host_size.numa, "available_bytes", lambda node: 40 << 30)
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048)
    worker = plan_worker(config, SHAPE, 64, 40960, [PER_NODE]).total_bytes
    got = size(monkeypatch, available=100 << 30, nodes=1)
    assert got == ((40 << 30) - worker) // 2


def fake_pool(monkeypatch, folder, gib):
    """Of a machine on which all of it is free."""
    pool = folder / host_memory.POOL
    pool.mkdir(parents=True, exist_ok=True)
    for name in ("free", "nr"):
        (pool / f"{name}_hugepages").write_text(f"{gib * 512}\n")
    monkeypatch.setattr(host_memory, "_SYS_MM", folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pool_of_huge_pages_is_the_default_if_it_was_made_for_that(monkeypatch, tmp_path, ranks):
    """Of 512 GiB, 100 of which are outside of the pool of 400."""
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    fake_pool(monkeypatch, tmp_path, 400)
    got = size(monkeypatch, available=100 << 30, ranks=ranks)
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048)
    arena = arena_of(config, SHAPE, got // page_bytes + 1, 64, 40960, 2)
    assert not pool_lacks(arena, arenas=ranks)
    more = dataclasses.replace(arena, num_pages=arena.num_pages + 1)
    assert not pool_fits(more, arenas=ranks), "all of it"
    fake_pool(monkeypatch, tmp_path, 10)
    assert size(monkeypatch, available=100 << 30) > 40 << 30, "somebody else's"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_is_no_more_than_a_device_has_digests_of(monkeypatch, caplog, ranks):
    on_device = 8 << 30
    got = size(monkeypatch, available=2000 << 30, ranks=ranks, on_device=on_device)
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048)
    sizes = {"max_batch": 64, "context_tokens": 40960, "node_cpus": [PER_NODE] * 2}
    sizes |= {"device_bytes": on_device}
    num_pages = got // page_bytes + 1  # SGLang's padding
    half = on_device // 2 // page_bytes
    assert plan_memory(config, SHAPE, num_pages=num_pages, **sizes).num_slots == half > 256
    assert f"beside {half} resident slots; a budget for each" in caplog.text
    assert "--max-running-requests 64 would need 4224" in caplog.text
    # The host's memory, if that is less.
    assert size(monkeypatch, available=100 << 30, on_device=on_device) == size(
        monkeypatch, available=100 << 30
    )


def test_on_a_small_device_all_pages_are_resident(monkeypatch, caplog):
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    digest = digest_bytes("rotated-2", SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.dtype.itemsize)
    beside = SHAPE.num_layers * digest + input_bytes(SHAPE.page_size)
    num_pages = (1 << 28) // (page_bytes + beside)
    got = size(monkeypatch, available=2000 << 30, on_device=1 << 28)
    assert got == (num_pages - 1) * page_bytes
    assert f"beside {num_pages} resident slots" in caplog.text


def test_a_device_with_room_for_nothing_is_named(monkeypatch):
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    with pytest.raises(ConfigError, match="device memory.* hold 2 of the 3 pages") as caught:
        size(monkeypatch, available=2000 << 30, on_device=3 * page_bytes)
    assert "host-gb" not in str(caught.value) and "--mem-fraction-static" in str(caught.value)


@pytest.mark.parametrize("keys", [{}, {"prefill_digests": False}])
def test_pages_and_digests_of_a_prefill_server_share_what_sglang_found(monkeypatch, keys):
    config = parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048, config=keys)
    monkeypatch.setattr(prefill_hooks, "parse", lambda args: config)
    monkeypatch.setattr(prefill_hooks, "model_shape", lambda runner: SHAPE)
    found, runner = 40 << 30, SimpleNamespace(server_args=None)
    got = prefill_hooks.around_profile_available_bytes(lambda runner, before: found, runner, 0)
    page_bytes = 2 * SHAPE.page_bytes * SHAPE.num_layers
    num_pages = got // page_bytes
    digests = 0
    if config.prefill_digests:
        held = DigestPool(dataclasses.replace(SHAPE, num_layers=1), 1, "cpu", config.digest)
        digests = SHAPE.num_layers * sum(part.nbytes for part in held.parts)
    assert num_pages * (page_bytes + digests) <= found < (num_pages + 1) * (page_bytes + digests)


def test_sglang_keeps_as_many_words_of_each_token_as_are_counted():
    made = pytest.importorskip("sglang.srt.model_executor.cuda_graph_buffer_registry")
    context = pytest.importorskip("sglang.srt.runtime_context")
    with context.get_parallel().override(**RANKS_OF.get(VERSION, {})):
        registry = made.build_eager_registry(
            device=torch.device("cpu"), max_bs=4, max_num_token=1000, cache_loc_dtype=torch.int64
        )
    slots = (registry.get_slot(name) for name in registry.slot_names())
    shapes = [(slot.shape_fn(4, 1000), slot.dtype) for slot in slots if slot.axis == "tokens"]
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes) == input_bytes(1000)


def test_a_size_that_is_given_is_taken_unless_it_is_less_than_two_pages(monkeypatch):
    page_bytes = 40 * 2 * 32 * 8 * 128 * 2
    assert size(monkeypatch, available=0, ranks=2, host_gb=3) == 3 * 2**29
    assert size(monkeypatch, available=0, host_gb=1024, on_device=8 << 30) == 1024 << 30
    assert size(monkeypatch, available=0, host_gb=2 * page_bytes / 2**30) == 2 * page_bytes
    with pytest.raises(
        ConfigError,
        match=r"--kv-offload-host-gb \(0.009\): 0.009.* hold 1 of the 2 pages.* raise it",
    ):
        size(monkeypatch, available=0, host_gb=0.009)


def test_no_room_for_the_worker(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        size(monkeypatch, available=1 << 30, ranks=4)
    for part in ("requests 64", "need 1.46 GiB, 0.46 more", "fewer CPUs in --kv-offload-cpus"):
        assert part in str(caught.value)


def test_a_size_that_nothing_can_hold_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(deployment, "available_bytes", lambda: 100 << 30)
    config = parse_config(policy="scout", policies={"scout": {}}, host_gb=400)
    with pytest.raises(ConfigError, match="--kv-offload-host-gb 400: only 100.0 GiB .*MEMORY_GB=N"):
        deployment._check_memory(config)
    fake_pool(monkeypatch, tmp_path, 401)
    deployment._check_memory(config)


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("policy", policies())
def test_a_server_plans_what_sglang_scout_plan_says(monkeypatch, tmp_path, policy, kv):
    keys = {}
    for kind, weights in (("forecast", forecast_weights()), ("pilot", pilot_weights(rank=24))):
        if f"{kind}_file" in policies()[policy]:
            save_weights(weights, str(tmp_path / kind))
            keys[f"{kind}_file"] = str(tmp_path / kind)
    model = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 40, "hidden_size": 5120, "head_dim": 128,
        "num_attention_heads": 40, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    said = make_plan(
        str(tmp_path), context_tokens=8192, requests=8, kv_cache_dtype=kv, policy=policy, config=json.dumps(keys)
    )  # fmt: skip

    planned = []
    config = parse_config(policy=policy, policies=policies(), config=keys)
    group = SimpleNamespace(size=1, least=lambda own: own)
    pool = SimpleNamespace(attach=lambda shape, plan, *_: planned.append(plan))
    shape = dataclasses.replace(SHAPE, fp8=None if kv == "auto" else torch.float8_e4m3fn)
    lists = 8 if config.grain == "head" else 1
    for name, value in (
        ("parse", config), ("AttentionRanks", group), ("model_shape", shape), ("build_pools", (None, pool, None)),
        ("nodes_of_worker", ([0], [8 * lists])), ("available_bytes", 1 << 50), ("rank_weights", None),
    ):  # fmt: skip
        monkeypatch.setattr(hooks, name, lambda *_, value=value: value)
    runner = SimpleNamespace(
        device="cpu", server_args=None, model_config=SimpleNamespace(context_len=8192)
    )  # fmt: skip
    monkeypatch.setattr(hooks.adapter, "pool_sizes", lambda runner: (8 * 8192, 8))
    hooks.around_init_pools(lambda runner: None, runner)
    assert planned == [said.memory]
    # With the flag that it says, the arena takes the huge pages that it says.
    pages = int(said.host_gib * 2**30) // said.server.kv_bytes_per_page
    monkeypatch.setattr(hooks.adapter, "pool_sizes", lambda runner: (32 * pages, 8))
    hooks.around_init_pools(lambda runner: None, runner)
    assert planned[1].arena_bytes == said.huge_pages * host_memory.HUGE_PAGE_BYTES
