"""From the logs of a run to what one wants to know of it: is it learning, what bounds it, how old is the data.

1. `summary` reduces the joined tables (runs.py) to a few numbers; words.py puts in words which role waited for which.
2. `tables` makes what one wants to look up: evaluations, time of each rank, outcomes, failures, ring, hardware, events.
3. `write_report` writes RUN/report/: report.html (one page that needs nothing else), report.md with the same content and PNG plots (plots.py), steps.csv, and
   samples.html if the run saved answers for reading. `write_comparison` does so for several runs: groups over seeds with intervals, options that differ (compare.py).

The plot and the table of all phases cover whole attempts; shares of time, their training windows.
"""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe import samples
from areal_hpc.observe.compare import Group, differences, group_by_seed, interval
from areal_hpc.observe.progress import si
from areal_hpc.observe.runs import Run, ending, load, rank_seconds, roles, share, wall_time
from areal_hpc.observe.schema import BUSY, OUTCOMES, PHASES, ROLES, STATUSES, TABLES
from areal_hpc.observe.words import Shares, bottleneck

if TYPE_CHECKING:
    from areal_hpc.observe.plots import Chart

MOST_EVENTS = 30


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


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the report."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> list[str]:
        """As lines; a cell's bars and line ends are made harmless."""
        rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in self.rows]
        lines = [self.header, ["---"] * len(self.header), *rows]
        return [f"## {self.title}", "", *(f"| {' | '.join(cells)} |" for cells in lines), ""]


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write RUN/report/, or the folder `out`, and return its report.md. Raises ConfigError when there is no log."""
    run = load(run_dir)
    folder = _folder(out or run_dir / "report")
    _write_steps(folder / "steps.csv", [run])
    try:
        num_samples = samples.write_page(run_dir, folder / "samples.html", f"Answers of run {run.name}")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shown = _draw([Group("this run", (run,))], folder)
    from areal_hpc.observe import page  # jinja2 and matplotlib take half a second to import; the other commands do without

    found = [table for table in tables(run) if table.rows]
    config = str(run.attributes.get("config", "")).strip()
    page.write(folder / "report.html", f"Run {run.name}", paragraphs(run), format_summary(summary_of(run)), shown, found, config, num_samples)
    for chart in shown:
        chart.close()
    report = folder / "report.md"
    report.write_text(markdown(run, [f"{chart.name}.png" for chart in shown], num_samples))
    return report


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the comparison of several runs into the folder `out` and return its report.md. Raises ConfigError when a run has no log."""
    runs = [load(run_dir) for run_dir in run_dirs]
    groups = group_by_seed(runs)
    folder = _folder(out)
    _write_steps(folder / "steps.csv", runs)
    shown = _draw(groups, folder)
    from areal_hpc.observe import page

    title, found, said = f"{len(runs)} runs", [table for table in comparison_tables(groups) if table.rows], comparison_paragraphs(groups)
    page.write(folder / "report.html", title, said, "", shown, found, "", 0)
    for chart in shown:
        chart.close()
    lines = [f"# {title}", "", *(line for text in said for line in (text, ""))]
    lines += [f"![{chart.name}]({chart.name}.png)\n" for chart in shown] + [line for table in found for line in table.markdown()]
    report = folder / "report.md"
    report.write_text("\n".join(lines))
    return report


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; choose a folder that can be made") from error
    return path


def _draw(groups: Sequence[Group], folder: Path) -> list[Chart]:
    """The plots, each also a PNG; pictures of an earlier report that this one does not have are removed. To be closed."""
    from areal_hpc.observe import plots

    shown = list(plots.charts(groups))
    for name in plots.NAMES:
        (folder / f"{name}.png").unlink(missing_ok=True)
    for chart in shown:
        chart.png(folder / f"{chart.name}.png")
    return shown


