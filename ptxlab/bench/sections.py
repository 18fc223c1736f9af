"""A run of a suite that was stopped: its sections are kept in a file beside the record, and the next run goes on."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptxlab.bench.record import SCHEMA, Record, Row, row_from
from ptxlab.errors import FileError
from ptxlab.io.files import read_record, write_record

UNFINISHED = "not finished"  # why a record is invalid that its run will go on with


def partial_path(record_path: Path) -> Path:
    """Return the file that keeps the sections of a run until its record is written."""
    return record_path.with_suffix(".partial.json")


class PartialRecord:
    """The finished sections of one run, each written as soon as it is measured.

    A call `(section, measure)` returns the rows of a section: those that are kept, or else measured now.

    Attributes:
        note: what became of the file of an earlier run, in a line; empty if there was none.
    """

    def __init__(self, path: Path, record: Record, request: str) -> None:
        """Read the sections of an earlier run, if that was of the same request, GPU, versions and commit.

        Args:
            path: the file.
            record: of this run, without rows; if it is invalid already, so is what is kept.
            request: what is measured, in a word that is another one for other kernels, parts or options.
        """
        self._path, self._record, self._request = path, record, request
        self._sections: dict[str, list[Row]] = {}
        self.note = ""
        if path.is_file():
            reason = self._read()
            count = sum(map(len, self._sections.values()))
            self.note = f"begins anew: {path} is {reason}" if reason else f"goes on behind {count} rows of {path}"

    def __call__(self, section: str, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return the rows of a section, which are measured and written if they are not kept."""
        if section not in self._sections:
            self._sections[section] = [*measure()]
            self._write()
        return self._sections[section]

    def _write(self) -> None:
        rows = tuple(row for rows in self._sections.values() for row in rows)
        record = replace(self._record, rows=rows, invalid=self._record.invalid or UNFINISHED).to_json()
        counts = {section: len(rows) for section, rows in self._sections.items()}
        write_record(self._path, {"request": self._request, "sections": counts, **record}, "rows")

    def _read(self) -> str:
        """Read the sections of an earlier run, or return why they are not taken."""
        try:
            stopped_record = read_record(self._path, "a stopped run", SCHEMA)
            reason = self._difference(stopped_record)
            rows = iter([row_from(row) for row in stopped_record["rows"]])
            sections = {
                str(section): [next(rows) for _ in range(n)] for section, n in stopped_record["sections"].items()
            }
        except (FileError, TypeError, KeyError, ValueError, AttributeError, RuntimeError, StopIteration):
            return "no file of a stopped run"
        if not reason:
            self._sections = sections
        return reason

    def _difference(self, earlier: dict[str, Any]) -> str:
        record = self._record.to_json()
        if earlier["request"] != self._request:
            return "of other kernels or options"
        if earlier["device"] != record["device"]:
            same_name = earlier["device"].get("name") == record["device"].get("name")
            return "of another GPU or driver" if same_name else f"of another GPU, {earlier['device'].get('name')}"
        for name, version in record["versions"].items():
            if earlier["versions"].get(name) != version:
                return f"of another version, {name} {earlier['versions'].get(name)}"
        if earlier["commit"] != record["commit"]:
            return f"of another commit, {str(earlier['commit'])[:10]}"
        if str(record["commit"]).endswith("+"):
            return f"of uncommitted sources, {record['commit'][:10]}+"
        return "" if earlier["invalid"] == UNFINISHED else f"not valid: {earlier['invalid']}"
