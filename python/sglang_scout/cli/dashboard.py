"""``sglang-scout dashboard``: a live page of one decode server, read-only."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse, StreamingResponse

from sglang_scout.cli.live_state import view
from sglang_scout.core.errors import ConfigError

DESCRIPTION = (
    "Serve a live page of one decode server, on this machine only: resident pages by layer, each layer's "
    "CPU compute ratio, waits, recalls and the CPU attention process. It reads the server's /server_info "
    "once a second, and sends no API key."
)
PAGE = Path(__file__).with_name("dashboard.html")
HOST = "127.0.0.1"
INTERVAL_S = 1.0
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
    # An open event stream would keep it from exiting.
    uvicorn.run(
        app(args.decode),
        host=HOST,
        port=args.port,
        loop="uvloop",
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    return 0


class Poller:
    """Polls the server once a second, for any number of viewers, and keeps the last event."""

    def __init__(self, decode_url: str) -> None:
        self._url = decode_url.rstrip("/") + "/server_info"
        self._before: tuple[float, dict[str, Any]] | None = None
        self._event: dict[str, Any] = {"error": "waiting for the decode server"}
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        while True:
            begin = time.monotonic()
            event = await asyncio.to_thread(self._poll)
            async with self._changed:
                self._event = event
                self._changed.notify_all()
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - begin)))

    def _poll(self) -> dict[str, Any]:
        try:
            with DIRECT.open(self._url, timeout=5.0) as answer:
                state = json.load(answer)["internal_states"][0].get("kv_offload")
        except (OSError, ValueError, LookupError) as error:
            return {"error": f"{self._url}: {error}"}
        if state is None or "worker" not in state:
            return {"error": f"{self._url}: not a decode server with --kv-offload"}
        now = time.monotonic()
        at, before = self._before or (now - INTERVAL_S, state)
        self._before = now, state
        return view(before, state, now - at)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, each with a view."""
        while True:
            yield f"data: {json.dumps(self._event)}\n\n"
            async with self._changed:
                await self._changed.wait()


def app(decode_url: str) -> FastAPI:
    """The page at ``/``, its events at ``/events``."""
    poller = Poller(decode_url)

    @contextlib.asynccontextmanager
    async def polling(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(poller.run())
        yield
        task.cancel()

    made = FastAPI(lifespan=polling, docs_url=None, redoc_url=None, openapi_url=None)

    @made.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE)

    @made.get("/events")
    def events() -> StreamingResponse:
        return StreamingResponse(poller.events(), media_type="text/event-stream")

    return made
