"""Time of scoring one layer's pages on the CPU, by the digests of each system.

    python -m benchmark.kernels.page_scores --json FILE       some minutes; the machine should be otherwise idle
    python -m benchmark.kernels.page_scores --quick           a small size, as a smoke test

Qwen3-8B's heads, all pages of 64k tokens for each of 16 requests. Each is first compared with its formula on the first
request; then samples alternate. Rows (format: rows.py), C++ except where `code` says "torch", which has only the plain
reference on a CPU, copying what it scores, so that its time bounds a kernel's from above:
    minmax, rotated-2     `scout`; rotated-2 with the norms of values
    mean16                `sparda`: one query vector per KV head
    mean16-vector         the same as one batched product
    mean16-heads          likewise the selection that SparDA replaces: every query head scores the same keys
    pilot                 `rheo`: with the projection of the queries, at rank 32
Samples are CPU time over both threads, divided by two, so that other processes count less. Fields in addition to those
of rows.py: batch, pages, threads, clock, code, digest_bytes (that a call reads), times_minmax, bytes_minmax (of
median_us and digest_bytes to those of minmax).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmark.kernels.tolerances import tolerance_of
from benchmark.rows import Row, Writer, argument_parser, environment, markdown_table, summary
from sglang_scout.ops import minmax, rotated
from sglang_scout.ops.pages import LayerPages

H, G, D, RANK = 8, 4, 128, 32
THREADS, BUILT = 2, 64  # pages with rotated digests, repeated: building takes long
Case = tuple[str, list[Tensor], Callable[[int], Tensor], Tensor]
"""Name; what a call reads; the call for the first n requests; what it should give for the first."""


def by_heads(q: Tensor, halves: Tensor, table: Tensor) -> Tensor:
    """[B * H, N] for q [B, H, X, D] and halves [P, H, 2, D], all pages full: arXiv 2606.04511, section 4.3. Several
    queries of a KV head are summed after a softmax (10), one selects by its dot products (11)."""
    keys = halves[table].permute(0, 2, 1, 3, 4).flatten(2, 3).float()  # [B, H, 2 N, D]
    dots = q @ keys.mT
    found = (dots[..., :-1] + dots[..., 1:]) / 2
    found = found.softmax(-1).sum(2) if q.shape[2] > 1 else found[:, :, 0]
    return pad(found, (0, 1), value=-torch.inf).unflatten(-1, (-1, 2)).amax(-1).flatten(0, 1)


def windows(q: Tensor, halves: Tensor, ids: Tensor) -> Tensor:
    """[H, X, 2 N - 1] dot products of q [H, X, D] with a request's windows, in float64."""
    keys = halves[ids].transpose(0, 1).flatten(1, 2).double()
    return q.double() @ ((keys[:, :-1] + keys[:, 1:]) / 2).mT


