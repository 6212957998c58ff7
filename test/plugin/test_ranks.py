"""A server's ranks: communication, the CPUs of each one's attention, and host memory without --kv-offload-host-gb."""

import dataclasses
import gc
import json
import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from fake_sys import use_sys
from page_weights import forecast_weights, pilot_weights
from sglang_scout.cli.sizes import make_plan
from sglang_scout.core import numa
from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ArenaError, ConfigError
from sglang_scout.core.flags import parse_config
from sglang_scout.core.forecast import save_weights
from sglang_scout.engine.memory import ServerSize, input_bytes
from sglang_scout.engine.stores import ModelShape
from sglang_scout.plugin import limits, model
from sglang_scout.plugin import ranks as ranks_module
from sglang_scout.plugin.hooks import RELEASE
from sglang_scout.plugin.ranks import RankCpus, RankMemory
from sglang_scout.policy import Context, make_policy, policies
from sglang_scout.worker import host_memory
from sglang_scout.worker.host_memory import pool_lacks


def _meet(rank, path):
    meeting = {"init_method": f"file://{path}", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **meeting)
    world = torch.distributed.group.WORLD
    group = SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=world)
    ranks_module.get_attn_tp_group = lambda: group
    ranks = ranks_module.AttentionRanks()
    assert ranks.least(5 - rank) == 4
    assert ranks.gather({"of": [rank] * rank}) == [{"of": []}, {"of": [1]}]
    words = ranks.shared_words(2)
    assert words.tolist() == [0, 0]
    torch.distributed.barrier()
    words[rank] = 10 + rank
    torch.distributed.barrier()
    assert words.tolist() == [10, 11], words
    torch.distributed.barrier()


def test_two_ranks(tmp_path):
    """Forked, as SGLang takes half a minute to import."""
    gc.collect()  # leftovers of other tests, whose threads a child does not have
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, fork) as pool:
        ranks = [pool.submit(_meet, rank, tmp_path / "meeting") for rank in range(2)]
        for rank in ranks:
            rank.result(60)


@pytest.mark.parametrize(
    ("nodes", "others", "divided"),
    [
        (0, [], 0), (1, [], 1), (2, [], 2), (16, [], 16), (17, [], 0),
        (2, [2, 2], 2), (2, [1], 0), (1, [2], 1), (17, [17], 0), (0, [1], 0),
    ],
)  # fmt: skip
def test_pages_are_divided_the_same_way_on_all_ranks(nodes, others, divided, monkeypatch, caplog):
    found = {node: [2 * node, 2 * node + 1] for node in range(nodes)}
    gather = lambda own: [own, *(others if isinstance(own, int) else [own] * len(others))]  # noqa: E731
    ranks = SimpleNamespace(rank=0, size=1 + len(others), gather=gather)
    monkeypatch.setattr(numa, "cpus_by_node", lambda cpus: found)
    monkeypatch.setattr(ranks_module.adapter, "omp_cpus", lambda runner: "0")
    runner = SimpleNamespace(device="cpu")
    made = ranks_module.rank_cpus(runner, OffloadConfig("scout"), ranks).by_node
    assert made == (found if divided else {})
    assert ("--kv-offload-cpus" in caplog.text) == (nodes > 1 and not divided)


THREADS, SERVER = "attention threads, one each", "the server and background work"
NODE_0 = [*range(4), *range(8, 12)]


@pytest.mark.parametrize(
    ("allowed", "other", "expected", "nodes", "background"),
    [
        # The GPU's node, one core left to the server. None of it is left for background work but that core.
        (range(16), None,
         [("5-7", THREADS), ("13-15", THREADS), ("4,12", SERVER), ("0-3,8-11", "not used")], {1: 6}, [4, 12]),
        # A cpuset with none of it.
        (NODE_0, None,
         [("1-3", THREADS), ("9-11", THREADS), ("0,8", SERVER), ("4-7,12-15", "not allowed")], {0: 6}, [0, 8]),
        # Another rank's GPU is on the same node.
        (range(16), [*range(4, 8), *range(12, 16)],
         [("7", THREADS), ("15", THREADS), ("6,14", SERVER), ("0-5,8-13", "the server and other ranks")],
         {1: 2}, [6, 14]),
    ],
)  # fmt: skip
def test_a_gpu_on_the_second_of_two_nodes(
    allowed, other, expected, nodes, background, monkeypatch, tmp_path
):
    """From /sys and the cpuset to CPUs, table and nodes; other plans: test/core/test_numa.py."""
    use_sys(monkeypatch, tmp_path)
    pci = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pci)
    monkeypatch.setattr(ranks_module, "PROCESS_CPUS", frozenset(allowed))
    gather = lambda own: [own if isinstance(own, int) else [own[0], other], own]  # noqa: E731
    ranks = SimpleNamespace(size=1 if other is None else 2, rank=1, gather=gather)
    runner = SimpleNamespace(device="cuda", gpu_id=0)
    cpus = ranks_module.rank_cpus(runner, OffloadConfig("scout"), ranks)
    assert [(use.cpus, use.used_by) for use in cpus.plan.rows] == expected
    far = "this process may run on none of the CPUs near the GPU (4-7,12-15)"
    assert cpus.plan.warning == (far if allowed is NODE_0 else "")
    assert {node: len(on_node) for node, on_node in cpus.by_node.items()} == nodes
    assert cpus.plan.background == background


