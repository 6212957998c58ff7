"""scripts/messages.py: the list of messages is complete, and says what to do."""

import re

import pytest

import messages

FOUND = sorted(messages.messages())
SAYS = re.compile(r"^\s*raise [A-Z]\w+\(|logger\.(error|exception|warning)\(|[^(]ConfigError\(")


def test_every_message_is_found():
    lines = {(one.file, one.line) for one in FOUND}
    for path in messages.PACKAGE.rglob("*.py"):
        file = str(path.relative_to(messages.PACKAGE))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if SAYS.search(line) and not line.startswith("class "):
                assert (file, number) in lines, line


@pytest.mark.parametrize("one", [x for x in FOUND if x.kind == "refused at start"], ids=str)
def test_a_refusal_says_what_to_do(one):
    answer = one.text.split("\n")[0]
    assert "; " in answer or not messages.words_in(answer)


def test_no_message_has_words_that_only_the_code_knows():
    of_operators = (x for x in FOUND if x.kind != "fatal" and messages.words_in(x.text))
    without_places = [re.sub(r"{[^{}]*}", "", one.text) for one in of_operators]
    assert [x for x in without_places if re.search(r"\b(arena|ticket|ring|slots?)\b", x)] == []


def test_a_message_made_of_parts_is_shown_as_a_whole(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["messages.py", "cannot serve"])
    messages.main()
    shown = capsys.readouterr().out
    assert "with --kv-offload: {error}<; run `sglang-scout doctor`" in shown and "1 in all" in shown
