"""The client's handle of a worker process: the process, its pidfd, and one end of a socket pair.

The worker inherits the other end. The pair is unnamed: nobody else can connect to it, messages of
an earlier worker cannot arrive through it, and nothing is left in the file system after a crash.
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
# The worker computes in its own threads; numpy's BLAS must not start any.
_WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A started worker process and the socket to it. Owned by one thread; ``end`` releases everything.

    The thread that creates it must outlive it: the kernel kills the worker when that thread ends.

    Args:
        epoch: its number, counted across restarts.
        arena_fd: memory file that the process inherits.
        log: where refused messages are reported.

    Raises:
        WorkerError: the socket or the process cannot be created.
    """

    def __init__(self, epoch: int, arena_fd: int, log: logging.Logger) -> None:
        self.epoch = epoch
        self.refused_messages = 0
        self._log = log
        self._open = True  # the worker has not closed its end
        # Cleanup in reverse order: here if construction fails, otherwise in end().
        with contextlib.ExitStack() as made:
            try:
                # SEQPACKET: a message is received whole or not at all.
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
        """Process id, also after its exit."""
        return self._process.pid

    def wait(self, timeout_s: float, wake_fd: int) -> tuple[list[m.Message], bool]:
        """Blocks until something happens.

        Returns:
            The worker's valid messages and whether the process has exited. Also returns, with
            neither, when ``wake_fd`` becomes readable or on timeout.
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(wake_fd, select.POLLIN)
        if self._open:
            poll.register(self._socket, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        return self._receive(), self._pidfd in ready

    def send(self, message: m.Message) -> None:
        """Sends to the worker; one that is dead, or does not read, is detected elsewhere."""
        with contextlib.suppress(OSError):
            self._socket.send(m.encode(message), socket.MSG_DONTWAIT)

    def wants_cpu(self) -> bool:
        """Whether the heartbeat thread is runnable, i.e. waiting for a CPU or running.

        A silent worker that is runnable is starved: a replacement would be as well. A thread that is
        stopped, sleeping or stuck in the kernel is not runnable. Compute threads do not count; they may
        be busy while the process is hung.
        """
        with contextlib.suppress(OSError):  # it may have exited
            stat = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "R"
        return False

    def exit_text(self) -> str:
        """How the process ended, human-readable. Call after it has exited."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"worker {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker {self.pid} ended with exit code {code}"

    def end(self) -> None:
        """Kills the process if it runs, reaps it, releases everything; idempotent."""
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
                # It is stuck in the kernel; no other may be started before it is gone.
                self._log.error("worker %d does not die after SIGKILL, waiting", self.pid)

    def _receive(self) -> list[m.Message]:
        received: list[m.Message] = []
        while self._open:
            try:
                data = self._socket.recv(m.MAX_MESSAGE_BYTES + 1, socket.MSG_DONTWAIT)
                self._open = data != b""  # EOF
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
    # -P: the working directory must not shadow modules. A process group of its own: terminal
    # signals are handled by the decode server.
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
