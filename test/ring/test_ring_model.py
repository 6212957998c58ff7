"""All interleavings of producer, worker threads and supervisor on small rings (ring_search.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_model import BUGS, Model, Violation
from ring_search import Search

MODELS = {
    "two threads": Model(slots=1, records=3, items=1, threads=2),
    "two in flight": Model(slots=2, records=3, items=1, threads=1),
    "two in flight, two threads": Model(slots=2, records=2, items=1, threads=2),
    "two items, two threads": Model(slots=1, records=1, items=2, threads=2),
    "deadlines": Model(slots=1, records=3, items=1, threads=1, gives_up=True),
    "a death and deadlines": Model(slots=1, records=3, items=1, threads=1, deaths=1, gives_up=True),
    "a death with two in flight": Model(slots=2, records=3, items=1, threads=1, deaths=1),
    "a death of two threads": Model(slots=1, records=1, items=2, threads=2, deaths=1),
    "two deaths": Model(slots=1, records=2, items=2, threads=1, deaths=2),
    "two nodes": Model(slots=1, records=2, items=1, threads=2, nodes=2),
    "a node without threads": Model(slots=1, records=2, items=2, threads=1, nodes=2),
    "two nodes, in flight": Model(slots=2, records=2, items=1, threads=1, nodes=2, gives_up=True),
    "two nodes and a death": Model(slots=1, records=2, items=1, threads=1, nodes=2, deaths=1),
    "a death of two nodes": Model(slots=1, records=1, items=1, threads=2, nodes=2, deaths=1),
}

# In which model each bug is found, and how.
FOUND = {
    "bell without a fence": ("two threads", "deadlock"),
    "head before sleepers": ("two threads", "deadlock"),
    "no second look at done": ("two threads", "deadlock"),
    "done without a fence": ("two threads", "deadlock"),
    "busy slot is filled": ("deadlines", "overwritten while it is read"),
    "epoch is not checked": ("a death and deadlines", "overwritten while it is read"),
    "done before out": ("two threads", "is answered by"),
    "any answer is taken": ("two threads", "is answered by"),
    "claim has no post": ("two threads", "overwritten while it is read"),
    "claim by load and store": ("two threads", "computed twice"),
    "first finisher announces": ("two items, two threads", "is answered by"),
    "slot is not closed": ("two threads", "is refused"),
    "nobody helps": ("a node without threads", "deadlock"),
    "claims open late": ("two nodes", "deadlock"),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_goes_wrong(name):
    """No deadlock (so no lost wake-up), no foreign or torn answer, no duplicate item, no overwriting."""
    assert Search(MODELS[name]).run() > 1000


@pytest.mark.parametrize("bug", BUGS)
def test_a_changed_protocol_is_caught(bug):
    name, what = FOUND[bug]
    with pytest.raises(Violation, match=what):
        Search(replace(MODELS[name], bug=bug)).run()
