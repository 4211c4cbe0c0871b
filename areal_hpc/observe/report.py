"""From the logs of a run to what one wants to know of it: is it learning, what bounds it, how old is the data.

1. `summary` reduces the joined tables (runs.py) to a few numbers; words.py puts in words which role waited for which.
2. `write_report` writes RUN/report/: report.md, PNG plots (plots.py), steps.csv, and samples.html if the run saved answers for reading.

The plot of all phases covers whole attempts; shares of time, their training windows.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe import samples
from areal_hpc.observe.progress import si
from areal_hpc.observe.runs import BUSY, Run, load, rank_seconds, roles, share, wall_time
from areal_hpc.observe.schema import OUTCOMES, PHASES, ROLES, STATUSES, TABLES
from areal_hpc.observe.words import Shares, bottleneck


def summary(run_dir: Path) -> dict[str, Any]:
    """Numbers of a run; None where the log has none. Raises ConfigError when there is no log."""
    return summary_of(load(run_dir))


def summary_of(run: Run) -> dict[str, Any]:
    """The same of a run that is loaded already."""
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
    cores = run.attributes.get("cores")
    eta = int(steps["staleness_bound"][-1]) if some else 0
    return {**result, "bottleneck": bottleneck(Shares.of(run), eta, cores if isinstance(cores, int) else None)}


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
    numbers = summary_of(run)
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
