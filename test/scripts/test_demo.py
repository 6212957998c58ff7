"""The demo without its servers: what it serves and asks, and when it fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import demo
import demo_requests
from packages import Unavailable


@pytest.fixture(autouse=True)
def text(monkeypatch):
    """A text of which 4 characters make a token, in a model without tokenizer."""
    text = "Some words. " * 10_000
    monkeypatch.setattr(demo_requests, "load_text", lambda kind: text)
    return text


@pytest.mark.parametrize(("model", "job"), [("smollm2", demo.SMOLLM2), ("a/b", demo.OWN)])
def test_a_flag_wins_over_what_a_model_comes_with(model, job):
    args = demo.parse_arguments(["--model", model])
    assert job.items() <= vars(args).items() and args.concurrency == args.prompts
    args = demo.parse_arguments(["--model", model, "--budget", "64", "--prompts", "2"])
    assert (args.budget, args.concurrency, args.input_len) == (64, 2, job["input_len"])


def test_a_model_that_cannot_be_had_or_is_none(monkeypatch, tmp_path, capsys):
    def refuse():
        raise Unavailable("run this again where there is a network")

    monkeypatch.setattr(demo, "smollm2", refuse)
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert demo.main(["--device", "cpu"]) == 1
    assert "run this again where" in capsys.readouterr().err
    assert demo.main(["--device", "cpu", "--model", str(tmp_path)]) == 1
    assert "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["It is 7413.", "I do not know."])
def test_the_hidden_fact_must_be_found(monkeypatch, tmp_path, capsys, answer):
    asked = []
    monkeypatch.setattr(demo_requests, "chat", lambda *words: asked.append(words[2]) or answer)
    words = {"choices": [{"message": {"content": "what full attention says"}}]}
    cluster = SimpleNamespace(servers={"full": None}, ask_pair=lambda *_: words)
    if demo_requests.NUMBER in answer:
        demo_requests.converse(cluster, tmp_path)
        shown = capsys.readouterr().out.count("what full attention says")
        assert shown == len(demo_requests.QUESTIONS)
    else:
        with pytest.raises(demo_requests.DemoFailed, match=demo_requests.NUMBER):
            demo_requests.converse(cluster, tmp_path)
    half = len(asked[0]) // 2
    assert half - 100 < asked[0].index(demo_requests.FACT) < half + 100
    assert len({question.partition("\n\n")[0] for question in asked}) == 1, "one shared prefix"
