"""Supervises a CPU attention process: a thread starts it, monitors it, kills and replaces it.

The thread never reads records. It tells the posting side the epoch of the process that may be given work
(``RingProducer.set_live_epoch``): 0 from the detection of a failure until the next one is ready. A process is started
only when the previous one is dead, so no two ever write to the same arena.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from sglang_scout import _native
from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import channel as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.channel import Channel, ZmqContext, open_context

logger = logging.getLogger(__name__)

_KILL_LOG_S = 5.0
# It computes in its own threads; numpy's BLAS must not start any.
_ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerProcess:
    """A started process, its pidfd and the channel to it; ``epoch`` counts them. Raises WorkerError.

    Owned by one thread, which must outlive it: the kernel kills the process when that thread ends. The ZMQ context is
    one for all processes of a server: its threads must not have to be started again when a process is replaced because
    the machine is short of something.
    """

    def __init__(self, context: ZmqContext, epoch: int, arena_fd: int) -> None:
        self.epoch = epoch
        with contextlib.ExitStack() as made:  # undone here if this fails, otherwise in end()
            try:
                self.channel = Channel.connect(context, epoch)
                made.callback(self.channel.close)
                self._process = _spawn(self.channel, epoch, arena_fd)
                made.callback(self._kill)
                self.channel.peer_pid = self.pid = self._process.pid
                self._pidfd = os.pidfd_open(self.pid)
                made.callback(os.close, self._pidfd)
            except (OSError, zmq.ZMQError) as e:
                fix = "free memory, or raise ulimit -n and ulimit -u"
                raise WorkerError(f"cannot start the CPU attention process: {e}; {fix}") from e
            self._made = made.pop_all()

    def wait(self, timeout_s: float) -> tuple[list[m.Message], bool]:
        """Blocks until it speaks or ends, or on timeout. Returns its valid messages, and whether it has ended."""
        return self.channel.receive(timeout_s, self._pidfd)

    def wants_cpu(self) -> bool:
        """Whether a thread that takes part in heartbeats is runnable: a silent process is then starved, as another
        would be. Compute threads do not count; they may be busy while the process is hung."""
        with contextlib.suppress(OSError):  # a thread, or all of them, may have exited
            for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
                name, _, rest = stat.read_text().rpartition(")")
                speaks = stat.parent.name == str(self.pid) or "(ZMQbg" in name
                if speaks and rest.split()[0] == "R":
                    return True
        return False

    def exit_text(self) -> str:
        code = self._process.wait()
        how = f"ended with exit code {code}"
        with contextlib.suppress(ValueError):  # no signal, or a real-time signal
            how = f"was killed by {signal.Signals(-code).name}"
        return f"CPU attention process {self.pid} {how}"

    def end(self) -> None:
        """Kills the process if it runs, reaps it, releases everything; idempotent."""
        self._made.close()

    def _kill(self) -> None:
        self._process.kill()  # nothing if it has been reaped
        while True:
            try:
                self._process.wait(_KILL_LOG_S)
                return
            except subprocess.TimeoutExpired:
                # It is stuck in the kernel; no other may be started before it is gone.
                what = "CPU attention process %d survives SIGKILL: it is stuck in the kernel, see dmesg"
                logger.error(what, self.pid)


def _spawn(channel: Channel, epoch: int, arena_fd: int) -> subprocess.Popen[bytes]:
    # -P: the working directory must not shadow modules.
    command = [sys.executable, "-P", "-m", "sglang_scout.worker.main"]
    command += ["--arena-fd", str(arena_fd), "--epoch", str(epoch), "--parent", str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(arena_fd,),
        process_group=0,  # the server handles terminal signals
        env=os.environ | _ENVIRONMENT | channel.environment(),
    )


@dataclass
class WorkerStatus:
    """A snapshot of the worker's status. Totals continue across restarts."""

    cpus: tuple[int, ...]  # of the threads
    cpu_nodes: tuple[int, ...]  # the arena's node of each, from 0
    state: str = "stopped"  # or "starting", "ready", "restarting", "failed"
    pid: int | None = None  # of the running process
    endpoint: str = ""  # of its control channel; "" before the first start
    isa: str = ""  # instruction set of its kernel, "" before the first Ready
    restarts: int = 0  # processes after the first
    restart_backoff_seconds: float = 0.0  # pause before the next start, else 0
    refused_messages: int = 0  # control messages dropped for sender, token, contents or version
    last_error: str = ""  # why the last process exited, or ""
    items: int = 0  # (sequence, part) items computed by workers
    pages: int = 0  # that workers attended to
    remote_pages: int = 0  # of these, on another node than the thread's
    refused: int = 0  # records that a worker refused for a field, and answers that the caller did for inf or NaN
    busy_us: int = 0  # compute time summed over worker threads
    stale: int = 0  # records of another epoch that a worker skipped
    fallback_pages: int = 0  # that the caller computed instead
    local_tickets: int = 0  # posts that went to no worker: none was ready, or the slot was busy
    late_tickets: int = 0  # waits that hit wait_timeout_s


