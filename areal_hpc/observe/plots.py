"""The plots of the report, drawn with matplotlib's Agg (no display). Each function writes one PNG and returns its path.

Raw values are always visible; averages are drawn over them. Axes of shares and counts start at zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from areal_hpc.observe.progress import si
from areal_hpc.observe.schema import OUTCOMES, PHASES

STYLE: Any = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "0.9",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
}
BLUE, GREEN, ORANGE, PURPLE, GREY = "#2a6fbb", "#2e8540", "#e07b39", "#8856a7", "#8c8c8c"
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


def _figure(rows: int, columns: int, width: float, height: float, *, sharex: bool = False) -> tuple[Figure, np.ndarray]:
    matplotlib.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, sharex=sharex)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of up to `window` values up to and including each one; those that are not a number are left out."""
    known = np.isfinite(values)
    sums, counts = np.cumsum(np.where(known, values, 0.0)), np.cumsum(known)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return means


def _curve(axis: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """Raw values thin, their running mean thick where there are enough of them."""
    window = max(1, len(steps) // 20)
    if window > 1:
        axis.plot(steps, values, color=color, alpha=0.35, linewidth=0.9)
        axis.plot(steps, _smooth(values, window), color=color, linewidth=2, label=f"{label}, mean of the last {window} steps")
    else:
        axis.plot(steps, values, color=color, linewidth=1.5, marker="o", markersize=3, label=label)


def learning(steps: np.ndarray, evaluations: np.ndarray, path: Path) -> Path:
    """Reward of the training batches, and accuracy on them and on the held-out set."""
    figure, axes = _figure(2, 1, 8, 6.4, sharex=True)
    reward, accuracy = axes[:, 0]
    _curve(reward, steps["step"], steps["reward_mean"], BLUE, "training batch")
    reward.set(ylabel="mean reward", title="Reward")
    reward.legend(loc="best")
    _curve(accuracy, steps["step"], 100 * steps["accuracy"], GREY, "training batch")
    if len(evaluations):
        known = evaluations["k"] > 0  # logs of earlier versions have no ends
        ends = [
            np.where(known, side, evaluations["ci95"])
            for side in (evaluations["accuracy"] - evaluations["ci_low"], evaluations["ci_high"] - evaluations["accuracy"])
        ]
        accuracy.errorbar(
            evaluations["policy_version"],
            100 * evaluations["accuracy"],
            yerr=100 * np.maximum(ends, 0),
            color=GREEN,
            marker="s",
            markersize=5,
            linewidth=1.5,
            linestyle="--",
            capsize=3,
            label=f"held-out, {evaluations['num_problems'].max()} problems, 95 % interval",
        )
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    accuracy.set(ylabel="right answers [%]", xlabel="training step (= policy version)", title="Accuracy", ylim=(0, 102))
    accuracy.legend(loc="best")
    return _save(figure, path)


def staleness(steps: np.ndarray, trajectories: np.ndarray, path: Path) -> Path:
    """Histogram of the age of the trained trajectories with the bound, and mean and largest age of each step."""
    figure, axes = _figure(1, 2, 9, 3.6)
    histogram, course = axes[0]
    bound = int(steps["staleness_bound"][-1])
    taken = np.isin(trajectories["outcome"], [OUTCOMES.index("trained"), OUTCOMES.index("masked")])
    ages = trajectories["age"][taken]
    if len(ages):
        values, counts = np.unique(ages, return_counts=True)
        percent = 100 * counts / len(ages)
        for value, height, bar in zip(values, percent, histogram.bar(values, percent, color=BLUE, width=0.8), strict=True):
            bar.set_color(ORANGE if 0 <= bound < value else BLUE)
            histogram.annotate(f"{height:.1f}" if height >= 0.05 else "<0.1", (value, height), ha="center", va="bottom", fontsize=8)
        last = max(int(values.max()), bound)
        histogram.set_xticks(range(0, last + 1, 1 + last // 12))
        histogram.set_ylim(0, 1.25 * percent.max())
    histogram.set(xlabel="age when trained [versions]", ylabel="trajectories [%]", title=f"Age of {len(ages):,} trained trajectories")
    histogram.grid(axis="x", visible=False)
    course.plot(steps["step"], steps["staleness_max"], color=ORANGE, linewidth=1, drawstyle="steps-mid", label="oldest")
    course.plot(steps["step"], steps["staleness_mean"], color=BLUE, linewidth=1.5, label="mean")
    if bound >= 0:
        histogram.axvline(bound + 0.5, ymax=0.82, color="black", linestyle="--", linewidth=1.2, label=f"eta = {bound}; older ones are orange")
        course.axhline(bound, color="black", linestyle="--", linewidth=1.2, label=f"eta = {bound}")
        histogram.legend(loc="upper right", fontsize=8)
    course.xaxis.get_major_locator().set_params(integer=True)
    course.set(xlabel="training step", ylabel="age [versions]", title="Age by step" + ("" if bound >= 0 else " (no bound: eta = inf)"))
    course.set_ylim(bottom=0, top=1.35 * max(1, bound, int(steps["staleness_max"].max())))
    course.legend(loc="upper right", ncols=3, fontsize=8)
    return _save(figure, path)


def throughput(steps: np.ndarray, path: Path) -> Path:
    """Tokens per second of each step, and what the step's time was made of."""
    figure, axes = _figure(2, 1, 8, 6.4, sharex=True)
    rate, parts = axes[:, 0]
    values = steps["tokens_per_s"]
    rate.plot(steps["step"], values, color=BLUE, linewidth=1)
    rate.axhline(float(np.median(values)), color="black", linestyle="--", linewidth=1.2, label=f"median {si(float(np.median(values)))}")
    rate.yaxis.set_major_formatter(lambda value, _: si(value))
    rate.set(ylabel="tokens / s", title="Throughput: prompt and answer tokens of the batch / wall time of the step")
    rate.set_ylim(0, 1.15 * values.max())
    rate.legend(loc="lower right")
    named = {"wait for data": "generation_wait_s", "collect": "collect_s", "train": "train_s", "push": "push_s"}
    stack = np.array([steps[column] for column in named.values()])
    rest = np.maximum(steps["wall_s"] - stack.sum(0), 0.0)
    colors = [ORANGE, PHASE_COLORS["collect"], GREEN, PURPLE, PHASE_COLORS["start"]]
    edges = np.append(steps["step"] - 0.5, steps["step"][-1] + 0.5)
    base = np.zeros(len(steps))
    for label, values, color in zip([*named, "rest"], [*stack, rest], colors, strict=True):
        if values.any():
            parts.stairs(base + values, edges, baseline=base, fill=True, color=color, label=label)
            base = base + values
    parts.xaxis.get_major_locator().set_params(integer=True)
    parts.set(xlabel="training step", ylabel="seconds", title="Time of a step on the training ranks")
    parts.set_ylim(0, 1.25 * base.max())
    parts.legend(loc="upper right", ncols=5, fontsize=9)
    return _save(figure, path)


def time_of_ranks(seconds: dict[int, np.ndarray], roles: dict[int, str], wall_s: float, path: Path) -> Path:
    """Stacked bar of every rank: seconds in each phase in % of the wall time; what no interval covers is drawn as such."""
    ranks = sorted(seconds, key=lambda rank: (roles[rank], rank))
    figure, axes = _figure(1, 1, 9, 1.8 + min(0.4, 0.24 + 1.6 / len(ranks)) * len(ranks))
    axis = axes[0, 0]
    left = np.zeros(len(ranks))
    for phase, color in PHASE_COLORS.items():
        widths = np.array([100 * seconds[rank][PHASES.index(phase)] / wall_s for rank in ranks])
        if widths.any():
            axis.barh(range(len(ranks)), widths, left=left, color=color, label=phase, height=0.8)
            ink = "white" if color in (BLUE, GREEN, PURPLE) else "black"
            for k in np.flatnonzero(widths >= 6):
                axis.text(left[k] + widths[k] / 2, k, f"{widths[k]:.0f}", ha="center", va="center", fontsize=8, color=ink)
            left += widths
    missing = 100 - left
    if (missing > 1).any():
        axis.barh(range(len(ranks)), np.maximum(missing, 0), left=left, color="white", edgecolor=GREY, hatch="///", label="not recorded", height=0.8)
    axis.set_yticks(range(len(ranks)), [f"rank {rank} {roles[rank]}" for rank in ranks])
    axis.set_ylim(len(ranks) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.set(xlim=(0, 100), xlabel=f"share of the run's {wall_s:.0f} s [%]", title="Where the time of each rank went")
    figure.legend(loc="outside lower center", ncols=6, fontsize=9)
    return _save(figure, path)


def plan(splits: list[tuple[float, float]], etas: list[tuple[float, float]], baselines: dict[str, float], path: Path) -> Path:
    """Simulated throughput over the share of GPUs that generate (%) and over eta; synchronous baselines as lines."""
    figure, axes = _figure(1, 2, 9, 3.6)
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
    return _save(figure, path)
