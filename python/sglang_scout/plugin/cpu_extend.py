"""Prefill attention on the CPU without the rows that are discarded.

SGLang's ``torch_native`` computes a row for every token of a sequence, also for those whose KV is from the prefix cache
or an earlier chunk, and discards these. With a long cached prefix that is nearly all of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MASK_ELEMENTS = 1 << 24
"""Maximum mask size, rows x KV tokens; rows are processed in chunks."""


def around_extend(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """``query`` and ``output`` [T, HQ, D], caches [slots, H, D]; returns ``output``, filled.

    Sequences with more new tokens than cached ones use the original, which is then faster. So do encoders, cross
    attention and sliding windows.
    """
    shared = {"scaling": scaling, "enable_gqa": enable_gqa, "causal": causal}
    has_window = sliding_window_size is not None and sliding_window_size > -1
    if encoder_lens is not None or is_cross_attn or has_window or not causal:
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, extend_seq_lens, encoder_lens, **shared,
            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
        )  # fmt: skip
    begin = 0
    for i, (total, cached, new) in enumerate(
        zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        end = begin + new
        if 2 * new > total:
            one = slice(i, i + 1)
            original(
                self, query[begin:end], output[begin:end], k_cache, v_cache, req_to_token,
                req_pool_indices[one], seq_lens[one], extend_prefix_lens[one], extend_seq_lens[one],
                **shared,
            )  # fmt: skip
        else:
            slots = req_to_token[req_pool_indices[i], :total]
            k, v = (
                cache[slots].movedim(1, 0)[None].to(query.dtype) for cache in (k_cache, v_cache)
            )
            rows = max(1, MASK_ELEMENTS // total)
            columns = torch.arange(total, device=query.device)
            for first in range(0, new, rows):
                last = min(new, first + rows)
                positions = torch.arange(cached + first, cached + last, device=query.device)
                found = scaled_dot_product_attention(
                    query[begin + first : begin + last].movedim(1, 0)[None], k, v,
                    attn_mask=columns <= positions[:, None], enable_gqa=enable_gqa, scale=scaling,
                )  # fmt: skip
                output[begin + first : begin + last] = found[0].movedim(0, 1)
        begin = end
    return output
