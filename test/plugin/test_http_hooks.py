"""Requests that the process of the HTTP port refuses; on real servers: test/e2e/test_faults.py."""

from types import SimpleNamespace

import pytest

from sglang_scout.plugin.http_hooks import before_validate_one_request

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


@pytest.mark.parametrize(("ids", "wrong"), [([5, -1], -1), ([100, -1], 100)])
def test_ids_outside_the_vocabulary_are_named(ids, wrong):
    with pytest.raises(ValueError, match=f"holds {wrong}, .* ids are 0 to 99"):
        before_validate_one_request(MANAGER, None, ids)


@pytest.mark.parametrize("ids", [None, [], [0, 99]])
def test_what_is_inside_goes_on(ids):
    assert before_validate_one_request(MANAGER, None, ids) is None
