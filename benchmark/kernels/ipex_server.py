"""IPEX's side of cpu_attention.py, run by the Python of scripts/setup_ipex.sh.

Makes the pool, queries and page lists of kv_pool.py, reads requests as JSON lines from stdin and answers each with one
on stdout; ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
import time

# Library output goes to stderr; stdout carries answers only.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import intel_extension_for_pytorch as ipex  # noqa: E402
import torch  # noqa: E402

from benchmark.kernels.kv_pool import Inputs, KvPool, Shape  # noqa: E402


class Server:
    def __init__(self, pool_bytes: int) -> None:
        self._pool = KvPool(pool_bytes)

    def shape(self, **sizes: object) -> None:
        s = Shape(**sizes)  # type: ignore[arg-type]
        self._inputs = Inputs(self._pool, s)
        # This library's layout.
        self._k, self._v = (x.view(-1, s.H, s.S, s.D) for x in (self._inputs.k, self._inputs.v))
        self._heads = torch.arange(s.H * s.G, dtype=torch.int32) // s.G
        self._lengths = torch.full((s.B,), s.R * s.S, dtype=torch.int32)

    def run(self, threads: int, starts: list[int]) -> int:
        """Nanoseconds of one call per entry of ``starts``, a position in the page stream."""
        torch.set_num_threads(threads)
        s, q = self._inputs.shape, self._inputs.q.bfloat16()
        self._out = torch.full_like(q, float("nan"))
        tables = [self._inputs.pages(at) for at in starts]
        attend = ipex.llm.modules.PagedAttention.single_query_cached_kv_attention
        begin_ns = time.perf_counter_ns()
        for table in tables:
            attend(
                self._out, q, self._k, self._v, self._heads, s.scale, table, self._lengths, s.S,
                s.R * s.S, None,
            )  # fmt: skip
        return time.perf_counter_ns() - begin_ns

    def output(self) -> list:
        """[rows, HQ, D] of the checked rows."""
        return self._out[self._inputs.shape.checked_rows].float().tolist()


def main() -> None:
    server = Server(int(sys.argv[1]))
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": getattr(server, request.pop("op"))(**request)}
            except Exception as e:  # the benchmark reports it in a row
                answer = {"error": f"{type(e).__name__}: {e}"[:500]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
