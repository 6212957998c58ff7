"""Bytes of digests and of what SGLang keeps for each token, as the memory plan and ``sglang-scout plan`` count them."""

from __future__ import annotations

DIGESTS = ("minmax", "signs")
"""What is kept of a page to choose it by; see ``engine/digest_kinds.py``."""

_WORD_BYTES = 8
_INPUT_WORDS = 6
"""Of a token, in the buffers that SGLang's eager runner makes as long as all tokens of the KV pool: its id, position,
place and three positions of multimodal models (``build_decode_registry``)."""


def digest_bytes(num_kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """The digest of a page in one layer, for K of ``value_bytes`` a value."""
    return 2 * num_kv_heads * head_dim * value_bytes


def input_bytes(page_size: int) -> int:
    """What the device keeps of a host page's tokens for SGLang's input buffers."""
    return page_size * _INPUT_WORDS * _WORD_BYTES
