"""A model's shape and the size of its weights, for ``sglang-scout plan``: from a folder or the Hugging Face Hub, never
loading weights, or as its argument describes it."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import AutoConfig

from sglang_scout.core.errors import ConfigError
from sglang_scout.core.flags import FP8_KV, check_architecture, check_attention

VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHAPE = "layers=40,hidden=5120,heads=40,kv_heads=8,head_dim=128,parameters=14.8e9"
HUB_TIMEOUT_S = 5
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_context_tokens: int  # 0: unknown
    dtype: str  # of weights and digests, resolved
    kv_dtype: str
    weight_bytes: int
    weight_source: str  # of the number
    embedding_bytes: int = 0  # of them; a step reads one row per token; 0 if tied with the head
    expert_bytes: int = 0  # of them, all experts of an MoE model
    expert_share: float = 1.0  # of a layer's experts, what a token uses
    rope: dict[str, Any] = field(default_factory=dict)  # config.json's RoPE parameters

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Of the weights, what a step reads that uses all experts."""
        return self.weight_bytes - self.embedding_bytes

    @property
    def bytes_a_token(self) -> int:
        """Of the weights, what a token uses."""
        return self.read_bytes - int((1 - self.expert_share) * self.expert_bytes)

    @property
    def query_parameters(self) -> int:
        """Of W_q of all layers."""
        return self.num_layers * self.hidden_size * self.num_q_heads * self.head_dim

    def stretched(self, context_tokens: int) -> dict[str, Any]:
        """What --json-model-override-args says for a context beyond the model's, RoPE scaled by YaRN, or nothing."""
        most, kind = self.max_context_tokens, self.rope.get("rope_type", "default")
        if not 0 < most < context_tokens:
            return {}
        if kind != "default":
            raise ConfigError(
                f"plan: --context {context_tokens}: the model takes {most}, with RoPE already scaled ({kind}); give at "
                f"most --context {most}"
            )
        # Of 40,960 tokens Qwen3 means 8,192 for the prompt, and names 32,768 as what it was trained with.
        trained = 32768 if most == 40960 else most
        factor = math.ceil(100 * context_tokens / trained) / 100
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        return {"rope_parameters": self.rope | yarn, "max_position_embeddings": context_tokens}


def read_shape(shape: str, dtype: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    """A dense model that is described as in :data:`SHAPE`, of bfloat16 weights unless ``dtype`` says otherwise."""
    flag, names = f"plan: --shape {shape}", [part.split("=")[0] for part in SHAPE.split(",")]
    given = dict(part.partition("=")[::2] for part in shape.split(","))
    try:
        if wrong := given.keys() ^ set(names):
            raise ValueError(f"unknown or missing: {', '.join(sorted(wrong))}")
        numbers = [int(float(given[name])) for name in names]
        layers, hidden, heads, kv_heads, head_dim, parameters = numbers
        if not 0 < min(numbers) <= max(numbers) < 2**50 or heads % kv_heads:
            raise ValueError("a number is out of range, or kv_heads no divisor of heads")
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{flag}: {error}; write for example --shape {SHAPE}") from None
    check_attention(flag, head_dim=head_dim, v_head_dim=head_dim, has_window=False)
    used = "bfloat16" if dtype == "auto" else dtype
    return ModelConfig(
        architecture="as --shape says",
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        max_context_tokens=0,
        dtype=used,
        kv_dtype=FP8_KV.get(kv_cache_dtype, used),
        weight_bytes=parameters * VALUE_BYTES[used],
        weight_source=f"of the parameters, in {used}",
    )


def read_model(model_path: str, dtype: str, kv_cache_dtype: str = "auto") -> ModelConfig:
    """Reads a model's config.json and the sizes of its files. Arguments as SGLang's flags. Raises ConfigError: no
    model, one that --kv-offload does not support, or quantised weights without files."""
    flag = f"plan: --model-path {model_path}"
    config, folder = _load(flag, model_path)
    text = config.get_text_config()
    architecture = str((config.architectures or ["(no architecture named)"])[0])
    check_architecture(flag, architecture)
    layers, heads, hidden = text.num_hidden_layers, text.num_attention_heads, text.hidden_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # MLPs of a layer, how many a token uses, the inner size of one. A dense layer has one.
    experts, taken, inner = 1, 1, text.intermediate_size
    for name in ("num_local_experts", "num_experts"):
        if found := getattr(text, name, None):
            experts, taken = found, text.num_experts_per_tok
            inner = getattr(text, "moe_intermediate_size", inner)
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
        rope=getattr(text, "rope_parameters", None) or {},
    )


