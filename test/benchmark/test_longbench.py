"""The LongBench harness on a folder of LongBench's shape and a small server that speaks SGLang's endpoint.

Prompts, metrics and rows are the test's own. The server decodes the token ids that it gets and answers from the text,
so a wrong prompt shows up as a wrong score.
"""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark" / "accuracy"))

import longbench  # noqa: E402
import longbench_answers  # noqa: E402
import longbench_compare  # noqa: E402
import longbench_data  # noqa: E402
import longbench_run  # noqa: E402

import rows  # noqa: E402

SETS = longbench_data.PAPER_SETS
ROWS = 3
NEW_TOKENS = {name: 100 + at for at, name in enumerate(SETS)}
LEAST_CONTEXT = 1024
METRICS = """
import json
from collections import Counter

def same(prediction, answer, **kwargs):
    return float(prediction == answer)

def shared_words(prediction, answer, all_classes=None):
    assert all_classes is None
    common = Counter(prediction.split()) & Counter(answer.split())
    return sum(common.values()) / max(len(answer.split()), 1)
"""
EVAL = """
import argparse
from metrics import same, shared_words

dataset2metric = {NAMES}
dataset2metric["samsum"] = shared_words

if __name__ == "__main__":
    raise SystemExit("the harness must only load it")
"""


def word(set_name: str, number: int) -> str:
    return f"{set_name.replace('_', '')[:5]}w{number}"


def make_row(set_name: str, number: int) -> dict[str, Any]:
    return {
        "input": f"Which word is of {number}?",
        "context": f"Some text. The word is {word(set_name, number)} . More text.",
        "answers": ["no such answer", word(set_name, number), "nor this"],
        "length": 9,
        "dataset": set_name,
        "language": "en",
        "all_classes": None,
        "_id": f"{set_name}-{number}",
    }


class Copy:
    """A folder like a clone of LongBench; ``write_rows`` changes one set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inner = folder / "LongBench"
        self.data = self.inner / "data"
        (self.inner / "config").mkdir(parents=True)
        self.data.mkdir()
        prompts = {name: f"<{name}> {{context}} Question: {{input}}" for name in SETS}
        self.write_config("dataset2prompt.json", prompts)
        self.write_config("dataset2maxlen.json", NEW_TOKENS)
        (self.inner / "metrics.py").write_text(METRICS)
        table = "{" + ", ".join(f'"{name}": same' for name in SETS) + "}"
        (self.inner / "eval.py").write_text(EVAL.replace("{NAMES}", table))
        for name in SETS:
            self.write_rows(name, [make_row(name, number) for number in range(ROWS)])

    def write_config(self, name: str, value: Any) -> None:
        (self.inner / "config" / name).write_text(json.dumps(value))

    def write_rows(self, name: str, data: list[dict[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in data]
        (self.data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


class Server:
    """Speaks what the harness uses of SGLang. ``answer`` makes a text of a prompt, or raises."""

    def __init__(self, tokenizer: Any, tokenizer_dir: Path) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_dir = str(tokenizer_dir)
        self.context_tokens: int | None = LEAST_CONTEXT * 4
        self.model = "the-model"
        self.requests: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self.answer: Callable[[str], str] = right_answer
        self.read_tokens: Callable[[int], int] = lambda count: count
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/get_model_info":
                    body = {"model_path": outer.model, "tokenizer_path": outer.tokenizer_dir}
                    self.reply(200, body)
                elif self.path == "/v1/models":
                    self.reply(200, {"data": [{"max_model_len": outer.context_tokens}]})
                else:
                    self.reply(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = outer.tokenizer.decode(body["input_ids"])
                with outer.lock:
                    outer.requests.append(body)
                    outer.prompts.append(text)
                try:
                    answer = outer.answer(text)
                except RuntimeError as error:
                    self.reply(503, {"error": str(error)})
                    return
                meta = {
                    "finish_reason": {"type": "stop"},
                    "prompt_tokens": outer.read_tokens(len(body["input_ids"])),
                    "completion_tokens": 2,
                }
                self.reply(200, {"text": answer, "meta_info": meta})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def asked_word(prompt: str) -> str:
    found = re.search(r"The word is (\S+) \.", prompt)
    return found[1] if found else "nothing"


def right_answer(prompt: str) -> str:
    # Few-shot sets go on with another example, which must not be scored.
    return f"\n{asked_word(prompt)}\nno" if "<samsum>" in prompt else asked_word(prompt)


def failing(what: str) -> Callable[[str], str]:
    def answer(prompt: str) -> str:
        if what in prompt:
            raise RuntimeError("out of order")
        return right_answer(prompt)

    return answer


@pytest.fixture(scope="session")
def tokenizer_dir(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture
def server(tokenizer: Any, tokenizer_dir: Path) -> Iterator[Server]:
    one = Server(tokenizer, tokenizer_dir)
    yield one
    one.stop()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "clone")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longbench_run, "FIRST_WAIT_S", 0.0)


def run(copy: Copy, server: Server, output: Path, *more: str, label: str = "stock") -> int:
    required = ["--longbench", str(copy.folder), "--base-url", server.url]
    return longbench.main([*required, "--label", label, "--output", str(output), *more])


def answers_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return longbench_answers.read_answers(path).by_key


def table_of(text: str) -> dict[str, list[str]]:
    """First cell to the other cells, of a markdown table."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(" *"): [cell.strip(" *") for cell in row[1:]] for row in cells}


