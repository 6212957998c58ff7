"""No process of a server outlives what started it. Small Python programs stand in for servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from harness import wait_until
from servers.processes import CLUSTER_VARIABLE, children_of, processes_of
from servers.server_process import ServerProcess, stop_all

TEST = Path(__file__).resolve().parents[1]
SLEEP = "import time; time.sleep(100)"
# Starts a child in its own session, then sleeps: the child is no longer in our process group.
WITH_CHILD = (
    "import subprocess,sys;"
    f"subprocess.Popen([sys.executable,'-c',{SLEEP!r}],start_new_session=True);"
)
RENAMED = "import setproctitle; setproctitle.setproctitle('x'*2000); print('up',flush=True);"
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


def test_a_renamed_process_is_found_by_its_session(tmp_path, cluster_id):
    """setproctitle, as SGLang's schedulers use it, overwrites the environment that /proc shows."""
    renamed = server(tmp_path, cluster_id, RENAMED + SLEEP)
    renamed.start()
    wait_until("it runs", lambda: "up" in renamed.log(), 20)
    assert renamed.pid in processes_of(cluster_id, [renamed.pid])
    stop_all([renamed], cluster_id)
    assert processes_of(cluster_id, [renamed.pid]) == {}


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
