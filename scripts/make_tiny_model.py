"""A small random-weight model and its tokenizer for tests: no network, the same bytes for the same seed.

With random weights of the usual scale (std 0.02) attention is nearly uniform, and greedy decoding repeats one token
whatever the prompt was. The weights here are scaled so that every part of the computation affects the next token:

- q and k: attention logits have a standard deviation of about ``LOGIT_STD``, so that a query attends to a few dozen
  tokens out of thousands, at any position;
- v and o: the attention output is as large as the residual stream;
- MLP outputs stay smaller than both; lm_head is not tied to the embedding, so a token does not predict itself.

lm_head rows of tokens that are not printable ASCII are zero: greedy text is readable and never ends too early.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packages import CACHE, kept

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>")
VOCAB, INTERMEDIATE = 512, 256  # at most so many tokens; MLP width, also of an expert
LOGIT_STD = 2.5
FORMAT_VERSION = 1  # part of the cache key: increment if the same arguments give other bytes

# Every matrix reads a normalised input (root mean square about 1), so the output of one with weights of standard
# deviation gain / sqrt(inputs) has the standard deviation gain.
GAINS = {
    "q_proj": math.sqrt(LOGIT_STD),  # q.k / sqrt(D) over D products has the product of both
    "k_proj": math.sqrt(LOGIT_STD),
    "v_proj": 1.0,
    "o_proj": 3.0,
    "gate": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "lm_head": 2.0,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The merges of the tokenizer are learned only from this text, so that they never depend on the machine.
TOKENIZER_TEXT = (
    "The decode server keeps every page of a long prompt in host memory and a few of them near "
    "the arithmetic. A page that matters is read where it lies, and the two partial answers are "
    "merged by their weights. When the question moves on, other pages matter; they are copied "
    "in the background and change places between two steps, never within one. What is the "
    "capital of a small country? Who wrote the letter, when was it sent, and where did it go? "
    "Please read the following text with care and answer in one short sentence. It was a bright "
    "morning, the station was empty, and there were seven trains standing in the yard. Numbers "
    "such as 1, 2, 3, 10, 25, 100, 2048 and 4096 should be short, and so should the words of a "
    "program: if, else, for, while, return, import, class, def, print, with, from, not, and, "
    "or, in, is. Nothing that can be checked should be believed without a check, and nothing "
    "that failed should be hidden."
)


# What these have in their configs beyond the others.
OWN_CONFIG: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "qwen3_moe": {
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@dataclass(frozen=True)
class TinyModelSpec:
    """Sizes of one tiny model; ``arch``: qwen2, qwen3, llama, mistral, glm4, qwen3_moe or mixtral."""

    arch: str = "qwen3"
    layers: int = 4
    hidden: int = 128  # heads * head_dim for configs without head_dim: qwen2, mixtral
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"


def build_tokenizer() -> Any:
    """Byte-level BPE with at most VOCAB entries, special tokens included, for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TOKENIZER_TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_config(spec: TinyModelSpec, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    has_head_dim = spec.arch not in ("qwen2", "mixtral")
    common = dict(
        vocab_size=VOCAB, intermediate_size=INTERMEDIATE, num_hidden_layers=spec.layers,
        hidden_size=spec.hidden if has_head_dim else spec.heads * spec.head_dim,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim,
        max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1_000_000.0, hidden_act="silu",
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype=spec.dtype,
    )  # fmt: skip
    return AutoConfig.for_model(spec.arch, **common, **OWN_CONFIG.get(spec.arch, {}))


def fill_weights(model: Any, tokenizer: Any) -> None:
    """Overwrite all parameters of a transformers causal LM; each has its own generator, seeded by its name."""
    import torch

    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(VOCAB)]
    unprintable = torch.tensor([not re.fullmatch("[ -~]+", text) for text in texts])
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(f"0:{name}".encode()).digest()[:6], "little")
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = math.sqrt(LOGIT_STD) * (1.0 + 0.1 * noise)
        elif "norm" in name:
            value = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            value = 0.1 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            gain = next(gain for part, gain in GAINS.items() if part in name)
            value = gain * (1.0 / math.sqrt(parameter.shape[-1])) * noise
        if "lm_head" in name:
            value[unprintable] = 0.0
        parameter.data.copy_(value)


def make_tiny_model(spec: TinyModelSpec, out: Path) -> None:
    """Write the model and the tokenizer to the folder ``out``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = build_tokenizer()
    config = build_config(spec, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill_weights(model, tokenizer)
    model.to(getattr(torch, spec.dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


def cached_tiny_model(spec: TinyModelSpec) -> Path:
    """Its folder in .cache/models, written on the first call; safe for concurrent callers."""
    content = json.dumps([FORMAT_VERSION, asdict(spec)]).encode()
    digest = hashlib.sha256(content).hexdigest()[:10]
    folder = CACHE / "models" / f"{spec.arch}-l{spec.layers}-d{spec.head_dim}-{spec.dtype}-{digest}"
    wrong = lambda path: "" if (path / "config.json").exists() else "no config.json"  # noqa: E731
    return kept(folder, wrong, partial(make_tiny_model, spec))
