"""Ops on torch tensors: one file per op, its reference first, other implementations beside it."""

from .append import append_tokens
from .attend import attend_pages
from .digest import build_layer_digests
from .gather import copy_layer_pages
from .layers import LayerPages
from .merge import merge_states
from .predict import predict_query
from .score import score_pages
from .select import Selection, select_pages
from .signs import build_layer_signs, score_signs

__all__ = [
    "LayerPages",
    "Selection",
    "append_tokens",
    "attend_pages",
    "build_layer_digests",
    "build_layer_signs",
    "copy_layer_pages",
    "merge_states",
    "predict_query",
    "score_pages",
    "score_signs",
    "select_pages",
]
