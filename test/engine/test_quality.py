"""The record of prediction quality, against plain recomputation; and predictors that serve."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mini_worker import SIZE, MiniWorker
from sglang_scout.core.correction import StreamCorrection
from sglang_scout.core.fit import read_inputs
from sglang_scout.engine.forecast import Forecast, LayerInputs
from sglang_scout.engine.quality import QualityRecorder
from sglang_scout.policy.predictors import NextLayerQuery
from sglang_scout.policy.presets import predictors

LAYERS, HIDDEN = 3, 48


def some_correction(seed=0, rank=5):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(0, 0.3, (LAYERS - 1, *shape)).astype(np.float32)

    return StreamCorrection(
        "m", "w", 1, draw(HIDDEN, rank), draw(HIDDEN, rank), draw(rank, HIDDEN), draw(HIDDEN)
    )


def watched(path, keep_tokens=0, **kwargs):
    """A decode worker in miniature with a recorder on it, and each step's layer inputs."""
    worker = MiniWorker(layers=LAYERS, **kwargs)
    engine = worker.engine
    projectors = [worker._projector(layer) for layer in range(LAYERS)]
    engine.quality = QualityRecorder(
        str(path),
        shape=worker.shape,
        digest=engine.policy.digest,
        host=worker.host,
        digests=worker.digests,
        forecasts={
            name: Forecast(predictor, projectors, engine.inputs)
            for name, predictor in predictors(some_correction()).items()
        },
        inputs=engine.inputs,
        keep_tokens=keep_tokens,
        model="m",
        weights="w",
    )
    return worker


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_query(worker, name, layer, row, now, before):
    """Predicted query of ``layer``; now, before: layer inputs [L, hidden] of this and the last token."""
    x = now[layer - 1]
    if before is not None and name == "extrapolate":
        x = x + 0.5 * (before[layer] - before[layer - 1])
    if before is not None and name == "learned":
        c = some_correction()
        size, last = x.pow(2).mean().sqrt(), before[layer] / before[layer].pow(2).mean().sqrt()
        low = torch.from_numpy(c.now[layer - 1].T) @ (x / size)
        low = low + torch.from_numpy(c.previous[layer - 1].T) @ last
        x = x + size * (torch.from_numpy(c.out[layer - 1].T) @ low)
        x = x + size * torch.from_numpy(c.bias[layer - 1])
    return (worker.weights[layer] @ x).view(worker.shape.num_q_heads, -1)


