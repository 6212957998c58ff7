"""What a step's streams wait for: events on streams that only record."""

import contextlib
import weakref
from types import SimpleNamespace

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


def test_a_part_is_behind_what_came_before_and_before_what_joins_it(monkeypatch):
    cuda, given = Streams(), torch.ones(1)
    monkeypatch.setattr(torch, "cuda", cuda)
    beside, alive = ForkedStream(torch.device("cuda")), weakref.ref(given)
    cuda.launch("norm")
    for part in (0, 1):
        with beside.fork(part, given):
            cuda.launch(f"part {part}")
    del given
    cuda.launch("model")
    beside.join(0)
    beside.join(0)  # once is enough
    assert alive() is not None, "the other part still reads it"
    beside.join()
    assert alive() is None
    assert cuda.seen == [
        "norm on step",
        "beside waits for step",
        "part 0 on beside",
        "beside waits for step",
        "part 1 on beside",
        "model on step",
        "step waits for part 0 on beside",
        "step waits for part 1 on beside",
    ]


def test_what_a_stream_waited_for_copies_is_counted_once_it_is_known(make):
    def event(ms, known=True):
        return SimpleNamespace(ms=ms, query=lambda: known, elapsed_time=lambda other: other.ms - ms)

    worker = make()
    recall, counters = worker.engine.recall, worker.engine.parts.counters
    copy = StreamCopy(event(1.0), event(3.0))
    copy._wait = event(5.0), event(5.25, known=False)
    recall._untimed.append((4, copy))
    recall.commit(1)
    assert counters.recall_wait_us == 0 and recall.link_pages_per_us == 0.0
    copy._wait = event(5.0), event(5.25)
    recall.commit(2)
    assert counters.recall_wait_us == 250 and not recall._untimed
    assert recall.link_pages_per_us == 4 / 2000.0
