"""The CPU attention process: ``python -m sglang_scout.worker.main --arena-fd N --epoch N --parent PID``.

This file is the control plane: it starts the C++ threads that serve the ring, sends heartbeats and
otherwise sleeps. It never imports torch or sglang. It exits when told to; the kernel kills it when its server dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Collection

import zmq

from sglang_scout import _native
from sglang_scout.core.errors import ScoutError, WorkerError
from sglang_scout.core.numa import ranges, read_cpus
from sglang_scout.worker import channel as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.channel import Channel
from sglang_scout.worker.die_with_parent import die_with_parent
from sglang_scout.worker.host_memory import gib, populate

logger = logging.getLogger("sglang_scout.worker")

_CONFIGURE_TIMEOUT_S = 60.0
_DRAIN_POLL_S = 0.001
PIECE_BYTES = 256 * 2**10  # other threads may block on the mmap lock meanwhile
_SET_MEMPOLICY, _MPOL_DEFAULT = 238, 0  # of x86-64


def serve(channel: Channel, arena_fd: int, epoch: int) -> None:
    """Serves until told to stop. Raises ScoutError."""
    if (configure := _configured(channel)) is None:
        return
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(Arena.attach(arena_fd))
        os.close(arena_fd)
        others = configure.background_cpus or os.sched_getaffinity(0).difference(configure.cpus)
        runtime = start_runtime(arena, epoch, configure)
        stack.callback(runtime.stop)
        if configure.config.populate:
            stopping = threading.Event()
            args = arena, others, stopping
            mapper = threading.Thread(target=map_pages, args=args, name="scout-map", daemon=True)
            mapper.start()
            stack.callback(mapper.join)
            stack.callback(stopping.set)  # called before it
        channel.send(m.Ready(isa=_native.isa()))
        due_s, is_told = time.monotonic(), False
        while True:
            pending, items = runtime.progress()
            if is_told and not pending:
                return
            if (now_s := time.monotonic()) >= due_s:
                refused = channel.refused
                channel.send(m.Heartbeat(items=items, pending=pending, refused_messages=refused))
                due_s = now_s + configure.config.heartbeat_interval_s
            received, _ = channel.receive(_DRAIN_POLL_S if is_told else due_s - now_s)
            is_told |= any(isinstance(message, m.Stop) for message in received)


def _configured(channel: Channel) -> m.Configure | None:
    """What the server begins with; None if it is to stop already."""
    deadline_s = time.monotonic() + _CONFIGURE_TIMEOUT_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        received, _ = channel.receive(left_s)
        if any(isinstance(message, m.Stop) for message in received):
            return None
        if found := [message for message in received if isinstance(message, m.Configure)]:
            return found[0]
    raise WorkerError(f"heard nothing from the server for {_CONFIGURE_TIMEOUT_S:.0f} s")


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
            f"cannot start on CPUs {ranges(cpus)}: {getattr(e, 'strerror', None) or e}; set --kv-offload-cpus to some "
            f"of {ranges(allowed)} (online are {ranges(online)})"
        ) from e


def map_pages(arena: Arena, cpus: Collection[int], stopping: threading.Event) -> None:
    """Maps an arena's pages, for reading, at the lowest priority of this thread's class, on ``cpus`` if there are any:
    on those of polling threads it gets hardly any time.

    The first access to each 4 KiB of a mapping faults, which for a host page of one layer can cost more than attending
    to it. With a CUDA device host pages are pinned, so allocated anyway, and this walks them once.
    """
    thread, begin_s = threading.get_native_id(), time.monotonic()
    os.setpriority(os.PRIO_PROCESS, thread, 19)
    if cpus:
        os.sched_setaffinity(thread, cpus)
    offset = arena.layout.kv_offset // mmap.PAGESIZE * mmap.PAGESIZE
    for done in range(offset, arena.nbytes, PIECE_BYTES):
        if stopping.is_set():
            return
        size = min(PIECE_BYTES, arena.nbytes - done)
        if error := populate(arena.address + done, size, write=False):
            what = "mapped %s of %s of host pages, the rest at first use: %s"
            logger.info(what, gib(done), gib(arena.nbytes), os.strerror(error))
            return
    logger.info("mapped %s of host pages in %.1f s", gib(arena.nbytes), time.monotonic() - begin_s)


def main() -> int:
    arena_fd, epoch, server_pid = map(int, sys.argv[2::2])  # of --arena-fd, --epoch and --parent
    logging.basicConfig(
        level=logging.INFO, format=f"[scout-cpu-attention {os.getpid()}] %(levelname)s %(message)s"
    )
    faulthandler.enable()
    die_with_parent(server_pid)
    # SGLang starts a scheduler with numactl --membind, and a process inherits its parent's memory policy: back to the
    # local node, before there are other threads.
    ctypes.CDLL(None).syscall(*map(ctypes.c_long, (_SET_MEMPOLICY, _MPOL_DEFAULT, 0, 0)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the decode server
    with zmq.Context() as context, contextlib.closing(Channel.bind(context, server_pid)) as channel:
        try:
            serve(channel, arena_fd, epoch)
            return 0
        except ScoutError as e:
            logger.error("%s", e)
            channel.send(m.Failed(error=str(e)[: m.MAX_TEXT_CHARS]))
            time.sleep(1.0)  # an exit could overtake the message; the server kills at once
            return 1


if __name__ == "__main__":
    sys.exit(main())
