"""The plots of the report and of the planner, drawn with matplotlib's Agg (no display).

`charts` draws one figure after the other for one run or for several groups of runs (`compare.Group`), small enough to be read on a phone; a figure without data is not
drawn. Raw values are visible, averages are drawn over them, over several seeds a mean with its 95 % interval. Axes of shares and counts start at zero.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal_hpc.observe.compare import Group, band
from areal_hpc.observe.progress import si
from areal_hpc.observe.runs import Run, rank_seconds, roles, wall_time
from areal_hpc.observe.schema import OUTCOMES, PHASES, ROLES, STATUSES

STYLE: Any = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "0.9",
    "font.size": 10,
    "legend.fontsize": 8.5,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "svg.fonttype": "path",  # the same on every machine, whatever fonts it has
    "svg.hashsalt": "areal-hpc",
}
BLUE, GREEN, ORANGE, PURPLE, GREY = "#2a6fbb", "#2e8540", "#e07b39", "#8856a7", "#8c8c8c"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#b03060", "#4d9a9a", "#7a5c4d", GREY)
PHASE_COLORS = {  # blue: generation works; green: training works; orange: waits; purple: weights; grey: neither
    "decode": BLUE,
    "evaluate": "#8fbbe8",
    "collect": "#c7e5b4",
    "prox": "#78c07a",
    "train": GREEN,
    "swap": "#c9a6dd",
    "pack": "#a87cc7",
    "push_wait": PURPLE,
    "gated": "#f6b26b",
    "wait_data": ORANGE,
    "ring_full": "#b45309",
    "idle": "#fde0c0",
    "save": "#7a5c4d",
    "log": "#b39a8d",
    "start": "#d4d4d4",
    "stop": "#a8a8a8",
}
STATUS_COLORS = dict(zip(STATUSES, (GREEN, ORANGE, "#f6c99b", "#b39a8d", PURPLE, "#b03060", "black", GREY), strict=True))
WIDTH, HEIGHT = 5.4, 3.3
"""Inches of a plot: at the width of a phone its text is still larger than 7 pt."""
MOST_VALUES = 1500
"""Values that a curve draws; of more, groups of neighbours are taken together."""
MOST_LANES = 8
"""Lanes of the ring that are drawn: those that were fullest."""
MOST_POINTS = 400
"""Groups of steps that a stacked plot draws: more cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot. `name`: of its file; `about`: what it shows, one sentence; `figure`: to be closed by `png` or `svg`'s caller with `close`."""

    name: str
    title: str
    about: str
    figure: Figure

    def png(self, path: Path) -> Path:
        """Write it; returns `path`."""
        self.figure.savefig(path, dpi=130)
        return path

    def svg_uri(self) -> str:
        """As the address of an image that holds itself: data:image/svg+xml;base64,..."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

    def close(self) -> None:
        """Free its memory."""
        plt.close(self.figure)


def charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """The plots of one run, or of several groups side by side; the caller closes each. Those that need one run's own time are left out for several."""
    several = len(groups) > 1 or len(groups[0].runs) > 1
    for name, title, about, draw in COMPARED if several else (*COMPARED, *SINGLE):
        figure, axis = new_figure()
        if draw(axis, groups):
            yield Chart(name, title, about, _laid_out(figure))
        else:
            plt.close(figure)
        if name != "throughput":
            continue
        for name_of, title_of, about_of, whole in TIMES:
            if (stacked := time_of_ranks(groups, whole=whole)) is not None:
                yield Chart(name_of, title_of, about_of, _laid_out(stacked))


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """One empty axis in our style."""
    matplotlib.rcParams.update(STYLE)
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, axis


def _laid_out(figure: Figure) -> Figure:
    """Placed once: a layout engine would do so again for each file, which takes as long as drawing."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of up to `window` values up to and including each one; those that are not a number are left out."""
    known = np.isfinite(values)
    sums, counts = np.cumsum(np.where(known, values, 0.0)), np.cumsum(known)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return means


