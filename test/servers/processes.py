"""The processes of a cluster, found by an environment variable that children inherit.

Linux only. This also finds leftovers whose parent has died, and which are in no process tree any more.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

CLUSTER_VARIABLE = "SCOUT_CLUSTER_ID"


def _stat(pid: int) -> tuple[bool, int, int] | None:
    """Whether ``pid`` still holds resources, its session id and its start time, in ticks since boot; None when it has
    ended.

    A zombie holds nothing. But one whose other threads are still exiting, which takes tens of seconds with much
    page-locked memory, holds all of it: its state says zombie, which is only that of its first thread.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, threads = fields[0], int(fields[17])
    return state not in "ZX" or (state == "Z" and threads > 1), int(fields[3]), int(fields[19])


def processes_of(
    cluster_id: str, sessions: Iterable[int] = (), known: Collection[tuple[int, int]] = ()
) -> dict[int, str]:
    """Live processes that carry ``cluster_id``, belong to one of ``sessions`` or are ``known``: pid to
    command line.

    All are needed: a process that renames itself (as SGLang's schedulers do) overwrites its environment in /proc, one
    with its own session is found only by its environment, and an exiting one has none any more. Zombies do not count,
    unless threads of theirs are still exiting.

    Args:
        known: pids with their start times from :func:`identities_of`: a pid may have been reused.
    """
    found = identities_of(cluster_id, sessions, known)
    return {pid: process_title(pid) for pid, _ in found}


def identities_of(
    cluster_id: str, sessions: Iterable[int] = (), known: Collection[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """(pid, start time) of the processes that :func:`processes_of` finds, to identify them later."""
    needle = f"{CLUSTER_VARIABLE}={cluster_id}".encode()
    wanted = set(sessions)
    found: list[tuple[int, int]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        stat = _stat(pid)
        if stat is None or not stat[0]:
            continue
        _, session, started = stat
        if session not in wanted and (pid, started) not in known:
            try:
                if needle not in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    continue
            except OSError:  # ended meanwhile, or another user's
                continue
        found.append((pid, started))
    return found


def children_of(pid: int) -> list[int]:
    """All descendants of ``pid``; empty when it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def process_title(pid: int) -> str:
    """Command line of ``pid``, "" when ended. SGLang's are like ``sglang::scheduler``."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()
