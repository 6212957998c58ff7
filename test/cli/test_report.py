"""`sglang-scout report` on a timeline written by hand; the expected numbers are computed by hand."""

import json

import pytest

from sglang_scout.cli import main
from sglang_scout.cli.breakdown import PARTS, break_down, common_us, quantile, union
from sglang_scout.cli.report import as_dict, as_text
from sglang_scout.cli.trace_file import read_trace

ROWS = {(1, 0): "device", (1, 1): "attention", (1, 2): "ahead", (1, 3): "boundary"}
ROWS |= {(1, 4): "copies", (101, 0): "worker thread 0 (CPU 4)", (101, 1): "worker thread 1 (CPU 5)"}
TIDS = {name.partition(" (")[0]: row for row, name in ROWS.items()}

# (row, name, begin, end, step, other args); microseconds.
STEP_1 = [
    ("boundary", "step boundary", 0, 10, {}),
    ("device", "layer 0", 12, 112, {}),
    ("ahead", "score 1", 14, 18, {}),
    ("ahead", "select 1", 18, 20, {}),
    ("ahead", "post 1", 20, 24, {"pages": 5}),
    ("attention", "attend 0", 30, 50, {}),
    ("worker thread 0", "layer 1", 25, 85, {"pages": 2}),
    ("worker thread 1", "layer 1", 25, 105, {"pages": 3}),
    ("device", "layer 1", 112, 212, {}),
    ("attention", "attend 1", 120, 140, {}),
    ("attention", "wait 1", 140, 141, {}),
    ("attention", "merge 1", 141, 144, {}),
    ("copies", "recall 1", 150, 190, {"pages": 4, "bytes": 4096}),
]
STEP_2 = [
    ("boundary", "step boundary", 250, 270, {}),
    ("copies", "load 0", 255, 265, {"pages": 2, "bytes": 2048}),
    ("device", "layer 0", 270, 370, {}),
    ("ahead", "score 0", 272, 275, {}),
    ("ahead", "select 0", 275, 276, {}),
    ("ahead", "post 0", 276, 278, {"pages": 1}),
    ("worker thread 0", "layer 0", 279, 319, {"pages": 1}),
    ("attention", "attend 0", 290, 300, {}),
    ("attention", "wait 0", 300, 320, {}),
    ("attention", "merge 0", 320, 322, {}),
    ("ahead", "predict 1", 323, 327, {}),
    ("ahead", "post 1", 327, 328, {"pages": 1}),
    ("worker thread 0", "layer 1", 350, 400, {"pages": 1}),
    ("device", "layer 1", 370, 500, {}),
    ("attention", "attend 1", 380, 390, {}),
    ("attention", "wait 1", 390, 400.5, {}),
    ("attention", "merge 1", 400.5, 402, {}),
]
CUT_OFF = [
    ("boundary", "step boundary", 600, 700, {}),
    ("device", "layer 0", 700, 900, {}),
    ("worker thread 0", "layer 1", 720, 900, {"pages": 1}),
]


@pytest.fixture
def write(tmp_path):
    def make(*steps, change=None, **about):
        facts = {"format": "sglang-scout-trace", "version": 1, "layers": 2, "steps": len(steps)}
        facts |= {"worker_events_lost": 0, "policy": "scout", "precompute": True} | about
        events = [
            {"name": "thread_name", "ph": "M", "pid": p, "tid": t, "args": {"name": name}}
            for (p, t), name in ROWS.items()
        ]
        for number, step in enumerate(steps, 1):
            for row, name, begin, end, args in step:
                pid, tid = TIDS[row]
                args = {"step": number} | args
                if name[-1].isdigit():
                    args["layer"] = int(name[-1])
                event = {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": begin}
                events.append(event | {"dur": end - begin, "args": args})
        events.append({"name": "missing pages", "ph": "s", "id": 1, "pid": 1, "tid": 2, "ts": 20})
        document = {"traceEvents": events, "otherData": facts}
        if change:
            change(document)
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(document))
        return str(path)

    return make


