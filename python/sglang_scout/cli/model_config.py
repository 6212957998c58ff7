"""A model's shape and weight size from its folder: config.json and the sizes of its files."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.served_models import FP8_KV, check_architecture, check_attention

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEFAULT_CONTEXT_TOKENS = 32768
MAX_NUMBER = 2**40


@dataclass(frozen=True)
class ModelConfig:
    """Parameters that determine memory and step time.

    Attributes:
        dtype: of weights and digests, resolved.
        kv_dtype: of KV.
        weight_source: the source of ``weight_bytes``.
        embedding_bytes: of them, the part of which a step reads one row per token; 0 if tied with the head.
        expert_bytes: of them, all experts of an MoE model.
        expert_share: share of a layer's experts that a token uses.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_context_tokens: int
    dtype: str
    kv_dtype: str
    weight_bytes: int
    weight_source: str
    embedding_bytes: int
    expert_bytes: int = 0
    expert_share: float = 1.0

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def bytes_a_token(self) -> int:
        """Bytes of the weights that a token uses."""
        idle = (1 - self.expert_share) * self.expert_bytes
        return self.weight_bytes - self.embedding_bytes - int(idle)

    def describe(self) -> str:
        return (
            f"{self.architecture}, {self.num_layers} layers, {self.num_q_heads} query and "
            f"{self.num_kv_heads} KV heads of {self.head_dim}"
        )


