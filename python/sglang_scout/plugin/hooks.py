"""All hooks into SGLang, one row per target; ``install.py`` applies them.

The functions are named, not imported: the launcher needs only those of the flags, and a server those of its role.
"""

from __future__ import annotations

from typing import NamedTuple


class Hook(NamedTuple):
    """A function of SGLang and the hook before, after or around it.

    Attributes:
        target: dotted name below ``sglang.srt``; by release if it differs.
        function: module of this folder and the name in it.
        kind: as of SGLang's ``HookType``.
        package: that the target's module imports and that SGLang runs without; where it is absent nothing is hooked.
    """

    target: str | dict[str, str]
    function: str
    kind: str
    why: str
    package: str = ""

    def target_in(self, version: str) -> str | None:
        """The target in a release of SGLang; None: not hooked there."""
        return self.target.get(version) if isinstance(self.target, dict) else self.target


_GRAPHS = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
_KV_MANAGER = "disaggregation.mooncake.conn.MooncakeKVManager."


def _of_pools(name: str) -> dict[str, str]:
    return {
        "0.5.15.post1": f"model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin.{name}",
        "0.5.23": f"mem_cache.kv_cache_configurator.KVCacheConfigurator.{name}",
    }


_BATCH_REGISTER = Hook(
    "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_register",
    "pool:around_batch_register",
    "around",
    "end the server if the transfer engine rejects its memory; SGLang ignores that",
)
_SHUTDOWN = Hook(
    "managers.scheduler.Scheduler.handle_shutdown",
    "shutdown:handle_shutdown",
    "replace",
    "at SIGTERM refuse waiting requests and complete running ones, which SGLang would drop or ignore",
)
_INTAKE = (
    Hook(
        "managers.scheduler.Scheduler.handle_generate_request",
        "intake:around_handle_generate_request",
        "around",
        "refuse a prompt that can never fit and would block the queue; if a request raises, fail only that one",
    ),
    Hook(
        "managers.scheduler.Scheduler.abort_request",
        "intake:around_abort_request",
        "around",
        "abort the request with exactly this id, not every request whose id starts with it",
    ),
)

_REACH_DIRECTLY = Hook(
    "disaggregation.common.conn.CommonKVManager.__init__",
    "proxies:before_kv_manager",
    "before",
    "do not ask the other server of the pair through a proxy",
)
_VOCAB_MASK = Hook(
    {"0.5.15.post1": "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"},
    "sglang_0_5_15:around_apply_vocab_mask",
    "around",
    "on a CPU, keep a request with a grammar from crashing the server",
    package="xgrammar",  # with another --grammar-backend it need not be installed
)

_ON_IDLE = Hook(
    "managers.scheduler.Scheduler.on_idle",
    "idle:before_on_idle",
    "before",
    "with `--sleep-on-idle`, do not busy-poll while requests are in transfer",
)