def test_numbers_computed_by_hand(write):
    found = break_down(read_trace(write(STEP_1, STEP_2, CUT_OFF)))
    assert found.steps == 2
    assert found.step_us == (212 + 250) / 2 and found.between_us == 38
    assert found.parts_us == {
        "boundary": (10 + 20) / 2,
        "ahead": (10 + 11) / 2,
        "attention": (43 + 23.5) / 2,
        "rest": ((200 - 10 - 43 - 1) + (230 - 11 - 23.5 - 30.5)) / 2,
        "wait": (1 + 30.5) / 2,
        "fallback": 0,
        "verify": 0,
        "outside": (2 + 0) / 2,
    }
    assert sum(found.parts_us.values()) == found.step_us
    assert found.thread_busy_us == {
        "worker thread 0 (CPU 4)": (60 + 40 + 50) / 2,
        "worker thread 1 (CPU 5)": 80 / 2,
    }
    assert found.worker_busy_us == (80 + 90) / 2
    load, recall = found.copies
    assert (recall.kind, recall.copies, recall.pages, recall.bytes) == ("recall", 1, 4, 4096)
    assert (recall.us, recall.within_layers_us) == (40, 40)
    assert (load.kind, load.copies, load.pages, load.bytes) == ("load", 1, 2, 2048)
    assert (load.us, load.within_layers_us) == (10, 0)
    assert (found.ahead_us, found.ahead_overlap_us) == (60 + 80 + 50, 60 + 80 + 20)
    assert found.ahead_share == 160 / 190


def test_lead_times(write):
    first, second = break_down(read_trace(write(STEP_1, STEP_2))).leads
    assert (first.layer, first.answers, first.in_time) == (0, 1, 0)
    assert first.min_us == first.median_us == first.max_us == 300 - 319
    assert first.wait_us == 20
    assert (second.layer, second.answers, second.in_time) == (1, 2, 1)
    assert (second.min_us, second.max_us) == (390 - 400, 140 - 105)
    assert second.median_us == 12.5 and second.wait_us == 5.75
    assert second.p10_us == pytest.approx(-5.5) and second.p90_us == pytest.approx(30.5)


def test_what_the_server_computed_itself_is_told_apart(write):
    """The worker answered too late: its slice is work, but no answer that was waited for."""
    step = [s for s in STEP_1 if s[1] not in ("wait 1", "merge 1")]
    step += [("attention", "wait 1", 140, 150, {}), ("attention", "fallback 1", 150, 170, {})]
    found = break_down(read_trace(write(step)))
    assert found.parts_us["fallback"] == 20 and found.parts_us["wait"] == 10
    assert found.leads == [] and found.worker_busy_us == 80
    assert sum(found.parts_us.values()) == found.step_us


def test_a_row_beside_another_counts_as_the_same(write):
    def add_lane(document):
        name = {"name": "worker thread 0 (CPU 4), beside"}
        row = {"pid": 101, "tid": 1000}
        document["traceEvents"] += [
            {"name": "thread_name", "ph": "M", "args": name} | row,
            {"name": "layer 1", "ph": "X", "ts": 85, "dur": 5, "args": {"step": 1, "layer": 1}}
            | row,
        ]

    found = break_down(read_trace(write(STEP_1, change=add_lane)))
    assert found.thread_busy_us["worker thread 0 (CPU 4)"] == 65


