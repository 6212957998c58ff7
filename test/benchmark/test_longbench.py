"""The LongBench harness on a folder of LongBench's shape and a small server that speaks SGLang's endpoint.

Prompts, metrics and rows are the test's own. The server decodes the token ids that it gets and answers from the text,
so a wrong prompt shows up as a wrong score.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmark import rows
from benchmark.accuracy import longbench

SETS = longbench.data.PAPER_SETS
ROWS = 3
NEW_TOKENS = {name: 100 + at for at, name in enumerate(SETS)}
METRICS = """
def same(prediction, answer, all_classes=None):
    return float(prediction == answer)

def shared_words(prediction, answer, all_classes=None):
    return len({*prediction.split()} & {*answer.split()}) / len(answer.split())
"""
EVAL = f"""
from metrics import same, shared_words

dataset2metric = dict.fromkeys({SETS}, same) | {{"samsum": shared_words}}
assert __name__ != "__main__"
"""


def word(name, number):
    return f"{name.replace('_', '')[:5]}w{number}"


def make_row(name, number):
    context = f"Some text. The word is {word(name, number)} . More text."
    answers = ["no such answer", word(name, number), "nor this"]
    return {"_id": f"{name}-{number}", "input": f"Which word is of {number}?", "context": context,
            "answers": answers, "all_classes": None}  # fmt: skip


class Copy:
    """A folder like a clone of LongBench."""

    def __init__(self, folder):
        self.folder, self.inner = folder, folder / "LongBench"
        for name in ("config", "data"):
            (self.inner / name).mkdir(parents=True)
        self.write("config/dataset2prompt.json",
                   json.dumps({name: f"<{name}> {{context}} Question: {{input}}" for name in SETS}))  # fmt: skip
        self.write("config/dataset2maxlen.json", json.dumps(NEW_TOKENS))
        self.write("metrics.py", METRICS)
        self.write("eval.py", EVAL)
        for name in SETS:
            self.write_rows(name, [make_row(name, number) for number in range(ROWS)])

    def write(self, name, text):
        (self.inner / name).write_text(text, encoding="utf-8")

    def write_rows(self, name, data):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in data]
        self.write(f"data/{name}.jsonl", "".join(lines))


def right_answer(prompt):
    found = re.search(r"The word is (\S+) \.", prompt)[1]
    # Few-shot sets go on with another example, which must not be scored.
    return f"\n{found}\nno" if "<samsum>" in prompt else found


def failing(what):
    def answer(prompt):
        if re.search(what, prompt):
            raise RuntimeError("out of order")
        return right_answer(prompt)

    return answer


class Server:
    """Speaks what the harness uses of SGLang. ``answer`` makes a text of a prompt, or raises."""

    def __init__(self, tokenizer_dir):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self.about = {"model_path": "the-model", "tokenizer_path": str(tokenizer_dir)}
        self.truncated = 0
        self.requests, self.prompts, self.answer = [], [], right_answer
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply(200 if self.path == "/get_model_info" else 404, outer.about)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ids = body["input_ids"]
                with lock:
                    text = outer.tokenizer.decode(ids)
                    outer.requests.append(body["sampling_params"])
                    outer.prompts.append(text)
                try:
                    answer = outer.answer(text)
                except RuntimeError as error:
                    self.reply(503, {"error": str(error)})
                    return
                about = {"finish_reason": {"type": "stop"}}
                about["prompt_tokens"] = len(ids) - outer.truncated
                self.reply(200, {"text": answer, "meta_info": about})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server(tiny_model):
    one = Server(tiny_model("qwen3"))
    yield one
    one.http.shutdown()
    one.http.server_close()


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "clone")


@pytest.fixture
def run(copy, server, tmp_path):
    def run(*more, name="a.jsonl", label="stock"):
        required = ["--longbench", str(copy.folder), "--base-url", server.url + "/"]
        return longbench.main(
            [*required, "--label", label, "--output", str(tmp_path / name), *more]
        )

    return run


def answers_of(path):
    """Last row of each question."""
    return {(row["set"], row["id"]): row for row in rows.read_rows(path)}


def table_of(text):
    """First cell to the other cells, of a markdown table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: cells for first, *cells in lines}


def test_all_sets_are_asked_as_longbench_asks(run, server, tmp_path, capsys):
    assert run() == 0
    table = table_of(capsys.readouterr().out)
    assert list(table)[2:] == [*SETS, "mean"]
    assert table["mean"] == ["", str(len(SETS) * ROWS), "100.00 (100.00 to 100.00)"]
    everything = {(s, f"{s}-{n}") for s in SETS for n in range(ROWS)}
    assert set(answers_of(tmp_path / "a.jsonl")) == everything
    newline = server.tokenizer.encode("\n", add_special_tokens=False)[-1]
    for sampling, prompt in zip(server.requests, server.prompts, strict=True):
        name, number = re.search(r"<(\w+)> Some.*of (\d+)\?", prompt).groups()
        row = make_row(name, int(number))
        begin, end = prompt.split(f"<{name}> {row['context']} Question: {row['input']}")
        greedy = {"temperature": 0.0, "ignore_eos": False, "max_new_tokens": NEW_TOKENS[name]}
        if name == "samsum":
            assert (begin, end) == ("", "")
            assert sampling == greedy | {"stop_token_ids": [newline], "min_new_tokens": 1}
        else:
            assert begin.startswith("<|im_start|>user") and end.endswith("assistant\n")
            assert sampling == greedy


