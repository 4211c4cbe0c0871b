"""Grader: loads the problems, then grades one answer after the other. `areal_hpc.reward.server` starts it, watches its time and kills it.

A job names a problem of the data, or (`areal-hpc grade`) brings its own reference answer or tests. One with `turns` is put to the environment first
(areal_hpc.reward.environments): a text of its own goes back instead of a verdict, and the model goes on behind it.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

from areal_hpc.config import ConfigError, Data, Environment, Reward
from areal_hpc.data.datasets import Problem, Problems, load_problems, score
from areal_hpc.reward import answers
from areal_hpc.reward.channel import Channel, ChannelClosedError
from areal_hpc.reward.environments import load_environment
from areal_hpc.reward.processes import adopt_parent, limit_memory, step_back
from areal_hpc.reward.verdict import Graded, Outcome

MAX_TRACEBACKS = 5
WALL_PER_CPU = 15.0
"""Wall-clock limit of a mathematical answer as a multiple of its processor time: for machines that are too busy to give it that."""
CODE_ATTEMPTS, CODE_MARGIN_S = 2, 20.0
"""Times that a program may be run (again when the machine, not the program, ended it), and wall-clock seconds for starting and clearing up."""


class Grader:
    """Answer text -> verdict, by the problem's own rule or by a function of the user's."""

    def __init__(self, problems: Problems, reward: Reward, kinds: Sequence[str] = (), environment: Environment | None = None) -> None:
        """kinds: what jobs without a problem may bring ("math", "code"). Raises ConfigError for a custom function or an environment that cannot be had."""
        self._problems = problems
        self._reward = reward
        self._custom = load_custom(reward.custom) if reward.custom else None
        self._num_tracebacks = 0
        self._environment = load_environment(environment, reward) if environment else None
        self._environment_s = environment.deadline_s if environment else 0.0
        self.kinds = frozenset(kinds) if self._custom is None else frozenset()
        if self._custom is None:
            self.kinds |= {_kind(problem) for split in (problems.train, problems.heldout) for problem in split}
        self._math = _math_grader(reward) if "math" in self.kinds else None

    def grade(self, job: dict[str, Any]) -> dict[str, Any]:
        """The verdict as a message. Whatever the grading function raises, and anything but a finite number from it, is an infra_error, never a 0."""
        started_s = time.perf_counter()
        problem = getattr(self._problems, job["split"])[job["problem"]] if "problem" in job else None
        kind = job["kind"] if problem is None else _kind(problem)
        message: dict[str, Any]
        try:
            if self._custom is None and kind == "math":
                gold = job["gold"] if problem is None else list(problem.accepted)
                message = self._by_math(gold, job["text"], job["truncated"])
            elif self._custom is None and kind == "code":
                tests = job["tests"] if problem is None else problem.tests
                message = self._by_tests(tests, job["text"], job["truncated"])
            else:
                assert problem is not None
                message = self._by_score(problem, job["text"], job["truncated"])
        except Exception as error:  # noqa: BLE001 (whatever users' functions raise)
            self._report_traceback()
            message = {"status": "INFRA_ERROR", "score": None, "extracted": None, "reason": type(error).__name__}
        return {"job": job["job"], "seconds": time.perf_counter() - started_s, **message}

    def answer_turn(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """The environment's text for the model as a message; None when the answer is final. Whatever the environment raises, and anything but text, is an infra_error."""
        assert self._environment is not None
        started_s = time.perf_counter()
        counts = getattr(self._environment, "counts", {})
        before = dict(counts)
        message: dict[str, Any]
        try:
            text = self._environment(getattr(self._problems, job["split"])[job["problem"]], tuple(job["turns"]))
            if text is None:
                return None
            if not isinstance(text, str):
                raise TypeError(f"the environment returned {type(text).__name__}, which is not text")
            how = [name for name, count in counts.items() for _ in range(count - before.get(name, 0))]
            message = {"reply": text.encode("utf-8", "replace").decode(), "how": ["replies", *how]}
        except Exception as error:  # noqa: BLE001 (whatever users' functions raise)
            self._report_traceback()
            message = {
                "status": "INFRA_ERROR",
                "score": None,
                "extracted": None,
                "reason": f"environment: {type(error).__name__}",
                "how": ["environment_failed"],
            }
        return {"job": job["job"], "seconds": time.perf_counter() - started_s, **message}

    @property
    def turn_limits(self) -> dict[str, float | None]:
        """Limits of the environment."""
        return {"cpu_s": None, "wall_s": self._environment_s}

    def _by_score(self, problem: Problem, text: str, truncated: bool) -> dict[str, Any]:
        """By the custom function, or by the rule of a built-in task."""
        extracted = answers.extract(text)
        result = self._custom(problem, text) if self._custom else score(problem, extracted)
        value = float(result) if isinstance(result, (int, float, Real)) else math.nan  # Real: NumPy scalars
        if not math.isfinite(value):
            raise TypeError(f"the grading function returned {type(result).__name__}, which is not a finite number")  # its repr may hang
        return {
            "status": _status(value, extracted, truncated, bool(self._custom)),
            "score": value,
            "extracted": extracted,
            "how": [] if self._custom else ["fast"],
        }

    def _by_math(self, gold: str | list[str], text: str, truncated: bool) -> dict[str, Any]:
        assert self._math is not None
        before = dict(self._math.counts)
        try:
            graded = self._math.grade(gold, text, truncated)
        except (MemoryError, RecursionError):
            graded = Graded.of(Outcome.HOSTILE, None, "needs more memory than a grader may use")
        how = [name for name, count in self._math.counts.items() if count > before.get(name, 0)]
        return _message(graded) | {"how": how}

    def _by_tests(self, tests: Any, text: str, truncated: bool) -> dict[str, Any]:
        from areal_hpc.reward import code

        try:
            read = code.read_tests(tests) if isinstance(tests, (dict, list, str)) else tests
        except ValueError as error:
            return _message(Graded.of(Outcome.GOLD_BAD, None, str(error)))
        graded = code.grade_program(read, text, code.CodeOptions.of(self._reward))
        if graded.status is Outcome.NO_ANSWER and truncated:
            graded = Graded.of(Outcome.TRUNCATED)
        return _message(graded)

    def limits(self, job: dict[str, Any]) -> dict[str, float | None] | None:
        """Limits of this job that differ from those that `ready` announced."""
        if self._custom is not None or not ("kind" in job or "code" in self.kinds):
            return None
        kind = job["kind"] if "kind" in job else _kind(getattr(self._problems, job["split"])[job["problem"]])
        return {"cpu_s": None, "wall_s": CODE_ATTEMPTS * self._reward.code_wall_s + CODE_MARGIN_S} if kind == "code" else None

    @property
    def ready(self) -> dict[str, Any]:
        """What the server must know about this grader."""
        wall_s = max(self._reward.deadline_s, WALL_PER_CPU * self._reward.math_cpu_s) if self._math else self._reward.deadline_s
        return {"ready": True, "slow_start": self._math is not None, "limits": {"cpu_s": self._reward.math_cpu_s if self._math else None, "wall_s": wall_s}}

    def _report_traceback(self) -> None:
        self._num_tracebacks += 1
        if self._num_tracebacks <= MAX_TRACEBACKS:
            traceback.print_exc(file=sys.stderr)


