"""Communication between a server's ranks, and the division of their host pages among NUMA nodes."""

import gc
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

ranks_module = pytest.importorskip("sglang_scout.plugin.ranks", reason="needs SGLang")


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
