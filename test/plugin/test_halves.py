"""Two HTTP processes that tell each other of failed requests, over a real socket; on real servers:
test/e2e/test_bad_requests.py."""

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from aiohttp import test_utils, web
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_scout.plugin import halves
from sglang_scout.plugin.halves import ROUTE, Halves


class Server:
    """Of a pair; stands for SGLang's TokenizerManager."""

    def __init__(self, mode):
        self.halves, self.ended = Halves(), {}
        self.server_args = SimpleNamespace(disaggregation_mode=mode)
        self.event_loop = asyncio.get_running_loop()
        self.rid_to_state = {}

    def take(self, room, rid, port):
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        request = GenerateReqInput(input_ids=[5], rid=rid, **place)
        request.normalize_batch_and_arguments()
        self.rid_to_state[rid] = SimpleNamespace(obj=request)
        try:
            self.halves.meet(self, request)
        except (ValueError, HTTPException):
            del self.rid_to_state[rid]
            raise
        request.kv_offload_sent = True
        return request

    def fail(self, request, status=400, message="too long"):
        del self.rid_to_state[request.rid]
        self.halves.tell(request, status, message)

    def _dispatch_to_scheduler(self, abort):
        assert abort.rid in self.rid_to_state

    def _handle_abort_req(self, abort):
        request, reason = self.rid_to_state.pop(abort.rid).obj, abort.finished_reason
        self.ended[abort.rid] = reason["status_code"], reason["message"]
        self.halves.tell(request, *self.ended[abort.rid])  # as its answer would be; nobody hears it


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def with_a_pair(test):
    """Calls it with a prefill server, a decode server and a port where the first one listens."""

    async def serve():
        prefill, decode = Server("prefill"), Server("decode")
        app = web.Application()
        app.router.add_get(ROUTE, prefill.halves.accept)
        async with test_utils.TestServer(app) as listening:
            try:
                await test(prefill, decode, listening.port)
            finally:
                for link in decode.halves._links.values():
                    link.cancel()

    made = lambda: asyncio.run(serve())  # noqa: E731
    made.__name__ = test.__name__
    return made


@with_a_pair
async def test_the_other_half_ends_with_the_same_answer(prefill, decode, port):
    for one, other in ((prefill, decode), (decode, prefill)):
        for status in (400, 503):
            request, _ = one.take(1, "a", port), other.take(1, "b", port)
            other.take(2, "c", port)
            one.fail(request, status)
            await until(lambda other=other: "b" in other.ended)
            assert other.ended.pop("b") == (status, "too long") and not other.ended
            assert list(other.rid_to_state) == ["c"]


@with_a_pair
async def test_a_half_that_comes_later_is_refused_and_the_next_of_the_room_is_not(
    prefill, decode, port
):
    prefill.fail(prefill.take(1, "a", port))  # before anybody is connected
    decode.take(9, "x", port)  # connects
    await until(lambda: decode.halves._room(1).heard)
    with pytest.raises(ValueError, match="too long"):
        decode.take(1, "b", port)
    assert decode.take(1, "c", port) and prefill.take(1, "d", port)


@with_a_pair
async def test_two_halves_that_fail_by_themselves_leave_nothing(prefill, decode, port):
    decode.take(9, "x", port)
    await until(lambda: decode.halves._sockets)
    for server in (prefill, decode):
        server.fail(server.take(1, "a", port))
    rooms = prefill.halves._room(1), decode.halves._room(1)
    await until(lambda: not any(room.told for room in rooms))
    assert not any(room.heard for room in rooms)


@with_a_pair
async def test_a_room_in_use_is_refused_and_only_the_second_half_ends(prefill, decode, port):
    decode.take(1, "a", port)
    first = prefill.take(1, "a", port)
    del prefill.rid_to_state[first.rid]  # it has its token
    prefill.take(1, "b", port)
    with pytest.raises(ValueError, match="room 1 is in use") as refusal:
        decode.take(1, "b", port)
    second = GenerateReqInput(input_ids=[5], bootstrap_room=1)
    second.kv_offload_nth = 2
    decode.halves.tell(second, 400, str(refusal.value))
    await until(lambda: prefill.ended)
    assert list(prefill.ended) == ["b"] and list(decode.rid_to_state) == ["a"]


@with_a_pair
async def test_a_decode_server_that_ends_ends_what_it_had(prefill, decode, port):
    decode.take(1, "a", port)
    prefill.take(1, "a", port), prefill.take(2, "of another server", port)
    await until(lambda: prefill.halves._room(1).there[1])
    for link in decode.halves._links.values():
        link.cancel()
    await until(lambda: prefill.ended)
    assert prefill.ended == {"a": (503, "The decode server is gone. Send the request again.")}


@with_a_pair
async def test_a_half_whose_other_half_never_comes_ends(prefill, decode, port):
    with patch.object(halves, "OTHER_HALF_S", 0.5):
        decode.take(1, "a", port)
        prefill.take(1, "a", port), prefill.take(2, "b", port)
    await until(lambda: prefill.ended)
    assert list(prefill.ended) == ["b"] and prefill.ended["b"][0] == 503
