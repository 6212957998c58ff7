"""The timeline: its contents, that rows never nest, and that no slice is recorded when off."""

import contextlib
import json
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mini_worker import MiniWorker
from sglang_scout.engine.trace import Tracer
from sglang_scout.worker.ring import EVENT_DTYPE

LAYERS = 3


class Log:
    """A worker's event log that a test fills."""

    def __init__(self):
        self.on, self.waiting, self.lost = None, [], 0

    def record_events(self, on):
        self.on = on

    def take_events(self):
        taken, self.waiting, self.lost = (self.waiting, self.lost), [], 0
        return taken

    def add(self, thread, epoch, step, layer, begin_ns, end_ns, pages=1):
        events = np.zeros(1, EVENT_DTYPE)
        names = "seq", "step", "layer", "begin_ns", "end_ns", "pages", "items"
        events[list(names)] = epoch << 40 | 1, step, layer, begin_ns, end_ns, pages, 1
        self.waiting.append(SimpleNamespace(thread=thread, cpu=4 + thread, events=events))


class Timed:
    """Wraps a stand-in for the worker: logs when it computed, as worker threads do."""

    def __init__(self, inner, log, lost_steps=()):
        self.inner, self.log, self.lost_steps = inner, log, lost_steps

    def post(self, layer, step, q, pages, n_pages):
        return step, self.inner.post(layer, step, q, pages, n_pages)

    def wait(self, ticket, out, lse):
        step, inner = ticket
        begin_ns = time.monotonic_ns()
        reply = self.inner.wait(inner, out, lse)
        pages = int((inner[2] >= 0).sum())
        if step in self.lost_steps:
            return SimpleNamespace(waited_us=0, fallback_pages=pages)
        self.log.add(0, 1, step, inner[0], begin_ns, time.monotonic_ns(), pages)
        return reply


def load(path):
    """The events of a trace, whose end may be missing, and its slices with their rows' names."""
    text = path.read_text()
    events = json.loads(text if text.endswith("]\n") else text + "]")
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return events, [e | {"row": rows[e["pid"], e["tid"]]} for e in events if e["ph"] == "X"]


def check_rows_do_not_nest(slices):
    for row in {(s["pid"], s["tid"]) for s in slices}:
        own = sorted((s["ts"], s["dur"]) for s in slices if (s["pid"], s["tid"]) == row)
        for (start, dur), (following, _) in zip(own, own[1:], strict=False):
            assert start + dur <= following + 1e-3, row  # a nanosecond, of rounding


@pytest.fixture
def traced(tmp_path):
    """Runs decode steps with missing pages; returns the events and the slices."""

    def run(steps=6, keep=4, lost_steps=(), config='{"recall": "off"}', **kwargs):
        log = Log()
        tracer = Tracer(str(tmp_path / "t.json"), keep, log, {"layers": LAYERS, "policy": "scout"})
        # Long requests and high drift: pages are missing in every step.
        kwargs = {"budget_tokens": 128, "drift": 3.0, "config": config} | kwargs
        around = partial(Timed, log=log, lost_steps=lost_steps)
        worker = MiniWorker(layers=LAYERS, tracer=tracer, around_missing=around, **kwargs)
        with contextlib.closing(worker):
            worker.run(steps, 1000, 37, 1300)
            assert log.on is (steps <= keep)
        assert log.on is False
        return load(tmp_path / "t.json")

    return run


def kinds_in(slices, row):
    return {s["name"].split()[0] for s in slices if s["row"] == row}


def test_every_row_of_a_step(traced):
    events, slices = traced()
    assert events[0]["args"] == {"labels": "layers 3, policy scout"}
    rows = {"device", "attention", "ahead", "boundary", "copies", "attention thread 0 (CPU 4)"}
    assert {s["row"] for s in slices} == rows
    for row, names in (
        ("device", [f"layer {layer}" for layer in range(LAYERS)]),
        ("boundary", ["step boundary"]),
    ):
        found = [(s["args"]["step"], s["name"]) for s in slices if s["row"] == row]
        assert found == [(step, name) for step in range(1, 5) for name in names]
    assert kinds_in(slices, "ahead") == {"predict", "score", "select", "post"}
    assert kinds_in(slices, "attention") == {"attend", "mass", "wait", "merge", "verify"}
    check_rows_do_not_nest(slices)
    # Prediction of layer l+1 and attention of layer l lie within the slice of layer l.
    layers = {(s["args"]["step"], s["args"]["layer"]): s for s in slices if s["row"] == "device"}
    for s in slices:
        step, layer = s["args"]["step"], s["args"].get("layer")
        if s["row"] == "attention" or s["row"] == "ahead" and layer > 0:
            around = layers[step, layer - (s["row"] == "ahead")]
            assert around["ts"] <= s["ts"]
            assert s["ts"] + s["dur"] <= around["ts"] + around["dur"]


