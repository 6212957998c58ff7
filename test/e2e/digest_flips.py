"""Flips bits of page digests in the private memory of a running server's scheduler."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.rotated import STATS_BYTES, build_layer_rotated, planes_shape
from worker_faults import Victim

_BITS = 2  # bits of the default digest


def _digests(victim: Victim, pages: np.ndarray) -> list[np.ndarray]:
    """Both parts of the digests of ``pages`` in layer 0, ``[n, H, bytes]``."""
    spec = victim.arena.spec
    arena = victim.arena
    k, v = (torch.from_numpy(of(0)[pages]) for of in (arena.k_pages, arena.v_pages))
    size = (1, len(pages), spec.num_kv_heads)
    planes = torch.zeros(*size, *planes_shape(_BITS, spec.head_dim), dtype=torch.uint8)
    stats = torch.zeros(*size, spec.head_dim + STATS_BYTES, dtype=torch.uint8)
    source = LayerPages.of([k], [v], "cpu")
    build_layer_rotated(source, torch.arange(len(pages)), planes, stats)
    return [part[0].flatten(2).numpy() for part in (planes, stats)]


def _places(memory: int, maps: str, needle: bytes) -> Iterator[int]:
    """Addresses of ``needle`` in a process's own writable memory."""
    size = 1 << 26
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if words[1] != "rw-p" or (len(words) == 6 and words[5].startswith("[v")):
            continue
        begin, end = (int(x, 16) for x in words[0].split("-"))
        for at in range(begin, end, size - len(needle) + 1):
            with contextlib.suppress(OSError):  # unmapped meanwhile
                block, found = os.pread(memory, min(size, end - at), at), -1
                while (found := block.find(needle, found + 1)) >= 0:
                    yield at + found


def _begin(memory: int, maps: str, pages: np.ndarray, digests: np.ndarray) -> int:
    """Address of a part's tensor: several of these digests are at their offsets. Not all, as a reallocated page keeps
    its old K until it is written."""
    page_bytes = digests[0].nbytes
    for page, digest in zip(pages, digests, strict=True):
        for place in _places(memory, maps, digest.tobytes()):
            begin, there = place - int(page) * page_bytes, 0
            for other, expected in zip(pages, digests, strict=True):
                with contextlib.suppress(OSError):
                    found = os.pread(memory, page_bytes, begin + int(other) * page_bytes)
                    there += found == expected.tobytes()
            if there >= 3:
                return begin
    raise LookupError("the digests are nowhere")


def flip_one_bit_of_each_digest(victim: Victim, chance: random.Random) -> int:
    """In both parts, of every page and layer, in one of the KV heads. Returns how many bits were flipped."""
    spec = victim.arena.spec
    written = np.flatnonzero(victim.arena.k_pages(0)[1:].any(axis=(2, 3)).all(axis=1)) + 1
    pages = written[:: max(1, len(written) // 8)]
    memory = os.open(f"/proc/{victim.server_pid}/mem", os.O_RDWR)
    try:
        maps = Path(f"/proc/{victim.server_pid}/maps").read_text()
        flipped = 0
        for digests in _digests(victim, pages):
            begin, nbytes = _begin(memory, maps, pages, digests), digests[0].nbytes
            for row in range(spec.num_layers * spec.num_pages):
                at = begin + row * nbytes + chance.randrange(nbytes)
                [byte] = os.pread(memory, 1, at)
                os.pwrite(memory, bytes([byte ^ 1 << chance.randrange(8)]), at)
                flipped += 1
        return flipped
    finally:
        os.close(memory)
