"""Bind axis names to sizes, so that arguments that must agree are checked by name."""

from __future__ import annotations

import torch


class Shapes:
    """Collects the sizes of named axes over the arguments of one op call.

    >>> shapes = Shapes("attend_pages")
    >>> shapes.bind("k", k, "PSHD")      # every letter is an axis
    >>> shapes.bind("v", v, "PSHD")      # ValueError: attend_pages: v has H=8, expected 4
    """

    __slots__ = ("op", "sizes")

    def __init__(self, op: str, **sizes: int) -> None:
        self.op = op
        self.sizes = sizes

    def __getitem__(self, axis: str) -> int:
        return self.sizes[axis]

    def bind(
        self, name: str, tensor: torch.Tensor, axes: str, dtype: torch.dtype | None = None
    ) -> None:
        """Check one argument; letters seen for the first time take the size they have here.

        Raises:
            ValueError: not a tensor, wrong number of axes, a size that disagrees with an earlier
                argument, wrong dtype. The message names op, argument, axis and both sizes.
        """
        if not isinstance(tensor, torch.Tensor):
            self.fail(f"{name} is a {type(tensor).__name__}, expected a tensor [{', '.join(axes)}]")
        if dtype is not None and tensor.dtype != dtype:
            self.fail(f"{name} has dtype {tensor.dtype}, expected {dtype}")
        shape = tensor.shape
        if len(shape) != len(axes):
            self.fail(f"{name} has {len(shape)} axes {list(shape)}, expected [{', '.join(axes)}]")
        sizes = self.sizes
        for axis, size in zip(axes, shape, strict=True):
            expected = sizes.setdefault(axis, size)
            if size != expected:
                self.fail(f"{name} has {axis}={size}, expected {expected}")

    def bind_query(self, q: torch.Tensor) -> None:
        """Check ``q`` [B, HQ, D] float32 against B, H and D; HQ is a multiple of H.

        Raises:
            ValueError: as `bind`.
        """
        if not isinstance(q, torch.Tensor) or q.dtype != torch.float32 or q.dim() != 3:
            what = f"{q.dtype}{list(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            self.fail(f"q is {what}, expected torch.float32 [B, HQ, D]")
        rows, heads, dim = q.shape
        for axis, size in (("B", rows), ("D", dim)):
            if size != self.sizes.setdefault(axis, size):
                self.fail(f"q has {axis}={size}, expected {self.sizes[axis]}")
        kv_heads = self.sizes["H"]
        if heads == 0 or kv_heads == 0 or heads % kv_heads:
            self.fail(f"q has HQ={heads}, expected a multiple of H={kv_heads}")

    def bind_scoring(
        self,
        q: torch.Tensor,
        table: torch.Tensor,
        n_full: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        """Check what every op that scores pages takes beside its digests, of which H and D are known.

        Raises:
            ValueError: as `bind`.
        """
        self.bind("table", table, "BN", torch.int32)
        self.bind("n_full", n_full, "B", torch.int32)
        self.bind_query(q)
        if out is not None:
            self.bind("out", out, "BN", torch.float32)

    def one_of(self, name: str, value: str, choices: tuple[str, ...]) -> None:
        """Check an argument that names a variant.

        Raises:
            ValueError: not one of ``choices``.
        """
        if value not in choices:
            self.fail(f"{name} is {value!r}, expected one of {', '.join(choices)}")

    def fail(self, message: str) -> None:
        raise ValueError(f"{self.op}: {message}")
