"""CPU lists, CPUs by NUMA node, and their distribution among the workers of tensor-parallel ranks."""

import contextlib
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_sys import use_sys
from sglang_scout.core import numa
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.numa import (
    ATTENTION,
    background_cpus,
    deal_cpus,
    parse_cpu_list,
    plan_cpus,
    ranges,
)


@contextlib.contextmanager
def machine(cores, nodes=None):
    """Of CPUs n, n + cores, ... each core n has one as an SMT thread; ``nodes``: CPUs by NUMA node, not known."""
    nodes = nodes or {}

    def by_node(cpus):
        return {node: sorted(set(cpus) & set(own)) for node, own in nodes.items()}

    with patch.object(numa, "core_of", lambda cpu: cpu % cores):
        with patch.object(numa, "cpus_by_node", by_node):
            yield


def test_cpus_are_found_on_their_nodes(monkeypatch, tmp_path):
    nodes = {"has_cpu": "0-1", "node0/cpulist": "0-3", "node1/cpulist": "4-7,32"}
    nodes |= {"node2/cpulist": ""}  # memory without CPUs
    use_sys(monkeypatch, tmp_path, {f"devices/system/node/{k}": text for k, text in nodes.items()})
    assert numa.nodes() == [0, 1, 2]
    assert numa.cpus_by_node([32, 5, 1, 0]) == {0: [0, 1], 1: [5, 32]}
    assert numa.cpus_by_node([0, 9]) == numa.cpus_by_node([]) == {}, "9 is of no node"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists(numbers):
    assert parse_cpu_list(ranges(numbers), numbers) == tuple(sorted(numbers))
    assert parse_cpu_list("3, 1, 0 - 2,007", set(range(8))) == (0, 1, 2, 3, 7)
    assert ranges([8, 0, 1, 2, 5]) == "0-2,5,8" and ranges([]) == ""


@pytest.mark.parametrize(
    "text", ["1_0", "+0", "-1", "\u0661", "\u00b2", "0-", "0-1-2", "0,", "1e1", "9" * 5000]
)
def test_no_cpu_list(text):
    with pytest.raises(ConfigError, match="--kv-offload-cpus"):
        parse_cpu_list(text, set(range(64)))


ALONE = 1 << 16  # more cores than CPUs


@pytest.mark.parametrize(
    ("cpus", "homes", "cores", "expected"),
    [
        (range(4), [range(4)] * 2, ALONE, [[0, 1], [2, 3]]),
        (range(8), [range(8)] * 2, 4, [[0, 1, 4, 5], [2, 3, 6, 7]]),  # with SMT: whole cores
        ([0, 8], [[0, 8]] * 2, 8, [[0], [8]]),  # one core for both ranks: one SMT thread each
        # Two nodes with two devices each.
        (range(8), [range(4)] * 2 + [range(4, 8)] * 2, ALONE, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([1, 2, 5], [range(4), range(4, 8)], ALONE, [[1, 2], [5]]),  # of each node what is allowed
        # None or too few of the CPUs in the flag are near a device: evenly.
        ([0, 1, 2, 4], [range(4)] + [range(4, 8)] * 2, ALONE, [[0], [1], [2, 4]]),
        (range(4), [range(3), range(1, 4)], ALONE, [[0, 1], [2, 3]]),  # homes that overlap
    ],
)
def test_dealt(cpus, homes, cores, expected):
    with machine(cores):
        assert deal_cpus(cpus, homes) == expected


SOME = st.sets(st.integers(0, 23), min_size=1)


@given(SOME, st.lists(SOME | st.just(set()), min_size=1, max_size=6))
def test_every_rank_has_cpus_of_its_own_if_there_are_enough(cpus, homes):
    with machine(8):
        dealt = deal_cpus(cpus, homes)
    assert len(dealt) == len(homes)
    for part in dealt:
        assert part and part == sorted(set(part)) and set(part) <= cpus
    if len(cpus) >= len(homes):
        assert sum(map(len, dealt)) == len(set().union(*dealt))
    else:
        assert all(set(part) == cpus for part in dealt)


@pytest.mark.parametrize(
    ("near", "cores", "more", "threads"),
    [
        # The first two cores, or one, are left to the server, and SMT siblings stay free: n and n + 64.
        ([*range(32), *range(64, 96)], 64, (), list(range(2, 32))),
        ([*range(12), *range(64, 76)], 64, (), [*range(2, 12), *range(66, 72)]),  # 16 threads
        ([*range(7), *range(64, 71)], 64, (), [*range(1, 7), *range(65, 71)]),  # 12 at most
        ([5, 6, 7, 70], 64, (), [7]),  # of a cpuset with one SMT thread of most cores
        (range(4), ALONE, (), [2, 3]),
        (range(4), 1, (), [2, 3]),
        (range(3), ALONE, (), [0, 1, 2]),
        ([], 64, (), list(range(2, 64))),  # not known
        # What is given is taken exactly, or the rank's share of it.
        (range(32), 64, [[0, 1, 64, 65]], [0, 1, 64, 65]),
        (range(32), 64, [[0, 1, 64, 65], [0, 64]], [0, 64]),
    ],
)
def test_attention_threads(near, cores, more, threads):
    with machine(cores):
        assert plan_cpus(range(96), near, *more).threads == threads


@given(SOME, SOME | st.none(), SOME | st.none(), SOME | st.none())
def test_the_table_has_each_cpu_once(allowed, near, given, share):
    given, share = given and given & allowed, share and share & allowed
    with machine(8):
        plan = plan_cpus(allowed, near, given, share)
    assert plan.threads and len(set(plan.threads)) == len(plan.threads)
    any_cpu = set(range(1 << 16))
    told = [(cpu, row.used_by) for row in plan.rows for cpu in parse_cpu_list(row.cpus, any_cpu)]
    online = set(numa.read_cpus("devices/system/cpu/online"))
    assert len(dict(told)) == len(told) and set(dict(told)) == allowed | online
    assert {cpu for cpu, used_by in told if used_by == ATTENTION} == set(plan.threads)
    assert bool(plan.warning) == bool(near and not given and not near & allowed)


NODES = {0: [*range(4), *range(64, 68)], 1: range(4, 8)}


@pytest.mark.parametrize(
    ("allowed", "workers", "nodes", "expected"),
    [
        # Free SMT siblings of the workers, rather than the server's second core.
        ([*range(8), *range(64, 72)], [2, 3], NODES, [66, 67]),
        # The server's CPUs on the GPU's node, except its first core.
        ([*range(8), *range(64, 68)], [2, 3, 66, 67], NODES, [1, 65]),
        ([0, 64, 2, 3], [2, 3], NODES, [0, 64]),  # it has kept one
        (range(8), [0, 1, 2, 3], NODES, [5, 6, 7]),  # none of that node are left: of others
        # The server's first core is on another node: all of its CPUs on the workers' node.
        (range(16), range(8, 12), {0: range(8), 1: range(8, 16)}, [12, 13, 14, 15]),
        (range(4), [2, 3], {}, [1]),
        (range(2), [0, 1], NODES, []),
    ],
)
def test_what_can_wait_keeps_off_the_server_s_first_core(allowed, workers, nodes, expected):
    with machine(64, nodes):
        assert background_cpus(allowed, workers) == expected
