"""Random weights that choose pages, as trained ones are held."""

import math

import numpy as np
import torch

from sglang_scout.core.forecast import VERSION, Header, PageWeights
from sglang_scout.core.profile import ModelIdentity
from sglang_scout.engine.digest_kinds import DigestKind
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.ops.rotated import Coordinates
from sglang_scout.policy import policies


def identity(
    layers=3,
    q_heads=4,
    kv_heads=2,
    dim=16,
    architecture="LlamaForCausalLM",
    digest="0123456789abcdef",
):
    return ModelIdentity(architecture, layers, q_heads, kv_heads, dim, digest)


def forecast_weights(model=None, hidden=24):
    model, draw = model or identity(), np.random.default_rng(0).standard_normal
    w = draw((model.num_layers, model.num_kv_heads * model.head_dim, hidden), np.float32)
    return PageWeights(Header(VERSION, "forecast", model), {"w": w})


def pilot_weights(model=None, rank=8):
    model, draw = model or identity(), np.random.default_rng(0).standard_normal
    lead = model.num_layers, model.num_kv_heads, rank
    group = model.num_q_heads // model.num_kv_heads
    w_k, w_q = (draw((*lead, n * model.head_dim), np.float32) for n in (2, group))
    return PageWeights(Header(VERSION, "pilot", model), {"w_k": w_k, "w_q": w_q})


def coordinates(*size, seed=0):
    """Of KV heads and dimension ``size``, or layers before them: channels of none to four bits."""
    draw, D = torch.Generator().manual_seed(seed), size[-1]
    turn = torch.linalg.qr(torch.randn(*size, D, generator=draw)).Q
    scale = 0.5 + torch.rand(*size, 1, generator=draw)
    of_bits = torch.tensor([4, 3, 2, 2, 1, 1, 1, 1, 1, *[0] * 7]).repeat(D // 16)
    bits = [
        of_bits[torch.randperm(D, generator=draw)].tolist() for _ in range(math.prod(size[:-1]))
    ]
    rows = []
    for of_head in bits:
        of_bits = [(c, 2.0 ** (n - 1 - i), 2.0**i) for c, n in enumerate(of_head) for i in range(n)]
        rows.append(torch.tensor(of_bits).T)
    channel, width, levels = torch.stack(rows, 1)
    gain = torch.full_like(width, D**-0.5)
    table = torch.stack([channel, 0.4 * width, levels, gain], 1)
    return Coordinates(
        (scale * turn).contiguous(), (turn / scale).contiguous(), table.view(*size[:-1], 4, D)
    )


def digest_weights(model=None):
    model = model or identity()
    made = coordinates(model.num_layers, model.num_kv_heads, model.head_dim)
    arrays = {name: x.contiguous().numpy() for name, x in made._asdict().items()}
    return PageWeights(Header(VERSION, "digest", model), arrays)


def digest_kinds():
    """All kinds by name, those of policies too."""
    policies()  # imports them
    found, left = {}, [DigestKind]
    while left:
        kind = left.pop()
        found[kind.name] = kind
        left += kind.__subclasses__()
    return found


def rule_of(kind, model=None, weights=None, **choices):
    """A rule with this kind of digest, with random weights if it is trained."""
    made = {"pilot": pilot_weights, "calibrated": digest_weights}.get(kind)
    if weights is None and made is not None:
        weights = made(model)
    return SelectionRule(digest_kinds()[kind], weights, **choices)


def digest_pool(shape, pages, kind):
    model = identity(shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    return DigestPool(shape, pages, "cpu", rule_of(kind, model))
