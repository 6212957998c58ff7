"""SGLang's spans of a request's tokens, with the engine's counts between them."""

from types import SimpleNamespace

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sglang.srt.observability import trace
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

from sglang_scout.engine.counters import Counters
from sglang_scout.plugin import decode as tracing


def test_a_token_has_what_was_counted_since_the_one_before(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("test"))
    counters, original = Counters(4), trace.TraceReqContext.trace_slice
    backend = SimpleNamespace(engine=SimpleNamespace(counters=counters))
    monkeypatch.setattr(tracing, "current_backend", lambda: backend)

    def hooked(*given, **named):
        tracing.before_trace_slice(*given, **named)
        original(*given, **named)

    monkeypatch.setattr(trace.TraceReqContext, "trace_slice", hooked)
    times = SchedulerReqTimeStats()
    times.init_trace_ctx("request", None)
    times.trace_ctx.trace_req_start()
    for _ in range(2):
        times.set_last_decode_finish_time()
        counters.steps += 1
        counters.cpu_pages += 3
        counters.gpu_wait_us += 70
    times.set_last_decode_finish_time()
    spans = [x.attributes for x in exporter.get_finished_spans() if x.name == "decode_loop"]
    assert [x["decode_ct"] for x in spans] == [0, 1, 2]
    assert [x["kv_offload.cpu_pages"] for x in spans] == [0, 3, 3]
    assert spans[1]["kv_offload.gpu_wait_us"] == 70 and spans[1]["kv_offload.recalled_pages"] == 0
