"""A real pair of servers: what another user and a client can get, and the effect of a pause."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import (
    PDCluster,
    assert_same_tokens,
    random_prompts,
    scheduler_pid,
    wait_for_steps,
    wait_idle,
)
from other_user import NOBODY, as_user, connects, outcomes, sockets_of
from servers.group import flags
from servers.sglang_http import RequestFailed, http_json

pytestmark = pytest.mark.slow  # three servers, two minutes

# Attention to all pages with the real query: residency, which a retraction changes, does not change tokens.
CONFIG = {"exact_layers": [0, 1, 2, 3], "resident_tokens": 32768}
SCOUT = flags(kv_offload="scout", kv_offload_budget=2048, kv_offload_config=json.dumps(CONFIG))
GUARDED = flags(api_key="of-the-test")


@pytest.fixture(scope="module")
def servers(tiny_model):
    with PDCluster(
        tiny_model("qwen3"),
        {"guarded": GUARDED},
        server_args=SCOUT + flags(max_running_requests=16, max_total_tokens=49152),
    ) as running:
        yield running


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_socket_and_no_shared_memory(servers):
    """The temporary folder is open to all, as /tmp is. For memory see test/worker/test_other_user.py."""
    os.chmod(servers.scratch_dir, 0o755)
    pids = servers.processes()
    sockets = {name for pid in pids for name, listens in sockets_of(pid) if listens}
    named = {name for name in sockets if not name.startswith("@sglang-scout-")}
    assert named and all(os.path.exists(name) for name in named)
    tried = connects(sorted(named))
    assert set(as_user(0, lambda: outcomes(tried)).values()) == {"done"}, "the attempts are sound"
    shared = {
        path
        for pid in pids
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if (path := os.readlink(fd)).startswith("/dev/shm/") and os.path.exists(path)
    }
    assert shared
    tried |= {path: lambda path=path: open(path, "rb") for path in shared}
    assert set(as_user(NOBODY, lambda: outcomes(tried)).values()) == {"PermissionError"}
    assert servers.generate(random_prompts([300]), max_new_tokens=8)[0].output_ids


def test_the_worker_has_no_network(servers):
    for pid in (scheduler_pid(servers), servers.kv_offload()["worker"]["pid"]):
        links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        files = (Path(f"/proc/net/{kind}") for kind in ("tcp", "tcp6", "udp", "udp6"))
        rows = [row.split() for file in files for row in file.read_text().splitlines()[1:]]
        on_network = inodes & {row[9] for row in rows}
        assert bool(on_network) == (pid == scheduler_pid(servers))


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/chat/completions", "/pause_generation", "/flush_cache", "/server_info"],
)
def test_a_client_without_the_key_gets_nothing(servers, path):
    payload = None if path == "/server_info" else {}
    with pytest.raises(RequestFailed, match="status 401"):
        http_json(servers.server_url("guarded") + path, payload, timeout_s=30)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_costs_no_request_and_no_token(servers, mode):
    prompts = random_prompts([1500, 1300, 1100, 900], seed=31)
    expected = servers.generate(prompts, max_new_tokens=60)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(servers.generate, prompts, max_new_tokens=60)
        wait_for_steps(servers, 10)
        http_json(servers.server_url("decode") + "/pause_generation", {"mode": mode}, timeout_s=30)
        paused = servers.kv_offload()["steps"]
        assert servers.kv_offload()["steps"] == paused and not answers.done()
        http_json(servers.server_url("decode") + "/continue_generation", {}, timeout_s=30)
        assert_same_tokens(expected, answers.result(120))
    wait_idle(servers)