def _reduced(x: np.ndarray, y: np.ndarray, how: Callable[[np.ndarray], Any]) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_VALUES points: `how` (a mean, a maximum) of groups of neighbours. A page must stay small however long the run."""
    if len(x) <= MOST_VALUES:
        return x, y
    parts = np.array_split(np.arange(len(x)), MOST_VALUES)
    return np.array([x[part[0]] for part in parts]), np.array([how(y[part]) for part in parts])


def _raw(axis: Axes, x: np.ndarray, y: np.ndarray, color: str) -> None:
    """Every value, thin; of very many the range from the smallest to the largest of each group."""
    if len(x) <= MOST_VALUES:
        axis.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
    else:
        (at, low), (_, high) = _reduced(x, y, np.min), _reduced(x, y, np.max)
        axis.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)


def _integers(axis: Axes) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(axis: Axes, groups: Sequence[Group], loc: Any = "best") -> None:
    """Where there is more than one thing to tell apart."""
    if len(axis.get_legend_handles_labels()[0]) > (1 if len(groups) == 1 else 0):
        axis.legend(loc=loc)


def _curves(axis: Axes, groups: Sequence[Group], values_of: Callable[[Run], tuple[np.ndarray, np.ndarray]], *, window_share: int = 20) -> bool:
    """For each group: one run's raw values thin under their running mean, or the mean over seeds with its interval. False when there is nothing."""
    drawn = False
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        known = [(x, y) for x, y in map(values_of, group.runs) if len(x) and np.isfinite(y).any()]
        if not known:
            continue
        drawn = True
        window = max(1, min(len(x) for x, _ in known) // window_share)
        smoothed = [(x, smooth(np.asarray(y, float), window)) for x, y in known]
        if len(known) > 1:
            over = band(smoothed)  # before anything is taken together: the seeds' steps must be the same
            (at, mean), (_, low), (_, high) = (_reduced(over.x, values, np.mean) for values in (over.mean, over.low, over.high))
            axis.plot(at, mean, color=color, linewidth=1.8, label=group.label)
            axis.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
        elif window > 1:
            _raw(axis, *known[0], color)
            axis.plot(
                *_reduced(*smoothed[0], np.mean),
                color=color,
                linewidth=1.8,
                label=f"{group.label}, mean of {window} steps" if len(groups) == 1 else group.label,
            )
        else:
            axis.plot(*known[0], color=color, linewidth=1.5, marker="o", markersize=3, label=group.label)
    if drawn:
        _integers(axis)
        axis.set_xlabel("training step")
        _legend(axis, groups)
    return drawn


def _column(name: str, factor: float = 1.0) -> Callable[[Run], tuple[np.ndarray, np.ndarray]]:
    return lambda run: (run.steps["step"], factor * run.steps[name])


def _reward(axis: Axes, groups: Sequence[Group]) -> bool:
    axis.set_ylabel("mean reward of the batch")
    return _curves(axis, groups, _column("reward_mean"))


def _batch_accuracy(axis: Axes, groups: Sequence[Group]) -> bool:
    axis.set(ylabel="right answers of the batch [%]", ylim=(0, 102))
    return _curves(axis, groups, _column("accuracy", 100))


def _held_out(axis: Axes, groups: Sequence[Group]) -> bool:
    drawn = False
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        curves = []
        for run in group.runs:
            rows = run.evaluations[np.argsort(run.evaluations["policy_version"], kind="stable")]
            if len(rows):
                curves.append((rows["policy_version"], 100 * rows["accuracy"], rows))
        if not curves:
            continue
        drawn = True
        if len(curves) == 1:
            x, y, rows = curves[0]
            known = rows["k"] > 0  # logs of earlier versions have no ends
            ends = [np.where(known, side, rows["ci95"]) for side in (rows["accuracy"] - rows["ci_low"], rows["ci_high"] - rows["accuracy"])]
            label = f"{group.label}, {rows['num_problems'].max()} problems" if len(groups) == 1 else group.label
            axis.errorbar(x, y, yerr=100 * np.maximum(ends, 0), color=color, marker="s", markersize=4, linewidth=1.3, capsize=3, label=label)
        else:
            over = band([(x, y) for x, y, _ in curves])
            half = np.nan_to_num(over.high - over.mean)
            axis.errorbar(over.x, over.mean, yerr=half, color=color, marker="s", markersize=4, linewidth=1.3, capsize=3, label=group.label)
    axis.set(ylabel="held-out answers right [%]", xlabel="policy version", ylim=(0, 102))
    _integers(axis)
    axis.legend(loc="lower right") if drawn else None
    return drawn


def _throughput(axis: Axes, groups: Sequence[Group]) -> bool:
    drawn = _curves(axis, groups, _column("tokens_per_s"))
    axis.set_ylabel("tokens / s")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: si(value))
    return drawn


