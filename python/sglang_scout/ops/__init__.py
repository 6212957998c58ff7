"""Ops on torch tensors: one file per op, its reference first, other implementations beside it."""

from .advance import advance_input
from .attend import attend_pages
from .attend_int8 import attend_pages_int8
from .digest import build_digests
from .gather import copy_pages
from .merge import merge_states
from .predict import predict_query
from .quantize import quantize_pages
from .score import score_pages
from .select import Selection, select_pages

__all__ = [
    "Selection",
    "advance_input",
    "attend_pages",
    "attend_pages_int8",
    "build_digests",
    "copy_pages",
    "merge_states",
    "predict_query",
    "quantize_pages",
    "score_pages",
    "select_pages",
]
