"""The logs of a run as tables: attempts joined, phases counted.

`load` joins the attempts of a run: where a later attempt repeated steps after a restart, its rows count and the earlier ones do not. The version that it began with is
pushed, and perhaps evaluated, a second time: there too the later rows count. Tables that belong to no step (`SAMPLED`) keep all rows, one table per attempt, since each
attempt has its own clock.

Shares of time refer to the training window of an attempt, from the start of its first step to the end of its last; starting up and the evaluations before and after
lie outside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe.schema import PHASES, ROLES, TABLES
from areal_hpc.observe.telemetry import Attribute, read_attributes, read_table, read_tail

STEP_OF = {"steps": "step", "trajectories": "batch", "evaluations": "step", "evaluation_sources": "step", "pushes": "version"}
"""Column by which a table's rows belong to training steps."""


SAMPLED = ("timeline", "ranks", "ring", "graders", "checkpoints", "events", "clocks")
"""Tables of states and happenings: `Run.sampled` has one of each per attempt."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tables of all attempts, as `load` joins them."""

    folder: Path
    attributes: dict[str, Attribute]
    """Root attributes of the last attempt's log."""
    starts: list[dict[str, Attribute]]
    """Root attributes of every attempt's log."""
    steps: np.ndarray
    trajectories: np.ndarray
    evaluations: np.ndarray
    evaluation_sources: np.ndarray
    pushes: np.ndarray
    sampled: dict[str, list[np.ndarray]]
    """Tables in `SAMPLED`: one per attempt, each on its own clock."""
    attempts: list[dict[str, np.ndarray]]
    """/steps and /pushes of each attempt, whole: those that a later attempt repeated are in them."""
    windows: list[tuple[float, float]]
    """Training window of each attempt, on its clock: (start, stop) in s."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.resolve().name

    @property
    def timelines(self) -> list[np.ndarray]:
        """/timeline of each attempt."""
        return self.sampled["timeline"]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as nested plain data; empty when the log has none."""
        return configuration(self.attributes)

    @property
    def num_steps(self) -> int | None:
        """Steps that the run was to make; None when the log does not say."""
        wanted = self.config.get("train", {}).get("num_steps")
        return wanted if isinstance(wanted, int) else None


