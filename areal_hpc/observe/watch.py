"""`areal-hpc watch RUN`: what a run is doing, seen from another shell or node, while it goes on and after it died.

1. `look` reads the logs by SWMR without touching the run: small tables whole, of the timeline its end only, so a log of gigabytes takes no longer than a small one.
2. On a terminal the view is drawn anew every few seconds (rich); elsewhere each new step is one line.
3. It ends when the run has ended: exit.json, failure.json, or no sign of life.

Whether the job lives is told by RUN/owner.json (launch/ownership.py), which it renews every ten seconds; of a run without one, by the age of its log.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from areal_hpc.config import ConfigError
from areal_hpc.launch.ownership import OWNER_FILE, STALE_S, Owner
from areal_hpc.observe.progress import FEW, LATEST_STEPS, SPARKS, decimal, si, spark_blocks, sparkline, step_numbers
from areal_hpc.observe.runs import attempt_logs, configuration, ending, join_attempts, phase_seconds, read_as_now
from areal_hpc.observe.schema import BUSY, PHASES, ROLES
from areal_hpc.observe.telemetry import read_attributes
from areal_hpc.observe.words import Shares, bottleneck

TIMELINE_ROWS = 50_000
"""Intervals read from the end of /timeline: enough for the latest steps of hundreds of ranks."""
STATE_ROWS = 4_096
"""Rows read from the end of /ranks and /events."""
MAX_RANK_ROWS = 16
"""Ranks shown one by one; of more, the roles."""
EVENTS_SHOWN = 4
QUIET_S = 60.0
"""A log without owner file that has not grown for so long, and for five steps, belongs to no living run."""


@dataclass(frozen=True, slots=True)
class View:
    """One look at a run."""

    name: str
    attempt: int
    num_attempts: int
    state: str
    """`running`, or how it ended, in words."""
    over: bool
    num_steps: int | None
    """Steps that the run is to make; None when the log does not say."""
    steps: np.ndarray
    """/steps of all attempts, joined."""
    evaluations: np.ndarray
    ranks: np.ndarray
    """Latest row of /ranks of every rank."""
    seconds: dict[int, np.ndarray]
    """World rank -> seconds in each phase during the latest steps of this attempt."""
    events: list[tuple[float, str, str]]
    """Latest events: (seconds since the attempt began, kind, text)."""
    shares: Shares | None
    """Of the latest steps."""
    age_s: float
    """Since the log last grew."""
    job_end_s: float | None
    """Until the job's time limit, where the log knows it."""

    @property
    def step_s(self) -> float:
        """Mean duration of the latest steps; nan without any."""
        return float(self.steps["wall_s"][-LATEST_STEPS:].mean()) if len(self.steps) else math.nan

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the pace of the latest ones, evaluations not counted; None when that cannot be said."""
        if self.num_steps is None or not len(self.steps):
            return None
        return max(0, self.num_steps - int(self.steps["step"][-1])) * self.step_s


def look(run_dir: Path, now: float | None = None) -> View:
    """Read the run's logs. `now`: seconds since 1970 (default: the clock's). Raises ConfigError when there is no log yet, or none that can be read."""
    now = time.time() if now is None else now
    logs = attempt_logs(run_dir)
    path = logs[-1]
    try:
        attempts = [{name: read_as_now(log, name) for name in ("steps", "evaluations")} for log in logs]
        timeline, ranks, events = (read_as_now(path, name, most) for name, most in (("timeline", TIMELINE_ROWS), ("ranks", STATE_ROWS), ("events", STATE_ROWS)))
        attributes = read_attributes(path)
    except (OSError, KeyError) as error:
        raise ConfigError(f"{path}: not a readable log ({' '.join(str(error).split())})") from error
    steps = attempts[-1]["steps"]
    window_s = _latest_window(steps, timeline)
    seconds = phase_seconds(timeline, *window_s)
    age_s = max(0.0, now - path.stat().st_mtime)
    step_s = float(steps["wall_s"][-LATEST_STEPS:].mean()) if len(steps) else 0.0
    state, over = _state(run_dir, path.parent, now, age_s, step_s)
    start_s, job_end = float(attributes.get("start_s", 0.0)), float(attributes.get("job_end_unix", 0.0))
    wanted = configuration(attributes).get("train", {}).get("num_steps")
    return View(
        name=run_dir.resolve().name,
        attempt=int(path.parent.name.removeprefix("attempt-")),
        num_attempts=len(logs),
        state=state,
        over=over,
        num_steps=wanted if isinstance(wanted, int) else None,
        steps=join_attempts(attempts, "steps"),
        evaluations=join_attempts(attempts, "evaluations"),
        ranks=_latest_of_each(ranks),
        seconds=seconds,
        events=[(float(row["time_s"]) - start_s, row["kind"].decode(), row["text"].decode(errors="replace")) for row in events[-EVENTS_SHOWN:]],
        shares=_shares(timeline, seconds, window_s),
        age_s=age_s,
        job_end_s=job_end - now if job_end > 0 else None,
    )


def _latest_window(steps: np.ndarray, timeline: np.ndarray) -> tuple[float, float]:
    """(start, stop) of the latest steps on the run's clock, or of all there is before the first step has ended."""
    if len(steps):
        latest = steps[-LATEST_STEPS:]
        return float(latest["end_s"][0] - latest["wall_s"][0]), float(latest["end_s"][-1])
    return (float(timeline["start_s"].min()), float(timeline["stop_s"].max())) if len(timeline) else (0.0, 0.0)


