"""A worker process as its client holds it: the process, its pidfd, and one end of a socket pair.

The worker inherits the other end. The pair has no name: nobody else can connect to it, a message of
an earlier worker cannot come through it, and nothing is left in the file system whoever is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m

_KILL_LOG_S = 5.0
# The worker computes in its own threads; a BLAS that numpy brings along must not start any.
_WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A started worker process and the socket to it. Owned by one thread; ``end`` frees everything.

    The thread that makes it must outlast it: the kernel kills the worker when that thread ends.

    Args:
        epoch: its number, counted over restarts.
        arena_fd: memory file that the process inherits.
        log: where refused messages are reported.

    Raises:
        WorkerError: the socket or the process cannot be made.
    """

    def __init__(self, epoch: int, arena_fd: int, log: logging.Logger) -> None:
        self.epoch = epoch
        self.refused_messages = 0
        self._log = log
        self._open = True  # the worker has not closed its end
        # Undoes, last first, what has been made: here if the rest fails, otherwise in end().
        with contextlib.ExitStack() as made:
            try:
                # Records, not a stream: a message is received whole or not at all.
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                made.enter_context(self._socket)
                with theirs:
                    self._process = _spawn(theirs.fileno(), epoch, arena_fd)
                made.callback(self._kill)
                self._pidfd = os.pidfd_open(self._process.pid)
                made.callback(os.close, self._pidfd)
            except OSError as e:
                raise WorkerError(f"cannot start the worker process: {e}") from e
            self._made = made.pop_all()

    @property
    def pid(self) -> int:
        """Process id, also after its end."""
        return self._process.pid

    def wait(self, timeout_s: float, wake_fd: int) -> tuple[list[m.Message], bool]:
        """Sleeps until something happens.

        Returns:
            The worker's valid messages and whether the process has ended. Also returns, with
            neither, when ``wake_fd`` becomes readable or the time is over.
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(wake_fd, select.POLLIN)
        if self._open:
            poll.register(self._socket, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        return self._receive(), self._pidfd in ready

    def send(self, message: m.Message) -> None:
        """Sends to the worker; one that is gone, or does not read, is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._socket.send(m.encode(message), socket.MSG_DONTWAIT)

    def wants_cpu(self) -> bool:
        """Whether the thread that sends heartbeats could run if a CPU were free.

        A silent worker that wants one is starved: another in its place would be as well. A stopped
        thread, and one that sleeps or is stuck in the kernel, wants none. The threads that compute
        do not count; they may be busy while the process is hung.
        """
        with contextlib.suppress(OSError):  # it may have ended
            stat = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "R"
        return False

    def exit_text(self) -> str:
        """How the process ended, for people. Call when it has ended."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"worker {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker {self.pid} ended with exit code {code}"

    def end(self) -> None:
        """Kills the process if it runs, waits for its death, frees everything; idempotent."""
        self._made.close()

    def _kill(self) -> None:
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        while True:
            try:
                self._process.wait(_KILL_LOG_S)
                return
            except subprocess.TimeoutExpired:
                # Only a process stuck in the kernel; no other may be started before it is gone.
                self._log.error("worker %d does not die after SIGKILL, waiting", self.pid)

    def _receive(self) -> list[m.Message]:
        received: list[m.Message] = []
        while self._open:
            try:
                data = self._socket.recv(m.MAX_MESSAGE_BYTES + 1, socket.MSG_DONTWAIT)
                self._open = data != b""  # its end is closed
            except BlockingIOError:
                break
            except OSError:
                self._open = False
            else:
                if data:
                    self._accept(data, received)
        return received

    def _accept(self, data: bytes, received: list[m.Message]) -> None:
        try:
            message = m.decode(data, m.FromWorker)
            if isinstance(message, m.Hello) and (message.pid, message.epoch) != (
                self.pid,
                self.epoch,
            ):
                raise WorkerError(
                    f"Hello of pid {message.pid} epoch {message.epoch}, expected {self.pid} and "
                    f"{self.epoch}"
                )
            received.append(message)
        except WorkerError as e:
            self.refused_messages += 1
            self._log.warning("worker control: dropped a message: %s", e)


def _spawn(control_fd: int, epoch: int, arena_fd: int) -> subprocess.Popen[bytes]:
    # -P: the working directory must not shadow modules. A process group of its own: signals that
    # the terminal sends are the decode server's to handle.
    command = [sys.executable, "-P", "-m", "sglang_scout.worker.main"]
    command += ["--arena-fd", str(arena_fd), "--control-fd", str(control_fd)]
    command += ["--epoch", str(epoch), "--parent", str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(arena_fd, control_fd),
        process_group=0,
        env=os.environ | _WORKER_ENVIRONMENT,
    )