def test_all_sets_are_asked_as_longbench_asks(copy, server, tokenizer, tmp_path, capsys):
    output = tmp_path / "stock.jsonl"
    assert run(copy, server, output) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"mean +{len(SETS) * ROWS} +100\.00", printed)
    assert set(answers_of(output)) == {(s, f"{s}-{n}") for s in SETS for n in range(ROWS)}
    assert len(server.requests) == len(SETS) * ROWS
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    for request, prompt in zip(server.requests, server.prompts, strict=True):
        name = re.search(r"<(\w+)> Some", prompt)[1]
        sampling = request["sampling_params"]
        assert sampling["max_new_tokens"] == NEW_TOKENS[name]
        assert sampling["temperature"] == 0.0 and sampling["ignore_eos"] is False
        number = re.search(r"of (\d+)\?", prompt)[1]
        plain = f"<{name}> {make_row(name, int(number))['context']} Question: "
        plain += make_row(name, int(number))["input"]
        if name == "samsum":
            assert prompt == plain
            assert sampling["stop_token_ids"] == [newline] and sampling["min_new_tokens"] == 1
        else:
            begin, end = prompt.split(plain)
            assert begin.startswith("<|im_start|>user") and end.endswith("assistant\n")
            assert "stop_token_ids" not in sampling


def test_without_chat_every_prompt_is_plain(copy, server, tmp_path):
    assert run(copy, server, tmp_path / "a.jsonl", "--chat", "off") == 0
    assert all(prompt.startswith("<") and prompt.endswith("?") for prompt in server.prompts)
    assert not any("im_start" in prompt for prompt in server.prompts)


@pytest.mark.parametrize("place", ["beside the clone's folder", "data.zip unpacked", "its data"])
def test_data_is_found_where_it_may_lie(copy, server, tmp_path, place):
    to = {
        "beside the clone's folder": copy.folder / "data",
        "data.zip unpacked": tmp_path / "zip" / "data",
        "its data": tmp_path / "elsewhere",
    }[place]
    to.parent.mkdir(exist_ok=True)
    copy.data.rename(to)
    flag = {
        "beside the clone's folder": [],
        "data.zip unpacked": ["--data", str(tmp_path / "zip")],
        "its data": ["--data", str(to)],
    }[place]
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--limit", "1", *flag) == 0
    assert len(answers_of(output)) == len(SETS)
    # A run remembers where its data were.
    assert longbench.main(["score", str(output)]) == 0


def test_the_folder_inside_the_clone_works_too(copy, server, tmp_path):
    copy.folder = copy.inner
    assert run(copy, server, tmp_path / "a.jsonl", "--sets", "qasper") == 0


def test_line_separators_inside_a_text_are_no_line_ends(copy, server, tmp_path):
    row = make_row("qasper", 0)
    row["context"] += " one\u2028two\u0085three"
    copy.write_rows("qasper", [row])
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    assert len(answers_of(output)) == 1 and "one" in server.prompts[0]