def _latest_of_each(rows: np.ndarray) -> np.ndarray:
    _, first_from_behind = np.unique(rows["rank"][::-1], return_index=True)
    return rows[::-1][first_from_behind]


def _shares(timeline: np.ndarray, seconds: Mapping[int, np.ndarray], window_s: tuple[float, float]) -> Shares | None:
    length_s = window_s[1] - window_s[0]
    of_role = {role: np.unique(timeline["rank"][timeline["role"] == number]).tolist() for number, role in enumerate(ROLES)}
    if length_s <= 0 or not all(of_role.values()):
        return None

    def share(role: str, phases: Sequence[str]) -> float:
        return float(np.mean([sum(seconds[rank][PHASES.index(phase)] for phase in phases) for rank in of_role[role]]) / length_s)

    return Shares(
        waited=share("training", ["wait_data"]),
        gated=share("generation", ["gated"]),
        full=share("generation", ["ring_full"]),
        pushed=share("training", ["pack", "push_wait"]),
        generation_busy=share("generation", BUSY["generation"]),
        training_busy=share("training", BUSY["training"]),
        num_generation=len(of_role["generation"]),
        num_training=len(of_role["training"]),
    )


def _state(run_dir: Path, attempt_dir: Path, now: float, age_s: float, step_s: float) -> tuple[str, bool]:
    """(in words, whether it is over)."""
    ended = ending(attempt_dir)
    if ended is not None:
        return ended, True
    owner = run_dir / OWNER_FILE
    try:
        silent_s = now - owner.stat().st_mtime
        with owner.open("rb") as file:
            holder = Owner.read(file.fileno())
    except OSError:
        silent = age_s > max(QUIET_S, 5 * step_s)
        return (f"gone: no sign of life for {duration(age_s)}", True) if silent else ("running", False)
    if holder is not None and holder.is_here and not holder.is_alive and age_s > QUIET_S:
        return f"gone: {holder} has ended without a word", True
    if silent_s > 2 * STALE_S:
        return f"gone: {holder or 'its job'} has given no sign of life for {duration(silent_s)}", True
    return "running", False


# ---- words and pictures


def duration(seconds: float) -> str:
    """3725 -> 1 h 02 min; 61 -> 1 min 01 s."""
    whole = max(0, round(seconds))
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole // 3600 % 24:02} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


def headline(view: View) -> str:
    """Run, attempt, state."""
    attempt = f", attempt {view.attempt}" + (f" of {view.num_attempts}" if view.num_attempts > 1 else "") if view.num_attempts > 1 or view.attempt > 1 else ""
    seen = "" if view.over else f", log {duration(view.age_s)} old"
    return f"{view.name}{attempt}: {view.state}{seen}"


def progress_line(view: View) -> str:
    """Steps done, pace, time to the end and to the job's limit."""
    done = int(view.steps["step"][-1]) if len(view.steps) else 0
    parts = [f"step {done}" + (f"/{view.num_steps}" if view.num_steps else "")]
    if len(view.steps):
        parts.append(f"{view.step_s:.3g} s/step")
    if not view.over and view.left_s is not None:
        parts.append(f"{duration(view.left_s)} to the last step")
    if not view.over and view.job_end_s is not None:
        short = view.left_s is not None and view.left_s > view.job_end_s
        parts.append(f"{duration(view.job_end_s)} to the job's time limit" + (": NOT enough" if short else ""))
    return "  ".join(parts)


def bound_line(view: View) -> str:
    """Who waited for whom during the latest steps."""
    if view.shares is None or not len(view.steps):
        return "no training step has ended yet"
    return bottleneck(view.shares, int(view.steps["staleness_bound"][-1]))


