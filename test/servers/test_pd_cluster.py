"""The flags of a cluster's servers, and cleanup after a failed start."""

import sys

import pytest

from servers.pd_cluster import PDCluster
from servers.server_process import ServerFailed


def test_several_decode_servers_have_their_own_ports_and_flags(tmp_path):
    cluster = PDCluster(
        tmp_path, decode_args=["--a"], more_decodes={"other": ["--b"]}, log_dir=tmp_path
    )
    assert list(cluster.servers) == ["prefill", "decode", "other"]
    urls = {cluster.server_url(name) for name in (*cluster.servers, "router")}
    assert len(urls) == 4
    ports = {url.rpartition(":")[2] for url in urls}
    for server in cluster.servers.values():
        ports.add(server.command[server.command.index("--nccl-port") + 1])
    assert len(ports) == 4 + 3
    for name, flag, mode in (("decode", "--a", "decode"), ("other", "--b", "decode"),
                             ("prefill", "--port", "prefill")):  # fmt: skip
        command = cluster.servers[name].command
        assert flag in command and command[command.index("--disaggregation-mode") + 1] == mode
        assert cluster.server_url(name).endswith(":" + command[command.index("--port") + 1])
    cluster.stop()


def test_a_server_that_ends_at_its_start_ends_the_others_and_is_named(tmp_path):
    cluster = PDCluster(tmp_path, log_dir=tmp_path)
    sleeps, ends = "import time; time.sleep(600)", "raise SystemExit('no such flag')"
    for name, code in (("prefill", sleeps), ("decode", ends)):
        cluster.servers[name].command = [sys.executable, "-c", code]
    with pytest.raises(ServerFailed, match=r"(?s)decode server ended.*no such flag") as failure:
        with cluster:
            pytest.fail("started")
    assert str(tmp_path) in str(failure.value)
    assert cluster.processes() == {}
