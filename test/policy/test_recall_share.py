"""Division of a step's pages among layers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.policy.recall_controller import share

counts = st.lists(st.integers(0, 500), min_size=1, max_size=12)


@given(counts, st.integers(0, 3000), st.randoms(use_true_random=False))
def test_shares_take_all_there_is_and_lie_at_a_common_level(wanted, pages, random):
    wanted = np.array(wanted, np.int64)
    worth = np.array([random.uniform(0.05, 1.0) for _ in wanted])
    given_ = share(pages, wanted, worth)
    assert (given_ >= 0).all() and (given_ <= wanted).all()
    assert given_.sum() == min(pages, wanted.sum())
    low, high = 0.0, float((wanted * worth).max())
    for _ in range(60):  # bisection, until the excess above the level equals the supply
        level = (low + high) / 2
        above = np.maximum(wanted - level / worth, 0.0)
        low, high = (level, high) if above.sum() > pages else (low, level)
    assert (abs(given_ - above) < 1 + 1e-6).all()


def test_shares_level_the_excess():
    ones = np.ones(3)
    assert share(30, np.array([50, 40, 5]), ones).tolist() == [20, 10, 0]
    assert share(99, np.array([50, 40, 5]), ones).tolist() == [50, 40, 5]
    assert share(0, np.array([50, 40, 5]), ones).tolist() == [0, 0, 0]
    assert share(5, np.array([10, 10]), np.array([1.0, 0.1])).tolist() == [5, 0]
