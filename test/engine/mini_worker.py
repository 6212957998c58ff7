"""A mini decode worker: real engine, stores and ops, without SGLang and without a worker process."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from page_weights import identity, pilot_weights
from sglang_scout.core.flags import parse_config
from sglang_scout.engine.digests import MARK_BYTES, DigestPool
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import HostPages, ModelShape, Parts, Sizes
from sglang_scout.ops.attend import attend_pages_reference
from sglang_scout.policy import Context, make_policy, policies

SIZE = 32
HIDDEN = 48  # of the layer inputs


def check_table(table):
    """No slot is lost or duplicated, and both directions of the map agree."""
    for layer in range(table.num_layers):
        free = table.metadata.free[layer, : table.num_free[layer]]
        states, slot_of = table.page_of[layer], table.slot_of[layer]
        pending = table.metadata.is_pending[layer]
        mapped, reserved = np.flatnonzero(states >= 0), (states < -1).sum()
        assert len(np.unique(free)) == len(free) and (states[free] == -1).all()
        assert (slot_of[states[mapped]] == mapped).all() and (slot_of >= 0).sum() == len(mapped)
        assert len(free) + len(mapped) + reserved == table.num_slots
        assert not (pending & (slot_of >= 0)).any() and pending.sum() <= reserved


class HereInstead:
    """Stands in for the worker with the reference op, and records its posts."""

    def __init__(self, shape: ModelShape, host: HostPages) -> None:
        self.shape, self.host = shape, host
        self.asked: list[tuple[int, np.ndarray]] = []
        self.queries: dict[int, torch.Tensor] = {}

    def post(self, layer, step, q, pages, n_pages):
        assert (np.sum(pages >= 0, axis=1) == n_pages).all()
        self.asked.append((layer, pages.copy()))
        self.queries[layer] = torch.from_numpy(q.copy())
        return layer, q.copy(), pages.copy()

    def wait(self, ticket, out, lse):
        layer, *asked = ticket
        q, pages = map(torch.from_numpy, asked)
        kv = self.host.k[layer], self.host.v[layer]
        got, got_lse = attend_pages_reference(q, *kv, pages, None, None, self.shape.scale)
        out[:], lse[:] = got.numpy(), got_lse.numpy()
        return SimpleNamespace(waited_us=1.0, fallback_pages=0)


@dataclass
class Request:
    slot: int
    pages: list[int]
    length: int  # tokens whose K and V are in the host pages
    end_tokens: int  # length that it may reach


class MiniWorker:
    """Drives :class:`StepEngine` with random keys, values and layer inputs.

    Args:
        budget_tokens, max_batch, resident_tokens, config: as the flags.
        around_missing: wraps the worker's stand-in.
        drift: how far the layer inputs move from step to step; 0 repeats the same query.
        rank, of_ranks, ranks: this rank's heads, and the connection to the others. Shards of one seed add up to the
            worker that has all heads.
    """

    def __init__(
        self,
        *,
        layers=3,
        heads=4,
        kv_heads=2,
        dim=64,
        pages=80,
        max_batch=4,
        budget_tokens=128,
        resident_tokens=None,
        dtype=torch.float32,
        seed=0,
        config="{}",
        drift=0.5,
        max_pages=120,
        policy="scout",
        tracer=None,
        around_missing=None,
        pool_rule=None,
        verify=True,
        step_log=None,
        rank=0,
        of_ranks=1,
        ranks=None,
        fp8=None,
    ):
        self.config = parse_config(
            policy=policy, policies=policies(), budget_tokens=budget_tokens, config=config
        )
        # Its own, as ranks run concurrently.
        self.random = torch.Generator().manual_seed(seed)
        self.rank, self.of_ranks, self.all_kv_heads = rank, of_ranks, kv_heads
        own = (heads // of_ranks, kv_heads // of_ranks)
        self.shape = ModelShape(layers, *own, dim, SIZE, dtype, dim**-0.5, fp8)
        self.max_batch = max_batch
        self.policy = self._policy()
        self.host = self._make_host(pages)
        budget = self.config.budget_pages
        slots = (resident_tokens or budget_tokens * max_batch) // SIZE + max_batch + budget
        self.missing = HereInstead(self.shape, self.host)
        weights = [self._randn(heads * dim, HIDDEN) * 0.4 for _ in range(layers)]
        self.weights = [w.chunk(of_ranks)[rank] for w in weights]
        missing = around_missing(self.missing) if around_missing else self.missing
        sizes = Sizes(budget, slots, max_batch, max_pages, self.config.lists(own[1]))
        self.digests = DigestPool(self.shape, pages, "cpu", pool_rule or self.policy.rule)
        stores = self.shape, sizes, self.host, self.digests
        self.engine = StepEngine(
            Parts(self.policy, *stores, tracer, ranks),
            [self._ahead(layer, self.policy.query.attends) for layer in range(layers)],
            self._worker(missing),
            verify,
            step_log,
        )
        self.table = self.engine.parts.table
        self.free_pages = list(range(1, pages))
        self.requests: list[Request] = []
        self.drift = drift
        self.hidden = self._randn(layers, max_batch, HIDDEN)
        self._digested: set[int] = set()  # pages whose digests were compared

    def _policy(self):
        """With random weights in place of those in files."""
        shape = self.shape
        sizes = shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim
        made = {"pilot": pilot_weights, "forecast": lambda *_: None}

        def load(_, kind):
            return made[kind](identity(*sizes))

        with mock.patch("sglang_scout.policy.load_weights", load):
            return make_policy(Context(self.config, shape.num_layers, 2 * shape.page_bytes))

    def _randn(self, *size):
        return torch.randn(size, generator=self.random)

    def _heads(self, *size):
        """K or V of this rank's heads, ``[*size, H, D]``."""
        found = self._randn(*size, self.all_kv_heads, self.shape.head_dim)
        return found.chunk(self.of_ranks, dim=-2)[self.rank].contiguous()

    def _make_host(self, pages):
        layers = range(self.shape.num_layers)
        kv = ([self._heads(pages * SIZE).to(self.shape.kv_dtype) for _ in layers] for _ in range(2))
        return HostPages(self.shape, *kv)

    def _worker(self, missing):
        return missing

    def _projector(self, layer):
        def project(x, positions):
            q = torch.nn.functional.linear(x, self.weights[layer])
            q = q.to(self.shape.dtype)
            return q.view(len(x), self.shape.num_q_heads, self.shape.head_dim)

        return project

    def _ahead(self, layer, attends):
        """The predicted query; or, if it only selects, one vector per KV head: the mean of its queries."""
        project, heads = self._projector(layer), self.shape.num_kv_heads
        return SimpleNamespace(
            weight_bytes=0,
            start=lambda x, residual: x + residual,
            finish=project if attends else lambda *x: project(*x).unflatten(1, (heads, -1)).mean(2),
        )

    def admit(self, length: int, *args, **kwargs) -> Request:
        """A request with ``length`` tokens of KV already in the host pages joins."""
        request = self.bring(length, *args, **kwargs)
        self.join(request)
        return request

    def bring(
        self, length: int, slot: int | None = None, arrive=lambda pages: None, max_new: int = 0
    ) -> Request:
        """Its KV arrives. ``arrive`` is called with its pages, to write what else arrives with them."""
        count = -(-length // SIZE)
        pages = [self.free_pages.pop(0) for _ in range(count)]
        taken = {r.slot for r in self.requests}
        if slot is None:
            slot = next(i for i in range(99) if i not in taken)
        request = Request(slot, pages, length, length + max_new)
        self.engine.pages.allocate_pages(np.array(pages, np.int64))
        for page in pages:
            for both in zip(self.host.k, self.host.v, strict=True):
                for half in both:
                    half[page] = self._heads(SIZE)
        arrive(np.array(pages, np.int64))
        return request

    def join(self, request: Request) -> None:
        self.requests.append(request)
        full = np.array(request.pages[: request.length // SIZE], np.int64)
        self.engine.requests.admit(request.slot, request.slot, request.end_tokens)
        self.engine.pages.arrived(full)

    def finish(self, request: Request) -> None:
        """It ends, or is aborted before it has joined."""
        if request in self.requests:
            self.requests.remove(request)
        self._digested -= set(request.pages)
        self.engine.pages.free_pages(np.array(request.pages, np.int64))
        self.free_pages.extend(request.pages)

    def run(self, steps: int, *lengths: int) -> None:
        """Requests of these lengths join, and ``steps`` steps are decoded."""
        for length in lengths:
            self.admit(length)
        for _ in range(steps):
            self.step()

    def step(self, extra_rows=0) -> list[torch.Tensor]:
        """One decode step over all requests. Returns each layer's output, and checks the appended token's location.

        ``extra_rows`` after the batch are padding.
        """
        for request in self.requests:
            request.length += 1
            if request.length > len(request.pages) * SIZE:
                request.pages.append(self.free_pages.pop(0))
                self.engine.pages.allocate_pages(np.array(request.pages[-1:], np.int64))
        rows = len(self.requests)
        longest = max(len(r.pages) for r in self.requests)
        table = np.zeros((rows, longest), np.int32)
        for row, request in enumerate(self.requests):
            table[row, : len(request.pages)] = request.pages
        self.engine.begin_step(
            table,
            np.array([r.slot for r in self.requests], np.int64),
            np.array([r.length for r in self.requests], np.int64),
        )
        self.check_digests()
        self.hidden = self.hidden + self.drift * self._randn(*self.hidden.shape)
        self.queries, self.outputs = [], []
        new = [self._new_kv(rows + extra_rows) for _ in range(self.shape.num_layers)]
        self._layers(self.hidden[:, : rows + extra_rows], new)
        self.engine.layer_output()
        for row, request in enumerate(self.requests):
            page, offset = divmod(request.length - 1, SIZE)
            for stored, (k, _) in zip(self.host.k, new, strict=True):
                appended = stored[request.pages[page], offset].float()
                assert torch.equal(appended, k[row].to(self.shape.kv_dtype).float())
        return self.outputs

    def _new_kv(self, rows: int) -> list[torch.Tensor]:
        """K and V of the step's tokens in one layer, ones in padding rows."""
        count = len(self.requests)
        half = [self._heads(count) for _ in range(2)]
        return [torch.cat([x, torch.ones(rows - count, *x.shape[1:])]) for x in half]

    def _layers(self, hidden, new):
        for layer, (k, v) in enumerate(new):
            q, out = self._layer(layer, hidden[layer], k, v)
            self.queries.append(q)
            self.outputs.append(out)

    def _layer(self, layer, x, k, v):
        half = x / 2
        self.engine.layer_input(layer, half, half, torch.zeros(len(x), dtype=torch.int64))
        half.fill_(torch.nan)  # a layer overwrites its input
        q = self._projector(layer)(x, None)
        return q, self.engine.attend(layer, q.to(self.shape.dtype), k, v)

    def check_digests(self, again: bool = False) -> None:
        """Compare digests with those built from the pages' keys: when a page is full, and ``again`` at the end."""
        full = {p for r in self.requests for p in r.pages[: (r.length - 1) // SIZE]}
        pages = torch.tensor(sorted(full & self._digested if again else full - self._digested))
        self._digested |= full
        if not len(pages):
            return
        expected = DigestPool(self.shape, self.host.num_pages, "cpu", self.engine.parts.policy.rule)
        expected.build(pages.numpy(), self.host)
        for both in zip(self.digests.parts, expected.parts, strict=True):
            built, again = (x[:, pages] for x in both)
            if expected.kind in ("mean16", "pilot"):
                dtype = self.shape.dtype if built.shape[-1] > MARK_BYTES else torch.int32
                built, again = built.view(dtype), again.view(dtype)
                torch.testing.assert_close(built, again, atol=1e-4, rtol=1e-2)
                continue
            # Bits of elements close to a threshold may differ by rounding, and those of a page's last two steps, 2 of
            # its 176 bytes.
            differ = (built != again).float().mean()
            assert differ <= {"minmax": 0, "pilot": 0.05}.get(expected.kind, 0.03)

    def dense(self, row: int, layer: int, tokens: list[int] | None = None) -> torch.Tensor:
        """Attention of a row over ``tokens``, or its whole context, with the step's real query."""
        request = self.requests[row]
        ids = torch.tensor(request.pages)
        k = self.host.k[layer][ids].flatten(0, 1)[: request.length].float()
        v = self.host.v[layer][ids].flatten(0, 1)[: request.length].float()
        if tokens is not None:
            k, v = k[tokens], v[tokens]
        group = self.shape.num_q_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = torch.einsum("hd,thd->ht", self.queries[layer][row], k) * self.shape.scale
        return torch.einsum("ht,thd->hd", logits.softmax(1), v)

    def close(self) -> None:
        self.check_digests(again=True)
        self.engine.close()


class _Copy(Future):
    def __init__(self, link, work):
        super().__init__()
        self.link, self.work = link, work

    def exception(self, timeout=None):
        if timeout is None:  # an unbounded wait
            self.link.run_until(self)
        return super().exception(0)


class SlowLink:
    """Replaces the copy thread of ``engine/recall.py``; copies stay in flight until :meth:`run`."""

    def __init__(self):
        self.waiting: list[_Copy] = []
        self.forced = 0  # copies that were waited for

    def submit(self, function, *args):
        copy = _Copy(self, lambda: function(*args))
        self.waiting.append(copy)
        return copy

    def run(self, copies: int) -> None:
        """The link completes ``copies`` copies, in order."""
        for _ in range(min(copies, len(self.waiting))):
            copy = self.waiting.pop(0)
            copy.set_result(copy.work())

    def run_until(self, copy: _Copy) -> None:
        while not copy.done():
            self.forced += 1
            self.run(1)

    def shutdown(self, wait=True):
        self.run(len(self.waiting))


def with_slow_link(worker) -> SlowLink:
    """Give a ``MiniWorker`` a slow link and zero patience."""
    worker.engine.recall.close()
    link = worker.engine.recall._side = SlowLink()
    residency = worker.engine.parts.policy.residency
    if residency.patience_us is not None:
        residency.patience_us = 0.0
    return link