def series(view: View) -> list[tuple[str, np.ndarray, str]]:
    """(name, values over all steps, the latest in words)."""
    steps = view.steps
    if not len(steps):
        return []
    last, bound = steps[-1], int(steps["staleness_bound"][-1])
    held_out = ""
    if len(view.evaluations):
        newest = view.evaluations[int(np.argmax(view.evaluations["policy_version"]))]
        held_out = f"  held-out {100 * newest['accuracy']:.1f} % (version {newest['policy_version']})"
    waits = np.divide(steps["generation_wait_s"], steps["wall_s"], out=np.zeros(len(steps)), where=steps["wall_s"] > 0)
    return [
        ("reward", steps["reward_mean"], decimal(last["reward_mean"])),
        ("accuracy", steps["accuracy"], f"{decimal(last['accuracy'])}{held_out}"),
        ("tokens/s", steps["tokens_per_s"], f"{si(float(last['tokens_per_s']))}  median {si(float(np.median(steps['tokens_per_s'])))}"),
        ("staleness", steps["staleness_mean"], f"mean {last['staleness_mean']:.1f}, max {last['staleness_max']}, bound {'inf' if bound < 0 else bound}"),
        ("waiting", waits, f"training waited for data {100 * waits[-1]:.0f} % of the step"),
        ("tokens/answer", steps["answer_tokens_mean"], si(float(last["answer_tokens_mean"]))),
    ]


def rank_rows(view: View) -> list[tuple[str, ...]]:
    """For each rank (of many: each role) what it did during the latest steps: (name, busy, waits, most of its time, running, waiting, memory)."""
    state = {int(row["rank"]): row for row in view.ranks}
    groups: dict[str, list[int]] = {}
    for rank in sorted(view.seconds, key=lambda rank: (int(state[rank]["role"]) if rank in state else 0, rank)):
        role = ROLES[int(state[rank]["role"])] if rank in state else "rank"
        groups.setdefault(f"{rank} {role}" if len(view.seconds) <= MAX_RANK_ROWS else role, []).append(rank)
    rows = []
    for name, ranks in groups.items():
        seconds = np.mean([view.seconds[rank] for rank in ranks], axis=0)
        total = float(seconds.sum())
        known = [state[rank] for rank in ranks if rank in state]
        if total <= 0 or not known:
            continue
        busy = sum(float(seconds[PHASES.index(phase)]) for phase in BUSY[ROLES[int(known[0]["role"])]]) / total
        most = [k for k in np.argsort(seconds)[::-1][:3] if seconds[k] / total >= FEW / 5]
        phases = ", ".join(f"{PHASES[k]} {100 * seconds[k] / total:.0f} %" for k in most)
        count = f" x {len(ranks)}" if len(ranks) > 1 else ""
        numbers = (str(sum(int(row[column]) for row in known)) for column in ("running", "waiting"))
        rows.append((f"{name}{count}", f"{100 * busy:.0f} %", phases, *numbers, f"{si(float(max(row['rss_bytes'] for row in known)))}B"))
    return rows


RANK_HEADER = ("rank", "busy", "most of its time", "running", "waiting", "memory")


def drawn(view: View, blocks: str = SPARKS) -> RenderableType:
    """The view for a terminal."""
    curves = Table.grid(padding=(0, 2))
    for name, values, text in series(view):
        curves.add_row(Text(name), Text(sparkline(values, blocks=blocks), style="cyan"), Text(text))
    ranks = Table(*RANK_HEADER, box=None, pad_edge=False, header_style="dim")
    for row in rank_rows(view):
        ranks.add_row(*map(Text, row))
    style = "bold red" if view.state.startswith(("failed", "gone")) else "bold green" if view.over else "bold"
    parts: list[RenderableType] = [Text(headline(view), style=style), Text(progress_line(view)), Text(bound_line(view), style="yellow"), Text(), curves, Text()]
    parts.append(ranks)
    if view.events:
        parts.append(Text())
        parts += [Text(f"{time_s:9.1f} s  {kind:<12} {text}", style="dim", overflow="ellipsis", no_wrap=True) for time_s, kind, text in view.events]
    return Group(*parts)


def plain(view: View, blocks: str = SPARKS) -> list[str]:
    """The view as lines of text."""
    lines = [headline(view), progress_line(view), bound_line(view)]
    lines += [f"{name:<14} {sparkline(values, blocks=blocks)}  {text}" for name, values, text in series(view)]
    rows = [RANK_HEADER, *rank_rows(view)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(RANK_HEADER))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows] if len(rows) > 1 else []
    return lines + [f"{time_s:9.1f} s  {kind:<12} {text}" for time_s, kind, text in view.events]


