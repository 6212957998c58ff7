"""Servers that wait for each other yield their core."""

from types import SimpleNamespace

import pytest
import zmq

from sglang_scout.plugin.fixes import before_on_idle


class _Poller(zmq.Poller):
    polls = 0

    def poll(self, timeout=None):
        self.polls += 1
        return super().poll(timeout)


@pytest.mark.parametrize("idle", [False, True])
def test_it_sleeps_while_requests_are_on_their_way(idle):
    poller = _Poller()
    scheduler = SimpleNamespace(
        idle_sleeper=SimpleNamespace(poller=poller), is_fully_idle=lambda: idle
    )
    before_on_idle(scheduler)
    assert poller.polls == (not idle)  # without requests SGLang itself sleeps


def test_it_polls_on_without_the_flag():
    before_on_idle(SimpleNamespace(idle_sleeper=None, is_fully_idle=lambda: False))
