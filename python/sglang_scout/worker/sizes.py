"""Host memory that a worker needs beside the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_scout import _native
from sglang_scout.worker.ring import layout_of
from sglang_scout.worker.spec import ArenaSpec

MOST_THREADS_PER_GROUP = 8  # where their number is not fixed


class WorkerMemory(NamedTuple):
    """Bytes for one worker.

    Attributes:
        max_batch: requests that it is for.
        threads: of a memory node that may share a sequence.
        ring_bytes: what of the arena is not pages: requests, replies, events.
        partial_bytes: of the worker's own memory, for what threads that share a sequence have found until
            it is merged; 0 where none is shared. A place for each run of the record that may have the most
            of them, of every record that may be open; taken from the system as it is first written, until
            the worker ends.
    """

    max_batch: int
    threads: int
    ring_bytes: int
    partial_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.ring_bytes + self.partial_bytes

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """(what, count, bytes) for a table."""
        ring = ("ring", self.max_batch, self.ring_bytes)
        partial = ("partial results", self.threads, self.partial_bytes)
        return (ring, partial) if self.partial_bytes else (ring,)


def most_threads(threads_per_group: int, node_cpus: int) -> int:
    """Threads of a memory node that may share a sequence.

    Args:
        threads_per_group: as of :class:`WorkerConfig`; 0: up to 8, as is fastest.
        node_cpus: CPUs of the worker on the node that has the fewest.
    """
    return threads_per_group or min(node_cpus, MOST_THREADS_PER_GROUP)


def worker_memory(
    spec: ArenaSpec, threads_per_group: int, node_cpus: Sequence[int]
) -> WorkerMemory:
    """For an arena of these sizes, whatever its number of pages.

    Args:
        threads_per_group: as of :class:`WorkerConfig`.
        node_cpus: CPUs of the worker on each memory node.
    """
    nodes, threads = spec.num_nodes, most_threads(threads_per_group, min(node_cpus))
    result_bytes = (
        _native.partial_bytes(spec.num_layers, 1, spec.num_q_heads, spec.head_dim, 2) // 2
    )
    # In the largest record: of each sequence a result for each node and run, unless that is one.
    shared = spec.max_batch * threads if threads > 1 else 0
    if not threads_per_group:
        shared = min(shared, _native.RUNS_PER_THREAD * min(node_cpus))
    results = nodes * max(shared, spec.max_batch if nodes > 1 else 0)
    return WorkerMemory(
        max_batch=spec.max_batch,
        threads=threads,
        ring_bytes=layout_of(spec).kv_offset,
        partial_bytes=results * result_bytes,
    )
