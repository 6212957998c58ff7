"""Servers are started, found and ended reliably. Small Python programs stand in for them."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from harness import wait_until
from servers import server_process
from servers.processes import CLUSTER_VARIABLE, children_of, identities_of, processes_of
from servers.server_process import (
    LOCKED_SETTLE_S,
    MOONCAKE_PORTS,
    SETTLE_S,
    ServerFailed,
    ServerProcess,
    free_ports,
    settle_s_of,
    stop_all,
)

TEST = Path(__file__).resolve().parents[1]
SLEEP = "import time; time.sleep(100)"
# Starts a child in its own session, then sleeps: the child is no longer in our process group.
WITH_CHILD = (
    "import subprocess,sys;"
    f"subprocess.Popen([sys.executable,'-c',{SLEEP!r}],start_new_session=True);"
)
RENAMED = "import setproctitle; setproctitle.setproctitle('x'*2000); print('up',flush=True);"
# At SIGTERM its first thread ends and another lives on, as while much memory is freed.
ENDING = (
    "import ctypes,signal,threading,time;threading.Thread(target=time.sleep,args=(100,)).start();"
    "signal.signal(15,lambda *_: ctypes.CDLL(None).syscall(60,0));print('up',flush=True);time.sleep(99)"
)
LAUNCHER = """
import os, sys, time
from pathlib import Path
log, program = sys.argv[1:]
from servers.server_process import ServerProcess
command = [sys.executable, "-c", program]
ServerProcess("small", command, dict(os.environ), Path(log)).start()
print("started", flush=True)
time.sleep(100)
"""


@pytest.fixture
def cluster_id():
    """Ends leftovers, also of a failed test."""
    name = uuid.uuid4().hex
    yield name
    for pid in processes_of(name):
        os.kill(pid, signal.SIGKILL)


def server(tmp_path: Path, cluster_id: str, program: str, name: str = "small") -> ServerProcess:
    environment = {**os.environ, CLUSTER_VARIABLE: cluster_id}
    return ServerProcess(
        name, [sys.executable, "-c", program], environment, tmp_path / f"{name}.log"
    )


def test_an_ended_server_is_named_with_its_log(tmp_path, cluster_id):
    broken = server(tmp_path, cluster_id, "print('out of luck'); raise SystemExit(7)")
    broken.start()
    assert broken.wait(20)
    with pytest.raises(ServerFailed, match="small server ended with exit code 7") as failure:
        broken.check()
    assert "out of luck" in str(failure.value) and str(broken.log_path) in str(failure.value)


def test_children_are_found_and_ended(tmp_path, cluster_id):
    parent = server(tmp_path, cluster_id, WITH_CHILD + SLEEP)
    parent.start()
    wait_until("parent and child run", lambda: len(processes_of(cluster_id)) == 2, 20)
    assert children_of(parent.pid) == [pid for pid in processes_of(cluster_id) if pid != parent.pid]
    outlived = stop_all([parent], cluster_id, settle_s=0.3)
    assert len(outlived) == 1, "the child does not notice its parent's end, so it had to be killed"
    assert processes_of(cluster_id) == {}
    assert parent.exit_code == -signal.SIGKILL
    assert stop_all([parent], cluster_id) == {}, "a second stop finds nothing to do"


def test_a_server_is_started_again_only_when_all_of_it_has_ended(tmp_path, cluster_id, monkeypatch):
    monkeypatch.setattr(server_process, "SETTLE_S", 0.5)
    again = server(tmp_path, cluster_id, RENAMED + SLEEP)
    again.start()
    wait_until("it runs", lambda: "up" in again.log(), 20)
    with pytest.raises(ServerFailed, match="of the small server these still run"):
        again.restart()
    first = again.pid
    again.signal(signal.SIGKILL)
    again.restart()
    wait_until("it runs again", lambda: "up" in again.log(), 20)
    assert again.pid != first and again.exit_code is None
    stop_all([again], cluster_id)


def test_a_renamed_process_is_found_by_its_session(tmp_path, cluster_id):
    """setproctitle, as SGLang's schedulers use it, overwrites the environment that /proc shows."""
    renamed = server(tmp_path, cluster_id, RENAMED + SLEEP)
    renamed.start()
    wait_until("it runs", lambda: "up" in renamed.log(), 20)
    assert renamed.pid in processes_of(cluster_id, [renamed.pid])
    stop_all([renamed], cluster_id)
    assert processes_of(cluster_id, [renamed.pid]) == {}


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="ends a thread by its system call number"
)
def test_a_process_whose_threads_still_end_has_not_ended(tmp_path, cluster_id):
    child = f"import subprocess,sys;subprocess.Popen([sys.executable,'-c',{ENDING!r}],start_new_session=True);"
    parent = server(tmp_path, cluster_id, child + SLEEP)
    parent.start()
    wait_until("the child runs", lambda: "up" in parent.log(), 20)
    [pid] = children_of(parent.pid)
    known = [found for found in identities_of(cluster_id) if found[0] == pid]
    os.kill(pid, signal.SIGTERM)
    state = Path(f"/proc/{pid}/stat")
    wait_until("its first thread has ended", lambda: ") Z " in state.read_text(), 20)
    # /proc no longer shows its cluster; known pids still find it.
    assert processes_of(cluster_id, known=known).keys() == {parent.pid, pid}
    os.kill(pid, signal.SIGKILL)
    wait_until("the other one too", lambda: pid not in processes_of(cluster_id, known=known), 20)
    stop_all([parent], cluster_id)


def test_a_pid_that_has_become_another_process_s_is_not_known(cluster_id):
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as unrelated:
        try:
            pid = unrelated.pid
            started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            assert processes_of(cluster_id, known=[(pid, started)]).keys() == {pid}
            assert processes_of(cluster_id, known=[(pid, started - 1)]) == {}
        finally:
            unrelated.kill()


def test_servers_of_a_gpu_have_longer_to_end():
    assert settle_s_of("cpu") == settle_s_of("cpu", None) == SETTLE_S < LOCKED_SETTLE_S
    assert settle_s_of("cuda") == settle_s_of("cuda", None) == LOCKED_SETTLE_S
    assert settle_s_of("cpu", "cuda") == LOCKED_SETTLE_S


def test_servers_die_with_their_launcher(tmp_path, cluster_id):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "small.log"), SLEEP],
        env={**os.environ, CLUSTER_VARIABLE: cluster_id, "PYTHONPATH": str(TEST)},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        wait_until("the server runs", lambda: len(processes_of(cluster_id)) == 2, 20)
        process.kill()
    wait_until("the server is gone too", lambda: processes_of(cluster_id) == {}, 10)


def test_free_ports_can_be_bound():
    ports = free_ports(200)
    assert len(set(ports)) == 200 and not set(ports) & set(MOONCAKE_PORTS)
    sockets = [socket.socket() for _ in ports]
    for held, port in zip(sockets, ports, strict=True):
        held.bind(("127.0.0.1", port))
    for held in sockets:
        held.close()