# ---- the command


def watch(run_dir: Path, *, once: bool = False, every_s: float = 2.0, stream: TextIO | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show the run until it is over, or once; returns 0. Raises ConfigError when there is nothing to watch.

    On a terminal the view is redrawn; elsewhere the first look is printed as a block, then a line for each new step. Ctrl-C ends watching, not the run.
    """
    stream = stream or sys.stdout
    blocks = spark_blocks(stream)
    terminal = stream.isatty()
    console = Console(file=stream, highlight=False) if terminal else None
    try:
        view = look(run_dir) if once or not run_dir.is_dir() else _wait_for_log(run_dir, every_s, stream, sleep)
        if console is not None and not once:
            with Live(drawn(view, blocks), console=console, auto_refresh=False, vertical_overflow="visible") as live:
                while not view.over:
                    sleep(every_s)
                    view = _again(run_dir, view)
                    live.update(drawn(view, blocks), refresh=True)
        elif console is not None:
            console.print(drawn(view, blocks))
        else:
            _say(stream, plain(view, blocks))
            while not once and not view.over:
                sleep(every_s)
                view = _say_news(view, _again(run_dir, view), stream)
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


def _again(run_dir: Path, before: View) -> View:
    """Another look. A log that cannot be read at this moment (being replaced after a full disk, say) leaves the view as it was."""
    try:
        return look(run_dir)
    except ConfigError:
        return before


def _wait_for_log(run_dir: Path, every_s: float, stream: TextIO, sleep: Callable[[float], None]) -> View:
    said = False
    while True:
        try:
            return look(run_dir)
        except ConfigError as error:
            if list(run_dir.glob("attempt-*/log.h5")):
                raise
            if not (run_dir / "config.yaml").exists() and not list(run_dir.glob("attempt-*")):
                raise ConfigError(f"{error}; start the run first, or give its folder") from None
            failures = sorted(run_dir.glob("attempt-*/failure.json"))
            if failures:
                raise ConfigError(f"{run_dir} has no log: it failed before training began; see {failures[-1]}") from None
        if not said:
            print(f"{run_dir}: waiting for the log", file=stream, flush=True)
            said = True
        sleep(every_s)


def _say_news(before: View, now: View, stream: TextIO) -> View:
    """Lines for what is new: attempts, steps, evaluations, the end."""
    lines = []
    if now.attempt != before.attempt:
        lines.append(headline(now))
    known = {(int(row["step"]), float(row["end_s"])) for row in before.steps}
    total = f"/{now.num_steps}" if now.num_steps else ""
    lines += [f"step {row['step']}{total}  {step_numbers(_mapping(row))}" for row in now.steps if (int(row["step"]), float(row["end_s"])) not in known]
    versions = set(before.evaluations["policy_version"].tolist())
    for row in now.evaluations[~np.isin(now.evaluations["policy_version"], list(versions))]:
        lines.append(f"held-out accuracy {100 * row['accuracy']:.1f} % of {row['num_problems']} problems, version {row['policy_version']}")
    if now.over:
        lines += [headline(now), bound_line(now)]
    if lines:
        _say(stream, lines)
    return now


def _say(stream: TextIO, lines: Sequence[str]) -> None:
    """Texts of events may hold what the stream's encoding does not."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding), file=stream, flush=True)


def _mapping(row: np.void) -> dict[str, Any]:
    return {name: row[name].item() for name in (row.dtype.names or ())}


def main(args: Sequence[str]) -> int:
    """`areal-hpc watch RUN [--once] [--every SECONDS]`. Raises ConfigError for a mistake of the user."""
    usage = "areal-hpc watch RUN [--once] [--every SECONDS]"
    names, once, every_s = [], False, 2.0
    rest = iter(args)
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument == "--once":
            once = True
        elif name == "--every":
            every_s = _seconds(value or next(rest, ""), usage)
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option '{argument}' of areal-hpc watch; there are: --once, --every")
        else:
            names.append(argument)
    if len(names) != 1:
        raise ConfigError(f"areal-hpc watch needs one run folder, got {len(names)}: {usage}")
    return watch(Path(names[0]), once=once, every_s=every_s)


def _seconds(text: str, usage: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise ConfigError(f"--every '{text}' must be a number of seconds from 0.1 to 3600: {usage}")
    return value
