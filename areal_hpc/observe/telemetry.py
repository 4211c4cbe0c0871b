"""The log of a run in HDF5: one writer per file, readable while it grows and after the writer was killed.

1. `Log.create` makes a new file (never an old one), all tables and attributes, then starts SWMR (single writer, multiple readers).
2. `append` checks rows and buffers them; once per second they go to the file, table by table, each followed by a flush of that table.
   After `kill -9` the file therefore holds a prefix of the rows, at most one flush interval short.
3. When a write fails (disk full), the log is *degraded*: rows from there on go to `log.degraded.jsonl` with their row numbers, and
   `read_table` joins both without gap or double. HDF5 cannot close a file that it cannot write, and crashes the interpreter at exit;
   so its descriptor is pointed at a copy in memory, where closing succeeds and the file on disk stays as the failure left it.
   Should memory refuse too, the handle stays open for ever: such a process must end by `os._exit`, as the ranks of a run do.

File locks are not used (HDF5_USE_FILE_LOCKING may be anything): exclusive creation keeps a second `Log` away, and the mark that HDF5
leaves in a file open for writing keeps programs away that would append to it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from areal_hpc import __version__
from areal_hpc.observe.schema import ALL_TABLES, SCHEMA_VERSION, TABLES, Rows, Table, table_of, to_rows

Attribute = str | int | float
_BROKEN: list[tuple[h5py.File, dict[str, h5py.Dataset]]] = []  # handles that cannot be closed; garbage collection would try


def hardware() -> dict[str, Attribute]:
    """Attributes `cpu_model` and `cores` (that this process may use)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu_model": models[0] if models else "unknown", "cores": len(os.sched_getaffinity(0))}


class AnyLog(ABC):
    """The verbs of a log: `append`, `event`, `flush`, `rows`, `close`. `Log` keeps rows in a file, `MemoryLog` in memory.

    Lifecycle: `create` -> (`append` | `event` | `flush`)* -> `close`.
    Example: `log.append("steps", row)`; at the end of a step `log.flush()`.
    Trap: `append` flushes only when a second has passed since the last flush; rows of a long quiet time wait for `flush`.
    """

    def __init__(self, clock: Callable[[], float], flush_interval_s: float, tables: Iterable[str] = TABLES) -> None:
        self.degraded = False
        """A write failed: rows go to the text file beside the log."""
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._last_flush_s = clock()
        self._pending: dict[str, list[np.ndarray]] = {name: [] for name in tables}
        self._closed = False

    @abstractmethod
    def _write(self, pending: dict[str, np.ndarray]) -> None:
        """Store the rows of the tables that have any."""

    @abstractmethod
    def rows(self, table: str) -> np.ndarray:
        """Copy of all rows of the table, buffered ones included."""

    def append(self, table: str, rows: Rows) -> None:
        """Add rows (see `schema.to_rows`). Raises ValueError for a table, column or value that the file cannot hold exactly."""
        assert not self._closed, f"append to /{table} of a closed log"
        new = to_rows(table, rows)
        if len(new):
            self._pending[table].append(new)
        if self._clock() - self._last_flush_s >= self._flush_interval_s:
            self.flush()

    def event(self, rank: int, kind: str, text: str, time_s: float | None = None) -> None:
        """Add to /events, at `time_s` (default: now). A long text takes several rows."""
        self.append("events", {"time_s": self._clock() if time_s is None else time_s, "rank": rank, "kind": kind, "text": text})

    def flush(self) -> None:
        """Write the buffered rows now."""
        self._last_flush_s = self._clock()
        pending = {name: np.concatenate(parts) for name, parts in self._pending.items() if parts}
        if pending:
            self._write(pending)
        for parts in self._pending.values():
            parts.clear()

    def close(self) -> None:
        """Flush and end; a second call does nothing."""
        if not self._closed:
            self.flush()
            self._closed = True


class MemoryLog(AnyLog):
    """A log without a file, for tests and the simulator."""

    @classmethod
    def create(
        cls,
        path: Path | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        clock: Callable[[], float] = time.monotonic,
        flush_interval_s: float = 1.0,
    ) -> Self:
        """`path` is accepted, so that both logs are made alike, and not used."""
        return cls(_with_standard(attributes or {}, clock), clock, flush_interval_s)

    def __init__(self, attributes: dict[str, Attribute], clock: Callable[[], float], flush_interval_s: float) -> None:
        super().__init__(clock, flush_interval_s)
        self.attributes = attributes
        self._stored = {name: [np.zeros(0, table.dtype)] for name, table in TABLES.items()}

    def _write(self, pending: dict[str, np.ndarray]) -> None:
        for name, rows in pending.items():
            self._stored[name].append(rows)

    def rows(self, table: str) -> np.ndarray:
        return np.concatenate([*self._stored[table], *self._pending[table]])


