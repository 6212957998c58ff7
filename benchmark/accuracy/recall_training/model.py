"""The small retrieval model, a transformers Qwen3 decoder, with its tokenizer and export.

Axes: B batch, T tokens, D head size, d hidden size, V vocabulary.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

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


class RecallModel(Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3 with tied embeddings. The residual stream is float32."""

    def __init__(self, spec: RecallSpec) -> None:
        config = Qwen3Config(
            vocab_size=vocabulary.VOCAB_TOKENS,
            hidden_size=spec.hidden,
            intermediate_size=spec.intermediate,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_len_tokens,
            rope_theta=spec.rope_base,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        super().__init__(config)
        self.spec = spec

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """The normalised output of the last layer [B, T, d] of ``tokens`` [B, T], with products in bfloat16;
        ``positions`` default to 0..T-1."""
        # Without it transformers interprets jumps of positions as packed texts.
        mask = torch.ones_like(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = self.model(
                tokens, attention_mask=mask, position_ids=positions, use_cache=False
            )
        return states.last_hidden_state.bfloat16()

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))


def build_tokenizer() -> Any:
    """One token per word of the tasks (with its leading space); other text falls back to bytes.

    Every string can be encoded and round-trips, with a leading space. Returns a transformers
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


def export_model(model: RecallModel, out: Path) -> int:
    """Writes a folder that SGLang and transformers can load; returns the size of its weights in bytes.

    The folder is renamed into place atomically; an existing one is replaced. Weights are bfloat16.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh = Path(scratch) / "model"
        exported = Qwen3ForCausalLM(model.config).bfloat16()
        exported.load_state_dict(model.state_dict())
        exported.generation_config.do_sample = False
        exported.save_pretrained(fresh)
        build_tokenizer().save_pretrained(fresh)
        if out.exists():
            shutil.rmtree(out)
        fresh.rename(out)
    return (out / "model.safetensors").stat().st_size
