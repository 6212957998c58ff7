"""A stand-alone server: started, monitored and cleaned up, without SGLang."""

import os
import sys

import pytest

from servers.processes import CLUSTER_VARIABLE, processes_of
from servers.server_process import ServerFailed
from servers.single_server import SingleServer

ANSWERS = (
    "import sys; from http.server import *;"
    "HTTPServer(('127.0.0.1', int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()"
)
SLEEPS = "import time; time.sleep(600)"


def single(tmp_path, code, *, timeout_s=20.0):
    server = SingleServer(
        "stand-in", tmp_path, ["--page-size", "32"], device="cpu", log=tmp_path / "log",
        environment={"MORE": "1"}, ready_timeout_s=timeout_s,
    )  # fmt: skip
    wanted = ["-m", "sglang.launch_server", "--model-path", str(tmp_path), "--page-size", "32"]
    assert server.process.command[1:7] == wanted
    assert server.process.env["MORE"] == "1" and server.process.env["CUDA_VISIBLE_DEVICES"] == ""
    port = server.url.rpartition(":")[2]
    server.process.command = [sys.executable, "-c", code, port]
    return server


def left_behind(server):
    return processes_of(server.process.env[CLUSTER_VARIABLE])


def test_it_answers_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The stand-in has no /health; a file of that name is one.
    (tmp_path / "health").write_text("")
    server = single(tmp_path, ANSWERS)
    scratch = server.process.env["TMPDIR"]
    with server:
        assert left_behind(server) and os.path.isdir(scratch)
    assert not left_behind(server)
    assert not os.path.exists(scratch)
    server.stop()


def test_one_that_stays_silent_is_given_up_and_ended(tmp_path):
    server = single(tmp_path, SLEEPS, timeout_s=0.6)
    with pytest.raises(ServerFailed, match=r"not healthy within \d+ s \(.*/health: .*refused"):
        server.__enter__()
    assert not left_behind(server)