def _message(graded: Graded) -> dict[str, Any]:
    return {"status": graded.status.name, "score": graded.reward, "extracted": graded.extracted, "reason": graded.reason}


def _kind(problem: Problem) -> str:
    """math, code, or rg: by the scorer of its reasoning-gym task."""
    return problem.kind


def _math_grader(reward: Reward) -> Any:
    """Imported here: graders of other problems do without sympy."""
    from areal_hpc.reward import math_fallback
    from areal_hpc.reward.math import MathGrader
    from areal_hpc.reward.math_compare import Policy

    policy = Policy(percent=reward.math_percent, units=reward.math_units, vectors=reward.math_vectors, intervals=reward.math_intervals, bases=reward.math_bases)
    limit_memory()
    math_fallback.warm_up()
    return MathGrader(policy, statement=reward.math_answer == "statement")


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
    """From the first message: the configuration's data and reward sections (data null: jobs bring their own, and no rank generates them)."""
    step_back(beside_a_rank=settings["data"] is not None)
    reward = Reward(**_with_tuples(settings["reward"]))
    problems = Problems((), (), "") if settings["data"] is None else load_problems(Data(**_with_tuples(settings["data"])))
    environment = settings["environment"]
    return Grader(problems, reward, settings["kinds"], None if environment is None else Environment(**environment))


def _with_tuples(section: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}


def serve(channel: Channel) -> None:
    """First message: the settings, answered by "ready" or by the user's mistake. Then verdicts, each sent before the next answer is looked at."""
    grader: Grader | None = None
    reply: dict[str, Any]
    while True:
        channel.wait(None)
        for message in channel.receive():
            if grader is None:
                try:
                    grader = _configured(message)
                    reply = grader.ready
                except ConfigError as error:
                    reply = {"config_error": str(error)}
            else:
                reply = _judge(channel, grader, message)
            _send(channel, reply)


def _judge(channel: Channel, grader: Grader, job: dict[str, Any]) -> dict[str, Any]:
    """The environment's text or the verdict; each has its own limits, and a clock that starts when they are announced."""
    if job.get("turns"):
        _send(channel, {"taking": job["job"], "limits": grader.turn_limits})
        answered = grader.answer_turn(job)
        if answered is not None:
            return answered
    limits = grader.limits(job) or (grader.ready["limits"] if job.get("turns") else None)
    if limits is not None:
        _send(channel, {"taking": job["job"], "limits": limits})
    return grader.grade(job)


def _send(channel: Channel, message: dict[str, Any]) -> None:
    channel.send(message)
    while channel.has_outgoing:
        channel.wait(None)


if __name__ == "__main__":
    channel = adopt_parent()
    with suppress(ChannelClosedError):  # the server is done with us
        serve(channel)
