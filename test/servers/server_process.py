"""One server process with a log file: started so that it cannot outlive us, stopped with all its children."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from servers.sglang_http import DIRECT
from sglang_scout.worker import die_with_parent

CLUSTER_VARIABLE = "SCOUT_CLUSTER_ID"
"""Environment variable by which the processes of a cluster are found: children inherit it."""
_POLL_S = 0.25
SETTLE_S = 8.0
"""Time for a server's children to notice its exit and to exit themselves."""
LOCKED_SETTLE_S = 40.0
"""The same for servers with page-locked memory: releasing hundreds of GiB is slow."""
KILLED_S = 60.0
"""Timeout for a killed process to exit. Releasing much page-locked memory is slow."""

MOONCAKE_PORTS = range(15000, 17001)
"""Ports of mooncake's transfer engine, unless MC_MIN_PRC_PORT and MC_MAX_PRC_PORT say otherwise."""
_given_ports: set[int] = set()


class ServerFailed(RuntimeError):
    """A server did not start, or ended unexpectedly; the message has its log's tail."""


def free_ports(count: int) -> list[int]:
    """``count`` TCP ports that can be bound right now and that this process has not got before.

    They are below the kernel's ephemeral range and outside mooncake's: SGLang and mooncake open many connections and
    listeners while they start, any of which could take a port from these ranges.
    """
    found: list[int] = []
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ours = set(range(10000, max(15000, ephemeral))) - {*MOONCAKE_PORTS, *_given_ports}
    for port in random.SystemRandom().sample(sorted(ours), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            _given_ports.update(found)
            return found
    raise ServerFailed(f"only {len(found)} free TCP ports found, {count} needed")


class ServerProcess:
    """A command in its own process group, with stdout and stderr in ``log_path``.

    Args:
        env: the whole environment of the process; must hold SCOUT_CLUSTER_ID.
        log_path: created or truncated by ``start``.
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str], log_path: Path) -> None:
        self.name, self.command, self.env, self.log_path = name, command, env, log_path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, from a thread that lives as long: the thread's end kills the server."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} was already started")
        tied = [sys.executable, "-SP", die_with_parent.__file__, str(os.getpid()), *self.command]
        with open(self.log_path, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(tied, env=self.env, start_new_session=True, **streams)

    def restart(self) -> None:
        """Restart it after it and its children have ended. The log is truncated.

        Raises ServerFailed if it, or a child, still runs after ``SETTLE_S``.
        """
        deadline = time.monotonic() + SETTLE_S
        while left := processes_of("", [self.pid]):
            if time.monotonic() > deadline:
                raise ServerFailed(f"of the {self.name} server these still run: {left}")
            time.sleep(_POLL_S)
        self._process = None
        self.start()

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or was never started), else as in ``subprocess.Popen.returncode``."""
        return None if self._process is None else self._process.poll()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.started else ""

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log under a heading that names server and file."""
        body = "\n".join(self.log().splitlines()[-lines:])
        return f"--- {self.name}: last lines of {self.log_path}\n{body}\n---"

    def check(self) -> None:
        """Raises ServerFailed when the process has ended."""
        code = self.exit_code
        if code is not None:
            raise ServerFailed(f"the {self.name} server ended with exit code {code}\n{self.tail()}")

    def signal(self, number: int) -> None:
        """Send a signal to the main process only, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)  # which does nothing after its end

    def wait(self, timeout_s: float) -> bool:
        """True when the main process has ended within ``timeout_s``."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout_s)
        return self.exit_code is not None or not self.started


def wait_healthy(
    server: ServerProcess, url: str, deadline: float, beside: Iterable[ServerProcess] = ()
) -> None:
    """Return when ``url`` answers. ``deadline``: of ``time.monotonic``; ``beside``: others that must keep running.

    Raises ServerFailed, with the end of its log, for one that ends, or for ``server`` if it does not answer.
    """
    begin, answer = time.monotonic(), "no answer yet"
    servers = (server, *beside)
    while time.monotonic() < deadline:
        for running in servers:
            running.check()
        try:
            with DIRECT.open(url, timeout=5):
                return
        except (OSError, urllib.error.URLError) as error:
            answer = str(error)
        time.sleep(_POLL_S)
    raise ServerFailed(
        f"the {server.name} server was not healthy within {time.monotonic() - begin:.0f} s "
        f"({url}: {answer})\n{server.tail()}"
    )


def processes_of(cluster_id: str, sessions: Iterable[int] = ()) -> list[psutil.Process]:
    """Live processes that carry ``cluster_id`` or belong to one of ``sessions``.

    Both are needed: a process that renames itself (as SGLang's schedulers do) overwrites its environment in /proc, and
    one with its own session is found only by its environment. This also finds those whose parent has died.
    """
    found, wanted = [], set(sessions)
    for process in psutil.process_iter():
        try:
            is_ours = os.getsid(process.pid) in wanted or (
                process.environ().get(CLUSTER_VARIABLE) == cluster_id
            )
        except (OSError, psutil.Error):  # ended meanwhile, or another user's
            continue
        if is_ours and process.pid != os.getpid() and _holds_resources(process):
            found.append(process)
    return found


def _holds_resources(process: psutil.Process) -> bool:
    """A zombie holds nothing. But one whose other threads are still exiting, which takes tens of seconds with much
    page-locked memory, holds all of it: its state is only that of its first thread."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return process.is_running() and not (is_zombie and process.num_threads() < 2)
    except psutil.NoSuchProcess:
        return False


def title_of(process: psutil.Process) -> str:
    """Its command line, "" when ended. SGLang's are like ``sglang::scheduler``."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def children_of(pid: int) -> list[psutil.Process]:
    """All descendants of ``pid``; empty when it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def stop_all(
    servers: Iterable[ServerProcess], cluster_id: str, settle_s: float = SETTLE_S
) -> dict[int, str]:
    """End all ``servers`` and their descendants. Returns what did not end by itself.

    1. SIGKILL to the main processes only: the children have to notice.
    2. Survivors after ``settle_s`` are killed and returned (pid to command line); a correct shutdown returns {}.

    A process has ended when all its threads have: only then is its memory free.

    Raises ServerFailed if a process survives SIGKILL for ``KILLED_S``.
    """
    servers = [server for server in servers if server.started]
    sessions = [server.pid for server in servers]
    known = processes_of(cluster_id, sessions)  # an exiting one has no environment any more
    for server in servers:
        server.signal(signal.SIGKILL)
    for server in servers:
        server.wait(KILLED_S)

    def left_after(timeout_s: float) -> list[psutil.Process]:
        deadline = time.monotonic() + timeout_s
        while alive := {*filter(_holds_resources, known), *processes_of(cluster_id, sessions)}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return list(alive)

    outlived = {process: title_of(process) for process in left_after(settle_s)}
    for process in outlived:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if outlived and (stuck := left_after(KILLED_S)):
        raise ServerFailed(f"these processes survive SIGKILL: {stuck}")
    return {process.pid: title for process, title in outlived.items()}


@contextmanager
def ends_orderly() -> Iterator[None]:
    """Treats SIGTERM as Ctrl-C, so that we stop the servers."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
