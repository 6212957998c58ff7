"""A worker process as its client holds it: directory, socket, process, pidfd.

The control socket lives in a fresh 0700 directory, which is removed as soon as the worker has said
hello: an established connection needs no name. So in steady state nothing in the file system
belongs to a worker, and nothing is left there whoever is killed. A directory whose owner died in
between is removed by its worker, or swept by the next start on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import zmq

from sglang_scout.core.errors import WorkerError
from sglang_scout.worker import messages as m

_PREFIX = "sglang-scout-"
_NAME = re.compile(r"sglang-scout-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-.*")
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of a unix socket
_KILL_LOG_S = 5.0
# The worker computes in its own threads; a BLAS that numpy brings along must not start any.
_WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerProcess:
    """A started worker process and the socket to it. Owned by one thread; ``end`` frees everything.

    The thread that makes it must outlast it: the kernel kills the worker when that thread ends.

    Args:
        epoch: its number, counted over restarts.
        arena_fd: memory file that the process inherits.
        context: ZMQ context of the owner.
        log: where refused messages are reported.

    Raises:
        WorkerError: the directory, the socket or the process cannot be made.
    """

    def __init__(
        self, epoch: int, arena_fd: int, context: zmq.Context, log: logging.Logger
    ) -> None:
        self.epoch = epoch
        self.token = secrets.token_hex(16)
        self.refused_messages = 0
        self._log = log
        self._peer: bytes | None = None
        self._directory: str | None = None
        # Undoes, last first, what has been made: here if the rest fails, otherwise in end().
        with contextlib.ExitStack() as made:
            try:
                self._directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{owner_name()}-")  # mode 0700
                made.callback(self._remove_directory)
                path = os.path.join(self._directory, "s")
                if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
                    raise WorkerError(
                        f"socket path {path} is too long; set TMPDIR to a shorter one"
                    )
                self._socket = context.socket(zmq.ROUTER)
                made.callback(self._socket.close, 0)
                self._socket.setsockopt(zmq.LINGER, 0)
                self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * m.MAX_MESSAGE_BYTES)
                self._socket.bind(f"ipc://{path}")
                self._process = _spawn(f"ipc://{path}", self.token, epoch, arena_fd)
                made.callback(self._kill)
                self._pidfd = os.pidfd_open(self._process.pid)
                made.callback(os.close, self._pidfd)
            except (OSError, zmq.ZMQError) as e:
                raise WorkerError(f"cannot start the worker process: {e}") from e
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._pidfd, zmq.POLLIN)
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
        self._poller.register(wake_fd, zmq.POLLIN)
        # One more millisecond: ZMQ rounds down, and a poll of 0 ms would spin.
        events = dict(self._poller.poll(int(timeout_s * 1000) + 1))
        received = self._receive() if self._socket in events else []
        if self._pidfd in events:
            # Its last words may still be on their way through ZMQ's own thread.
            while self._socket.poll(50):
                received += self._receive()
            return received, True
        return received, False

    def send(self, message: m.Message) -> None:
        """Sends to the worker that said hello; a worker that is gone is noticed elsewhere."""
        if self._peer is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([self._peer, m.encode(message)], zmq.NOBLOCK)

    def wants_cpu(self) -> bool:
        """Whether a thread that takes part in heartbeats could run if a CPU were free.

        A silent worker that wants one is starved: another in its place would be as well. Stopped
        threads, and ones that sleep or are stuck in the kernel, want none. The threads that compute
        do not count; they may be busy while the process is hung.
        """
        with contextlib.suppress(OSError):  # a thread, or all of them, may have ended
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                head, _, tail = (thread / "stat").read_text().rpartition(")")
                speaks = thread.name == str(self.pid) or "(ZMQbg" in head
                if speaks and tail.split()[0] == "R":
                    return True
        return False

    def exit_text(self) -> str:
        """How the process ended, for people. Call when it has ended."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"worker {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker {self.pid} ended with exit code {code}"

    def end(self) -> None:
        """Kills the process if it lives, waits for its death, frees everything; idempotent."""
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
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return received
            try:
                received.append(self._accept(frames))
            except WorkerError as e:
                self.refused_messages += 1
                self._log.warning("worker control: dropped a message: %s", e)

    def _accept(self, frames: list[zmq.Frame]) -> m.Message:
        if len(frames) != 2:
            raise WorkerError(f"message of {len(frames) - 1} parts, expected 1")
        message = m.decode(frames[1].buffer, m.FromWorker, self.token)
        peer = frames[0].bytes
        if isinstance(message, m.Hello):
            if self._peer is not None:
                raise WorkerError("a second Hello")
            if (message.epoch, message.pid) != (self.epoch, self._process.pid):
                raise WorkerError(
                    f"Hello of pid {message.pid} epoch {message.epoch}, expected "
                    f"{self._process.pid} and {self.epoch}"
                )
            self._peer = peer
            self._remove_directory()
        elif peer != self._peer:
            raise WorkerError(f"{type(message).__name__} from a peer that has not said hello")
        return message

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _spawn(endpoint: str, token: str, epoch: int, arena_fd: int) -> subprocess.Popen[bytes]:
    # -P: the working directory must not shadow modules. A process group of its own: signals that
    # the terminal sends are the decode server's to handle.
    command = [sys.executable, "-P", "-m", "sglang_scout.worker.main"]
    command += ["--fd", str(arena_fd), "--endpoint", endpoint]
    command += ["--epoch", str(epoch), "--parent", str(os.getpid())]
    # The token comes on standard input: a command line is everybody's to read.
    reading, writing = os.pipe()
    try:
        os.write(writing, token.encode())  # fits into a pipe, so it does not block
        return subprocess.Popen(
            command,
            stdin=reading,
            pass_fds=(arena_fd,),
            process_group=0,
            env=os.environ | _WORKER_ENVIRONMENT,
        )
    finally:
        os.close(reading)
        os.close(writing)


def owner_name() -> str:
    """This process in a directory's name: pid namespace, pid, start time in clock ticks, hex."""
    pid = os.getpid()
    return f"{_pid_namespace():x}-{pid:x}-{_start_ticks(pid):x}"


def sweep_directories() -> int:
    """Removes socket directories of dead owners. Returns how many.

    Only directories of this user and this pid namespace: a container that shares the temporary
    directory may own one whose pid means nothing here.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            namespace, pid, ticks = (int(number, 16) for number in match.groups())
            if namespace != _pid_namespace():
                continue
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                    continue
                if _start_ticks(pid) != ticks:
                    shutil.rmtree(entry.path)
                    removed += 1
    return removed


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_ticks(pid: int) -> int:
    """Start time of a process since boot; -1 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])