def _ages(run: Run) -> np.ndarray:
    taken = np.isin(run.trajectories["outcome"], [OUTCOMES.index("trained"), OUTCOMES.index("masked")])
    return run.trajectories["age"][taken]


def _age_histogram(axis: Axes, groups: Sequence[Group]) -> bool:
    found = [(number, group, ages) for number, group in enumerate(groups) if len(ages := np.concatenate([_ages(run) for run in group.runs]))]
    if not found:
        return False
    last, top, width = 0, 0.0, 0.8 / len(found)
    for place, (number, group, ages) in enumerate(found):
        values, counts = np.unique(ages, return_counts=True)
        percent = 100 * counts / len(ages)
        color = COLORS[number % len(COLORS)]
        bars = axis.bar(values + (place - (len(found) - 1) / 2) * width, percent, color=color, width=width, label=group.label)
        bound = int(group.runs[0].steps["staleness_bound"][-1]) if len(group.runs[0].steps) else -1
        if len(found) == 1:
            for value, height, bar in zip(values, percent, bars, strict=True):
                bar.set_color(ORANGE if 0 <= bound < value else BLUE)
                if len(values) <= 12:
                    axis.annotate(f"{height:.1f}" if height >= 0.05 else "<0.1", (value, height), ha="center", va="bottom", fontsize=8)
        if bound >= 0:
            axis.axvline(
                bound + 0.5, color="black" if len(found) == 1 else color, linestyle="--", linewidth=1.2, label=f"bound eta = {bound}" * (len(found) == 1)
            )
        last, top = max(last, int(values.max()), bound), max(top, float(percent.max()))
    axis.set_xticks(range(0, last + 1, 1 + last // 12))
    axis.set(xlabel="age when trained [versions]", ylabel="trajectories [%]", ylim=(0, 1.25 * top))
    axis.grid(axis="x", visible=False)
    _legend(axis, groups)
    return True


def _age_course(axis: Axes, groups: Sequence[Group]) -> bool:
    drawn = _curves(axis, groups, _column("staleness_mean"))
    for number, group in enumerate(groups):
        for run in group.runs:
            if not len(run.steps):
                continue
            bound, color = int(run.steps["staleness_bound"][-1]), COLORS[number % len(COLORS)]
            if len(groups) == len(group.runs) == 1:
                oldest = _reduced(run.steps["step"], run.steps["staleness_max"], np.max)
                axis.plot(*oldest, color=ORANGE, linewidth=0.9, drawstyle="steps-mid", label="oldest of the batch")
            if bound >= 0:
                axis.axhline(bound, color="black" if len(groups) == 1 else color, linestyle="--", linewidth=1.0)
    axis.set_ylabel("age [versions]; dashed: the bound")
    axis.set_ylim(bottom=0)
    _legend(axis, groups, "lower right")
    return drawn


def _lengths(axis: Axes, groups: Sequence[Group]) -> bool:
    found = [(number, group, rows) for number, group in enumerate(groups) if len(rows := np.concatenate([run.trajectories for run in group.runs]))]
    if not found:
        return False
    longest = max(int(rows["answer_tokens"].max()) for _, _, rows in found)
    width = 1 + longest // 50  # whole tokens: bins of one size hold the same number of lengths
    edges = np.arange(0.0, longest + 1 + width, width).tolist()
    for number, group, rows in found:
        if len(found) == 1:
            right = rows["status"] == STATUSES.index("right")
            parts, names = [rows["answer_tokens"][right], rows["answer_tokens"][~right]], ["right", "not right"]
            axis.hist(parts, edges, stacked=True, color=[GREEN, ORANGE], label=names, weights=[np.full(len(part), 100 / len(rows)) for part in parts])
        else:
            color = COLORS[number % len(COLORS)]
            axis.hist(rows["answer_tokens"], edges, histtype="step", linewidth=1.6, color=color, label=group.label, weights=np.full(len(rows), 100 / len(rows)))
        axis.axvline(float(np.median(rows["answer_tokens"])), color="black" if len(found) == 1 else COLORS[number % len(COLORS)], linestyle=":", linewidth=1.3)
    axis.set(xlabel="tokens of an answer; dotted: median", ylabel="trajectories [%]")
    axis.legend()
    return True


def _waiting(axis: Axes, groups: Sequence[Group]) -> bool:
    axis.set_ylabel("groups that waited for training")
    drawn = _curves(axis, groups, _column("waiting_groups"))
    axis.set_ylim(bottom=0)
    return drawn


def _pushes(axis: Axes, groups: Sequence[Group]) -> bool:
    if len(groups) == len(groups[0].runs) == 1:
        pushes = groups[0].runs[0].pushes
        if not len(pushes):
            return False
        parts = {"pack_s": ("pack", PHASE_COLORS["pack"]), "transfer_s": ("transfer, slowest rank", PURPLE), "pause_max_s": ("decoding stood still", ORANGE)}
        for name, (label, color) in parts.items():
            axis.plot(*_reduced(pushes["version"], 1000 * pushes[name], np.max), color=color, linewidth=1.0, label=label)
        _integers(axis)
        axis.set(xlabel="policy version", ylabel="milliseconds")
        axis.legend()
    else:
        if not _curves(axis, groups, lambda run: (run.pushes["version"], 1000 * (run.pushes["pack_s"] + run.pushes["transfer_s"]))):
            return False
        axis.set(xlabel="policy version", ylabel="pack + transfer [ms]")
    axis.set_ylim(bottom=0)
    return True


def _entropy(axis: Axes, groups: Sequence[Group]) -> bool:
    axis.set_ylabel("entropy of the policy [nat]")
    return _curves(axis, groups, _column("entropy"))


def _thinned(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most MOST_POINTS groups of neighbours: (x [K], rows [R, K])."""
    if len(x) <= MOST_POINTS:
        return x, rows
    parts = np.array_split(np.arange(len(x)), MOST_POINTS)
    return np.array([x[part].mean() for part in parts]), np.stack([rows[:, part].mean(1) for part in parts], axis=1)


def _step_time(axis: Axes, groups: Sequence[Group]) -> bool:
    """Of one run: what a step's time was made of on training rank 0."""
    steps = groups[0].runs[0].steps
    if not len(steps):
        return False
    named = {"wait for data": "generation_wait_s", "collect": "collect_s", "train": "train_s"}
    known = np.array([steps[column] for column in named.values()])
    x, stack = _thinned(steps["step"], np.vstack([known, np.maximum(steps["wall_s"] - known.sum(0), 0.0)]))
    colors = [ORANGE, PHASE_COLORS["collect"], GREEN, PHASE_COLORS["push_wait"]]
    axis.stackplot(x, stack, colors=colors, labels=[*named, "rest: push, log, checkpoints"], step="mid" if len(x) < 60 else None)
    _integers(axis)
    axis.set(xlabel="training step", ylabel="seconds", ylim=(0, 1.25 * float(stack.sum(0).max())))
    axis.legend(ncols=2)
    return True


def _statuses(axis: Axes, groups: Sequence[Group]) -> bool:
    """Of one run: verdicts of the trajectories that each step closed."""
    rows = groups[0].runs[0].trajectories
    if not len(rows):
        return False
    steps, index = np.unique(rows["batch"], return_inverse=True)
    counts = np.zeros((len(STATUSES), len(steps)))
    np.add.at(counts, (rows["status"], index), 1)
    x, shares = _thinned(steps, 100 * counts / counts.sum(0))
    used = [k for k in range(len(STATUSES)) if shares[k].any()]
    step = "mid" if len(x) < 60 else None
    axis.stackplot(x, shares[used], colors=[STATUS_COLORS[STATUSES[k]] for k in used], labels=[STATUSES[k] for k in used], step=step)
    _integers(axis)
    axis.set(xlabel="training step", ylabel="verdicts [%]", ylim=(0, 100))
    axis.legend(loc="lower right")
    return True


def _queues(axis: Axes, groups: Sequence[Group]) -> bool:
    """Of one run: sequences that decode, and groups that wait at generation ranks, summed over the ranks, over the seconds of the last attempt."""
    rows = groups[0].runs[0].sampled["ranks"][-1]
    rows = rows[rows["role"] == ROLES.index("generation")]
    if len(rows) < 2:
        return False
    edges = np.linspace(rows["time_s"].min(), rows["time_s"].max(), 2 + min(120, len(rows) // 2))
    start_s = edges[0]
    for name, label, color in (("running", "sequences decoding", BLUE), ("waiting", "groups leased or finished, waiting", ORANGE)):
        total = np.zeros(len(edges))
        for rank in np.unique(rows["rank"]):
            mine = rows[rows["rank"] == rank]
            total += mine[name][np.clip(np.searchsorted(mine["time_s"], edges, side="right") - 1, 0, None)]
        axis.step(edges - start_s, total, where="post", color=color, linewidth=1.2, label=label)
    axis.set(xlabel="seconds of the last attempt", ylabel="sum over generation ranks")
    axis.set_ylim(bottom=0)
    axis.legend()
    return True


def _ring(axis: Axes, groups: Sequence[Group]) -> bool:
    """Of one run: bytes in use in each lane over the seconds of the last attempt, and the most there ever were."""
    rows = groups[0].runs[0].sampled["ring"][-1]
    if len(rows) < 2:
        return False
    start_s = float(rows["time_s"].min())
    fullest = {int(lane): int(rows["high_water_bytes"][rows["lane"] == lane].max()) for lane in np.unique(rows["lane"])}
    lanes = sorted(sorted(fullest, key=lambda lane: -fullest[lane])[:MOST_LANES])
    for number, lane in enumerate(lanes):
        mine = rows[rows["lane"] == lane]
        color = COLORS[number % len(COLORS)]
        seconds = mine["time_s"] - start_s
        axis.plot(*_reduced(seconds, mine["high_water_bytes"], np.max), color=color, linestyle="--", linewidth=1.0)
        axis.plot(*_reduced(seconds, mine["used_bytes"], np.max), color=color, linewidth=1.0, label=f"lane {lane}")
    axis.set(xlabel="seconds of the last attempt", ylabel="bytes in use; dashed: most so far")
    axis.yaxis.set_major_formatter(lambda value, _: si(value))
    axis.set_ylim(bottom=0)
    _legend(axis, groups)
    return True


Draw = Callable[[Axes, Sequence[Group]], bool]
COMPARED: tuple[tuple[str, str, str, Draw], ...] = (
    ("reward", "Reward", "Mean reward of the graded trajectories of each batch.", _reward),
    ("held_out", "Held-out accuracy", "Share of right answers on the held-out problems, with 95 % intervals.", _held_out),
    ("accuracy", "Accuracy in training", "Share of right answers among the graded trajectories of each batch.", _batch_accuracy),
    ("throughput", "Throughput", "Prompt and answer tokens of the batch over the wall time of its step.", _throughput),
    (
        "staleness",
        "Staleness",
        "Age of the trained trajectories: version trained minus version of the first token. Older than the bound: orange.",
        _age_histogram,
    ),
    ("staleness_course", "Staleness over the run", "Mean age of each batch, with the bound.", _age_course),
    ("lengths", "Length of the answers", "Tokens of the answers of all closed trajectories.", _lengths),
    ("waiting", "Queue before training", "Finished groups that waited for training at the end of each step.", _waiting),
    ("pushes", "Weight pushes", "From the optimiser step to the new weights in use.", _pushes),
    ("entropy", "Entropy", "Mean entropy of the policy at the trained tokens.", _entropy),
)
SINGLE: tuple[tuple[str, str, str, Draw], ...] = (
    ("step_time", "Time of a step", "On training rank 0: what the wall time of each step was made of.", _step_time),
    ("verdicts", "Rewards by status", "Verdicts on the trajectories that each step closed.", _statuses),
    ("queues", "Queues at the generation ranks", "State of the generation ranks, about once a second.", _queues),
    ("ring", "Ring", "Fill of the lanes between generation and training ranks, of many the fullest eight.", _ring),
)
TIMES = (
    (
        "time",
        "Where the training time went",
        "Stacked shares of the training windows, first step to last, all attempts; of several runs, means of each role. Hatched: not recorded.",
        False,
    ),
    ("wall_time", "Where the wall time went", "The same of whole attempts, start and evaluations included.", True),
)
NAMES = tuple(name for name, *_ in (*COMPARED, *SINGLE, *TIMES))
"""Of all charts that there can be."""


def time_of_ranks(groups: Sequence[Group], *, whole: bool) -> Figure | None:
    """Stacked bar of every rank of one run, or of each role of several: seconds in each phase in % of whole attempts or of their training windows.

    What no interval covers is drawn as such. None without any time.
    """
    bars: list[tuple[str, np.ndarray]] = []
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        wall_s, of_role = wall_time(run) if whole else sum(stop - start for start, stop in run.windows), roles(run)
        if wall_s <= 0:
            continue
        shares = {rank: 100 * seconds / wall_s for rank, seconds in rank_seconds(run, whole=whole).items()}
        if len(runs) == 1:
            bars += [(f"{rank} {of_role[rank]}", shares[rank]) for rank in sorted(shares, key=lambda rank: (of_role[rank], rank))]
        else:
            members = {role: [shares[rank] for rank in shares if of_role[rank] == role] for role in ROLES}
            bars += [(f"{run.name[-24:]} {role[:3]}.", np.mean(of, axis=0)) for role, of in members.items() if of]
    if not bars:
        return None
    figure, axis = new_figure(WIDTH, 2.3 + min(0.3, 0.14 + 1.6 / len(bars)) * len(bars))
    left = np.zeros(len(bars))
    for phase, color in PHASE_COLORS.items():
        widths = np.array([share[PHASES.index(phase)] for _, share in bars])
        if widths.any():
            axis.barh(range(len(bars)), widths, left=left, color=color, label=phase, height=0.8)
            ink = "white" if color in (BLUE, GREEN, PURPLE) else "black"
            for k in np.flatnonzero(widths >= 8) if len(bars) <= 32 else []:
                axis.text(left[k] + widths[k] / 2, k, f"{widths[k]:.0f}", ha="center", va="center", fontsize=8, color=ink)
            left += widths
    missing = 100 - left
    if (missing > 1).any():
        axis.barh(range(len(bars)), np.maximum(missing, 0), left=left, color="white", edgecolor=GREY, hatch="///", label="not recorded", height=0.8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8.5 if len(bars) <= 32 else 5)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.set(xlim=(0, 100), xlabel="share of the time [%]")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def plan(splits: list[tuple[float, float]], etas: list[tuple[float, float]], baselines: dict[str, float], path: Path) -> Path:
    """Simulated throughput over the share of GPUs that generate (%) and over eta; synchronous baselines as lines."""
    matplotlib.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", squeeze=False)
    for axis, points, label in ((axes[0, 0], splits, "GPUs that generate [%]"), (axes[0, 1], etas, "eta")):
        axis.plot(*zip(*sorted(points), strict=True), color=BLUE, marker="o", label="asynchronous")
        for (name, value), color in zip(baselines.items(), (ORANGE, GREY), strict=False):
            axis.axhline(value, color=color, linestyle="--", linewidth=1.2, label=name)
        axis.set(xlabel=label, ylabel="tokens / s")
        axis.set_ylim(bottom=0, top=1.25 * max(value for _, value in splits + etas))
        axis.yaxis.set_major_formatter(lambda value, _: si(value))
    axes[0, 0].set_title("Split")
    axes[0, 1].set_title("Staleness")
    axes[0, 1].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
