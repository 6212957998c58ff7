import logging

import numpy as np
import pytest

from sglang_scout.core import registry
from sglang_scout.core.errors import ImplementationError
from sglang_scout.core.registry import Implementation, Op, Tolerance


def make_op(**options):
    return Op(
        "double",
        lambda x, scale=2: x * scale,
        [
            Implementation(
                "narrow",
                lambda x, scale=2: x + x,
                lambda x, scale=2: [] if x.shape[0] < 4 else [f"n={x.shape[0]}; narrow takes 3"],
            ),
            Implementation(
                "never", lambda x, scale=2: None, lambda x, scale=2: ["no device", "no licence"]
            ),
        ],
        **options,
    )


@pytest.fixture(autouse=True)
def fresh():
    before = dict(registry._chosen)
    registry.forget_chosen()
    yield
    registry._chosen.clear()
    registry._chosen.update(before)


def test_auto_takes_the_first_without_a_reason_and_says_so_once(caplog):
    op = make_op()
    assert op.names() == ["narrow", "never", "reference"]
    with caplog.at_level(logging.INFO):
        for n in (3, 3, 5, 5, 3):
            assert (op(np.ones(n)) == 2).all()
    assert registry.chosen() == {"double": "narrow+reference"}
    assert caplog.messages == [
        "op double runs as narrow",
        "op double runs as reference "
        "(narrow: n=5; narrow takes 3; never: no device; never: no licence)",
    ]


def test_a_named_implementation_never_falls_back():
    with pytest.raises(ImplementationError) as caught:
        make_op()(np.ones(5, np.float32), impl="never", scale=2)
    message = str(caught.value)
    assert (
        "double: implementation 'never' cannot run: never: no device; never: no licence" in message
    )
    assert "#0 float32[5]" in message
    assert "scale=2" in message
    assert registry.chosen() == {}


def test_an_unknown_implementation_lists_the_known_ones():
    with pytest.raises(ImplementationError, match="known: auto, narrow, never, reference"):
        make_op()(np.ones(5), impl="triton")


def test_the_check_runs_before_any_implementation():
    def check(x, scale=2):
        raise ValueError("double: x has n=1")

    with pytest.raises(ValueError, match="double: x has n=1"):
        make_op(check=check)(np.ones(1))


def test_register_keeps_the_reference_last():
    op = make_op()
    op.register(Implementation("late", lambda x: x))
    op.register(Implementation("early", lambda x: x), first=True)
    assert op.names() == ["early", "narrow", "never", "late", "reference"]
    assert op.reasons(np.ones(9))["narrow"] == ["n=9; narrow takes 3"]
    for name in ("late", "auto"):
        with pytest.raises(ValueError, match="exists already"):
            op.register(Implementation(name, lambda x: x))


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
