"""Progress of a run on rank 0: a bar with the numbers of the last step on a terminal, one compact line per step in a batch log.

step 12/100  reward 1.23  acc 0.61  12.3k tok/s  stale 1.2 (max 3, bound 4)  wait 0.21s train 0.80s push 0.02s
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from areal_hpc.walltime import Walltime

if TYPE_CHECKING:
    import numpy as np

MAX_LINES = 200  # of a batch log, for any number of steps, as long as they follow each other within
QUIET_S = 30.0
SPARK_WIDTH = 40
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
LATEST_STEPS = 20
"""Steps that speed, shares of time and predictions rest on."""
FEW = 0.10
"""Share of the time below which a wait is not called a bottleneck."""


def si(value: float) -> str:
    """Three figures and a suffix: 12345 -> 12.3k. Not a number -> '-'."""
    if not math.isfinite(value):
        return "-"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:  # 999.9k would print as 1000k
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def decimal(value: float) -> str:
    """Two decimals; not a number -> '-'."""
    return f"{value:.2f}" if math.isfinite(value) else "-"


def spark_blocks(stream: TextIO) -> str:
    """Characters of a curve that the stream can take, low to high."""
    return SPARKS if "utf" in (getattr(stream, "encoding", None) or "utf-8").lower() else ASCII_SPARKS


def sparkline(values: Sequence[float] | np.ndarray, width: int = SPARK_WIDTH, blocks: str = SPARKS) -> str:
    """One character for each of at most `width` groups of consecutive values: where the group's mean lies between the smallest and the largest one.

    A space where no value is known.
    """
    num_groups, means = min(width, len(values)), []
    for k in range(num_groups):
        group = [float(value) for value in values[k * len(values) // num_groups : (k + 1) * len(values) // num_groups] if math.isfinite(value)]
        means.append(sum(group) / len(group) if group else math.nan)
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    if high == low:
        return "".join(blocks[len(blocks) // 2] if math.isfinite(mean) else " " for mean in means)
    return "".join(blocks[min(len(blocks) - 1, int((mean - low) / (high - low) * len(blocks)))] if math.isfinite(mean) else " " for mean in means)


def step_numbers(row: Mapping[str, Any]) -> str:
    """What one row of /steps says, in one line; counts of lost work only where there is some."""
    bound = "inf" if row["staleness_bound"] < 0 else row["staleness_bound"]
    parts = [
        f"reward {decimal(row['reward_mean'])}",
        f"acc {decimal(row['accuracy'])}",
        f"{si(row['tokens_per_s'])} tok/s",
        f"stale {row['staleness_mean']:.1f} (max {row['staleness_max']}, bound {bound})",
        f"wait {row['generation_wait_s']:.2f}s train {row['train_s']:.2f}s push {row['push_s']:.2f}s",
    ]
    lost = [f"{name} {row[name]}" for name in ("failed", "dropped", "filtered", "masked", "skipped_updates") if row[name]]
    return "  ".join(parts + lost)


def waits(times: Sequence[tuple[float, float]]) -> str:
    """Who waits, as training rank 0 sees it. `times`: (seconds it waited for data, seconds of the step) of the latest steps. The report sees both roles and says more."""
    total_s = sum(wall_s for _, wall_s in times)
    share = sum(wait_s for wait_s, _ in times) / total_s if total_s > 0 else 0.0
    verdict = "generation bound" if share >= FEW else "generation keeps up"
    return f"training waited for data {100 * share:.0f} % of the last {len(times)} steps: {verdict}"


class Progress:
    """Shows a run of `num_steps` steps on `stream`.

    Lifecycle: construct -> (`message` | `evaluation` | `step`)* -> `finish`.
    live: for a terminal, also behind mpiexec (which hands on what ranks write, but is no terminal itself). lines: for a file. none: silent.
    Trap: the bar is redrawn by these calls only (a timer thread would take time from a computing rank), so its clock stands still in between.
    """

    def __init__(
        self, num_steps: int, mode: Literal["live", "lines", "none"] = "lines", stream: TextIO | None = None, walltime: Walltime | None = None
    ) -> None:
        self._num_steps, self._mode = num_steps, mode
        self._stream = stream or sys.stdout
        self._every = max(1, math.ceil(num_steps / MAX_LINES))
        self._said_at = time.monotonic()
        self.num_unsaid = 0
        """Lines that the stream did not take: its disk is full, or its reader is gone. Not worth the run."""
        self._walltime = walltime
        self._live: _Live | None = _Live(num_steps, self._stream) if mode == "live" else None

    def message(self, text: str) -> None:
        """A line of its own."""
        try:
            if self._live:
                self._live.console.print(text, markup=False)
            elif self._mode != "none":
                print(text, file=self._stream, flush=True)
        except OSError:
            self.num_unsaid += 1

    def evaluation(self, version: int, accuracy: float, num_problems: int, more: str = "") -> None:
        """Result of an evaluation on the held-out set; `more`: what to say besides."""
        self.message(f"held-out accuracy {100 * accuracy:.1f} % of {num_problems} problems, {more + ', ' if more else ''}version {version}")

    def step(self, row: Mapping[str, Any]) -> None:
        """A step ended; `row` has the columns of /steps."""
        if self._walltime is not None:
            self._walltime.step(float(row["wall_s"]))
        if self._live:
            try:
                self._live.show(row, step_numbers(row))
            except OSError:
                self.num_unsaid += 1
        elif row["step"] % self._every == 0 or row["step"] in (1, self._num_steps) or time.monotonic() > self._said_at + QUIET_S:
            self._said_at = time.monotonic()
            self.message(f"step {row['step']}/{self._num_steps}  {self._numbers(row)}")

    def _numbers(self, row: Mapping[str, Any]) -> str:
        note = "" if self._walltime is None else self._walltime.note(self._num_steps - int(row["step"]))
        return f"{step_numbers(row)}  {note}" if note else step_numbers(row)

    def finish(self, summary: str = "") -> None:
        """Leave the last state of the bar standing and print the summary below it."""
        if self._live:
            self._live.stop()
            self._live = None
        if summary:
            self.message(summary)


class _Live:
    """The bar and, below it, the numbers of the last step."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        self.console = Console(file=stream, force_terminal=True, highlight=False)
        columns = ("step", MofNCompleteColumn(), BarColumn(bar_width=30), "elapsed", TimeElapsedColumn(), "left", TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=self.console, auto_refresh=False, speed_estimate_period=300)
        self._task = self._bar.add_task("", total=num_steps)
        first = Group(self._bar, Text("waiting for the first batch"))
        self._live = Live(first, console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._blocks = spark_blocks(stream)
        self._rewards: list[float] = []
        self._rates: list[float] = []
        self._times: list[tuple[float, float]] = []
        self._live.start(refresh=True)
        self.console.show_cursor(True)  # a rank may end by os._exit: the user's cursor must not stay hidden

    def show(self, row: Mapping[str, Any], numbers: str) -> None:
        self._bar.update(self._task, completed=int(row["step"]))
        self._rewards.append(float(row["reward_mean"]))
        self._rates.append(float(row["tokens_per_s"]))
        self._times = [*self._times, (float(row["generation_wait_s"]), float(row["wall_s"]))][-LATEST_STEPS:]
        curves = (f"{name} {sparkline(values, blocks=self._blocks)}" for name, values in (("reward", self._rewards), ("tok/s", self._rates)))
        self._live.update(Group(self._bar, Text(numbers), Text("  ".join(curves)), Text(waits(self._times))), refresh=True)

    def stop(self) -> None:
        self._live.stop()