def test_rows_that_share_an_id_are_both_asked(copy, server, tmp_path):
    copy.write_rows("qasper", [make_row("qasper", 0), make_row("qasper", 1) | {"_id": "qasper-0"}])
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    texts = {key: row["text"] for (_, key), row in answers_of(output).items()}
    assert texts == {"qasper-0": word("qasper", 0), "qasper-0#2": word("qasper", 1)}


def test_a_long_prompt_loses_its_middle(copy, server, tokenizer, tmp_path):
    row = make_row("qasper", 0)
    row["context"] = "HEAD. " + "filler " * 600 + "MIDDLE. " + "filler " * 600 + row["context"]
    copy.write_rows("qasper", [row, make_row("qasper", 1)])
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "--max-prompt-tokens", "401") == 0
    long, short = (answers_of(output)["qasper", f"qasper-{n}"] for n in range(2))
    prompt = next(text for text in server.prompts if "HEAD" in text)
    assert "MIDDLE" not in prompt and "filler" in prompt
    # The end of the prompt, with the word and the question, is there: the answer is right.
    assert long["text"] == word("qasper", 0)
    whole = f"<qasper> {row['context']} Question: {row['input']}"
    assert long["cut_tokens"] == len(tokenizer(whole).input_ids) - 400
    around = long["prompt_tokens"] - 400
    assert 0 < around < 60
    assert short["cut_tokens"] == 0


def test_the_default_length_leaves_room_for_the_longest_answer(copy, server, tmp_path):
    server.context_tokens = LEAST_CONTEXT
    row = make_row("qasper", 0)
    row["context"] = "filler " * 2000 + row["context"]
    copy.write_rows("qasper", [row])
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    used = answers_of(output)["qasper", "qasper-0"]["prompt_tokens"]
    spare = LEAST_CONTEXT - used - max(NEW_TOKENS.values())
    assert 0 <= spare <= 2 * 32


def test_a_router_that_does_not_tell_the_context(copy, server, tmp_path, tokenizer_dir):
    server.context_tokens = None
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    settings = longbench_answers.read_answers(output).runs[0]["settings"]
    told = json.loads((tokenizer_dir / "config.json").read_text())["max_position_embeddings"]
    assert told - 200 < settings["max_prompt_tokens"] < told


def test_a_broken_run_goes_on_where_it_stopped(copy, server, tmp_path):
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "2wikimqa", "--limit", "2") == 0
    first = output.read_bytes()
    assert len(server.requests) == 4
    # The writer was killed in the middle of a line.
    cut = first.rstrip(b"\n").rfind(b"\n") + 30
    output.write_bytes(first[:cut])
    assert len(answers_of(output)) == 3
    assert run(copy, server, output) == 0
    assert len(answers_of(output)) == len(SETS) * ROWS
    assert len(server.requests) == 4 + len(SETS) * ROWS - 3
    assert output.read_bytes().startswith(first[: first.rfind(b"\n", 0, cut) + 1])
    assert len(longbench_answers.read_answers(output).runs) == 2
    # Nothing is left: no request.
    assert run(copy, server, output) == 0
    assert len(server.requests) == 4 + len(SETS) * ROWS - 3


