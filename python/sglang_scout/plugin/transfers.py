"""The KV transfer between the servers of a pair: K and V, digests and hints; and what SGLang's does wrong.

Digests go through the KV transfer itself: SGLang halves the list of buffers into keys and values, so ``[K.., first..,
V.., second..]`` carries the two parts of a page's digest with its K and V, each buffer with its own item length. Those
of hints (``engine/digest_pool.py``) follow, if any. Groups 0, 1 and 2 are K and V, digests, hints.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import resource
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll

from sglang_scout.engine.digest_pool import has_hint
from sglang_scout.plugin.hooks import hook

logger = logging.getLogger(__name__)

HOLD_S = 2.0
"""Longer than the prefill server may still write to the pages of an ended request: one chunk of a prompt."""
_ANSWER_S = 0.05  # a step's time; a server that is well answers sooner
_PROBE_S = 2.0
_KV = "disaggregation.common.conn.CommonKV"
_MOONCAKE = "disaggregation.mooncake.conn.MooncakeKVManager"
_warn_once = functools.cache(logger.warning)


def _num_layers(item_lens: list[int]) -> int:
    return item_lens.count(item_lens[0]) // 2  # those of K and V are equal, all others much smaller


def same_items(items: list[int], target: list[int], layers: int, group: int) -> bool:
    """Whether the buffers of digests and of ``group`` at ``target`` have the item bytes of ``items``: each part of a
    group is one allocation, in which a layer has one item per page of that server."""
    if layers == 1:
        return False
    sizes = [n for g in (1, group) for n in of_groups(items, layers, g)[::layers]]
    starts = [of_groups(target, layers, g) for g in (1, group)]
    lengths = [x[i + 1] - x[i] for x in starts for i in (0, layers)]
    return all(
        0 < n * sizes[0] == lengths[0] * size for n, size in zip(lengths, sizes, strict=True)
    )


def of_groups(values: list[int], layers: int, first: int, count: int = 1) -> list[int]:
    """The part of ``count`` groups from ``first`` on, of a list made by :func:`with_digests`."""
    middle, begin, end = len(values) // 2, first * layers, (first + count) * layers
    return values[begin:end] + values[middle + begin : middle + end]


def _same_layers(here: int, there: int, layers: int) -> bool:
    """Whether ``there`` is a count of buffers of as many layers, with or without digests and hints. An exception would
    end SGLang's transfers to all decode servers, a result of -1 only those to this one."""
    same = there in (2 * layers, 4 * layers, 6 * layers)
    if not same:
        logger.error(
            f"--kv-offload: this server has {here} KV buffers and the decode server {there}, so no KV is sent: the two "
            "serve different models, or only one uses pipeline parallelism; give both the same --model-path and no "
            "--pp-size"
        )
    return same


@hook(f"{_MOONCAKE}._send_kvcache_generic", "around", roles="prefill")
def around_send_kvcache(original, manager, *args, **kwargs) -> int:
    """Omit the digests for a decode server without the flag, or with digests of another size; of hints, send only the
    prompt's.

    SGLang would pair V with digests, and takes KV of another dtype. A hint is in the row of its prompt's last page.
    """
    source, target, items = (kwargs[x] for x in ("src_data_ptrs", "dst_data_ptrs", "item_lens"))
    if kwargs.get("state_type") is not None or source != manager.kv_args.kv_data_ptrs:
        return original(manager, *args, **kwargs)
    layers, flags = _num_layers(items), manager.server_args
    there = manager.decode_kv_args_table[kwargs["mooncake_session_id"]].dst_kv_item_len
    if items[0] != there:
        logger.error(
            f"--kv-cache-dtype {flags.kv_cache_dtype}, --dtype {flags.dtype}: K of a page takes {items[0]} bytes here "
            f"and {there} on the decode server, so no KV is sent; give both servers the same flags"
        )
        return -1
    if not _same_layers(len(source), len(target), layers):
        return -1
    common = min(len(source), len(target)) // (2 * layers)
    if common > 1 and not same_items(items, target, layers, 1):
        _warn_once(
            "--kv-offload: the decode server has another `digest` in --kv-offload-config, so it gets no digests and "
            "computes its own; set the same on both servers"
        )
        common = 1

    def send(first: int, count: int, **others: Any) -> int:
        for name in ("src_data_ptrs", "item_lens", "dst_data_ptrs"):
            others[name] = of_groups(kwargs[name], layers, first, count)
        return original(manager, *args, **kwargs | others)

    if status := send(0, min(common, 2)):
        return status
    if common < 3 or not same_items(items, target, layers, 2):
        return 0
    last = {name: kwargs[name][-1:] for name in ("prefill_data_indices", "dst_data_indices")}
    row = (of_groups(values, layers, 2)[0] for values in (source, items))
    # No hint before the end of a prompt.
    return send(2, 1, **last) if has_hint(*row, int(last["prefill_data_indices"][0])) else 0


