"""Device-side times: stamps of a step as slices, and its stream's waits for copies."""

import json

import numpy as np
import torch

from sglang_scout.engine.device import StreamCopy
from sglang_scout.engine.device_clock import DeviceClock
from sglang_scout.engine.trace import Tracer


class Event:
    """A stream's event, at ``ms`` milliseconds."""

    def __init__(self, ms, known=True):
        self.ms, self.known = ms, known

    def query(self):
        return self.known

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_a_merge_is_split_into_its_wait_and_the_rest_and_nothing_is_stamped_between_steps(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(str(path), 8)
    clock = DeviceClock(tracer, 1, torch.device("cpu"))
    clock._ahead_ns = 0
    tracer.step(1)
    clock.begin_step()
    assert clock.cut("device", "layer", clock.now(), layer=0) == 0 and not clock.cuts
    clock.begin_layers()
    end = clock.cut("attention", "attend", clock.now(), layer=0)
    clock.cut("attention", "merge", end, layer=0)
    base = tracer.now()
    stamps = np.array([base, base + 3000, base + 9000])
    clock.write(1, clock.cuts, stamps, np.array([4000]))
    tracer.write()
    slices = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    assert [(e["name"], round(e["dur"])) for e in slices] == [
        ("attend 0", 3), ("wait 0", 4), ("merge 0", 2),
    ]  # fmt: skip


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