def test_a_failed_question_is_retried_recorded_and_asked_again(copy, server, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    bad = word("qmsum", 1)
    server.answer = failing(bad)
    assert run(copy, server, output, "--tries", "3") == 1
    said = capsys.readouterr()
    assert "1 questions have no answer" in said.err and "out of order" in said.err
    assert "mean" not in said.out
    row = answers_of(output)["qmsum", "qmsum-1"]
    assert row["status"] == "failed" and row["attempts"] == 3 and "503" in row["reason"]
    assert sum(bad in prompt for prompt in server.prompts) == 3
    # It is not scored as wrong: what is answered has full marks.
    assert longbench.main(["score", str(output)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"qmsum +same +2 +100\.00", said) and "1 of qmsum" in said
    server.answer = right_answer
    before = len(server.requests)
    assert run(copy, server, output) == 0
    assert len(server.requests) == before + 1
    assert answers_of(output)["qmsum", "qmsum-1"]["status"] == "ok"


def test_a_request_that_fails_once_is_no_failure(copy, server, tmp_path):
    seen: set[str] = set()

    def flaky(prompt: str) -> str:
        if prompt not in seen:
            seen.add(prompt)
            raise RuntimeError("busy")
        return right_answer(prompt)

    server.answer = flaky
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    assert {row["attempts"] for row in answers_of(output).values()} == {2}


def test_a_server_that_truncates_by_itself_is_noticed(copy, server, tmp_path):
    server.read_tokens = lambda count: count - 1
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 1
    assert all("prompt tokens" in row["reason"] for row in answers_of(output).values())


def test_an_answer_of_another_shape_is_a_failure(copy, server, tmp_path):
    server.answer = lambda prompt: ["not", "text"]
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "--tries", "1") == 1
    assert all(row["status"] == "failed" for row in answers_of(output).values())


def test_a_server_that_is_gone_ends_the_run(copy, server, tmp_path, capsys):
    server.answer = failing("")
    copy.write_rows("qasper", [make_row("qasper", n) for n in range(100)])
    output = tmp_path / "a.jsonl"
    more = ["--sets", "qasper", "--concurrency", "2", "--tries", "1"]
    assert run(copy, server, output, *more) == 1
    assert 8 <= len(server.requests) <= 10
    assert "in a row failed" in capsys.readouterr().err
    server.answer = right_answer
    assert run(copy, server, output, *more) == 0
    assert len(answers_of(output)) == 100


def test_ctrl_c_waits_for_what_is_under_way(copy, server, tmp_path):
    asked, go_on = threading.Semaphore(0), threading.Event()

    def slow(prompt: str) -> str:
        asked.release()
        assert go_on.wait(60)
        return right_answer(prompt)

    server.answer = slow
    output = tmp_path / "a.jsonl"
    command = [sys.executable, str(ROOT / "benchmark/accuracy/longbench.py")]
    command += ["--longbench", str(copy.folder), "--base-url", server.url, "--label", "stock"]
    command += ["--output", str(output), "--concurrency", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert asked.acquire(timeout=120) and asked.acquire(timeout=10)
            process.send_signal(signal.SIGINT)
            said = ""
            while "waiting for" not in said:
                said = process.stderr.readline()
                assert said, "ended before it said anything"
            go_on.set()
            error = process.stderr.read()
            process.wait(60)
        finally:
            go_on.set()
            process.kill()
    assert process.returncode == 1
    assert f"{len(SETS) * ROWS - 2} questions have no answer (interrupted" in error
    assert [row["status"] for row in answers_of(output).values()] == ["ok", "ok"]
    assert run(copy, server, output) == 0
    assert len(server.requests) == len(SETS) * ROWS


def test_failures_among_answers_do_not_end_the_run(copy, server, tmp_path):
    def every_second(prompt: str) -> str:
        return failing("?" if int(re.search(r"of (\d+)\?", prompt)[1]) % 2 else "<none>")(prompt)

    server.answer = every_second
    copy.write_rows("qasper", [make_row("qasper", n) for n in range(30)])
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "--concurrency", "1", "--tries", "1") == 1
    states = [row["status"] for row in answers_of(output).values()]
    assert states.count("ok") == states.count("failed") == 15


@pytest.fixture
def two_files(copy, server, tmp_path) -> tuple[Path, Path]:
    """A stock server that is always right, and one that misses one question of 2wikimqa."""
    stock, scout = tmp_path / "stock.jsonl", tmp_path / "scout.jsonl"
    assert run(copy, server, stock) == 0
    missed = word("2wikimqa", 0)
    server.answer = lambda text: "wrong" if missed in text else right_answer(text)
    assert run(copy, server, scout, label="scout-1024") == 0
    return stock, scout


def test_compare_prints_and_writes_the_differences(two_files, tmp_path, capsys):
    stock, scout = two_files
    capsys.readouterr()
    report, table_rows = tmp_path / "report.md", tmp_path / "table.jsonl"
    command = ["compare", str(stock), str(scout), "--json", str(table_rows)]
    assert longbench.main([*command, "--output", str(report)]) == 0
    printed = capsys.readouterr().out
    assert report.read_text() == printed
    table = table_of(printed)
    assert table["set"] == [
        *("metric", "questions", "stock"),
        *("scout-1024", "difference", "95 % interval"),
    ]
    assert list(table)[2:] == [*SETS, "mean"]
    assert table["2wikimqa"] == ["same", "3", "100.00", "66.67", "-33.33", "-100.00 to 0.00"]
    assert table["samsum"][0] == "shared_words" and table["samsum"][2:4] == ["100.00", "100.00"]
    assert table["qasper"][4:] == ["0.00", "0.00 to 0.00"]
    assert table["mean"][1:5] == ["24", "100.00", "95.83", "-4.17"]
    assert "Not in the table" not in printed and "Too few questions" in printed
    found = rows.read_rows(table_rows)
    assert [row["set"] for row in found] == [*SETS, "mean"]
    assert found[-1]["difference"] == pytest.approx(-100 / 3 / 8, abs=1e-3)
    # Without --output beside the last file, and the same numbers every time.
    assert longbench.main(["compare", str(stock), str(scout)]) == 0
    assert scout.with_suffix(".md").read_text() == report.read_text()


def test_compare_pairs_questions_and_says_what_is_missing(copy, server, tmp_path, capsys):
    stock, scout = tmp_path / "stock.jsonl", tmp_path / "scout.jsonl"
    server.answer = failing(word("qasper", 0))
    assert run(copy, server, stock, "--sets", "qasper", "samsum", "--tries", "1") == 1
    missed = word("qasper", 0)
    server.answer = lambda text: "wrong" if missed in text else right_answer(text)
    assert run(copy, server, scout, "--sets", "qasper", label="scout") == 0
    capsys.readouterr()
    assert longbench.main(["compare", str(stock), str(scout)]) == 0
    printed = capsys.readouterr().out
    table = table_of(printed)
    # The question that only scout has answered, wrongly, counts for neither.
    assert table["qasper"][1:5] == ["2", "100.00", "100.00", "0.00"]
    assert "samsum" not in table
    assert "1 of qasper" in printed and "3 of samsum" in printed


def test_compare_of_three_files(two_files, copy, server, tmp_path, capsys):
    third = tmp_path / "third.jsonl"
    server.answer = lambda prompt: "wrong"
    assert run(copy, server, third, label="third") == 0
    capsys.readouterr()
    assert longbench.main(["compare", *map(str, two_files), str(third)]) == 0
    table = table_of(capsys.readouterr().out)
    assert table["mean"][2:5] == ["100.00", "95.83", "-4.17"]
    assert table["mean"][6:8] == ["0.00", "-100.00"]


def test_different_prompts_are_not_compared(copy, server, tmp_path, capsys):
    row = make_row("qasper", 0)
    row["context"] = "filler " * 500 + row["context"]
    copy.write_rows("qasper", [row])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, length in zip(paths, ("300", "400"), strict=True):
        assert run(copy, server, path, "--sets", "qasper", "--max-prompt-tokens", length) == 0
    assert longbench.main(["compare", *map(str, paths)]) == 2
    error = capsys.readouterr().err
    assert "1 of 1 questions" in error and "300 and 400" in error


def test_the_interval_is_that_of_paired_differences():
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 100, 400)
    change = rng.normal(-2, 5, 400)
    sets = [longbench_compare.SetScores("qasper", "m", np.stack([base, base + change]), 0)]
    one, mean = longbench_compare.differences(sets, 1)
    assert one.difference == pytest.approx(change.mean())
    half = 1.96 * change.std() / 20
    assert one.low == pytest.approx(change.mean() - half, abs=0.1)
    assert one.high == pytest.approx(change.mean() + half, abs=0.1)
    assert (mean.low, mean.high) == (one.low, one.high)
    # The mean of two sets is known better than either: its variance is half of theirs.
    sets.append(longbench_compare.SetScores("qmsum", "m", np.stack([base, base + change]), 0))
    _, _, mean = longbench_compare.differences(sets, 1)
    assert mean.high - mean.low == pytest.approx(2 * half / np.sqrt(2), rel=0.05)


