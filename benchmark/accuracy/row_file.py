"""A file of rows that a later run can resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.rows import Row, Writer, read_rows


class RowFile(Writer):
    """Rows indexed by a key; each is written to disk immediately.

    Args:
        path: None keeps the rows in memory only. An existing file is resumed.
        environment: fields of all new rows that do not identify the measurement.
        fields: fields of all new rows that do: a row of the file counts as done only if it has the
            same values.
        key: names of the fields that distinguish the rows of one run.
    Raises:
        ValueError: a line of the file is not a row.
    """

    def __init__(
        self,
        path: Path | None,
        environment: Row,
        fields: Row,
        key: Sequence[str],
    ) -> None:
        super().__init__(path, {**environment, **fields}, append=True)
        self._fields = json.loads(json.dumps(fields))
        self._benchmark = environment["benchmark"]
        self._key = tuple(key)
        if path is not None:
            self.rows = [row for row in read_rows(path) if self._is_ours(row)]

    def renew(self, environment: Row) -> None:
        """Replaces the environment of rows added from now on: servers that start late run later code."""
        self._shared |= environment

    def _is_ours(self, row: Row) -> bool:
        same = all(row.get(name) == value for name, value in self._fields.items())
        return row["benchmark"] == self._benchmark and row["status"] == "ok" and same

    def has(self, **key: Any) -> bool:
        """Whether there is a row with this key. Raises ValueError unless all key fields are given."""
        if set(key) != set(self._key):
            raise ValueError(f"key {sorted(key)}: expected {sorted(self._key)}")
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)
