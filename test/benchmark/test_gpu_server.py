"""Checks and measurements of ``benchmark/server/gpu_server.py``; ``test/e2e/test_gpu_server.py`` runs it."""

import copy

import pytest

from benchmark import rows
from benchmark.server import gpu_server, speed

ANSWERS = [[(0, 0.0), (7, -1.5), (3, -0.5)], [(0, 0.0), (4, -2.0), (5, -0.1)]]
STATE = {
    "policy": "scout", "steps": 9, "selected_pages": 100, "cpu_pages": 40, "recalled_pages": 3,
    "host_pages_used": 0, "fallback_pages": 0, "worker": {"restarts": 0},
}  # fmt: skip


def changed(at, entry):
    other = copy.deepcopy(ANSWERS)
    other[at[0]][at[1]] = entry
    return other


def test_another_token_of_the_same_weight_is_a_tie_and_ends_the_comparison():
    assert gpu_server.differences(ANSWERS, ANSWERS, 1e-3) == ([], 0)
    other = changed((0, 1), (8, -1.5004))
    other[0][2] = (9, -5.0)
    assert gpu_server.differences(ANSWERS, other, 1e-3) == ([], 1)


@pytest.mark.parametrize("entry", [(7, -1.6), (8, -1.6), (7, float("nan"))])
def test_another_weight_is_wrong_whatever_the_token(entry):
    wrong, _ = gpu_server.differences(ANSWERS, changed((0, 1), entry), 1e-3)
    assert len(wrong) == 1 and "request 0, token 1" in wrong[0]


@pytest.mark.parametrize(
    ("at", "entry", "count"),
    [
        ((0, 1), (7, -1.4), 0),
        ((0, 1), (8, -1.5), 1),
        ((1, 1), (4, -2.5), 1),
        ((1, 2), (9, -9.0), 0),
    ],
)
def test_requests_apart_are_known_by_their_first_decoded_token(at, entry, count):
    assert gpu_server.count_apart(ANSWERS, changed(at, entry), 0.25) == count


def test_single_requests_must_agree_and_of_several_most():
    single, several = ANSWERS[:1], [ANSWERS[0]] * 8
    eager = {1: single, 8: several}
    one_apart = [[(0, 0.0), (8, -1.5), (3, -0.5)], *several[1:]]
    wrong, found = gpu_server.token_problems(eager, {1: single, 8: one_apart}, "cuda", 0.25)
    assert wrong == [] and found == {"ties": 0, "apart": 1, "requests": 9}
    wrong, _ = gpu_server.token_problems(eager, {1: single, 8: one_apart[:1] * 8}, "cuda", 0.25)
    assert len(wrong) == 1 and "8 of 8 requests" in wrong[0]
    short = [row[:2] for row in single]
    wrong, _ = gpu_server.token_problems(eager, {1: short, 8: several}, "cuda", 0.25)
    assert wrong == ["batch 1, request 0: 3 and 2 tokens"]


def test_a_state_names_what_is_wrong():
    assert gpu_server.state_problems(STATE) == []
    assert gpu_server.state_problems({**STATE, "worker": {"restarts": 1}}) == [
        "worker.restarts = 1"
    ]
    for name, value in (("cpu_pages", 0), ("host_pages_used", 2), ("fallback_pages", 1)):
        assert gpu_server.state_problems({**STATE, name: value}) == [f"{name} = {value}"]


def test_whether_graphs_ran_is_read_from_decode_steps_alone():
    log = (
        "Prefill batch, #new-seq: 1, cuda graph: False, input throughput (token/s): 1.0\n"
        "Decode batch, #running-req: 2, #token: 64, cuda graph: True, gen throughput (token/s): 1.0\n"
    )
    assert gpu_server.graph_problems(log, True) == []
    assert gpu_server.graph_problems(log, False) and gpu_server.graph_problems("", True)


def test_speed_counts_only_while_all_requests_decode():
    first = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0]
    second = [0.2, 1.5, 2.0, 2.5, 3.0, 3.5]
    gaps, rate = speed.steady([first, second], skip=0)
    assert gaps == [5e5] * 3  # from 1.5, when both had begun, to 3.0, when one finished
    assert rate == pytest.approx(6 / 1.5)
    with pytest.raises(RuntimeError, match="same time.*--speed-tokens"):
        speed.steady([[0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3]], 0)


def counters(waited, cpu, budget, fallback=0, resident=5):
    return {"steps": 1, "gpu_wait_us": waited, "cpu_pages": cpu, "budget_pages": budget,
            "fallback_pages": fallback, "resident_pages": resident}  # fmt: skip


