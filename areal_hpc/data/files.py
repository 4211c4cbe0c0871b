"""Rows out of local files: JSON, JSON-lines (both plain or gzipped) and parquet, told apart by their content.

A path names a file, a folder (all data files below it) or a glob. Nothing is ever unpickled or fetched. A row that is no JSON comes out as the RowError that says
so: the loader decides whether it stops there or counts it.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from areal_hpc.config import ConfigError

Row = Any
"""What stood in the file: a dictionary if the row is any good."""

DATA_SUFFIXES = (".json", ".jsonl", ".jsonlines", ".ndjson", ".parquet", ".gz")
"""In a folder, files of these names must be data; others are data if they look like it, and are reported otherwise."""
SNIFFED_BYTES = 4096
PARQUET_BATCH_ROWS = 2048
_BOM = b"\xef\xbb\xbf"
_NO_JSON = "not JSON"


class RowError(ValueError):
    """A row that cannot be used: `kind` in a few words that all rows with this fault share (they are counted by it), the text says what exactly."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(text or kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Table:
    """One file, which can be read once or more."""

    path: Path
    container: Literal["lines", "document", "parquet"]
    gzipped: bool = False

    def locate(self, number: int) -> str:
        """FILE:LINE, or the row of a file that has no lines."""
        return f"{self.path}:{number}" if self.container == "lines" else f"{self.path}: row {number} (from 0)"

    def rows(self, columns: frozenset[str] | None = None) -> Iterator[tuple[int, Row | RowError]]:
        """(number for `locate`, row). Blank lines are no rows. `columns`: names that anybody asks for; others of a parquet file are not read.

        Raises ConfigError for a file that is damaged as a whole, or that needs a package which is missing.
        """
        try:
            if self.container == "parquet":
                yield from _parquet_rows(self.path, columns)
            elif self.container == "document":
                yield from enumerate(_document_rows(self.path, self.gzipped))
            else:
                with _open(self.path, self.gzipped) as file:
                    yield from _line_rows(file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{self.path}: damaged gzip file: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error


def find(option: str, path: str) -> tuple[list[Table], list[Path]]:
    """(tables in the order of their names, files of a folder that hold no data). Raises ConfigError when there is nothing to read."""
    given = Path(path)
    if given.is_file():
        return [_table(given)], []
    if given.is_dir():
        found = [Path(folder) / name for folder, _, names in os.walk(given, followlinks=True) for name in names]
        inside = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(given).parts) and file.is_file())
        data = [file for file in inside if _looks_like_data(file)]
        if not data:
            raise ConfigError(f"{option}={path}: none of its {len(inside)} files is JSON, JSON-lines or parquet")
        return [_table(file) for file in data], [file for file in inside if file not in set(data)]
    if glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
        if not matches:
            raise ConfigError(f"{option}={path}: no file matches")
        return [_table(match) for match in matches], []
    raise ConfigError(f"{option}={path}: no such file (nor folder nor glob; only local files are read)")


# ---- what a file is


def _head(path: Path) -> tuple[bytes, bool]:
    """(first bytes, unpacked if gzipped; whether it is)."""
    with path.open("rb") as file:
        head = file.read(SNIFFED_BYTES)
    if not head.startswith(b"\x1f\x8b"):
        return head, False
    try:
        with gzip.open(path) as unpacked:
            return unpacked.read(SNIFFED_BYTES), True
    except (OSError, EOFError, zlib.error):
        return b"", True  # reading it says what is wrong


def _text_start(head: bytes) -> bytes:
    return head.removeprefix(_BOM).lstrip()[:1]


def _looks_like_data(path: Path) -> bool:
    if path.name.lower().endswith(DATA_SUFFIXES):
        return True
    head, _ = _head(path)
    return head.startswith(b"PAR1") or _text_start(head) in (b"{", b"[")


def _table(path: Path) -> Table:
    """Raises ConfigError for files that are refused whatever is in them."""
    try:
        head, gzipped = _head(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if head.startswith(b"PAR1"):
        if gzipped:
            raise ConfigError(f"{path}: a gzipped parquet file; unpack it (gunzip), parquet compresses by itself")
        return Table(path, "parquet")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise ConfigError(f"{path}: a pickled file: unpickling can run code, so it is refused; write JSON-lines or parquet where you trust it")
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        raise ConfigError(f"{path}: an Arrow file, as `save_to_disk` writes; write parquet instead (`to_parquet`)")
    start = _text_start(head)
    document = start == b"[" or (start == b"{" and _is_one_document(path, gzipped))
    return Table(path, "document" if document else "lines", gzipped)


def _open(path: Path, gzipped: bool) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if gzipped else path.open("rb")


def _is_one_document(path: Path, gzipped: bool) -> bool:
    """Whether an object goes on over several lines: its first line ends before it does, and the whole is JSON."""
    try:
        with _open(path, gzipped) as file:
            first = next(line for line in file if line.removeprefix(_BOM).strip())
            content = first.removeprefix(_BOM).strip()
            if content.endswith(b"}"):
                return False
            json.loads((first + file.read()).removeprefix(_BOM))
    except (ValueError, RecursionError, OSError, EOFError, zlib.error):
        return False
    return True


# ---- rows


def _line_rows(file: Iterable[bytes]) -> Iterator[tuple[int, Row | RowError]]:
    for number, line in enumerate(file, start=1):
        content = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if content:
            try:
                yield number, json.loads(content.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield number, as_row_error(error)


def as_row_error(error: Exception) -> RowError:
    """What the JSON reader complains about, as the fault of a row."""
    if isinstance(error, json.JSONDecodeError):
        return RowError(_NO_JSON, f"not JSON: {error.msg} (column {error.colno})")
    if isinstance(error, RecursionError):
        return RowError(_NO_JSON, f"not JSON: nested too deeply ({error})")
    return RowError("not UTF-8" if isinstance(error, UnicodeDecodeError) else _NO_JSON, str(error))


def _document_rows(path: Path, gzipped: bool) -> list[Row]:
    with _open(path, gzipped) as file:
        content = file.read()
    try:
        document = json.loads(content.removeprefix(_BOM).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return document if isinstance(document, list) else [document]


def _parquet_rows(path: Path, columns: frozenset[str] | None) -> Iterator[tuple[int, Row]]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path}: reading parquet needs the package pyarrow; pip install pyarrow, or give JSON-lines") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if columns is None or name in columns] or names
            batches = (batch.to_pylist() for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted))
            yield from enumerate(itertools.chain.from_iterable(batches))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
