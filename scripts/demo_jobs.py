"""What the demo serves and asks, by model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from texts import load_text

SEED = 4242
TEXT_TOKENS = 5800


class DemoFailed(RuntimeError):
    """Something that the demo promises did not happen."""


@dataclass(frozen=True)
class Job:
    """What is served and asked: defaults of the flags, and keys of ``--kv-offload-config``."""

    budget: int
    prompts: int
    input_len: int
    config: dict[str, Any] = field(default_factory=dict)
    cpu_dtype: str = "bfloat16"
    output_len: int = 64


# Layer 1 of the recall model asks for what layer 0 has just gathered.
RECALL = Job(512, 16, 4096, {"exact_layers": [1]})
OWN = Job(512, 16, 4096)
# Without AMX, CPUs are several times slower in bfloat16.
SMOLLM2 = Job(512, 4, 512, {}, "float32", output_len=16)
JOBS = {"smollm2": SMOLLM2, "recall": RECALL}


def text_of_tokens(model: Path, tokens: int, start: int = 0) -> str:
    """So many tokens of a text, from this one on. Of a model without tokenizer.json one has 4 characters."""
    text = load_text("prose")
    if not (model / "tokenizer.json").is_file():
        return text[4 * start : 4 * (start + tokens)]
    from tokenizers import Tokenizer

    # No token is shorter than a byte: enough characters to count so many tokens in.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    offsets = tokenizer.encode(text[: 8 * (start + tokens)], add_special_tokens=False).offsets
    return text[offsets[start][0] : offsets[start + tokens - 1][1]]
