"""Counters of decode steps as attributes of SGLang's request spans (``--enable-trace``)."""

from typing import Any

from sglang_scout.plugin.backend import current_backend

ATTRIBUTES = (
    "steps",
    "selected_pages",
    "cpu_pages",
    "recalled_pages",
    "gpu_wait_us",
    "recall_wait_us",
)


def before_trace_slice(context: Any, slice: Any, *_: Any, **__: Any) -> None:
    """``decode_loop`` is a token's span: it gets the batch's counts since the request's previous token."""
    if slice.slice_name == "decode_loop":
        counters = current_backend().engine.counters
        now = {name: getattr(counters, name) for name in ATTRIBUTES}
        before = getattr(context, "kv_offload_before", now)
        context.kv_offload_before = now
        slice.attrs.update({f"kv_offload.{name}": now[name] - before[name] for name in ATTRIBUTES})
