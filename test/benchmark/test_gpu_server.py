"""What ``benchmark/server/gpu_server.py`` calls wrong, and how it measures; ``test/e2e/test_gpu_server.py`` runs it."""

import argparse
import contextlib
import copy
import json
import os
import threading
import time

import pytest

from benchmark import rows
from benchmark.server import checks, gpu_server
from benchmark.server import speed as server_speed

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
    gaps, rate = server_speed.steady([first, second], skip=0)
    assert gaps == [5e5] * 3  # from 1.5, when both had begun, to 3.0, when one ended
    assert rate == pytest.approx(6 / 1.5)


def test_the_first_steps_of_the_window_do_not_count():
    first = [0.0, 1.0, 5.0, 9.0, 9.5, 10.0, 10.5]
    gaps, rate = server_speed.steady([first, first], skip=2)
    assert gaps == [5e5] * 3 and rate == pytest.approx(4)
    assert server_speed.window([first, first], 2) == (9.0, 10.5)


@pytest.mark.parametrize("skip", [0, server_speed.SKIPPED_STEPS])
def test_requests_that_never_ran_together_give_no_speed(skip):
    with pytest.raises(RuntimeError, match="same time.*--speed-tokens"):
        server_speed.steady([[0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3]], skip)


def counters(waited, cpu, budget, fallback=0, resident=5):
    return {"steps": 1, "gpu_wait_us": waited, "cpu_pages": cpu, "budget_pages": budget,
            "fallback_pages": fallback, "resident_pages": resident}  # fmt: skip


def test_counters_are_of_the_window_alone():
    samples = server_speed.Samples(dict)
    samples.samples = [
        (0.0, counters(0, 0, 0)),
        (1.0, counters(900_000, 900, 1000)),
        (2.0, counters(1_000_000, 950, 1500)),
        (3.0, counters(1_300_000, 1000, 2000, 3, 7)),
        (4.0, counters(9_000_000, 9000, 9000)),
    ]
    assert samples.of_window(1.0, 3.5) == {
        "wait_share": 0.2, "cpu_compute_ratio": 0.1, "fallback_pages": 3, "resident_pages": 7,
    }  # fmt: skip
    assert samples.of_window(3.2, 4.5) == {}, "one sample says nothing"


def test_counters_are_taken_while_requests_run_and_a_stock_server_is_asked_alike(monkeypatch):
    monkeypatch.setattr(server_speed, "SAMPLE_S", 0.001)
    answers = iter([counters(5, 0, 0), OSError("gone for a moment"), counters(7, 0, 0), {}])
    taken = threading.Event()

    def state():
        answer = next(answers, None)
        if answer is None:
            taken.set()
            raise OSError("no more")
        if isinstance(answer, Exception):
            raise answer
        return answer

    with server_speed.Samples(state) as samples:
        assert taken.wait(30)
    assert [state.get("gpu_wait_us") for _, state in samples.samples] == [5, 7, None]
    assert samples.of_window(0.0, time.monotonic())["wait_share"] >= 0


SPEED = argparse.Namespace(
    model=["qwen3-8b"], speed_context=32768, speed_tokens=384, host_gb=96.0, budget=2048,
    device="cuda", sides=list(server_speed.SIDES),
)  # fmt: skip


def flags_of(name, tokens=33344):
    return server_speed.flags_of(server_speed.SIDES[name], "qwen3-8b", SPEED, tokens, 80 << 30)


def test_ours_has_the_batch_of_the_host_and_in_one_row_the_cache_of_the_paper():
    budget, device = flags_of("scout-budget"), flags_of("scout-device")
    assert budget["max_running_requests"] == device["max_running_requests"] == 20
    configs = [json.loads(flags["kv_offload_config"]) for flags in (budget, device)]
    assert [config.get("resident_tokens") for config in configs] == [20 * 2048, None]
    assert all(config["attend"] == "selected" for config in configs)
    assert budget["kv_offload_host_gb"] == 96.0


def test_stock_captures_no_graphs_that_it_never_runs():
    for name in ("triton", "flashinfer"):
        flags = flags_of(f"stock-{name}")
        assert flags["attention_backend"] == name and flags["disable_prefill_cuda_graph"]
        assert flags["max_running_requests"] == 17  # more than 80 GiB hold beside the weights


def test_the_worker_leaves_whole_cores_to_server_and_client(monkeypatch):
    def half(cpu):  # as where the second halves of cores come behind the first ones
        return cpu % 8

    assert server_speed.cpus_of(range(16), half) == ([2, 3, 4, 5, 6, 10, 11, 12, 13, 14], {7, 15})
    assert server_speed.cpus_of(range(16), int) == (list(range(2, 15)), {15})
    assert server_speed.cpus_of(range(4), int) == ([], {0, 1, 2, 3})
    monkeypatch.setattr(server_speed, "cpus_of", lambda _: ([2, 3], {4}))
    assert flags_of("scout-budget")["kv_offload_cpus"] == "2,3"
    monkeypatch.setattr(server_speed, "cpus_of", lambda _: ([], {4}))
    assert "kv_offload_cpus" not in flags_of("scout-budget")


