"""Distribution of CPUs among the workers of tensor-parallel ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.worker import numa
from sglang_scout.worker.cpus import (
    ATTENTION,
    background_cpus,
    deal_cpus,
    plan_cpus,
    reserve_server_cores,
)

ANY = set(range(1 << 16))


def alone(cpu):
    return cpu


def sibling(cpu):
    """Sixteen CPUs, eight cores: n and n + 8 are threads of one."""
    return cpu % 8


@pytest.mark.parametrize(
    ("cpus", "homes", "cores", "expected"),
    [
        (range(4), [range(4)] * 2, alone, [[0, 1], [2, 3]]),
        # One node with two devices and SMT: whole cores.
        (range(16), [range(16)] * 2, sibling, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        # One core for both ranks: one SMT thread each.
        ([0, 8], [[0, 8]] * 2, sibling, [[0], [8]]),
        # Two nodes with two devices each.
        (range(8), [range(4)] * 2 + [range(4, 8)] * 2, alone, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # The CPUs of each node that the flag allows.
        ([1, 2, 5], [range(4), range(4, 8)], alone, [[1, 2], [5]]),
        # None or too few of the CPUs in the flag are near a device: evenly.
        ([0, 1, 2, 4], [range(4)] + [range(4, 8)] * 2, alone, [[0], [1], [2, 4]]),
        # Overlapping homes are ignored.
        (range(4), [range(3), range(1, 4)], alone, [[0, 1], [2, 3]]),
    ],
)  # fmt: skip
def test_dealt(cpus, homes, cores, expected):
    assert deal_cpus(cpus, homes, cores) == expected


SOME = st.sets(st.integers(0, 23), min_size=1)


@given(SOME, st.lists(SOME | st.just(set()), min_size=1, max_size=6))
def test_every_rank_has_cpus_of_its_own_if_there_are_enough(cpus, homes):
    dealt = deal_cpus(cpus, homes, sibling)
    assert len(dealt) == len(homes)
    for part in dealt:
        assert part and part == sorted(set(part)) and set(part) <= cpus
    if len(cpus) >= len(homes):
        assert sum(map(len, dealt)) == len(set().union(*dealt))
    else:
        assert all(set(part) == cpus for part in dealt)


def of_64(cpu):
    """Of a node with the CPUs 0-31 and 64-95: n and n + 64 are threads of one core."""
    return cpu % 64


@pytest.mark.parametrize(
    ("cpus", "cores", "left"),
    [
        ([*range(32), *range(64, 96)], of_64, [0, 1, 64, 65]),
        ([*range(7), *range(64, 71)], of_64, [0, 64]),
        ([5, 6, 7, 70], of_64, [5, 6, 70]),  # a cpuset with one SMT thread of most cores
        (range(4), alone, [0, 1]),
        (range(4), lambda cpu: 0, [0, 1]),  # one core
        (range(3), alone, []),
    ],
)
def test_whole_cores_are_left_to_a_server(cpus, cores, left):
    assert reserve_server_cores(cpus, cores) == sorted(set(cpus) - set(left))


@pytest.mark.parametrize(
    ("near", "threads"),
    [
        ([*range(32), *range(64, 96)], list(range(2, 32))),  # siblings stay free
        # Some siblings, for 16 threads.
        ([*range(12), *range(64, 76)], [*range(2, 12), *range(66, 72)]),
        ([*range(7), *range(64, 71)], [*range(1, 7), *range(65, 71)]),  # 12 at most
        ([5, 6, 7, 70], [7]),  # 6 is left to the server, and so is its sibling
        ([], list(range(2, 64))),  # not known
    ],
)
def test_smt_siblings_are_taken_last(near, threads):
    assert plan_cpus(range(96), near, core_of=of_64).threads == threads


def test_what_is_given_is_taken_exactly():
    given = [0, 1, 64, 65]
    assert plan_cpus(range(96), range(32), given, core_of=of_64).threads == given
    assert plan_cpus(range(96), range(32), given, [0, 64], core_of=of_64).threads == [0, 64]


@given(SOME, SOME | st.none(), SOME | st.none(), SOME | st.none())
def test_the_table_has_each_cpu_once(allowed, near, given, share):
    given, share = given and given & allowed, share and share & allowed
    plan = plan_cpus(allowed, near, given, share, sibling)
    assert plan.threads and len(set(plan.threads)) == len(plan.threads)
    told = [(cpu, row.used_by) for row in plan.rows for cpu in parse_cpu_list(row.cpus, ANY)]
    assert len(dict(told)) == len(told) and set(dict(told)) == allowed | set(
        numa.read_cpus("devices/system/cpu/online")
    )
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
        # None of that node are left: those of other nodes.
        (range(8), [0, 1, 2, 3], NODES, [5, 6, 7]),
        # The server's first core is on another node: all of its CPUs on the workers' node.
        (range(16), range(8, 12), {0: range(8), 1: range(8, 16)}, [12, 13, 14, 15]),
        (range(4), [2, 3], {}, [1]),
        (range(2), [0, 1], NODES, []),
    ],
)
def test_what_can_wait_keeps_off_the_server_s_first_core(allowed, workers, nodes, expected):
    assert background_cpus(allowed, workers, nodes, of_64) == expected