def test_text_and_json_say_the_same(write, capsys):
    path = write(STEP_1, STEP_2, CUT_OFF, worker_events_lost=3)
    assert main(["report", path]) == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert lines["wait for missing pages"].split()[-3:] == ["16", "6.8", "%"]
    assert lines["whole step"].split()[-3:] == ["231", "100.0", "%"]
    assert lines["until the next one begins"].split()[-1] == "38"
    assert lines["thread 1 (CPU 5)"].split()[-3:] == ["40", "17.3", "%"]
    assert lines["any thread"].split()[-3:] == ["85", "36.8", "%"]
    assert lines["recall"].split()[1:] == ["1", "4", "4.10", "KB", "40", "0.10", "100.0", "%"]
    assert lines["layer 1"].split()[2:] == "2 50.0 % -10 -6 12 30 35 6".split()
    assert "fallback" not in text and "computed by the server" not in text
    assert "The worker computed layer l+1 while layer l ran: 84.2 % of its time" in text
    assert "3 events of the worker are lost" in text

    assert main(["report", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_us"]["wait"] == 15.75 and set(found["parts_us"]) == set(PARTS)
    assert found["ahead_share"] == 160 / 190 and found["worker_busy_share"] == 85 / 231
    assert found["leads"][1]["median_us"] == 12.5 and found["copies"][1]["bytes"] == 4096
    assert found["policy"] == "scout" and found["worker_events_lost"] == 3


def test_a_worker_that_did_not_compute_ahead(write):
    late = [s for s in STEP_1 if not s[0].startswith("worker")]
    late += [("worker thread 0", "layer 1", 110, 140, {"pages": 5})]
    trace = read_trace(write(late))
    sentence = as_dict(break_down(trace), trace)["ahead_sentence"]
    assert "did not compute layer l+1 while layer l ran: 6.7 %" in sentence


def test_an_idle_worker(write):
    idle = [s for s in STEP_1 if not s[0].startswith(("worker", "copies"))]
    trace = read_trace(write(idle))
    text = as_text(break_down(trace), trace)
    assert "The worker was idle" in text and "No page was copied" in text
    assert "computed nothing" in text


def test_spans():
    assert union([(5, 9), (0, 2), (1, 3), (9, 10)]) == [(0, 3), (5, 10)]
    assert common_us([(0, 10), (5, 20)], [(3, 4), (15, 30)]) == 1 + 5
    assert common_us([], [(0, 1)]) == 0 and common_us([(0, 1)], [(1, 2)]) == 0
    assert quantile([7.0], 0.9) == 7.0 and quantile([0.0, 10.0, 20.0], 0.75) == 15.0


def spoil(key, value):
    """Changes a field of the first slice."""

    def change(document):
        next(e for e in document["traceEvents"] if e["ph"] == "X")[key] = value

    return change


DAMAGED = {
    "no events": lambda document: document.pop("traceEvents"),
    "events are no list": lambda document: document.update(traceEvents=7),
    "an event is no object": lambda document: document["traceEvents"].append("x"),
    "no name": lambda document: document["traceEvents"][-2].pop("name"),
    "a name that is no text": spoil("name", 3),
    "time is no number": spoil("ts", "soon"),
    "time is infinite": spoil("ts", float("inf")),
    "negative length": spoil("dur", -1),
    "row without a name": spoil("tid", 77),
    "layer of another model": spoil("args", {"step": 1, "layer": 2}),
    "layer is no number": spoil("args", {"step": 1, "layer": "a"}),
    "no step": spoil("args", {}),
    "args is no object": spoil("args", 5),
    "infinite step": spoil("args", {"step": float("inf")}),
    "no layers": lambda document: document["otherData"].pop("layers"),
    "layers is no number": lambda document: document["otherData"].update(layers="2"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_timeline_is_named(write, capsys, what):
    path = write(STEP_1, change=DAMAGED[what])
    assert main(["report", path]) == 2
    error = capsys.readouterr().err
    assert path in error and "is damaged" in error and "record it again" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file or directory"),
        ("{", "is not JSON"),
        ("[]", "is not a timeline of sglang-scout"),
        ('{"traceEvents": []}', "is not a timeline of sglang-scout"),
        ('{"otherData": {"format": "sglang-scout-trace", "version": 9}}', "version 9"),
    ],
)
def test_another_file_is_named_with_the_fix(tmp_path, capsys, text, expected):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and expected in error
    assert "--kv-offload-config" in error or "the server ran with" in error


def test_bytes_that_are_no_text(tmp_path, capsys):
    path = tmp_path / "other.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["report", str(path)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_no_whole_step(write, capsys):
    assert main(["report", write(CUT_OFF)]) == 2
    assert "no whole decode step; record it again" in capsys.readouterr().err


def test_plot(write, tmp_path):
    target = tmp_path / "step.png"
    assert main(["report", write(STEP_1, STEP_2), "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_plot_to_a_place_that_is_not_there(write, tmp_path, capsys):
    for target in (tmp_path / "no" / "step.png", tmp_path / "step.what"):
        assert main(["report", write(STEP_1), "--plot", str(target)]) == 2
        error = capsys.readouterr().err
        assert str(target) in error and "a folder that exists" in error
