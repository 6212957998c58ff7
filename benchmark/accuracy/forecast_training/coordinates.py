"""Coordinates for digests of one bit per channel: where a key's bits tell a query the most.

A digest replaces a key k by k + e, which changes a logit by q . e. Its mean square is e' M e with M = E[q q'], so in
y = M^(1/2) k all directions matter equally. There the principal components of what keys differ by from their page's
mean are independent, and each gets as many bits as reduce the sum of squared errors the most, many none: reverse
water-filling, as in transform coding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmark.accuracy.forecast_training.loss import PAGE_TOKENS
from benchmark.accuracy.study.model import Model

MAX_BITS = 4
STEPS = torch.tensor([0.0, 1.5958, 0.9957, 0.5860, 0.3352])
"""Of the best equidistant quantizer of a normal variable with so many bits (Max 1960)."""
ERRORS = torch.tensor([1.0, 0.3634, 0.1188, 0.03744, 0.01154])
"""Its squared error."""
LEAST = 1e-4
"""Share of the mean that a query's least direction counts at least, so that M can be inverted."""


def moments(model: Model, texts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Second moments of queries, and of keys about their pages' means, ``[L, H, D, D]`` each.

    Args:
        texts: tokens ``[T]``, prefilled with full attention.
    """
    config = model.config
    size = config.layers, config.kv_heads, config.head_dim, config.head_dim
    of_queries, of_keys = torch.zeros(size), torch.zeros(size)

    def see(layer: int, x: Tensor, q: Tensor, k: Tensor) -> None:
        q = q.unflatten(1, (config.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        pages = k[:, : k.shape[1] // PAGE_TOKENS * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS))
        rest = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        of_queries[layer] += q.mT @ q / q.shape[1]
        of_keys[layer] += rest.mT @ rest / rest.shape[1]

    for text in texts:
        model.prefill(text, see)
    return of_queries, of_keys


def bits_of(variance: Tensor) -> Tensor:
    """``[..., D]`` bits per channel, 0 to 4, one on average, for normal variables of this ``variance``."""
    flat = variance.flatten(0, -2)
    bits = torch.zeros_like(flat, dtype=torch.long)
    rows = torch.arange(len(flat))
    for _ in range(flat.shape[-1]):
        more = (bits + 1).clamp(max=MAX_BITS)
        bits[rows, (flat * (ERRORS[bits] - ERRORS[more])).argmax(-1)] += 1
    return bits.view(variance.shape)


def coordinates(of_queries: Tensor, of_keys: Tensor) -> dict[str, Tensor]:
    """``keys``, ``queries`` and ``bits`` of ``ops.rotated.Coordinates``, for all layers, from :func:`moments`."""
    of_queries, of_keys = of_queries.double(), of_keys.double()
    D = of_keys.shape[-1]
    least = LEAST * of_queries.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    size, turn = torch.linalg.eigh(of_queries + least * torch.eye(D))
    root = turn * size.sqrt()[..., None, :] @ turn.mT
    back = turn * size.rsqrt()[..., None, :] @ turn.mT
    variance, axes = torch.linalg.eigh(root @ of_keys @ root)
    variance = variance.flip(-1).clamp(min=1e-12)
    axes = axes.flip(-1).mT  # rows, the largest first
    bits = bits_of(variance.float())
    # Of each bit: its channel, and how many wider bits that has.
    channel = torch.repeat_interleave(torch.arange(bits.numel()), bits.flatten()).view(bits.shape)
    channel = channel % D
    first = bits.cumsum(-1) - bits
    wider = torch.arange(D) - first.gather(-1, channel)
    of_channel = bits.gather(-1, channel)
    deviation = variance.float().sqrt().gather(-1, channel)
    width = STEPS[of_channel] / 2 * 2.0 ** (of_channel - 1 - wider) * deviation
    gain = 1 / (deviation * D**0.5)
    rows = [channel.float(), width, 2.0**wider, gain]
    return {
        "keys": (axes @ root).float(),
        "queries": (axes @ back).float(),
        "bits": torch.stack(rows, -2),
    }
