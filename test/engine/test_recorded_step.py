"""The step with the graph transport as a graph: captured once, replayed, equal to the eager one.

The graph is `RecordedGraph`, which enforces the rules of CUDA capture, and runs forked parts as late as possible.
"""

import json
from unittest import mock

import numpy as np
import pytest
import torch

from graph_worker import GraphWorker  # skips without Triton's interpreter
from mini_worker import HIDDEN, check_table
from recorded_graph import RecordedGraph
from sglang_scout.engine.trace import Tracer
from sglang_scout.ops.triton import doorbell  # noqa: F401  (reads a tensor when it is first imported)

ROWS, STEPS = 3, 8
KINDS = ("layer", "attend", "mass", "merge", "post", "predict", "score", "select", "wait")
SLACK_US = 5000.0  # in the two clocks' offset, measured on a busy machine


class ReplayingWorker(GraphWorker):
    """As :class:`GraphWorker`, with the layers of all steps replayed."""

    def __init__(self, **kwargs):
        super().__init__(max_batch=ROWS, verify=False, **kwargs)
        shape = self.shape
        self.static_hidden = torch.randn(shape.num_layers, ROWS, HIDDEN)
        self.static_new = [
            [torch.randn(ROWS, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
            for _ in range(shape.num_layers)
        ]
        self.engine.pause()
        kinds = (False, True) if self.engine.has_dense_steps else (False,)
        self.graphs = {is_dense: self.capture(is_dense) for is_dense in kinds}

    def capture(self, is_dense=False):
        """The graph, and its output buffers for queries and outputs of all layers. No step has begun: nothing is
        posted or attended to."""
        posted = int(self.ring.state[2])
        self.engine.pause()
        self.engine.is_dense = is_dense
        for graph in (RecordedGraph(), RecordedGraph()):  # the first is the warm-up
            with (
                graph.capture(),
                mock.patch.object(self.engine.selector, "_beside", graph, create=True),
            ):
                found = [
                    self._layer(layer, self.static_hidden[layer], k, v)
                    for layer, (k, v) in enumerate(self.static_new)
                ]
                self.engine.layer_output()
        assert int(self.ring.state[2]) == posted and not any(out.any() for _, out in found)
        return graph, found

    def _layers(self, hidden, new):
        self.static_hidden.copy_(hidden)
        for static, now in zip(self.static_new, new, strict=True):
            for old, x in zip(static, now, strict=True):
                old.copy_(x)
        if not self.engine.can_replay:
            super()._layers(hidden, new)
            return
        graph, found = self.graphs[self.engine.is_dense]
        graph.replay()
        for q, out in found:
            self.queries.append(q.clone())
            self.outputs.append(out.clone())


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("scout", '{"recall": "fixed"}'),
        ("scout", '{"digest": "rotated-2", "exact_layers": [1]}'),
        ("scout", "{}"),
        ("scout", '{"precompute": false, "recall": "off"}'),
        ("scout", '{"grain": "head"}'),
        ("rheo", '{"pilot_file": "w.npz"}'),
        ("infinigen", "{}"),
        ("infinigen", '{"grain": "head"}'),
        ("sparda", '{"forecast_file": "w.npz"}'),
        ("hgca", "{}"),
    ],
)
def test_replayed_steps_equal_eager_ones_that_attend_to_exactly_the_chosen_pages(
    make, policy, config
):
    """Requests come and go, and their pages change hands."""
    settings = {"budget_tokens": 128, "pages": 60, "layers": 2, "policy": policy, "config": config}
    eager = make(GraphWorker, max_batch=ROWS, **settings)
    replayed = make(ReplayingWorker, **settings)
    both = eager, replayed
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        joins = len(eager.requests) < ROWS and (not eager.requests or rng.random() < 0.4)
        length = int(rng.integers(1, 500))
        leaves = int(rng.integers(ROWS)) if rng.random() < 0.2 else -1
        for worker in both:
            if joins:
                worker.admit(length)
            rows = len(worker.requests)
            worker.step(extra_rows=ROWS - rows)
            assert np.array_equal(worker.engine._inputs.slot_of.numpy(), worker.table.slot_of)
            check_table(worker.table)
            if policy == "hgca":
                worker.engine.selector._thread.submit(
                    int
                ).result()  # both get its result at the same boundary
            if 0 <= leaves < rows - 1:
                worker.finish(worker.requests[leaves])
        assert replayed.engine.can_replay
        for a, b in zip(eager.outputs, replayed.outputs, strict=True):
            assert torch.equal(a, b) and (a[rows:] == 0).all()
    for one, other in zip(eager.requests, replayed.requests, strict=True):
        assert one == other
        for half in ("k", "v"):
            for a, b in zip(getattr(eager.host, half), getattr(replayed.host, half), strict=True):
                a, b = (x[one.pages].flatten(0, 1)[: one.length] for x in (a, b))
                assert torch.equal(a, b)
    first, second = (worker.engine.parts.counters for worker in both)
    for name in ("cpu_pages", "fetched_pages", "selected_pages", "recalled_pages"):
        assert getattr(first, name) == getattr(second, name)
    assert first.cpu_pages + first.fetched_pages > 0
    assert first.verify_checks == 2 * STEPS and first.verify_max_rel_error <= 1e-5
    if policy == "hgca":
        older = replayed.engine.selector
        posted = older._ids[..., 0][older._counts > 0]
        assert (posted >= replayed.host.num_pages).any(), "no kept tokens were posted"
    held = *replayed.host.k, *replayed.host.v, replayed.engine.parts.resident.k
    before = [x.clone() for x in held]
    replayed.capture()  # again, as after a weight update
    assert all(map(torch.equal, held, before))
    assert replayed.ring.errors() == []


