"""The controller of adaptive recall, in a simulation where pages drift at known rates."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_scout.engine import RESULT_DELAY_STEPS
from sglang_scout.engine.policy import StepReport
from sglang_scout.policy.residency import (
    GRACE_STEPS,
    MAX_INTERVAL_STEPS,
    RecallController,
    share,
)

ROWS, BUDGET_PAGES = 4, 64
CAPACITY = ROWS * BUDGET_PAGES
BETA = 0.12
PLENTY = 10**6


def controller(layers, **kwargs):
    settings = {"intervals": [8] * layers, "threshold": BETA, "step_pages": PLENTY} | kwargs
    return RecallController(**settings)


class World:
    """Layers whose misses grow by ``drift`` of the budget per step, and a link that may be slow.

    Args:
        worth: per layer, share of the recalled pages that are still selected when they land.
        link_pages: pages that the link copies per step.
    """

    def __init__(self, control, drift, worth=1.0, link_pages=PLENTY):
        self.control = control
        self.layers = len(drift)
        self.drift = np.array(drift, float)
        self.worth = np.broadcast_to(np.array(worth, float), self.layers)
        self.link_pages = link_pages
        self.missing = np.zeros(self.layers)  # pages
        # Their values at each step whose results are not known yet.
        unknown = np.zeros((RESULT_DELAY_STEPS, self.layers))
        self.measured = deque(unknown, maxlen=RESULT_DELAY_STEPS)
        self.queued = np.zeros(self.layers)  # pages on the link
        self.started, self.landed = np.zeros((2, self.layers), np.int64)
        self.useful = np.zeros(self.layers)  # landed pages not yet reported
        self.late_pages = 0
        self.steps = 0
        self.ratios, self.copies, self.late = [], [], []

    def step(self, warming_missed=0):
        """One boundary and one step; ``warming_missed`` pages per layer of a request in its 2nd step."""
        missed = np.zeros((self.layers, ROWS + 1), np.int64)
        self._spread(missed, self.measured[0])
        missed[:, ROWS] = warming_missed
        absent = missed.copy()
        self._spread(absent, np.minimum(self.measured[0], self.missing - self.queued))
        self.useful += self.landed * self.worth
        used = np.floor(self.useful + 1e-9).astype(np.int64)
        self.useful -= used
        self.control.plan(
            StepReport(
                step=self.steps,
                budget_pages=BUDGET_PAGES,
                ages=np.array([100] * ROWS + [1], np.int64),
                missed=missed,
                absent=absent,
                started=self.started,
                landed=self.landed,
                used=used,
                late_pages=self.late_pages,
                spare_slots=self.queued,
            )
        )
        self.steps += 1
        self.missing = np.minimum(self.missing + self.drift * CAPACITY, CAPACITY)
        self.measured.append(self.missing.copy())
        self.ratios.append(self.missing / CAPACITY)
        warmed = np.minimum(self.control.granted, warming_missed)  # there by the next step
        wanted = np.where(self.control.is_due, np.floor(self.missing - self.queued), 0)
        recalled = np.clip(wanted, 0, self.control.granted - warmed).astype(np.int64)
        self.started = warmed + recalled
        self.queued += recalled
        carried = min(1.0, self.link_pages / max(self.queued.sum(), 1e-9)) * self.queued
        self.landed = np.floor(carried + 1e-9).astype(np.int64)
        self.queued -= self.landed
        self.missing = np.maximum(self.missing - self.landed * self.worth, 0)
        self.late_pages = int(self.queued.sum())
        self.copies.append(self.started)
        self.late.append(self.late_pages)

    def _spread(self, table, pages):
        """Distribute ``pages`` [L] over the rows."""
        table[:, :ROWS] = (pages / ROWS)[:, None]
        table[:, 0] += np.round(pages).astype(np.int64) - table[:, :ROWS].sum(axis=1)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def gaps(self, layer, after=0):
        """Steps between recalls of a layer."""
        return np.diff(np.flatnonzero(np.array(self.copies[after:])[:, layer]))


def test_every_layer_is_held_under_the_threshold_with_as_few_copies_as_its_drift_needs():
    drift = [0.004, 0.01, 0.03, 0.055]
    world = World(controller(4), drift).run(400)
    ratios = np.array(world.ratios[100:])
    assert (ratios.max(axis=0) <= BETA + 1 / CAPACITY).all(), ratios.max(axis=0)
    for layer, speed in enumerate(drift):
        # From zero exactly to the threshold: the longest valid interval.
        longest = int(BETA / speed)
        assert longest - 3 <= np.mean(world.gaps(layer, 100)) <= longest + 1, (layer, longest)
        assert abs(world.control.describe()["intervals"][layer] - longest) <= 3


def test_it_follows_a_workload_that_speeds_up_and_one_that_stops():
    world = World(controller(3), [0.008] * 3).run(150)
    slow = np.mean(world.gaps(0, 50))
    world.drift[:] = 0.05
    world.run(60)
    assert (np.array(world.ratios[-50:]) <= BETA + 1 / CAPACITY).all()
    assert np.mean(world.gaps(0, 170)) < slow / 3
    world.drift[:] = 0
    world.run(100)
    assert np.sum(world.copies[-60:]) <= CAPACITY * BETA * 3, "nothing moves"


def test_without_drift_a_layer_waits_for_the_longest_interval_and_with_much_it_never_waits():
    world = World(controller(2, intervals=[0, 8]), [0.0, 0.2])
    world.missing[0] = 5
    world.run(MAX_INTERVAL_STEPS + 10)
    copies = np.array(world.copies)
    assert np.flatnonzero(copies[:, 0]).tolist() == [MAX_INTERVAL_STEPS - 1]
    assert (world.gaps(1, 5) == 1).all()


def test_noise_alone_does_not_raise_the_copies():
    """The same mean drift with and without noise copies about the same."""
    rng = np.random.default_rng(3)
    calm = World(controller(1), [0.012]).run(400)
    noisy = World(controller(1), [0.012])
    for _ in range(400):
        noisy.drift[:] = rng.choice([0.0, 0.012, 0.024])
        noisy.step()
    assert np.mean(np.array(noisy.ratios[100:]) > BETA) < 0.1
    assert np.max(noisy.ratios[100:]) < BETA + 0.024 * RESULT_DELAY_STEPS
    assert len(noisy.gaps(0)) <= 1.4 * len(calm.gaps(0))


@pytest.mark.parametrize("step_pages", [1, 7, 40])
def test_no_step_copies_more_than_its_pages(step_pages):
    world = World(controller(5, step_pages=step_pages), [0.01, 0.02, 0.05, 0.1, 0.3])
    for step in range(200):
        world.step(warming_missed=step % 5)
        assert world.control.granted.sum() + world.control.spare_pages <= step_pages
        assert world.copies[-1].sum() <= step_pages
    assert np.sum(world.copies[-50:]) > 0.9 * 50 * step_pages, "it must have been short of pages"


def test_of_equal_excess_the_pages_that_are_used_come_first():
    world = World(controller(2, step_pages=30), [0.1, 0.1], worth=[1.0, 0.25]).run(200)
    useful, useless = np.sum(world.copies[-100:], axis=0)
    assert useful > 2 * useless > 0
    assert world.ratios[-1][0] < 0.5 * world.ratios[-1][1], "levelled by what a page is worth"


def test_it_backs_off_when_the_link_is_late_and_recovers():
    control = controller(4, step_pages=400)
    world = World(control, [0.03] * 4).run(80)
    assert control.backoffs == 0 and control.limit_pages == 400
    world.link_pages = 12
    world.run(200)
    assert control.backoffs > 0 and control.limit_pages < 30
    assert np.mean(np.array(world.late[-100:]) > 0) < 0.3, "it must not stay late"
    assert max(world.late[-100:]) <= 24
    # After backing off, most of the link's capacity is still used.
    assert np.mean(np.sum(world.copies[-100:], axis=1)) > 0.6 * 12
    world.link_pages = PLENTY
    world.run(400)
    assert control.limit_pages == 400
    assert (np.array(world.ratios[-50:]) <= BETA + 1 / CAPACITY).all()


@pytest.mark.parametrize("age", range(GRACE_STEPS + 1))
def test_every_age_that_may_recall_is_granted_pages(age):
    """Exactly what `RecallController.pick` takes for a row in its grace steps."""
    control, ten, none = controller(1, intervals=[0]), np.array([[10]]), np.zeros(1, np.int64)
    control.plan(StepReport(1, 64, np.array([age]), ten, ten, none, none, none, 0, none))
    assert control.granted.tolist() == [10 if age < GRACE_STEPS else 0]


def test_newcomers_come_first_and_do_not_look_like_drift():
    control = controller(2, step_pages=150)
    world = World(control, [0.001] * 2).run(50)
    intervals = control.describe()["intervals"]
    for _ in range(6):
        world.step(warming_missed=80)  # per layer, more than available
        assert control.granted.sum() == 150
    assert (control.ratio < 0.1).all() and not control.is_due.any()
    assert control.describe()["intervals"] == intervals


def test_a_layer_stays_due_while_newcomers_take_all_copies():
    """Their pages are not recalls of the settled requests, whose misses stay."""
    world, due = World(controller(1, step_pages=80), [0.0]), []
    world.missing[0] = 0.25 * CAPACITY
    for _ in range(30):
        world.step(warming_missed=80)
        due.append(bool(world.control.is_due[0]))
    assert due == [False] * RESULT_DELAY_STEPS + [True] * (30 - RESULT_DELAY_STEPS)
    world.run(2)
    assert np.ravel(world.copies[-2:]).tolist() == [64, 0], "all, in the first step without them"


def test_eager_layers_recall_whatever_they_miss():
    world = World(controller(2, eager_layers=[0]), [0.01, 0.01]).run(100)
    assert (world.gaps(0, 20) == 1).all() and (world.gaps(1, 20) > 5).all()


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
