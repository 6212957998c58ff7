"""The CPU attention process: ``python -m sglang_scout.worker.main --arena-fd N --epoch N --parent PID``.

This file is the control plane: it answers Hello, starts the C++ threads that serve the ring, sends heartbeats and
otherwise sleeps. It never imports torch or sglang. It exits when told to; the kernel kills it when its server dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from typing import NoReturn, TypeVar

import zmq

from sglang_scout import _native
from sglang_scout.core.errors import ScoutError, WorkerError
from sglang_scout.core.numa import ranges, read_cpus
from sglang_scout.worker import channel as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.channel import Channel
from sglang_scout.worker.die_with_parent import die_with_parent
from sglang_scout.worker.host_memory import PopulateThread, use_own_node

logger = logging.getLogger("sglang_scout.worker")

_CONFIGURE_TIMEOUT_S = 60.0
_DRAIN_POLL_S = 0.001
Expected = TypeVar("Expected", m.Hello, m.Register, m.Configure)


class Stopped(Exception):
    """The server has said Stop."""


class Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._received: list[m.Message] = []

    def run(self, arena_fd: int, epoch: int) -> int:
        """Serves until told to stop. Returns the exit code."""
        try:
            self._expect(m.Hello)
            self._channel.send(m.Hello())
            arena_bytes = self._expect(m.Register).arena_bytes
            with Arena.attach(arena_fd) as arena:
                os.close(arena_fd)
                if arena.nbytes != arena_bytes:
                    raise WorkerError(f"arena has {arena.nbytes} bytes, expected {arena_bytes}")
                self._serve(arena, epoch, self._expect(m.Configure))
        except Stopped:
            return 0
        except ScoutError as e:
            logger.error("%s", e)
            self._channel.send(m.Failed(error=str(e)[: m.MAX_TEXT_CHARS]))
            time.sleep(1.0)  # an exit could overtake the message; the server kills at once
            return 1

    def _serve(self, arena: Arena, epoch: int, configure: m.Configure) -> NoReturn:
        others = configure.background_cpus or os.sched_getaffinity(0).difference(configure.cpus)
        with contextlib.ExitStack() as stack:
            runtime = start_runtime(arena, epoch, configure)
            stack.callback(runtime.stop)
            if configure.config.populate:
                ring_bytes = arena.layout.kv_offset
                pages = arena.address + ring_bytes, arena.nbytes - ring_bytes
                stack.callback(PopulateThread(*pages, others).stop)
            self._channel.send(m.Ready(isa=_native.isa()))
            self._beat(runtime, configure.config.heartbeat_interval_s)

    def _beat(self, runtime: _native.RingRuntime, interval_s: float) -> NoReturn:
        due_s, draining = time.monotonic(), False
        while True:
            now_s = time.monotonic()
            pending, items = runtime.progress()
            if now_s >= due_s:
                refused = self._channel.refused
                beat = m.Heartbeat(items=items, pending=pending, refused_messages=refused)
                self._channel.send(beat)
                due_s = now_s + interval_s
            if draining and not pending:
                self._channel.send(m.Drained())
                draining = False
            self._channel.wait(_DRAIN_POLL_S if draining else due_s - now_s)
            draining |= any(isinstance(message, m.Drain) for message in self._receive())

    def _expect(self, kind: type[Expected]) -> Expected:
        """The next message of this kind; others are skipped."""
        deadline_s = time.monotonic() + _CONFIGURE_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            while self._received:
                if isinstance(message := self._received.pop(0), kind):
                    return message
            self._channel.wait(left_s)
            self._received += self._receive()
        raise WorkerError(f"no {kind.__name__} within {_CONFIGURE_TIMEOUT_S:.0f} s")

    def _receive(self) -> list[m.Message]:
        received = self._channel.receive()
        if any(isinstance(message, m.Stop) for message in received):
            raise Stopped
        return received


def start_runtime(arena: Arena, epoch: int, configure: m.Configure) -> _native.RingRuntime:
    """Pins this thread and starts those that compute. Raises WorkerError naming a CPU that it cannot use."""
    cpus, config = configure.cpus, configure.config
    settings = config.spin_us, configure.max_threads, configure.cpu_nodes
    try:
        os.sched_setaffinity(0, cpus)
        return _native.RingRuntime(arena.address, arena.nbytes, epoch, cpus, *settings)
    except (OSError, ValueError, OverflowError, RuntimeError) as e:
        online, allowed = read_cpus("devices/system/cpu/online"), os.sched_getaffinity(0)
        raise WorkerError(
            f"cannot start on CPUs {cpus}: {getattr(e, 'strerror', None) or e}; online are {ranges(online)}, allowed "
            f"to this process {ranges(allowed)}"
        ) from e


def main() -> int:
    """Runs a process, as supervisor.py starts it. Returns the exit code."""
    arena_fd, epoch, server_pid = map(int, sys.argv[2::2])  # of --arena-fd, --epoch and --parent
    logging.basicConfig(
        level=logging.INFO, format=f"[scout-cpu-attention {os.getpid()}] %(levelname)s %(message)s"
    )
    faulthandler.enable()
    die_with_parent(server_pid)
    use_own_node()  # before there are other threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the decode server
    with zmq.Context() as context:
        with contextlib.closing(Channel.bind(context, server_pid)) as channel:
            return Worker(channel).run(arena_fd, epoch)


if __name__ == "__main__":
    sys.exit(main())
