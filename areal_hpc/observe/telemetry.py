"""The log of a run in HDF5: one writer per file, readable while it grows and after the writer was killed.

1. `Log.create` makes a new file (never an old one), all tables and attributes, then starts SWMR (single writer, multiple readers).
2. `append` checks rows and buffers them; once per second they go to the file, table by table, each followed by a flush of that table.
   After `kill -9` the file therefore holds a prefix of the rows, at most one flush interval short.
3. When a write fails (disk full, quota, I/O error), the log is *degraded*: rows from there on go to `log.degraded.jsonl` with their row
   numbers (else to the fallback folder, else they wait in memory), and `read_table` joins both without gap or double. HDF5 cannot close
   a file that it cannot write, and crashes the interpreter at exit; so its descriptor is pointed at a copy in memory, where closing
   succeeds and the file on disk stays as the failure left it. Should memory refuse too, the handle stays open for ever: such a process
   must end by `os._exit`, as the ranks of a run do.
4. From time to time, and at the end, a degraded log tries to *recover*: when there is room again, all rows are written into a new file,
   which takes the place of `log.h5`; the text files go. Recording continues there.

File locks are not used (HDF5_USE_FILE_LOCKING may be anything): exclusive creation keeps a second `Log` away, and the mark that HDF5
leaves in a file open for writing keeps programs away that would append to it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from areal_hpc import __version__
from areal_hpc.observe.schema import ALL_TABLES, SCHEMA_VERSION, TABLES, Rows, Table, table_of, to_rows

Attribute = str | int | float
MAX_HELD_BYTES = 64 << 20
"""Of text that waits in memory for a place."""
ROOM_TO_GO_ON_BYTES = 1 << 20
"""Free space, beyond what the rows take, at which recovering is worth it."""
CHUNK_CACHE_BYTES = 64 << 10
"""Of HDF5, for each table. Rows are only appended: with HDF5's default of 1 MiB the rank would grow by all that it writes until twenty caches are full, for nothing."""
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

    @property
    def num_missing(self) -> int:
        """Rows that are not in the file itself."""
        return 0

    def state(self) -> dict[str, Any]:
        """For exit.json."""
        return {}

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
        fallback: Path | None = None,
        retry_s: float = 30.0,
    ) -> Self:
        """New file at `path` with these tables, and `attributes` at its root beside the standard ones. Raises FileExistsError when there is one already.

        `fallback`: folder for the text of a degraded log that does not fit beside `path`; `retry_s`: between two attempts to recover.
        """
        if path.exists():
            raise FileExistsError(f"{path} exists; a log is never continued, each attempt has its own")
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # appears under its name only when readers can open it
        attributes = _with_standard(attributes, clock)
        file = h5py.File(unfinished, "x", libver=("v110", "v110"), locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES)
        _fill(file, attributes, {name: np.zeros(0, table.dtype) for name, table in tables.items()})
        try:
            os.link(unfinished, path)  # fails where another writer was faster
        finally:
            unfinished.unlink()
        return cls(path, file, attributes, clock, flush_interval_s, fallback, retry_s)

    def __init__(
        self,
        path: Path,
        file: h5py.File,
        attributes: Mapping[str, Attribute],
        clock: Callable[[], float],
        flush_interval_s: float,
        fallback: Path | None,
        retry_s: float,
    ) -> None:
        self._data = {name: file[name] for name in ALL_TABLES if name in file}
        super().__init__(clock, flush_interval_s, self._data)
        self.path = path
        self.num_recoveries = 0
        self._file, self._attributes = file, dict(attributes)
        self._num_rows = dict.fromkeys(self._data, 0)  # rows that are safe: flushed to the file or to a text file
        self._fallback, self._retry_s, self._retry_at_s = fallback, retry_s, 0.0
        self._in_text = 0  # rows in text files
        self._not_saved: list[str] = []  # lines that no text file took; kept for the next try
        self._held_bytes = 0
        self._num_lost = 0  # rows that no place took

    @property
    def num_missing(self) -> int:
        return self._in_text + len(self._not_saved) + self._num_lost

    def state(self) -> dict[str, Any]:
        texts = [str(path) for path in self._texts() if path.exists()] if self.degraded else []
        return {"degraded": self.degraded, "recoveries": self.num_recoveries, "missing_rows": self.num_missing, "lost_rows": self._num_lost, "text": texts}

    def _texts(self) -> list[Path]:
        """Text files that rows may go to, the best first."""
        beside = sidecar_path(self.path, self.num_recoveries)
        return (
            [beside]
            if self._fallback is None
            else [beside, self._fallback / f"{self.path.absolute().parent.parent.name}-{self.path.parent.name}-{beside.name}"]
        )

    def _write(self, pending: dict[str, np.ndarray]) -> None:
        if self.degraded and self._clock() >= self._retry_at_s:
            self._recover()
        for name, rows in pending.items():
            if not self.degraded:
                try:
                    self._write_hdf5(name, rows)
                except (OSError, RuntimeError) as error:  # h5py raises either, depending on where inside HDF5 the write failed
                    self._degrade(error)
            if self.degraded:
                lines = [_json_line(name, self._num_rows[name] + k, row) for k, row in enumerate(rows)]
                self._not_saved += lines
                self._held_bytes += sum(map(len, lines))
            self._num_rows[name] += len(rows)
        if self.degraded:
            self._write_text()

    def _write_hdf5(self, name: str, rows: np.ndarray) -> None:
        data, start = self._data[name], self._num_rows[name]
        data.resize((start + len(rows),))
        data[start:] = rows
        data.flush()

    def _degrade(self, error: Exception) -> None:
        self.degraded, self._retry_at_s = True, self._clock() + self._retry_s
        try:
            _close_in_memory(self._file)
        except (OSError, RuntimeError):
            _BROKEN.append((self._file, self._data))
        reason = " ".join(str(error).split())
        texts = " or ".join(map(str, self._texts()))
        print(f"areal-hpc: WARNING: cannot write {self.path} ({reason}). The log goes on as text in {texts}", file=sys.stderr, flush=True)

    def _write_text(self) -> None:
        """Append the lines to the first text file that takes them, or keep them for the next flush; beyond MAX_HELD_BYTES say what must be said, and count the rest."""
        data = "".join(self._not_saved).encode()
        if any(_append(path, data) for path in self._texts()):
            self._in_text += len(self._not_saved)
            self._forget_held()
        elif self._held_bytes > MAX_HELD_BYTES:
            self._say_lost()

    def _forget_held(self) -> None:
        self._not_saved.clear()
        self._held_bytes = 0

    def _say_lost(self) -> None:
        """The last resort: steps, evaluations and events in full on stderr, the rest as a count."""
        lost = f"{len(self._not_saved)} rows of {self.path} could not be saved"
        print(f"areal-hpc: WARNING: {lost}; those of /steps, /evaluations and /events:", file=sys.stderr)
        lines = [line for line in self._not_saved if line.startswith(('{"table": "steps"', '{"table": "evaluations"', '{"table": "events"'))]
        print("".join(lines), end="", file=sys.stderr, flush=True)
        self._num_lost += len(self._not_saved)
        self._forget_held()

    def _recover(self) -> None:
        """If the disk has room again: all rows into a new file in the place of the old one, and go on there. Changes nothing when it has not."""
        self._retry_at_s = self._clock() + self._retry_s
        texts = [path for path in self._texts() if path.exists()]
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        file: h5py.File | None = None
        try:
            disk = os.statvfs(self.path.parent)
            needed = self.path.stat().st_size + sum(path.stat().st_size for path in texts) + self._held_bytes + ROOM_TO_GO_ON_BYTES
            if disk.f_bavail * disk.f_frsize < needed:
                return
            lines = [line for path in texts for line in _whole_lines(path)] + self._not_saved
            with open_log(self.path) as old:
                tables = {name: _joined(name, old[name][:], lines) for name in self._data}
            file = h5py.File(unfinished, "w", libver=("v110", "v110"), locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES)
            _fill(file, self._attributes | {"recoveries": self.num_recoveries + 1}, tables)
            unfinished.replace(self.path)
        except (OSError, RuntimeError):  # no, it has not
            if file is not None:
                _abandon(file)
            unfinished.unlink(missing_ok=True)
            return
        for path in texts:
            path.unlink(missing_ok=True)
        print(
            f"areal-hpc: {self.path} can be written again: the {self._in_text + len(self._not_saved)} rows that it lacked are in it",
            file=sys.stderr,
            flush=True,
        )
        self.degraded, self._in_text = False, 0
        self.num_recoveries += 1
        self._forget_held()
        self._file, self._data = file, {name: file[name] for name in tables}
        self._num_rows = {name: len(rows) for name, rows in tables.items()}

    def rows(self, table: str) -> np.ndarray:
        self.flush()
        return read_table(self.path, table) if self.degraded or self._closed else self._data[table][:]

    def close(self) -> None:
        """Flush and close, after a last attempt to recover. A log that stays degraded says on stderr what no disk took."""
        if self._closed:
            return
        super().close()
        if self.degraded:
            self._recover()
        if not self.degraded:
            try:
                self._file.close()
            except (OSError, RuntimeError):  # all rows are in it; what could not be written is the mark that nobody writes it any more
                _abandon(self._file)
        elif self._not_saved:
            self._say_lost()


