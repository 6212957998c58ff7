"""Configuration and status of the CPU attention process and its client."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_scout.core.errors import ConfigError


@dataclass(frozen=True)
class WorkerConfig:
    """How the worker is run and supervised; user-settable values were validated with the other keys."""

    ready_timeout_s: float = 30.0  # from process start to its Ready
    heartbeat_interval_s: float = 0.2
    heartbeat_timeout_s: float = 0.8  # silent for so long it is killed and replaced
    # The same for one that has work and makes no progress, and for one that is silent because it is starved of CPU;
    # never less than heartbeat_timeout_s.
    stall_timeout_s: float = 2.0
    wait_timeout_s: float = 10.0  # after this, wait() computes the pages itself
    # Delays before restarts: each is twice the one before. A worker that was ready for the longest resets them.
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    max_start_failures: int = 8  # in a row, before the state is "failed"
    retry_s: float = 30.0  # delay between further starts then
    stop_timeout_s: float = 1.0  # for the worker to exit by itself
    spin_us: int = 50  # how long an idle thread polls before it sleeps
    # Threads of a NUMA node that share one sequence, its pages split evenly, also where the caller computes, so that
    # results are identical; 0: chosen for speed, up to 8, see Split.
    threads_per_group: int = 0
    populate: bool = False  # map all of the arena in the background, see PopulateThread

    def __post_init__(self) -> None:
        stall_timeout_s = max(self.stall_timeout_s, self.heartbeat_timeout_s)
        object.__setattr__(self, "stall_timeout_s", stall_timeout_s)


@dataclass(frozen=True)
class WorkerStatus:
    """A snapshot of the worker's status. Totals continue across restarts."""

    pid: int | None  # of the running process; None if there is none
    endpoint: str  # of its control channel; "" before the first start
    state: str  # "starting", "ready", "restarting", "stopped" or "failed"
    restarts: int  # workers after the first
    cpus: tuple[int, ...]  # of the threads
    cpu_nodes: tuple[int, ...]  # the arena's node of each, from 0
    items: int  # (sequence, part) items computed by workers
    pages: int  # that workers attended to
    remote_pages: int  # of these, on another node than the thread's
    # Records that a worker refused because a field was out of range, and answers that the caller did because of inf
    # or NaN.
    refused: int
    busy_us: int  # compute time summed over worker threads
    stale: int  # records of another epoch that a worker skipped
    fallback_pages: int  # that the caller computed instead
    local_tickets: int  # posts that never went to a worker: none was ready, or the slot was busy
    late_tickets: int  # waits that hit wait_timeout_s
    refused_messages: int  # control messages dropped for sender, token, contents or version
    isa: str  # instruction set of the worker's kernel, "" before the first Ready
    last_error: str  # why the last worker exited, or ""


def check_machine() -> None:
    """Raises ConfigError on a CPU architecture on which the ring has not been verified."""
    if (machine := platform.machine()) != "x86_64":
        raise ConfigError(
            f"this machine is {machine}: the ring to the CPU attention process is modelled and tested only for the "
            "memory order of x86-64, and with a weaker one a record might be seen before its data; serve on x86_64"
        )


def check_cpus(cpus: Sequence[int]) -> tuple[int, ...]:
    """The CPUs as a tuple. Raises ConfigError unless they are distinct non-negative integers."""
    try:
        numbers = tuple(int(c) for c in cpus)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"cpus={cpus!r} is not a list of CPU numbers") from e
    if not numbers:
        raise ConfigError("cpus is empty; give at least one CPU")
    if min(numbers) < 0 or len(set(numbers)) != len(numbers):
        raise ConfigError(f"cpus={list(numbers)} has negative or repeated CPUs")
    return numbers


def check_nodes(
    nodes: Sequence[Sequence[int]] | None, cpus: tuple[int, ...], num_nodes: int
) -> tuple[int, ...]:
    """The node of each CPU, from 0.

    Args:
        nodes: CPUs of each of the arena's nodes; may be None if it has one.
        cpus: of the worker.
        num_nodes: of the arena.
    """
    if nodes is None and num_nodes == 1:
        return (0,) * len(cpus)
    given = [[int(cpu) for cpu in node] for node in nodes or ()]
    if len(given) != num_nodes:
        raise ConfigError(
            f"nodes={given} has {len(given)} nodes; the arena's pages are on {num_nodes}"
        )
    found = [[i for i, node in enumerate(given) if cpu in node] for cpu in cpus]
    if sorted(sum(given, [])) != sorted(cpus) or any(len(of) != 1 for of in found):
        raise ConfigError(
            f"nodes={given}: name each of the CPUs {list(cpus)} in exactly one node, and no others"
        )
    return tuple(of[0] for of in found)
