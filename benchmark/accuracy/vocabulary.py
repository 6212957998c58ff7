"""The words of tasks.py, one token each."""

from __future__ import annotations

ADJECTIVES = """amber ancient autumn bitter blue bold brave bright broken calm clever cold copper
coral crimson crystal curious dark deep distant dusty early eager empty faint fierce fragile frozen
gentle giant golden grand hidden hollow humble icy iron ivory jade late little lonely loud lucky
mellow misty narrow noble olive pale plain polar proud purple quick quiet rapid royal rusty sacred
scarlet secret silver sleepy""".split()
NOUNS = """anchor anvil arrow basket beacon bell bridge candle canyon castle cedar circle cloud
compass cradle dagger desert dragon eagle engine falcon feather fiddle forest fountain garden gate
glacier hammer harbor island jungle kettle kite ladder lantern lion magnet maple marble meadow
mirror mountain needle oak ocean orchard palace panther pepper pillar planet prairie rabbit river
rocket saddle spider temple thunder tiger tower valley window""".split()
NUMBERS = [str(n) for n in range(100)]
MARKS = "# ? = ; : , + . all trace copy count".split()
FILLER_SENTENCES = [
    sentence.split() + ["."]
    for sentence in (
        "the grass is green and the sky has no end",
        "we go there and come back again",
        "people walked along while rain fell",
        "nobody knew how long it would take",
        "they sat down and talked about many things",
        "it was time to rest before night came",
        "some children played near an old house",
        "she read her book until sleep came",
        "he wrote his name upon paper",
        "then everyone went home to eat",
        "days passed and nothing changed here",
        "the sun is up and we go",
    )
]

SPECIAL_TOKENS = ("<|pad|>", "<|end|>")
BYTE_BASE = len(SPECIAL_TOKENS)  # ids of the 256 single bytes follow the special tokens
WORD_BASE = BYTE_BASE + 256
FILLER_WORDS = sorted({word for sentence in FILLER_SENTENCES for word in sentence} - set(MARKS))
WORDS = MARKS + NUMBERS + ADJECTIVES + NOUNS + FILLER_WORDS
VOCAB_TOKENS = -(-(WORD_BASE + len(WORDS)) // 64) * 64  # the rest is padding
ID_OF = {word: WORD_BASE + index for index, word in enumerate(WORDS)}

START, ASK, IS, END, COLON, COMMA, TALLY, DOT, ALL, TRACE, COPY, COUNT = (ID_OF[m] for m in MARKS)
NUMBER0, ADJECTIVE0, NOUN0 = ID_OF["0"], ID_OF[ADJECTIVES[0]], ID_OF[NOUNS[0]]
FILLER = [[ID_OF[word] for word in sentence] for sentence in FILLER_SENTENCES]