def test_steps_in_which_all_is_resident_replay_a_graph_of_their_own(make):
    settings = {"budget_tokens": 128, "pages": 60, "layers": 2, "config": '{"recall": "off"}'}
    eager = make(GraphWorker, max_batch=ROWS, verify=False, **settings)
    both = eager, make(ReplayingWorker, **settings)
    kinds = []
    for length in (100, 60, 490):
        for worker in both:
            worker.admit(length)
        for _ in range(3):
            for worker in both:
                worker.step(extra_rows=ROWS - len(worker.requests))
            kinds.append([worker.engine.is_dense for worker in both])
            for a, b in zip(*(worker.outputs for worker in both), strict=True):
                assert torch.equal(a, b)
            for row, _ in enumerate(both[0].requests if all(kinds[-1]) else ()):
                exact = both[0].dense(row, 1)
                torch.testing.assert_close(both[0].outputs[1][row], exact, rtol=2e-5, atol=2e-5)
    assert kinds == [[True] * 2] * 6 + [[False] * 2] * 3


def test_a_timeline_of_replayed_steps_is_of_the_devices_clock(make, tmp_path):
    tracer = Tracer(str(path := tmp_path / "trace.json"), 64)
    settings = {"budget_tokens": 128, "pages": 60, "layers": 2, "config": '{"recall": "off"}'}
    worker = make(ReplayingWorker, tracer=tracer, **settings)
    worker.run(8, 400, 300, 470)
    assert worker.engine.can_replay
    tracer.write()
    slices = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    boundaries = {e["args"]["step"]: e["ts"] for e in slices if e["name"] == "step boundary"}
    expected = sorted(f"{kind} {layer}" for kind in KINDS for layer in range(2))
    for step in range(1, 7):
        kinds = [e for e in slices if e["name"].partition(" ")[0] in KINDS]
        of_step = [e for e in kinds if e["args"]["step"] == step]
        assert sorted(e["name"] for e in of_step) == expected
        begin, end = boundaries[step] - SLACK_US, boundaries[step + 1] + SLACK_US
        assert all(begin <= e["ts"] <= e["ts"] + e["dur"] <= end for e in of_step)
