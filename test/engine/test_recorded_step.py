"""The step with the graph transport as a graph: recorded once, replayed ever after, equal to the eager one.

The graph is `RecordedGraph`, which knows what CUDA's allows and forbids but not its streams.
"""

import numpy as np
import pytest
import torch

from sglang_scout.ops import triton

pytest.importorskip("sglang_scout._native")
if not triton.interpreted():
    pytest.skip("needs Triton's interpreter: the arena is not registered", allow_module_level=True)

from graph_worker import GraphWorker  # noqa: E402  (needs the native module)
from mini_worker import HIDDEN  # noqa: E402
from recorded_graph import RecordedGraph  # noqa: E402

ROWS, STEPS = 3, 8


class ReplayingWorker(GraphWorker):
    """As :class:`GraphWorker`, with the layers of all steps replayed in which no request takes its real queries."""

    def __init__(self, **kwargs):
        super().__init__(max_batch=ROWS, verify=False, **kwargs)
        shape = self.shape
        self.static_hidden = torch.randn(shape.num_layers, ROWS, HIDDEN)
        self.static_new = [[torch.randn(ROWS, shape.num_kv_heads, shape.head_dim)
                            for _ in range(2)] for _ in range(shape.num_layers)]  # fmt: skip
        self.engine.pause()
        self.graph, self.found = self.capture()

    def capture(self):
        """The graph, and where it leaves queries and outputs of all layers."""
        for graph in (RecordedGraph(), RecordedGraph()):  # the first is the warm-up
            with graph.capture():
                found = [self._layer(layer, self.static_hidden[layer], k, v)
                         for layer, (k, v) in enumerate(self.static_new)]  # fmt: skip
        return graph, found

    def _layers(self, hidden, new):
        self.static_hidden.copy_(hidden)
        for static, now in zip(self.static_new, new, strict=True):
            for old, x in zip(static, now, strict=True):
                old.copy_(x)
        if not self.engine.can_replay:
            super()._layers(hidden, new)
            return
        self.graph.replay()
        for q, out in self.found:
            self.queries.append(q.clone())
            self.outputs.append(out.clone())


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("scout", '{"recall": "fixed"}'),
        ("scout", '{"digest": "rotated-2", "exact_layers": [1]}'),
        ("scout", '{"attend": "selected"}'),
        ("scout", '{"precompute": false, "recall": "off"}'),
        ("scout", '{"grain": "head"}'),
        ("rheo", '{"pilot_file": "w.npz"}'),
        ("infinigen", "{}"),
        ("infinigen", '{"grain": "head", "attend": "selected"}'),
        ("sparda", '{"forecast_file": "w.npz"}'),
    ],
)
def test_replayed_steps_equal_eager_ones(make, policy, config):
    settings = {"budget_tokens": 128, "pages": 60, "layers": 2, "policy": policy, "config": config}
    eager = make(GraphWorker, max_batch=ROWS, verify=False, **settings)
    replayed = make(ReplayingWorker, **settings)
    both = eager, replayed
    rng = np.random.default_rng(7)
    replays = 0
    for _ in range(STEPS):
        joins = len(eager.requests) < ROWS and (not eager.requests or rng.random() < 0.4)
        length = int(rng.integers(1, 500))
        leaves = int(rng.integers(ROWS)) if rng.random() < 0.2 else -1
        for worker in both:
            if joins:
                worker.admit(length)
            worker.step(extra_rows=ROWS - len(worker.requests))
            if 0 <= leaves < len(worker.requests) - 1:
                worker.finish(worker.requests[leaves])
        assert eager.engine.can_replay == replayed.engine.can_replay
        replays += replayed.engine.can_replay
        for a, b in zip(eager.outputs, replayed.outputs, strict=True):
            assert torch.equal(a, b)
    for one, other in zip(eager.requests, replayed.requests, strict=True):
        assert one == other
        for half in ("k", "v"):
            for a, b in zip(getattr(eager.host, half), getattr(replayed.host, half), strict=True):
                a, b = (x[one.pages].flatten(0, 1)[: one.length] for x in (a, b))
                assert torch.equal(a, b)
    counts = [(c.cpu_pages + c.fetched_pages, c.selected_pages, c.recalled_pages) for c in
              (worker.engine.counters for worker in both)]  # fmt: skip
    assert counts[0] == counts[1] and counts[0][0] > 0
    assert replays >= STEPS // 3
    assert replayed.ring.errors() == []


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: float(x[0]),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.tensor(1.0)),
        lambda x: torch.bincount(x.int()),
        lambda x: bool((x > 0).any()),
    ],
)
def test_a_record_refuses_what_asks_the_device(asks):
    with pytest.raises(RuntimeError, match="waits for the device"), RecordedGraph().capture():
        asks(torch.ones(3))