class Supervisor:
    """Keeps a worker process running until stopped. ``status``, without the posting side's totals, may be read from any
    thread."""

    def __init__(
        self, producer: _native.RingProducer, arena: Arena, configure: m.Configure
    ) -> None:
        self.status = WorkerStatus(tuple(configure.cpus), tuple(configure.cpu_nodes))
        self._producer, self._arena = producer, arena
        self._configure, self._config = configure, configure.config
        self._lock = threading.Lock()  # of a start's beginning, and a stop
        self._context: ZmqContext
        self._thread: threading.Thread | None = None
        self._first_outcome, self._stopping = threading.Event(), threading.Event()
        self._ready_s: float | None = None  # when the running worker became ready

    def start(self) -> None:
        """Starts the thread and the first worker, and returns when it is ready. Raises WorkerError with its reason, and
        leaves nothing running."""
        with self._lock:
            self._context = open_context()
            self._stopping.clear()
            self._first_outcome.clear()
            self.status.state, self.status.last_error = "starting", ""
            self._thread = threading.Thread(target=self._run, name="scout-supervisor", daemon=True)
            self._thread.start()
        self._first_outcome.wait()  # bounded by the ready deadline in the thread
        if self.status.state != "ready":
            error = self.status.last_error or "stopped while it started"
            self.stop()
            self.status.state = "failed"
            raise WorkerError(error)

    def stop(self) -> None:
        with self._lock:
            if self._thread is None:
                return
            self._stopping.set()
            self._thread.join()
            self._context.term()
            self._thread, self.status.state = None, "stopped"

    def _run(self) -> None:
        config, failures = self._config, 0
        backoff_s = config.backoff_min_s
        try:
            while True:
                served_s = self._run_process()
                if self._stopping.is_set() or not self._first_outcome.is_set():
                    return
                failures = 0 if served_s else failures + 1
                if served_s >= config.backoff_max_s:
                    backoff_s = config.backoff_min_s
                failed = failures >= config.max_start_failures
                pause_s = config.retry_s if failed else backoff_s
                self.status.state = "failed" if failed else "restarting"
                what = "%s; next start in %.1f s, until then the server computes its pages itself"
                logger.warning(what, self.status.last_error, pause_s)
                self.status.restart_backoff_seconds = pause_s
                if self._stopping.wait(pause_s):
                    return
                self.status.restart_backoff_seconds = 0.0
                backoff_s = min(2 * backoff_s, config.backoff_max_s)
                self.status.restarts += 1
        except Exception as e:  # a bug here must not leave a caller waiting for a worker
            what = "nothing restarts the CPU attention process any more; restart the server, and report this"
            logger.exception(what)
            self.status.state, self.status.last_error = "failed", f"supervisor: {e!r}"
        finally:
            self._producer.set_live_epoch(0)
            self._first_outcome.set()

    def _run_process(self) -> float:
        """Runs one worker from start to exit. Returns for how many s it was ready."""
        epoch = self._producer.next_epoch()
        self._arena.restore_header()
        self._ready_s = None
        try:
            process = WorkerProcess(self._context, epoch, self._arena.fd)
        except WorkerError as e:
            self.status.last_error = str(e)
            return 0.0
        self.status.pid, self.status.endpoint = process.pid, process.channel.endpoint
        try:
            process.channel.send(self._configure)
            reason = self._watch(process)
        finally:
            # In this order: first waiting callers fall back to computing, then the process is killed.
            self._producer.set_live_epoch(0)
            self.status.pid = None
            if self.status.state == "ready":
                self.status.state = "restarting"
            process.end()
        self.status.last_error = reason or self.status.last_error
        return 0.0 if self._ready_s is None else time.monotonic() - self._ready_s

    def _watch(self, process: WorkerProcess) -> str:
        """Monitors a worker until it fails or is to be stopped. Returns the reason, "" if it was told to."""
        config, tick_s = self._config, self._config.heartbeat_interval_s / 2
        quiet_s = 0.0  # since the last message
        beat_s = stalled_s = 0.0  # since the last heartbeat; of heartbeats without progress
        last, last_s = m.Heartbeat(), time.monotonic()
        refused_before, who = self.status.refused_messages, f"CPU attention process {process.pid}"
        while not self._stopping.is_set():
            received, ended = process.wait(tick_s)
            now_s = time.monotonic()
            # If this thread itself was not scheduled, the worker was not silent: a gap is capped at two ticks.
            gap_s, last_s = min(now_s - last_s, 2 * tick_s), now_s
            quiet_s = 0.0 if received else quiet_s + gap_s
            beat_s += gap_s
            for message in received:
                if isinstance(message, m.Heartbeat):
                    # Only a heartbeat that reports pending work without progress counts as a stall. A
                    # starved supervisor reads several at once, each of which stands for an interval.
                    stuck = last.pending and message.pending and message.items == last.items
                    spent_s = max(beat_s, config.heartbeat_interval_s)
                    stalled_s = stalled_s + spent_s if stuck else 0.0
                    beat_s, last = 0.0, message
                elif isinstance(message, m.Failed):
                    return f"{who} failed: {message.error}"
                elif isinstance(message, m.Ready):
                    self._ready_s = now_s
                    self._producer.set_live_epoch(process.epoch)
                    self.status.isa, self.status.state = message.isa, "ready"
                    self._first_outcome.set()
                    about = len(self._configure.cpus), message.isa, self.status.endpoint
                    logger.info("%s ready: %d threads, %s, control socket %s", who, *about)
            refused = process.channel.refused + last.refused_messages
            self.status.refused_messages = refused_before + refused
            if ended:
                return process.exit_text()
            if self._ready_s is None:
                if quiet_s > config.ready_timeout_s:
                    return f"{who} was not ready within {config.ready_timeout_s} s"
            elif quiet_s > config.heartbeat_timeout_s and not (
                quiet_s <= config.stall_timeout_s and process.wants_cpu()
            ):
                return f"{who} was silent for {quiet_s:.2f} s"
            if stalled_s > config.stall_timeout_s:
                return f"{who} had work for {stalled_s:.1f} s and finished nothing"
        # What is posted is finished first, if that takes no longer than a stop may.
        process.channel.send(m.Stop())
        deadline_s = time.monotonic() + config.stop_timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not process.wait(left_s)[1]:
            pass
        return ""
