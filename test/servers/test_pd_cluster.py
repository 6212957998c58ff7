"""What a cluster's servers are started with."""

from servers.pd_cluster import PDCluster


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
