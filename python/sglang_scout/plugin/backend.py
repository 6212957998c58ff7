"""The decode attention backend: ties SGLang's model runner to the step engine."""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.pages import ResidencyTable
from sglang_scout.core.profile import check_profile, load_profile
from sglang_scout.engine.pools import ResidentCache
from sglang_scout.engine.step import StepEngine
from sglang_scout.engine.step_log import StepLog
from sglang_scout.engine.trace import Tracer
from sglang_scout.plugin import status
from sglang_scout.plugin.args import parse
from sglang_scout.plugin.hooks import model_shape, worker_cpus
from sglang_scout.plugin.pool import HostKVPool, ScoutAllocator
from sglang_scout.plugin.prediction import learned_correction, make_quality
from sglang_scout.plugin.support import decoder_layers, make_projectors, model_identity
from sglang_scout.policy.presets import make_policy
from sglang_scout.worker.client import WorkerClient, WorkerConfig

logger = logging.getLogger(__name__)

_current: ScoutAttnBackend | None = None


def current_backend() -> ScoutAttnBackend:
    """The backend of this scheduler process; there is one."""
    if _current is None:
        raise RuntimeError("--kv-offload: the attention backend has not been created")
    return _current


class ScoutAttnBackend(AttentionBackend):
    """Attention of decode steps. Everything else runs on SGLang's own backend beside it."""

    def __init__(self, runner: Any) -> None:
        global _current
        super().__init__()
        self.config: OffloadConfig = parse(runner.server_args)
        self.pool: HostKVPool = runner.token_to_kv_pool
        self.allocator: ScoutAllocator = runner.token_to_kv_pool_allocator
        self._requests = runner.req_to_token_pool
        layers = decoder_layers(runner.model)
        shape = model_shape(runner)
        profile = None
        if self.config.recall_profile:
            profile = load_profile(self.config.recall_profile)
            check_profile(
                profile,
                self.config.recall_profile,
                num_layers=shape.num_layers,
                config=self.config,
                model=runner.server_args.model_path,
                identity=model_identity(runner.model_config),
            )
        model_path = runner.server_args.model_path
        correction = learned_correction(self.config, layers, model_path)
        self.policy = make_policy(
            self.config, shape.num_layers, 2 * shape.page_bytes, profile, correction
        )
        self.plan = self.pool.plan
        self.cpus = worker_cpus(self.config)
        self.worker = WorkerClient(self.pool.arena, self.cpus, config=self._worker_config())
        projectors = make_projectors(layers)
        self.engine = StepEngine(
            shape=shape,
            policy=self.policy,
            budget_pages=self.plan.budget_pages,
            max_batch=runner.max_running_requests,
            host=self.pool.host_pages,
            digests=self.pool.digests,
            resident=ResidentCache(shape, self.plan.num_slots, runner.device),
            table=ResidencyTable(
                shape.num_layers,
                self.plan.num_pages,
                self.plan.num_slots,
                self.policy.residency.half_life_steps,
            ),
            projectors=projectors,
            missing=self.worker,
            tracer=self._tracer(shape.num_layers),
            verify=self.config.verify,
        )
        if self.config.step_log is not None:
            self.engine.step_log = self._step_log(self.config.step_log, runner.model_config)
        self.engine.quality = make_quality(
            self.config, self.engine, projectors, correction, layers, model_path
        )
        self.allocator.listener = self.engine.boundary
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._layer_hook(index), with_kwargs=True)
        layers[-1].register_forward_hook(lambda *_: self.engine.layer_output())
        self.worker.start()
        atexit.register(self.close)
        _current = self
        self.metrics = status.start_metrics(self, runner.server_args)
        self._log_plan(runner)

    def _step_log(self, path: str, model_config: Any) -> StepLog:
        identity = model_identity(model_config)
        facts = self._facts(identity.num_layers) | {
            "page_size_tokens": self.config.page_size_tokens,
            "model": Path(model_config.model_path).name,
            "identity": msgspec.to_builtins(identity),
        }
        try:
            return StepLog(path, identity.num_layers, self.engine.counters, facts)
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-config: step_log = {path!r}: cannot write it: {error.strerror}"
            ) from error

    def _tracer(self, num_layers: int) -> Tracer:
        return Tracer(
            self.config.trace, self.config.trace_steps, self.worker, self._facts(num_layers)
        )

    def _facts(self, num_layers: int) -> dict[str, Any]:
        """What a reader of this server's files should know of it."""
        return {
            "policy": self.policy.name,
            "layers": num_layers,
            "budget_tokens": self.config.budget_tokens,
            "digest": self.config.digest,
            "resident_bonus": self.config.resident_bonus,
            "attend": self.config.attend,
            "precompute": self.config.precompute,
            "predictor": self.config.predictor,
            "exact_layers": list(self.config.exact_layers),
            "exact_steps": self.config.exact_steps,
            "recall": self.config.recall,
            "worker_cpus": list(self.cpus),
        }

    def _worker_config(self) -> WorkerConfig:
        return WorkerConfig(
            ready_timeout_s=self.config.worker_ready_timeout_s,
            heartbeat_timeout_s=self.config.worker_heartbeat_timeout_s,
            wait_timeout_s=self.config.worker_wait_timeout_s,
            spin_us=self.config.worker_spin_us,
            threads_per_group=self.config.worker_threads_per_group,
        )

    def _log_plan(self, runner: Any) -> None:
        lines = "\n".join(f"  {n:<15}{c:>9} {b / 2**30:9.2f} GiB" for n, c, b in self.plan.rows)
        logger.info(
            "--kv-offload %s: budget %d tokens, %d requests at most, worker on CPUs %s\n%s",
            self.policy.name,
            self.config.budget_tokens,
            runner.max_running_requests,
            ",".join(map(str, self.cpus)),
            lines,
        )

    def _layer_hook(self, index: int) -> Any:
        def before_layer(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = ("positions", "hidden_states", "forward_batch", "residual")
            given = dict(zip(names, args, strict=False)) | kwargs
            if not given["forward_batch"].forward_mode.is_decode():
                return
            x, residual = given["hidden_states"], given.get("residual")
            if residual is not None:
                x = x + residual
            self.engine.layer_input(index, x, given["positions"])

        return before_layer

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Step boundary: read the batch's page tables and let the engine prepare."""
        if not forward_batch.forward_mode.is_decode():
            return
        size = self.config.page_size_tokens
        seq_lens = forward_batch.seq_lens_cpu
        requests = forward_batch.req_pool_indices
        longest = int(seq_lens.max())
        locations = self._requests.req_to_token[requests, :longest:size]
        self.engine.begin_step(
            (locations // size).int().numpy(),
            requests.numpy(),
            seq_lens.numpy().astype("int64"),
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; see :meth:`StepEngine.attend`."""
        if not save_kv_cache or kwargs:
            raise NotImplementedError(
                f"--kv-offload: attention called with save_kv_cache={save_kv_cache} and "
                f"{sorted(kwargs)}; this model is not supported"
            )
        out = self.engine.attend(
            layer.layer_id,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        return out.flatten(1).to(q.dtype)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("--kv-offload: the decode server does not prefill")

    def close(self) -> None:
        """Stop the worker and the copies. Also runs at interpreter exit."""
        atexit.unregister(self.close)
        self.metrics.close()
        self.worker.stop()
        self.engine.close()
