"""A pair of servers shared by several files."""

import json

import pytest

from harness import PDCluster
from servers.pd_cluster import flags

# Recall in every step and room for everything: a request's residency then depends only on its own history, so its
# tokens are deterministic, and a difference is a fault.
CONFIG = {"recall": "fixed", "recall_interval": 1, "resident_tokens": 32768}
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
        server_args=flags(
            kv_offload="scout", kv_offload_budget=128, kv_offload_config=json.dumps(CONFIG)
        ),
        decode_args=flags(max_total_tokens=32768),
        max_running_requests=16,
        max_total_tokens=49152,
        env=DEAD_PROXY,
    ) as running:
        yield running