class Log(AnyLog):
    """The log in an HDF5 file. Verbs, lifecycle and trap: see `AnyLog`."""

    @classmethod
    def create(
        cls,
        path: Path,
        attributes: Mapping[str, Attribute],
        clock: Callable[[], float] = time.monotonic,
        flush_interval_s: float = 1.0,
        tables: Mapping[str, Table] = TABLES,
    ) -> Self:
        """New file at `path` with these tables, and `attributes` at its root beside the standard ones. Raises FileExistsError when there is one already."""
        if path.exists():
            raise FileExistsError(f"{path} exists; a log is never continued, each attempt has its own")
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # appears under its name only when readers can open it
        file = h5py.File(unfinished, "x", libver=("v110", "v110"), locking=False)
        for name, value in _with_standard(attributes, clock).items():
            file.attrs[name] = _fixed(value)
        for table in tables.values():
            _create_table(file, table)
        file.swmr_mode = True
        file.flush()
        try:
            os.link(unfinished, path)  # fails where another writer was faster
        finally:
            unfinished.unlink()
        return cls(path, file, clock, flush_interval_s)

    def __init__(self, path: Path, file: h5py.File, clock: Callable[[], float], flush_interval_s: float) -> None:
        self._data = {name: file[name] for name in ALL_TABLES if name in file}
        super().__init__(clock, flush_interval_s, self._data)
        self.path = path
        self._file = file
        self._num_rows = dict.fromkeys(self._data, 0)  # rows that are safe: flushed to the file or to the sidecar
        self._not_saved: list[str] = []  # lines that even the sidecar refused; kept for the next try

    def _write(self, pending: dict[str, np.ndarray]) -> None:
        for name, rows in pending.items():
            if not self.degraded:
                try:
                    self._write_hdf5(name, rows)
                except (OSError, RuntimeError) as error:  # h5py raises either, depending on where inside HDF5 the write failed
                    self._degrade(error)
            if self.degraded:
                self._not_saved += [_json_line(name, self._num_rows[name] + k, row) for k, row in enumerate(rows)]
            self._num_rows[name] += len(rows)
        if self.degraded:
            self._write_sidecar()

    def _write_hdf5(self, name: str, rows: np.ndarray) -> None:
        data, start = self._data[name], self._num_rows[name]
        data.resize((start + len(rows),))
        data[start:] = rows
        data.flush()

    def _degrade(self, error: Exception) -> None:
        self.degraded = True
        try:
            _close_in_memory(self._file)
        except (OSError, RuntimeError):
            _BROKEN.append((self._file, self._data))
        reason = " ".join(str(error).split())
        print(f"areal-hpc: WARNING: cannot write {self.path} ({reason}). The log goes on as text in {sidecar_path(self.path)}", file=sys.stderr, flush=True)

    def _write_sidecar(self) -> None:
        """Append the lines, or keep them for the next flush when the disk refuses them too."""
        sidecar = sidecar_path(self.path)
        size = sidecar.stat().st_size if sidecar.exists() else 0
        data = "".join(self._not_saved).encode()
        try:
            with sidecar.open("ab", buffering=0) as file:
                written = file.write(data)
                while written < len(data):
                    written += file.write(data[written:])
        except OSError:
            if sidecar.exists():
                os.truncate(sidecar, size)  # no half line
        else:
            self._not_saved.clear()

    def rows(self, table: str) -> np.ndarray:
        self.flush()
        return read_table(self.path, table) if self.degraded or self._closed else self._data[table][:]

    def close(self) -> None:
        """Flush and close. A degraded log says on stderr what no disk took: steps and events in full, the rest as a count."""
        if self._closed:
            return
        super().close()
        if not self.degraded:
            self._file.close()
            return
        self._write_sidecar()
        if self._not_saved:
            lost = f"{len(self._not_saved)} rows of {self.path} could not be saved"
            print(f"areal-hpc: WARNING: {lost}; those of /steps, /evaluations and /events:", file=sys.stderr)
            lines = [line for line in self._not_saved if line.startswith(('{"table": "steps"', '{"table": "evaluations"', '{"table": "events"'))]
            print("".join(lines), end="", file=sys.stderr, flush=True)


