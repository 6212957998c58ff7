"""Ops built from a reference: checks from specs, reasons from limits, and the choice of an implementation."""

import logging
from typing import Annotated, NamedTuple

import numpy as np
import pytest
import torch

from sglang_scout.core.errors import ImplementationError
from sglang_scout.ops import op as ops
from sglang_scout.ops.digest import build_layer_digests
from sglang_scout.ops.layers import LayerPages
from sglang_scout.ops.op import Op, Tolerance, chosen, op
from sglang_scout.ops.score import score_pages
from sglang_scout.ops.select import select_pages


class Pool(NamedTuple):
    k: torch.Tensor
    ids: torch.Tensor


def make_op(valid=lambda call: ""):
    @op(valid, tolerances={})
    def scale(
        q: Annotated[torch.Tensor, "B H*G D query"],
        k: Annotated[torch.Tensor, "P H D kv"],
        pool: Annotated[Pool | None, ("P D kv", "B int32")] = None,
        ids: Annotated[torch.Tensor | None, "n int64"] = None,
        layers: Annotated[LayerPages | None, "L P H 1 any"] = None,
        count: Annotated[int, "n"] = 2,
    ) -> torch.Tensor:
        """Twice."""
        return 2 * q

    scale.register(
        "narrow",
        lambda q, *_: q + q,
        sizes={"D": range(4, 13, 4)},
        strided_rows=("q",),
        unless=lambda call: "" if call.sizes["B"] else "no rows",
    )
    scale.register("device", lambda q, *_: q * 2, device="cuda")
    return scale


def arguments(**changed):
    return {"q": torch.ones(3, 6, 8), "k": torch.ones(5, 2, 8)} | changed


@pytest.fixture(autouse=True)
def every_op(monkeypatch):
    monkeypatch.setattr(Op, "every", [])


def test_a_call_takes_the_first_without_a_reason_and_says_so_once(caplog):
    scale = make_op()
    assert scale.names() == ["narrow", "device", "reference"]
    assert scale.__doc__ == "Twice."
    with caplog.at_level(logging.INFO):
        for rows, D in ((3, 8), (3, 8), (3, 6), (3, 8), (0, 8)):
            assert (scale(torch.ones(rows, 6, D), torch.ones(5, 2, D)) == 2).all()
    assert chosen() == {"scale": "narrow+reference"}
    assert caplog.messages == [
        "op scale runs as narrow",
        "op scale runs as reference (narrow: D=6; narrow supports multiples of 4 up to 12; "
        "device: q is on cpu; device supports cuda)",
    ]


def test_a_named_implementation_never_falls_back():
    scale = make_op()
    for wrong, why in ((arguments(), "q is on cpu"), (arguments(q=torch.ones(0, 6, 8)), "no rows")):
        name = "narrow" if why == "no rows" else "device"
        with pytest.raises(ImplementationError) as caught:
            scale(**wrong, impl=name)
        assert f"scale: implementation '{name}' cannot run: {why}" in str(caught.value)
        assert "k torch.float32[5, 2, 8] cpu" in str(caught.value)
    assert chosen() == {}
    with pytest.raises(ImplementationError, match="known are auto, narrow, device, reference"):
        scale(**arguments(), impl="triton")