def test_counters_are_of_the_window_alone():
    states = [
        (0.0, counters(0, 0, 0)),
        (1.0, counters(900_000, 900, 1000)),
        (3.0, counters(1_300_000, 1000, 2000, 3, 7)),
        (4.0, counters(9_000_000, 9000, 9000)),
    ]
    assert speed.of_window(states, 1.0, 3.5) == {
        "wait_share": 0.2, "cpu_compute_ratio": 0.1, "fallback_pages": 3, "resident_pages": 7,
    }  # fmt: skip
    assert speed.of_window(states, 3.2, 4.5) == {}, "one sample says nothing"


OPTIONS = gpu_server.parse(
    [
        "--out",
        "x",
        "--speed",
        "--model",
        "qwen3-8b",
        "--host-gb",
        "96",
        "--speed-context",
        "32768",
        "65536",
    ]
)


def test_ours_has_the_batch_of_the_host_and_stock_that_of_the_device():
    assert speed.flags_of("scout-device", OPTIONS, 80 << 30)["max_running_requests"] == 20
    for name in ("triton", "flashinfer"):
        flags = speed.flags_of(f"stock-{name}", OPTIONS, 80 << 30)
        assert flags["attention_backend"] == name and flags["disable_prefill_cuda_graph"]
        assert flags["max_running_requests"] == 17  # more than fit in 80 GiB with the weights


class Server:
    """A server whose requests take 10 ms per token."""

    fails = ""

    def __init__(self, model, flags, **_):
        self.flags = flags
        if flags.get("attention_backend", "scout") == self.fails:
            raise RuntimeError("nvcc: not found")

    __enter__, __exit__ = lambda self: self, lambda *_: None

    def info(self):
        batch = self.flags["max_running_requests"]
        tokens = 400_000 if "attention_backend" in self.flags else 667_000
        return {"max_total_num_tokens": tokens, "max_running_requests": batch,
                "internal_states": [{}]}  # fmt: skip

    def token_times(self, prompts, tokens, timeout_s, meanwhile):
        meanwhile()
        return [[0.01 * i for i in range(tokens)] for _ in prompts]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(options, fails) -> status and rows of all default servers, one of which fails to start."""

    def run(options, fails=""):
        monkeypatch.setattr(speed, "DecodeServer", Server)
        monkeypatch.setattr(Server, "fails", fails)
        about = type("About", (), {"total_memory": 80 << 30})
        monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda _: about)
        writer = rows.Writer(None, rows.environment("gpu_server"))
        failed = speed.measure_speed(writer, options, tmp_path, tmp_path / "model")
        assert (tmp_path / "model" / "qwen3-8b" / "config.json").exists()
        return failed, {
            name: [r for r in writer.rows if r["server"] == name] for name in speed.SERVERS
        }

    return run


def test_stock_is_first_and_every_server_has_a_row_for_each_context(measured):
    failed, by_server = measured(OPTIONS)
    assert failed == 0 and not by_server["stock-triton"], "only where FlashInfer fails"
    for name in ("stock-flashinfer", "scout-device"):
        found = by_server[name]
        assert [row["context"] for row in found] == OPTIONS.speed_context
        assert found[0]["tokens_per_s"] == pytest.approx(100 * found[0]["batch"], rel=0.01)


def test_a_stock_server_that_cannot_start_is_replaced(measured):
    failed, by_server = measured(OPTIONS, "flashinfer")
    assert failed == 0 and [row["status"] for row in by_server["stock-flashinfer"]] == ["failed"]
    assert [row["status"] for row in by_server["stock-triton"]] == ["ok", "ok"]


def test_a_server_of_ours_that_cannot_start_is_a_failure(measured):
    assert measured(OPTIONS, "scout")[0] == 1


def test_nothing_is_measured_where_stock_holds_as_many_requests(measured, capsys):
    options = gpu_server.parse(
        [
            "--out",
            "x",
            "--speed",
            "--model",
            "qwen3-8b",
            "--host-gb",
            "24",
            "--speed-context",
            "32768",
        ]
    )
    failed, by_server = measured(options)
    assert failed == 1 and [row["status"] for row in by_server["scout-device"]] == ["skipped"]
    assert "ABORTED: stock SGLang holds 11 requests of 32768 tokens" in capsys.readouterr().out


def test_attention_processes_of_servers_that_run_at_once_have_cpus_of_their_own(monkeypatch):
    monkeypatch.setattr(gpu_server.os, "sched_getaffinity", lambda _: set(range(16)))
    assert [gpu_server.worker_cpus(x) for x in ("eager", "graph")] == ["8,9,10,11", "12,13,14,15"]
    monkeypatch.setattr(gpu_server.os, "sched_getaffinity", lambda _: {0, 1})
    assert gpu_server.worker_cpus("eager") is None