def test_a_single_question_has_no_interval():
    points = np.array([[100.0], [40.0]])
    sets = [longbench_compare.SetScores("qasper", "m", points, 0)]
    one, mean = longbench_compare.differences(sets, 1)
    assert one.difference == mean.difference == -60.0
    assert one.low is None and mean.high is None


def test_only_the_first_line_of_few_shot_answers_counts():
    assert longbench_data.counted_part("samsum", "\n\nOne. Two.\nDialogue:") == "One. Two."
    assert longbench_data.counted_part("qasper", "\nOne.\nTwo.") == "\nOne.\nTwo."


def test_metrics_that_need_absent_packages(copy, server, tmp_path, capsys):
    path = copy.inner / "metrics.py"
    path.write_text("import no_such_one\nfrom no_such_two.part import x\n" + METRICS)
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper") == 0
    said = capsys.readouterr()
    install = "pip install no_such_one no_such_two"
    assert install in said.err and install in said.out
    assert len(answers_of(output)) == ROWS
    assert longbench.main(["score", str(output)]) == 2
    assert install in capsys.readouterr().err
    path.write_text(METRICS)
    assert longbench.main(["score", str(output)]) == 0


def test_eval_gets_the_metrics_of_the_copy(copy, server, tmp_path, monkeypatch):
    other = object()
    monkeypatch.setitem(sys.modules, "metrics", other)
    assert run(copy, server, tmp_path / "a.jsonl", "--sets", "qasper") == 0
    assert sys.modules["metrics"] is other


