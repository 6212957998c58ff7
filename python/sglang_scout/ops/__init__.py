"""Ops on torch tensors: one file per op, with its reference first and other implementations registered on it."""
