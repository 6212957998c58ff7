"""Residency in C++ against the plain one, and the purpose of its rules."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plain_residency import PlainResidency
from sglang_scout.ops.residency import EXCHANGE_MARGIN, Reservation, ResidencyTable

LAYERS, PAGES, BATCH, K = 3, 60, 3, 5
EVERY = np.arange(LAYERS)


def ids(*pages):
    return np.array(pages, np.int64)


def entries(taken: Reservation):
    return list(zip(*(x.tolist() for x in taken), strict=True))


def check_same(table, plain):
    metadata = table.metadata
    for name in ("slot_of", "page_of", "is_pending", "frequency", "stamp"):
        assert (getattr(metadata, name) == getattr(plain, name)).all(), name
    assert metadata.generation.tolist() == plain.generation
    free = zip(metadata.free.tolist(), metadata.num_free, strict=True)
    assert [slots[:count] for slots, count in free] == plain.free
    is_page = table.page_of >= 0  # slot attributes equal those of their pages
    at = EVERY[:, None], np.maximum(table.page_of, 0)
    assert (metadata.slot_frequency == np.where(is_page, plain.frequency[at], np.inf)).all()
    assert (metadata.slot_stamp == plain.stamp[at])[is_page].all()


@pytest.mark.parametrize("slots", [1, 7, 40])
@given(seed=st.integers(0, 2**32 - 1))
def test_as_the_plain_one_whatever_happens(slots, seed):
    rng = np.random.default_rng(seed)
    half_life_steps = float(rng.choice([0.5, 8.0, 1024.0]))
    table = ResidencyTable(LAYERS, PAGES, slots, half_life_steps)
    plain = PlainResidency(LAYERS, PAGES, slots, half_life_steps)
    table.take_changes()
    elsewhere, in_flight, step = table.slot_of.copy(), [], 0
    content = {}  # (layer, slot) -> page and generation when the copy began
    for _ in range(30):
        step += int(rng.choice([1, 1, 60]))  # far apart, frequencies are rescaled
        chosen = rng.integers(-1, PAGES, (LAYERS, BATCH, K), np.int32)
        chosen //= np.int32(rng.choice([1, 2, 4]))
        some, fresh = np.flatnonzero(rng.random(LAYERS) < 0.8), rng.random(BATCH) < 0.3
        before, is_forced = step - int(rng.integers(0, 3)), bool(rng.integers(2))
        both = rng.choice([0, 0, 1, slots // 2 + 1]), rng.choice([0.0, 0.3, 0.9])
        for one in (table, plain):
            one.held_back, one.pin_share = both
        match rng.integers(6):
            case 0 | 1:
                table.uses.touch(some, chosen[some], step, fresh)
                plain.touch(some, chosen[some], step, fresh)
                used = rng.integers(-1, PAGES, 2)
                assert table.touch_all_layers(used, step) == plain.touch_all_layers(used, step)
            case 2:
                taken = table.exchange(EVERY[:, None, None], chosen, before)
                assert entries(taken) == plain.exchange(chosen, before)
                in_flight.append(taken)
            case 3:
                taken = table.reserve(EVERY[:, None, None], chosen, is_forced)
                assert entries(taken) == plain.exchange(chosen, None, is_forced)
                in_flight.append(taken)
            case 4 if in_flight:
                taken = in_flight.pop(rng.integers(len(in_flight)))
                content |= {(e[0], e[2]): (e[1], e[3]) for e in entries(taken)}
                assert table.commit(taken, step - 1) == plain.commit(entries(taken), step - 1)
            case 5 if rng.random() < 0.5:
                gone = rng.integers(0, PAGES, 5)
                table.invalidate(gone)
                plain.invalidate(gone)
            case _:
                want = rng.integers(-1, 4, LAYERS)
                asked = want, before, is_forced
                assert table.evict(EVERY, *asked) == plain.evict(*asked)
        check_same(table, plain)
        for layer, slot in np.argwhere(table.page_of >= 0).tolist():  # the right content
            page = int(table.page_of[layer, slot])
            assert content[layer, slot] == (page, plain.generation[page])
        changed, now = table.take_changes()
        assert len(np.unique(changed)) == len(changed)
        elsewhere.reshape(-1)[changed] = now
        assert (elsewhere == table.slot_of).all()


def most_frequent_by_a_look_at_all(frequency, layers, missed, counts, is_first, limits):
    found = []
    for i, layer in enumerate(layers):
        worth = defaultdict(lambda: (2,))
        for b in np.flatnonzero(counts[i]):
            for page in missed[i, b][missed[i, b] >= 0].tolist():
                rank = (0 if is_first[b] else 1, -frequency[layer, page], page)
                worth[page] = min(rank, worth[page])
        best = sorted(worth, key=worth.__getitem__)[: max(limits[i], 0)]
        found += [(layer, page) for page in sorted(best)]
    return found


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 4))
def test_the_most_frequent_of_those_missed(seed, rows):
    rng = np.random.default_rng(seed)
    uses = ResidencyTable(LAYERS, PAGES, 1).uses
    uses.frequency[:] = rng.integers(0, 4, uses.frequency.shape)  # many are equal
    layers = np.flatnonzero(rng.random(LAYERS) < 0.8)
    wide = rng.integers(-1, PAGES, (len(layers), rows + 1, K), np.int32)
    missed = wide[:, :rows]  # with the strides of a larger batch
    asked = rng.random((len(layers), rows)) < 0.7, rng.random(rows) < 0.3
    limits = rng.integers(-1, 12, len(layers))
    found = uses.most_frequent(layers, missed, *asked, limits)
    expected = most_frequent_by_a_look_at_all(uses.frequency, layers, missed, *asked, limits)
    assert list(zip(*(x.tolist() for x in found), strict=True)) == expected
    counts = uses.count(missed)
    assert counts.dtype == np.int64 and (counts == (missed >= 0).sum(2)).all()


def table_of(slots, resident):
    made = ResidencyTable(2, 20, slots)
    made.commit(made.reserve(0, ids(*resident)), 0)
    return made


def touch(made, pages, step, fresh=None):
    """``pages`` of layer 0, of one row or ``[B, k]``."""
    rows = np.atleast_2d(pages).astype(np.int32)
    fresh = np.zeros(len(rows), bool) if fresh is None else fresh
    made.uses.touch(np.array([0]), rows[None], step, fresh)


def resident(made):
    return np.flatnonzero(made.slot_of[0] >= 0).tolist()


def test_a_page_selected_once_does_not_push_out_one_that_is_selected_often():
    made = table_of(slots=3, resident=(1, 2, 3))
    for step in range(1, 21):
        touch(made, ids(1, 2) if step % 2 else ids(2), step)
    touch(made, ids(9, 2), 21)
    made.commit(made.exchange(0, ids(9), 21), 21)
    # Page 3 was never selected. Page 1 is less recent than 9, yet more frequent.
    assert resident(made) == [1, 2, 9]
    assert not len(made.exchange(0, ids(8), 21).pages), "never selected: not worth a slot"


def test_two_pages_of_equal_use_do_not_change_places_and_a_clearly_more_frequent_one_wins():
    made = table_of(slots=1, resident=(1,))
    moved = 0
    for step in range(1, 101):
        page, other = (1, 7) if step % 2 else (7, 1)
        touch(made, ids(page), step)
        if made.slot_of[0, page] < 0:
            taken = made.exchange(0, ids(page), step)
            moved += len(taken.pages)
            made.commit(taken, step)
    assert moved <= 2
    loser = resident(made)[0]
    while not len(made.exchange(0, ids(9), step).pages):
        assert made.uses.frequency[0, 9] <= EXCHANGE_MARGIN * made.uses.frequency[0, loser]
        step += 1
        touch(made, ids(9), step)
    assert step < 110


def test_a_newcomer_s_pages_count_as_selected_for_long():
    made = table_of(slots=2, resident=(1, 2))
    for step in range(1, 40):
        touch(made, ids(1, 2), step)
    touch(made, np.array([[1, 2], [8, 9]]), 40, np.array([False, True]))
    frequency = made.uses.frequency[0]
    assert frequency[8] == frequency[9] == pytest.approx(frequency[1], rel=0.1)


def test_what_is_out_of_range_is_refused_before_anything_is_written():
    table = ResidencyTable(2, 9, 4)
    uses, metadata, rows = table.uses, table.metadata, np.zeros(1, bool)
    one, two = (np.zeros((1, n, 1), np.int32) for n in (1, 2))
    refused = [
        ("num_slots=0", ResidencyTable, 1, 1, 0),
        (r"touch: layers is \[2\], expected \[1\]", uses.touch, np.arange(2), one, 1, rows),
        (r"touch: weights is \[1\], expected \[2\]", uses.touch, np.arange(1), two, 1, rows),
        ("limits", uses.most_frequent, np.arange(1), one, ~rows[None], rows, np.arange(2)),
        ("free slots", metadata.reserve, ids(0, 9, 10, 11, 12, 13)),
        ("expected", metadata.land, ids(0), ids(1), ids(0), ids(0, 0), 1),
        ("expected", metadata.vacate, ids(0, 1), ids(0)),
        ("no page", metadata.vacate, ids(0), ids(0)),
    ]
    for layer, page in ((2, 1), (-1, 1), (0, 9), (0, -2), (0, 2**31 - 1)):
        layers, missed = ids(layer), np.array([[[3, page]]], np.int32)
        refused.append(("out of range", uses.touch, layers, missed, 1, rows))
        most = layers, missed, ~rows[None], rows, ids(1)
        refused.append(("out of range", uses.most_frequent, *most))
    for bad in (-1, 18):
        message = f"has {bad}, expected"
        refused.append((f"keys {message}", metadata.absent, ids(3, bad)))
        refused.append((f"keys {message}", metadata.reserve, ids(3, bad)))
        refused.append((f"pages {message}", metadata.protect, ids(3, bad), 1))
    for second in ((2, 1, 0), (0, 9, 1), (1, 1, 4), (-1, 1, 0)):  # layer, page, slot
        entries = [ids(*x) for x in zip((0, 1, 0), second, strict=True)]
        message = r"land: \w+ has -?\d, expected values in"
        refused.append((message, metadata.land, *entries, ids(0, 0), 1))
    for message, call, *arguments in refused:
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    with pytest.raises(TypeError):  # would be another page
        uses.touch(np.arange(1), np.full((1, 1, 1), 2**32 + 5), 1, rows)
    assert (uses.frequency == 0).all() and (uses.stamp == -1).all()
    assert (table.slot_of == -1).all() and (metadata.num_free == 4).all()


@pytest.mark.parametrize("half_life_steps", [8.0, 1024.0])
def test_a_year_of_steps_is_like_the_first(half_life_steps):
    """A step of 10 ms is more than an int32 after 248 days."""
    early, late = tables = [ResidencyTable(LAYERS, PAGES, 7, half_life_steps) for _ in range(2)]
    start, fresh = 2**32, np.zeros(BATCH, bool)
    for step in range(2**29, start, 2**29):
        late.uses.touch(EVERY, np.full((LAYERS, BATCH, K), 59, np.int32), step, fresh)
    late.uses.stamp[:] = np.minimum(late.uses.stamp, late.uses.stamp_of(start) - 2)
    late.uses.frequency[:] = 0.0
    rng = np.random.default_rng(1)
    for step in range(1, 40):
        chosen = rng.integers(-1, 20, (LAYERS, BATCH, K), np.int32)
        found = []
        for table, now in ((early, step), (late, start + step)):
            table.uses.touch(EVERY, chosen, now, fresh)
            table.touch_all_layers(chosen[0], now)
            table.commit(table.exchange(EVERY[:, None, None], chosen, now), now)
            evicted = table.evict(EVERY, 2, now - 1)
            found.append((evicted, [x.tolist() for x in table.uses.selected_since(EVERY, now - 1)]))
        assert found[0] == found[1] and (early.page_of == late.page_of).all()
    assert all((table.page_of >= 0).any() for table in tables)