def test_a_metric_that_raises_names_the_row(copy, server, tmp_path, capsys):
    (copy.inner / "metrics.py").write_text(METRICS.replace("return float(", "raise KeyError("))
    assert run(copy, server, tmp_path / "a.jsonl", "--sets", "qasper") == 2
    assert "qasper-0: LongBench's same raises KeyError" in capsys.readouterr().err


def no_configuration(copy: Copy, server: Server, output: Path) -> list[str]:
    (copy.inner / "config" / "dataset2prompt.json").unlink()
    return []


def broken_configuration(copy: Copy, server: Server, output: Path) -> list[str]:
    copy.write_config("dataset2maxlen.json", {"qasper": "128"})
    return []


def prompt_with_unknown_field(copy: Copy, server: Server, output: Path) -> list[str]:
    copy.write_config("dataset2prompt.json", dict.fromkeys(SETS, "{nothing}"))
    return []


def no_data(copy: Copy, server: Server, output: Path) -> list[str]:
    (copy.data / "dureader.jsonl").unlink()
    return []


def no_data_in_named_folder(copy: Copy, server: Server, output: Path) -> list[str]:
    return ["--data", str(copy.folder)]


def empty_data(copy: Copy, server: Server, output: Path) -> list[str]:
    copy.write_rows("qmsum", [])
    return []


def row_without_answers(copy: Copy, server: Server, output: Path) -> list[str]:
    data = [make_row("qmsum", 0), make_row("qmsum", 1)]
    del data[1]["answers"]
    copy.write_rows("qmsum", data)
    return []


def no_metrics(copy: Copy, server: Server, output: Path) -> list[str]:
    (copy.inner / "metrics.py").unlink()
    return []


def foreign_output(copy: Copy, server: Server, output: Path) -> list[str]:
    output.write_text("my notes")
    return []


def other_rows_in_output(copy: Copy, server: Server, output: Path) -> list[str]:
    output.write_text('{"benchmark": "x"}\n')
    return []


def output_is_a_folder(copy: Copy, server: Server, output: Path) -> list[str]:
    output.mkdir()
    return []


def small_context(copy: Copy, server: Server, output: Path) -> list[str]:
    server.context_tokens = 100
    return []


def template_is_missing(copy: Copy, server: Server, output: Path) -> list[str]:
    plain = copy.folder / "plain"
    plain.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (plain / name).write_bytes((Path(server.tokenizer_dir) / name).read_bytes())
    return ["--tokenizer", str(plain)]


