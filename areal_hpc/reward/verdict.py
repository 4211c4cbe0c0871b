"""What grading one answer gave. Plain data that crosses process borders as JSON: never a parsed expression, never what a program left behind."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.StrEnum):
    """Why an answer has, or has not, a reward. The names are those of areal_hpc.transport.trajectory.Status."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """Nothing in the text is marked as the answer."""
    TRUNCATED = "truncated"
    """No answer, because the text was cut at the length limit."""
    HOSTILE = "hostile"
    """Refused unread: evaluating it could take for ever (towers of powers, sums over a million terms). Counts as wrong."""
    TIMEOUT = "timeout"
    """Used up its time while the work was its own (not the queue's or the machine's). Counts as wrong."""
    INFRA_ERROR = "infra_error"
    """The grader failed, not the answer: no reward, never trains."""
    GOLD_BAD = "gold_bad"
    """The reference answer of the data cannot be read: no reward, never trains."""


UNGRADED = frozenset({Outcome.INFRA_ERROR, Outcome.GOLD_BAD})
"""Outcomes without a reward."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The verdict on one answer."""

    reward: float | None
    """1.0 = right, 0.0 = not; None when there is nothing to learn from it (`UNGRADED`)."""
    status: Outcome
    extracted: str | None
    """The answer found in the text; None without one."""
    reason: str = ""
    """One line for the person who reads the report; empty where the status says all."""

    @classmethod
    def of(cls, status: Outcome, extracted: str | None = None, reason: str = "") -> Graded:
        """With the reward that the status stands for."""
        reward = None if status in UNGRADED else float(status is Outcome.RIGHT)
        return cls(reward, status, extracted, reason)
