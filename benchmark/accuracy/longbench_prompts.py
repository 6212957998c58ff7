"""LongBench's questions as token ids: its cut in the middle, the chat template, the options of a request.

Requests go to ``/generate`` as token ids, not to the chat endpoint as text:

- LongBench cuts long prompts by tokens and continues few-shot prompts without a chat template, which a chat endpoint
  cannot do; and a client that counts tokens has the template at hand anyway.
- Two servers get the same ids, whatever they would make of a text. Their digest is kept with each answer, so a
  comparison knows that both were asked the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longbench_data import STOP_AT_NEWLINE, WITHOUT_CHAT, Question

from sglang_scout.core.errors import ConfigError

CHAT_CHOICES = ("auto", "off")
# Tokens that a cut prompt may gain where its halves are joined and read anew.
SEAM_TOKENS = 32
LEAST_PROMPT_TOKENS = 64
PROBE = 'One line, 3.5 numbers, "quotes".\n第二行 in another script; and a tab\there.'


@dataclass(frozen=True)
class Encoded:
    """Token ids of a prompt, and how many were left out of its middle."""

    ids: list[int]
    cut_tokens: int

    @property
    def sha(self) -> str:
        return _sha(self.ids)


class Encoder:
    """Questions to token ids, as LongBench does it for a chat model.

    Args:
        name: folder of the tokenizer, or its name for transformers.
        chat: "auto": the tokenizer's chat template except for the few-shot sets; "off": no set.
        context_tokens: of the server, None where it did not say: then of the model's config.json.
        longest_answer_tokens: the most new tokens of any set.
        max_prompt_tokens: longer prompts, counted without the template, lose their middle. Default:
            what the context leaves after the longest answer and the template.

    Raises:
        ConfigError: no such tokenizer, no template, no context known, or no room in it.
    """

    def __init__(
        self,
        name: str,
        *,
        chat: str,
        context_tokens: int | None,
        longest_answer_tokens: int,
        max_prompt_tokens: int | None = None,
    ) -> None:
        # Here, not above: a second of imports that comparing files does without.
        from transformers import AutoConfig, AutoTokenizer

        self._lock = threading.Lock()  # a tokenizer must not be used by two threads at once
        self._chat = chat
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            raise ConfigError(
                f"--tokenizer {name}: cannot be loaded ({_first_line(error)}); name the folder of "
                "the served model's tokenizer"
            ) from None
        if chat == "auto" and not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"--chat auto: the tokenizer {name} has no chat template; use --chat off for a "
                "base model, or name the chat model's with --tokenizer"
            )
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        self.newline_id = newline[-1] if newline else None
        around = len(self._chat_ids("")) if chat == "auto" else 0
        if context_tokens is None and max_prompt_tokens is None:
            try:
                context_tokens = int(AutoConfig.from_pretrained(name).max_position_embeddings)
            except Exception:
                raise ConfigError(
                    "--max-prompt-tokens is not given, and neither the server nor the folder of "
                    f"{name} tells the model's context; give it (31500 is LongBench's own for a "
                    "context of 32k)"
                ) from None
        room = None
        if context_tokens is not None:
            room = context_tokens - longest_answer_tokens - around - SEAM_TOKENS
        if max_prompt_tokens is None:
            assert room is not None
            max_prompt_tokens = room
            if room < LEAST_PROMPT_TOKENS:
                raise ConfigError(
                    f"--base-url: the served context of {context_tokens} tokens leaves {room} for "
                    f"a prompt; serve the model with at least "
                    f"{LEAST_PROMPT_TOKENS - room + (context_tokens or 0)}"
                )
        elif max_prompt_tokens < LEAST_PROMPT_TOKENS:
            raise ConfigError(
                f"--max-prompt-tokens {max_prompt_tokens}: too few to ask anything; give at least "
                f"{LEAST_PROMPT_TOKENS}"
            )
        elif room is not None and max_prompt_tokens > room:
            raise ConfigError(
                f"--max-prompt-tokens {max_prompt_tokens}: the served context of {context_tokens} "
                f"tokens leaves {room} beside an answer and the chat template; give at most {room}"
            )
        self.max_prompt_tokens = max_prompt_tokens
        self.sha = _sha([*self._ids(PROBE), *(self._chat_ids(PROBE) if chat == "auto" else [])])

    def encode(self, question: Question) -> Encoded:
        with self._lock:
            text = question.prompt
            ids = self._ids(text)
            cut_tokens = 0
            if len(ids) > self.max_prompt_tokens:
                half = self.max_prompt_tokens // 2
                cut_tokens = len(ids) - 2 * half
                text = self._text(ids[:half]) + self._text(ids[-half:])
                ids = self._ids(text)
            if self._chat == "auto" and question.set_name not in WITHOUT_CHAT:
                ids = self._chat_ids(text)
            return Encoded(ids, cut_tokens)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False).input_ids)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _chat_ids(self, text: str) -> list[int]:
        # Answers are at most 512 tokens long: no room to think aloud first. Templates that know
        # nothing of thinking ignore the word.
        written = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return list(self._tokenizer(written, add_special_tokens=False, verbose=False).input_ids)


def sampling_for(set_name: str, newline_id: int | None) -> dict[str, Any]:
    """Greedy until the end of text; for samsum also to the end of the line, after one token."""
    sampling: dict[str, Any] = {"ignore_eos": False}
    if set_name in STOP_AT_NEWLINE and newline_id is not None:
        sampling |= {"stop_token_ids": [newline_id], "min_new_tokens": 1}
    return sampling


def _sha(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
