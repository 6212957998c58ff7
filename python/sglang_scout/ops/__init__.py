"""Ops on torch tensors: a function NAME calls its kernel (`ops.triton`), _NAME_native (C++) or NAME_reference."""