def read_model(model_path: str, dtype: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    """Reads a model folder.

    Args:
        model_path: folder with config.json.
        dtype: "auto" or a type; auto takes the checkpoint's, and float16 for float32, like SGLang.
        kv_cache_dtype: as SGLang's flag.
    Raises:
        ConfigError: no folder, no readable config.json, a model that --kv-offload does not support, as far as
            config.json shows, or quantised weights without files, whose size is then unknown.
    """
    folder = Path(model_path)
    flag = f"plan: --model-path {model_path}"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{flag}: cannot read config.json: {error.strerror}; give the folder of a model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag}: config.json is not valid JSON: {error}; copy the model's own file again"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{flag}: config.json is not a JSON object; copy the model's own file again"
        )
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise _wrong(flag, "text_config", text, "an object")
    if text.get("kv_lora_rank"):
        raise ConfigError(
            f"{flag}: the model has latent attention (MLA); --kv-offload supports MHA and GQA; choose another model"
        )
    architecture = _architecture(config)
    check_architecture(flag, architecture)
    layers = _number(flag, text, "num_hidden_layers")
    heads = _number(flag, text, "num_attention_heads")
    kv_heads = _number(flag, text, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _wrong(flag, "num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    head_dim = _head_dim(flag, text)
    check_attention(
        flag,
        head_dim=head_dim,
        v_head_dim=_number(flag, text, "v_head_dim", head_dim),
        has_window=_has_window(text, architecture),
    )
    names = ("torch_dtype", "dtype")
    stored = next((x for part in (config, text) for name in names if (x := part.get(name))), None)
    stored = "float32" if stored is None else stored
    if not isinstance(stored, str) or stored not in VALUE_BYTES:
        raise _wrong(flag, "torch_dtype", stored, f"one of {', '.join(VALUE_BYTES)}")
    used = dtype
    if dtype == "auto":
        used = "float16" if stored == "float32" else stored
    if config.get("quantization_config"):
        weight_bytes, source = _weight_files(folder)
        if not weight_bytes:
            raise ConfigError(
                f"{flag}: the size of quantised weights is only known from their safetensors files, and there are "
                "none; give a folder that has them"
            )
        source += ", quantised"
    else:
        stored_bytes, used_bytes = VALUE_BYTES[stored], VALUE_BYTES[used]
        weight_bytes, source = _weights(flag, folder, text, stored_bytes, used_bytes)
    hidden = _number(flag, text, "hidden_size", heads * head_dim)
    experts, taken, inner = _experts(flag, text)
    share = layers * 3 * hidden * inner * experts / max(_estimate(flag, text), 1)
    words = 0 if text.get("tie_word_embeddings") else _number(flag, text, "vocab_size", 0)
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        max_context_tokens=_number(flag, text, "max_position_embeddings", DEFAULT_CONTEXT_TOKENS),
        dtype=used,
        kv_dtype=FP8_KV.get(kv_cache_dtype, used),
        weight_bytes=weight_bytes,
        weight_source=source,
        embedding_bytes=min(words * hidden * VALUE_BYTES[used], weight_bytes),
        expert_bytes=int(share * weight_bytes) if experts > 1 else 0,
        expert_share=taken / experts,
    )


def _wrong(flag: str, key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"{flag}: config.json has {key} = {reprlib.repr(value)}, expected {expected}; copy the model's "
        "own file again, or give the folder of another model"
    )


def _number(flag: str, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; ``default``, which may be 0, if the key is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value <= MAX_NUMBER:
        raise _wrong(flag, key, value, "a positive whole number")
    return value


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else "(no architecture named)"


def _head_dim(flag: str, config: dict[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return _number(flag, config, "head_dim")
    heads, hidden = (_number(flag, config, k) for k in ("num_attention_heads", "hidden_size"))
    if hidden < heads:
        raise _wrong(flag, "hidden_size", hidden, f"at least {heads}, the number of heads")
    return hidden // heads


def _has_window(config: dict[str, Any], architecture: str) -> bool:
    """Whether there is sliding-window attention, with transformers' defaults for absent keys."""
    of_qwen = architecture.startswith("Qwen")
    default = 4096 if of_qwen or architecture == "MistralForCausalLM" else None
    is_used = config.get("use_sliding_window", not of_qwen)
    return bool(config.get("sliding_window", default) and is_used)


def _weights(
    flag: str, folder: Path, config: dict[str, Any], stored_bytes: int, used_bytes: int
) -> tuple[int, str]:
    """Bytes of the loaded weights, and the source of the number."""
    size, source = _weight_files(folder)
    if size:
        if used_bytes != stored_bytes:
            source += ", converted"
        return size * used_bytes // stored_bytes, source
    return _estimate(
        flag, config
    ) * used_bytes, "estimated from config.json, without safetensors files"


def _weight_files(folder: Path) -> tuple[int, str]:
    """Bytes of the stored weights, 0 if there are none, and the source of the number."""
    files = sorted(folder.glob("*.safetensors"))
    size, source = sum(f.stat().st_size for f in files), "from safetensors files"
    index = folder / "model.safetensors.index.json"
    if not size and index.is_file():
        try:
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            size = 0
        size = max(0, size)
        source = f"from {index.name}"
    return size, source


def _estimate(flag: str, config: dict[str, Any]) -> int:
    """Parameters of a decoder with gated MLPs; norms, biases and routers are negligible."""
    layers, heads = (_number(flag, config, k) for k in ("num_hidden_layers", "num_attention_heads"))
    hidden, words = (_number(flag, config, key, 0) for key in ("hidden_size", "vocab_size"))
    experts, _, inner = _experts(flag, config)
    kv_heads = _number(flag, config, "num_key_value_heads", heads)
    attention = hidden * _head_dim(flag, config) * (2 * heads + 2 * kv_heads)
    tables = 1 if config.get("tie_word_embeddings") else 2
    return layers * (attention + 3 * hidden * inner * experts) + tables * hidden * words


def _experts(flag: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """MLPs of a layer, how many a token uses, and the inner size of one. Dense layers are counted as if they had
    experts."""
    inner = _number(flag, config, "intermediate_size", 0)
    key = next((k for k in ("num_local_experts", "num_experts") if config.get(k) is not None), None)
    if key is None:
        return 1, 1, inner
    experts, taken = _number(flag, config, key), _number(flag, config, "num_experts_per_tok")
    if taken > experts:
        raise _wrong(
            flag, "num_experts_per_tok", taken, f"at most {experts}, the number of experts"
        )
    return experts, taken, _number(flag, config, "moe_intermediate_size", inner)
