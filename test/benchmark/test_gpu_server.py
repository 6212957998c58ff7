"""What ``benchmark/gpu_server.py`` calls wrong, and how it measures; ``test/e2e/test_gpu_server.py`` runs it."""

import argparse
import contextlib
import copy
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import checks_in_time  # noqa: E402
import gpu_server  # noqa: E402
import rows  # noqa: E402
import server_speed  # noqa: E402

ANSWERS = [[(0, 0.0), (7, -1.5), (3, -0.5)], [(0, 0.0), (4, -2.0), (5, -0.1)]]
STATE = {
    "policy": "scout",
    "steps": 9,
    "selected_pages": 100,
    "cpu_pages": 40,
    "recalled_pages": 3,
    "host_pages_used": 0,
    "fallback_pages": 0,
    "worker": {"restarts": 0},
}


def changed(at, entry):
    other = copy.deepcopy(ANSWERS)
    other[at[0]][at[1]] = entry
    return other


def test_equal_answers_are_equal():
    assert gpu_server.differences(ANSWERS, ANSWERS, 1e-3) == ([], 0)


def test_another_token_of_the_same_weight_is_a_tie_and_ends_the_comparison():
    other = changed((0, 1), (8, -1.5004))
    other[0][2] = (9, -5.0)
    assert gpu_server.differences(ANSWERS, other, 1e-3) == ([], 1)


@pytest.mark.parametrize("entry", [(7, -1.6), (8, -1.6), (7, float("nan"))])
def test_another_weight_is_wrong_whatever_the_token(entry):
    wrong, _ = gpu_server.differences(ANSWERS, changed((0, 1), entry), 1e-3)
    assert len(wrong) == 1 and "request 0, token 1" in wrong[0]


def test_a_short_answer_is_wrong():
    wrong, _ = gpu_server.differences(ANSWERS, [ANSWERS[0], ANSWERS[1][:2]], 1e-3)
    assert wrong == ["request 1: 3 and 2 tokens"]


@pytest.mark.parametrize(
    ("at", "entry", "count"),
    [
        ((0, 1), (7, -1.4), 0),
        ((0, 1), (8, -1.5), 1),
        ((1, 1), (4, -2.5), 1),
        ((1, 2), (9, -9.0), 0),
    ],
)
def test_strangers_are_known_by_their_first_decoded_token(at, entry, count):
    assert gpu_server.strangers(ANSWERS, changed(at, entry), 0.25) == count


def test_state_of_a_server_that_did_its_work():
    assert gpu_server.state_problems(STATE, fallback=False) == []
    after = {**STATE, "fallback_pages": 5, "worker": {"restarts": 1}}
    assert gpu_server.state_problems(after, fallback=True) == []


@pytest.mark.parametrize(
    ("name", "value"), [("cpu_pages", 0), ("host_pages_used", 2), ("fallback_pages", 1)]
)
def test_state_names_what_is_wrong(name, value):
    assert gpu_server.state_problems({**STATE, name: value}, fallback=False) == [
        f"{name} = {value}"
    ]


def test_a_worker_that_was_not_killed_is_noticed():
    assert gpu_server.state_problems(STATE, fallback=True) == [
        "fallback_pages = 0", "worker.restarts = 0",
    ]  # fmt: skip


def test_answers_of_another_length_have_no_first_token_to_compare():
    short = [[(1, 0.0)], [(1, 0.0), (2, 0.0)]]
    assert gpu_server.strangers(short, short, 0.25) == 0


def test_whether_graphs_ran_is_read_from_decode_steps_alone():
    log = (
        "Prefill batch, #new-seq: 1, cuda graph: False, input throughput (token/s): 1.0\n"
        "Decode batch, #running-req: 2, #token: 64, cuda graph: True, gen throughput (token/s): 1.0\n"
    )
    assert gpu_server.graphs_said(log) == {"True"}


def test_speed_counts_only_while_all_requests_decode():
    first = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    second = [0.2, 1.5, 2.0, 2.5, 3.0, 3.5]
    gaps, rate = server_speed.steady([first, second])
    assert gaps == [5e5] * 3  # from 1.5, when both had begun, to 3.0, when one ended
    assert rate == pytest.approx(6 / 1.5)


def test_requests_that_never_ran_together_give_no_speed():
    with pytest.raises(RuntimeError, match="same time"):
        server_speed.steady([[0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3]])


def test_the_share_of_waits_is_of_the_window_alone():
    waits = server_speed.WaitSamples(dict)
    waits.samples = [(0.0, 0), (1.0, 900_000), (2.0, 1_000_000), (3.0, 1_300_000), (4.0, 9_000_000)]
    assert server_speed.window([[0.0, 1.0, 3.5], [0.1, 0.9, 3.6]]) == (1.0, 3.5)
    assert waits.share(1.0, 3.5) == pytest.approx(0.2)
    assert waits.share(3.2, 4.5) is None, "one sample says nothing"


