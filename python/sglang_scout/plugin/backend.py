"""The decode attention backend: connects SGLang's model runner to the step engine."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import check_files
from sglang_scout.core.profile import StepLog, selection_of
from sglang_scout.engine.graph_transport import GraphTransport
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.stores import HostPages, Parts, Sizes, as_words
from sglang_scout.engine.trace import Tracer
from sglang_scout.plugin import model
from sglang_scout.plugin.limits import uses_graph_transport
from sglang_scout.plugin.pools import HostKVPool, ScoutAllocator
from sglang_scout.plugin.ranks import lock
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.host_memory import MAX_THREADS

logger = logging.getLogger(__name__)

DEVICE_SPIN_US = 20_000  # as long as a step: a kernel cannot wake a sleeping thread, and the attendant does so late
NOISE_PAGES = 1021  # a prime: no period of a prompt's pages aligns with that of the noise

Ids = npt.NDArray[np.int64]
_current: ScoutAttnBackend | None = None


def current_backend() -> ScoutAttnBackend:
    """The backend of this scheduler process; there is one."""
    assert _current is not None
    return _current


class ScoutAttnBackend(AttentionBackend):
    """Attention of decode steps. Everything else runs on SGLang's own backend."""

    def __init__(self, runner: Any) -> None:
        global _current
        super().__init__()
        self.pool: HostKVPool = runner.token_to_kv_pool
        self.allocator: ScoutAllocator = runner.token_to_kv_pool_allocator
        pool, config, device = self.pool, self.pool.config, runner.device
        self.config, self.ranks, self.max_batch = config, pool.ranks, runner.max_running_requests
        layers = model.decoder_layers(runner.model)
        own = [model.make_projector(index, layer) for index, layer in enumerate(layers)]
        projectors = pool.policy.projectors(own)
        # Not needed from here on, and up to gigabytes.
        policy = replace(pool.policy, rule=replace(pool.policy.rule, weights=None))
        self.policy = pool.policy = policy
        in_graph = uses_graph_transport(config, device)
        self.transport = "graph" if in_graph else "host"
        self.worker = self._make_worker(device, in_graph)
        facts = _facts(config, runner.model_config, pool.cpus.plan.threads)
        # Not the width of SGLang's request table, which is a few tokens more: a step launched before its request's end
        # is seen writes to position context_len - 2 at most, and one more page would double the table width of a 2^n
        # context, also in the kernels.
        max_pages = -(-runner.model_config.context_len // pool.shape.page_size)
        counts = pool.plan.budget_pages, pool.plan.num_slots, self.max_batch, max_pages
        sizes = Sizes(*counts, config.lists(pool.shape.num_kv_heads))
        tracer = Tracer(config.trace, config.trace_steps, self.worker, facts)
        stores, ranks = (pool.host_pages, pool.digests), self.ranks if self.ranks.size > 1 else None
        parts = Parts(policy, pool.shape, sizes, *stores, tracer, ranks)
        attention = self._graph_transport(device) if in_graph else self.worker
        log = None
        if config.step_log:
            check_files(config)  # the launcher has checked those of rank 0
            about = {"identity": model.model_identity(runner.model_config), "lists": sizes.lists}
            log = StepLog(config.step_log, facts | about | {"selection": selection_of(config)})
        self.engine = StepEngine(parts, projectors, attention, config.verify, log)
        self._probe = model.QueryProbe(own)
        self.tables = RequestTables(runner.req_to_token_pool, pool.shape.page_size)
        self._begun, self.metrics = False, None  # status.Metrics, with --enable-metrics
        self.dummy_kv = DummyKV(pool.host_pages) if config.dummy_kv else None
        self.allocator.listener = self.engine.pages
        for index, layer in enumerate(layers):
            before = model.before_layer(index, self._probe.layer_input, self.engine.layer_input)
            layer.register_forward_pre_hook(before, with_kwargs=True)
        layers[-1].register_forward_hook(lambda *_: self.engine.layer_output())
        self.worker.start()
        atexit.register(self.close)
        _current = self
        self._log_plan()

    def _make_worker(self, device: str, in_graph: bool) -> WorkerClient:
        cpus = self.pool.cpus
        config = WorkerConfig(
            ready_timeout_s=60.0,
            spin_us=DEVICE_SPIN_US if in_graph else WorkerConfig.spin_us,
            populate=torch.device(device).type == "cuda",  # the pages were allocated by locking
        )
        of_cpus = {"background_cpus": cpus.plan.background, "nodes": [*cpus.by_node.values()]}
        return WorkerClient(self.pool.arena, cpus.plan.threads, config=config, **of_cpus)

    def _graph_transport(self, device: str) -> GraphTransport:
        faults = self.ranks.shared_words(self.ranks.size) if self.ranks.size > 1 else None
        if faults is not None and torch.device(device).type == "cuda":
            lock(faults.data_ptr(), faults.nbytes, "--tp-size: memory of all ranks")
        self.worker.serve_device()
        return GraphTransport(
            self.pool.arena,
            lambda: self.worker.device_epoch,
            timeout_us=int(WorkerConfig.wait_timeout_s * 1e6),
            device=device,
            split=self.worker.split,
            faults=faults,
            rank=self.ranks.rank,
        )

    def _log_plan(self) -> None:
        cpus = self.pool.cpus.plan
        if cpus.warning:
            far = f"CPU attention will be slower: {cpus.warning}"
            logger.warning(f"--kv-offload: {far}; allow these CPUs to the server (cpuset, taskset)")
        lines = [f"  {n:<15}{c:>9} {b / 2**30:9.2f} GiB" for n, c, b in self.pool.plan.rows]
        lines += [f"  CPUs {use.cpus}: {use.used_by} ({use.why})" for use in cpus.rows]
        budget = f"budget {self.config.budget_tokens} tokens, {self.max_batch} requests at most"
        logger.info("\n".join([f"--kv-offload {self.policy.name}: {budget}", *lines]))

    def begin(self, forward_batch: Any) -> bool:
        """Step boundary. Returns whether a captured graph may run the step."""
        self._begun = True
        if not len(self.tables.rows):
            return True  # SGLang warms up or captures
        seq_lens = forward_batch.seq_lens_cpu.numpy().astype("int64")
        self.engine.begin_step(self.tables.of_step(seq_lens), self.tables.rows, seq_lens)
        return self.engine.can_replay

    def damaged_pages(self) -> Ids:
        """``[n, 2]`` layer and page of held host pages that some rank has found damaged."""
        checksums = self.pool.host_pages.checksums
        if checksums is None:
            return np.zeros((0, 2), np.int64)
        damaged = checksums.damaged()
        if self.ranks.size > 1:
            # Page ids are equal on all ranks, which must fail the same requests in the same step.
            every = sum(self.ranks.gather(damaged.tolist()), [])
            damaged = np.array(every, np.int64).reshape(-1, 2)
        return damaged

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before an eager step, which has begun if a replay was considered."""
        if forward_batch.forward_mode.is_decode() and not self._begun:
            self.begin(forward_batch)
        self._begun = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a replay or a capture, which SGLang repeats after a weight update."""
        self._begun = False
        if in_capture:
            self.engine.pause()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """All buffers are already allocated. Raises ConfigError for graphs of more rows than they have."""
        if max_bs > (most := self.max_batch):
            fix = f"more than --max-running-requests; set it to {most}"
            raise ConfigError(f"--cuda-graph-max-bs {max_bs}: {fix}")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attention of one layer, of ``q`` ``[B, HQ * D]``, ``k`` and ``v``; see :meth:`StepEngine.attend`."""
        if not save_kv_cache or kwargs:
            raise NotImplementedError(
                f"--kv-offload: this model calls attention with save_kv_cache={save_kv_cache} and {sorted(kwargs)}; "
                "serve it without --kv-offload"
            )
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        self._probe.query(layer.layer_id, q)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return self.engine.attend(layer.layer_id, q, k, v).flatten(1)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.metrics is not None:
            self.metrics.close()
        self.worker.stop()
        self.engine.close()


def _facts(config: OffloadConfig, served: Any, cpus: list[int]) -> dict[str, Any]:
    """Metadata of this server for its trace and step log."""
    keys = "policy", "budget_tokens", "page_size_tokens", "precompute", "exact_layers", "recall"
    found = selection_of(config) | {key: getattr(config, key) for key in keys}
    of_model = {"model": Path(served.model_path).name, "layers": served.num_hidden_layers}
    return found | of_model | {"worker_cpus": cpus}


class RequestTables:
    """The pages in the table of SGLang's request pool, on the host.

    Whole requests are read from the device when SGLang writes them, as they are admitted or hit a shared prefix. A page
    opened by decoding is known from the allocator. ``rows`` ``[B]`` of the table are of the last announced step.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        num_rows, tokens = pool.req_to_token.shape
        self._size, self.rows = page_size, np.zeros(0, np.int64)
        self._pages = np.zeros((num_rows, -(-tokens // page_size)), np.int32)
        self._write, pool.write = pool.write, self.write

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """Like the pool's: ``indices`` is (row, slice of tokens) or (rows, positions)."""
        self._write(indices, values)
        row, tokens = indices
        if not isinstance(tokens, slice):
            return  # from a decode step: see open_pages
        start = tokens.start or 0
        first = -(-start // self._size)  # page that begins in the slice
        starts = values[first * self._size - start :: self._size]
        if len(starts):
            pages = (starts // self._size).cpu().numpy()
            self._pages[int(row), first : first + len(pages)] = pages

    def pages_of(self, row: int, tokens: int) -> Ids:
        """``[N]`` pages that hold the first ``tokens`` tokens of the request in ``row``."""
        return self._pages[row, : -(-tokens // self._size)].astype(np.int64)

    def open_pages(self, rows: Ids, positions: Ids, opened: Ids) -> None:
        """Before a decode step of ``rows`` ``[B]``, which writes tokens at ``positions`` ``[B]``. ``opened`` ``[B]``:
        pages that start with these tokens, -1: none."""
        opens = opened >= 0
        self._pages[rows[opens], positions[opens] // self._size] = opened[opens]
        self.rows = rows.copy()

    def of_step(self, seq_lens: Ids) -> npt.NDArray[np.int32]:
        """``[B, N]`` pages of the last announced step."""
        if (count := len(seq_lens)) != (known := len(self.rows)):
            raise RuntimeError(f"--kv-offload: a step of {count} requests, {known} were announced")
        return self._pages[self.rows, : -(-int(seq_lens.max()) // self._size)]


class DummyKV:
    """Noise as K and V of requests without a prefill server, for benchmarks and tests: SGLang's fake transfer leaves a
    request's pages in ``host`` as their previous owner did."""

    def __init__(self, host: HostPages) -> None:
        self._planes = [as_words(plane) for plane in (*host.k, *host.v)]
        size, seeded = (NOISE_PAGES, *host.k[0].shape[1:]), torch.Generator().manual_seed(0)
        self._noise = as_words(torch.randn(size, generator=seeded).to(host.k[0].dtype))

    def fill(self, pages: npt.NDArray[np.int64], prompt: Sequence[int]) -> None:
        """K and V of all layers are standard normal in ``pages`` ``[N]`` of the tokens ``prompt``, the last one too,
        and depend only on the prompt and the position."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step of the pages' previous owner may still append to them
        seed, where = zlib.crc32(np.asarray(prompt, np.int64).tobytes()), pages.tolist()

        def fill_plane(first: int, plane: Any) -> None:
            for position, page in enumerate(where):
                plane[page] = self._noise[(first + position * 7) % NOISE_PAGES]

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as pool:
            # numpy copies a page without the GIL
            list(pool.map(fill_plane, itertools.count(seed), self._planes))