def _write_steps(path: Path, runs: Sequence[Run]) -> None:
    """/steps as CSV; of several runs with a column that names the run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        first = ["run"] if len(runs) > 1 else []
        writer.writerow([*first, *TABLES["steps"].column_names])
        for run in runs:
            writer.writerows([*([run.name] if first else []), *row] for row in run.steps.tolist())


def paragraphs(run: Run) -> list[str]:
    """What the report begins with, in words."""
    numbers = summary_of(run)
    said = [f"The run was {numbers['bottleneck']}" if numbers["steps"] else f"In this run {numbers['bottleneck']}"]
    if numbers["steps"] and 0 <= numbers["staleness_bound"] < numbers["staleness_max"]:
        excess = f"Some trajectories were older than eta = {numbers['staleness_bound']}"
        said.append(f"{excess}: staleness mode `count` bounds how many are under way, not the age of each.")
    return said


def markdown(run: Run, pictures: Sequence[str], num_samples: int = 0) -> str:
    """The text of report.md. `pictures`: names of PNG files beside it."""
    lines = [f"# Run {run.name}", "", *(line for text in paragraphs(run) for line in (text, ""))]
    lines += ["```", format_summary(summary_of(run)), "```", ""]
    lines += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    lines += [f"[{num_samples} answers to read](samples.html), with prompts, verdicts and rewards.", ""] if num_samples else []
    lines += [line for table in tables(run) if table.rows for line in table.markdown()]
    lines += ["## Configuration", "", "```yaml", str(run.attributes.get("config", "")).strip(), "```", ""]
    lines += ["Every column of [steps.csv](steps.csv) is defined in docs/file_format.md.", ""]
    return "\n".join(lines)


# ---- tables of one run


def tables(run: Run) -> list[Table]:
    """All of them; those without rows are not worth showing."""
    makers = (_evaluations, _sources, _time, _outcomes, _attempts, _ring, _graders, _hardware, _events)
    return [make(run) for make in makers]


def _evaluations(run: Run) -> Table:
    rows = run.evaluations
    many = ["pass@k", "majority@k"] if (rows["k"] > 1).any() else []
    header = ["version", "held-out accuracy (95 % interval)", *many, "problems", "answers to each", "tokens per answer", "seconds"]
    return Table("Evaluations", header, [[str(row["policy_version"]), *_result_cells(row, bool(many)), f"{row['seconds']:.1f}"] for row in rows])


def _sources(run: Run) -> Table:
    """By source, of the last evaluation that has several."""
    sources = run.evaluation_sources
    versions, counts = np.unique(sources["policy_version"], return_counts=True)
    version = versions[counts > 1].max() if (counts > 1).any() else -1
    last = sources[sources["policy_version"] == version]
    many = ["pass@k", "majority@k"] if (last["k"] > 1).any() else []
    header = ["source", "held-out accuracy (95 % interval)", *many, "problems", "answers to each", "tokens per answer"]
    return Table(f"Evaluation of version {version} by source", header, [[row["source"].decode(), *_result_cells(row, bool(many))] for row in last])


def _result_cells(row: np.void, many: bool) -> list[str]:
    known, accuracy = row["k"] > 0, 100 * row["accuracy"]
    between = f"{100 * row['ci_low']:.1f} to {100 * row['ci_high']:.1f}" if known else f"+- {100 * row['ci95']:.1f}"
    numbers = [f"{100 * row[name]:.1f} %" if math.isfinite(row[name]) else "-" for name in ("pass_k", "majority_k")] if many else []
    return [f"{accuracy:.1f} % ({between})", *numbers, str(row["num_problems"]), str(row["k"]) if known else "1", f"{row['answer_tokens_mean']:.1f}"]


def _time(run: Run) -> Table:
    wall_s, seconds, of_rank = wall_time(run), rank_seconds(run, whole=True), roles(run)
    used = [k for k in range(len(PHASES)) if any(seconds[rank][k] > 0 for rank in seconds)]
    rows = [[str(rank), of_rank[rank], *(f"{100 * s[k] / wall_s:.1f}" for k in used), f"{100 * s.sum() / wall_s:.1f}"] for rank, s in sorted(seconds.items())]
    return Table(f"Where the time went, in % of {wall_s:.1f} s", ["rank", "role", *(PHASES[k] for k in used), "sum"], rows)


def _outcomes(run: Run) -> Table:
    counts = Counter(zip(run.trajectories["status"].tolist(), run.trajectories["outcome"].tolist(), strict=True))
    rewards = {pair: run.trajectories["reward"][(run.trajectories["status"] == pair[0]) & (run.trajectories["outcome"] == pair[1])] for pair in counts}
    rows = [[STATUSES[pair[0]], OUTCOMES[pair[1]], str(count), _mean(rewards[pair])] for pair, count in sorted(counts.items())]
    return Table("Trajectories and rewards by status", ["verdict", "closed as", "number", "mean reward"], rows)


def _mean(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f"{known.mean():.3g}" if len(known) else "-"


def _attempts(run: Run) -> Table:
    """Shown where something happened: several attempts, or one that did not end well."""
    folders = [run.folder / f"attempt-{start['attempt']}" for start in run.starts if "attempt" in start]
    endings = [ending(folder) or "no word of its end: it goes on, or was killed as a whole" for folder in folders]
    if len(folders) != len(run.starts) or endings == ["done"]:
        return Table("Attempts and failures", [], [])
    rows = []
    for start, (begin_s, end_s), end in zip(run.starts, run.windows, endings, strict=True):
        resumed = int(start.get("resumed_from_step", -1))
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(start["start_unix"])))
        rows.append([str(start["attempt"]), f"{began} UTC", "anew" if resumed < 0 else f"step {resumed}", f"{end_s - begin_s:.1f}", end])
    return Table("Attempts and failures", ["attempt", "began", "from", "seconds of training", "how it ended"], rows)


def _ring(run: Run) -> Table:
    """State of each lane at the end of the last attempt."""
    rows = run.sampled["ring"][-1]
    last = [rows[rows["lane"] == lane][-1] for lane in np.unique(rows["lane"])]
    header = ["lane", "records", "bytes", "most in use", "damaged", "full waits", "s before a full lane", "credit waits"]
    sizes, counts = ("bytes", "high_water_bytes"), ("checksum_errors", "full_waits")
    cells = [
        [
            *(str(row[name]) for name in ("lane", "records")),
            *(si(float(row[name])) for name in sizes),
            *(str(row[name]) for name in counts),
            f"{row['full_wait_s']:.2f}",
            str(row["credit_waits"]),
        ]
        for row in last
    ]
    return Table("Ring, last attempt", header, cells)


def _graders(run: Run) -> Table:
    """What went wrong in the reward services; nothing is shown where nothing did."""
    rows = run.sampled["graders"][-1]
    last = [rows[rows["rank"] == rank][-1] for rank in np.unique(rows["rank"])]
    names = ("timeout", "infra_error", "hostile", "gold_bad", "killed", "died", "backpressure")
    cells = [[str(row["rank"]), *(str(row[name]) for name in names)] for row in last if any(row[name] for name in names)]
    return Table("Graders with troubles, last attempt", ["rank", *names], cells)


HARDWARE = ("cpu_model", "cores", "hosts", "gpu", "num_generation_ranks", "num_training_ranks", "package_version", "schema_version", "fingerprint")
"""Attributes of a log that say where, and with what, a run was made."""


def _hardware(run: Run) -> Table:
    peak = int(run.steps["peak_memory_bytes"].max()) if len(run.steps) else 0
    rows = [[name.replace("_", " "), str(run.attributes[name])] for name in HARDWARE if run.attributes.get(name, "") != ""]
    return Table("Where it ran", ["", ""], rows + ([["peak memory of a training process", f"{si(float(peak))}B"]] if peak else []))


def _events(run: Run) -> Table:
    several = len(run.starts) > 1
    rows = [
        [
            f"{number + 1}: " * several + f"{event['time_s'] - float(start.get('start_s', 0.0)):.1f}",
            str(event["rank"]),
            event["kind"].decode(),
            event["text"].decode(),
        ]
        for number, start in enumerate(run.starts)
        for event in run.sampled["events"][number]
    ]
    title = "Events" if len(rows) <= MOST_EVENTS else f"Events, the last {MOST_EVENTS} of {len(rows)}"
    return Table(title, ["s of the attempt", "rank", "kind", "text"], rows[-MOST_EVENTS:])


# ---- several runs


def comparison_paragraphs(groups: Sequence[Group]) -> list[str]:
    """Which group learnt most, which was fastest, and what bounds each; a difference within the intervals is called that."""
    said = []
    accuracies = {group.label: interval([value for run in group.runs if (value := summary_of(run)["accuracy_after"]) is not None]) for group in groups}
    known = {label: found for label, found in accuracies.items() if math.isfinite(found[0])}
    if known:
        ordered = sorted(known.items(), key=lambda item: -item[1][0])
        (best, (top, half)), others = ordered[0], ordered[1:]
        text = f"Highest held-out accuracy at the end: {best}, {100 * top:.1f} %" + (f" (+- {100 * half:.1f})" if math.isfinite(half) else "")
        close = [label for label, (mean, spread) in others if top - mean <= np.nansum([half, spread])]
        single = any(not math.isfinite(spread) for _, spread in known.values())
        if others and single:
            text += "; with one seed of a setting, nothing says whether the differences are more than chance"
        elif close:
            text += f"; not told apart from {', '.join(close)}: their intervals over the seeds overlap"
        said.append(text + ".")
    rates = {group.label: float(np.mean([np.median(run.steps["tokens_per_s"]) for run in group.runs if len(run.steps)] or [math.nan])) for group in groups}
    rates = {label: rate for label, rate in rates.items() if math.isfinite(rate)}
    if len(rates) > 1:
        fastest, slowest = max(rates, key=lambda label: rates[label]), min(rates, key=lambda label: rates[label])
        said.append(f"Highest throughput: {fastest}, {si(rates[fastest])} tokens/s, {rates[fastest] / rates[slowest]:.2f} x that of {slowest}.")
    said += [f"{group.label} was {summary_of(group.runs[0])['bottleneck']}" for group in groups if len(group.runs[0].steps)]
    return said


def comparison_tables(groups: Sequence[Group]) -> list[Table]:
    """Groups with intervals over seeds, runs one by one, options that differ."""
    columns = {
        "held-out accuracy [%]": lambda numbers: 100 * numbers["accuracy_after"] if numbers["accuracy_after"] is not None else math.nan,
        "tokens/s": lambda numbers: numbers["tokens_per_s_median"] or math.nan,
        "mean age": lambda numbers: numbers["staleness_mean"] if numbers["staleness_mean"] is not None else math.nan,
        "generation busy [%]": lambda numbers: 100 * numbers["generation_busy"] if numbers["generation_busy"] is not None else math.nan,
        "training busy [%]": lambda numbers: 100 * numbers["training_busy"] if numbers["training_busy"] is not None else math.nan,
        "training time [s]": lambda numbers: numbers["training_s"],
    }
    numbers_of = {id(run): summary_of(run) for group in groups for run in group.runs}
    of_groups, of_runs = [], []
    for group in groups:
        found = [interval([value(numbers_of[id(run)]) for run in group.runs]) for value in columns.values()]
        cells = [si(mean) + (f" +- {si(half)}" if math.isfinite(half) else "") for mean, half in found]
        of_groups.append([group.label, str(len(group.runs)), *cells])
        for run in group.runs:
            of_runs.append([run.name, str(len(run.steps)), *(si(value(numbers_of[id(run)])) for value in columns.values())])
    runs = [run for group in groups for run in group.runs]
    differing = [[name, *values] for name, values in differences(runs).items()]
    return [
        Table("Settings, mean and 95 % interval over seeds", ["setting", "runs", *columns], of_groups),
        Table("Runs", ["run", "steps", *columns], of_runs),
        Table("Options that differ", ["option", *(run.name for run in runs)], differing),
    ]