HOOKS: dict[str, tuple[Hook, ...]] = {
    "flags": (
        Hook(
            {"0.5.15.post1": "server_args.ServerArgs.__init__"},
            "sglang_0_5_15:around_init",
            "around",
            "accept the `--kv-offload` fields; they are added to the live class, so that its parser has the flags",
        ),
        Hook(
            {"0.5.15.post1": "server_args.ServerArgs.__post_init__"},
            "args:around_post_init",
            "around",
            "validate them, set page size and attention backends, check the model",
        ),
        Hook(
            {"0.5.23": "server_args.ServerArgs"},
            "sglang_0_5_23:ServerArgs",
            "replace",
            "a subclass that has the `--kv-offload` fields, so that its parser has the flags",
        ),
        Hook(
            {"0.5.23": "server_args.ServerArgs.resolve_once"},
            "sglang_0_5_23:around_resolve",
            "around",
            "validate them, set page size and attention backends, check the model",
        ),
    ),
    "http": (
        Hook(
            "managers.tokenizer_manager.TokenizerManager._validate_one_request",
            "http_hooks:before_validate_one_request",
            "before",
            "refuse requests whose fields would crash a scheduler, by type and range, and requests after SIGTERM",
        ),
        Hook(
            "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
            "http_hooks:after_create_tokenized_object",
            "after",
            "track which requests are on their way to a scheduler",
        ),
        Hook(
            "managers.tokenizer_manager.TokenizerManager.generate_request",
            "http_hooks:around_generate_request",
            "around",
            "answer with status 400 if a request raises before it is sent; tell the other server about failed requests",
        ),
        *(
            Hook(
                f"entrypoints.openai.{name}._convert_to_internal_request",
                "http_hooks:around_convert",
                "around",
                "answer with status 400 if converting an OpenAI request raises",
            )
            for name in (
                "serving_chat.OpenAIServingChat",
                "serving_completions.OpenAIServingCompletion",
            )
        ),
        Hook(
            "disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
            "halves:after_setup_routes",
            "after",
            "add a route by which the two servers tell each other about failed requests",
        ),
        Hook(
            "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            "http_hooks:before_normalize",
            "before",
            "refuse what a pair cannot answer in full, for example `n` above 1",
        ),
        Hook(
            "managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
            "shutdown:around_sigterm_watchdog",
            "around",
            "shut down in bounded time: finish running requests, refuse the rest",
        ),
    ),
    "decode": (
        Hook(
            _of_pools("_profile_available_bytes"),
            "decode_hooks:around_profile_available_bytes",
            "around",
            "size the KV pool by host memory",
        ),
        Hook(
            _of_pools("_init_pools"),
            "decode_hooks:around_init_pools",
            "around",
            "put the KV pool into the arena that the CPU attention process maps; use the allocator that reports pages",
        ),
        Hook(
            "disaggregation.decode.DecodeTransferQueue.pop_transferred",
            "decode_hooks:after_pop_transferred",
            "after",
            "notice that a request's KV has arrived",
        ),
        Hook(
            "disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch",
            "decode_hooks:around_get_new_prebuilt_batch",
            "around",
            "delay a request's admission until its first pages have been copied, so that no step waits for them",
        ),
        Hook(
            "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
            "decode_hooks:after_prepare_for_prebuilt",
            "after",
            "notice that a request joins the batch; take the digests that arrived with its KV",
        ),
        Hook(
            "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
            "process_batch_result_decode",
            "decode_hooks:around_process_batch_result",
            "around",
            "never return tokens of a step whose attention is incomplete, or of a request with a damaged page",
        ),
        Hook(
            "managers.schedule_batch.alloc_for_decode",
            "decode_hooks:after_alloc_for_decode",
            "after",
            "track on the host which pages a step allocates",
        ),
        Hook(
            "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
            "decode_hooks:around_cumulate_penalty",
            "around",
            "with penalties, do not count a request's first token twice",
        ),
        Hook(
            "disaggregation.common.conn.CommonKVReceiver._connect",
            "transfer_faults:around_connect",
            "around",
            "do not block forever on a message to a prefill server that is gone",
        ),
        Hook(
            "disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
            "transfer_faults:around_ensure_parallel_info",
            "around",
            "ask a prefill server for its ranks without blocking the steps of other requests",
        ),
        Hook(
            "disaggregation.utils._poll_with_failure_injection",
            "transfer_faults:around_poll",
            "around",
            "notify the prefill server of an aborted transfer, and free its pages once they are no longer written",
        ),
        Hook(
            _KV_MANAGER + "_on_heartbeat_success",
            "transfer_faults:after_heartbeat_success",
            "after",
            "notice that a prefill server was replaced between two heartbeats",
        ),
        Hook(
            "managers.schedule_batch.Req.offload_kv_cache",
            "decode_hooks:around_offload_kv_cache",
            "around",
            "keep the KV of a retracted request only if there is memory for a copy",
        ),
        Hook(
            "managers.scheduler.Scheduler._add_request_to_queue",
            "decode_hooks:around_add_request_to_queue",
            "around",
            "restore a retracted request from its KV, also after a pause; fail one whose KV was not kept",
        ),
        Hook(
            {"0.5.15.post1": "disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs"},
            "sglang_0_5_15:around_resume_retracted_reqs",
            "around",
            "with the radix cache, free all pages of a retracted request",
        ),
        Hook(
            {"0.5.15.post1": "disaggregation.decode.DecodePreallocQueue._resolve_pending_reqs"},
            "sglang_0_5_15:around_resolve_pending_reqs",
            "around",
            "forget a request of a lost prefill server once its client has left; otherwise it would crash this server",
        ),
        Hook(
            "models.utils.enable_fused_set_kv_buffer",
            "decode_hooks:no_fused_set_kv_buffer",
            "replace",
            "on a GPU, keep models from fusing RoPE with the write of K and V, as the pages are in host memory",
        ),
        Hook(
            _GRAPHS + "can_run_graph",
            "decode_hooks:around_can_run_graph",
            "around",
            "begin the step before it is known whether a graph can run it",
        ),
        Hook(
            _GRAPHS + "capture_one_shape",
            "decode_hooks:around_capture_one_shape",
            "around",
            "capture a graph for dense steps too",
        ),
        Hook(
            _GRAPHS + "_resolve_lora_variant",
            "decode_hooks:after_resolve_lora_variant",
            "after",
            "select the step's graph: dense or with page selection",
        ),
        Hook(
            "observability.trace.TraceReqContext.trace_slice",
            "tracing:before_trace_slice",
            "before",
            "with `--enable-trace`: add step counters as attributes to each token's span",
        ),
        Hook(
            "managers.scheduler.Scheduler.get_internal_state",
            "decode_hooks:after_get_internal_state",
            "after",
            "add the state to `/server_info`",
        ),
        _BATCH_REGISTER,
        *_INTAKE,
        _REACH_DIRECTLY,
        _ON_IDLE,
        _SHUTDOWN,
        _VOCAB_MASK,
    ),
    "prefill": (
        Hook(
            _of_pools("_profile_available_bytes"),
            "prefill_hooks:around_profile_available_bytes",
            "around",
            "reserve room for the digests in the memory that SGLang would give to KV",
        ),
        Hook(
            _of_pools("_init_pools"),
            "prefill_hooks:around_init_pools",
            "around",
            "allocate a digest pool in addition to the KV pool",
        ),
        Hook(
            "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
            "prefill_hooks:before_send_kv_chunk",
            "before",
            "compute the digests of the pages about to be sent, and the hint: the best pages for the last token",
        ),
        Hook(
            "model_executor.model_runner.ModelRunner.init_attention_backends",
            "prefill_hooks:after_init_attention_backends",
            "after",
            "record the real queries of each prompt's last token",
        ),
        Hook(
            {"0.5.15.post1": "disaggregation.prefill.PrefillBootstrapQueue.add"},
            "sglang_0_5_15:around_add_to_bootstrap_queue",
            "around",
            "answer with status 400 if a grammar does not compile",
        ),
        Hook(
            _KV_MANAGER + "_send_kvcache_generic",
            "prefill_hooks:around_send_kvcache",
            "around",
            "omit the digests for a decode server without the flag, or with digests of another size; of hints, send "
            "only the prompt's",
        ),
        Hook(
            _KV_MANAGER + "send_kvcache_slice",
            "prefill_hooks:around_send_kvcache_slice",
            "around",
            "omit the digests for a decode server with another `--tp-size`",
        ),
        Hook(
            "disaggregation.common.conn.CommonKVManager._connect",
            "transfer_faults:around_connect_to_decode",
            "around",
            "serialise messages, as several threads share a socket; survive the loss of a decode server",
        ),
        Hook(
            "layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
            "cpu_extend:around_extend",
            "around",
            "on a CPU: skip attention for tokens with cached KV, which SGLang computes and discards",
        ),
        Hook(
            "managers.scheduler.Scheduler.get_internal_state",
            "prefill_hooks:after_get_internal_state",
            "after",
            "add the state to `/server_info`",
        ),
        _BATCH_REGISTER,
        *_INTAKE,
        _REACH_DIRECTLY,
        _ON_IDLE,
        _SHUTDOWN,
        _VOCAB_MASK,
    ),
}