def _append(path: Path, data: bytes) -> bool:
    """All of it, or nothing."""
    try:
        size = path.stat().st_size if path.exists() else 0
        with path.open("ab", buffering=0) as file:
            try:
                written = file.write(data)
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                file.truncate(size)  # no half line
                raise
    except OSError:
        return False
    return True


def _fill(file: h5py.File, attributes: Mapping[str, Attribute], rows: Mapping[str, np.ndarray]) -> None:
    """Attributes, and the tables that `rows` names with what they begin with; then SWMR, and all of it on disk."""
    for name, value in attributes.items():
        file.attrs[name] = _fixed(value)
    for name, found in rows.items():
        data = _create_table(file, table_of(name))
        if len(found):
            data.resize((len(found),))
            data[:] = found
    file.swmr_mode = True
    file.flush()


def _abandon(file: h5py.File) -> None:
    """Let go of a file that cannot be written, without a crash at exit."""
    try:
        _close_in_memory(file)
    except (OSError, RuntimeError):
        _BROKEN.append((file, {}))


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


def _create_table(file: h5py.File, table: Table) -> h5py.Dataset:
    data = file.create_dataset(table.name, shape=(0,), maxshape=(None,), chunks=(table.chunk_rows,), dtype=table.dtype)
    data.attrs["definition"] = _fixed(table.definition)
    for column in table.columns:
        data.attrs[column.name] = _fixed(column.text)
        if column.names:
            data.attrs[f"{column.name}_names"] = np.array([name.encode() for name in column.names])
    return data


