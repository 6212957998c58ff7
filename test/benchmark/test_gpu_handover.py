"""The thread of ``benchmark/gpu_handover.py`` that answers, without a device."""

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import gpu_handover  # noqa: E402


@pytest.fixture
def words():
    with gpu_handover.answering(3, "cpu") as words:
        yield words


def test_layers_are_answered_in_turn(words):
    for layer in (0, 1, 2, 0, 1):
        words.bell[layer] = 1
        deadline = time.monotonic() + 60
        while not words.done[layer] and time.monotonic() < deadline:
            pass
        assert words.done[layer] == 1 and words.bell[layer] == 0
        words.done[layer] = 0
    assert words.answered == 5 and not words.all.any()


def test_who_launches_does_not_wait_for_the_thread_that_answers():
    """A thread that keeps Python's lock gives it up when the switch interval is over, not before."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(20)
    try:
        with gpu_handover.answering(3, "cpu"):
            begin = time.monotonic()
            for _ in range(3):
                time.sleep(0.001)  # gives the lock up, as the replay of a graph does
            assert time.monotonic() - begin < 15
    finally:
        sys.setswitchinterval(before)


def test_who_still_waits_is_let_go():
    with gpu_handover.answering(2, "cpu") as words:
        pass
    assert words.done.tolist() == [1, 1] and words.answered == 0


def test_without_a_compiler_the_check_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    wrong = gpu_handover.check("cpu")
    assert wrong == "no-such-compiler is not there; hand_over.cpp needs a C++ compiler"
