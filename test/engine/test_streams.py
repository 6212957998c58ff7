"""What a step's streams wait for: events on streams that only record."""

import contextlib
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_scout.engine.device import ForkedStream, StreamCopy


class Streams:
    """Mocks torch.cuda; ``seen`` are waits and launches in order, by stream name."""

    def __init__(self):
        self.seen, self.names = [], iter(("step", "beside"))
        self.current = self.Stream()

    def Stream(self, device=None):
        name = next(self.names)
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.seen.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.seen.append(f"{name} waits for {event.end_of}"),
        )

    def Event(self):
        event = SimpleNamespace(end_of=None)
        event.record = lambda: setattr(event, "end_of", self.seen[-1])
        return event

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self):
        return self.current

    def launch(self, what):
        self.seen.append(f"{what} on {self.current.name}")


@pytest.fixture
def cuda():
    with mock.patch.object(torch, "cuda", Streams()) as streams:
        yield streams


def test_a_part_is_behind_what_came_before_and_before_what_joins_it(cuda):
    beside = ForkedStream(torch.device("cuda"))
    cuda.launch("norm")
    for part in (0, 1):
        with beside.fork(part):
            cuda.launch(f"part {part}")
    cuda.launch("model")
    beside.join(0)
    beside.join(0)  # once is enough
    cuda.launch("attention")
    beside.join()
    assert cuda.seen == [
        "norm on step",
        "beside waits for step",
        "part 0 on beside",
        "beside waits for step",
        "part 1 on beside",
        "model on step",
        "step waits for part 0 on beside",
        "attention on step",
        "step waits for part 1 on beside",
    ]


def test_what_a_part_reads_lives_until_it_is_joined():
    beside, given = ForkedStream(None), torch.ones(1)
    alive = weakref.ref(given)
    with beside.fork(3, given):
        pass
    del given
    assert alive() is not None
    beside.join(3)
    assert alive() is None


class Event:
    """A stream's event, at ``ms`` milliseconds."""

    def __init__(self, ms, known=True):
        self.ms, self.known = ms, known

    def query(self):
        return self.known

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_what_a_stream_waited_for_copies_is_counted_once_it_is_known(make):
    worker = make()
    recall, counters = worker.engine.recall, worker.engine.counters
    copy = StreamCopy(Event(1.0), Event(3.0))
    late = Event(5.25, known=False)
    copy._wait = Event(5.0), late
    recall._untimed.append((4, copy))
    recall.commit(1)
    assert counters.recall_wait_us == 0 and recall.link_pages_per_us == 0.0
    late.known = True
    recall.commit(2)
    assert counters.recall_wait_us == 250 and not recall._untimed
    assert recall.link_pages_per_us == 4 / 2000.0
