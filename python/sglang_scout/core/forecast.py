"""Trained weights for page selection, one set of arrays per model: a file written by scripts/train_forecast.py.

NumPy's format without pickle: ``header``, a JSON string (:class:`Header`), and float32 arrays by kind. L layers, H KV
heads, G query heads of each, D head size, r rank.

forecast  ``w [L, H * D, hidden]`` makes one vector per KV head, which selects the pages of layer l: ``w[l + 1]``
          is applied to the input of layer l after layer l's own norm, ``w[0]`` to that of layer 0. No bias and no head
          norm; RoPE as for K (arXiv 2606.04511, sections 4.1 and 4.6).
pilot     ``w_k [L, H, r, 2 D]`` is applied to a page's pooled K, ``w_q [L, H, r, G * D]`` to the real queries after
          RoPE; a page's score is their product (``policy/learned``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_scout.core.config import FLAGS
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.profile import ModelIdentity

Kind = Literal["forecast", "pilot"]
VERSION = 1
MIN_RANK = 8
Floats = npt.NDArray[np.float32]


class Header(msgspec.Struct, frozen=True):
    """``kind`` is a string, so that a file of a future kind is refused by name."""

    version: int
    kind: str
    identity: ModelIdentity
    made_by: str = ""


@dataclass(frozen=True)
class PageWeights:
    """The contents of a file, or a tensor-parallel rank's part of them."""

    header: Header
    arrays: dict[str, Floats]
    path: str = ""

    @property
    def rank(self) -> int:
        """r of a pilot file."""
        return int(self.arrays["w_k"].shape[2])

    def of_rank(self, rank: int, size: int) -> PageWeights:
        """The part for the KV heads of one of ``size`` ranks.

        If ranks share a KV head, each has some of its query heads, and a pilot selects by those.
        """
        model = self.header.identity
        heads, dim = model.num_kv_heads, model.head_dim
        first, count = rank * heads // size, max(1, heads // size)
        rows = dim if self.header.kind == "forecast" else 1  # of a KV head
        own = slice(first * rows, (first + count) * rows)
        arrays = {name: x[:, own].copy() for name, x in self.arrays.items()}
        if self.header.kind == "pilot":
            group, queries = model.num_q_heads // heads, model.num_q_heads // size
            query = rank * model.num_q_heads // size - first * group
            columns = slice(query * dim, (query + min(group, queries)) * dim)
            arrays["w_q"] = arrays["w_q"][..., columns]
        return replace(self, arrays=arrays)


def save_weights(weights: PageWeights, path: str) -> None:
    header = np.array(msgspec.json.encode(weights.header).decode())
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, header=header, **weights.arrays)


def load_weights(path: str, kind: Kind) -> PageWeights:
    """Read the file that a key, as ``forecast_file``, names. Raises ConfigError: unreadable, of another kind or
    version, or with arrays that do not fit the model it names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = msgspec.json.decode(str(arrays.pop("header")), type=Header)
    except Exception as error:  # NumPy raises a dozen types for damaged or foreign files
        raise _wrong(kind, path, f"not a readable weights file: {error}") from None
    if header.version != VERSION:
        what = f"has version {header.version}, but this release reads version {VERSION}"
    elif header.kind != kind:
        what = f"holds {header.kind} weights, expected {kind}"
    else:
        what = _misfit(arrays, header)
    if what:
        raise _wrong(kind, path, what)
    return PageWeights(header, arrays, path)


def _misfit(arrays: dict[str, npt.NDArray[Any]], header: Header) -> str:
    """What is wrong with the arrays, "" if they are those of the model in the header."""
    model = header.identity
    layers, heads, dim = model.num_layers, model.num_kv_heads, model.head_dim
    row = model.num_q_heads // max(heads, 1) * dim
    wanted: dict[str, tuple[int | None, ...]] = {"w": (layers, heads * dim, None)}
    if header.kind == "pilot":
        wanted = {"w_k": (layers, heads, None, 2 * dim), "w_q": (layers, heads, None, row)}
    if arrays.keys() != wanted.keys():
        return f"has the arrays {sorted(arrays)}, expected {sorted(wanted)}"
    for name, shape in wanted.items():
        x = arrays[name]
        sizes = zip(shape, x.shape, strict=False)
        fits = x.ndim == len(shape) and all(n in (None, m) for n, m in sizes)
        if x.dtype != np.float32 or not fits:
            expected = ", ".join("any" if n is None else str(n) for n in shape)
            return f"{name} is {x.dtype}{list(x.shape)}, expected float32[{expected}]"
        if not np.isfinite(x).all():
            return f"{name} has values that are not finite"
    if header.kind == "pilot":
        ranks, most = [x.shape[2] for x in arrays.values()], 2 * dim - 1
        if ranks[0] != ranks[1] or not MIN_RANK <= ranks[0] <= most:
            return f"w_k and w_q have the ranks {ranks}, expected equal ranks from {MIN_RANK} to {most}"
    return ""


def _wrong(kind: str, path: str, what: str) -> ConfigError:
    fix = f"make one for this model with scripts/train_forecast.py --kind {kind}"
    return ConfigError(f"{FLAGS['config']}: {kind}_file = {path!r}: {what}; {fix}")


def check_weights(
    weights: PageWeights, *, identity: ModelIdentity, hidden_size: int, model: str
) -> None:
    """Refuse the weights of another model than this server's; ``model`` is for the message."""
    kind, path, made_for = weights.header.kind, weights.path, weights.header.identity
    if made_for != identity:
        what = f"made for {made_for.describe()}, this server has {model!r} ({identity.describe()})"
        raise _wrong(kind, path, what)
    if kind == "forecast" and (width := weights.arrays["w"].shape[2]) != hidden_size:
        what = f"made for a hidden size of {width}, that of {model!r} is {hidden_size}"
        raise _wrong(kind, path, what)
