"""The records of an experiment: JSON lines, one a cell, appended as cells end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

from experiments.harness.cell import Cell, Record, read_cell

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


class Store:
    """A file of records.

    Args:
        path: of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Record]:
        """Return all records; a line that was cut off by a crash at the end of the file is left out.

        Raises:
            ValueError: another line is no record.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line else None
            except json.JSONDecodeError:
                if number == len(lines):
                    continue
                record = line
            if record is None:
                continue
            if not isinstance(record, dict):
                raise ValueError(
                    f"{self.path}, line {number}, should be a JSON record. Found {line[:40]!r}; remove the line, and its run is "
                    "repeated."
                )
            records.append(record)
        return records

    def add(self, *records: Record) -> None:
        """Append some, all of them or none; other processes may do the same."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with self.path.open("a+b") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            end = file.read().rpartition(b"\n")[2]
            if end and not _is_record(end):  # what a crash cut off
                file.truncate(file.tell() - len(end))
            file.write(("\n" if end and _is_record(end) else "").encode() + text.encode())
            file.flush()
            os.fsync(file.fileno())

    def check_writable(self) -> None:
        """Raise OSError if records could not be added."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a"):
            pass

    def records_for(self, cells: Sequence[Cell]) -> list[tuple[Cell, Record | None]]:
        """Return every cell with its newest record, None where it was not run as it is configured now, on whatever device."""
        methods = {cell.method for cell in cells}  # reading a cell takes a millisecond
        newest = {}
        for record in self.read():
            if record.get("method") in methods and (cell := read_cell(record)) is not None:
                newest[_anywhere(cell)] = record
        return [(cell, newest.get(_anywhere(cell))) for cell in cells]


@cache
def _anywhere(cell: Cell) -> Cell:
    """Return the cell on whatever device: the record says where it ran."""
    return replace(cell, recipe=replace(cell.recipe, device="auto"))


def _is_record(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
