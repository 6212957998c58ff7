"""Ops built from a reference: checks from specs, reasons from limits, and implementation choice."""

import logging
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sglang_scout.core import registry
from sglang_scout.core.errors import ImplementationError
from sglang_scout.core.registry import Tolerance
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.op import Implementation, op
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages


class Pool(NamedTuple):
    k: torch.Tensor
    ids: torch.Tensor


def make_op(valid=lambda call: ""):
    @op(
        valid,
        count="n",
        k="P H D kv",
        q="B H*G D float32",
        pool=("P D kv", "B int32"),
        ids="n int64",
        layers="L P ... kv",
        how=["up", "down"],
        tolerances={},
    )
    def scale(
        q: torch.Tensor,
        k: torch.Tensor,
        pool: Pool | None = None,
        ids: torch.Tensor | None = None,
        layers: LayerPages | None = None,
        count: int = 2,
        how: str = "up",
    ) -> torch.Tensor:
        """Twice."""
        return 2 * q

    limits = {"sizes": {"D": range(4, 13, 4)}, "dtypes": (torch.float32,), "strided_rows": ("q",)}
    unless = lambda call: "no rows" * (call.sizes["B"] == 0)  # noqa: E731
    scale.register(Implementation("narrow", lambda q, *_: q + q, **limits, unless=unless))
    scale.register(Implementation("never", None, devices=lambda tensors: ["no device"]))
    scale.register(Implementation("shy", lambda q, *_: q * 2, unasked=lambda: "nobody asked"))
    return scale


def arguments(**changed):
    return {"q": torch.ones(3, 6, 8), "k": torch.ones(5, 2, 8)} | changed


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(registry, "_chosen", {})


def test_auto_takes_the_first_without_a_reason_and_says_so_once(caplog):
    scale = make_op()
    assert scale.names() == ["narrow", "never", "shy", "reference"]
    assert scale.__doc__ == "Twice."
    with caplog.at_level(logging.INFO):
        for D in (8, 8, 6, 6, 8):
            assert (scale(torch.ones(3, 6, D), torch.ones(5, 2, D)) == 2).all()
    assert registry.chosen() == {"scale": "narrow+reference"}
    assert caplog.messages == [
        "op scale runs as narrow",
        "op scale runs as reference (narrow: D=6; narrow supports multiples of 4 up to 12; "
        "never: no device; shy: nobody asked)",
    ]


def test_a_named_implementation_never_falls_back():
    scale = make_op()
    with pytest.raises(ImplementationError) as caught:
        scale(**arguments(), impl="never")
    assert "scale: implementation 'never' cannot run: never: no device." in str(caught.value)
    assert "q torch.float32[3, 6, 8] cpu" in str(caught.value)
    assert registry.chosen() == {}
    assert (scale(**arguments(), impl="shy") == 2).all()
    with pytest.raises(ImplementationError, match="known are auto, narrow, never, shy, reference"):
        scale(**arguments(), impl="triton")


def test_calls_that_name_none_take_the_preferred_one():
    scale = make_op()
    scale.preferred = "shy"
    scale(**arguments())
    scale(**arguments(), impl="narrow")
    assert registry.chosen() == {"scale": "shy+narrow"}
    scale.preferred = "never"
    with pytest.raises(ImplementationError, match="scale: implementation 'never' cannot run"):
        scale(**arguments())


def test_every_limit_is_a_reason():
    narrow = lambda **changed: make_op().reasons(**arguments(**changed))["narrow"]  # noqa: E731
    assert narrow() == []
    wide = torch.ones(3, 2, 6, 8)[:, 0]
    assert narrow(q=wide) == [], "its rows are contiguous"
    assert narrow(q=torch.ones(0, 6, 8)) == ["no rows"]
    assert narrow(q=torch.ones(3, 8, 6).mT, k=torch.ones(5, 2, 8).double().mT.contiguous().mT) == [
        "dtype torch.float64; narrow supports float32",
        "k is not contiguous, strides (16, 1, 2)",
        "q is not contiguous, strides (48, 1, 6)",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(5, 2, 9)}, "scale: q has D=8, expected 9"),
        ({"q": torch.ones(3, 5, 8)}, r"q has H\*G=5, expected a multiple of H=2"),
        ({"q": torch.ones(3, 0, 8)}, r"q has H\*G=0, expected a multiple of H=2"),
        ({"q": torch.ones(3, 6, 8).half()}, "q has dtype torch.float16, expected torch.float32"),
        ({"q": torch.ones(3, 8)}, r"q has 2 axes \[3, 8\], expected \[B, H\*G, D\]"),
        ({"q": [1]}, "q is a list, expected a tensor"),
        ({"k": None}, "k is a NoneType, expected a tensor"),
        ({"pool": Pool(torch.ones(5, 7), torch.ones(3).int())}, "pool.k has D=7, expected 8"),
        ({"pool": (torch.ones(5, 8), torch.ones(2).int())}, r"pool\[1\] has B=2, expected 3"),
        ({"ids": torch.ones(4).long()}, "ids has n=4, expected 2"),
        ({"layers": LayerPages.of(*[[torch.ones(4, 3, 1)]] * 2, "cpu")}, "layers.k has P=4"),
        ({"how": "sideways"}, "how is 'sideways', expected one of up, down"),
    ],
)
def test_what_specs_say_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        make_op()(**arguments(**change))


