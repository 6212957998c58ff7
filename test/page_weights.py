"""Random weights that choose pages, as trained ones are held."""

import numpy as np

from sglang_scout.core.forecast import VERSION, Header, PageWeights
from sglang_scout.core.profile import ModelIdentity
from sglang_scout.engine.digests import DigestKind, DigestPool
from sglang_scout.engine.policy import SelectionRule
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
    if weights is None and kind == "pilot":
        weights = pilot_weights(model)
    return SelectionRule(digest_kinds()[kind], weights, **choices)


def digest_pool(shape, pages, kind):
    model = identity(shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    return DigestPool(shape, pages, "cpu", rule_of(kind, model))
