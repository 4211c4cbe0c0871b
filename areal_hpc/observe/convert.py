"""`areal-hpc convert RUN --to csv | tensorboard | wandb`: the log for other tools, after the run or with --follow during it. Nothing leaves the machine.

csv          one file for each table, attempts joined as in the report; tables of states carry the attempt in a first column
tensorboard  an event file: every number of /steps by step, every number of /evaluations by version            (extra `tensorboard`)
wandb        an offline run with the same numbers and the configuration; `wandb sync DIR` sends it, if one wants    (extra `wandb`)
"""

from __future__ import annotations

import csv
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe.compare import flat
from areal_hpc.observe.runs import SAMPLED, STEP_OF, Run, ending, load

FORMATS = ("csv", "tensorboard", "wandb")
EVERY_S = 5.0
"""Between two looks of --follow."""


class Sink(ABC):
    """Takes rows of numbers in the order of their steps."""

    @abstractmethod
    def add(self, step: int, at_unix: float, values: Mapping[str, float]) -> None:
        """Numbers of one step, each under `table/column`."""

    @abstractmethod
    def close(self) -> None:
        """Everything is there."""


class TensorBoardSink(Sink):
    """One event file in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without the package."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing("tensorboard", error) from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, at_unix: float, values: Mapping[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(self._event(wall_time=at_unix, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """An offline run; its folder is DIR/wandb/offline-run-..."""

    def __init__(self, folder: Path, run: Run) -> None:
        """Raises ConfigError without the package."""
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", error) from error
        settings = wandb.Settings(mode="offline", console="off", silent=True, disable_git=True)
        self._wandb = wandb
        self._run = wandb.init(project="areal-hpc", name=run.name, dir=str(folder), config=flat(run.config), settings=settings)
        self._run.define_metric("step")  # rows of two tables do not come in one order: each brings its step along
        for table in ("steps", "evaluations"):
            self._run.define_metric(f"{table}/*", step_metric="step")

    def add(self, step: int, at_unix: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": at_unix, **values})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its service process would stay as long as ours


def missing(extra: str, error: ImportError) -> ConfigError:
    """What to install."""
    return ConfigError(f"--to {extra} needs the package {extra} ({error}): pip install 'areal-hpc[{extra}]', or choose --to csv")


def write_csv(run: Run, folder: Path) -> list[Path]:
    """One file for each table; returns their paths."""
    written = []
    for table in STEP_OF:
        rows = getattr(run, table)
        written.append(_write(folder / f"{table}.csv", list(rows.dtype.names), [list(map(_text, row)) for row in rows.tolist()]))
    for table in SAMPLED:
        parts = run.sampled[table]
        rows = [
            [start.get("attempt", number + 1), *map(_text, row)]
            for number, (start, part) in enumerate(zip(run.starts, parts, strict=True))
            for row in part.tolist()
        ]
        written.append(_write(folder / f"{table}.csv", ["attempt", *(parts[-1].dtype.names or ())], rows))
    return written


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def send(run: Run, sink: Sink, sent: set[tuple[str, int]]) -> None:
    """Give the sink every row of /steps and /evaluations that is not in `sent`, and note it there. A step that a later attempt repeats is sent once."""
    ends = step_ends(run)
    for table, column in (("steps", "step"), ("evaluations", "policy_version")):
        rows = getattr(run, table)
        for row in rows[np.argsort(rows[column], kind="stable")]:
            step = int(row[column])
            if (table, step) in sent:
                continue
            values = {f"{table}/{name}": float(row[name]) for name in rows.dtype.names if rows.dtype[name].kind in "iuf" and math.isfinite(row[name])}
            sink.add(step, ends.get(step, float(run.starts[0].get("start_unix", 0.0))), values)
            sent.add((table, step))


def step_ends(run: Run) -> dict[int, float]:
    """Step -> when it ended, in seconds since 1970, by the clock of the attempt whose row counts."""
    ends: dict[int, float] = {}
    for start, attempt in zip(run.starts, run.attempts, strict=True):
        shift_s = float(start.get("start_unix", 0.0)) - float(start.get("start_s", 0.0))
        ends |= {int(row["step"]): float(row["end_s"]) + shift_s for row in attempt["steps"]}
    return ends


def convert(run_dir: Path, form: str, out: Path, *, follow: bool = False, sleep: Callable[[float], None] = time.sleep) -> None:
    """Write the log of a run in another form into the folder `out`. With `follow` go on until an exit.json or failure.json says that the run ended.

    Raises ConfigError when there is no log, when the form's package is missing, or when `out` cannot be made.
    """
    run = load(run_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be made") from error
    sink = TensorBoardSink(out) if form == "tensorboard" else WandbSink(out, run) if form == "wandb" else None
    sent: set[tuple[str, int]] = set()
    while True:
        over = not follow or ending(_newest_attempt(run_dir)) is not None  # asked before the last look, so that nothing written in between is missed
        run = load(run_dir)
        if sink is None:
            write_csv(run, out)
        else:
            send(run, sink, sent)
        if over:
            break
        sleep(EVERY_S)
    if sink is not None:
        sink.close()


def _newest_attempt(run_dir: Path) -> Path:
    return max((path.parent for path in run_dir.glob("attempt-*/log.h5")), key=lambda path: int(path.name.removeprefix("attempt-")))


def main(args: Sequence[str]) -> int:
    """`areal-hpc convert RUN --to FORM [--out DIR] [--follow]`. Raises ConfigError for a mistake of the user."""
    usage = "areal-hpc convert RUN --to csv|tensorboard|wandb [--out DIR] [--follow]"
    names: list[str] = []
    given: dict[str, str] = {}
    follow = False
    rest = iter(args)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name in ("--to", "--out"):
            given[name] = value or next(rest, "")
        elif argument == "--follow":
            follow = True
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option '{argument}' of areal-hpc convert; there are: --to, --out, --follow")
        else:
            names.append(argument)
    if len(names) != 1:
        raise ConfigError(f"areal-hpc convert needs one run folder, got {len(names)}: {usage}")
    form = given.get("--to", "")
    if form not in FORMATS:
        raise ConfigError(f"--to '{form}' is not a form that the log can take; choose one of {', '.join(FORMATS)}: {usage}")
    out = Path(given["--out"]) if given.get("--out") else Path(names[0]) / form
    convert(Path(names[0]), form, out, follow=follow)
    print(f"{form}: {out}")
    return 0
