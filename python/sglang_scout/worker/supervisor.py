"""The thread that keeps a worker alive: starts it, listens to it, kills and replaces it.

It never looks at records. What it tells the posting side is one number, the epoch of the worker
that may be given work (``RingProducer.set_life``): 0 from the moment that something is wrong with a
worker until the next one is ready. A new life begins only when the process of the one before is
dead, so no two workers ever write to the same arena.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time

import zmq

from sglang_scout import _native
from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.life import Life, sweep_directories
from sglang_scout.worker.ring import LAYOUT_VERSION
from sglang_scout.worker.settings import WorkerConfig

_STOPPED = ""  # reason of a life that ended because it was told to


class Supervisor:
    """Runs lives of a worker until stopped.

    Attributes, all readable from any thread:
        state, pid, restarts, isa, last_error, refused_messages: as in WorkerStatus.
    """

    def __init__(
        self,
        producer: _native.RingProducer,
        arena: Arena,
        cpus: tuple[int, ...],
        cpu_nodes: tuple[int, ...],
        threads_per_group: int,
        config: WorkerConfig,
        log: logging.Logger,
    ) -> None:
        self._producer = producer
        self._arena = arena
        self._cpus = cpus
        self._cpu_nodes = cpu_nodes
        self._threads_per_group = threads_per_group
        self._config = config
        self._log = log
        self._thread: threading.Thread | None = None
        self._first_outcome = threading.Event()
        self._stopping = threading.Event()
        self._wake_fd = -1
        self._drain_number = 0
        self._drains: dict[int, threading.Event] = {}
        self._unsent_drains: list[int] = []
        self._lock = threading.Lock()  # of the drains
        self.state = "stopped"
        self.pid: int | None = None
        self.restarts = 0
        self.isa = ""
        self.last_error = ""
        self.refused_messages = 0

    def start(self) -> None:
        """Starts the thread and the first life, and waits until that serves.

        Raises:
            WorkerError: it did not; nothing is left running.
        """
        if self._thread is not None:
            raise WorkerError("the worker has been started already")
        sweep_directories()
        self._stopping.clear()
        self._first_outcome.clear()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.state = "starting"
        self._thread = threading.Thread(target=self._run, name="scout-supervisor", daemon=True)
        self._thread.start()
        self._first_outcome.wait()  # bounded by the ready deadline in the thread
        if self.state != "ready":
            error = self.last_error
            self.stop()
            self.state = "failed"
            raise WorkerError(error)

    def stop(self) -> None:
        """Ends the worker and the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._wake()
        thread.join()
        os.close(self._wake_fd)
        self._wake_fd = -1
        self.state = "stopped"

    def drain(self, timeout_s: float) -> bool:
        """Waits until the worker has answered everything published before. False if it did not."""
        with self._lock:
            if self.state != "ready" or self._thread is None:
                return False
            self._drain_number += 1
            number = self._drain_number
            done = self._drains[number] = threading.Event()
            self._unsent_drains.append(number)
            self._wake()
        answered = done.wait(timeout_s)
        with self._lock:
            self._drains.pop(number, None)
        return answered

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        try:
            self._run_lives(context)
        except Exception as e:  # a defect here must not leave a caller waiting for a worker
            self._log.exception("worker supervisor")
            self.last_error = f"worker supervisor: {e!r}"
            self.state = "failed"
        finally:
            self._producer.set_life(0)
            context.term()
            self._first_outcome.set()

    def _run_lives(self, context: zmq.Context) -> None:
        config = self._config
        backoff_s = config.backoff_min_s
        failures = 0
        while True:
            ready_s = self._run_life(context)
            if self._stopping.is_set():
                return
            failures = failures + 1 if ready_s is None else 0
            if not self._first_outcome.is_set() or failures >= config.max_start_failures:
                self.state = "failed"
                self._log.error("worker is given up: %s", self.last_error)
                return
            if ready_s is not None and ready_s >= config.backoff_max_s:
                backoff_s = config.backoff_min_s
            self._log.warning("%s; next start in %.1f s", self.last_error, backoff_s)
            self.state = "restarting"
            self._sleep(backoff_s)
            if self._stopping.is_set():
                return
            backoff_s = min(2 * backoff_s, config.backoff_max_s)
            self.restarts += 1

    def _run_life(self, context: zmq.Context) -> float | None:
        """One life from start to death. Returns for how long it was ready, None if it never was."""
        epoch = self._producer.next_epoch()
        try:
            life = Life(epoch, self._arena.fd, context, self._log)
        except WorkerError as e:
            self.last_error = str(e)
            return None
        self.pid = life.pid
        refused_before = self.refused_messages
        ready_at_s: list[float] = []
        try:
            reason = self._watch(life, ready_at_s, refused_before)
        finally:
            # In this order: waiting callers compute for themselves, then the process is made dead.
            self._producer.set_life(0)
            self.pid = None
            if self.state == "ready":
                self.state = "restarting"
            life.end()
        if reason != _STOPPED:
            self.last_error = reason
        return time.monotonic() - ready_at_s[0] if ready_at_s else None

    def _watch(self, life: Life, ready_at_s: list[float], refused_before: int) -> str:
        """Listens to a worker until something is wrong with it. Returns what."""
        config = self._config
        tick_s = config.heartbeat_interval_s / 2
        quiet_s = stalled_s = 0.0
        last_items = -1
        last_s = time.monotonic()
        while not self._stopping.is_set():
            received, ended = life.wait(tick_s, self._wake_fd)
            self._clear_wake()
            self.refused_messages = refused_before + life.refused_messages
            now_s = time.monotonic()
            # If this thread itself was kept from running, that is no silence of the worker's: its
            # messages have been read above, and a long gap counts as two ticks.
            gap_s, last_s = min(now_s - last_s, 2 * tick_s), now_s
            quiet_s += gap_s
            stalled_s += gap_s
            for message in received:
                quiet_s = 0.0
                if isinstance(message, m.Hello):
                    life.send(self._configure(life))
                elif isinstance(message, m.Ready):
                    self._on_ready(life, message)
                    ready_at_s.append(now_s)
                    stalled_s = 0.0
                elif isinstance(message, m.Failed):
                    return f"worker {life.pid} failed: {message.error}"
                elif isinstance(message, m.Heartbeat):
                    if message.stats.pending == 0 or message.stats.items != last_items:
                        stalled_s = 0.0
                    last_items = message.stats.items
                elif isinstance(message, m.Drained):
                    with self._lock:
                        done = self._drains.get(message.number)
                    if done is not None:
                        done.set()
            if ended:
                return life.exit_text()
            if not ready_at_s:
                if quiet_s > config.ready_timeout_s:
                    return f"worker {life.pid} was not ready within {config.ready_timeout_s} s"
                continue
            if quiet_s > config.heartbeat_timeout_s and not (
                quiet_s <= config.stall_timeout_s and life.wants_cpu()
            ):
                return f"worker {life.pid} was silent for {quiet_s:.2f} s"
            if stalled_s > config.stall_timeout_s:
                return f"worker {life.pid} has had work for {stalled_s:.1f} s and finished nothing"
            self._send_drains(life)
        self._stop_gently(life)
        return _STOPPED

    def _configure(self, life: Life) -> m.Configure:
        return m.Configure(
            token=life.token,
            epoch=life.epoch,
            arena_bytes=self._arena.nbytes,
            layout_version=LAYOUT_VERSION,
            cpus=list(self._cpus),
            cpu_nodes=list(self._cpu_nodes),
            threads_per_group=self._threads_per_group,
            spin_us=self._config.spin_us,
            populate=self._config.populate,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
        )

    def _on_ready(self, life: Life, ready: m.Ready) -> None:
        self.isa = ready.isa
        self._producer.set_life(life.epoch)
        self.state = "ready"
        self._first_outcome.set()
        self._log.info("worker %d ready: %d threads, %s", life.pid, ready.threads, ready.isa)

    def _send_drains(self, life: Life) -> None:
        with self._lock:
            numbers, self._unsent_drains = self._unsent_drains, []
        for number in numbers:
            life.send(m.Drain(token=life.token, number=number))

    def _stop_gently(self, life: Life) -> None:
        self._producer.set_life(0)
        life.send(m.Stop(token=life.token))
        deadline_s = time.monotonic() + self._config.stop_timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if life.wait(left_s, self._wake_fd)[1]:
                return

    def _sleep(self, seconds: float) -> None:
        select.select([self._wake_fd], [], [], seconds)
        self._clear_wake()

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