@hook(f"{_MOONCAKE}.send_kvcache_slice", "around", roles="prefill")
def around_send_kvcache_slice(
    original, manager, session: str, pages, target: list[int], *args, **kwargs
) -> int:
    """Omit the digests for a decode server with another `--tp-size`.

    It computes them. SGLang slices every buffer of the list by heads as if it held K or V.
    """
    infos, layers = manager.kv_args, _num_layers(manager.kv_args.kv_item_lens)
    if not _same_layers(len(infos.kv_data_ptrs), len(target), layers):
        return -1
    if len(set(infos.kv_item_lens)) > 1:
        manager, infos = copy.copy(manager), copy.copy(infos)
        infos.kv_data_ptrs = of_groups(infos.kv_data_ptrs, layers, 0)
        manager.kv_args = infos
        target = of_groups(target, layers, 0)
    return original(manager, session, pages, target, *args, **kwargs)


@hook(f"{_KV}Manager.__init__", "before")
def before_kv_manager(*_, **__) -> None:
    """Do not ask the other server of the pair through a proxy."""
    # The model is loaded: from here on this process talks to other servers only.
    os.environ["no_proxy"] = "*"


@hook(
    "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_register",
    "around",
)
def around_batch_register(original, engine, pointers: list[int], lengths: list[int]) -> int:
    """End the server if the transfer engine rejects its memory; SGLang ignores that, and every transfer would fail.

    https://github.com/sgl-project/sglang/pull/33264 does so too.
    """
    error = original(engine, pointers, lengths)
    if not error:
        return error
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    raise RuntimeError(
        f"--kv-offload: the transfer engine cannot register {len(pointers)} buffers of "
        f"{sum(lengths) / 2**30:.2f} GiB (error {error}; its own log lines above name the first one), so no KV can be "
        f"transferred. RDMA locks them in memory: the limit on locked memory is {locked}; make it unlimited (ulimit "
        "-l, LimitMEMLOCK of a service, --ulimit memlock=-1 of a container). The network device must have room for "
        "them: lower --kv-offload-host-gb, or raise its limits (max_mr and max_mr_size in ibv_devinfo -v). Buffers on "
        "a GPU (digests on a decode server, everything on a prefill server) also need the kernel module "
        "nvidia_peermem, or a mooncake with CUDA and WITH_NVIDIA_PEERMEM=0. To work without RDMA, set "
        "--disaggregation-transfer-backend mooncake_tcp"
    )


@hook({"0.5.15.post1": f"{_KV}Receiver._connect"}, "around", roles="decode")
def around_connect(original, receiver, endpoint: str, is_ipv6: bool = False):
    """Do not block forever on a message to a prefill server that is gone.

    SGLang's PUSH sockets do not reconnect, and one that has lost its peer blocks in ``send``, holding a lock that the
    heartbeat thread waits for. A new one queues messages. Mended by https://github.com/sgl-project/sglang/pull/31144.
    """
    sock, lock = original(receiver, endpoint, is_ipv6)
    with lock:
        if sock.poll(0, zmq.POLLOUT):
            return sock, lock
    receiver.disconnect_endpoint(endpoint)
    return original(receiver, endpoint, is_ipv6)


