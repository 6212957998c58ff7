"""Files of trained weights: round trip, and mismatches are refused by name."""

import dataclasses

import msgspec
import numpy as np
import pytest

from page_weights import digest_weights, forecast_weights, identity, pilot_weights
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.forecast import check_weights, load_weights, save_weights

BOTH = pytest.mark.parametrize(
    "made", [forecast_weights(), pilot_weights(), digest_weights()], ids=lambda x: x.header.kind
)


@BOTH
def test_what_is_written_comes_back_and_nothing_else_is_left(tmp_path, made):
    path = str(tmp_path / "weights")  # as named, without NumPy's suffix
    save_weights(made, path)
    back = load_weights(path, made.header.kind)
    assert back.header == made.header and [p.name for p in tmp_path.iterdir()] == ["weights"]
    assert all(np.array_equal(back.arrays[name], x) for name, x in made.arrays.items())
    check_weights(back, path, identity=identity(), hidden_size=24, model="m")


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


def test_a_model_without_heads_is_refused(tmp_path):
    made = pilot_weights()
    none = msgspec.structs.replace(identity(), num_kv_heads=0)
    header = msgspec.structs.replace(made.header, identity=none)
    save_weights(dataclasses.replace(made, header=header), str(tmp_path / "w"))
    refused(tmp_path / "w", "pilot", "w_k is float32")


@pytest.mark.parametrize(
    ("made", "header", "arrays", "says"),
    [
        (pilot_weights, {}, {}, "holds pilot weights, expected forecast"),
        (forecast_weights, {"kind": "other"}, {}, "holds other weights, expected forecast"),
        (forecast_weights, {"version": 2}, {}, "version 2, but this release reads version 1"),
        (forecast_weights, {}, {"v": np.zeros(1)}, "has the arrays ['v', 'w'], expected ['w']"),
        (
            forecast_weights,
            {},
            {"w": np.zeros((3, 31, 24), np.float32)},
            "w is float32[3, 31, 24], expected float32[3, 32, any]",
        ),
        (forecast_weights, {}, {"w": np.zeros((3, 32))}, "w is float64[3, 32]"),
        (forecast_weights, {}, {"w": np.full((3, 32, 24), np.inf, np.float32)}, "w has values"),
    ],
)
def test_another_kind_version_or_size_is_refused(tmp_path, made, header, arrays, says):
    weights = made()
    weights = dataclasses.replace(
        weights,
        header=msgspec.structs.replace(weights.header, **header),
        arrays=weights.arrays | arrays,
    )
    save_weights(weights, str(tmp_path / "w"))
    refused(tmp_path / "w", "forecast", says)


@pytest.mark.parametrize("ranks", [(7, 7), (32, 32), (8, 9)])
def test_a_pilot_of_a_rank_that_saves_nothing_or_of_two_is_refused(tmp_path, ranks):
    first, second = (pilot_weights(rank=rank) for rank in ranks)
    arrays = first.arrays | {"w_q": second.arrays["w_q"]}
    save_weights(dataclasses.replace(first, arrays=arrays), str(tmp_path / "w"))
    refused(
        tmp_path / "w", "pilot", f"have the ranks {list(ranks)}, expected equal ranks from 8 to 31"
    )


@pytest.mark.parametrize(("row", "value"), [(0, 16), (0, 0.5), (1, 0), (2, 3), (3, -1)])
def test_coordinates_without_a_meaning_are_refused(tmp_path, row, value):
    made = digest_weights()
    made.arrays["bits"][1, 0, row, 5] = value
    save_weights(made, str(tmp_path / "w"))
    refused(tmp_path / "w", "digest", "bits has a channel outside 0..15, a number of levels")


@BOTH
def test_another_model_is_refused(made):
    kind = made.header.kind
    other = msgspec.structs.replace(identity(), config_digest="fedcba9876543210")
    with pytest.raises(ConfigError) as caught:
        check_weights(made, "f", identity=other, hidden_size=24, model="theirs")
    message = str(caught.value)
    for part in (
        f"{kind}_file = 'f'",
        "0123456789abcdef",
        "'theirs'",
        "fedcba9876543210",
        f"--kind {kind}",
    ):
        assert part in message


def test_another_hidden_size_is_refused():
    with pytest.raises(ConfigError, match="a hidden size of 24, that of 'm' is 32"):
        check_weights(forecast_weights(), "f", identity=identity(), hidden_size=32, model="m")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_share_the_heads(size):
    """Four KV heads of two query heads; eight ranks have one query head each."""
    model = identity(layers=2, q_heads=8, kv_heads=4)
    forecast, pilot = forecast_weights(model), pilot_weights(model)
    w = forecast.arrays["w"].reshape(2, 4, 16, 24)
    w_q = pilot.arrays["w_q"].reshape(2, 4, 8, 2, 16)
    queries = []
    for rank in range(size):
        heads = range(4)[rank * 4 // size : max(rank * 4 // size + 1, (rank + 1) * 4 // size)]
        own = slice(heads[0], heads[-1] + 1)
        assert np.array_equal(
            forecast.of_rank(rank, size).arrays["w"], w[:, own].reshape(2, -1, 24)
        )
        arrays = pilot.of_rank(rank, size).arrays
        assert np.array_equal(arrays["w_k"], pilot.arrays["w_k"][:, own])
        count = min(2, 8 // size)
        part = arrays["w_q"].reshape(2, len(heads), 8, count, 16)
        queries += [part[:, h, :, g] for h in range(len(heads)) for g in range(count)]
    wanted = [w_q[:, h, :, g] for h in range(4) for g in range(2)]
    assert all(np.array_equal(*both) for both in zip(queries, wanted, strict=True))
