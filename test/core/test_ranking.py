import numpy as np

from sglang_scout.core.ranking import distinct, rank_within


def test_ranks_and_distinct_values():
    assert rank_within(np.array([0, 0, 2, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2, 0]
    assert not len(rank_within(np.zeros(0, np.int64))) and not len(distinct(np.zeros(0, np.int32)))
    assert distinct(np.array([[3, 1], [3, -1]], np.int32)).tolist() == [-1, 1, 3]
