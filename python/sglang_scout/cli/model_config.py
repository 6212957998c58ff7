"""A model's shape and weight size from its folder: config.json and the sizes of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_scout.core.errors import ConfigError

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEFAULT_CONTEXT_TOKENS = 32768


@dataclass(frozen=True)
class ModelConfig:
    """What matters for memory.

    Attributes:
        dtype: of weights and KV, resolved.
        weight_source: where ``weight_bytes`` comes from.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    dtype: str
    weight_bytes: int
    weight_source: str

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    def describe(self) -> str:
        return (
            f"{self.architecture}, {self.num_layers} layers, {self.num_q_heads} query and "
            f"{self.num_kv_heads} KV heads of {self.head_dim}"
        )


def read_model(model_path: str, dtype: str, command: str = "plan") -> ModelConfig:
    """Reads a model folder.

    Args:
        model_path: folder with config.json.
        dtype: "auto" or a type; auto takes the checkpoint's, and float16 for float32, as SGLang.
        command: for messages.

    Raises:
        ConfigError: no folder, no readable config.json, latent attention, which is not served, or
            quantised weights without files, whose size cannot be told from config.json.
    """
    folder = Path(model_path)
    flag = f"{command}: --model-path {model_path}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot read config.json: {error.strerror}; give the folder of a model"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{flag}: config.json is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{flag}: config.json holds no object")
    text = config.get("text_config") or config
    if text.get("kv_lora_rank"):
        raise ConfigError(f"{flag}: has latent attention (MLA); --kv-offload serves MHA and GQA")
    layers, heads = (
        _number(flag, text, key) for key in ("num_hidden_layers", "num_attention_heads")
    )
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or _number(flag, text, "hidden_size") // heads)
    stored = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype")
    stored = stored if stored in VALUE_BYTES else "float32"
    used = dtype
    if dtype == "auto":
        used = "float16" if stored == "float32" else stored
    if config.get("quantization_config"):
        weight_bytes, source = _weight_files(folder)
        if not weight_bytes:
            raise ConfigError(
                f"{flag}: is quantised and has no safetensors files to take sizes from"
            )
        source += ", quantised"
    else:
        weight_bytes, source = _weights(folder, text, VALUE_BYTES[stored], VALUE_BYTES[used])
    return ModelConfig(
        architecture=(config.get("architectures") or ["(no architecture named)"])[0],
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=int(text.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS),
        dtype=used,
        weight_bytes=weight_bytes,
        weight_source=source,
    )


def _number(flag: str, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{flag}: config.json has {key} = {value!r}, expected a positive number")
    return value


def _weights(
    folder: Path, config: dict[str, Any], stored_bytes: int, used_bytes: int
) -> tuple[int, str]:
    """Bytes of the loaded weights, and where the number is from."""
    size, source = _weight_files(folder)
    if size:
        if used_bytes != stored_bytes:
            source += ", converted"
        return size * used_bytes // stored_bytes, source
    return _estimate(config) * used_bytes, "estimated from config.json, there are no files"


def _weight_files(folder: Path) -> tuple[int, str]:
    """Bytes of the stored weights, 0 where there are none, and where the number is from."""
    files = sorted(folder.glob("*.safetensors"))
    size, source = sum(f.stat().st_size for f in files), "from safetensors files"
    index = folder / "model.safetensors.index.json"
    if not size and index.is_file():
        try:
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError):
            size = 0
        source = f"from {index.name}"
    return size, source


def _estimate(config: dict[str, Any]) -> int:
    """Parameters of a dense decoder with gated MLP; norms and biases are too small to count."""
    hidden, layers = int(config.get("hidden_size", 0)), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * size * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * int(config.get("intermediate_size", 0))
    tables = 1 if config.get("tie_word_embeddings") else 2
    return layers * (attention + mlp) + tables * hidden * int(config.get("vocab_size", 0))