SHAPE = ModelShape(40, 40, 8, 128, 32, torch.bfloat16, 128**-0.5)
PAGE_BYTES = 2 * SHAPE.page_bytes * SHAPE.num_layers
RANKS_OF = {"0.5.23": {"num_dp_ranks": 1}}  # published by a server


def config_of(**kwargs):
    return parse_config(policy="scout", policies={"scout": {}}, budget_tokens=2048, **kwargs)


SIZE = ServerSize(
    config_of(),
    make_policy(Context(config_of(), 1, 1)),
    SHAPE,
    64,
    context_tokens=40960,
    node_cpus=[5, 5],
)


@pytest.fixture
def default(monkeypatch):
    """default(...) -> bytes of all ranks; ``available``: by node, and under None of the machine."""

    def size(available, *, ranks=1, bound_to=([],), nodes=(), on_device=None):
        monkeypatch.setattr(host_memory, "available_bytes", lambda node=None: available[node])
        monkeypatch.setattr(numa, "nodes", lambda: nodes)
        group = SimpleNamespace(size=ranks, least=lambda own: own, gather=lambda own: bound_to)
        cpus = RankCpus(None, dict.fromkeys(bound_to[0]))
        return RankMemory(group, cpus, SIZE, on_device).default_bytes()

    return size


def fake_pool(monkeypatch, folder, gib):
    """Of a machine on which all of it is free."""
    monkeypatch.setattr(host_memory, "_SYS_MM", folder)
    host_memory.pool_folder().mkdir(parents=True, exist_ok=True)
    for name in ("free", "nr"):
        (host_memory.pool_folder() / f"{name}_hugepages").write_text(f"{gib * 512}\n")