def plain_record(worker, layer, row, queries, k):
    """overlap and mass of one row by a loop over heads, pages and tokens."""
    shape, request = worker.shape, worker.requests[row]
    n = (request.length - 1) // SIZE
    group = shape.num_q_heads // shape.num_kv_heads
    keys = worker.host.k[layer][torch.tensor(request.pages)].flatten(0, 1)[: request.length]

    def head(q, h):
        return keys[:, h // group] @ q[h] * shape.scale

    def chosen(q):
        score = torch.zeros(n)
        for h in range(shape.num_q_heads):
            pages = keys[: n * SIZE, h // group].view(n, SIZE, -1)
            bound = torch.maximum(q[h] * pages.amin(1), q[h] * pages.amax(1)).sum(1) * shape.scale
            score += bound.softmax(0)
        rest = sorted(range(1, n - 1), key=lambda page: -score[page])
        return {0, n - 1, *rest[: k - 2]}

    real = queries["real"]
    weights = torch.stack([head(real, h).softmax(0) for h in range(shape.num_q_heads)]).mean(0)
    page_mass = weights[: n * SIZE].view(n, SIZE).sum(1)
    tail = weights[n * SIZE :].sum()
    sets = {name: chosen(q) for name, q in queries.items()}
    mass = {name: float(tail + page_mass[list(pages)].sum()) for name, pages in sets.items()}
    mass["best"] = float(tail + page_mass.sort().values[-k:].sum())
    overlap = {name: (len(s & sets["real"]) - 2) / (k - 2) for name, s in sets.items()}
    del overlap["real"]
    return overlap, mass


def test_a_correction_lies_where_the_inputs_do():
    predictor = NextLayerQuery(correction=some_correction())
    forecast = Forecast(predictor, [], LayerInputs(), "meta")
    parts = [part for layer in forecast._corrections for part in layer]
    assert len(parts) == 4 * (LAYERS - 1) and {part.device.type for part in parts} == {"meta"}


def test_each_line_is_what_a_plain_recomputation_gives(tmp_path):
    worker = watched(tmp_path / "q.jsonl", budget_tokens=128, pages=120, max_batch=3, drift=0.3)
    for length in (40 * SIZE + 3, 12 * SIZE + 31, 100):
        worker.admit(length)
    seen = []  # per step [B, L, hidden]
    expected = []
    for _ in range(3):
        worker.step()
        seen.append(worker.hidden[:, :3].transpose(0, 1).clone())
        for layer in range(LAYERS):
            names = ("next_layer", "extrapolate", "learned") if layer else ()
            rows = []
            for row in range(3):
                before = seen[-2][row] if len(seen) > 1 else None
                queries = {
                    n: plain_query(worker, n, layer, row, seen[-1][row], before) for n in names
                }
                queries["real"] = worker.queries[layer][row]
                rows.append(queries)
            cosine = {
                n: np.mean([
                    float(torch.cosine_similarity(q[n], q["real"], dim=-1).mean()) for q in rows
                ])
                for n in names
            }  # fmt: skip
            at = {}
            for k, members in ((8, (0, 1)), (16, (0,)), (32, (0,))):
                found = [plain_record(worker, layer, row, rows[row], k) for row in members]
                at[str(k)] = (
                    len(members),
                    {n: np.mean([f[0][n] for f in found]) for n in names},
                    {n: np.mean([f[1][n] for f in found]) for n in (*names, "real", "best")},
                )
            expected.append((layer, cosine, at))
    worker.close()
    lines = lines_of(tmp_path / "q.jsonl")
    assert len(lines) == len(expected) == 9
    for line, (layer, cosine, at) in zip(lines, expected, strict=True):
        assert line["layer"] == layer and line["rows"] == 3
        assert line["cosine"] == pytest.approx(cosine, abs=1e-4)
        assert set(line["at"]) == set(at)
        for k, (rows, overlap, mass) in at.items():
            assert line["at"][k]["rows"] == rows
            assert line["at"][k]["overlap"] == pytest.approx(overlap, abs=1e-5)
            assert line["at"][k]["mass"] == pytest.approx(mass, abs=1e-4)
    differing = [line for line in lines if line["layer"] and line["step"] > 1]
    for line in differing:
        assert len(set(line["cosine"].values())) == 3, "the predictors must differ in this test"


def test_recording_changes_no_output(tmp_path):
    outputs = []
    for record in (False, True):
        worker = watched(tmp_path / "q.jsonl", budget_tokens=128, seed=5)
        if not record:
            worker.engine.quality = None
        worker.engine.policy.residency.patience_us = None
        worker.admit(640)
        outputs.append([torch.stack(worker.step()) for _ in range(8)])
        worker.close()
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(*outputs))


def test_kept_inputs_know_their_previous_token_as_requests_come_and_go(tmp_path):
    worker = watched(tmp_path / "q.jsonl", keep_tokens=12, budget_tokens=128, max_batch=3)
    first = worker.admit(70, slot=4)
    seen = []

    def step():
        worker.step()
        rows = len(worker.requests)
        seen.extend(
            (request.slot, worker.hidden[:, row].clone())
            for row, request in enumerate(worker.requests[:rows])
        )

    step()
    second = worker.admit(90, slot=2)
    step()
    worker.finish(first)
    step()
    worker.admit(33, slot=4)  # a new request in the slot of the first
    step()
    worker.finish(second)
    step()
    assert not (tmp_path / "q.jsonl.npz").exists(), "too few so far"
    worker.admit(50, slot=7)
    for _ in range(4):
        step()
    about, inputs, source = read_inputs(str(tmp_path / "q.jsonl.npz"))
    assert about["model"] == "m" and about["weights"] == "w"
    assert len(inputs) == len(source) >= 12
    for place, (kept, at) in enumerate(zip(inputs, source, strict=True)):
        np.testing.assert_array_equal(kept, seen[place][1].numpy())
        assert at < place
        if at >= 0:
            assert seen[at][0] == seen[place][0], "of the same request"
    #  slots: 4 | 4 2 | 2 | 2 4 | 4 | 4 7 | 4 7 ...
    assert source[:10].tolist() == [-1, 0, -1, 2, 3, -1, 5, 6, -1, 7]
    worker.close()


def test_unknown_tokens_are_predicted_as_the_paper_does():
    inputs = LayerInputs()
    weight = torch.randn(8, HIDDEN)
    project = [lambda x, _: x @ weight.T] * LAYERS
    forecast = Forecast(NextLayerQuery(correction=some_correction()), project, inputs)
    x = torch.randn(2, HIDDEN)
    for slots in ([3, 1], [1, 6]):  # 1 moves from row 1 to row 0; 6 is new
        inputs.begin_step(np.array(slots), np.array([False, False]))
        got = forecast.query(0, 1, x, torch.zeros(2, dtype=torch.int64))
        plain = x @ weight.T
        same = [torch.equal(got[row], plain[row]) for row in range(2)]
        assert same == ([True, True] if slots == [3, 1] else [False, True])
        for layer in range(LAYERS):
            inputs.see(layer, torch.randn(2, HIDDEN))
    inputs.begin_step(np.array([1, 6]), np.array([False, True]))
    assert inputs.known.tolist() == [True, False], "another request in the same slot"


def test_layer_inputs_are_copies():
    inputs = LayerInputs()
    x = torch.ones(1, 4)
    inputs.begin_step(np.array([0]), np.array([True]))
    inputs.see(0, x)
    x += 1
    assert torch.equal(inputs.now(0), torch.ones(1, 4))


@pytest.mark.parametrize("predictor", ["extrapolate", "learned"])
@pytest.mark.parametrize("budget_tokens", [128, 1024])
def test_every_predictor_serves(predictor, budget_tokens):
    """Small budget: each output is that of the chosen pages. A covering one: exact full attention."""
    config = json.dumps({"predictor": predictor} | (
        {"predictor_file": __file__} if predictor == "learned" else {}
    ))  # fmt: skip
    worker = MiniWorker(
        layers=LAYERS, budget_tokens=budget_tokens, config=config, correction=some_correction()
    )
    for length in (400, 37, 513, 320):
        worker.admit(length)
    steps = [worker.step() and worker.queries for _ in range(30)]
    counters = worker.engine.counters
    assert len(steps) == 30
    assert counters.verify_checks == 30 * LAYERS
    assert counters.verify_max_rel_error <= 1e-5
    assert (counters.cpu_pages > 0) == (budget_tokens == 128)
    if budget_tokens == 1024:
        for layer, row in itertools.product(range(LAYERS), range(4)):
            torch.testing.assert_close(
                worker.outputs[layer][row], worker.dense(row, layer), rtol=2e-5, atol=2e-5
            )
    worker.close()


def test_the_worker_gets_the_moved_query():
    worker = MiniWorker(
        layers=LAYERS,
        budget_tokens=128,
        max_batch=1,
        config='{"predictor": "extrapolate", "recall": "off"}',
    )
    worker.admit(1600)
    asked = []
    post = worker.missing.post
    worker.missing.post = lambda *a: (asked.append((a[0], a[2].copy())), post(*a))[1]
    inputs = []
    for _ in range(4):
        asked.clear()
        worker.step()
        inputs.append(worker.hidden[:, 0].clone())
    now, before = inputs[-1], inputs[-2]
    assert any(layer > 0 for layer, _ in asked)
    for layer, query in asked:
        if layer > 0:
            x = now[layer - 1] + 0.5 * (before[layer] - before[layer - 1])
            plain = (worker.weights[layer] @ x).view(4, 64)
            torch.testing.assert_close(torch.from_numpy(query[0]), plain, rtol=1e-4, atol=1e-4)
    worker.close()


def test_a_correction_of_the_wrong_layer_count_would_be_seen():
    short = replace(some_correction(), bias=some_correction().bias[:1])
    with pytest.raises(ValueError, match="zip"):
        Forecast(NextLayerQuery(correction=short), [], LayerInputs())
