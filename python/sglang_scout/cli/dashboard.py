"""``sglang-scout dashboard``: a live page of one decode server, read-only."""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse

from sglang_scout.cli.live_state import view
from sglang_scout.core.errors import ConfigError

DESCRIPTION = (
    "Serve a live page of one decode server, on this machine only: resident pages by layer, each layer's "
    "CPU compute ratio, waits, recalls and the CPU attention process. It reads the server's /server_info "
    "once a second, and sends no API key."
)
PAGE = Path(__file__).with_name("dashboard.html")
HOST = "127.0.0.1"
SHARED_FOR_S = 0.5
"""A view serves all that ask so soon after; a page asks once a second."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decode",
        required=True,
        metavar="URL",
        help="address of the decode server, for example http://127.0.0.1:30001",
    )
    parser.add_argument("--port", type=int, default=8900, help="port of the page (default: 8900)")


def run(args: argparse.Namespace) -> int:
    """Serves until stopped. Returns 0."""
    if not args.decode.startswith(("http://", "https://")):
        raise ConfigError(f"--decode {args.decode!r}: not a URL; give it as http://HOST:PORT")
    url = f"http://{HOST}:{args.port}"
    print(
        json.dumps({"url": url}) if args.json else f"dashboard of {args.decode}: {url}", flush=True
    )
    uvicorn.run(app(args.decode), host=HOST, port=args.port, loop="uvloop", log_level="warning")
    return 0


class Poller:
    """Polls the server when a page asks, for any number of them."""

    def __init__(self, decode_url: str) -> None:
        self._url = decode_url.rstrip("/") + "/server_info"
        self._lock = threading.Lock()
        self._polled_at = -math.inf
        self._before: tuple[float, dict[str, Any]] | None = None
        self._shown: dict[str, Any] = {}

    def view(self) -> dict[str, Any]:
        """What the page shows, or an error."""
        with self._lock:
            if time.monotonic() - self._polled_at >= SHARED_FOR_S:
                self._polled_at = time.monotonic()
                self._shown = self._poll()
            return self._shown

    def _poll(self) -> dict[str, Any]:
        try:
            with DIRECT.open(self._url, timeout=5.0) as answer:
                state = json.load(answer)["internal_states"][0].get("kv_offload")
        except (OSError, ValueError, LookupError) as error:
            return {"error": f"{self._url}: {error}"}
        if state is None or "worker" not in state:
            return {"error": f"{self._url}: not a decode server with --kv-offload"}
        now = time.monotonic()
        at, before = self._before or (now - 1.0, state)
        self._before = now, state
        return view(before, state, now - at)


def app(decode_url: str) -> FastAPI:
    """The page at ``/``, its numbers at ``/view``."""
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    made.get("/")(lambda: FileResponse(PAGE))
    made.get("/view")(Poller(decode_url).view)
    return made
