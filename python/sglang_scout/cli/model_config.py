"""A model's shape and weight size, from its config.json, as transformers reads it, and the sizes of its files."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils.hub import cached_file

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.supported import FP8_KV, check_architecture, check_attention

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelConfig:
    """Parameters that determine memory and step time."""

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_context_tokens: int
    dtype: str  # of weights and digests, resolved
    kv_dtype: str
    weight_bytes: int
    weight_source: str  # of the number
    # Of them, the part of which a step reads one row per token; 0 if tied with the head.
    embedding_bytes: int
    expert_bytes: int = 0  # of them, all experts of an MoE model
    expert_share: float = 1.0  # of a layer's experts, what a token uses

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def bytes_a_token(self) -> int:
        """Bytes of the weights that a token uses."""
        idle = (1 - self.expert_share) * self.expert_bytes
        return self.weight_bytes - self.embedding_bytes - int(idle)


def read_model(model_path: str, dtype: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    """Reads a model's files, without network. Arguments as SGLang's flags.

    Raises:
        ConfigError: no model, one that --kv-offload does not support, as far as config.json shows, or quantised weights
            without files, whose size is then unknown.
    """
    flag = f"plan: --model-path {model_path}"
    config, folder = _load(flag, model_path)
    text = config.get_text_config()
    architecture = str((config.architectures or ["(no architecture named)"])[0])
    check_architecture(flag, architecture)
    layers, heads, hidden = text.num_hidden_layers, text.num_attention_heads, text.hidden_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    experts, taken, inner = _experts(text)
    context, vocabulary = text.max_position_embeddings, text.vocab_size
    sizes = layers, heads, kv_heads, hidden, experts, taken, inner, context, vocabulary
    if min(sizes) < 1 or heads % kv_heads or taken > experts:
        raise ConfigError(
            f"{flag}: config.json has {layers} layers of size {hidden} with {heads} query heads and {kv_heads} KV "
            f"heads, {taken} of {experts} MLPs of size {inner} for a token, a context of {context} tokens and "
            f"{vocabulary} words, expected positive numbers, and a divisor of the query heads; copy the model's own "
            "file again"
        )
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    v_head_dim = getattr(text, "v_head_dim", head_dim)
    check_attention(flag, head_dim=head_dim, v_head_dim=v_head_dim, has_window=bool(window))
    stored = str(config.dtype or text.dtype or "float32").removeprefix("torch.")
    if stored not in VALUE_BYTES:
        raise ConfigError(
            f"{flag}: config.json has dtype {stored}, expected one of {', '.join(VALUE_BYTES)}; choose another model"
        )
    used = ("float16" if stored == "float32" else stored) if dtype == "auto" else dtype
    in_experts = layers * 3 * hidden * inner * experts
    tables = (1 if text.tie_word_embeddings else 2) * hidden * vocabulary
    # Of a decoder with gated MLPs; norms, biases and routers are negligible.
    parameters = in_experts + tables + layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    weight_bytes, source = _weights(flag, folder, config, parameters, stored, used)
    embedding = 0 if text.tie_word_embeddings else vocabulary * hidden * VALUE_BYTES[used]
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        max_context_tokens=context,
        dtype=used,
        kv_dtype=FP8_KV.get(kv_cache_dtype, used),
        weight_bytes=weight_bytes,
        weight_source=source,
        embedding_bytes=min(embedding, weight_bytes),
        expert_bytes=int(in_experts / parameters * weight_bytes) if experts > 1 else 0,
        expert_share=taken / experts,
    )


def _load(flag: str, model_path: str) -> tuple[Any, Path]:
    """The model's config.json as transformers reads it, and its folder."""
    if Path(model_path).is_absolute() and not Path(model_path).is_dir():
        raise ConfigError(f"{flag}: there is no such folder")
    try:
        folder = Path(str(cached_file(model_path, "config.json", local_files_only=True))).parent
        return AutoConfig.from_pretrained(folder, trust_remote_code=False), folder
    except Exception as error:  # transformers names no set of them
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"{flag}: cannot read config.json: {reason}; give the folder of a model, with the model's own file, or the "
            "name of one that has been downloaded from the Hugging Face Hub"
        ) from None


def _experts(config: Any) -> tuple[int, int, int]:
    """MLPs of a layer, how many a token uses, and the inner size of one. Dense layers count as if they had experts."""
    inner = config.intermediate_size
    for name in ("num_local_experts", "num_experts"):
        if experts := getattr(config, name, None):
            taken = config.num_experts_per_tok
            return experts, taken, getattr(config, "moe_intermediate_size", inner)
    return 1, 1, inner


def _weights(
    flag: str, folder: Path, config: Any, parameters: int, stored: str, used: str
) -> tuple[int, str]:
    """Bytes of the weights, and the source of the number: their files, the index of these, or the parameters."""
    source, index = "from safetensors files", folder / "model.safetensors.index.json"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        source = f"from {index.name}"
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
        ):
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    if getattr(config, "quantization_config", None):
        if size <= 0:
            raise ConfigError(
                f"{flag}: the size of quantised weights is only known from their safetensors files, and there are "
                "none; give a folder that has them"
            )
        return size, f"{source}, quantised"
    if size <= 0:
        estimate = parameters * VALUE_BYTES[used]
        return estimate, "estimated from config.json, without safetensors files"
    if VALUE_BYTES[used] != VALUE_BYTES[stored]:
        return size * VALUE_BYTES[used] // VALUE_BYTES[stored], f"{source}, converted"
    return size, source