@hook(f"{_KV}Manager.try_ensure_parallel_info", "around", roles="decode")
def around_ensure_parallel_info(original, manager, address: str) -> bool:
    """Ask a prefill server for its ranks without blocking the steps of other requests.

    SGLang asks in the scheduler's thread, for 5 s if there is no answer, each second. It raises if the servers differ,
    for example in page size; here the requests of this address fail.
    """
    if address in manager.prefill_info_table:
        return True
    questions: dict[str, Future[bool]] = vars(manager).setdefault("kv_offload_questions", {})
    is_new = address not in questions
    if is_new:
        questions[address] = ThreadPoolExecutor(1).submit(original, manager, address)
    try:
        answer = questions[address].result(_ANSWER_S if is_new else 0)
    except TimeoutError:
        return False
    except Exception as error:
        answer = False
        logger.error("--kv-offload: %s", error)
        for room in list(manager.addr_to_rooms_tracker[address]):
            manager.record_failure(room, str(error))
            manager.update_status(room, KVPoll.Failed)
    del questions[address]
    return answer


@hook(f"{_MOONCAKE}._on_heartbeat_success", "after", roles="decode")
def after_heartbeat_success(_, manager, address: str) -> None:
    """Notice that a prefill server was replaced between two heartbeats.

    Its bootstrap server at ``address`` answers, but nothing listens where its schedulers were.
    """
    with manager.connection_lock:
        pool = list(manager.connection_pool.items())
    for info in (info for key, infos in pool if key.startswith(f"{address}_") for info in infos):
        try:
            socket.create_connection((info["rank_ip"], info["rank_port"]), _PROBE_S).close()
        except ConnectionRefusedError:
            manager._handle_node_failure(address)
            return
        except OSError:  # slow, or no descriptor left: not proof that it is gone
            pass


@hook("disaggregation.utils._poll_with_failure_injection", "around", roles="decode")
def around_poll(original, receivers: Sequence[Any]) -> list[int]:
    """Notify the prefill server of an aborted transfer, and free its pages once they are no longer written.

    SGLang frees them at once, and another request may get them; here the transfer goes on for ``HOLD_S``.
    """
    return [_kept(*polled) for polled in zip(receivers, original(receivers), strict=True)]


def _kept(receiver: Any, status: int) -> int:
    if status != KVPoll.Failed or getattr(receiver, "init_time", None) is None:  # no page was named
        return status
    if "kv_offload_failed_s" not in vars(receiver):
        receiver.kv_offload_failed_s = time.monotonic()
        receiver.conclude_state = KVPoll.Failed
        # SGLang does not notify the prefill server if this side gave up: it would write much later.
        if not receiver.abort_notified:
            receiver._send_abort_notification()
            receiver.abort_notified = True
    held = time.monotonic() - receiver.kv_offload_failed_s < HOLD_S
    return int(KVPoll.Transferring if held else KVPoll.Failed)


@hook(f"{_KV}Manager._connect", "around", roles="prefill")
def around_connect_to_decode(original, manager, *args, **kwargs) -> SimpleNamespace:
    """Serialise messages, as several threads share a socket; survive the loss of a decode server.

    Parts of two messages could merge. If sending raised, the thread would end, and with it the transfers to all others.
    """
    sock = original(manager, *args, **kwargs)

    def send_multipart(parts: Sequence[bytes]) -> None:
        try:
            with manager._socket_lock:
                sock.send_multipart(parts)
        except zmq.ZMQError as error:
            lost = "--kv-offload: a message to a decode server that is gone was lost: %s"
            logger.error(lost, error)

    return SimpleNamespace(send_multipart=send_multipart)
