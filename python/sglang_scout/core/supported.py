"""What is supported, as plain data: SGLang releases and models. For servers, and for commands that do not import SGLang
and know no more of a model than its config.json."""

from __future__ import annotations

from sglang_scout.core.errors import ConfigError

ADAPTERS = {"0.5.23": "sglang_0_5_23", "0.5.15.post1": "sglang_0_5_15"}
"""Adapter module of ``plugin/`` by SGLang version, the default first."""
ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Glm4ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
)
WINDOWED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Cohere2ForCausalLM")
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")
FP8_KV = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Storage dtype of K and V by the value of --kv-cache-dtype, unless it is auto."""


def check_version(found: str) -> None:
    """Refuse a release whose hooks have not been checked."""
    if found not in ADAPTERS:
        raise ConfigError(
            f"sglang {found} is installed, but this sglang-scout supports only {' and '.join(ADAPTERS)}; "
            f"install sglang=={next(iter(ADAPTERS))}"
        )


def check_architecture(what: str, architecture: str) -> None:
    """Refuse a model that the decode step does not support; ``what`` is the flag that names it, and its value."""
    if architecture not in ARCHITECTURES:
        is_windowed = architecture in WINDOWED
        why = ", some of whose layers use sliding-window attention" if is_windowed else ""
        raise ConfigError(
            f"{what}: --kv-offload does not support {architecture}{why}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )


def check_attention(what: str, *, head_dim: int, v_head_dim: int, has_window: bool) -> None:
    """Refuse attention that the decode step does not support: sizes of a key and of a value, a sliding window."""
    if has_window:
        raise ConfigError(
            f"{what}: --kv-offload does not support sliding-window attention; serve it without "
            "--kv-offload, or choose a model with full attention"
        )
    if head_dim not in HEAD_SIZES or v_head_dim != head_dim:
        raise ConfigError(
            f"{what}: K has head size {head_dim} and V {v_head_dim}; --kv-offload supports "
            f"{', '.join(map(str, HEAD_SIZES))}, the same for both"
        )