@pytest.mark.parametrize(
    ("bound_to", "num_nodes"), [([[1]], 1), ([[0, 1]], 2), ([[0], [1]], 2), ([[1], [1]], 1)]
)
def test_no_more_than_the_nodes_have_that_it_is_bound_to(default, bound_to, num_nodes):
    available, ranks = {None: 100 << 30, 0: 30 << 30, 1: 30 << 30}, len(bound_to)
    got = default(available, ranks=ranks, bound_to=bound_to, nodes=[0, 1])
    of_worker = sum(nbytes for *_, nbytes in SIZE.worker)
    assert got == ((num_nodes * 30 << 30) - ranks * of_worker) // 2
    alone = default(available, ranks=ranks, bound_to=bound_to, nodes=[0])  # half of what is left
    assert of_worker > 2**27 and alone == ((100 << 30) - ranks * of_worker) // 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pool_of_huge_pages_is_the_default_if_it_was_made_for_that(
    default, monkeypatch, tmp_path, ranks
):
    """Of 512 GiB, 100 of which are outside of the pool of 400."""
    fake_pool(monkeypatch, tmp_path, 400)
    arena = SIZE.arena(default({None: 100 << 30}, ranks=ranks) // ranks // PAGE_BYTES + 1)
    assert not pool_lacks(arena, arenas=ranks)
    with pytest.raises(ArenaError):  # all of it is taken
        pool_lacks(dataclasses.replace(arena, num_pages=arena.num_pages + 1), arenas=ranks)
    fake_pool(monkeypatch, tmp_path, 10)
    assert default({None: 100 << 30}) > 40 << 30, "somebody else's"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_is_no_more_than_a_device_has_digests_of(default, caplog, ranks):
    caplog.set_level("INFO")
    got = default({None: 2000 << 30}, ranks=ranks, on_device=8 << 30) // ranks
    half = (4 << 30) // PAGE_BYTES
    assert SIZE.plan(got // PAGE_BYTES + 1, 8 << 30).num_slots == half > 256
    assert f"beside {half} resident pages" in caplog.text
    said = re.search(rf"for {half} resident pages of the 4224 .* set it to (\d+), or", caplog.text)
    wanted = [dataclasses.replace(SIZE, max_batch=int(said[1]) + n).wanted_slots for n in (0, 1)]
    assert wanted[0] <= half < wanted[1]
    host = default({None: 100 << 30}, ranks=ranks)
    assert default({None: 100 << 30}, ranks=ranks, on_device=8 << 30) == host, "if that is less"


def test_what_leaves_no_room_is_named(default, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 << 30))
    with pytest.raises(ConfigError, match="GPU memory is short by .* raise --mem-fraction-static"):
        default({None: 2000 << 30}, on_device=3 * PAGE_BYTES)
    with pytest.raises(
        ConfigError, match="requests 64: .*short by 0.458 .* --kv-offload-cpus"
    ) as no:
        default({None: 1 << 30}, ranks=4)
    fitting = int(re.search(r"set it to (\d+),", str(no.value))[1])
    worker = [
        sum(row[2] for row in dataclasses.replace(SIZE, max_batch=fitting + n).worker)
        for n in (0, 1)
    ]
    assert 8 * worker[0] < 1 << 30 <= 8 * worker[1]


def test_a_size_that_is_given_is_taken_unless_it_is_less_than_two_pages():
    def given(host_gb, ranks=1):
        size = dataclasses.replace(SIZE, config=config_of(host_gb=host_gb))
        return RankMemory(SimpleNamespace(size=ranks), None, size, 8 << 30).host_bytes()

    assert given(3, ranks=2) == 3 * 2**29
    assert given(1024) == 1024 << 30
    assert given(2 * PAGE_BYTES / 2**30) == 2 * PAGE_BYTES
    with pytest.raises(ConfigError, match=r"host-gb 0.009: less than 2 .* at least (\S+),") as no:
        given(0.009)
    assert given(float(re.search(r"at least (\S+),", str(no.value))[1])) >= 2 * PAGE_BYTES


def test_a_size_may_be_in_the_pool_of_huge_pages(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "available_bytes", lambda: 100 << 30)
    fake_pool(monkeypatch, tmp_path, 401)
    limits.check_memory_flag(config_of(host_gb=400))


def test_sglang_keeps_as_many_words_of_each_token_as_are_counted():
    made = pytest.importorskip("sglang.srt.model_executor.cuda_graph_buffer_registry")
    context = pytest.importorskip("sglang.srt.runtime_context")
    with context.get_parallel().override(**RANKS_OF.get(RELEASE, {})):
        sizes = {"max_bs": 4, "max_num_token": 1000, "cache_loc_dtype": torch.int64}
        registry = made.build_eager_registry(device=torch.device("cpu"), **sizes)
    slots = (registry.get_slot(name) for name in registry.slot_names())
    shapes = [(slot.shape_fn(4, 1000), slot.dtype) for slot in slots if slot.axis == "tokens"]
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes) == input_bytes(1000)


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("policy", policies())
def test_a_server_plans_what_sglang_scout_plan_says(monkeypatch, tmp_path, policy, kv):
    keys = {}
    for kind, weights in (("forecast", forecast_weights()), ("pilot", pilot_weights(rank=24))):
        if f"{kind}_file" in policies()[policy]:
            save_weights(weights, str(tmp_path / kind))
            keys[f"{kind}_file"] = str(tmp_path / kind)
    heads = {"head_dim": 128, "num_attention_heads": 40, "num_key_value_heads": 8}
    sizes = heads | {"num_hidden_layers": 40, "hidden_size": 5120, "torch_dtype": "bfloat16"}
    sizes |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = {"kv_cache_dtype": kv, "policy": policy, "config": json.dumps(keys)}
    said = make_plan(str(tmp_path), context_tokens=8192, requests=8, **options)

    config = parse_config(policy=policy, policies=policies(), config=keys)
    threads = 8 * (8 if config.grain == "head" else 1)
    shape = dataclasses.replace(SHAPE, fp8=None if kv == "auto" else torch.float8_e4m3fn)
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(model, "get_attn_tp_group", lambda: alone)
    size = ServerSize(config, model.rank_policy(config, shape), shape, 8, 8192, [threads])
    assert size.plan(8 * 8192 // 32 + 1) == said.memory
    # With the flag that it says, the arena takes the huge pages that it says.
    pages = int(said.host_gib * 2**30) // said.server.kv_bytes_per_page
    assert size.plan(pages + 1).arena_bytes == said.huge_pages * host_memory.HUGE_PAGE_BYTES
