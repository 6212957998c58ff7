"""The verifier detects wrong outputs: every assertion on its number depends on it."""

import pytest
import torch

from mini_worker import SIZE
from sglang_scout.engine.verify import NOT_FINITE


@pytest.fixture
def error_of(make, monkeypatch):
    """Of a step with pages on the device, on the CPU and a tail, after these changes of an output and of the pages."""

    def build(change_out=lambda out: out, change_pages=lambda k: None):
        worker = make(budget_tokens=4 * SIZE, config='{"digest": "minmax", "recall": "off"}')
        request = worker.admit(400)
        worker.step()
        route = worker.engine.transport
        merge = route.merge
        monkeypatch.setattr(route, "merge", lambda *args: change_out(merge(*args)))
        sink = worker.host.k[0][request.pages[0]]
        kept = sink.clone()
        change_pages(sink)
        worker.step()
        sink.copy_(kept)
        assert worker.missing.asked
        return worker.engine.parts.counters.verify_max_rel_error

    return build


def test_what_is_right_and_what_is_not(error_of):
    assert error_of() <= 1e-5
    assert error_of(torch.zero_) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_the_largest_error(error_of, value):
    assert error_of(lambda out: out.index_fill_(1, torch.tensor([0]), value)) == NOT_FINITE
    assert error_of(change_pages=lambda k: k.fill_(value)) == NOT_FINITE
