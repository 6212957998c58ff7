"""Five minutes of the soak, in three cases.

SCOUT_SOAK_S=600 scripts/test.sh -m slow test/e2e/test_soak.py -s
"""

from __future__ import annotations

import os
import random

import pytest

from soak import CASES, soak

SOAK_S = float(os.environ.get("SCOUT_SOAK_S", "100"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_soak(case):
    report = soak(case, SOAK_S, seed=random.SystemRandom().randrange(1 << 30))
    print(report.table())
    assert not report.problems(), report.table()