def _load(flag: str, model_path: str) -> tuple[Any, Path]:
    """The model's config.json as transformers reads it, and its folder."""
    folder = Path(model_path) if Path(model_path).is_dir() else _of_hub(flag, model_path)
    try:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"there is none in {folder}")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False), folder
    except Exception as error:  # transformers names no set of them
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"{flag}: cannot read config.json: {reason}; give the folder of a model, with the model's own file, or the "
            "name of one on the Hugging Face Hub"
        ) from None


def _of_hub(flag: str, name: str) -> Path:
    """Folder of the Hub's cache with config.json and, unless weights are there, their index; what is absent is
    downloaded."""
    hub = constants.ENDPOINT
    try:
        validate_repo_id(name)
        folder = _fetch(name, "config.json").parent
        if not any(folder.glob("*.safetensors")):
            with contextlib.suppress(Exception):  # many models have none
                _fetch(name, INDEX)
        return folder
    except errors.HFValidationError:
        why, fix = "there is no such folder", "give the folder of a model"
    except errors.GatedRepoError:
        why = "the model is gated"
        fix = f"accept its terms at {hub}/{name}, and set HF_TOKEN to your token"
    except errors.RepositoryNotFoundError:
        why = f"no such folder, and no public model at {hub}"
        fix = "check the name, or set HF_TOKEN to a token that may read a private model"
    except errors.EntryNotFoundError:
        why, fix = f"the model at {hub} has no config.json", "give one that transformers loads"
    except Exception as error:  # of network or server; huggingface_hub names no set of them
        reason = str(error).partition("\n")[0].rstrip(".")
        why = f"not in {constants.HF_HUB_CACHE}, and cannot be downloaded from {hub}: {reason}"
        fix = "try again with network, or give a folder that has config.json, or --shape"
    raise ConfigError(f"{flag}: {why}; {fix}") from None


def _fetch(name: str, file: str) -> Path:
    """Of the Hub's cache, else of the Hub."""
    found = try_to_load_from_cache(name, file)
    if found is None:
        # One try: hf_hub_download makes six, in half a minute.
        get_hf_file_metadata(hf_hub_url(name, file), timeout=HUB_TIMEOUT_S)
        disable_progress_bars()
        found = hf_hub_download(name, file, etag_timeout=HUB_TIMEOUT_S)
    if not isinstance(found, str):
        raise errors.EntryNotFoundError("the model has none, as was found before")
    return Path(found)


def _weights(
    flag: str, folder: Path, config: Any, parameters: int, stored: str, used: str
) -> tuple[int, str]:
    """Bytes of the weights, and the source of the number: their files, the index of these, or the parameters."""
    source, index = "from safetensors files", folder / INDEX
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        source = f"from {INDEX}"
        with contextlib.suppress(Exception):  # absent, or not one that anybody would write
            size = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    if getattr(config, "quantization_config", None):
        if size <= 0:
            raise ConfigError(
                f"{flag}: the size of quantised weights is only known from their safetensors files, and there are "
                "none; give a folder that has them"
            )
        return size, f"{source}, quantised"
    if size <= 0:
        size = parameters * VALUE_BYTES[stored]
        source = "estimated from config.json, without safetensors files"
    elif VALUE_BYTES[used] != VALUE_BYTES[stored]:
        source += ", converted"
    return size * VALUE_BYTES[used] // VALUE_BYTES[stored], source
