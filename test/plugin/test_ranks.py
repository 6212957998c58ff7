"""What the ranks of a server tell each other, and how their host pages are divided among NUMA nodes."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

ranks_module = pytest.importorskip("sglang_scout.plugin.ranks", reason="needs SGLang")

RANK = """
import os, sys, types
import torch
from sglang_scout.plugin import ranks as module

rank, path = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
group = types.SimpleNamespace(
    rank_in_group=rank, world_size=2, cpu_group=torch.distributed.group.WORLD
)
module.get_attention_tp_group = lambda: group
ranks = module.AttentionRanks()
assert ranks.least(5 - rank) == 4
assert ranks.gather({"of": [rank] * rank}) == [{"of": []}, {"of": [1]}]
words = ranks.shared_words(2)
assert words.tolist() == [0, 0]
torch.distributed.barrier()
words[rank] = 10 + rank
torch.distributed.barrier()
assert words.tolist() == [10, 11], words
torch.distributed.barrier()
print("as it should be")
"""


def test_two_ranks(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text, rank in zip(told, ranks, strict=True):
        assert rank.returncode == 0 and "as it should be" in text, text


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
