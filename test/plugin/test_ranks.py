"""Communication between a server's ranks, and the division of their host pages among NUMA nodes."""

import gc
import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from fake_sys import use_sys
from sglang_scout.core.config import OffloadConfig
from sglang_scout.plugin import ranks as ranks_module
from sglang_scout.worker import host_memory, numa
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient


def _meet(rank, path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    group = SimpleNamespace(
        rank_in_group=rank, world_size=2, cpu_group=torch.distributed.group.WORLD
    )
    ranks_module.adapter.tp_group = lambda: group
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
    ranks = [fork.Process(target=_meet, args=(rank, tmp_path / "meeting")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("nodes", "others", "divided"),
    [
        (0, [], 0), (1, [], 1), (2, [], 2), (16, [], 16), (17, [], 0),
        (2, [2, 2], 2), (2, [1], 0), (1, [2], 1), (17, [17], 0), (0, [1], 0),
    ],
)  # fmt: skip
def test_pages_are_divided_the_same_way_on_all_ranks(nodes, others, divided, monkeypatch, caplog):
    found = {node: [2 * node, 2 * node + 1] for node in range(nodes)}
    group = SimpleNamespace(size=1 + len(others), gather=lambda own: [own, *others])
    monkeypatch.setattr(ranks_module, "AttentionRanks", lambda: group)
    monkeypatch.setattr(ranks_module, "cpus_by_node", lambda cpus: found)
    made = ranks_module.worker_nodes(range(2 * nodes))
    assert made == (found if divided else {})
    assert ("--kv-offload-cpus" in caplog.text) == (nodes > 1 and not divided)


THREADS, SERVER = "attention threads, one each", "the server and background work"
NODE_0 = [*range(4), *range(8, 12)]


@pytest.mark.parametrize(
    ("allowed", "given", "other", "expected", "rest", "nodes", "background"),
    [
        # The GPU's node, one core left to the server. None of it is left for background work but that core.
        (range(16), None, None, [("5-7", THREADS), ("13-15", THREADS), ("4,12", SERVER)],
         [("0-3,8-11", "not used")], {1: 6}, [4, 12]),
        # A cpuset with half of that node.
        ([*range(6), *range(8, 14)], None, None, [("5", THREADS), ("13", THREADS), ("4,12", SERVER)],
         [("0-3,8-11", "not used"), ("6-7,14-15", "not allowed")], {1: 2}, [4, 12]),
        # A cpuset with none of it.
        (NODE_0, None, None, [("1-3", THREADS), ("9-11", THREADS), ("0,8", SERVER)],
         [("4-7,12-15", "not allowed")], {0: 6}, [0, 8]),
        # Of both nodes, as given; background work beside them.
        (range(16), (2, 3, 6, 7), None, [("2-3,6-7", THREADS)],
         [("0-1,4-5,8-9,12-13", "the server"), ("10-11,14-15", SERVER)],
         {0: 2, 1: 2}, [10, 11, 14, 15]),
        # Another rank's GPU is on node 0, and on node 1.
        (range(16), None, NODE_0, [("5-7", THREADS), ("13-15", THREADS), ("4,12", SERVER)],
         [("0-3,8-11", "the server and other ranks")], {1: 6}, [4, 12]),
        (range(16), None, [*range(4, 8), *range(12, 16)],
         [("7", THREADS), ("15", THREADS), ("6,14", SERVER)],
         [("0-5,8-13", "the server and other ranks")], {1: 2}, [6, 14]),
    ],
)  # fmt: skip
def test_a_gpu_on_the_second_of_two_nodes(
    allowed, given, other, expected, rest, nodes, background, monkeypatch, tmp_path, caplog
):
    """From /sys and the cpuset to CPUs, table, arena and memory policy, as a decode server does it."""
    use_sys(monkeypatch, tmp_path)
    bound = []
    monkeypatch.setattr(host_memory, "_mbind", lambda *call: bound.append(call) or 0)
    pci = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pci)
    monkeypatch.setattr(ranks_module, "PROCESS_CPUS", frozenset(allowed))
    ranks_module._warn_once.cache_clear()

    def gather(own):
        return [own if isinstance(own, int) else [own[0], other], own]

    group = SimpleNamespace(size=1 if other is None else 2, rank=1, gather=gather)
    monkeypatch.setattr(ranks_module, "AttentionRanks", lambda: group)
    runner, config = SimpleNamespace(device="cuda", gpu_id=0), OffloadConfig("scout", cpus=given)
    plan = ranks_module.cpu_plan(runner, config)
    assert [(use.cpus, use.used_by) for use in plan.rows] == expected + rest
    is_far = numa.near_cpus("0000:01:00.0") and not set(allowed) & {4, 5, 6, 7}
    assert (
        "far from the GPU: this process may run on none of the CPUs near the GPU (4-7,12-15)"
        in caplog.text
    ) == is_far
    assert ranks_module.nodes_of_worker(runner, config) == (list(nodes), list(nodes.values()))
    by_node = numa.cpus_by_node(allowed)
    assert plan.background == background

    spec = ArenaSpec(2, 4000, 32, 2, 4, 64, "bfloat16", 0.125, 4, 8, len(nodes))
    with Arena.create(spec, numa_nodes=list(nodes)) as arena:
        begin = arena.address
        for address, nbytes, node in bound:
            assert address == begin and nbytes > 0 and node in nodes
            begin += nbytes
        assert begin == arena.address + arena.nbytes
        # The ring, then K and V of two layers, with a stripe on each node.
        assert len(bound) == (1 if len(nodes) == 1 else 1 + 4 * len(nodes))
        client = WorkerClient(
            arena, plan.threads, nodes=list(ranks_module.worker_nodes(plan.threads).values())
        )
        found = [list(nodes)[i] for i in client.snapshot().cpu_nodes]
        assert found == [next(n for n in by_node if cpu in by_node[n]) for cpu in plan.threads]
