"""From the logs of a run to what one wants to know of it: is it learning, what bounds it, how old is the data.

1. `load` joins the attempts of a run: where a later attempt repeated steps after a restart, its rows count and the earlier ones do not. The version that it began
   with is pushed, and perhaps evaluated, a second time: there too the later rows count.
2. `summary` reduces the tables to a few numbers; `bottleneck` puts in words which role waited for which.
3. `write_report` writes RUN/report/: report.md, four PNG plots (see plots.py), steps.csv, and samples.html if the run saved answers for reading.

Shares of time refer to the training window of an attempt, from the start of its first step to the end of its last; starting up and the
evaluations before and after lie outside it. The plot of all phases covers the whole attempt.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe import samples
from areal_hpc.observe.progress import si
from areal_hpc.observe.schema import OUTCOMES, PHASES, ROLES, STATUSES, TABLES
from areal_hpc.observe.telemetry import Attribute, read_attributes, read_table

BUSY = {"generation": ("decode", "swap", "evaluate"), "training": ("collect", "prox", "train", "pack")}
"""Phases in which a rank of the role works; in the others it waits, starts, saves or stops."""
STEP_OF = {"steps": "step", "trajectories": "batch", "evaluations": "step", "evaluation_sources": "step", "pushes": "version"}
"""Column by which a table's rows belong to training steps."""
FEW = 0.10
"""Share of time below which a wait is not called a bottleneck."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tables of all attempts. `timelines`: one table per attempt, each on its own clock; `windows`: training window of each."""

    attributes: dict[str, Attribute]
    steps: np.ndarray
    trajectories: np.ndarray
    evaluations: np.ndarray
    evaluation_sources: np.ndarray
    pushes: np.ndarray
    events: np.ndarray
    timelines: list[np.ndarray]
    windows: list[tuple[float, float]]


