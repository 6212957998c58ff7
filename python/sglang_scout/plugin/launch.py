"""What a launcher tells its scheduler processes: their role, its process, and the CPUs that it may run on.

Only the scheduler processes of a server that was started with ``--kv-offload`` are hooked. They know it by
``SGLANG_SCOUT_ROLE``, which names the launcher: another server that has inherited the variable is not meant.
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
    """In the launcher: tell the scheduler processes to come what they are."""
    os.environ[ROLE_ENV] = f"{role}:{os.getpid()}:{','.join(map(str, sorted(cpus)))}"


def launched_as() -> Launched | None:
    """What the launcher has told this process; None in the launcher itself, and where another one spoke."""
    role, _, rest = os.environ.get(ROLE_ENV, "").partition(":")
    launcher, _, cpus = rest.partition(":")
    parent = multiprocessing.parent_process()
    if not role or parent is None or parent.pid != int(launcher):
        return None
    return Launched(role, int(launcher), frozenset(map(int, cpus.split(","))))


_LAUNCHED = launched_as()
PROCESS_CPUS = _LAUNCHED.cpus if _LAUNCHED else frozenset(os.sched_getaffinity(0))
"""As the server was started; SGLang may bind a scheduler process to a NUMA node, and the thread that runs the model
to one CPU."""
