"""Requests join with their first pages resident, and no step waits for the copies."""

import numpy as np
import pytest
import torch

from mini_worker import SIZE
from page_weights import rule_of
from sglang_scout.engine.requests import (
    HINT_PAGES,
    PageHints,
    QueryHints,
    choose_hint,
    has_hint,
    hint_bytes,
    hints_of,
)
from sglang_scout.engine.stores import ModelShape
from stand_ins import with_slow_link

PROMPT = 60 * SIZE + 7
BUDGET = 8  # pages


def small(make, **kwargs):
    keys = {"budget_tokens": BUDGET * SIZE, "max_batch": 4, "pages": 300, "drift": 0.05}
    worker = make(**keys | {"config": '{"recall": "off"}'} | kwargs)
    worker.engine.parts.policy.residency.patience_us = None
    worker.hidden[:] = worker.hidden[:1].clone()  # of all layers, so that predictions are right
    return worker


def arrive(worker, request, row):
    """Arrives with the hint of a prefill server for the queries of ``row``."""
    full = np.array(request.pages[: request.length // SIZE], np.int64)
    worker.digests.build(full[~worker.digests.valid[full]], worker.host)
    hidden = worker.hidden[:, row : row + 1]
    queries = torch.cat([worker.project(i, x) for i, x in enumerate(hidden)])
    rule, scale = worker.engine.parts.policy.rule, worker.shape.scale
    hint = choose_hint(worker.digests, queries, full, rule, scale)
    worker.engine.requests.arrive(request.slot, full, hint)
    return full if len(full) <= BUDGET else full[hint[:, :BUDGET]]


def waits(worker, *requests, room=4):
    waiting = worker.engine.requests.queue([r.slot for r in requests], room)
    return [r.slot in waiting for r in requests]


def cpu_pages(worker, row):
    """Of the last step."""
    return int((worker.engine._results.missing[:, row] >= 0).sum())


def resident(worker, pages):
    every = np.arange(worker.shape.num_layers)[:, None]
    return worker.table.slot_of[every, np.broadcast_to(pages, (len(every), pages.shape[-1]))] >= 0


@pytest.mark.parametrize("length", [PROMPT, BUDGET * SIZE - 3])
def test_hinted_pages_are_copied_beside_a_step_and_resident_in_the_first_one(make, length):
    worker = small(make)
    worker.admit(500)
    worker.step()
    request = worker.bring(length, slot=1)
    pages = arrive(worker, request, 1)
    assert waits(worker, request) == [True]
    link = with_slow_link(worker)
    worker.step()
    assert waits(worker, request) == [False] and link.forced == 0
    assert not resident(worker, pages).any()
    link.run(99)
    worker.join(request)
    worker.step()
    assert link.forced == 0
    assert resident(worker, pages).all()
    assert cpu_pages(worker, 1) <= 0.3 * BUDGET * worker.shape.num_layers
    assert worker.engine.parts.counters.verify_max_rel_error <= 1e-5


@pytest.mark.parametrize("is_retracted", [False, True])
def test_without_a_hint_the_first_step_misses_all_but_sink_and_newest(make, is_retracted):
    worker = small(make)
    worker.admit(500)
    worker.step()
    request = worker.bring(PROMPT, slot=1)
    if not is_retracted:  # then it resumes without an arrival
        worker.engine.requests.arrive(1, np.array(request.pages[:60]), None)
        worker.step()
    worker.join(request)
    delays = [key for key, _ in worker.engine.parts.counters.observed if "admission" in key]
    assert len(delays) == (not is_retracted), "of a request whose KV has just arrived"
    worker.step()
    assert cpu_pages(worker, 1) == (BUDGET - 2) * worker.shape.num_layers


def test_with_nobody_to_wait_the_first_boundary_copies(make):
    """Also into slots of pages that the last request left in the same step."""
    worker = small(make)
    worker.finish(worker.admit(PROMPT))
    worker.free_pages.sort()
    request = worker.bring(PROMPT)
    pages = arrive(worker, request, 0)
    worker.join(request)
    worker.step()
    assert resident(worker, pages).all()
    assert cpu_pages(worker, 0) <= 0.3 * BUDGET * worker.shape.num_layers


def test_only_those_with_room_are_copied_for_and_those_that_have_gone_are_forgotten(make):
    worker = small(make)
    worker.admit(500)
    worker.step()
    coming = [worker.bring(PROMPT, slot=slot) for slot in (3, 1, 2)]
    for request in coming:
        arrive(worker, request, 1)
    assert waits(worker, *coming, room=1) == [True] * 3
    worker.step()
    assert waits(worker, *coming, room=0) == [False, True, True]
    worker.step()
    assert waits(worker, *coming[1:], room=1) == [True, True], "no room, no turn"
    worker.step()
    assert waits(worker, *coming, room=1) == [False, False, True], "the first was forgotten"


def test_a_prompt_within_the_budget_has_all_its_pages_even_if_their_copies_are_late(make):
    worker = small(make, config='{"recall": "adaptive"}')  # which does not wait long
    worker.engine.parts.policy.residency.patience_us = 0
    worker.admit(500)
    worker.step()
    request = worker.bring(BUDGET * SIZE - 3, slot=1)
    pages = arrive(worker, request, 1)
    waits(worker, request)
    link = with_slow_link(worker)
    worker.step()
    assert waits(worker, request) == [False] and not resident(worker, pages).any()
    worker.join(request)
    worker.step()
    assert link.forced and resident(worker, pages).all() and cpu_pages(worker, 1) == 0


def test_without_digests_the_hint_is_the_last_tokens_queries():
    shape = ModelShape(3, 4, 2, 16, 32, torch.float32, 1.0)
    hints, queries = QueryHints(shape, 9), torch.randn(3, 4, 16)
    queries[0, 0, 0], queries[1] = 1e6, 0
    assert hints_of(rule_of("none")) is QueryHints and hints.of(4, 8) is None
    hints.put(4, choose_hint(None, queries, None, rule_of("none"), 1.0))
    found = hints.of(4, 8)
    assert found[0, 0, 0] == torch.finfo(torch.float16).max
    found[0, 0, 0] = queries[0, 0, 0]
    torch.testing.assert_close(found, queries, rtol=1e-3, atol=1e-4)
    assert sum(part[:, 4].nbytes for part in hints.parts) == hint_bytes(rule_of("none"), shape)
    row = hints.parts[0][0].data_ptr(), hints.parts[0][0, 0].nbytes
    assert has_hint(*row, 4) and not has_hint(*row, 3)
    hints.clear(np.array([4]))
    assert hints.of(4, 8) is None and not has_hint(*row, 4)


def test_a_hint_is_in_the_row_of_its_prompts_last_page():
    shape = ModelShape(3, 4, 2, 64, SIZE, torch.float32, 0.125)
    hints, places = PageHints(shape, 9), np.full((3, HINT_PAGES), -1, np.int32)
    places[:, :3] = 0, 7, 5
    assert hints.of(4, 8) is None
    hints.put(4, places)
    assert (hints.of(4, 8) == places).all()
    assert (hints.of(4, 6)[0, :3] == [0, -1, 5]).all(), "of another prompt: no place beyond its end"
    assert hints.of(3, 8) is None
    hints.clear(np.array([4]))
    assert hints.of(4, 8) is None
