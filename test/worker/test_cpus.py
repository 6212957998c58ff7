"""CPUs dealt out to the workers of tensor-parallel ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.worker.cpus import core_of, deal_cpus


def alone(cpu):
    return cpu


def sibling(cpu):
    """Sixteen CPUs, eight cores: n and n + 8 are threads of one."""
    return cpu % 8


@pytest.mark.parametrize(
    ("cpus", "homes", "cores", "expected"),
    [
        (range(4), [range(4)] * 2, alone, [[0, 1], [2, 3]]),
        (range(5), [range(5)] * 2, alone, [[0, 1], [2, 3, 4]]),
        # One node with two devices, of hyperthreads: whole cores.
        (range(16), [range(16)] * 2, sibling, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        # A core for both ranks: a thread each.
        ([0, 8], [[0, 8]] * 2, sibling, [[0], [8]]),
        # Two nodes with two devices each, and in the other order.
        (range(8), [range(4)] * 2 + [range(4, 8)] * 2, alone, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (range(8), [range(4, 8), range(4)], alone, [[4, 5, 6, 7], [0, 1, 2, 3]]),
        # What the flag names of each node.
        ([1, 2, 5], [range(4), range(4, 8)], alone, [[1, 2], [5]]),
        # Nothing that the flag names is near a device, or too little: evenly.
        ([8, 9], [range(4), range(4, 8)], alone, [[8], [9]]),
        ([0, 1, 4], [range(4), range(4), range(4, 8), range(4, 8)], alone, [[0, 1, 4]] * 4),
        ([0, 1, 2, 4], [range(4)] + [range(4, 8)] * 2, alone, [[0], [1], [2, 4]]),
        # Homes that overlap say nothing.
        (range(4), [range(3), range(1, 4)], alone, [[0, 1], [2, 3]]),
        # Fewer CPUs than ranks.
        ([7], [[7], [7]], alone, [[7], [7]]),
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


def test_core_of_this_machine():
    assert core_of(0) == 0
    assert core_of(10**6) == 10**6, "unknown to the kernel"
