"""Which requests join the batch while others decode: SGLang's queue, with requests whose copies have not started."""

from types import SimpleNamespace

import pytest

from sglang_scout.plugin import decode as hooks


class Arrivals:
    def __init__(self):
        self.unstarted = set()

    def queue(self, requests, room):
        self.names, self.room = list(requests), room
        return self.unstarted & set(self.names)


class Scheduler:
    """The part of SGLang's scheduler that ``get_new_prebuilt_batch`` uses."""

    def __init__(self, running, most, *names):
        self.enable_priority_scheduling, self.max_running_requests = False, most
        self.req_to_token_pool = SimpleNamespace(size=2 * most)
        self.running_batch = SimpleNamespace(
            is_empty=lambda: not self.running, batch_size=lambda: self.running
        )
        self.policy = SimpleNamespace(
            calc_priority=lambda queue, _: queue.sort(key=lambda r: r.rid)
        )
        self.running, self.waiting_queue = running, [SimpleNamespace(rid=name) for name in names]

    def names(self):
        return [request.rid for request in self.waiting_queue]


def join(scheduler):
    room = scheduler.max_running_requests - scheduler.running
    joined, scheduler.waiting_queue = scheduler.waiting_queue[:room], scheduler.waiting_queue[room:]
    return [request.rid for request in joined]


@pytest.fixture
def arrivals(monkeypatch):
    arrivals = Arrivals()
    boundary = SimpleNamespace(arrivals=arrivals)
    backend = SimpleNamespace(engine=SimpleNamespace(boundary=boundary))
    monkeypatch.setattr(hooks, "current_backend", lambda: backend)
    return arrivals


def test_those_whose_copies_have_not_begun_wait_and_keep_their_place(arrivals):
    scheduler = Scheduler(3, 4, "a", "b", "c")
    arrivals.unstarted = {"a", "c"}
    assert hooks.around_get_new_prebuilt_batch(join, scheduler) == ["b"]
    assert scheduler.names() == ["a", "c"]
    assert (arrivals.names, arrivals.room) == (["a", "b", "c"], 1)


def test_with_a_full_batch_the_oldest_joins_first_whoever_comes(arrivals):
    scheduler, order = Scheduler(4, 4, "a"), []
    for name in "bcdefg":
        scheduler.waiting_queue.append(SimpleNamespace(rid=name))
        arrivals.unstarted = {name}
        scheduler.running = 3 if name > "b" else 4
        order += hooks.around_get_new_prebuilt_batch(join, scheduler)
    assert order == list("abcde")


def test_priorities_decide_who_is_copied_for(arrivals):
    scheduler = Scheduler(1, 4, "b", "a")
    scheduler.enable_priority_scheduling = True
    hooks.around_get_new_prebuilt_batch(join, scheduler)
    assert arrivals.names == ["a", "b"]
