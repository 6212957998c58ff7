"""Three ways in which a CUDA graph can hand a layer over to the CPU and wait for it (docs/gpu.md, "The ring from
inside a graph"): what each costs a layer before any work is done.

    python benchmark/gpu_handover.py --out FILE     on a machine with a CUDA device
    python benchmark/gpu_handover.py --check-only   the waiting kernel, in the interpreter with TRITON_INTERPRET=1 too

A thread answers: it sees a layer's bell, takes it back and says that the layer is done. It runs in C++ (hand_over.cpp)
without Python's lock, for which the thread that launches would otherwise wait. Times are per layer.

Rows (format: rows.py), op being
    waiting_kernel      a kernel rings and polls, as `ops/doorbell.py` does. Between two events around a replay
    stream_memory_ops   cuStreamWriteValue64 and cuStreamWaitValue64 as nodes of the graph, without any kernel. The same
    broken_graph        a graph for each layer; the host waits for it before it launches the next. By the host's clock
with layers and p99_us. Where one of the other ways is not to be had, status is "absent" and reason says why.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

import device_here
import rows
from read_loop import ReadLoopError, compiled
from sglang_scout.ops.triton.doorbell import load_acquire, store_release

SOURCE = Path(__file__).with_name("hand_over.cpp")
LAYERS, WARM_UP, SAMPLES = 36, 20, 300
MOST_POLLS = tl.constexpr(1 << 24)  # seconds; then the kernel gives up and the sample is no answer


@triton.jit
def _hand_over(bell, done, lost):
    one = tl.full([], 1, tl.int64)
    store_release(bell, one)
    polls = 0
    answered = load_acquire(done)
    while (answered == 0) & (polls < MOST_POLLS):
        polls += 1
        answered = load_acquire(done)
    store_release(done, one - one)
    if answered == 0:
        tl.store(lost, 1)


class Words:
    """A bell and an answer per layer in memory that both sides see, and the thread that answers.

    Raises:
        ReadLoopError: the thread's code cannot be compiled here.
    """

    def __init__(self, layers: int, device: str) -> None:
        self._answer = ctypes.CDLL(str(compiled(SOURCE))).scout_answer_bells
        self._answer.restype = None
        self.all = torch.zeros(2 * layers, dtype=torch.int64, pin_memory=device == "cuda")
        self.bell, self.done = self.all[:layers], self.all[layers:]
        self._answered, self._end = (np.zeros(1, np.int64) for _ in range(2))
        words = self.bell.data_ptr(), self.done.data_ptr()
        control = self._answered.ctypes.data, self._end.ctypes.data
        arguments = (
            *(ctypes.c_void_p(x) for x in words),
            ctypes.c_int64(layers),
            *(ctypes.c_void_p(x) for x in control),
        )
        self._thread = threading.Thread(target=self._answer, args=arguments, daemon=True)
        self._thread.start()

    @property
    def answered(self) -> int:
        return int(self._answered[0])

    def close(self) -> None:
        """Ends the thread. Whoever still waits on the device is let go."""
        self._end[0] = 1
        self._thread.join()
        self.done.fill_(1)


@contextmanager
def answering(layers: int, device: str) -> Iterator[Words]:
    words = Words(layers, device)
    try:
        yield words
    finally:
        words.close()
        if device == "cuda":
            torch.cuda.synchronize()


def by_kernel(words: Words, lost: torch.Tensor) -> None:
    """All layers, each by a kernel that waits."""
    for layer in range(len(words.bell)):
        _hand_over[(1,)](words.bell[layer:], words.done[layer:], lost, num_warps=1)


def by_stream(words: Words) -> None:
    """All layers, by operations of the current stream on memory.

    Raises:
        RuntimeError: the driver refuses one; ImportError: cuda-python is absent.
    """
    from cuda.bindings import driver

    stream = torch.cuda.current_stream().cuda_stream
    equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    for layer in range(len(words.bell)):
        bell, done = words.bell[layer:].data_ptr(), words.done[layer:].data_ptr()
        for (error,) in (
            driver.cuStreamWriteValue64(stream, bell, 1, 0),
            driver.cuStreamWaitValue64(stream, done, 1, equal),
            driver.cuStreamWriteValue64(stream, done, 0, 0),
        ):
            if error != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{error.name} from a stream memory operation")


def check(device: str, layers: int = 3, rounds: int = 2) -> str:
    """What is wrong with the waiting kernel, "" if nothing."""
    lost = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        with answering(layers, device) as words:
            for _ in range(rounds):
                by_kernel(words, lost)
            if device == "cuda":
                torch.cuda.synchronize()
            answered, left = words.answered, int(words.all.sum())
    except ReadLoopError as error:
        return str(error)
    if int(lost) or answered != layers * rounds or left:
        return f"{answered} answers of {layers * rounds}, {left} words left, lost {int(lost)}"
    return ""


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed_us(graph: torch.cuda.CUDAGraph, layers: int) -> list[float]:
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / layers)
    return samples[WARM_UP:]


def waiting_kernel() -> list[float]:
    lost = torch.zeros(1, dtype=torch.int32, device="cuda")
    with answering(LAYERS, "cuda") as words:
        by_kernel(words, lost)  # compiled before it is captured
        torch.cuda.synchronize()
        samples = replayed_us(captured(lambda: by_kernel(words, lost)), LAYERS)
        if int(lost):
            raise RuntimeError("an answer did not come")
    return samples


def stream_memory_ops() -> list[float]:
    with answering(LAYERS, "cuda") as words:
        return replayed_us(captured(lambda: by_stream(words)), LAYERS)


def broken_graph() -> list[float]:
    query = torch.zeros(1, device="cuda")
    query.add_(1.0)
    torch.cuda.synchronize()
    graph = captured(lambda: query.add_(1.0))
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        for _ in range(LAYERS):
            graph.replay()
            torch.cuda.current_stream().synchronize()
        samples.append((time.perf_counter_ns() - begin_ns) / 1e3 / LAYERS)
    return samples[WARM_UP:]


def measure(out: Path) -> int:
    shared = rows.environment("gpu_handover", ("torch", "triton"), cuda=True)
    shared |= {"device": torch.cuda.get_device_name(), "layers": LAYERS}
    writer = rows.Writer(out, shared, append=True)
    wrong = check("cuda")
    if wrong:
        writer.add("triton", "failed", wrong, op="check")
    failed = bool(wrong)
    for work in (waiting_kernel, stream_memory_ops, broken_graph):
        op, impl = work.__name__, "triton" if work is waiting_kernel else "cuda"
        try:
            samples = work()
        except (RuntimeError, ImportError, AttributeError) as error:
            ours = work is waiting_kernel  # which must work; the others may not be had
            failed |= ours
            status = "failed" if ours else "absent"
            writer.add(impl, status, f"{type(error).__name__}: {error}", op=op)
            print(f"{op:18} {type(error).__name__}: {error}", flush=True)
            continue
        p99_us = round(rows.percentile(samples, 99), 3)
        row = writer.add(impl, op=op, p99_us=p99_us, **rows.summary(samples))
        print(f"{op:18} median {row['median_us']} us, p99 {p99_us} us", flush=True)
    writer.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(device_here.run(__doc__, lambda device: device_here.say(check(device)), measure))
