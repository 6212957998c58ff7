"""How many threads share a sequence: sgl-kernel/src/split.h."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout import _native
from sglang_scout.worker.ring import Split

counts = st.lists(st.integers(0, 4096), min_size=1, max_size=64)
splits = st.builds(Split, st.integers(1, 256), st.integers(1, 16), st.integers(1, 600))


def runs_of(split: Split, pages: list[int]) -> int:
    return _native.split_runs(*split, sum(n > 0 for n in pages), sum(pages), max(pages))


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([64], 8),  # one sequence: up to `most` threads
        ([3], 1),  # runs of at least two pages
        ([64] * 5, 7),  # 36 threads: seven each, one left over
        ([64] * 10, 7),  # two rounds of nine pages; three runs each would be one round of 21
        ([64] * 36, 1),
        ([64] * 37, 8),  # one each would leave the last to a single thread
        ([8, 64, 0, 0, 8], 8),
        ([6] * 600 + [64], 1),  # it is done when the others are
        ([0, 0], 1),
    ],
)
def test_what_keeps_36_threads_busy(pages, runs):
    assert runs_of(Split(), pages) == 1, "one thread splits nothing"
    assert runs_of(Split(threads=36, most=8, least_pages=2), pages) == runs


@given(counts, splits)
def test_runs_are_within_bounds_and_no_shorter_than_worth_it(pages, split):
    runs = runs_of(split, pages)
    assert 1 <= runs <= split.most
    if runs > 1:
        assert max(pages) >= runs * split.least_pages
        assert runs * sum(n > 0 for n in pages) <= _native.RUNS_PER_THREAD * split.threads
