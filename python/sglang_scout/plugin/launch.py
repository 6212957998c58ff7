"""A launcher's message to its scheduler processes: their role, its process id, and its CPUs.

Only the scheduler processes of a server started with ``--kv-offload`` are hooked. They detect it by
``SGLANG_SCOUT_ROLE``, which names the launcher: another server that inherits the variable ignores it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from typing import NamedTuple

ROLE_ENV = "SGLANG_SCOUT_ROLE"


class Launched(NamedTuple):
    """A scheduler process, as its launcher described it."""

    role: str
    launcher: int
    cpus: frozenset[int]


def announce(role: str, cpus: Iterable[int]) -> None:
    """In the launcher: set the role for the scheduler processes to be started."""
    os.environ[ROLE_ENV] = f"{role}:{os.getpid()}:{','.join(map(str, sorted(cpus)))}"


def launched_as() -> Launched | None:
    """The launcher's message to this process; None in the launcher itself, and if it is another launcher's."""
    role, _, rest = os.environ.get(ROLE_ENV, "").partition(":")
    launcher, _, cpus = rest.partition(":")
    parent = multiprocessing.parent_process()
    if not role or parent is None or parent.pid != int(launcher):
        return None
    return Launched(role, int(launcher), frozenset(map(int, cpus.split(","))))


_LAUNCHED = launched_as()
PROCESS_CPUS = _LAUNCHED.cpus if _LAUNCHED else frozenset(os.sched_getaffinity(0))
"""CPU affinity at server start; SGLang may later bind a scheduler process to a NUMA node, and the model thread to one
CPU."""
