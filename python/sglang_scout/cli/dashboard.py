"""``sglang-scout dashboard``: a live page of one decode server, read-only."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse

from sglang_scout.core.errors import ConfigError

DESCRIPTION = (
    "Serve a live page of one decode server, on this machine only: resident pages by layer, each layer's CPU compute "
    "ratio, waits, recalls and the CPU attention process. It reads the server's /server_info once a second. If the "
    "server has --api-key, put the key into the environment variable SCOUT_API_KEY."
)
PAGE = Path(__file__).with_name("dashboard.html")
HOST = "127.0.0.1"
TIMEOUT_S = 5.0
SHARED_FOR_S = 0.5  # a view serves all that ask so soon after; a page asks once a second
State = dict[str, Any]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    address = "address of the decode server, for example http://127.0.0.1:30001"
    parser.add_argument("--decode", required=True, metavar="URL", help=address)
    parser.add_argument("--port", type=int, default=8900, help="port of the page (default: 8900)")


def run(args: argparse.Namespace) -> int:
    if not args.decode.startswith(("http://", "https://")):
        raise ConfigError(f"--decode {args.decode!r}: not a URL; give it as http://HOST:PORT")
    url = f"http://{HOST}:{args.port}"
    text = json.dumps({"url": url}) if args.json else f"dashboard of {args.decode}: {url}"
    print(text, flush=True)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.get("/")(lambda: FileResponse(PAGE))
    app.get("/view")(Poller(args.decode).view)
    uvicorn.run(app, host=HOST, port=args.port, loop="uvloop", log_level="warning")
    return 0


class Poller:
    """Polls the server when a page asks, for any number of pages."""

    def __init__(self, decode_url: str) -> None:
        self._url = decode_url.rstrip("/")
        self._request = urllib.request.Request(self._url + "/server_info")
        if key := os.environ.get("SCOUT_API_KEY", "").strip():
            self._request.add_unredirected_header("Authorization", f"Bearer {key}")
        self._lock = threading.Lock()
        self._polled_at = -math.inf
        self._before: tuple[float, State] | None = None
        self._shown: State = {}

    def view(self) -> State:
        with self._lock:
            if time.monotonic() - self._polled_at >= SHARED_FOR_S:
                self._polled_at = time.monotonic()
                self._shown = self._poll()
            return self._shown

    def _poll(self) -> State:
        try:
            with DIRECT.open(self._request, timeout=TIMEOUT_S) as answer:
                state = json.load(answer)["internal_states"][0]["kv_offload"]
            state["resident_pages_by_layer"]  # a prefill server has none
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            return {"error": f"{self._url} {in_words(error)}"}
        now = time.monotonic()
        at, before = self._before or (now - 1.0, state)
        self._before = now, state
        return view(before, state, now - at)


def in_words(error: Exception) -> str:
    """Why there is no state, and what to do."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403):
            return "needs its --api-key; set SCOUT_API_KEY to it and start the dashboard again"
        return f"answers with status {error.code}; give --decode the address of a decode server"
    reason = getattr(error, "reason", error)
    if isinstance(reason, socket.gaierror):
        return "has a host name that this machine does not know; correct --decode"
    if isinstance(reason, ConnectionRefusedError):
        return "refuses connections; start the decode server, wait until it serves, or correct --decode"
    if isinstance(reason, TimeoutError):
        return f"has not answered in {TIMEOUT_S:g} s; check its log, and the network"
    if isinstance(reason, OSError | HTTPException):
        return f"cannot be reached ({reason}); check the network and --decode"
    return "is not a decode server with --kv-offload; give --decode the address of one"


def view(before: State, now: State, seconds: float) -> State:
    """Rates and values over the ``seconds`` between two polls of ``internal_states[0].kv_offload``, as JSON. Ratios are
    None without a step. A restarted server counts from zero."""
    layers, cpus = len(now["cpu_compute_ratio_by_layer"]), now["worker"]["cpus"]
    if now["steps"] < before["steps"]:
        nothing = {"cpu_compute_ratio_by_layer": [0.0] * layers, "worker": {"pages": 0}}
        before = dict.fromkeys(before, 0) | nothing

    def rate(key: str, unit: float = 1.0) -> float:
        return (now[key] - before[key]) / seconds / unit

    steps = now["steps"] - before["steps"]
    # A new process starts at 0.
    worker_pages = max(0, now["worker"]["pages"] - before["worker"]["pages"])
    host_pages = next(row for row in now["plan"] if row["what"] == "host pages")
    worker_bytes = worker_pages * host_pages["bytes"] / host_pages["count"] / layers
    # Summed over layers, equal for each. Ratios are since start.
    first, last = before["budget_pages"], now["budget_pages"]
    of_request = layers * (now["budget_tokens"] // now["page_size"])
    ratios = zip(*(x["cpu_compute_ratio_by_layer"] for x in (before, now)), strict=True)
    recent = [max(0.0, (b * last - a * first) / max(last - first, 1)) for a, b in ratios]
    shown = {key: now["worker"][key] for key in ("state", "restarts", "last_error")}
    return {
        "policy": now["policy"],
        "backend": now["backend"],
        "worker": shown | {"cpus": len(cpus)},
        "host_pages": {"used": now["host_pages_used"], "total": now["host_pages_total"]},
        "resident": now["resident_pages_by_layer"],
        "copying": now["copying_pages_by_layer"],
        "slots": now["resident_slots"] // layers,
        "cpu_ratio": recent if last > first else [None] * layers,
        "threshold": now["recall"].get("threshold"),
        "requests": (last - first) / (steps * of_request) if steps else 0,
        "steps_per_s": rate("steps"),
        "wait_share": rate("gpu_wait_us", 1e6),
        "recall_wait_share": rate("recall_wait_us", 1e6),
        "recall_bytes_per_s": rate("recall_bytes"),
        "worker_bytes_per_s_core": worker_bytes / seconds / max(1, len(cpus)),
        "fallback_pages_per_s": rate("fallback_pages"),
    }
