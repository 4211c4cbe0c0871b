"""Several runs side by side: which options differ, which runs are the same experiment at other seeds, and intervals over those.

Runs whose configurations differ in `seed` and `run_dir` alone form a group. Over the seeds of a group a mean has a 95 % interval by Student's t: with two seeds it is
very wide, as it should be. A group of one run has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_hpc.observe.runs import Run

OWN = ("seed", "run_dir")
"""Options that do not make another experiment."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond the table the last one is used, which is a little wide."""
MAX_NAMED = 3
"""Differing options that a group's label may name; beyond, it is the name of its first run."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """A mean over seeds with its 95 % interval; `low` and `high` are not numbers for one seed."""

    x: np.ndarray
    """[K] steps or versions that all seeds have."""
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as `section.option` -> value."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Option -> its value in each run, for the options that differ; `run_dir` aside. A value that a run's version did not know is `-`."""
    options = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for each in options for name in each)
    table = {name: [str(each[name]) if name in each else "-" for each in options] for name in names if name != "run_dir"}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their first runs. The label names what differs between the groups, and how many seeds there are."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        key = repr(sorted((name, str(value)) for name, value in flat(run.config).items() if name not in OWN)) if run.config else run.name
        members.setdefault(key, []).append(run)
    firsts = [group[0] for group in members.values()]
    between = {name: values for name, values in differences(firsts).items() if name not in OWN}
    groups = []
    for number, group in enumerate(members.values()):
        named = [f"{name.rpartition('.')[2]} {values[number]}" for name, values in between.items()]
        label = ", ".join(named) if 0 < len(named) <= MAX_NAMED else group[0].name
        groups.append(Group(label + (f" ({len(group)} seeds)" if len(group) > 1 else ""), tuple(group)))
    labels = [group.label for group in groups]
    return [group if labels.count(group.label) == 1 else Group(f"{group.label} [{group.runs[0].name}]", group.runs) for group in groups]


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
    """Mean and interval of curves (x, y), one per seed, at the x that all of them have, each once."""
    common = curves[0][0]
    for x, _ in curves[1:]:
        common = np.intersect1d(common, x)
    common = np.unique(common)
    values = np.array([y[np.searchsorted(x, common)] for x, y in curves], float)
    means, halves = zip(*(interval(column) for column in values.T), strict=True) if len(common) else ((), ())
    mean, half = np.array(means, float), np.array(halves, float)
    return Band(common, mean, mean - half, mean + half)


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """(mean, half width of the 95 % interval); the width is not a number for fewer than two values. Values that are not numbers are left out."""
    known = np.asarray([value for value in values if math.isfinite(value)], float)
    if not len(known):
        return math.nan, math.nan
    if len(known) == 1:
        return float(known[0]), math.nan
    quantile = T_95[min(len(known) - 1, len(T_95)) - 1]
    return float(known.mean()), float(quantile * known.std(ddof=1) / math.sqrt(len(known)))
