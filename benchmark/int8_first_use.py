"""What the first use of a page by the CPU costs with int8 pages, beside a use of its int8 copy and one of the
page in bfloat16.

    taskset -c 1 python benchmark/int8_first_use.py --json FILE     some ten seconds, one core, 1.5 GB
    taskset -c 1 python benchmark/int8_first_use.py --quick         some seconds

The caller's own computation over an arena, as when the worker is dead: the same code as a worker's thread runs.
4096 pages of 32 tokens, 8 KV heads of 128, far more than the caches hold, in shuffled order, 64 pages a request.
A sample walks through all pages once and is a mean over them; the ways take turns.

Rows (format: rows.py); samples_us are for one page of one layer:
    bfloat16        attention to the page itself
    int8-new        first use of a place for a copy that was never used: its memory comes from the system
    int8-first      first use of a page: it is read, quantised, attended to and its copy written
    int8-later      attention to the copy
Fields beside those of rows.py:
    G               query heads of a KV head
    backing         of the arena
    of_bfloat16     median, over the rounds, of this sample / the bfloat16 one of its round: steadier than times
    of_bfloat16_range  lowest and highest of these
    pays_after      of int8-later: the use of a page, counted from the first, with which int8 is cheaper altogether
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

from rows import Writer, environment, percentile, summary
from sglang_scout import _native
from sglang_scout.worker.arena import Arena, ArenaSpec

NUM_PAGES = 4096
LISTED = 64
TIMEOUT_US = 10_000_000


class Walk:
    """Requests over all pages of an arena, computed by the caller."""

    def __init__(self, group: int, cpu_pages: str, num_pages: int) -> None:
        spec = ArenaSpec(
            num_layers=1, num_pages=num_pages, page_size=32, num_kv_heads=8, num_q_heads=8 * group,
            head_dim=128, kv_dtype="bfloat16", scale=128**-0.5, max_batch=1, max_pages=LISTED,
            cpu_pages=cpu_pages,
        )  # fmt: skip
        self.arena = Arena.create(spec)
        rng = np.random.default_rng(1)
        bits = rng.standard_normal(1 << 22, np.float32).view(np.uint32) >> 16
        for plane in (self.arena.k_pages(0), self.arena.v_pages(0)):
            flat = plane.reshape(-1)
            for at in range(0, len(flat), len(bits)):
                part = bits[: len(flat) - at].astype(np.uint16)
                flat[at : at + len(bits)] = np.roll(part, at // len(bits))
        self._every = np.arange(num_pages)
        self._pages = rng.permutation(num_pages).astype(np.int32).reshape(-1, 1, LISTED)
        self._count = np.array([LISTED], np.int32)
        self._q = rng.standard_normal((1, 8 * group, 128), np.float32)
        self._producer = _native.RingProducer(self.arena.address, self.arena.nbytes)
        self._step = 0

    def forget(self) -> None:
        """No copy holds any more."""
        for final in (False, True):
            self._producer.set_final(self._every.ctypes.data, len(self._every), final)

    def once(self) -> tuple[float, np.ndarray]:
        """Microseconds for one page, and the answers of all requests."""
        out = np.empty((len(self._pages), *self._q.shape), np.float32)
        lse = np.empty(self._q.shape[:2], np.float32)
        q, count, nbytes = self._q.ctypes.data, self._count.ctypes.data, self._q.nbytes
        post, wait = self._producer.post, self._producer.wait
        begin_ns = time.perf_counter_ns()
        for pages, to in zip(self._pages, out, strict=True):
            self._step += 1
            ticket = post(0, self._step, 1, q, pages.ctypes.data, LISTED, count, 1, nbytes)
            wait(ticket, 0, self._step, TIMEOUT_US, 0, to.ctypes.data, lse.ctypes.data, nbytes)
        return (time.perf_counter_ns() - begin_ns) / 1e3 / self._pages.size, out


def run(group: int, rounds: int, num_pages: int, writer: Writer) -> None:
    plain, coded = (Walk(group, cpu_pages, num_pages) for cpu_pages in ("model", "int8"))
    samples: dict[str, list[float]] = {
        name: [] for name in ("bfloat16", "int8-new", "int8-first", "int8-later")
    }
    try:
        _, exact = plain.once()
        coded.forget()
        new_us, answers = coded.once()
        samples["int8-new"].append(new_us)
        np.testing.assert_array_equal(answers, coded.once()[1])
        coded.forget()
        np.testing.assert_array_equal(answers, coded.once()[1])
        np.testing.assert_allclose(answers, exact, atol=0.02)  # what int8 may cost these pages
        for _ in range(rounds):
            samples["bfloat16"].append(plain.once()[0])
            coded.forget()
            samples["int8-first"].append(coded.once()[0])
            samples["int8-later"].append(coded.once()[0])
        ratios = {
            name: [a / b for a, b in zip(us, samples["bfloat16"], strict=False)]
            for name, us in samples.items()
        }
        first, later = (percentile(ratios[name], 50) for name in ("int8-first", "int8-later"))
        pays_after = max(1, 1 + math.ceil((first - 1) / (1 - later))) if later < 1 else None
        for name, us in samples.items():
            of = ratios[name]
            fields = {
                "G": group,
                "backing": plain.arena.backing,
                "of_bfloat16": round(percentile(of, 50), 3),
                "of_bfloat16_range": [round(min(of), 3), round(max(of), 3)],
                **summary(us),
            }
            if name == "int8-later":
                fields["pays_after"] = pays_after
            row = writer.add(name, **fields)
            print(
                f"G={group} {name:11s} {row['median_us']:7.2f} us a page, spread {row['spread']:.0%}, "
                f"{row['of_bfloat16']:.2f} ({min(of):.2f} to {max(of):.2f}) of a use in bfloat16",
                file=sys.stderr,
            )
        print(f"G={group} pays with use {pays_after} of a page", file=sys.stderr)
    finally:
        plain.arena.close()
        coded.arena.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog="Rows: see the top of this file."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer samples, some seconds")
    size.add_argument("--smoke", action="store_true", help="hardly any: does it run at all")
    args = parser.parse_args(argv)
    writer = Writer(args.json, environment("int8_first_use", ("sglang-scout", "numpy")))
    try:
        for group in (4,) if args.smoke else (4, 5, 1):
            rounds = 2 if args.smoke else 5 if args.quick else 25
            run(group, rounds, 128 if args.smoke else NUM_PAGES, writer)
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
