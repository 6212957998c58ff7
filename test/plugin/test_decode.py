"""Hooks of a decode server: which requests join, what a retracted one keeps, and counts on SGLang's spans."""

from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.trace import NoOpTracer
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability import trace
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

from sglang_scout.engine.stores import Counters
from sglang_scout.plugin import decode as hooks
from sglang_scout.plugin import status

COPY = 5000


def scheduler_of(running, *names, priorities=False):
    """Of at most four requests; the first name has the highest priority."""
    return SimpleNamespace(
        enable_priority_scheduling=priorities,
        max_running_requests=4,
        req_to_token_pool=SimpleNamespace(size=8),
        running_batch=SimpleNamespace(is_empty=lambda: not running, batch_size=lambda: running),
        policy=SimpleNamespace(calc_priority=lambda queue, _: queue.sort(key=lambda r: r.rid)),
        waiting_queue=[SimpleNamespace(rid=name) for name in names],
    )


@pytest.fixture
def join(monkeypatch):
    """Names that SGLang takes while copies for some have not begun, and what the engine was asked."""

    def around(scheduler, unstarted=()):
        def queue(names, room):
            asked.append(([*names], room))
            return set(unstarted)

        def take_all(scheduler):
            taken, scheduler.waiting_queue = scheduler.waiting_queue, []
            return [request.rid for request in taken]

        asked = []
        engine = SimpleNamespace(requests=SimpleNamespace(queue=queue))
        monkeypatch.setattr(hooks, "current_backend", lambda: SimpleNamespace(engine=engine))
        return hooks.around_get_new_prebuilt_batch(take_all, scheduler), *asked

    return around


def test_those_whose_copies_have_not_begun_wait_and_keep_their_place(join):
    scheduler = scheduler_of(3, "a", "b", "c")
    assert join(scheduler, unstarted="ac") == (["b"], (["a", "b", "c"], 1))
    assert [request.rid for request in scheduler.waiting_queue] == ["a", "c"]


def test_priorities_decide_who_is_copied_for(join):
    assert join(scheduler_of(1, "b", "a", priorities=True)) == (["a", "b"], (["a", "b"], 3))


def request(rid):
    """Valid for every release: in some its row and its copy are in ``kv``."""
    kv = {"req_pool_idx": 0, "mamba_pool_idx": None}
    more = {"retraction_backup": None, "holds_mamba": False}
    made = SimpleNamespace(rid=rid, seqlen=100, **kv, kv=SimpleNamespace(**kv, **more))
    made._mamba_pool_needing_backup = lambda *_: None
    return made


@pytest.mark.parametrize(("available", "kept"), [(2 * COPY, True), (2 * COPY - 1, False)])
def test_a_copy_of_a_retracted_request_that_does_not_fit_fails_it(monkeypatch, available, kept):
    """Of two ranks, the other of which has more memory."""
    ranks = SimpleNamespace(size=2, least=lambda value: min(value, 1 << 40))
    monkeypatch.setattr(hooks, "available_bytes", lambda: available + hooks.LEFT_BESIDE_COPIES)
    pool = SimpleNamespace(copy_bytes={99: COPY}.get, ranks=ranks)
    allocator = SimpleNamespace(
        get_kvcache=lambda: pool, get_cpu_copy=lambda tokens, **_: copied.append(tokens) or tokens
    )
    req, copied = request("r"), []
    tables = SimpleNamespace(req_to_token=np.arange(200)[None])
    hooks.around_offload_kv_cache(Req.offload_kv_cache, req, tables, allocator)
    assert [len(tokens) for tokens in copied] == [99] * kept

    # A pause does not mark its requests as retracted, and would have their KV sent again.
    queued, told = [], []
    channel = SimpleNamespace(send_output=lambda output, _: told.append(output))
    scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(send_to_tokenizer=channel))
    enqueue = lambda _, req, is_retracted=False: queued.append((req.rid, is_retracted))  # noqa: E731
    for one in (req, request("new")):
        hooks.around_add_request_to_queue(enqueue, scheduler, one)
    assert queued == ([("r", True)] if kept else []) + [("new", False)]
    failed = [(one.rid, one.finished_reason["status_code"]) for one in told]
    assert failed == ([] if kept else [("r", 503)])


def test_a_token_s_span_has_what_was_counted_since_the_one_before(monkeypatch):
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", NoOpTracer())
    counters, spans = Counters(4), []
    made = SimpleNamespace(engine=SimpleNamespace(parts=SimpleNamespace(counters=counters)))
    monkeypatch.setattr(status, "current_backend", lambda: made)

    def hooked(context, slice, *given, **named):
        status.before_trace_slice(context, slice, *given, **named)
        spans.append(slice.attrs)

    monkeypatch.setattr(trace.TraceReqContext, "trace_slice", hooked)
    times = SchedulerReqTimeStats()
    times.init_trace_ctx("request", None)
    for count in (0, 3, 3):
        counters.steps += 1
        counters.cpu_pages += count
        counters.gpu_wait_us += 70
        times.set_last_decode_finish_time()
    assert [x["decode_ct"] for x in spans] == [0, 1, 2]
    assert [x["kv_offload.cpu_pages"] for x in spans] == [0, 3, 3]
    assert spans[1]["kv_offload.gpu_wait_us"] == 70 and spans[1]["kv_offload.recalled_pages"] == 0
