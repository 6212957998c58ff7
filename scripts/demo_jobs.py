"""The demo's models and questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from texts import load_text

SEED = 4242
TEXT_TOKENS = 5800


class DemoFailed(RuntimeError):
    """The demo did not meet one of its guarantees."""


@dataclass(frozen=True)
class Job:
    """A model's job: defaults of the flags, and keys of ``--kv-offload-config``."""

    budget: int
    prompts: int
    input_len: int
    config: dict[str, Any] = field(default_factory=dict)
    cpu_dtype: str = "bfloat16"
    output_len: int = 64


# Layer 1 of the recall model queries what layer 0 has just written, which prediction misses.
RECALL = Job(512, 16, 4096, {"exact_layers": [1]})
OWN = Job(512, 16, 4096)
# Without AMX, CPUs are several times slower in bfloat16.
SMOLLM2 = Job(512, 4, 512, {}, "float32", output_len=16)
JOBS = {"smollm2": SMOLLM2, "recall": RECALL}


def text_of_tokens(model: Path, tokens: int, start: int = 0) -> str:
    """``tokens`` tokens of a text from token ``start`` on. Without tokenizer.json a token counts as 4 characters."""
    text = load_text("prose")
    if not (model / "tokenizer.json").is_file():
        return text[4 * start : 4 * (start + tokens)]
    from tokenizers import Tokenizer

    # No token is shorter than a byte: an upper bound of the characters needed.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    offsets = tokenizer.encode(text[: 8 * (start + tokens)], add_special_tokens=False).offsets
    return text[offsets[start][0] : offsets[start + tokens - 1][1]]
