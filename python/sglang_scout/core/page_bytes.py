"""Bytes of digests, of the int8 copies of pages and of what SGLang keeps for each token, as the arena, the memory plan
and ``sglang-scout plan`` count them."""

from __future__ import annotations

CPU_PAGES = ("model", "int8")
"""What the CPU worker reads pages as: the model's dtype, or int8 copies of them."""

DIGESTS = ("minmax", "minmax-int8", "signs")
"""What is kept of a page to choose it by; see ``engine/digest_forms.py``."""
STEP_CHANNELS = 32
"""Channels of an int8 digest that share a step."""

CODED_BLOCK_TOKENS = 16
"""Tokens of a block of int8 codes."""

_STEP_BYTES = 2
_COPY_ALIGN_BYTES = 64
_WORD_BYTES = 8
_INPUT_WORDS = 6
"""Of a token, in the buffers that SGLang's eager runner makes as long as all tokens of the KV pool: its id, position,
place and three positions of multimodal models (``build_decode_registry``)."""


def digest_bytes(digest: str, num_kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """The digest of a page in one layer, for K of ``value_bytes`` a value."""
    if digest == "minmax-int8":
        return 2 * num_kv_heads * (head_dim + head_dim // STEP_CHANNELS * _STEP_BYTES)
    return 2 * num_kv_heads * head_dim * value_bytes


def input_bytes(page_size: int) -> int:
    """What the device keeps of a host page's tokens for SGLang's input buffers."""
    return page_size * _INPUT_WORDS * _WORD_BYTES


def coded_tokens(page_size: int) -> int:
    """Tokens for which a page of int8 codes has room: whole blocks (``ops/quantize.py``)."""
    return -(-page_size // CODED_BLOCK_TOKENS) * CODED_BLOCK_TOKENS


def copy_bytes(page_size: int, num_kv_heads: int, head_dim: int) -> int:
    """The copy of K and V of a page in one layer: codes, an fp32 scale for each KV head of both, in
    whole cache lines."""
    codes_and_scales = 2 * num_kv_heads * (coded_tokens(page_size) * head_dim + 4)
    return -(-codes_and_scales // _COPY_ALIGN_BYTES) * _COPY_ALIGN_BYTES


def copies_bytes(
    cpu_pages: str, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int
) -> int:
    """What ``cpu_pages`` adds to a page over all layers: nothing, or the copies and words about them."""
    if cpu_pages != "int8":
        return 0
    copy = copy_bytes(page_size, num_kv_heads, head_dim) + _WORD_BYTES
    return num_layers * copy + _WORD_BYTES