def of_scout(batch: int, q: Tensor, table: Tensor, full: Tensor) -> Iterator[Case]:
    k = torch.randn(BUILT, 32, H, D).bfloat16()
    shapes = rotated.planes_shape(D), (D + rotated.STATS_BYTES,)
    codes = [torch.empty(1, BUILT, H, *shape, dtype=torch.uint8) for shape in shapes]
    rotated.build_layer_rotated(LayerPages.of([k], [k], "cpu"), torch.arange(BUILT), *codes)
    bounds = [torch.randn(table.numel(), H, D).bfloat16() + x for x in (-4, 4)]
    codes = [torch.cat([x[0]] * (table.numel() // BUILT)) for x in codes]
    for name, op, reference, digests in (
        ("minmax", minmax.score_pages, minmax.score_pages_reference, bounds),
        ("rotated-2", rotated.score_rotated, rotated.score_rotated_reference, codes),
    ):

        def call(n: int, run: Callable[..., Tensor] = op, x: list[Tensor] = digests) -> Tensor:
            return run(q[:n], *x, table[:n], full[:n], D**-0.5)

        yield name, digests, call, call(1, reference)


def of_heads(batch: int, q: Tensor, table: Tensor, full: Tensor) -> Iterator[Case]:
    from sglang_scout.policy.learned import score_embeddings  # a policy may be removed

    halves, pilots = (torch.randn(table.numel(), H, *e).bfloat16() for e in ((2, D), (1, RANK)))
    w_q, own, ids = torch.randn(H, RANK, G * D) / 16, q[:, :H].contiguous(), table[0]
    grouped, by_group = q.view(batch, H, G * D), q.view(batch, H, G, D)

    def forecast(n: int) -> Tensor:
        return score_embeddings(own[:n].flatten(0, 1), halves, table[:n], full[:n])

    def pilot(n: int) -> Tensor:
        of_query = torch.einsum("bhx,hrx->bhr", grouped[:n], w_q).flatten(0, 1)
        return score_embeddings(of_query, pilots, table[:n], full[:n])

    def pooled(x: Tensor) -> Tensor:
        return pad(x, (0, 1), value=-torch.inf).unflatten(-1, (-1, 2)).amax(-1).float()

    one = pooled(windows(own[0][:, None], halves, ids)[:, 0])
    shares = windows(by_group[0], halves, ids).softmax(-1).sum(1)
    of_pilot = torch.einsum(
        "hx,hrx,nhr->hn", *(x.double() for x in (grouped[0], w_q, pilots[ids, :, 0]))
    )
    yield "mean16", [halves], forecast, one
    for name, x, expected in (
        ("vector", own[:, :, None], one),
        ("heads", by_group, pooled(shares)),
    ):
        yield (
            f"mean16-{name}",
            [halves],
            lambda n, x=x: by_heads(x[:n], halves, table[:n]),
            expected,
        )
    yield "pilot", [pilots], pilot, of_pilot.float()


def run(writer: Writer, batch: int, columns: int, rounds: int) -> None:
    from sglang_scout.policy.learned import score_embeddings  # a policy may be removed

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    q = torch.randn(batch, H * G, D).bfloat16().float()
    ids = torch.randperm(batch * columns).int().view(batch, columns)
    inputs = batch, q, ids, torch.full((batch,), columns, dtype=torch.int32)
    cases = {case[0]: case[1:] for make in (of_scout, of_heads) for case in make(*inputs)}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for name, (_, call, expected) in cases.items():
        op = {"minmax": minmax.score_pages, "rotated-2": rotated.score_rotated}
        tolerance = tolerance_of(op.get(name, score_embeddings))
        if wrong := tolerance.mismatch(call(1), expected):
            writer.add(name, "failed", wrong)
            del samples[name]
    for _ in range(rounds):
        for name in samples:
            begin = time.process_time()
            cases[name][1](batch)
            samples[name].append((time.process_time() - begin) * 1e6 / THREADS)
    found = {name: summary(taken) for name, taken in samples.items()}
    nbytes = {name: sum(x.nbytes for x in cases[name][0]) for name in found}
    for name, measured in found.items():
        times = measured["median_us"] / found["minmax"]["median_us"]
        size = nbytes[name] / nbytes["minmax"]
        about = {"batch": batch, "pages": columns, "threads": THREADS, "digest_bytes": nbytes[name]}
        about |= {"clock": "CPU time"}
        about |= {"code": "C++" if name in ("minmax", "rotated-2") else "torch"}
        writer.add(name, **about, times_minmax=times, bytes_minmax=size, **measured)


def table(rows: list[Row]) -> str:
    head = ["digest", "code", "ms", "of `minmax`", "its bytes", "spread"]
    lines = []
    for r in (row for row in rows if row["status"] == "ok"):
        ratios = f"{r['times_minmax']:.2f}", f"{r['bytes_minmax']:.2f}", f"{r['spread']:.0%}"
        lines.append([f"`{r['impl']}`", r["code"], f"{r['median_us'] / 1e3:.1f}", *ratios])
    return markdown_table(head, lines)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--quick", action="store_true", help="only one small size")
    args = parser.parse_args()
    writer = Writer(args.json, environment("page_scores", ("sglang-scout", "torch")))
    run(writer, *((2, 64, 3) if args.quick else (16, 2048, 15)))
    writer.close()
    print(table(writer.rows))
    return int(any(row["status"] == "failed" for row in writer.rows))


if __name__ == "__main__":
    sys.exit(main())
