"""The learned correction: its file, and the fit against what made the data."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_scout.core.correction import (
    StreamCorrection,
    load_correction,
    save_correction,
    write_arrays,
)
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.fit import fit_correction, read_inputs

L, C, R = 3, 12, 2


def correction(seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=(L - 1, *shape)).astype(np.float32)

    return StreamCorrection("model", "feed", 321, draw(C, R), draw(C, R), draw(R, C), draw(C))


def load(path, **kwargs):
    given = {"num_layers": L, "hidden_size": C, "model": "/x/model", "weights": "feed"} | kwargs
    return load_correction(str(path), **given)


def test_the_file_keeps_everything(tmp_path):
    save_correction(correction(), tmp_path / "c.npz")
    found = load(tmp_path / "c.npz")
    assert (found.model, found.weights, found.tokens) == ("model", "feed", 321)
    assert (found.num_layers, found.hidden_size, found.rank) == (L, C, R)
    for name in ("now", "previous", "out", "bias"):
        np.testing.assert_array_equal(getattr(found, name), getattr(correction(), name))
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_layers": 4}, r"now has shape \[2, 12, 2\], '/x/model' with 4 layers of 12"),
        ({"hidden_size": 16}, r"needs \[2, 16, 2\]; fit one on this model"),
        ({"weights": "beef"}, r"other weights, those of 'model' \(feed\); '/x/model' has beef"),
    ],
)
def test_another_model_is_refused(tmp_path, kwargs, message):
    save_correction(correction(), tmp_path / "c.npz")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "c.npz", **kwargs)


def test_what_is_no_such_file_is_refused(tmp_path):
    path = tmp_path / "c.npz"
    with pytest.raises(ConfigError, match="predictor_file = .*cannot read the file"):
        load(path)
    for text in (b"", b"hello", json.dumps({"version": 1}).encode()):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="not a file of arrays"):
            load(path)
    np.savez(path, about=np.array([{"a": object()}], dtype=object))
    with pytest.raises(ConfigError, match="not a file of arrays"):
        load(path)  # would need pickle
    write_arrays(path, {"version": 99}, {})
    with pytest.raises(ConfigError, match="version 99, this build reads 1"):
        load(path)
    write_arrays(path, {"version": 1}, {"out": np.zeros(3)})
    with pytest.raises(ConfigError, match="now has shape"):
        load(path)
    broken = correction()
    broken.bias[0, 0] = np.nan
    save_correction(broken, path)
    with pytest.raises(ConfigError, match="bias is not finite"):
        load(path)


def rms(x):
    return np.sqrt(np.square(x).mean(-1, keepdims=True))


def sequence(truth, n, seed=1, noise=0.0, period=50):
    """Inputs that change as ``truth`` says: [N, L, C] and source [N]; a request ends every 50 tokens."""
    rng = np.random.default_rng(seed)
    inputs = np.zeros((n, L, C), np.float32)
    source = np.where(np.arange(n) % period == 0, -1, np.arange(n) - 1)
    inputs[:, 0] = rng.normal(size=(n, C)) * rng.uniform(0.5, 20, (n, 1))
    for t in range(n):
        for l in range(L - 1):  # noqa: E741
            x = inputs[t, l]
            last = inputs[t - 1, l + 1] if source[t] >= 0 else rng.normal(size=C)
            low = x / rms(x) @ truth.now[l] + last / rms(last) @ truth.previous[l]
            change = low @ truth.out[l] + truth.bias[l] + noise * rng.normal(size=C)
            inputs[t, l + 1] = x + rms(x) * change
    return inputs, source


def applied(found, inputs, source, layer):
    rows = np.flatnonzero(source >= 0)
    x, last = inputs[rows, layer], inputs[source[rows], layer + 1]
    low = x / rms(x) @ found.now[layer] + last / rms(last) @ found.previous[layer]
    return x + rms(x) * (low @ found.out[layer] + found.bias[layer]), inputs[rows, layer + 1]


@pytest.mark.parametrize("n", [1500, 130])
def test_a_low_rank_change_is_found(n):
    truth = correction(3)
    found, fits = fit_correction(*sequence(truth, n), rank=R, model="m", weights="w")
    assert (found.num_layers, found.hidden_size, found.rank) == (L, C, R)
    assert found.tokens == n - -(-n // 50)
    fresh = sequence(truth, 400, seed=9)
    for layer in range(L - 1):
        got, want = applied(found, *fresh, layer)
        assert np.square((got - want) / rms(want)).mean() < 2e-3
        assert fits[layer].error < 0.01 * fits[layer].plain_error


def test_more_features_than_tokens_gives_the_same_as_the_primal_form():
    """The dual system, taken when there are few tokens, has the same solution."""
    from sglang_scout.core import fit

    rng = np.random.default_rng(0)
    f, r, w = rng.normal(size=(20, 20)), rng.normal(size=(20, 6)), rng.uniform(0.2, 3, (20, 1))
    down, up, bias = fit._solve(f, r, w, 0.1, 3)  # n <= width: dual
    f_mean, r_mean = (np.average(a, axis=0, weights=w[:, 0]) for a in (f, r))
    g, m, diagonal = f - f_mean, r - r_mean, np.diag(w[:, 0] / w.mean())
    b = np.linalg.solve(g.T @ diagonal @ g + 0.1 * 20 * np.eye(20), g.T @ diagonal @ m)
    top = np.linalg.svd(np.sqrt(diagonal) @ g @ b)[2][:3]
    np.testing.assert_allclose(down @ up, b @ top.T @ top, atol=1e-5)
    np.testing.assert_allclose(bias, r_mean - f_mean @ down @ up, atol=1e-5)


def test_what_cannot_be_learned_is_left_alone():
    rng = np.random.default_rng(2)
    inputs = rng.normal(size=(150, L, C)).astype(np.float32)
    inputs[:, 1] = inputs[:, 0]  # layer 0 changes nothing
    inputs[:, 2] = inputs[:, 1] + 0.1 * inputs[:, 2]  # layer 1 only adds noise
    found, fits = fit_correction(inputs, np.arange(-1, 149), rank=4)
    assert fits[0].ridge is None and not found.now[0].any() and not found.bias[0].any()
    assert fits[1].error <= fits[1].plain_error


def test_too_few_tokens_are_refused():
    inputs = np.zeros((300, L, C), np.float32)
    with pytest.raises(ConfigError, match="0 tokens follow another one"):
        fit_correction(inputs, np.full(300, -1), rank=2)


def test_a_file_of_inputs_of_another_version_is_refused(tmp_path):
    path = tmp_path / "i.npz"
    write_arrays(path, {"version": 7}, {"inputs": np.zeros(1), "source": np.zeros(1)})
    with pytest.raises(ConfigError, match="record it anew"):
        read_inputs(str(path))
    save_correction(replace(correction()), path)
    with pytest.raises(ConfigError, match="record it anew"):
        read_inputs(str(path))
