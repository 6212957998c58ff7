"""The decode server's side of the CPU attention process: post a layer's request, wait for its answer.

``post`` and ``wait`` may be called from one thread only, the scheduler's. The work is done in C++
(sgl-kernel/src/producer.h). Whatever happens to the worker, ``wait`` fills its buffers with the attention over exactly
the posted pages: from the worker, or computed in place by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sglang_scout import _native
from sglang_scout.core.errors import WorkerError
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.channel import Configure, WorkerConfig
from sglang_scout.worker.ring import EVENT_DTYPE, split_of
from sglang_scout.worker.supervisor import Supervisor, WorkerStatus


class Ticket(NamedTuple):
    """A posted request; valid for one wait. ``number`` counts all posts of a client."""

    layer: int
    step: int
    number: int


class Reply(NamedTuple):
    waited_us: int  # for the worker
    fallback_pages: int  # that the caller computed


class ThreadEvents(NamedTuple):
    thread: int  # its number, from 0
    cpu: int  # that it is pinned to
    # EVENT_DTYPE [n] in chronological order. Validated, as the worker's memory is untrusted: only `step` may be any.
    events: np.ndarray


class WorkerClient:
    """A supervised worker process on an arena, which must stay open while the client is in use.

    Args:
        cpus: one worker thread is pinned to each.
        background_cpus: for mapping pages; empty: any but ``cpus``.
        nodes: those of ``cpus`` that are local to each of the arena's NUMA nodes; not needed for an arena of one.
    """

    def __init__(
        self,
        arena: Arena,
        cpus: Sequence[int],
        *,
        background_cpus: Sequence[int] = (),
        nodes: Sequence[Sequence[int]] | None = None,
        config: WorkerConfig | None = None,
    ) -> None:
        self._config, self._cpus = config or WorkerConfig(), list(cpus)
        self._mapping = arena.k_pages(0)  # keeps the mapping alive as long as this object
        node_of = {cpu: node for node, of_node in enumerate(nodes or [cpus]) for cpu in of_node}
        cpu_nodes = [node_of[cpu] for cpu in cpus]
        node_cpus = max(1, min(map(cpu_nodes.count, range(arena.spec.num_nodes))))
        # The rule also where the caller computes, so that results are identical.
        self.split = split_of(arena.spec, node_cpus)
        self._producer = _native.RingProducer(arena.address, arena.nbytes)
        self._producer.set_split(*self.split)
        self._attendant: _native.RingAttendant | None = None
        self._own_epoch = 0
        self._next_event = [0] * len(self._cpus)
        self._event_buffer = np.zeros(arena.layout.event_entries, EVENT_DTYPE)
        configure = Configure(
            cpus=self._cpus,
            background_cpus=list(background_cpus),
            cpu_nodes=cpu_nodes,
            max_threads=self.split.max_splits,
            config=self._config,
        )
        self._supervisor = Supervisor(self._producer, arena, configure)

    def start(self) -> None:
        """Returns when the worker is ready. Raises WorkerError, and leaves nothing running."""
        self._supervisor.start()

    def stop(self) -> None:
        """Stops the worker; leaves no process, thread, descriptor or file. Idempotent. Outstanding tickets can still be
        waited for. Records posted by a device are no longer answered."""
        self._supervisor.stop()
        if self._attendant is not None:
            self._attendant.stop()

    def __enter__(self) -> WorkerClient:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def serve_device(self) -> None:
        """From now on records are posted from a device's stream (``GraphTransport``), not by ``post``. An
        attendant thread rings the bell on its behalf, and answers records that no live worker will. Call once, before
        :meth:`start`."""
        self._own_epoch = self._producer.next_epoch()
        self._attendant = _native.RingAttendant(self._producer, 50)  # us between polls

    @property
    def device_epoch(self) -> int:
        """The epoch that a device's next step posts to: the live worker's, or the attendant's."""
        return self._producer.live_epoch() or self._own_epoch

    def post(
        self, layer: int, step: int, q: np.ndarray, pages: np.ndarray, n_pages: np.ndarray
    ) -> Ticket:
        """Posts the missing pages of a layer to the worker. Copies; the arguments may be reused.

        There is one slot per (step parity, layer). If the worker is not ready or has not finished the slot's last
        record, the ticket is local: wait() will compute it. If no row has pages, nothing is sent.

        Args:
            step: decode step; counts up.
            q: float32 [B, HQ, D]; rounded if the ring holds 16-bit queries.
            pages: int32 [B*C, k], B*C <= max_batch, host page ids, packed to the left; negative entries are
                skipped. With C lists in the spec, row b * C + c is the page list of the KV heads of list c.
            n_pages: int32 [B*C], number of valid entries in each row.

        Raises:
            ValueError: a shape, count or page id is wrong; nothing was posted.
            TypeError: a dtype, or not contiguous.
        """
        by_rule = 0  # splits of a sequence
        return Ticket(layer, step, self._producer.post(layer, step, q, pages, n_pages, by_rule))

    def wait(self, ticket: Ticket, out: np.ndarray, lse: np.ndarray) -> Reply:
        """Fills ``out`` and ``lse`` with the attention over the ticket's pages.

        Takes the worker's answer, or computes the same pages here if the worker died, refuses the record or does not
        answer within ``wait_timeout_s``. Heads without pages get out = 0, lse = -inf.

        Args:
            ticket: valid for one wait, and only until its slot is posted again.
            out: float32 [B, HQ, D], overwritten; rounded to 16 bits if the ring holds 16-bit queries.
            lse: float32 [B, HQ], natural log, overwritten.

        Raises:
            ValueError: a shape is wrong; the ticket stays valid.
            WorkerError: the ticket is no longer valid.
        """
        times_us = int(self._config.wait_timeout_s * 1e6), self._config.spin_us
        of = ticket.number, ticket.layer, ticket.step
        try:
            return Reply(*self._producer.wait(*of, *times_us, out, lse))
        except RuntimeError as e:
            raise WorkerError(str(e)) from None

    def record_events(self, on: bool) -> None:
        """Turns tracing of the worker's threads on or off, at once, in this worker and later ones; earlier events are
        not read."""
        if on:
            self._next_event = [*map(self._producer.next_event, range(len(self._cpus)))]
        self._producer.set_trace(on)

    def take_events(self) -> tuple[list[ThreadEvents], int]:
        """Events of each thread since the last call, and how many were lost: overwritten, or corrupted. A thread keeps
        its newest ``event_entries``: call it once per step, from the thread of ``post``."""
        taken, lost_total, buffer = [], 0, self._event_buffer
        for thread, cpu in enumerate(self._cpus):
            read = thread, self._next_event[thread], buffer.view(np.uint8)
            self._next_event[thread], count, lost = self._producer.read_events(*read)
            lost_total += lost
            if count:
                taken.append(ThreadEvents(thread, cpu, buffer[:count].copy()))
        return taken, lost_total

    def snapshot(self) -> WorkerStatus:
        """The worker's state and the totals over all workers; thread-safe."""
        totals = self._producer.totals()
        del totals["records"]
        if self._attendant is not None:
            totals["fallback_pages"] += self._attendant.pages()
        return replace(self._supervisor.status, **totals)