def test_waits_are_taken_while_requests_run(monkeypatch):
    monkeypatch.setattr(server_speed, "SAMPLE_S", 0.001)
    answers = iter([{"gpu_wait_us": 5}, OSError("gone for a moment"), {"gpu_wait_us": 7}])
    taken = threading.Event()

    def state():
        answer = next(answers, None)
        if answer is None:
            taken.set()
            raise OSError("no more")
        if isinstance(answer, Exception):
            raise answer
        return answer

    with server_speed.WaitSamples(state) as waits:
        assert taken.wait(30)
    assert [waited for _, waited in waits.samples] == [5, 7]


SHARED = {
    "benchmark": "test", "commit": "none", "dirty": False, "cpu": "none", "cores": 1, "versions": {},
    "command": "none", "time_utc": "never", "load_average": [], "idle_before": [],
}  # fmt: skip


class Servers:
    """Stand for the servers of the checks. ``hours``: to add to the clock when a step begins; ``errors``: of it."""

    def __init__(self, monkeypatch, tmp_path):
        self.late_s, self.hours, self.errors, self.began = 0.0, {}, {}, []
        self.logs = tmp_path
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self.late_s)
        monkeypatch.setattr(gpu_server, "DecodeServer", self.server)
        monkeypatch.setattr(gpu_server, "make_tiny_model", lambda *_: None)
        monkeypatch.setattr(gpu_server, "kill_worker", lambda *_: self.begin("fallback") or [])

    def begin(self, step):
        self.began.append(step)
        self.late_s += 3600 * self.hours.get(step, 0)
        if step in self.errors:
            raise self.errors[step]

    @contextlib.contextmanager
    def server(self, _model, flags, *, device, log, ready_timeout_s):
        assert 0 < ready_timeout_s <= gpu_server.START_S
        name = "eager" if "disable_cuda_graph" in flags else "graph"
        self.begin(f"start {name}")
        log.write_text(f"Decode batch, cuda graph: {name == 'graph'}, \n")

        class Server:
            def generate(_, prompts, _tokens, timeout_s):
                assert timeout_s > 0
                self.begin(f"ask {name}")
                return [ANSWERS[0]] * len(prompts)

            def kv_offload(_, timeout_s):
                return {**STATE, "verify_max_rel_error": 1e-3, "verify_checks": 4}

        yield Server()

    def check(self):
        """Exit status and the rows' statuses and reasons."""
        writer = rows.Writer(None, SHARED)
        options = argparse.Namespace(
            device="cuda", batch=[1, 3], context=600, tokens=3, kill_tokens=9, check_host_gb=1.0
        )
        end = time.monotonic() + 540
        failed = gpu_server.check(writer, options, self.logs, self.logs / "model", end)
        return failed, {row["check"]: (row["status"], row["reason"]) for row in writer.rows}


@pytest.fixture
def servers(monkeypatch, tmp_path):
    return Servers(monkeypatch, tmp_path)


CHECKS = ["verify", "tokens", "state", "fallback", "graphs"]


def statuses(found):
    return [found[name][0] for name in CHECKS]


def test_every_check_has_a_row(servers):
    failed, found = servers.check()
    assert (failed, statuses(found)) == (0, ["ok"] * 5)


@pytest.mark.parametrize(
    ("step", "ok"),
    [
        ("start eager", []),
        ("ask eager", []),
        ("start graph", ["verify"]),
        ("fallback", ["verify", "tokens", "state", "graphs"]),
    ],
)
def test_what_there_was_no_time_for_is_said_and_has_not_failed(servers, step, ok):
    servers.hours = {step: 1}
    servers.errors = {step: OSError("timed out")}
    failed, found = servers.check()
    assert failed == 0
    assert [name for name in CHECKS if found[name][0] == "ok"] == ok
    missing = [name for name in CHECKS if name not in ok]
    assert [found[name][0] for name in missing] == ["skipped"] * len(missing)
    assert "no time left" in found[missing[0]][1]


def test_a_server_is_not_started_in_the_last_minute(servers):
    servers.hours = {"ask eager": 500 / 3600 / 2}  # two batches
    _, found = servers.check()
    assert "start graph" not in servers.began
    assert statuses(found) == ["ok", "skipped", "skipped", "skipped", "skipped"]


def test_the_other_server_is_checked_though_one_fails(servers):
    servers.errors = {"start eager": gpu_server.FAILURES[0]("exit code 1")}
    failed, found = servers.check()
    assert failed == 1 and "exit code 1" in found["verify"][1]
    assert statuses(found) == ["failed", "skipped", "ok", "ok", "skipped"]


def test_a_request_that_fails_in_time_is_a_failure(servers):
    servers.errors = {"ask graph": OSError("refused")}
    failed, found = servers.check()
    assert failed == 1 and statuses(found) == ["ok", "failed", "skipped", "skipped", "skipped"]
    assert found["state"][1] == "tokens failed"


def test_a_limit_counts_down():
    limit = checks_in_time.TimeLimit(time.monotonic() + 50)
    assert limit.left_s(10) == 10 and 40 < limit.left_s() <= 50
    limit.needs(40)
    limit.blame(OSError("refused"))
    for over in (lambda: limit.needs(60), checks_in_time.TimeLimit(time.monotonic()).left_s):
        with pytest.raises(checks_in_time.OutOfTime, match="no time left"):
            over()
