"""Among which NUMA nodes a rank's host pages are divided."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace

import pytest

ranks = pytest.importorskip("sglang_scout.plugin.ranks", reason="needs SGLang")


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
    monkeypatch.setattr(ranks, "AttentionRanks", lambda: group)
    monkeypatch.setattr(ranks, "cpus_by_node", lambda cpus: found)
    made = ranks.worker_nodes(range(2 * nodes))
    assert made == (found if divided else {})
    assert ("--kv-offload-cpus" in caplog.text) == (nodes > 1 and not divided)