def sidecar_path(log_path: Path, num_recoveries: int = 0) -> Path:
    """`log.degraded.jsonl` beside `log.h5`; of a log that has recovered before `log.degraded-1.jsonl`, ..."""
    return log_path.with_name(f"{log_path.stem}.degraded{f'-{num_recoveries}' if num_recoveries else ''}.jsonl")


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
        sidecar = sidecar_path(path, int(file.attrs.get("recoveries", 0)))
    return _joined(table, rows, _whole_lines(sidecar)) if sidecar.exists() else rows


def read_tail(path: Path, table: str, most: int) -> np.ndarray:
    """The last `most` rows, without reading those before: of a log that is still open, or large. Raises OSError, KeyError as `read_table`."""
    with open_log(path) as file:
        data = file[table]
        if not sidecar_path(path, int(file.attrs.get("recoveries", 0))).exists():
            rows: np.ndarray = data[max(0, len(data) - most) :]
            return rows
    return read_table(path, table)[-most:] if most else np.zeros(0, table_of(table).dtype)


def _joined(table: str, rows: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Rows of the file up to the first that is in text, then those, by their numbers. Rows that neither has are missing: a warning says so."""
    parsed = (json.loads(line) for line in lines if line.startswith(f'{{"table": "{table}"'))
    of_number = {record["row"]: record for record in parsed}
    if not of_number:
        return rows
    numbers = sorted(of_number)
    first = numbers[0]  # HDF5 may hold a torn copy of the rows from here on
    if numbers[-1] - first + 1 != len(numbers) or first > len(rows):
        warnings.warn(f"{numbers[-1] + 1 - len(numbers) - min(first, len(rows))} rows of /{table} are missing in the text of the degraded log", stacklevel=3)
    kinds = {column.name: column.numpy.kind for column in table_of(table).columns}
    records = [{name: _parsed(of_number[number][name], kind) for name, kind in kinds.items()} for number in numbers]
    return np.concatenate([rows[:first], to_rows(table, records)])


def _whole_lines(path: Path) -> list[str]:
    """Lines that end; a line cut by a kill is not one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _parsed(value: Any, kind: str) -> Any:
    return float("nan" if value is None else value) if kind == "f" else value