REFUSALS = {
    no_configuration: ["--longbench", "config/dataset2prompt.json", "git clone"],
    broken_configuration: ["--longbench", "dataset2maxlen.json", "int"],
    prompt_with_unknown_field: ["dataset2prompt.json", "nothing", "{context}"],
    no_data: ["--longbench", "dureader.jsonl", "data.zip", "--data"],
    no_data_in_named_folder: ["--data", ".jsonl", "data.zip"],
    empty_data: ["qmsum.jsonl", "no rows"],
    row_without_answers: ["qmsum.jsonl:2", "answers is None", "list"],
    no_metrics: ["--longbench", "metrics.py", "git clone"],
    foreign_output: ["--output", "a.jsonl", "another file"],
    other_rows_in_output: ["a.jsonl:1", "neither"],
    output_is_a_folder: ["--output", "a.jsonl", "directory"],
    small_context: ["100 tokens", "at least"],
    template_is_missing: ["--chat auto", "no chat template", "--chat off"],
}


@pytest.mark.parametrize("prepare", REFUSALS, ids=lambda one: one.__name__)
def test_refusals_name_what_is_wrong_and_what_helps(prepare, copy, server, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    more = prepare(copy, server, output)
    before = output.read_bytes() if output.is_file() else None
    assert run(copy, server, output, *more) == 2
    error = capsys.readouterr().err
    assert [part for part in REFUSALS[prepare] if part not in error] == []
    assert server.requests == []
    assert before is None or output.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--sets", "qaspr"], ["--sets qaspr", "qasper"]),
        (["--tokenizer", "/no/such"], ["--tokenizer /no/such", "folder"]),
        (["--max-prompt-tokens", "9"], ["--max-prompt-tokens 9", "at least 64"]),
        (["--max-prompt-tokens", "5000"], ["--max-prompt-tokens 5000", "give at most"]),
        (["--base-url", "localhost:1"], ["--base-url localhost:1", "http://HOST:PORT"]),
        (["--base-url", "http://127.0.0.1:9"], ["--base-url", "start the server"]),
        (["--limit", "0"], ["--limit", "'0'", "from 1 on"]),
        (["--timeout-s", "-1"], ["--timeout-s", "'-1'", "above 0"]),
    ],
)
def test_wrong_flags_are_refused(more, parts, copy, server, tmp_path, capsys):
    try:
        code = run(copy, server, tmp_path / "a.jsonl", *more)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == []
    assert server.requests == []


@pytest.mark.parametrize("change", ["label", "model", "length", "chat", "data"])
def test_a_file_keeps_to_what_it_was_begun_with(change, copy, server, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "--limit", "1") == 0
    asked, before = len(server.requests), output.read_bytes()
    more, label = ["--sets", "qasper"], "stock"
    if change == "label":
        label = "scout"
    elif change == "model":
        server.model = "another"
    elif change == "length":
        more += ["--max-prompt-tokens", "300"]
    elif change == "chat":
        more += ["--chat", "off"]
    else:
        copy.write_rows("qasper", [make_row("qasper", 7)])
    assert run(copy, server, output, *more, label=label) == 2
    error = capsys.readouterr().err
    flags = {"length": "--max-prompt-tokens", "data": "--longbench", "model": "served model"}
    assert flags.get(change, f"--{change}") in error and str(output) in error
    assert len(server.requests) == asked and output.read_bytes() == before


def test_two_runs_do_not_write_one_file(copy, server, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    with output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(copy, server, output) == 2
    assert "another run is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["FILE"], "one file"),
        (["FILE", "/no/such.jsonl"], "/no/such.jsonl"),
        (["FILE", "FILE", "--output", "FILE"], "write over answers"),
        (["FILE", "FILE", "--longbench", "/no/such"], "--longbench /no/such"),
    ],
)
def test_compare_refuses(arguments, part, copy, server, tmp_path, capsys):
    output = tmp_path / "a.jsonl"
    assert run(copy, server, output, "--sets", "qasper", "--limit", "1") == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert longbench.main(["compare", *(a.replace("FILE", str(output)) for a in arguments)]) == 2
    assert part in capsys.readouterr().err
    assert output.read_bytes() == before
