"""Mini workers, closed at the end of their test."""

import pytest

from mini_worker import MiniWorker


@pytest.fixture
def make():
    """``make(budget_tokens=128, ...)``: a ``MiniWorker``, or one of another ``kind``."""
    made = []

    def build(kind=MiniWorker, **kwargs):
        made.append(kind(**kwargs))
        return made[-1]

    yield build
    for worker in made:
        worker.close()
