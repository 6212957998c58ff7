"""The learned correction of predicted queries: a small file of arrays per layer, made for one model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_scout.core.errors import ConfigError

CORRECTION_VERSION = 1
_KEY = "--kv-offload-config: predictor_file"
_ARRAYS = ("now", "previous", "out", "bias")


@dataclass(frozen=True)
class StreamCorrection:
    """How each layer's input changes across the layer, as a low-rank map; see ``ops/advance.py``.

    L layers, C hidden size, r rank. Row l of every array belongs to the step from the input of layer l
    to that of layer l + 1.

    Attributes:
        model: last part of the path of the model it was fitted on.
        weights: that model's fingerprint.
        tokens: decoded tokens that it was fitted on.
        now, previous: ``[L - 1, C, r]`` float32.
        out: ``[L - 1, r, C]`` float32.
        bias: ``[L - 1, C]`` float32.
    """

    model: str
    weights: str
    tokens: int
    now: npt.NDArray[np.float32]
    previous: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    @property
    def num_layers(self) -> int:
        return len(self.bias) + 1

    @property
    def hidden_size(self) -> int:
        return int(self.bias.shape[1])

    @property
    def rank(self) -> int:
        return int(self.out.shape[1])


def save_correction(correction: StreamCorrection, path: Path) -> None:
    """Write the file, in one rename."""
    about = {
        "version": CORRECTION_VERSION,
        "model": correction.model,
        "weights": correction.weights,
        "tokens": correction.tokens,
    }
    write_arrays(path, about, {name: getattr(correction, name) for name in _ARRAYS})


def load_correction(
    path: str, *, num_layers: int, hidden_size: int, model: str, weights: str
) -> StreamCorrection:
    """Read and check a file.

    Args:
        num_layers, hidden_size, model, weights: of the model that is served; ``model`` is its path,
            ``weights`` its fingerprint.
    Raises:
        ConfigError: unreadable, of another version, damaged, or made for another model.
    """
    about, arrays = read_arrays(path, _KEY)
    if about.get("version") != CORRECTION_VERSION:
        raise ConfigError(
            f"{_KEY} = {path!r}: version {about.get('version')!r}, this build reads "
            f"{CORRECTION_VERSION}; fit it anew"
        )
    rank = arrays["out"].shape[1] if arrays.get("out", np.zeros(0)).ndim == 3 else 0
    wanted = {
        "now": (num_layers - 1, hidden_size, rank),
        "previous": (num_layers - 1, hidden_size, rank),
        "out": (num_layers - 1, rank, hidden_size),
        "bias": (num_layers - 1, hidden_size),
    }
    for name, shape in wanted.items():
        found = arrays.get(name, np.zeros(0)).shape
        if found != shape:
            raise ConfigError(
                f"{_KEY} = {path!r}: {name} has shape {list(found)}, {model!r} with {num_layers} "
                f"layers of {hidden_size} needs {list(shape)}; fit one on this model"
            )
        if not np.isfinite(arrays[name]).all():
            raise ConfigError(f"{_KEY} = {path!r}: {name} is not finite; fit it anew")
    made_for = str(about.get("model"))
    if about.get("weights") != weights:
        raise ConfigError(
            f"{_KEY} = {path!r}: fitted on other weights, those of {made_for!r} "
            f"({about.get('weights')}); {model!r} has {weights}; fit one on this model"
        )
    return StreamCorrection(
        model=made_for,
        weights=weights,
        tokens=int(about.get("tokens", 0)),
        **{name: np.ascontiguousarray(arrays[name], np.float32) for name in _ARRAYS},
    )


def write_arrays(path: Path, about: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    """An ``.npz`` of arrays and a JSON object; appears in one rename."""
    header = np.frombuffer(json.dumps(about).encode(), np.uint8)
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        np.savez(file, allow_pickle=False, about=header, **arrays)
    scratch.replace(path)


def read_arrays(path: str, what: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What `write_arrays` wrote.

    Raises:
        ConfigError: unreadable or no such file; ``what`` names the key or argument.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
    except OSError as error:
        raise ConfigError(f"{what} = {path!r}: cannot read the file: {error}") from None
    except Exception as error:  # numpy, zip and JSON have many ways to say no
        raise ConfigError(f"{what} = {path!r}: not a file of arrays: {error}") from None
    if not isinstance(about, dict):
        raise ConfigError(f"{what} = {path!r}: not a file of arrays: no header")
    return about, arrays
