"""How many threads share a sequence: core/split.py, and that C++ does the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.core.split import Split

counts = st.lists(st.integers(0, 4096), min_size=1, max_size=64)
splits = st.builds(Split, st.integers(1, 256), st.integers(1, 16), st.integers(1, 600))


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([64], 8),  # one sequence: up to `most` threads
        ([6], 3),  # runs of at least two pages
        ([3], 1),
        ([64] * 5, 7),  # 36 threads: seven each, one is left over
        ([64] * 10, 3),
        ([64] * 36, 1),
        ([64] * 64, 1),
        ([6] * 63 + [64], 4),  # one that lacks ten times as many as the others
        ([0, 0], 1),
    ],
)
def test_what_keeps_36_threads_busy(pages, runs):
    assert Split(threads=36, most=8, least_pages=2).runs(sum(pages), max(pages)) == runs


def test_one_thread_splits_nothing():
    assert Split().runs(512, 512) == 1


@given(counts, splits)
def test_runs_are_within_bounds_and_no_shorter_than_worth_it(pages, split):
    runs = split.runs(sum(pages), max(pages))
    assert 1 <= runs <= split.most
    if runs > 1:
        assert max(pages) >= runs * split.least_pages
        assert max(pages) * split.threads >= runs * sum(pages)  # none below a thread's share
