"""Ops on torch tensors: one file per op, its reference first, other implementations beside it."""
