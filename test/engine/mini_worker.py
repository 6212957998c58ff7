"""A mini decode worker: real engine, stores and ops, without SGLang and without a worker process."""

from __future__ import annotations

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
from sglang_scout.policy import Context, make_policy, policies
from stand_ins import HereInstead

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


@dataclass
class Request:
    slot: int
    pages: list[int]
    length: int  # tokens whose K and V are in the host pages
    end_tokens: int  # length that it may reach


@dataclass
class Settings:
    """Sizes of the model, and of a rank of its server; ``budget_tokens`` to ``config`` as the flags.

    Attributes:
        drift: how far the layer inputs move from step to step; 0 repeats the same query.
        rank, of_ranks: this rank's heads. Shards of one seed add up to the worker that has all heads.
    """

    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    fp8: torch.dtype | None = None
    pages: int = 80
    max_pages: int = 120
    max_batch: int = 4
    budget_tokens: int = 128
    resident_tokens: int | None = None
    policy: str = "scout"
    config: str = "{}"
    seed: int = 0
    drift: float = 0.5
    rank: int = 0
    of_ranks: int = 1


class MiniWorker:
    """Drives :class:`StepEngine` with random keys, values and layer inputs; ``around_missing`` wraps the worker's
    stand-in, ``settings`` are those of :class:`Settings`."""

    def __init__(
        self,
        *,
        tracer=None,
        ranks=None,
        verify=True,
        step_log=None,
        around_missing=lambda missing: missing,
        **settings,
    ):
        self.settings = of = Settings(**settings)
        flags = {"policy": of.policy, "budget_tokens": of.budget_tokens, "config": of.config}
        self.config = parse_config(policies=policies(), **flags)
        # Its own, as ranks run concurrently.
        self.random = torch.Generator().manual_seed(of.seed)
        own = of.heads // of.of_ranks, of.kv_heads // of.of_ranks
        form = SIZE, of.dtype, of.dim**-0.5, of.fp8
        self.shape = ModelShape(of.layers, *own, of.dim, *form)
        self.policy = self._policy()
        self.host = self._make_host(of.pages)
        budget = self.config.budget_pages
        resident = (of.resident_tokens or of.budget_tokens * of.max_batch) // SIZE
        self.missing = HereInstead(self.shape, self.host)
        weights = [self._randn(of.heads * of.dim, HIDDEN) * 0.4 for _ in range(of.layers)]
        self.weights = [w.chunk(of.of_ranks)[of.rank] for w in weights]
        slots = resident + of.max_batch + budget
        lists = self.config.lists(own[1])
        sizes = Sizes(budget, slots, of.max_batch, of.max_pages, lists)
        self.digests = DigestPool(self.shape, of.pages, "cpu", self.policy.rule)
        stores = self.shape, sizes, self.host, self.digests
        self.engine = StepEngine(
            Parts(self.policy, *stores, tracer, ranks),
            [self._ahead(layer) for layer in range(of.layers)],
            self._worker(around_missing(self.missing)),
            verify,
            step_log,
        )
        self.table = self.engine.parts.table
        self.free_pages = list(range(1, of.pages))
        self.requests: list[Request] = []
        self.hidden = self._randn(of.layers, of.max_batch, HIDDEN)
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
        found = self._randn(*size, self.settings.kv_heads, self.shape.head_dim)
        return found.chunk(self.settings.of_ranks, dim=-2)[self.settings.rank].contiguous()

    def _make_host(self, pages):
        size, dtype, layers = pages * SIZE, self.shape.kv_dtype, range(self.shape.num_layers)
        return HostPages(self.shape, *([self._heads(size).to(dtype) for _ in layers] for _ in "kv"))

    def _worker(self, missing):
        return missing

    def project(self, layer, x):
        """``[B, HQ, D]`` the layer's query from an input ``[B, hidden]``."""
        q = torch.nn.functional.linear(x, self.weights[layer]).to(self.shape.dtype)
        return q.view(len(x), self.shape.num_q_heads, self.shape.head_dim)

    def _ahead(self, layer):
        """The predicted query; or, if it only selects, one vector per KV head: the mean of its queries."""

        def finish(x, positions):
            q, heads = self.project(layer, x), self.shape.num_kv_heads
            return q if self.policy.query.attends else q.unflatten(1, (heads, -1)).mean(2)

        return SimpleNamespace(weight_bytes=0, start=torch.add, finish=finish)

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
        slot = next(i for i in range(99) if i not in taken) if slot is None else slot
        request = Request(slot, pages, length, length + max_new)
        self.engine.pages.allocate_pages(np.array(pages, np.int64))
        for page in pages:
            for k, v in zip(self.host.k, self.host.v, strict=True):
                k[page], v[page] = self._heads(SIZE), self._heads(SIZE)
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
        self.hidden = self.hidden + self.settings.drift * self._randn(*self.hidden.shape)
        self.queries, self.outputs = [], []
        padding = torch.ones(extra_rows, self.shape.num_kv_heads, self.shape.head_dim)
        layers = range(self.shape.num_layers)
        new = [[torch.cat([self._heads(rows), padding]) for _ in "kv"] for _ in layers]
        self._layers(self.hidden[:, : rows + extra_rows], new)
        self.engine.layer_output()
        for row, request in enumerate(self.requests):
            page, offset = divmod(request.length - 1, SIZE)
            for stored, (k, _) in zip(self.host.k, new, strict=True):
                appended = stored[request.pages[page], offset].float()
                assert torch.equal(appended, k[row].to(self.shape.kv_dtype).float())
        return self.outputs

    def _layers(self, hidden, new):
        for layer, (k, v) in enumerate(new):
            q, out = self._layer(layer, hidden[layer], k, v)
            self.queries.append(q)
            self.outputs.append(out)

    def _layer(self, layer, x, k, v):
        half = x / 2
        self.engine.layer_input(layer, half, half, torch.zeros(len(x), dtype=torch.int64))
        half.fill_(torch.nan)  # a layer overwrites its input
        q = self.project(layer, x)
        return q, self.engine.attend(layer, q, k, v)

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
        both = (x[layer][request.pages].flatten(0, 1) for x in (self.host.k, self.host.v))
        tokens = range(request.length) if tokens is None else tokens
        group = self.shape.num_q_heads // self.shape.num_kv_heads
        k, v = (x[list(tokens)].float().repeat_interleave(group, 1) for x in both)
        logits = torch.einsum("hd,thd->ht", self.queries[layer][row], k) * self.shape.scale
        return torch.einsum("ht,thd->hd", logits.softmax(1), v)

    def close(self) -> None:
        self.check_digests(again=True)
        self.engine.close()