def attempt_logs(run_dir: Path) -> list[Path]:
    """RUN/attempt-K/log.h5 by K. Raises ConfigError when there is none."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run, as runs/RECIPE-TIME")
    numbered = [(path.parent.name.removeprefix("attempt-"), path) for path in run_dir.glob("attempt-*/log.h5")]
    logs = [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdigit())]
    if not logs:
        raise ConfigError(f"{run_dir}: no log of a run (looked for attempt-*/log.h5)")
    return logs


def load(run_dir: Path) -> Run:
    """Read and join the logs. Raises ConfigError when there is none or one cannot be read."""
    attempts, attributes = [], {}
    for path in attempt_logs(run_dir):
        try:
            attempts.append({name: _read(path, name) for name in TABLES})
            attributes = read_attributes(path)
        except (OSError, KeyError) as error:
            raise ConfigError(f"{path}: not a readable log ({' '.join(str(error).split())})") from error
    joined = {name: _join(attempts, name, column) for name, column in STEP_OF.items()}
    windows = [_window(attempt["steps"]) for attempt in attempts]
    events = np.concatenate([attempt["events"] for attempt in attempts])
    return Run(attributes, **joined, events=events, timelines=[attempt["timeline"] for attempt in attempts], windows=windows)


ADDED_TABLES = ("evaluation_sources",)
"""Tables that logs of earlier versions do not have."""


def _read(path: Path, name: str) -> np.ndarray:
    """The table as this version knows it: what an earlier version did not write is not a number, 0 or empty. Raises OSError, KeyError."""
    dtype = TABLES[name].dtype
    try:
        rows = read_table(path, name)
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


def _join(attempts: list[dict[str, np.ndarray]], table: str, column: str) -> np.ndarray:
    parts: list[np.ndarray] = []
    first_step_later = math.inf
    for attempt in reversed(attempts):
        rows = attempt[table]
        rows = rows[rows[column] < first_step_later]
        if column != "batch":  # one row a version: the one that a later attempt began with is in both
            rows = rows[~np.isin(rows[column], [row for part in parts for row in part[column]])]
        parts.append(rows)
        if len(attempt["steps"]):
            first_step_later = min(first_step_later, int(attempt["steps"]["step"].min()))
    return np.concatenate(parts[::-1])


def _window(steps: np.ndarray) -> tuple[float, float]:
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


def bottleneck(run: Run) -> str:
    """One or two sentences: which role waited for which, how much, and what would change it."""
    waited, gated = share(run, "training", ("wait_data",)), share(run, "generation", ("gated",))
    full, pushed = share(run, "generation", ("ring_full",)), share(run, "training", ("pack", "push_wait"))
    if waited is None or gated is None or full is None or pushed is None:
        return "no training step finished, so nothing can be said about a bottleneck."
    facts = f"training ranks waited for data {_percent(waited)} of the time, generation ranks stood at the gate {_percent(gated)}"
    facts += f" and before a full ring {_percent(full)}" if full >= 0.005 else ""
    eta = int(run.steps["staleness_bound"][-1])
    if eta == 0:
        text = f"synchronous (max_staleness = 0), so the roles take turns: {facts}. A larger max_staleness lets them overlap."
    elif max(waited, gated + full) < FEW:
        text = f"balanced: {facts}."
    elif waited >= gated + full:
        more = " A larger max_staleness would open the gate earlier." if gated >= FEW else " A larger share of generation ranks would help."
        text = f"generation bound: {facts}.{more}"
    else:
        text = f"training bound: {facts}. A larger share of training ranks would help."
    if pushed >= 2 * FEW:
        text += f" Weight pushes took {_percent(pushed)} of the training ranks' time."
    cores, num_ranks = run.attributes.get("cores"), len(roles(run))
    if isinstance(cores, int) and 0 < cores < num_ranks:
        text += f" All {num_ranks} ranks were seen from a node with {cores} usable cores: where ranks share a core, the work of one role slows the other."
    return text


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def summary(run_dir: Path) -> dict[str, Any]:
    """Numbers of a run; None where the log has none. Raises ConfigError when there is no log."""
    return _summary(load(run_dir))


def _summary(run: Run) -> dict[str, Any]:
    steps, evaluations, of_role = run.steps, run.evaluations, list(roles(run).values())
    result: dict[str, Any] = {"attempts": len(run.timelines), "steps": len(steps), "wall_s": wall_time(run), "training_s": sum(b - a for a, b in run.windows)}
    ordered = evaluations[np.argsort(evaluations["policy_version"], kind="stable")]
    for when, rows in (("before", ordered[:1]), ("after", ordered[1:][-1:])):
        result[f"accuracy_{when}"] = float(rows["accuracy"][0]) if len(rows) else None
        result[f"accuracy_{when}_ci95"] = float(rows["ci95"][0]) if len(rows) else None
    result["k"] = int(ordered["k"][-1]) if len(ordered) else None
    for name in ("pass_k", "majority_k"):
        result[name] = float(ordered[name][-1]) if len(ordered) and ordered["k"][-1] > 1 else None
    result["num_problems"] = int(ordered["num_problems"][-1]) if len(ordered) else None
    some, weights = len(steps) > 0, steps["trajectories"]
    result["tokens"] = int(steps["tokens"].sum())
    result["tokens_per_s_median"] = float(np.median(steps["tokens_per_s"])) if some else None
    result["staleness_mean"] = float(np.average(steps["staleness_mean"], weights=weights)) if some and weights.sum() else None
    result["staleness_max"] = int(steps["staleness_max"].max()) if some else None
    result["staleness_bound"] = int(steps["staleness_bound"][-1]) if some else None
    for role in ROLES:
        result[f"{role}_ranks"] = of_role.count(role)
        result[f"{role}_busy"] = share(run, role, BUSY[role])
    for name in ("failed", "dropped", "masked"):
        result[name] = int(steps[name].sum())
    return {**result, "bottleneck": bottleneck(run)}


def format_summary(summary: dict[str, Any]) -> str:
    """A few aligned lines."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    def number(value: float | None) -> str:
        return "-" if value is None else si(value)

    after_ci95 = summary["accuracy_after_ci95"]
    interval = "" if after_ci95 is None else f" (+- {100 * after_ci95:.1f})"
    bound = "inf" if summary["staleness_bound"] == -1 else number(summary["staleness_bound"])
    several = "" if summary["pass_k"] is None else f"; {summary['k']} answers each, pass@{summary['k']} {percent(summary['pass_k'])}"
    attempts = f" in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
    lost = ", ".join(f"{summary[name]} {name}" for name in ("failed", "dropped", "masked"))
    before_after = f"{percent(summary['accuracy_before'])} -> {percent(summary['accuracy_after'])}{interval}"
    lines = {
        "accuracy": f"{before_after} of {summary['num_problems'] or 0} held-out problems{several}",
        "throughput": f"{number(summary['tokens_per_s_median'])} tokens/s (median step), {number(summary['tokens'])} tokens trained",
        "staleness": f"mean {number(summary['staleness_mean'])}, max {number(summary['staleness_max'])}, bound {bound} versions",
        "busy": f"generation {percent(summary['generation_busy'])}, training {percent(summary['training_busy'])} "
        f"({summary['generation_ranks']} + {summary['training_ranks']} ranks)",
        "time": f"{summary['steps']} steps in {summary['training_s']:.1f} s; {summary['wall_s']:.1f} s with start and evaluations{attempts}",
        "lost": f"{lost} trajectories",
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def write_report(run_dir: Path) -> Path:
    """Write RUN/report/ and return RUN/report/report.md. Raises ConfigError when there is no log."""
    from areal_hpc.observe import plots  # matplotlib takes half a second to import; the other commands do without

    run = load(run_dir)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TABLES["steps"].column_names)
        writer.writerows(run.steps.tolist())
    pictures = []
    if len(run.steps):
        pictures.append(plots.learning(run.steps, run.evaluations, folder / "learning.png"))
        pictures.append(plots.staleness(run.steps, run.trajectories, folder / "staleness.png"))
        pictures.append(plots.throughput(run.steps, folder / "throughput.png"))
    if wall_time(run) > 0:
        pictures.append(plots.time_of_ranks(rank_seconds(run, whole=True), roles(run), wall_time(run), folder / "time.png"))
    try:
        num_samples = samples.write_page(run_dir, folder / "samples.html", f"Answers of run {run_dir.resolve().name}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    report = folder / "report.md"
    report.write_text(markdown(run_dir.resolve().name, run, pictures, num_samples))
    return report


def markdown(name: str, run: Run, pictures: list[Path], num_samples: int = 0) -> str:
    """The text of report.md for the run `name`."""
    numbers = _summary(run)
    lines = [f"# Run {name}", "", f"The run was {numbers['bottleneck']}" if numbers["steps"] else f"In this run {numbers['bottleneck']}", ""]
    lines += ["```", format_summary(numbers), "```", ""]
    if numbers["steps"] and 0 <= numbers["staleness_bound"] < numbers["staleness_max"]:
        excess = f"Some trajectories were older than eta = {numbers['staleness_bound']}"
        lines += [f"{excess}: staleness mode `count` bounds how many are under way, not the age of each.", ""]
    lines += [f"![{path.stem}]({path.name})\n" for path in pictures]
    lines += [f"[{num_samples} answers to read](samples.html), with prompts, verdicts and rewards.", ""] if num_samples else []
    lines += _evaluation_table(run) + _source_table(run) + _time_table(run) + _outcome_table(run) + _event_list(run)
    shown = ("cpu_model", "cores", "package_version", "schema_version", "fingerprint")
    hardware = ", ".join(f"{key} {run.attributes[key]}" for key in shown if key in run.attributes)
    lines += ["## Where it ran", "", hardware, "", "## Configuration", "", "```yaml", str(run.attributes.get("config", "")).strip(), "```", ""]
    lines += ["Every column of [steps.csv](steps.csv) is defined in docs/file_format.md.", ""]
    return "\n".join(lines)


def _table(title: str, header: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    return [f"## {title}", "", f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _evaluation_table(run: Run) -> list[str]:
    evaluations = run.evaluations
    many = ["pass@k", "majority@k"] if (evaluations["k"] > 1).any() else []
    header = ["version", "held-out accuracy (95 % interval)", *many, "problems", "answers to each", "tokens per answer", "seconds"]
    rows = [[str(row["policy_version"]), *_result_cells(row, bool(many)), f"{row['seconds']:.1f}"] for row in evaluations]
    return _table("Evaluations", header, rows)


def _source_table(run: Run) -> list[str]:
    """By source, of the last evaluation that has several."""
    sources = run.evaluation_sources
    versions, counts = np.unique(sources["policy_version"], return_counts=True)
    if not (counts > 1).any():
        return []
    version = versions[counts > 1].max()
    last = sources[sources["policy_version"] == version]
    many = ["pass@k", "majority@k"] if (last["k"] > 1).any() else []
    header = ["source", "held-out accuracy (95 % interval)", *many, "problems", "answers to each", "tokens per answer"]
    rows = [[row["source"].decode().replace("|", "\\|"), *_result_cells(row, bool(many))] for row in last]
    return _table(f"Evaluation of version {version} by source", header, rows)


def _result_cells(row: np.void, many: bool) -> list[str]:
    known, accuracy = row["k"] > 0, 100 * row["accuracy"]
    between = f"{100 * row['ci_low']:.1f} to {100 * row['ci_high']:.1f}" if known else f"+- {100 * row['ci95']:.1f}"
    numbers = [f"{100 * row[name]:.1f} %" if math.isfinite(row[name]) else "-" for name in ("pass_k", "majority_k")] if many else []
    return [f"{accuracy:.1f} % ({between})", *numbers, str(row["num_problems"]), str(row["k"]) if known else "1", f"{row['answer_tokens_mean']:.1f}"]


def _time_table(run: Run) -> list[str]:
    wall_s, seconds, of_rank = wall_time(run), rank_seconds(run, whole=True), roles(run)
    used = [k for k in range(len(PHASES)) if any(seconds[rank][k] > 0 for rank in seconds)]
    rows = [[str(rank), of_rank[rank], *(f"{100 * s[k] / wall_s:.1f}" for k in used), f"{100 * s.sum() / wall_s:.1f}"] for rank, s in sorted(seconds.items())]
    return _table(f"Where the time went, in % of {wall_s:.1f} s", ["rank", "role", *(PHASES[k] for k in used), "sum"], rows)


def _outcome_table(run: Run) -> list[str]:
    counts = Counter(zip(run.trajectories["status"].tolist(), run.trajectories["outcome"].tolist(), strict=True))
    rows = [[STATUSES[status], OUTCOMES[outcome], str(count)] for (status, outcome), count in sorted(counts.items())]
    return _table("Trajectories", ["verdict", "closed as", "number"], rows)


def _event_list(run: Run, most: int = 30) -> list[str]:
    rows = [[f"{e['time_s']:.1f}", str(e["rank"]), e["kind"].decode(), e["text"].decode().replace("|", "\\|").replace("\n", " ")] for e in run.events]
    title = "Events" if len(rows) <= most else f"Events, the last {most} of {len(rows)}"
    return _table(title, ["s", "rank", "kind", "text"], rows[-most:])
