"""``sglang-scout dashboard`` as a process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from servers.pd_cluster import HOST
from servers.server_process import free_ports
from servers.sglang_http import DIRECT


@contextlib.contextmanager
def dashboard(decode_url: str) -> Iterator[str]:
    """Its URL, once it answers."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "sglang_scout.cli", "dashboard", "--json"]
    command += ["--decode", decode_url, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = json.loads(process.stdout.readline())["url"]
    assert url == f"http://{HOST}:{port}"
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            DIRECT.open(url, timeout=5).close()
            break
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    try:
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        process.stdout.close()
