"""Files of trained weights: round trip, and mismatches are refused by name."""

import dataclasses
import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from page_weights import forecast_weights, identity, pilot_weights
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import check_weights, load_weights, save_weights

BOTH = pytest.mark.parametrize(
    "made", [forecast_weights(), pilot_weights()], ids=lambda x: x.header.kind
)


@BOTH
def test_what_is_written_comes_back_and_nothing_else_is_left(tmp_path, made):
    path = str(tmp_path / "weights")  # as named, without NumPy's suffix
    save_weights(made, path)
    back = load_weights(path, made.header.kind)
    assert back.header == made.header and [p.name for p in tmp_path.iterdir()] == ["weights"]
    assert all(np.array_equal(back.arrays[name], x) for name, x in made.arrays.items())
    check_weights(back, identity=identity(), hidden_size=24, model="m")


def refused(path, kind, *parts):
    with pytest.raises(ConfigError) as caught:
        load_weights(str(path), kind)
    fix = f"; make one for this model with scripts/train_forecast.py --kind {kind}"
    for part in (f"--kv-offload-config: {kind}_file = {str(path)!r}: ", *parts, fix):
        assert part in str(caught.value)


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    path = tmp_path / "w.npz"
    refused(path, "pilot", "No such file")
    save_weights(forecast_weights(), str(path))
    whole = path.read_bytes()
    with path.open("wb") as file:
        np.savez(file, header=np.array("{}"))
    for content in (b"", b"text", whole[:-100], path.read_bytes()):
        path.write_bytes(content)
        refused(path, "forecast", "not a readable weights file")


def changed(weights, header=None, **arrays):
    header = msgspec.structs.replace(weights.header, **(header or {}))
    return dataclasses.replace(weights, header=header, arrays=weights.arrays | arrays)


def pilot_of_ranks(*ranks):
    first, second = (pilot_weights(rank=rank) for rank in ranks)
    return changed(first, w_q=second.arrays["w_q"])


FORECAST = forecast_weights()
NO_HEADS = msgspec.structs.replace(identity(), num_kv_heads=0)
NARROW, WIDE = np.zeros((3, 31, 24), np.float32), "float32[3, 32, any]"
RANKS = "have the ranks {}, expected equal ranks from 8 to 31"


@pytest.mark.parametrize(
    ("kind", "made", "says"),
    [
        ("forecast", pilot_weights(), "holds pilot weights, expected forecast"),
        ("forecast", changed(FORECAST, {"kind": "other"}), "holds other weights, expected"),
        ("forecast", changed(FORECAST, {"version": 2}), "has version 2, but this release"),
        ("forecast", changed(FORECAST, v=np.zeros(1)), "the arrays ['v', 'w'], expected ['w']"),
        ("forecast", changed(FORECAST, w=NARROW), f"[3, 31, 24], expected {WIDE}"),
        ("forecast", changed(FORECAST, w=np.zeros((3, 32))), "w is float64[3, 32]"),
        ("forecast", changed(FORECAST, w=np.full((3, 32, 24), np.inf, "f4")), "w has values"),
        ("pilot", changed(pilot_weights(), {"identity": NO_HEADS}), "w_k is float32"),
        # A rank that saves nothing, and two ranks.
        *(("pilot", pilot_of_ranks(*x), RANKS.format([*x])) for x in ((7, 7), (32, 32), (8, 9))),
    ],
    ids=itertools.count(),
)
def test_what_does_not_fit_is_refused(tmp_path, kind, made, says):
    save_weights(made, str(tmp_path / "w"))
    refused(tmp_path / "w", kind, says)


@BOTH
def test_another_model_is_refused(made):
    with pytest.raises(ConfigError, match="a hidden size of 24, that of 'm' is 32"):
        check_weights(FORECAST, identity=identity(), hidden_size=32, model="m")
    kind = made.header.kind
    other = msgspec.structs.replace(identity(), config_digest="fedcba9876543210")
    with pytest.raises(ConfigError) as caught:
        check_weights(replace(made, path="f"), identity=other, hidden_size=24, model="theirs")
    for part in (f"{kind}_file = 'f'", "0123456789abcdef", "'theirs'", "fedcba", f"--kind {kind}"):
        assert part in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_share_the_heads(size):
    """Four KV heads of two query heads; eight ranks have one query head each."""
    model = identity(layers=2, q_heads=8, kv_heads=4)
    forecast, pilot = forecast_weights(model), pilot_weights(model)
    for name, whole in (forecast.arrays | pilot.arrays).items():
        weights = forecast if name == "w" else pilot
        parts = [weights.of_rank(rank, size).arrays[name] for rank in range(size)]
        if size == 8:  # pairs of ranks share a head
            pairs = list(zip(parts[::2], parts[1::2], strict=True))
            assert name == "w_q" or all(np.array_equal(*pair) for pair in pairs)
            parts = [np.concatenate(x, axis=-1) if name == "w_q" else x[0] for x in pairs]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
