"""Bytes of digests and of SGLang's per-token buffers, for the memory plan and ``sglang-scout plan``."""

from __future__ import annotations

from typing import Literal, get_args

Digest = Literal["minmax", "rotated-2", "calibrated"]
DIGESTS = get_args(Digest)
"""Page digests for selection by all heads of a layer; see ``engine/digest_pool.py``."""
EMBEDDINGS = ("mean16", "pilot")
"""Page digests for selection per KV head."""
PILOT_RANK = 32
"""Elements of a ``pilot`` embedding, unless its weights have another rank."""
MARK_BYTES = 4
"""Second part of an embedding: zeros that mark it as written. A transfer identifies kinds by their parts' ratio."""
ROTATED_STATS_BYTES = 112
"""Of a rotated digest, besides its bits and D bytes of mean: scales, norms and step sizes, see ``ops/rotated.py``."""


def digest_parts(
    kind: str, head_dim: int, value_bytes: int, pilot_rank: int = PILOT_RANK
) -> tuple[int, int]:
    """Bytes of the two parts of a digest, of one page and KV head, for K of ``value_bytes`` a value."""
    if kind == "none":
        return MARK_BYTES, 2 * MARK_BYTES
    if kind == "minmax":
        return head_dim * value_bytes, head_dim * value_bytes
    if kind in EMBEDDINGS:
        return (2 * head_dim if kind == "mean16" else pilot_rank) * value_bytes, MARK_BYTES
    bits = 2 if kind == "rotated-2" else 1
    return bits * 4 * head_dim, head_dim + ROTATED_STATS_BYTES


def input_bytes(tokens: int) -> int:
    """Device bytes of SGLang's buffers for all tokens of the KV pool: id, position, cache location and three positions
    of multimodal models, of 8 bytes each (``build_decode_registry``)."""
    return 6 * 8 * tokens
