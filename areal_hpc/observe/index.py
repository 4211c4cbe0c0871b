"""`areal-hpc index RUN`: RUN/index.h5, the tables of all attempts as one, by HDF5 virtual datasets. No row is copied: the logs must stay beside it.

Of a table that belongs to steps (/steps, /trajectories, /evaluations, /pushes), an attempt contributes its rows before the first step of a later attempt, as in the
report. Other tables keep all rows; their times are on each attempt's own clock, and /attempts says which rows are whose and how to date them:

    attempt, start_unix, start_s, resumed_from_step, and for every table TABLE_first and TABLE_rows

The index is a picture of the moment: rows that a living run adds later are not in it. Make it again, it takes no longer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from areal_hpc import __version__
from areal_hpc.config import ConfigError
from areal_hpc.observe.runs import STEP_OF, attempt_logs
from areal_hpc.observe.schema import SCHEMA_VERSION, TABLES
from areal_hpc.observe.telemetry import open_log, sidecar_path

NAME = "index.h5"


def write_index(run_dir: Path) -> Path:
    """Write RUN/index.h5, in place of an older one, and return its path.

    Raises ConfigError when there is no log, when one is degraded (its text file cannot be joined this way), or when the attempts were written by versions whose
    tables differ.
    """
    logs = attempt_logs(run_dir)
    counts = _counts(logs)
    path = run_dir / NAME
    unfinished = path.with_name(f"{NAME}.{os.getpid()}.tmp")
    try:
        with h5py.File(unfinished, "w", libver=("v110", "v110"), locking=False) as file:
            file.attrs["schema_version"], file.attrs["package_version"] = SCHEMA_VERSION, __version__
            for table in TABLES:
                _join(file, run_dir, table, [(log, count[table]) for log, count in zip(logs, counts, strict=True) if table in count])
            file.create_dataset("attempts", data=_attempts(logs, counts))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _counts(logs: Sequence[Path]) -> list[dict[str, int]]:
    """For each log: table -> rows that count, from its first one on."""
    found: list[dict[str, int]] = []
    first_step_later = math.inf
    for log in reversed(logs):
        try:
            with open_log(log) as file:
                if (text := sidecar_path(log, int(file.attrs.get("recoveries", 0)))).exists():
                    raise ConfigError(f"{log} is degraded: some of its rows are in {text.name}; read it with areal_hpc.observe.telemetry.read_table")
                counts = {}
                for table in TABLES:
                    if table not in file:
                        continue
                    data = file[table]
                    if table not in STEP_OF or not math.isfinite(first_step_later):
                        counts[table] = len(data)
                        continue
                    repeated = np.flatnonzero(data[STEP_OF[table]][:] >= first_step_later)
                    counts[table] = int(repeated[0]) if len(repeated) else len(data)
                steps = file["steps"]["step"][:]
        except (OSError, KeyError) as error:
            raise ConfigError(f"{log}: not a readable log ({' '.join(str(error).split())})") from error
        first_step_later = min(first_step_later, int(steps.min())) if len(steps) else first_step_later
        found.append(counts)
    return found[::-1]


def _join(file: h5py.File, run_dir: Path, table: str, sources: Sequence[tuple[Path, int]]) -> None:
    """One virtual dataset. Names of the sources are relative to the index, so the run folder can be moved."""
    if not sources:
        return
    with open_log(sources[-1][0]) as newest:
        dtype, attributes = newest[table].dtype, dict(newest[table].attrs)
    layout = h5py.VirtualLayout((sum(count for _, count in sources),), dtype)
    first = 0
    for log, count in sources:
        with open_log(log) as old:
            if old[table].dtype != dtype:
                raise ConfigError(
                    f"{log}: /{table} has other columns than {sources[-1][0]}, which a later version wrote; the report can join them, an index cannot"
                )
            if count:
                source = h5py.VirtualSource(str(log.relative_to(run_dir)), table, shape=(len(old[table]),), dtype=dtype)
                layout[first : first + count] = source[:count]
        first += count
    data = file.create_virtual_dataset(table, layout) if first else file.create_dataset(table, shape=(0,), dtype=dtype)
    for name, value in attributes.items():
        data.attrs[name] = value


def _attempts(logs: Sequence[Path], counts: Sequence[dict[str, int]]) -> np.ndarray:
    columns: list[tuple[str, str]] = [("attempt", "<i4"), ("start_unix", "<f8"), ("start_s", "<f8"), ("resumed_from_step", "<i4")]
    columns += [(f"{table}_{what}", "<i8") for table in TABLES for what in ("first", "rows")]
    rows = np.zeros(len(logs), columns)
    first = dict.fromkeys(TABLES, 0)
    for row, log, count in zip(rows, logs, counts, strict=True):
        with open_log(log) as file:
            known: dict[str, Any] = dict(file.attrs)
        row["attempt"] = int(log.parent.name.removeprefix("attempt-"))
        row["start_unix"], row["start_s"] = known.get("start_unix", math.nan), known.get("start_s", math.nan)
        row["resumed_from_step"] = known.get("resumed_from_step", -1)
        for table in TABLES:
            row[f"{table}_first"], row[f"{table}_rows"] = first[table], count.get(table, 0)
            first[table] += count.get(table, 0)
    return rows


def main(args: Sequence[str]) -> int:
    """`areal-hpc index RUN`. Raises ConfigError for a mistake of the user."""
    if len(args) != 1 or args[0].startswith("-"):
        raise ConfigError("areal-hpc index needs one run folder and takes no options: areal-hpc index RUN")
    print(f"index: {write_index(Path(args[0]))}")
    return 0
