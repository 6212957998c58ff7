"""The file of answers of one LongBench run: JSON lines, written as they come, so that a run can go on.

    {"kind": "run", ...}       one for each start; fields of rows.py (untimed; impl is the label) and
                               model, base_url, settings (what decides the answers, see Settings),
                               digests (set -> of prompt, length and data), longbench, data
    {"kind": "answer", ...}    set, id, status ("ok" or "failed"), reason, attempts, prompt_tokens, cut_tokens
                               (left out in the middle), prompt_sha (of the token ids); and where it is ok:
                               text, output_tokens, finish_reason, latency_s

Of several answers to one question the last counts: a failed one is asked again by the next run.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows import Row, problems  # noqa: E402
from sglang_scout.core.errors import ConfigError  # noqa: E402

ANSWER_FIELDS: dict[str, type] = {
    "set": str,
    "id": str,
    "status": str,
    "reason": str,
    "prompt_tokens": int,
    "cut_tokens": int,
    "prompt_sha": str,
}


@dataclass(frozen=True)
class Settings:
    """What must not change between two runs into one file. Names are those of the flags."""

    label: str
    model: str
    chat: str
    max_prompt_tokens: int
    tokenizer_sha: str


@dataclass
class Answers:
    """What a file holds."""

    path: Path
    runs: list[Row]
    by_key: dict[tuple[str, str], Row]

    @property
    def label(self) -> str:
        return self.runs[-1]["impl"]


def read_answers(path: Path) -> Answers:
    """Read a file; a last line that was cut short is ignored.

    Raises:
        ConfigError: there is no such file, or a line of it is neither a run nor an answer.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that a run has written") from None
    runs: list[Row] = []
    by_key: dict[tuple[str, str], Row] = {}
    # Behind the last newline is nothing, or the start of a line whose writer was killed.
    for number, line in enumerate(lines[:-1], 1):
        wrong = ""
        row: Any = None
        try:
            row = json.loads(line)
        except ValueError as error:
            wrong = f"not JSON ({error})"
        if isinstance(row, dict) and row.get("kind") == "run" and not problems(row):
            runs.append(row)
        elif isinstance(row, dict) and row.get("kind") == "answer" and runs:
            fields = ANSWER_FIELDS | ({"text": str} if row.get("status") == "ok" else {})
            bad = [name for name, kind in fields.items() if not isinstance(row.get(name), kind)]
            wrong = f"an answer without {', '.join(bad)}" if bad else ""
            if not bad:
                by_key[row["set"], row["id"]] = row
        else:
            wrong = wrong or "neither a run nor an answer of a run"
        if wrong:
            raise ConfigError(
                f"{path}:{number}: {wrong}; name a file that longbench.py has written, or remove "
                "the line"
            )
    if not runs:
        raise ConfigError(f"{path}: holds no run; name a file that longbench.py has written")
    return Answers(path, runs, by_key)


class AnswerFile:
    """Open for one run at a time. ``add`` may be called from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file and takes its lock.

        Raises:
            ConfigError: it is no file of answers, cannot be written, or another run has it.
        """
        self.path = path
        self._mutex = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"--output {path}: {error.strerror}; name a file that can be written"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                f"--output {path}: another run is writing it; wait for it or name another file"
            ) from None
        try:
            self._drop_cut_line()
            size = self._file.seek(0, 2)
            self.before = read_answers(path) if size else None
        except BaseException:
            self._file.close()
            raise

    def _drop_cut_line(self) -> None:
        """The next answer must begin a line of its own."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        tail = data[end:]
        if not tail:
            return
        # A foreign file is left as it is. Ours begin every line alike, up to where it was cut.
        if not (tail.startswith(b'{"kind": "') or b'{"kind": "'.startswith(tail)):
            raise ConfigError(
                f"--output {self.path}: its end is no line of answers; name another file"
            )
        self._file.truncate(end)

    def begin(self, shared: Row, settings: Settings, digests: dict[str, str]) -> None:
        """Write the line of this run, after comparing it with the runs before.

        Args:
            shared: other fields of the row.
            digests: of the sets that this run asks.

        Raises:
            ConfigError: the file holds answers that were made with other settings or other data.
        """
        for run in self.before.runs if self.before is not None else ():
            for name, value in asdict(settings).items():
                old = run["settings"][name]
                if old != value:
                    flag = "tokenizer" if name == "tokenizer_sha" else name.replace("_", "-")
                    what = "the served model" if name == "model" else f"--{flag}"
                    raise ConfigError(
                        f"{what} is {value!r}, and the answers in --output {self.path} were made "
                        f"with {old!r}; use that, or name another file"
                    )
            for name, digest in digests.items():
                if run["digests"].get(name, digest) != digest:
                    raise ConfigError(
                        f"--longbench: prompt, length or data of {name} are not those of the "
                        f"answers in --output {self.path}; use that copy, or name another file"
                    )
        row = {
            "kind": "run",
            **shared,
            "impl": settings.label,
            "status": "ok",
            "reason": "",
            "untimed": True,
            "settings": asdict(settings),
            "digests": digests,
        }
        wrong = problems(row)
        assert not wrong, wrong
        self._write(row)

    def done(self, key: tuple[str, str]) -> bool:
        """Whether an earlier run has an answer to this question."""
        row = self.before.by_key.get(key) if self.before is not None else None
        return row is not None and row["status"] == "ok"

    def add(self, answer: Row) -> None:
        self._write({"kind": "answer", **answer})

    def _write(self, row: Row) -> None:
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with self._mutex:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()
