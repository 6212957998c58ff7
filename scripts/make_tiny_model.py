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

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "glm4", "qwen3_moe", "mixtral")
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>")
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


@dataclass(frozen=True)
class TinyModelSpec:
    """Sizes of one tiny model; ``arch``: one of ARCHITECTURES; the tokenizer has at most ``vocab`` entries."""

    arch: str = "qwen3"
    layers: int = 4
    # None: heads * head_dim for configs without head_dim (qwen2, mixtral), else 128.
    hidden: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 256
    vocab: int = 512
    max_len: int = 32768
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden is None:
            own_head_size = self.arch not in ("qwen2", "mixtral")
            object.__setattr__(self, "hidden", 128 if own_head_size else self.heads * self.head_dim)

    @property
    def key(self) -> str:
        """Folder name for a cache: readable, and unique per content."""
        fields = json.dumps([FORMAT_VERSION, asdict(self)]).encode()
        digest = hashlib.sha256(fields).hexdigest()[:10]
        return f"{self.arch}-l{self.layers}-d{self.head_dim}-s{self.seed}-{self.dtype}-{digest}"


def build_tokenizer(vocab: int) -> Any:
    """Byte-level BPE with at most ``vocab`` entries, special tokens included, for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
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


def build_config(spec: TinyModelSpec, eos_token_id: int, pad_token_id: int) -> Any:
    from transformers import AutoConfig

    common: dict[str, Any] = dict(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim,
        max_position_embeddings=spec.max_len, rms_norm_eps=1e-6, rope_theta=1_000_000.0,
        hidden_act="silu", tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos_token_id,
        pad_token_id=pad_token_id, dtype=spec.dtype,
    )  # fmt: skip
    if spec.arch == "mistral":
        common["sliding_window"] = None
    elif spec.arch == "glm4":
        common.update(partial_rotary_factor=0.5, attention_bias=True)
    elif spec.arch == "qwen3_moe":
        common.update(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
        common["moe_intermediate_size"] = spec.intermediate
    elif spec.arch == "mixtral":
        common.update(num_local_experts=8, num_experts_per_tok=2)
    return AutoConfig.for_model(spec.arch, **common)


def fill_weights(model: Any, spec: TinyModelSpec, printable: list[bool]) -> None:
    """Overwrite all parameters of a transformers causal LM; each has its own generator, seeded by its name."""
    import torch

    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()[:6], "little")
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("q_norm.weight") or name.endswith("k_norm.weight"):
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
            value[~torch.tensor(printable)] = 0.0
        parameter.data.copy_(value)


def printable_ids(tokenizer: Any, vocab: int) -> list[bool]:
    """For each id below ``vocab``: does it decode to printable ASCII (at least one character)?"""
    special = set(tokenizer.all_special_ids)
    flags = []
    for token_id in range(vocab):
        known = token_id not in special and token_id < len(tokenizer)
        text = tokenizer.decode([token_id]) if known else ""
        flags.append(bool(text) and all(" " <= c <= "~" for c in text))
    return flags


def make_tiny_model(spec: TinyModelSpec, out: Path) -> Path:
    """Write the model and the tokenizer to the folder ``out`` and return it. It is renamed into place: a killed run
    leaves no partial model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = build_tokenizer(spec.vocab)
    config = build_config(spec, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill_weights(model, spec, printable_ids(tokenizer, spec.vocab))
    model = model.to(getattr(torch, spec.dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh = Path(scratch) / "model"
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        if out.exists():
            shutil.rmtree(out)
        fresh.rename(out)
    return out


def cached_tiny_model(spec: TinyModelSpec, cache_dir: Path) -> Path:
    """The folder of ``spec`` below ``cache_dir``, written on the first call; safe for concurrent callers."""
    folder = cache_dir / spec.key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            make_tiny_model(spec, folder)
    return folder
