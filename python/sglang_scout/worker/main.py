"""The worker process: ``python -m sglang_scout.worker.main --arena-fd N --control-fd N ...``.

This file is the control plane: it sends Hello, starts the C++ threads that serve the ring, sends
periodic heartbeats and otherwise sleeps. It never touches a record, and never imports torch or
sglang. It exits when told to, and is killed by the kernel when the decode server dies for any reason.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from sglang_scout import _native
from sglang_scout.core.errors import ScoutError, WorkerError
from sglang_scout.worker import messages as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.cpus import background_cpus
from sglang_scout.worker.die_with_parent import die_with_parent
from sglang_scout.worker.numa import cpus_by_node, use_own_node
from sglang_scout.worker.populate import PopulateThread
from sglang_scout.worker.ring import LAYOUT_VERSION

logger = logging.getLogger("sglang_scout.worker")

_CONFIGURE_TIMEOUT_S = 60.0


class Worker:
    """A socket to the client, an arena, the threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._socket = socket.socket(fileno=args.control_fd)
        self._refused = 0

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code."""
        self._send(m.Hello(pid=os.getpid(), epoch=self._args.epoch))
        configure = self._await_configure()
        if configure is None:
            return 0
        try:
            arena = attach(self._args.arena_fd, configure)
            with contextlib.closing(arena):
                allowed = os.sched_getaffinity(0)
                others = background_cpus(allowed, configure.cpus, cpus_by_node(allowed))
                runtime = start_runtime(arena, configure)
                populating = None
                try:
                    if configure.populate:
                        populating = PopulateThread(arena, others)
                    return self._serve(runtime, configure)
                finally:
                    runtime.stop()
                    if populating is not None:
                        populating.stop()
        except ScoutError as e:
            logger.error("worker: %s", e)
            self._send(m.Failed(error=str(e)[: m.MAX_TEXT_CHARS]))
            return 1

    def _serve(self, runtime: _native.RingRuntime, configure: m.Configure) -> int:
        self._send(m.Ready(isa=_native.isa(), threads=len(configure.cpus)))
        interval_s = configure.heartbeat_interval_s
        number = 0
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= due_s:
                number += 1
                self._send(m.Heartbeat(number=number, stats=self._stats(runtime)))
                due_s = now_s + interval_s
            if isinstance(self._receive(due_s - now_s), m.Stop):
                return 0

    def _await_configure(self) -> m.Configure | None:
        deadline_s = time.monotonic() + _CONFIGURE_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._receive(left_s)
            if isinstance(message, m.Configure):
                return message
            if isinstance(message, m.Stop):
                return None
        raise WorkerError(f"no configuration within {_CONFIGURE_TIMEOUT_S:.0f} s")

    def _receive(self, wait_s: float) -> m.Message | None:
        """Waits for a message. A closed socket means Stop: the client is gone."""
        # Not select(): the inherited descriptor keeps the server's number, which may be too large for it.
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(max(wait_s, 0.0) * 1e3):
            return None
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(m.MAX_MESSAGE_BYTES + 1)
        try:
            return m.decode(data, m.FromClient) if data else m.Stop()
        except WorkerError as e:
            self._refused += 1
            logger.warning("worker: dropped a message: %s", e)
            return None

    def _stats(self, runtime: _native.RingRuntime) -> m.Stats:
        pending, items = runtime.progress()
        return m.Stats(items=items, pending=pending, refused_messages=self._refused)

    def _send(self, message: m.Message) -> None:
        # If the client does not read, buffers fill up and heartbeats are dropped, which to the client is
        # the same as a late one.
        with contextlib.suppress(OSError):
            self._socket.send(m.encode(message), socket.MSG_DONTWAIT)


def attach(fd: int, configure: m.Configure) -> Arena:
    """Maps the arena and checks it against the configuration. Raises ArenaError, WorkerError."""
    if configure.layout_version != LAYOUT_VERSION:
        raise WorkerError(
            f"ring layout {configure.layout_version} asked for, this worker has {LAYOUT_VERSION}"
        )
    arena = Arena.attach(fd)
    os.close(fd)
    if arena.nbytes != configure.arena_bytes:
        nbytes = arena.nbytes
        arena.close()
        raise WorkerError(f"arena has {nbytes} bytes, expected {configure.arena_bytes}")
    return arena


def start_runtime(arena: Arena, configure: m.Configure) -> _native.RingRuntime:
    """Pins the process and starts the threads. Raises WorkerError naming a CPU that it cannot use."""
    cpus = configure.cpus
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        raise WorkerError(f"cannot run on CPUs {cpus}: {reason}; {_cpu_hint()}") from e
    try:
        return _native.RingRuntime(
            arena.address,
            arena.nbytes,
            configure.epoch,
            cpus,
            configure.spin_us,
            configure.threads_per_group,
            configure.cpu_nodes,
        )
    except RuntimeError as e:
        raise WorkerError(f"{e}; {_cpu_hint()}") from e


def _cpu_hint() -> str:
    try:
        online = Path("/sys/devices/system/cpu/online").read_text().strip()
    except OSError:
        online = f"0-{(os.cpu_count() or 1) - 1}"
    return f"online are {online}, allowed to this process {sorted(os.sched_getaffinity(0))}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang_scout.worker.main",
        description="CPU attention process of sglang-scout; the decode server starts it.",
    )
    parser.add_argument("--arena-fd", type=int, required=True, help="inherited memory file")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited control socket")
    parser.add_argument("--epoch", type=int, required=True, help="number of this process")
    parser.add_argument("--parent", type=int, required=True, help="pid of the decode server")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs a worker. Returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format=f"[scout-worker {os.getpid()}] %(levelname)s %(message)s"
    )
    faulthandler.enable()
    die_with_parent(args.parent)
    use_own_node()  # before there are other threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the decode server
    try:
        return Worker(args).run()
    except WorkerError as e:
        logger.error("worker: %s", e)
        return 1


if __name__ == "__main__":
    sys.exit(main())
