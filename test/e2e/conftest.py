"""A pair of servers shared by several files."""

import json

import pytest

from harness import SCOUT, STEADY, PDCluster
from servers.pd_cluster import flags

# Servers reach each other without it.
DEAD_PROXY = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9"
)
DEAD_PROXY |= {"no_proxy": "", "NO_PROXY": ""}


@pytest.fixture(scope="session")
def servers(tiny_model):
    """For files without their own; the last test of test_faults.py ends it."""
    with PDCluster(
        tiny_model("qwen3"),
        server_args=SCOUT + flags(kv_offload_config=json.dumps(STEADY)),
        decode_args=flags(max_total_tokens=32768),
        max_running_requests=16,
        max_total_tokens=49152,
        env=DEAD_PROXY,
    ) as running:
        yield running
