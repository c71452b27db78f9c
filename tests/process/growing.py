"""Files of a job that grow, for tests that look at them fifty times a second: what was read is not parsed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spare_megatron.coordinator.journal import JournalError, Record, acted_on
from spare_megatron.coordinator.journal_parts import BEGIN


class GrowingJournal:
    """The records of a journal by now."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, BEGIN
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """Those of all parts in order. Raises as :func:`spare_megatron.coordinator.journal.read`."""
        try:
            self._read_on()
        except JournalError:  # lines were taken back: the disk had failed
            self._records, self._end = [], BEGIN
            self._read_on()
        return self._records.copy()

    def _read_on(self) -> None:
        for record, end in acted_on(self._path, self._end, wanted=lambda group, step: True):
            assert record is not None
            self._records.append(record)
            self._end = end


class GrowingLines:
    """The objects in the whole lines of a file by now; the last line may be in the middle of being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = b""
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        """Empty where the file is not there."""
        text = self._path.read_bytes() if self._path.exists() else b""
        text = text[: text.rfind(b"\n") + 1]
        if text != self._text:
            if not text.startswith(self._text):
                self._text, self._lines = b"", []
            self._lines += [json.loads(line) for line in text[len(self._text) :].splitlines()]
            self._text = text
        return self._lines.copy()
