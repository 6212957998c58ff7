"""The small retrieval model: a Qwen3 decoder in plain PyTorch, its tokenizer, its folder.

The parameters carry the names that transformers gives a ``Qwen3ForCausalLM``, so writing a model
folder that SGLang and transformers load is a dump of the state dict (`export_model`).

Axes: B batch, T tokens, HQ query heads, H KV heads, D head size, d hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.accuracy import vocabulary


@dataclass(frozen=True)
class RecallSpec:
    """Sizes of the model; the defaults make 5 MB of bfloat16 weights."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    rope_base: float = 1e8
    max_len_tokens: int = 32768
    eps: float = 1e-6


def rope_tables(positions: Tensor, spec: RecallSpec) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, D/2] float32 of ``positions`` [B, T]."""
    pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32, device=positions.device)
    exponents = pairs * 2 / spec.head_dim
    angles = positions[:, None, :, None].float() * spec.rope_base**-exponents
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of ``x`` [B, heads, T, D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, spec: RecallSpec) -> None:
        super().__init__()
        self.spec = spec
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(spec.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(spec.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, spec.hidden, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec = self.spec
        batch, tokens, _ = x.shape
        dtype = x.dtype
        q = self.q_proj(x).view(batch, tokens, spec.heads, -1).float()
        k = self.k_proj(x).view(batch, tokens, spec.kv_heads, -1).float()
        v = self.v_proj(x).view(batch, tokens, spec.kv_heads, -1).transpose(1, 2)
        q = apply_rope(self.q_norm(q).transpose(1, 2), cos, sin)
        k = apply_rope(self.k_norm(k).transpose(1, 2), cos, sin)
        group = spec.heads // spec.kv_heads
        out = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.repeat_interleave(group, 1),
            is_causal=True, scale=spec.head_dim**-0.5,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self, spec: RecallSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, spec: RecallSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden, spec.eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), cos, sin).float()
        return x + self.mlp(self.post_attention_layernorm(x).to(dtype)).float()


class Decoder(nn.Module):
    def __init__(self, spec: RecallSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary.VOCAB_TOKENS, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.eps)


class RecallModel(nn.Module):
    """Qwen3 with tied embeddings. The residual stream is float32, products are in ``dtype``."""

    def __init__(self, spec: RecallSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = Decoder(spec)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Logits [B, T, V] in ``dtype`` of ``tokens`` [B, T]; ``positions`` default to 0..T-1."""
        return self.logits(self.hidden(tokens, positions, dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The normalised output of the last layer, [B, T, d] in ``dtype``."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = rope_tables(positions, self.spec)
        half = dtype == torch.bfloat16
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=half):
            x = self.model.embed_tokens(tokens)
            for layer in self.model.layers:
                x = layer(x, cos, sin, dtype)
            return self.model.norm(x).to(dtype)


def build_tokenizer() -> Any:
    """One token per word of the tasks (with its leading space); other text falls back to bytes.

    Every string can be encoded and decodes to itself, with a leading space. Returns a transformers
    ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(vocabulary.SPECIAL_TOKENS)}
    vocab.update({char: vocabulary.BYTE_BASE + index for index, char in enumerate(alphabet)})
    vocab.update({"Ġ" + word: index for word, index in vocabulary.ID_OF.items()})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=vocabulary.SPECIAL_TOKENS[0],
        eos_token=vocabulary.SPECIAL_TOKENS[1],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def hf_config(spec: RecallSpec) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary.VOCAB_TOKENS,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len_tokens,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def export_model(model: RecallModel, out: Path) -> int:
    """Writes a folder that SGLang and transformers load; returns the bytes of its weights.

    The folder appears in one rename; an existing one is replaced. Weights are bfloat16.
    """
    from safetensors.torch import save_file

    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        weights = {
            name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()
        }
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        (fresh / "config.json").write_text(json.dumps(hf_config(model.spec), indent=2) + "\n")
        generation = {"eos_token_id": 1, "pad_token_id": 0, "do_sample": False}
        (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        build_tokenizer().save_pretrained(fresh)
        if out.exists():
            shutil.rmtree(out)
        fresh.rename(out)
    return (out / "model.safetensors").stat().st_size
