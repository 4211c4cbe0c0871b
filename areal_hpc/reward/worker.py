"""Grader: loads the problems, then grades one answer after the other. `areal_hpc.reward.server` starts it, watches its time and kills it."""

from __future__ import annotations

import importlib
import math
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from typing import Any

from areal_hpc.config import ConfigError, Data
from areal_hpc.data.datasets import Problem, Problems, load_problems, score
from areal_hpc.reward import answers
from areal_hpc.reward.channel import Channel, ChannelClosedError
from areal_hpc.reward.processes import adopt_parent

MAX_TRACEBACKS = 5


class Grader:
    """Answer text -> verdict, by the problem's own rule or by a function of the user's."""

    def __init__(self, problems: Problems, custom: str = "") -> None:
        self._problems = problems
        self._custom = load_custom(custom) if custom else None
        self._num_tracebacks = 0

    def grade(self, job: dict[str, Any]) -> dict[str, Any]:
        """The verdict as a message. Whatever the grading function raises, and anything but a finite number from it, is an infra_error, never a 0."""
        started_s = time.perf_counter()
        text: str = job["text"]
        extracted = answers.extract(text)
        problem: Problem = getattr(self._problems, job["split"])[job["problem"]]
        try:
            result = self._custom(problem, text) if self._custom else score(problem, extracted)
            value = float(result) if isinstance(result, (int, float, Real)) else math.nan  # Real: NumPy scalars
            if not math.isfinite(value):
                raise TypeError(f"the grading function returned {type(result).__name__}, which is not a finite number")  # its repr may hang
            status = _status(value, extracted, job["truncated"], bool(self._custom))
        except Exception:  # noqa: BLE001 (whatever users' functions raise)
            self._report_traceback()
            value, status = None, "INFRA_ERROR"
        return {"job": job["job"], "status": status, "score": value, "extracted": extracted, "seconds": time.perf_counter() - started_s}

    def _report_traceback(self) -> None:
        self._num_tracebacks += 1
        if self._num_tracebacks <= MAX_TRACEBACKS:
            traceback.print_exc(file=sys.stderr)


def _status(value: float, extracted: str | None, truncated: bool, custom: bool) -> str:
    """Name of the `trajectory.Status`. A custom function sees the whole text, so for it a missing marker alone means nothing."""
    if value == 1.0:
        return "RIGHT"
    if extracted is None and truncated:
        return "TRUNCATED"
    return "WRONG" if custom or extracted is not None else "NO_ANSWER"


def load_custom(name: str) -> Callable[[Problem, str], float]:
    """The function named "module:function". Raises ConfigError when there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"custom reward '{name}': expected 'module:function', called as function(problem, answer_text) -> float, 1.0 = right")
    try:
        function: Callable[[Problem, str], float] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"custom reward '{name}': {error}") from error
    return function


def _configured(settings: dict[str, Any]) -> Grader:
    data = settings["data"] | {"tasks": tuple(settings["data"]["tasks"])}
    return Grader(load_problems(Data(**data)), settings["custom"])


def serve(channel: Channel) -> None:
    """First message: the settings, answered by "ready" or by the user's mistake. Then verdicts, each sent before the next answer is looked at."""
    grader: Grader | None = None
    reply: dict[str, Any]
    while True:
        channel.wait(None)
        for message in channel.receive():
            if grader is None:
                try:
                    grader, reply = _configured(message), {"ready": True}
                except ConfigError as error:
                    reply = {"config_error": str(error)}
            else:
                reply = grader.grade(message)
            channel.send(reply)
            while channel.has_outgoing:
                channel.wait(None)


if __name__ == "__main__":
    with suppress(ChannelClosedError):  # the server is done with us
        serve(adopt_parent())
