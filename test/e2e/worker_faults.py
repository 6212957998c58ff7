"""Fault injection into the worker of a running decode server, from outside, as any process of the same user can.

Signals, and the words of the ring in the memory that it shares with the server. Damage to a record
is done while the worker is stopped, so that it hits a posted record without a result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from control_channel import descriptors, duplicate
from harness import PDCluster, scheduler_pid, wait_for_worker, wait_until
from ring_view import CLOSED_ITEM, RingView, writable
from sglang_scout.worker.arena import MEMFD_NAME, Arena

_POST_BITS, _EPOCH_SHIFT = (1 << 40) - 1, 40
_PAUSE_S = 0.3  # of a slow worker; 0.8 s without a heartbeat kills it


def arena_of(pid: int) -> Arena:
    """The arena of a process, writable, by its descriptor."""
    own = duplicate(pid, descriptors(pid, f"/memfd:{MEMFD_NAME}")[0])
    try:
        return writable(own)
    finally:
        os.close(own)


class Victim:
    """The worker of a cluster's decode server; close it before the cluster is stopped."""

    def __init__(self, servers: PDCluster) -> None:
        self._servers = servers
        self.arena = arena_of(scheduler_pid(servers))
        self.ring = RingView(self.arena)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.arena.close()

    def pid(self) -> int:
        """Of a serving worker; fails if there is none for a minute."""
        wait_for_worker(self._servers)
        return self._servers.kv_offload()["worker"]["pid"]

    def await_next(self, pid: int) -> None:
        """Wait until the worker after ``pid`` serves."""
        wait_until("the next worker", lambda: self.pid() != pid, 60)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[tuple[int, int]]:
        """Its pid, and the slot of a record that it was stopped before; it goes on afterwards. The server waits for
        this record, so do not ask it anything meanwhile. Raises TimeoutError when the worker gets no work."""
        for _ in range(30):
            pid = self.pid()
            os.kill(pid, signal.SIGSTOP)
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            epoch = int(words[words.index(b"--epoch") + 1])
            posted = int(self.ring.control["head"])
            deadline = time.monotonic() + _PAUSE_S
            while time.monotonic() < deadline:
                if (slot := self.open_slot(epoch, posted)) is not None:
                    try:
                        yield pid, slot
                    finally:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)
                    return
            os.kill(pid, signal.SIGCONT)
            time.sleep(_PAUSE_S)
        raise TimeoutError("no record was posted")

    def open_slot(self, epoch: int, posted: int) -> int | None:
        """Of a record that the worker of an epoch can serve and was posted after so many: those it may have read, and
        what it has read, no damage changes."""
        ring, head = self.ring, int(self.ring.control["head"])
        for slot in range(2 * self.arena.spec.num_layers):
            seq = int(ring.record(slot)["seq"])
            if seq >> _EPOCH_SHIFT != epoch or not posted < seq & _POST_BITS <= head:
                continue
            if int(ring.reply(slot)["claim"][0]) & CLOSED_ITEM == 0:
                if int(ring.reply(slot)["done"]) != seq:
                    return slot
        return None


Strike = Callable[[Victim], None]


def _signal(number: signal.Signals) -> Strike:
    return lambda victim: os.kill(victim.pid(), number)


def _bursts(victim: Victim) -> None:
    pid = victim.pid()
    for _ in range(6):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_PAUSE_S / 3)


def _killed_with_a_record(victim: Victim) -> None:
    with victim.stopped() as (pid, _):
        os.kill(pid, signal.SIGKILL)


def _page_ids(victim: Victim) -> None:
    with victim.stopped() as (_, slot):
        _, pages, n_pages = victim.ring.record_data(slot)
        pages[:], n_pages[:] = 1 << 30, 1 << 20


def _claimed(victim: Victim) -> None:
    """No thread can claim an item of a posted record."""
    with victim.stopped() as (_, slot):
        claim = victim.ring.reply(slot)["claim"]
        claim[0] = int(claim[0]) | CLOSED_ITEM


def _no_numbers(victim: Victim) -> None:
    """For a second, in every slot, as fast as possible."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        for slot in range(2 * victim.arena.spec.num_layers):
            out, lse = victim.ring.reply_data(slot)
            out.view(np.uint8)[:] = 0xFF  # NaN in either dtype
            lse[:, 0] = np.inf


@dataclass(frozen=True)
class Fault:
    """A fault, and its expected effects.

    Attributes:
        strike: injects it; returns once it has taken effect.
        cause: part of ``last_error``; empty: the worker must not be replaced, None: it may be.
        grows: fields of the state, or of its ``worker``, that must increase.
        not_in_graphs: with captured steps it is not recomputed.
    """

    strike: Strike
    cause: str | None = ""
    grows: tuple[str, ...] = ()
    not_in_graphs: bool = False


COMPUTED_HERE = ("fallback_pages",)
FAULTS = {
    "killed": Fault(_signal(signal.SIGKILL), "was killed by SIGKILL", COMPUTED_HERE),
    "stopped": Fault(_signal(signal.SIGSTOP), "was silent for", COMPUTED_HERE),
    "slow": Fault(_bursts),
    "killed with a record": Fault(_killed_with_a_record, "was killed by SIGKILL", COMPUTED_HERE),
    "page ids damaged": Fault(_page_ids, "", ("refused", *COMPUTED_HERE), True),
    "claim damaged": Fault(_claimed, "finished nothing", COMPUTED_HERE),
    "answers are no numbers": Fault(_no_numbers, "", COMPUTED_HERE, True),
}