def test_data_that_are_easily_misread(run, copy, server, tmp_path):
    odd = make_row("qasper", 0)
    odd["context"] += " one\u2028two\u0085three"  # no ends of lines
    copy.write_rows("qasper", [odd, make_row("qasper", 1) | {"_id": "qasper-0"}])
    copy.folder = copy.inner
    assert run("--sets", "qasper") == 0
    found = rows.read_rows(tmp_path / "a.jsonl")
    assert {row["text"] for row in found} == {word("qasper", 0), word("qasper", 1)}


def test_a_long_prompt_loses_its_middle(run, copy, server, tmp_path):
    row = make_row("qasper", 0)
    row["context"] = "HEAD. " + "filler " * 600 + "MIDDLE. " + "filler " * 600 + row["context"]
    copy.write_rows("qasper", [row, make_row("qasper", 1)])
    assert run("--sets", "qasper", "--max-prompt-tokens", "401") == 0
    long, short = (answers_of(tmp_path / "a.jsonl")["qasper", f"qasper-{n}"] for n in range(2))
    prompt = next(text for text in server.prompts if "HEAD" in text)
    assert "MIDDLE" not in prompt and "filler" in prompt
    assert long["text"] == word("qasper", 0), "the end with the question is there"
    whole = f"<qasper> {row['context']} Question: {row['input']}"
    assert long["cut_tokens"] == len(server.tokenizer(whole).input_ids) - 400
    assert 0 < long["prompt_tokens"] - 400 < 60 and short["cut_tokens"] == 0


def test_a_broken_run_goes_on_where_it_stopped(run, server, tmp_path):
    output = tmp_path / "a.jsonl"
    assert run("--sets", "qasper", "2wikimqa", "--limit", "2") == 0
    first = output.read_bytes()
    kept = first[: first.rfind(b"\n", 0, -1) + 1]
    output.write_bytes(first[: len(kept) + 30])  # the writer was killed in the middle of a line
    for _ in range(2):  # the second time nothing is left
        assert run() == 0
        assert len(server.requests) == 4 + len(SETS) * ROWS - 3
    assert output.read_bytes().startswith(kept)
    assert len(answers_of(output)) == len(rows.read_rows(output)) == len(SETS) * ROWS


def test_a_failed_question_is_recorded_left_out_and_asked_again(run, server, tmp_path, capsys):
    output, bad = tmp_path / "a.jsonl", word("qmsum", 1)
    server.answer = failing(bad)
    assert run() == 1
    said = capsys.readouterr()
    assert "1 failed" in said.err and "out of order" in said.err and not said.out
    row = answers_of(output)["qmsum", "qmsum-1"]
    assert row["status"] == "failed" and "503" in row["reason"]
    assert sum(bad in prompt for prompt in server.prompts) == 1
    assert longbench.main(["compare", str(output)]) == 0
    said = capsys.readouterr().out
    assert table_of(said)["qmsum"][1:] == ["2", "100.00 (100.00 to 100.00)"]
    assert "Not in the table:** 1 " in said
    server.answer, before = right_answer, len(server.requests)
    assert run() == 0 and len(server.requests) == before + 1
    assert "Not in the table" not in capsys.readouterr().out


def test_compare(run, server, tmp_path, capsys):
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("stock", "scout", "third")]
    server.answer = failing(word("qasper", 0))
    assert run("--sets", "qasper", "2wikimqa", "samsum", name="stock.jsonl") == 1
    missed = rf"{word('qasper', 0)}|{word('2wikimqa', 0)}"
    server.answer = lambda text: "wrong" if re.search(missed, text) else right_answer(text)
    assert run("--sets", "2wikimqa", "qasper", name="scout.jsonl", label="scout") == 0
    server.answer = lambda text: "wrong"
    assert run("--sets", "2wikimqa", "qasper", name="third.jsonl", label="third") == 0
    capsys.readouterr()
    assert longbench.main(["compare", *paths[:2]]) == 0
    printed = capsys.readouterr().out
    table, full = table_of(printed), "100.00 (100.00 to 100.00)"
    assert table["set"] == ["metric", "questions", "stock", "scout", "scout − stock"]
    assert table["2wikimqa"] == [
        *("same", "3", full, "66.67 (0.00 to 100.00)", "-33.33 (-100.00 to +0.00)")
    ]
    # The question that only scout has answered, wrongly, counts for neither.
    assert table["qasper"] == ["same", "2", full, full, "+0.00 (+0.00 to +0.00)"]
    assert "samsum" not in table and "Not in the table:** 4 " in printed
    assert table["mean"][1:3] == ["5", full] and table["mean"][-1].startswith("-16.67 (")
    assert longbench.main(["compare", *paths]) == 0
    assert table_of(capsys.readouterr().out)["mean"][-1] == "-100.00 (-100.00 to -100.00)"


@pytest.mark.parametrize("change", ["impl", "model", "max_prompt_tokens", "chat"])
def test_a_file_keeps_to_what_it_was_begun_with(change, run, server, tmp_path, capsys):
    assert run("--sets", "qasper", "--limit", "1") == 0
    more = {"max_prompt_tokens": ["--max-prompt-tokens", "300"], "chat": ["--chat", "off"]}
    if change == "model":
        server.about["model_path"] = "another"
    label = "scout" if change == "impl" else "stock"
    assert run("--sets", "qasper", *more.get(change, []), label=label) == 2
    error = capsys.readouterr().err
    assert f"with {change} " in error and str(tmp_path / "a.jsonl") in error
    assert len(server.requests) == 1