def test_every_limit_is_a_reason():
    narrow = lambda **changed: make_op().reasons(**arguments(**changed))["narrow"]  # noqa: E731
    assert narrow() == []
    wide = torch.ones(3, 2, 6, 8)[:, 0]
    assert narrow(q=wide) == [], "its rows are contiguous"
    assert narrow(q=torch.ones(0, 6, 8)) == ["no rows"]
    assert narrow(q=torch.ones(3, 8, 6).mT, k=torch.ones(5, 8, 2).mT) == [
        "q is not contiguous, strides (48, 1, 6)",
        "k is not contiguous, strides (16, 1, 2)",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(5, 2, 9)}, "scale: k has D=9, expected 8"),
        ({"q": torch.ones(3, 5, 8)}, r"q has H\*G=5, expected a multiple of H=2"),
        ({"q": torch.ones(3, 0, 8)}, r"q has H\*G=0, expected a multiple of H=2"),
        ({"q": torch.ones(3, 6, 8).int()}, "q has dtype torch.int32, expected torch.float32 or"),
        ({"pool": (torch.ones(5, 8).half(), torch.ones(3).int())}, "expected torch.float32"),
        ({"q": torch.ones(3, 8)}, r"q has 2 axes \[3, 8\], expected \[B, H\*G, D\]"),
        ({"q": [1]}, "q is a list, expected a tensor"),
        ({"k": None}, "k is a NoneType, expected a tensor"),
        ({"pool": Pool(torch.ones(5, 7), torch.ones(3).int())}, "pool.k has D=7, expected 8"),
        ({"pool": [torch.ones(5, 8), torch.ones(2).int()]}, "pool.1 has B=2, expected 3"),
        ({"ids": torch.ones(4).long(), "count": np.int64(5)}, "count has n=5, expected 4"),
        ({"layers": LayerPages.of(*[[torch.ones(4, 2, 1)]] * 2, "cpu")}, "layers.k has P=4"),
        ({"layers": LayerPages.of(*[[torch.ones(5, 2, 3)]] * 2, "cpu")}, "has an axis of 3, expec"),
    ],
)
def test_what_specs_say_is_checked_also_after_calls_that_fit(change, message):
    """Tuples, lists and numbers of numpy too."""
    scale, pool = make_op(), [torch.ones(5, 8), torch.ones(3).int()]
    scale(**arguments())
    scale(**arguments(pool=pool, ids=torch.ones(4).long(), count=np.int64(4)))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            scale(**arguments(**change))


def test_what_fits_is_called_by_place_or_by_name():
    scale = make_op()
    layers = LayerPages.of(*[[torch.ones(5, 2, 1)] * 4] * 2, "cpu")
    pool = Pool(torch.ones(5, 8), torch.ones(3).int())
    call = scale.check(
        *arguments().values(), pool, layers=layers, ids=torch.ones(7).long(), count=7
    )
    assert call.sizes["G"] == 3 and call.sizes["L"] == 4
    names = ["q", "k", "pool.k", "pool.ids", "ids", "layers.k", "layers.addresses"]
    assert [name for name, _ in call.tensors] == names
    assert call.values[5:] == [7] and call["pool"] is pool
    for wrong in ({"q": torch.ones(1)}, arguments(more=1)):
        with pytest.raises((TypeError, KeyError)):
            scale(**wrong)
    with pytest.raises(ValueError, match="scale: too many"):
        make_op(lambda call: "too many")(**arguments())


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(ops, "_MOST_REMEMBERED", 3)
    scale = make_op()
    for n in range(8):
        scale(**arguments(ids=torch.ones(n).long(), count=n))
        assert len(scale._able) <= 3


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


def test_where_tensors_must_be_for_kernels(monkeypatch):
    """Pinned host memory replaces device memory."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    digests = torch.zeros(4, 1, 24), torch.zeros(4, 1, 24)
    table, n_full = torch.zeros(1, 2).int(), torch.zeros(1).int()
    assert score_pages.reasons(torch.zeros(1, 1, 24), *digests, table, n_full, 1.0)["triton"] == [
        "q is on cpu; triton supports cuda",
        "D=24; triton supports multiples of 16 up to 256",
    ]
    kernel = build_layer_digests.implementations["triton"]
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x is here)
    assert kernel.reaches("source.k", here)
    assert not kernel.reaches("source.k", torch.zeros(2)) and not kernel.reaches("ids", there)
    assert ops._facts(here) != ops._facts(torch.zeros(2)), "so what is remembered depends on it"


def test_interpreted_kernels_are_for_those_who_ask_for_them(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(select_pages, "ran", {})
    tables = (torch.zeros(1, 2), torch.zeros(1, 2).int(), *[torch.ones(1).int()] * 2, 2)
    assert select_pages.reasons(*tables) == {"triton": []}
    select_pages(*tables)
    assert list(select_pages.ran) == ["reference"]
