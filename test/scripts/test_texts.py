"""Long texts: what cleans them, on small ones, and what is refused."""

from __future__ import annotations

import pytest

import packages
import texts
from packages import Unavailable

PAGE = """<?xml version="1.0"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>Not this</title></head><body>
<p id="title"><a href="x">nor this</a></p><ul class="docnav top"><li>nor this</li></ul>
<div class="section"><h2 class="title">1.2. A
  Title</h2><div class="para">
    Words and <code>more  words</code>, then
    others.</div><p class="title">NOTE</p><pre>one
  two</pre></div><ul class="docnav"><li>nor this</li></ul></body></html>"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "CACHE", tmp_path)
    monkeypatch.setattr(texts, "FOLDER", tmp_path / "texts")
    return tmp_path


def test_a_page_without_its_navigation():
    expected = "1.2. A Title\n\nWords and more words, then others.\n\nNOTE\n\none\n  two"
    assert texts.page_text(PAGE) == expected


def test_an_excerpt_ends_with_a_line(monkeypatch):
    monkeypatch.setattr(texts, "CHARACTERS", 10)
    assert texts.excerpt("abc\ndef\nghijkl\n") == "abc\ndef\n"


def test_a_text_is_made_once(cache, monkeypatch):
    made = []
    monkeypatch.setitem(texts.MAKERS, "code", lambda folder: made.append(1) or "a line\n" * 200_000)
    with pytest.raises(Unavailable, match="networkx 3.6.1, of another version perhaps") as error:
        texts.load_text("code")
    assert not (cache / "texts" / "code.txt").exists()
    found = str(error.value).split("sha256 ")[1][:64]
    monkeypatch.setitem(texts.SOURCES, "code", ("networkx 3.6.1", found))
    assert len(texts.load_text("code")) == texts.CHARACTERS // 7 * 7
    assert texts.load_text("code").startswith("a line\n") and len(made) == 2
    assert not list(cache.glob("text-code-*")), "working folders are left"


@pytest.mark.parametrize("kind", texts.SOURCES)
def test_without_a_network_it_says_what_to_do(cache, monkeypatch, capsys, kind):
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(packages.sys, "executable", str(cache / "python"))
    assert texts.main([kind]) == 1
    words = capsys.readouterr().err
    assert "cannot be downloaded. Run this again where" in words
