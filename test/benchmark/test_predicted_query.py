"""What benchmark/predicted_query.py makes of the records of a server, without a server."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import predicted_query  # noqa: E402
import recall_modes  # noqa: E402
import rows  # noqa: E402


def line(layer, tokens, cosine, at):
    return {"step": 1, "layer": layer, "rows": tokens, "cosine": cosine, "at": at}


def at(tokens, overlap, mass):
    return {
        "rows": tokens,
        "overlap": {"a": overlap},
        "mass": {"a": mass, "real": 0.6, "best": 0.8},
    }


RECORDS = [
    line(0, 2, {}, {}),
    line(1, 2, {"a": 0.5}, {"8": at(2, 0.25, 0.5)}),
    line(1, 6, {"a": 0.9}, {"8": at(6, 0.75, 0.3), "16": at(1, 1.0, 0.9)}),
    line(2, 3, {"a": 0.7}, {}),
]


def test_means_are_over_tokens():
    first, second = predicted_query.summarize(RECORDS)
    assert (first["impl"], first["layer"], first["steps"], first["tokens"]) == ("a", 1, 2, 8)
    assert first["cosine"] == pytest.approx((0.5 * 2 + 0.9 * 6) / 8)
    eight = {"tokens": 8, "overlap": 0.625, "mass": 0.35, "mass_real": 0.6, "mass_best": 0.8}
    assert first["at"]["8"] == pytest.approx(eight)
    assert first["at"]["16"]["tokens"] == 1 and first["at"]["16"]["mass"] == 0.9
    assert (second["layer"], second["cosine"], second["at"]) == (2, 0.7, {})
    text = predicted_query.table([first, second]).splitlines()
    assert len(text) == 3 and "0.625" in text[1] and "0.700" in text[2]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(RECORDS[1]) + "\n" + json.dumps(RECORDS[2])[:40])
    assert list(predicted_query.read_records(path)) == RECORDS[1:2]


def test_retrieval_decodes_the_answers_and_fits_on_other_prompts():
    args = Namespace(
        workload="retrieval", steps=9, requests=14, input_tokens=256, fit_tokens=500,
        fit_input_tokens=128,
    )  # fmt: skip
    measured, fit = (predicted_query.make_work(args, fit=fit) for fit in (False, True))
    assert len(measured.prompts) == 14 and {len(p) for p in measured.prompts} == {256}
    samples = [
        predicted_query.tasks.make_sample(predicted_query.tasks.TASKS[i % 7], 256, i)
        for i in range(14)
    ]
    assert measured.new_tokens == [len(s.answer) for s in samples]
    assert sum(fit.new_tokens) >= 500 and {len(p) for p in fit.prompts} == {128}
    assert not {tuple(p) for p in fit.prompts} & {tuple(p[:128]) for p in measured.prompts}


def test_text_prompts_of_the_two_runs_do_not_overlap(tiny_model):
    args = Namespace(
        workload="text", dataset=[None], model_path=str(tiny_model("qwen3")), steps=9, requests=3,
        input_tokens=700, fit_tokens=200, fit_input_tokens=200,
    )  # fmt: skip
    measured, fit = (predicted_query.make_work(args, fit=fit) for fit in (False, True))
    text = [token for prompt in measured.prompts for token in prompt]
    assert len(text) == 2100 and measured.new_tokens == [9] * 3
    everything = recall_modes.make_prompts(
        args.model_path, None, count=1, length_tokens=4000, least_tokens=4000
    )[0]
    assert everything[:2100] == text
    start = everything.index(fit.prompts[0][0], 2100)
    while everything[start : start + 200] != fit.prompts[0]:
        start = everything.index(fit.prompts[0][0], start + 1)
    assert start >= 2100


def test_rows_and_picture(tmp_path):
    import plot

    shared = rows.environment("predicted_query") | {
        "model": "m", "workload": "text", "dtype": "auto", "budget_tokens": 64, "untimed": True,
    }  # fmt: skip
    writer = rows.Writer(tmp_path / "p.jsonl", shared)
    for impl, more in (("next_layer", 0.0), ("extrapolate", 0.1), ("learned", 0.2)):
        for layer in (1, 2):
            eight = {"tokens": 8, "overlap": 0.5 + more, "mass": 0.4, "mass_real": 0.6}
            writer.add(
                impl, layer=layer, steps=2, tokens=8, cosine=0.6 + more,
                at={"8": eight | {"mass_best": 0.8}},
            )  # fmt: skip
    writer.close()
    assert len(rows.read_rows(tmp_path / "p.jsonl")) == 6
    assert plot.main([str(tmp_path / "p.jsonl"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "predicted_query.png").stat().st_size > 10_000
