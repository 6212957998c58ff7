"""The two halves of a request tell each other when one is refused or fails.

SGLang's router sends a request to both servers of a pair. If only one refuses it, say because its pool is smaller, the
other half would hold pages and wait until a timeout. So each decode server has a WebSocket to the bootstrap server that
a request names. Both servers tell each other the room of every request that ended with an error, and the decode server
that of every request that it has: the prefill server waits as long as that server is there, and no longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.utils.network import NetworkAddress

from sglang_scout.plugin.hooks import hook
from sglang_scout.plugin.requests import aborted, refuse

logger = logging.getLogger(__name__)

ROUTE = "/kv_offload/halves"
OTHER_HALF_S = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
"""How long a prefill server waits for a decode server that has not told that it has the other half."""
_MISSED = (
    f"No decode server has received this request within {OTHER_HALF_S} s. Send requests to the router, which sends "
    "each to both servers."
)
_CONNECT_S = 5.0
_RETRY_S = 1.0
MAX_ROOMS, MAX_TOLD = 2**16, 1024  # that are remembered; of them are told again to a new connection
_HEARTBEAT_S = 120.0  # for a host that is lost; much longer than a process may be busy


class Half(msgspec.Struct):
    """``nth``: of the requests of a room, which may be used again. ``status``: 0 while there is no error."""

    room: int
    nth: int
    status: int = 0
    message: str = ""


def parts_of(request: Any) -> list[Any]:
    """The requests of one prompt that SGLang has made of one of several."""
    return list(vars(request).get("_sub_obj_cache", {}).values())


@dataclass
class _Room:
    count: int = 0  # of requests here that named it
    # The half that has failed, here or there, until the other one has been seen to end.
    told: Half | None = None
    heard: Half | None = None
    there: tuple[Any, int] = None, 0  # connection to the decode server, its newest request


class Halves:
    """Of this HTTP process. It marks SGLang's requests of one prompt: ``kv_offload_nth``, as of :class:`Half`;
    ``kv_offload_sent``, to the scheduler; ``kv_offload_ended``, because the other half was."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._rooms: OrderedDict[int, _Room] = OrderedDict()
        self._sockets: dict[Any, asyncio.AbstractEventLoop] = {}
        self._links: dict[str, asyncio.Task[None]] = {}  # by the bootstrap server's address

    def meet(self, manager: Any, request: Any) -> None:
        """A valid ``request`` of one prompt. A decode server connects to the server of the other half. Raises
        ValueError if its room is in use, or as :func:`refuse` what the other half was answered, if it has failed."""
        self._manager, flags, room = manager, manager.server_args, request.bootstrap_room
        if room is None or request.bootstrap_host == FAKE_BOOTSTRAP_HOST:
            return
        known = self._room(room).heard
        if known and known.nth <= self._nth(request):
            self._room(room).heard = None
            request.kv_offload_ended = True
            refuse(request, known.status, known.message)
        if flags.disaggregation_mode == "decode":
            port = request.bootstrap_port or flags.disaggregation_bootstrap_port
            address = NetworkAddress(request.bootstrap_host, port).to_host_port_str()
            if address not in self._links:
                self._links[address] = asyncio.create_task(self._connect(address))
            self._send(Half(room, self._nth(request)))
        else:
            manager.event_loop.call_later(OTHER_HALF_S, self._miss, room, self._nth(request))
        if any(other is not request for other in self._of(room)):
            raise ValueError(f"bootstrap_room {room} is in use by another request; send a new one")

    def _room(self, number: int) -> _Room:
        if len(self._rooms) > MAX_ROOMS:
            self._rooms.popitem(last=False)
        return self._rooms.setdefault(number, _Room())

    def _nth(self, request: Any) -> int:
        if not hasattr(request, "kv_offload_nth"):
            room = self._room(request.bootstrap_room)
            request.kv_offload_nth = room.count = room.count + 1
        return int(request.kv_offload_nth)

    def _requests(self) -> list[Any]:
        return [state.obj for state in self._manager.rid_to_state.values()]

    def _of(self, room: int) -> list[Any]:
        """Those of one prompt."""
        return [one for one in self._requests() if getattr(one, "bootstrap_room", None) == room]

    async def _connect(self, address: str) -> None:
        try:
            url = f"http://{address}{ROUTE}"
            async with aiohttp.ClientSession() as session:  # which ignores http_proxy
                async with asyncio.timeout(_CONNECT_S):
                    socket = await session.ws_connect(url, heartbeat=_HEARTBEAT_S)
                await self._listen(socket)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            logger.info(f"--kv-offload: no connection for failed requests to {address}: {error!r}")
        await asyncio.sleep(_RETRY_S)  # then the next request tries again
        del self._links[address]

    async def accept(self, request: web.Request) -> web.WebSocketResponse:
        """Runs in the bootstrap server's thread."""
        socket = web.WebSocketResponse(heartbeat=_HEARTBEAT_S)
        await socket.prepare(request)
        await self._listen(socket)
        return socket

    async def _listen(self, socket: Any) -> None:
        self._sockets[socket] = asyncio.get_running_loop()
        told = [half for room in list(self._rooms.values()) if (half := room.told)][-MAX_TOLD:]
        if self._manager and self._manager.server_args.disaggregation_mode == "decode":
            mine = (one for one in self._requests() if hasattr(one, "kv_offload_nth"))
            told += [Half(one.bootstrap_room, one.kv_offload_nth) for one in mine]
        try:
            for half in told:
                await socket.send_bytes(msgspec.json.encode(half))
            async for message in socket:
                half = msgspec.json.decode(message.data, type=Half)
                if not half.status:
                    self._room(half.room).there = socket, half.nth
                elif not self._manager:  # no request yet
                    self._room(half.room).heard = half
                else:
                    self._manager.event_loop.call_soon_threadsafe(self._hear, half)
        except (msgspec.MsgspecError, OSError, TypeError) as error:
            what = "the connection to the other server of the pair failed"
            logger.info(f"--kv-offload: {what}: {error!r}; the next request opens a new one")
        finally:
            del self._sockets[socket]
            if self._manager:
                self._manager.event_loop.call_soon_threadsafe(self._lose, socket)
            await socket.close()

    def _send(self, half: Half) -> None:
        data = msgspec.json.encode(half)
        for socket, loop in list(self._sockets.items()):
            asyncio.run_coroutine_threadsafe(socket.send_bytes(data), loop)

    def _hear(self, half: Half) -> None:
        """The other half has ended: end this one, or remember it until this one comes."""
        room = self._room(half.room)
        if room.told and room.told.nth == half.nth:
            room.told = None
            return  # this one has ended too
        for request in self._of(half.room):
            if self._nth(request) >= half.nth and hasattr(request, "kv_offload_sent"):
                request.kv_offload_ended = True
                self._end(request, half.status, half.message)
                return
        room.heard = half

    def _lose(self, socket: Any) -> None:
        """A decode server has ended, or its connection."""
        for one in self._requests():
            if nth := getattr(one, "kv_offload_nth", None):
                link, newest = self._room(one.bootstrap_room).there
                if link is socket and nth <= newest:
                    gone = "The decode server is gone. Send the request again."
                    self._end(one, HTTPStatus.SERVICE_UNAVAILABLE, gone)

    def _miss(self, room: int, nth: int) -> None:
        link, newest = self._room(room).there
        if link in self._sockets and nth <= newest:
            return
        for request in self._of(room):
            if self._nth(request) == nth:
                self._end(request, HTTPStatus.SERVICE_UNAVAILABLE, _MISSED)

    def _end(self, request: Any, status: int, message: str) -> None:
        self._manager._dispatch_to_scheduler(AbortReq(rid=request.rid))
        self._manager._handle_abort_req(aborted(request.rid, status, message))

    def tell(self, request: Any, status: int, message: str) -> None:
        """``request``, of one prompt or several, was answered with an error."""
        number = getattr(request, "bootstrap_room", None)
        if isinstance(number, list):
            for part in parts_of(request):
                self.tell(part, status, message)
            return
        if not isinstance(number, int) or hasattr(request, "kv_offload_ended"):
            return
        room, nth = self._room(number), self._nth(request)
        if room.heard and room.heard.nth == nth:
            room.heard = None
            return
        if status not in (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE):
            status = HTTPStatus.BAD_REQUEST
        room.told = Half(number, nth, status, message[:2000])
        self._send(room.told)


halves = Halves()


@hook("disaggregation.common.conn.CommonKVBootstrapServer._setup_routes", "after")
def after_setup_routes(_, server) -> None:
    """Add a route by which the two servers tell each other about failed requests."""
    server.app.router.add_get(ROUTE, halves.accept)