def _with_standard(attributes: Mapping[str, Attribute], clock: Callable[[], float]) -> dict[str, Attribute]:
    """`start_unix` and `start_s` are the same moment, on the world's clock and on the run's."""
    standard: dict[str, Attribute] = {"schema_version": SCHEMA_VERSION, "package_version": __version__, "start_unix": time.time(), "start_s": clock()}
    return {**standard, **hardware(), **attributes}


def _fixed(value: Attribute) -> Any:
    """Strings with a fixed width (HDF5 has none of width 0: an empty one becomes HDF5's empty value), numbers as they are."""
    if not isinstance(value, str):
        return value
    data = value.encode()
    if not data:
        return h5py.Empty("S1")
    return np.array(data, h5py.string_dtype("utf-8", len(data)))


def _close_in_memory(file: h5py.File) -> None:
    """Close a file whose writes fail: HDF5's descriptor becomes a copy in memory, which takes whatever HDF5 still wants to write."""
    descriptor = file.id.get_vfd_handle()
    copy = os.memfd_create("degraded-log")
    position, size = 0, os.fstat(descriptor).st_size
    while position < size:
        position += os.sendfile(copy, descriptor, position, size - position)
    os.dup2(copy, descriptor)
    os.close(copy)
    file.close()


def _create_table(file: h5py.File, table: Table) -> None:
    data = file.create_dataset(table.name, shape=(0,), maxshape=(None,), chunks=(table.chunk_rows,), dtype=table.dtype)
    data.attrs["definition"] = _fixed(table.definition)
    for column in table.columns:
        data.attrs[column.name] = _fixed(column.text)
        if column.names:
            data.attrs[f"{column.name}_names"] = np.array([name.encode() for name in column.names])


def sidecar_path(log_path: Path) -> Path:
    """`log.degraded.jsonl` beside `log.h5`."""
    return log_path.with_name(f"{log_path.stem}.degraded.jsonl")


def _json_line(table: str, row_number: int, row: np.void) -> str:
    """Strict JSON: NaN is null, infinities are strings."""
    values = {name: _json_value(row[name].item()) for name in table_of(table).column_names}
    return json.dumps({"table": table, "row": row_number, **values}, allow_nan=False) + "\n"


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def open_log(path: Path) -> h5py.File:
    """The file for reading: while it is written, after a clean end, after `kill -9`. Raises OSError when it is not a log."""
    try:
        return h5py.File(path, "r", swmr=True, locking=False)
    except FileNotFoundError:
        raise
    except (OSError, ValueError):  # not written with SWMR: an archive that was repacked, say
        return h5py.File(path, "r", locking=False)


def read_attributes(path: Path) -> dict[str, Attribute]:
    """Root attributes: str, int or float."""
    with open_log(path) as file:
        return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Attribute:
    if isinstance(value, h5py.Empty):
        return ""
    plain: Attribute = value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else value.item()
    return plain


def read_table(path: Path, table: str) -> np.ndarray:
    """Copy of all rows written so far, those of a degraded log's text file included. Raises OSError, KeyError when there is no such table."""
    with open_log(path) as file:
        rows: np.ndarray = file[table][:]
    sidecar = sidecar_path(path)
    if not sidecar.exists():
        return rows
    lines = [record for record in map(json.loads, _whole_lines(sidecar)) if record["table"] == table]
    if not lines:
        return rows
    first = lines[0]["row"]  # HDF5 may hold a torn copy of the rows from here on
    assert [record["row"] for record in lines] == list(range(first, first + len(lines))), f"{sidecar}: row numbers of /{table} are not consecutive"
    kinds = {column.name: column.numpy.kind for column in table_of(table).columns}
    records = [{name: _parsed(record[name], kind) for name, kind in kinds.items()} for record in lines]
    return np.concatenate([rows[:first], to_rows(table, records)])


def _whole_lines(path: Path) -> list[str]:
    """Lines that end; a line cut by a kill is not one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _parsed(value: Any, kind: str) -> Any:
    return float("nan" if value is None else value) if kind == "f" else value
