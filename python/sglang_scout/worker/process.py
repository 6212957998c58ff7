"""The server's handle of a CPU attention process: the process, its pidfd, and one end of the control channel."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import zmq

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m
from sglang_scout.worker.channel import Channel, ZmqContext

logger = logging.getLogger(__name__)

_KILL_LOG_S = 5.0
# It computes in its own threads; numpy's BLAS must not start any.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A started process and the channel to it. Owned by one thread; ``end`` releases everything.

    The thread that creates it must outlive it: the kernel kills the process when that thread ends.

    Args:
        context: of ZMQ. One for all processes of a server: its threads must not have to be started again when a process
            is replaced because the machine is short of something.
        epoch: number of the process, counted across restarts.
        arena_fd: memory file that it inherits.

    Raises:
        WorkerError: the channel or the process cannot be created.
    """

    def __init__(self, context: ZmqContext, epoch: int, arena_fd: int) -> None:
        self.epoch = epoch
        # Cleanup in reverse order: here if construction fails, otherwise in end().
        with contextlib.ExitStack() as made:
            try:
                self.channel = Channel.connect(context, epoch)
                made.callback(self.channel.close)
                self._process = _spawn(self.channel, epoch, arena_fd)
                made.callback(self._kill)
                self.channel.peer_pid = self.pid = self._process.pid
                self._pidfd = os.pidfd_open(self.pid)
                made.callback(os.close, self._pidfd)
                self.channel.send(m.Hello())
            except (OSError, zmq.ZMQError) as e:
                raise WorkerError(f"cannot start the CPU attention process: {e}") from e
            self._made = made.pop_all()

    def wait(self, timeout_s: float, *wake_fds: int) -> tuple[list[m.Message], bool]:
        """Blocks until something happens, one of ``wake_fds`` is readable, or on timeout.

        Returns the process's valid messages, and whether it has exited.
        """
        ready = self.channel.wait(timeout_s, (self._pidfd, *wake_fds))
        return self.channel.receive(), self._pidfd in ready

    def wants_cpu(self) -> bool:
        """Whether a thread that takes part in heartbeats is runnable, i.e. waiting for a CPU or running.

        A silent process that is runnable is starved: a replacement would be as well. Compute threads do not count; they
        may be busy while the process is hung.
        """
        with contextlib.suppress(OSError):  # a thread, or all of them, may have exited
            for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
                name, _, rest = stat.read_text().rpartition(")")
                speaks = stat.parent.name == str(self.pid) or "(ZMQbg" in name
                if speaks and rest.split()[0] == "R":
                    return True
        return False

    def exit_text(self) -> str:
        """How the process ended, human-readable. Call after it has exited."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):  # a real-time signal
                name = signal.Signals(-code).name
                return f"CPU attention process {self.pid} was killed by {name}"
        return f"CPU attention process {self.pid} ended with exit code {code}"

    def end(self) -> None:
        """Kills the process if it runs, reaps it, releases everything; idempotent."""
        self._made.close()

    def _kill(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.kill()
        while True:
            try:
                self._process.wait(_KILL_LOG_S)
                return
            except subprocess.TimeoutExpired:
                # It is stuck in the kernel; no other may be started before it is gone.
                logger.error(
                    "CPU attention process %d does not die after SIGKILL, waiting", self.pid
                )


def _spawn(channel: Channel, epoch: int, arena_fd: int) -> subprocess.Popen[bytes]:
    # -P: the working directory must not shadow modules. A process group of its own: terminal
    # signals are handled by the decode server.
    command = [sys.executable, "-P", "-m", "sglang_scout.worker.main"]
    command += ["--arena-fd", str(arena_fd), "--epoch", str(epoch), "--parent", str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(arena_fd,),
        process_group=0,
        env=os.environ | _ENVIRONMENT | channel.environment(),
    )