def test_copies_say_what_they_moved(traced):
    _, slices = traced(steps=8, keep=8, config='{"recall": "fixed", "recall_interval": 1}')
    assert kinds_in(slices, "copies") == {"recall", "load"}
    page_bytes = 2 * 32 * 2 * 64 * 4  # K and V; 32 tokens, 2 heads, 64 channels, fp32
    for s in (s for s in slices if s["row"] == "copies"):
        about = s["args"]
        assert about["pages"] > 0 and about["bytes"] == about["pages"] * page_bytes
        assert s["name"].endswith(str(about["layer"])) if about["layers"] == 1 else about["layers"]


def test_arrows_go_from_the_post_over_the_worker_to_the_merge(traced):
    _, slices = traced()
    arrows: dict = {}
    for s in sorted((s for s in slices if "bind_id" in s), key=lambda s: s["ts"]):
        arrows.setdefault(s["bind_id"], []).append(s)
    assert len(arrows) == sum(s["name"].startswith("post") for s in slices) > 4
    for path in arrows.values():
        assert [s["name"].split()[0] for s in path] == ["post", "layer", "merge"]
        assert [(s["flow_in"], s["flow_out"]) for s in path] == [(0, 1), (1, 1), (1, 0)]
        assert len({(s["args"]["step"], s["args"]["layer"]) for s in path}) == 1
        assert path[0]["args"]["pages"] == path[1]["args"]["pages"]


def test_what_the_server_computed_itself_is_on_the_device_s_side(traced):
    _, slices = traced(lost_steps=(2, 3))
    fallen = [s for s in slices if s["name"].startswith("fallback")]
    assert {s["args"]["step"] for s in fallen} == {2, 3}
    assert all(s["row"] == "attention" and s["args"]["pages"] > 0 for s in fallen)
    worker = [s for s in slices if s["row"].startswith("attention thread")]
    assert {s["args"]["step"] for s in worker} == {1, 4}


@pytest.fixture
def small(tmp_path):
    """A tracer at step 7, its worker's log, and its file."""
    log = Log()
    tracer = Tracer(str(tmp_path / "t.json"), 5, log, {"layers": LAYERS})
    tracer.step(7)
    return tracer, log, tmp_path / "t.json"


def test_a_killed_server_leaves_the_steps_before(small):
    """The end is never written: SGLang's loops never return."""
    tracer, log, path = small
    for step in (7, 8, 9):
        now = time.monotonic_ns()
        log.add(0, 1, step, 1, now, now + 1)
        with tracer.slice("boundary", "step boundary"):
            pass
        tracer.step(step + 1)
    _, slices = load(path)
    for row in ("boundary", "attention thread 0 (CPU 4)"):
        assert [s["args"]["step"] for s in slices if s["row"] == row] == [7, 8, 9]


def test_epochs_threads_and_overlapping_slices_have_rows_of_their_own(small):
    tracer, log, path = small
    now = time.monotonic_ns()
    for thread, epoch in ((0, 1), (1, 1), (0, 2)):
        log.add(thread, epoch, 7, 1, now, now + 1)
    for start, end in ((100, 200), (150, 250), (160, 170), (200, 300), (250, 260)):
        tracer.add("copies", "recall", start, end, layer=1)
    tracer.write()
    events, slices = load(path)
    check_rows_do_not_nest(slices)
    copies = [s for s in slices if s["row"].startswith("copies")]
    assert {s["row"] for s in copies} == {"copies", "copies (overlapping)"}
    assert len({s["tid"] for s in copies}) == 3
    others = {(s["pid"], s["row"]) for s in slices if s not in copies}
    assert len(others) == 3
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {f"CPU attention process, incarnation {n}" for n in (1, 2)} < processes


def test_impossible_events_are_dropped_and_counted(small):
    """The worker's memory may hold any values that pass the ring reader's checks."""
    tracer, log, path = small
    now = time.monotonic_ns()
    for step in (7, 6, 8, 2**64 - 1):
        log.add(0, 1, step, 0, now, now + 1)
    log.add(0, 1, 7, 0, tracer._start_ns - 1, now)
    log.lost = 2
    tracer.write()
    assert len(load(path)[1]) == 1 and tracer._events_lost == 2 + 4


@pytest.mark.parametrize("path", ["{}/no/t.json", "/dev/full"])
def test_a_file_that_cannot_be_written_is_logged(tmp_path, caplog, path):
    log = Log()
    tracer = Tracer(path.format(tmp_path), 1, log, {"layers": LAYERS})
    tracer.step(1)
    assert "cannot write the trace" in caplog.text and not tracer.active and log.on is False
    tracer.step(2)