def configuration(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    """The attribute `config` of a log as nested plain data; empty when there is none."""
    import yaml  # here, since a reader of numbers does without

    found = yaml.safe_load(str(attributes.get("config", "")))
    return found if isinstance(found, dict) else {}


def attempt_logs(run_dir: Path) -> list[Path]:
    """RUN/attempt-K/log.h5 by K. Raises ConfigError when there is none."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run, as runs/RECIPE-TIME")
    numbered = [(path.parent.name.removeprefix("attempt-"), path) for path in run_dir.glob("attempt-*/log.h5")]
    logs = [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdigit())]
    if not logs:
        raise ConfigError(f"{run_dir}: no log of a run (looked for attempt-*/log.h5)")
    return logs


def ending(attempt_dir: Path) -> str | None:
    """How an attempt ended, in words, by its exit.json or failure.json; None while it has neither: it goes on, or was killed as a whole."""
    ended = _json(attempt_dir / "exit.json")
    if ended is not None:
        meaning = {0: "done", 3: "done, but its log is incomplete (exit status 3)", 75: "stopped on request with a complete checkpoint; --resume goes on"}
        status = ended.get("status")
        return meaning.get(status, f"ended with exit status {status}") if isinstance(status, int) else "ended"
    failed = _json(attempt_dir / "failure.json")
    if failed is not None:
        return f"failed: {failed.get('name', 'a rank')}: {' '.join(str(failed.get('error', '')).split())[:200]}"
    return None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def load(run_dir: Path) -> Run:
    """Read and join the logs. Raises ConfigError when there is none or one cannot be read."""
    attempts, starts = [], []
    for path in attempt_logs(run_dir):
        try:
            attempts.append({name: read_as_now(path, name) for name in TABLES})
            starts.append(read_attributes(path))
        except (OSError, KeyError) as error:
            raise ConfigError(f"{path}: not a readable log ({' '.join(str(error).split())})") from error
    joined = {name: join_attempts(attempts, name) for name in STEP_OF}
    sampled = {name: [attempt[name] for attempt in attempts] for name in SAMPLED}
    whole = [{name: attempt[name] for name in ("steps", "pushes")} for attempt in attempts]
    windows = [window(attempt["steps"]) for attempt in attempts]
    return Run(run_dir, starts[-1], starts, **joined, sampled=sampled, attempts=whole, windows=windows)


ADDED_TABLES = ("evaluation_sources", "ring", "graders", "checkpoints", "clocks")
"""Tables that logs of earlier versions do not have."""


def read_as_now(path: Path, name: str, most: int | None = None) -> np.ndarray:
    """The table, or its last `most` rows, as this version knows it: what an earlier version did not write is not a number, 0 or empty. Raises OSError, KeyError."""
    dtype = TABLES[name].dtype
    try:
        rows = read_table(path, name) if most is None else read_tail(path, name, most)
    except KeyError:
        if name in ADDED_TABLES:
            return np.zeros(0, dtype)
        raise
    if rows.dtype.names == dtype.names:
        return rows
    out = np.zeros(len(rows), dtype)
    for column in TABLES[name].column_names:
        if column in (rows.dtype.names or ()):
            out[column] = rows[column]
        elif dtype[column].kind == "f":
            out[column] = math.nan
    return out


def join_attempts(attempts: Sequence[Mapping[str, np.ndarray]], table: str) -> np.ndarray:
    """Rows of a table of `STEP_OF` that count, of attempts in their order; each needs the tables `table` and `steps`."""
    parts: list[np.ndarray] = []
    column, first_step_later = STEP_OF[table], math.inf
    for attempt in reversed(attempts):
        rows = attempt[table]
        rows = rows[rows[column] < first_step_later]
        if column != "batch":  # one row a version: the one that a later attempt began with is in both
            rows = rows[~np.isin(rows[column], [row for part in parts for row in np.unique(part[column])])]
        parts.append(rows)
        if len(attempt["steps"]):
            first_step_later = min(first_step_later, int(attempt["steps"]["step"].min()))
    return np.concatenate(parts[::-1])


def window(steps: np.ndarray) -> tuple[float, float]:
    """(begin of the first step, end of the last) on the run's clock; (0, 0) without steps."""
    return (float((steps["end_s"] - steps["wall_s"]).min()), float(steps["end_s"].max())) if len(steps) else (0.0, 0.0)


def phase_seconds(timeline: np.ndarray, start_s: float, stop_s: float) -> dict[int, np.ndarray]:
    """World rank -> seconds in each of PHASES between `start_s` and `stop_s`."""
    inside = np.minimum(timeline["stop_s"], stop_s) - np.maximum(timeline["start_s"], start_s)
    return {
        int(rank): np.bincount(timeline["phase"][mine], np.maximum(inside[mine], 0.0), minlength=len(PHASES))
        for rank in np.unique(timeline["rank"])
        for mine in [timeline["rank"] == rank]
    }


def roles(run: Run) -> dict[int, str]:
    """World rank -> role."""
    return {int(rank): ROLES[role] for timeline in run.timelines for rank, role in np.unique(timeline[["rank", "role"]]).tolist()}


def wall_time(run: Run) -> float:
    """Seconds from the first to the last thing that any rank did, over all attempts."""
    return sum(float(timeline["stop_s"].max() - timeline["start_s"].min()) for timeline in run.timelines if len(timeline))


def rank_seconds(run: Run, whole: bool) -> dict[int, np.ndarray]:
    """World rank -> seconds in each phase, summed over attempts: of the whole attempts, or of their training windows."""
    total: dict[int, np.ndarray] = {}
    for timeline, window in zip(run.timelines, run.windows, strict=True):
        for rank, seconds in phase_seconds(timeline, *((-math.inf, math.inf) if whole else window)).items():
            total[rank] = total.get(rank, np.zeros(len(PHASES))) + seconds
    return total


def share(run: Run, role: str, phases: tuple[str, ...]) -> float | None:
    """Mean over the ranks of the role of the share of the training windows spent in `phases`; None without steps."""
    window_s = sum(stop - start for start, stop in run.windows)
    ranks = [rank for rank, its_role in roles(run).items() if its_role == role]
    if not ranks or window_s == 0:
        return None
    seconds = rank_seconds(run, whole=False)
    return float(np.mean([sum(seconds[rank][PHASES.index(phase)] for phase in phases) for rank in ranks]) / window_s)
