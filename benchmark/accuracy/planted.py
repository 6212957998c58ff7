"""Documents of real text with planted facts, and questions about them, for a language model.

A document is an excerpt of prose, technical prose or code (scripts/texts.py) with sentences planted in it:

    Remember this: the ticket number of the winner is 48213.             a single fact
    Remember this: the locker of Margaret has the number 27095.          a chain of two facts
    Remember this: locker number 27095 opens with the code 71449.

It has four cuts. After each follow 512 tokens of plain text without a planted sentence (for loss and KL), and at each
two questions are asked about the preceding text, in place of the plain text: one single, one of the others:

    single     What is the ticket number of the winner?
    several    What are the ..., the ... and the ...?                    three facts in one answer
    chained    With which code does the locker of Margaret open?         the answer names both links

An answer is teacher-forced and scored by each number in it, for a chain only the last. Everything derives from the
document's index: the same index gives the same tokens with the same tokenizer and texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("prose", "technical", "code")
CUTS = (2048, 4096, 6144, 7616)  # multiples of 64: no page lies across a cut
WINDOW_TOKENS = 512
STRIDE_CHARACTERS = 45_000  # between documents of one source; no document is longer
KINDS = ("single", "several", "chained")

SUBJECTS = (
    "access code of the lighthouse",
    "serial number of the violin",
    "price of the golden statue",
    "telephone extension of Doctor Mills",
    "licence number of the red truck",
    "catalogue number of the stolen painting",
    "order number of Captain Nolan",
    "registration number of the sailing boat",
    "account number of the baker",
    "ticket number of the winner",
    "part number of the water pump",
    "flight number of the ambassador",
)
OWNERS = ("Margaret", "the gardener", "Inspector Hale", "the night nurse")
SINGLES_BEFORE = (4, 6, 7, 8)  # singles planted before each cut, in all
CHAINS_BEFORE = (1, 2, 2, 2)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Question:
    """One question at a cut of a document.

    ``ask`` and ``answer`` are token ids; ``numbers``: [begin, end) in ``answer`` of the scored digits.
    """

    kind: str
    cut: int
    ask: list[int]
    answer: list[int]
    numbers: list[tuple[int, int]]


@dataclass(frozen=True)
class Document:
    """``tokens`` end with the plain text after the last cut."""

    source: str
    tokens: list[int]
    questions: list[Question]


def make_document(encode: Encode, text: str, index: int) -> Document:
    """Document ``index``, an excerpt of ``text``, which is of source ``index % 3``.

    Args:
        encode: text to token ids, without special tokens.
    Raises:
        ValueError: the text ends before the document does.
    """
    rng = random.Random(index)
    digits = rng.sample("123456789", 9)

    def number() -> str:
        digits.append(digits.pop(0))  # adjacent numbers begin with different digits
        return digits[-1] + str(rng.randrange(1000, 10_000))

    singles = [(x, number()) for x in rng.sample(SUBJECTS, SINGLES_BEFORE[-1])]
    chains = [(x, number(), number()) for x in rng.sample(OWNERS, CHAINS_BEFORE[-1])]
    start = index // len(SOURCES) * STRIDE_CHARACTERS
    filler = encode(text[start : start + STRIDE_CHARACTERS])
    tokens: list[int] = []
    used = 0
    for cut, window in enumerate(CUTS):
        before = cut and cut - 1
        first = (SINGLES_BEFORE[before], CHAINS_BEFORE[before]) if cut else (0, 0)
        planted = [f"the {x} is {n}." for x, n in singles[first[0] : SINGLES_BEFORE[cut]]]
        for owner, locker, code in chains[first[1] : CHAINS_BEFORE[cut]]:
            planted.append(f"the locker of {owner} has the number {locker}.")
            planted.append(f"locker number {locker} opens with the code {code}.")
        sentences = [encode(f" Remember this: {x}") for x in planted]
        rng.shuffle(sentences)
        plain = window - len(tokens) - sum(map(len, sentences))
        places = sorted(rng.sample(range(plain), len(sentences)))
        for begin, end, sentence in zip(
            [0, *places], [*places, plain], [*sentences, []], strict=True
        ):
            tokens += filler[used + begin : used + end] + sentence
        tokens += filler[used + plain : used + plain + WINDOW_TOKENS]
        used += plain + WINDOW_TOKENS
    if used > len(filler):
        lack = f"the text has {len(filler)} tokens left, {used} are needed"
        raise ValueError(f"document {index}: {lack}")
    questions: list[Question] = []
    for cut, at in enumerate(CUTS):
        known, linked = singles[: SINGLES_BEFORE[cut]], chains[: CHAINS_BEFORE[cut]]
        *three, one = rng.sample(known, 4)
        questions.append(_question(encode, "single", at, [one]))
        if (index + cut) % 2:
            questions.append(_question(encode, "several", at, three))
        else:
            questions.append(_chained(encode, at, rng.choice(linked)))
    return Document(SOURCES[index % len(SOURCES)], tokens, questions)


def real_documents(model_path: Path, numbers: Iterable[int]) -> Iterator[tuple[int, Document]]:
    """Documents of the texts of scripts/texts.py, in the tokens of the model."""
    from tokenizers import Tokenizer

    from texts import load_text

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    for index in numbers:
        yield index, make_document(encode, load_text(SOURCES[index % len(SOURCES)]), index)


def _question(encode: Encode, kind: str, cut: int, facts: Sequence[tuple[str, str]]) -> Question:
    names = [f"the {x}" for x, _ in facts]
    what = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    verb = "is" if len(names) == 1 else "are"
    ask = f"\n\nQuestion: What {verb} {what}?\nAnswer: The {facts[0][0]} is"
    parts = []
    for i, (subject, number) in enumerate(facts):
        parts += [f". The {subject} is"] * (i > 0) + [f" {number}"]
    return _assemble(encode, kind, cut, ask, [*parts, "."], counted=parts[::2])


def _chained(encode: Encode, cut: int, chain: tuple[str, str, str]) -> Question:
    owner, locker, code = chain
    ask = f"\n\nQuestion: With which code does the locker of {owner} open?\nAnswer: "
    ask += f"The locker of {owner} has the number"
    parts = [f" {locker}", f". Locker number {locker} opens with the code", f" {code}", "."]
    return _assemble(encode, "chained", cut, ask, parts, counted=parts[2:3])


def _assemble(
    encode: Encode, kind: str, cut: int, ask: str, parts: Sequence[str], counted: Sequence[str]
) -> Question:
    """Each part is encoded separately; of scored parts the last five tokens, one per digit, are scored."""
    answer: list[int] = []
    numbers = []
    for part in parts:
        answer += encode(part)
        if part in counted:
            numbers.append((len(answer) - len(part.strip()), len(answer)))
    return Question(kind, cut, encode(ask), answer, numbers)