def test_what_fits_is_called_by_place_or_by_name():
    scale = make_op()
    layers = LayerPages.of(*[[torch.ones(5, 3, 1)] * 4] * 2, "cpu")
    pool = Pool(torch.ones(5, 8), torch.ones(3).int())
    call = scale.check(
        *arguments().values(), pool, layers=layers, ids=torch.ones(7).long(), count=7
    )
    assert call.sizes["G"] == 3 and call.sizes["L"] == 4 and call.sizes["..."] == [3, 1]
    assert [name for name, _ in call.tensors] == [
        "k", "q", "pool.k", "pool.ids", "ids", "layers.k", "layers.addresses",
    ]  # fmt: skip
    assert call.values[5:] == [7, "up"] and call["pool"] is pool
    for wrong in ({"q": torch.ones(1)}, arguments(more=1)):
        with pytest.raises((TypeError, KeyError)):
            scale(**wrong)
    with pytest.raises(ValueError, match="scale: too many"):
        make_op(lambda call: "too many")(**arguments())


@pytest.mark.parametrize(
    ("actual", "expected", "fits"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.021], [1.0, 2.0], True),
        ([1.0, 2.04], [1.0, 2.0], False),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.nan], [np.nan], False),
        ([-np.inf], [-np.inf], True),
        ([np.inf], [-np.inf], False),
        ([1e30], [np.inf], False),
        ([-np.inf], [0.0], False),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
)
def test_tolerance(actual, expected, fits):
    said = Tolerance(0.01, 0.01, "a test").mismatch(np.array(actual), np.array(expected))
    assert (said == "") is fits


def of_triton(op):
    return next(i for i in op.implementations if i.name == "triton")


def test_where_tensors_must_be_for_kernels(monkeypatch):
    """Pinned host memory replaces device memory only where a kernel can read it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    digests = torch.zeros(4, 1, 24), torch.zeros(4, 1, 24)
    table, n_full = torch.zeros(1, 2).int(), torch.zeros(1).int()
    assert score_pages.reasons(torch.zeros(1, 1, 24), *digests, table, n_full, 1.0)["triton"] == [
        "tensors are on cpu and TRITON_INTERPRET is not set",
        "D=24; triton supports multiples of 16 up to 256",
    ]
    here, there = torch.zeros(2, 32, 1, 16), torch.zeros(1, 2, 1, 16, device="meta")
    source, ids = LayerPages.of([here], [here], "cpu"), torch.zeros(1, device="meta").long()
    refused = build_layer_digests.reasons(source, ids, there, there)["triton"]
    assert "tensors are on cpu and meta; triton takes one device" in refused
    lies = {"source.k": here, "source.addresses": there, "ids": ids, "kmin": there}
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x is here)
    of_host = of_triton(build_layer_digests).devices(list(lies.items()))
    assert of_host == ["tensors are on meta; triton supports cuda"]


def test_auto_leaves_interpreted_kernels_to_those_who_ask_for_them(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tables = (torch.zeros(1, 2), torch.zeros(1, 2).int(), *[torch.ones(1).int()] * 2, 2)
    assert select_pages.reasons(*tables) == {"triton": [], "reference": []}
    select_pages(*tables)
    assert registry.chosen() == {"select_pages": "reference"}
    monkeypatch.delenv("TRITON_INTERPRET")
    assert of_triton(select_pages).unasked() == ""
