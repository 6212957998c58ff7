"""Checks and measurements of ``benchmark/server/gpu_server.py``, whose checks ``test_gpu_check.py`` runs."""

import pytest

from benchmark import rows
from benchmark.server import gpu_server, speed

ANSWER = [(0, 0.0), (7, -1.5), (3, -0.5)]
STATE = dict.fromkeys(("steps", "selected_pages", "cpu_pages", "recalled_pages"), 9)
STATE |= {"policy": "scout", "host_pages_used": 0, "fallback_pages": 0, "worker": {"restarts": 0}}


def changed(at, entry):
    return [*ANSWER[:at], entry, *ANSWER[at + 1 :]]


@pytest.mark.parametrize(
    ("graph", "says", "ties"),
    [
        (ANSWER, None, 0),
        # Another token of the same weight is a tie, and what follows is not compared.
        ([*changed(1, (8, -1.5004))[:2], (9, -5.0)], None, 1),
        (changed(1, (7, -1.6)), ", token 1: log-probabilities differ by 0.1", 0),
        (changed(2, (8, -0.6)), ", token 2: log-probabilities differ by 0.1", 0),
        (changed(1, (7, float("nan"))), ", token 1: log-probabilities differ by nan", 0),
        (ANSWER[:2], ": 3 and 2 tokens", 0),
    ],
)
def test_single_requests_must_agree_up_to_a_tie(graph, says, ties):
    wrong, found = gpu_server.token_problems({1: [ANSWER]}, {1: [graph]}, "cuda", 1e-3)
    assert found == {"ties": ties, "apart": 0, "requests": 1}
    assert wrong == ([f"batch 1, request 0{says}"] if says else [])


def test_of_several_requests_the_first_tokens_of_most_must_agree():
    def problems(*others, device="cuda"):
        graph = [*others, *[ANSWER] * (8 - len(others))]
        return gpu_server.token_problems({8: [ANSWER] * 8}, {8: graph}, device, 0.25)

    apart, later, near = changed(1, (8, -1.5)), changed(2, (9, -9.0)), changed(1, (7, -1.4))
    assert problems(apart, near, *[later] * 6) == ([], {"ties": 0, "apart": 1, "requests": 8})
    wrong, _ = problems(*[apart] * 8)
    assert wrong == ["the first tokens of 8 of 8 requests have nothing in common"]
    assert len(problems(later, device="cpu")[0]) == 1, "there sums do not depend on the batch"


def test_what_is_wrong_after_the_last_request_is_named():
    assert gpu_server.state_problems(STATE) == []
    worn = STATE | {"worker": {"restarts": 1}, "cpu_pages": 0, "host_pages_used": 2}
    expected = ["cpu_pages = 0", "host_pages_used = 2", "worker.restarts = 1"]
    assert gpu_server.state_problems(worn) == expected
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
    with pytest.raises(RuntimeError, match="same time for 0 steps, 3 are needed"):
        speed.steady([[0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3]], 0)


def test_counters_are_of_the_window_alone():
    names = "steps", "gpu_wait_us", "cpu_pages", "budget_pages", "fallback_pages", "resident_pages"
    at = {0.0: (1, 0, 0, 0, 0, 5), 1.0: (1, 900_000, 900, 1000, 0, 5)}
    at |= {3.0: (1, 1_300_000, 1000, 2000, 3, 7), 4.0: (1, 9_000_000, 9000, 9000, 0, 5)}
    states = [(time_s, dict(zip(names, x, strict=True))) for time_s, x in at.items()]
    found = {"wait_share": 0.2, "cpu_compute_ratio": 0.1, "fallback_pages": 3, "resident_pages": 7}
    assert speed.of_window(states, 1.0, 3.5) == found
    assert speed.of_window(states, 3.2, 4.5) == {}, "one sample says nothing"


def options_of(host_gb, *contexts):
    words = ["--out", "x", "--speed", "--model", "qwen3-8b", "--host-gb", host_gb]
    options = gpu_server.parse(words)
    options.contexts = contexts
    return options


class Server:
    """A server whose requests take 10 ms per token."""

    fails = ""

    def __init__(self, model, flags, *_):
        self.flags = flags
        if flags.get("attention_backend", "scout") == self.fails:
            raise RuntimeError("nvcc: not found")

    __enter__, __exit__ = lambda self: self, lambda *_: None

    def info(self):
        tokens = 400_000 if "attention_backend" in self.flags else 667_000
        found = {"max_total_num_tokens": tokens, "internal_states": [{}]}
        return found | {"max_running_requests": self.flags["max_running_requests"]}

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
        monkeypatch.setattr(speed.torch.cuda, "mem_get_info", lambda: (0, 0))
        writer = rows.Writer(None, rows.environment("gpu_server"))
        failed = speed.measure_speed(writer, options, tmp_path, tmp_path / "model")
        found = {x: [r for r in writer.rows if r["server"] == x] for x in speed.SERVERS}
        return failed, found

    return run


def test_stock_is_first_and_every_server_has_a_row_for_each_context(measured):
    failed, by_server = measured(options_of("96", 32768, 65536))
    assert failed == 0 and not by_server["stock-triton"], "only where FlashInfer fails"
    # Stock has the batch of the device, ours that of the host.
    for name, batches in (("stock-flashinfer", [11, 6]), ("scout-device", [20, 10])):
        found = by_server[name]
        assert [row["context"] for row in found] == [32768, 65536]
        assert [row["batch"] for row in found] == batches
        assert found[0]["tokens_per_s"] == pytest.approx(100 * found[0]["batch"], rel=0.01)


def test_only_stock_that_cannot_start_is_replaced(measured, tmp_path):
    options = options_of("96", 32768, 65536)
    failed, by_server = measured(options, "flashinfer")
    assert failed == 0 and [row["status"] for row in by_server["stock-flashinfer"]] == ["failed"]
    assert [row["status"] for row in by_server["stock-triton"]] == ["ok", "ok"]
    (tmp_path / "model").rename(tmp_path / "before")
    assert measured(options, "scout")[0] == 1


def test_nothing_is_measured_where_stock_holds_as_many_requests(measured, capsys):
    failed, by_server = measured(options_of("24", 32768))
    assert failed == 1 and [row["status"] for row in by_server["scout-device"]] == ["skipped"]
    why = "ABORTED: 24 GiB of host pages hold 5 requests of 32768 tokens"
    assert why in capsys.readouterr().out