def test_the_client_is_where_it_was_put_and_back_afterwards():
    before = os.sched_getaffinity(0)
    with server_speed.on_cpus({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_ours_leave_time_to_the_stock_servers():
    sides = list(server_speed.SIDES.values())
    assert [server_speed.deadline(sides, at, 100.0, 600.0) for at in range(4)] == [
        385,
        600,
        600,
        600,
    ]
    assert server_speed.deadline(sides, 0, 0.0, 300.0) == 150.0
    assert server_speed.deadline(sides[:1], 0, 0.0, 300.0) == 300.0


INFO = {
    "max_total_num_tokens": 667_000, "attention_backend": None, "mem_fraction_static": 0.85,
    "decode_attention_backend": None, "max_running_requests": 20,
    "cuda_graph_config": {"decode": {"max_bs": 20}, "prefill": {"backend": "disabled"}},
}  # fmt: skip


class SpeedServer:
    """Stands for a server; ``asked``: how long each answer takes, on a clock that it moves."""

    clock_s = 0.0
    started: list

    def __init__(self, model, flags, *, device, log, ready_timeout_s):
        self.flags = flags
        SpeedServer.started.append((flags.get("attention_backend", "scout"), ready_timeout_s))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def info(self, timeout_s=60.0):
        state = {"memory_usage": {"weight": 15.3, "token_capacity": 667_000}}
        if "kv_offload" in self.flags:
            worker = {"pid": None, "cpus": [0, 1]}
            state |= {"decode_attention_backend": "scout"}
            state["kv_offload"] = {"host_pages_total": 10, "worker": worker, **counters(0, 0, 0)}
        else:
            state |= {"kv_offload": "none", "attention_backend": self.flags["attention_backend"]}
        return {**INFO, "internal_states": [state]}

    def token_times(self, prompts, tokens, timeout_s):
        SpeedServer.clock_s += 30.0
        assert timeout_s > 0
        return [[0.01 * i for i in range(tokens)] for _ in prompts]


@pytest.fixture
def speed(monkeypatch, tmp_path):
    """Runs all sides in so many seconds; the failures and the rows."""
    clock = time.monotonic
    SpeedServer.clock_s, SpeedServer.started = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: clock() + SpeedServer.clock_s)
    monkeypatch.setattr(server_speed, "DecodeServer", SpeedServer)
    monkeypatch.setattr(server_speed, "MAPPED_S", 0.0)
    monkeypatch.setattr(server_speed, "absent_reason", lambda _: "")

    def run(seconds):
        writer = rows.Writer(None, SHARED)
        end = time.monotonic() + seconds
        failed = server_speed.speed(writer, SPEED, tmp_path, tmp_path / "m", end, 80 << 30)
        return failed, writer.rows

    return run


def test_every_server_is_measured_twice_and_rows_say_what_ran(speed):
    failed, found = speed(520)
    assert failed == 0 and [row["status"] for row in found] == ["ok"] * 8
    assert [(row["side"], row["run"]) for row in found] == [
        (side, run) for side in server_speed.SIDES for run in (1, 2)
    ]
    attention = [row["attention_backend"] for row in found[::2]]
    assert attention == ["scout", "triton", "flashinfer", "scout"]
    assert all("run_to_run" in row for row in found[1::2])
    for row in found:
        assert row["token_capacity"] == 667_000 and row["mem_fraction_static"] == 0.85
        assert row["cuda_graphs"]["prefill"] == {"backend": "disabled"}
        assert row["batch"] == 20 and row["speed_tokens"] == 384 and row["ready_s"] >= 0
        assert len(row["samples_us"]) == 384 - 2 - server_speed.SKIPPED_STEPS
    assert found[0]["resident_tokens"] == 20 * 2048 and found[0]["host_gb"] == 96.0
    assert found[0]["worker_cpus"] == [0, 1] and found[0]["mapped_share"] == 0.0


def test_what_there_was_no_time_for_is_said_and_stock_had_its_time(speed):
    failed, found = speed(235)
    assert failed == 0
    assert [row["side"] for row in found if row["status"] == "ok"] == [
        "scout-budget", "scout-budget", "stock-triton", "stock-triton",
        "stock-flashinfer", "stock-flashinfer",
    ]  # fmt: skip
    assert SpeedServer.started[0][1] < 86, "150 s are kept for the stock servers"
    assert found[-1]["status"] == "skipped" and "no time left" in found[-1]["reason"]


def test_a_stock_server_that_cannot_compile_flashinfer_is_no_failure(speed, monkeypatch):
    def start(server):
        if server.flags.get("attention_backend") == "flashinfer":
            raise server_speed.FAILURES[1]("nvcc: not found")
        return server

    monkeypatch.setattr(SpeedServer, "__enter__", start)
    failed, found = speed(520)
    [row] = [row for row in found if row["side"] == "stock-flashinfer"]
    assert failed == 0 and row["status"] == "failed" and "nvcc" in row["reason"]


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
    limit = checks.TimeLimit(time.monotonic() + 50)
    assert limit.left_s(10) == 10 and 40 < limit.left_s() <= 50
    limit.needs(40)
    limit.blame(OSError("refused"))
    for over in (lambda: limit.needs(60), checks.TimeLimit(time.monotonic()).left_s):
        with pytest.raises(checks.OutOfTime, match="no time left"):
            over()
