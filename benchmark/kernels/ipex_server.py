"""IPEX's side of cpu_attention.py, run by the Python of scripts/setup_ipex.sh.

Reads requests as JSON lines from stdin and answers each with one on stdout; ends when stdin closes. Page ids, queries
and outputs lie in a memory file that ipex_client.py hands over.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time

import numpy as np

# Everything that the libraries print goes to stderr; stdout carries answers only.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import intel_extension_for_pytorch as ipex  # noqa: E402
import torch  # noqa: E402

from benchmark.kernels import awake  # noqa: E402
from benchmark.kernels.kv_pool import KvPool, make_tile  # noqa: E402


class Server:
    def init(self, fd: int, ids: int, queries: int, pool_bytes: int) -> dict:
        words = np.frombuffer(mmap.mmap(fd, 4 * (ids + 2 * queries)), np.int32)
        self._ids = words[:ids]
        self._given_q, self._given_out = words[ids:].view(np.float32).reshape(2, queries)
        self._pool = KvPool(pool_bytes, True, make_tile(seed=0))
        self._bits = torch.from_numpy(self._pool.bits.view(np.int16)).view(torch.bfloat16)
        return {}

    def shape(self, B: int, R: int, S: int, H: int, G: int, D: int, scale: float) -> dict:
        """The pool as [P, H, S, D], which is this library's layout, and q [B, HQ, D] in bfloat16."""
        half = len(self._bits) // 2
        pages = half // (S * H * D)
        self._k, self._v = (
            x[: pages * S * H * D].view(pages, H, S, D)
            for x in (self._bits[:half], self._bits[half:])
        )
        n = B * H * G * D
        self._q = torch.from_numpy(self._given_q[:n]).view(B, H * G, D).bfloat16()
        self._out = torch.full_like(self._q, float("nan"))
        self._heads = torch.arange(H * G, dtype=torch.int32) // G
        self._lengths = torch.full((B,), R * S, dtype=torch.int32)
        self._B, self._R, self._S, self._scale = B, R, S, scale
        return {}

    def run(self, threads: int, starts: list) -> dict:
        """One call per entry of ``starts``, a position in the shared page ids."""
        torch.set_num_threads(threads)
        n = self._B * self._R
        tables = [torch.from_numpy(self._ids[at : at + n]).view(self._B, self._R) for at in starts]
        attend = ipex.llm.modules.PagedAttention.single_query_cached_kv_attention
        awake.openmp()
        begin_ns = time.perf_counter_ns()
        for table in tables:
            attend(
                self._out, self._q, self._k, self._v, self._heads, self._scale, table,
                self._lengths, self._S, self._R * self._S, None,
            )  # fmt: skip
        ns = time.perf_counter_ns() - begin_ns
        self._given_out[: self._out.numel()] = self._out.float().flatten().numpy()
        return {"ns": ns}


def main() -> None:
    server = Server()
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(server, request.pop("op"))(**request)
            except Exception as e:  # the benchmark makes a row of it
                answer = {"error": f"{type(e).__name__}: {e}"[:500]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
