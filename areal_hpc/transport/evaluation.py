"""What an evaluation found: sent by generation ranks, summed up by training rank 0 and by `areal-hpc eval`.

Q problems of a share, K answers to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_hpc import metrics
from areal_hpc.data.datasets import Problem
from areal_hpc.transport.trajectory import GRADED, Status

GRADED_VALUES = [int(status) for status in GRADED]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part: status, length and key of every answer to each held-out problem it took."""

    version: int
    problem_Q: np.ndarray
    status_QK: np.ndarray
    tokens_QK: np.ndarray
    answer_QK: np.ndarray
    """int64 keys (`metrics.answer_key`): which answers are equal."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of the problems of one source, or of all. Answers that could not be graded count as wrong, and are counted."""

    source: str
    """Empty: all sources together."""
    num_problems: int
    k: int
    """Answers to each problem."""
    correct: int
    """Answers graded right."""
    ci_low: float
    ci_high: float
    """95 % interval of the accuracy (`metrics.interval`)."""
    passes: dict[int, float] = field(compare=False)
    """j -> pass@j for j = 1, 2, 4, ... and k."""
    majority_k: float
    answer_tokens_mean: float
    truncated: int
    no_answer: int
    ungraded: int

    @property
    def accuracy(self) -> float:
        """avg@k: share of right answers."""
        return self.correct / (self.num_problems * self.k)

    @property
    def pass_k(self) -> float:
        """Share of problems with at least one right answer among k."""
        return self.passes[self.k]

    @property
    def ci95(self) -> float:
        """Half width of the interval."""
        return (self.ci_high - self.ci_low) / 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All shares of one version."""

    version: int
    total: Result
    sources: tuple[Result, ...]
    """One result per source, in the order of their names."""
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.total.accuracy


def source_of(problem: Problem) -> str:
    """The name under which results of this problem are added up: the data set that its row names, or the task that made it."""
    return problem.origin or problem.source


def summarise(shares: Sequence[Share], sources: Sequence[str]) -> Evaluation:
    """Join the shares of one version. `sources[j]`: source of held-out problem j."""
    problem_Q = np.concatenate([share.problem_Q for share in shares])
    order_Q = np.argsort(problem_Q)  # sums do not depend on who was first
    columns = tuple(np.concatenate([getattr(share, name) for share in shares])[order_Q] for name in ("status_QK", "tokens_QK", "answer_QK"))
    source_Q = np.array([sources[problem] for problem in problem_Q[order_Q]])
    results = tuple(_result(str(source), *(column[source_Q == source] for column in columns)) for source in np.unique(source_Q))
    return Evaluation(shares[0].version, _result("", *columns), results, seconds=max(share.seconds for share in shares))


def _result(source: str, status_QK: np.ndarray, tokens_QK: np.ndarray, answer_QK: np.ndarray) -> Result:
    right_QK = status_QK == int(Status.RIGHT)
    num_problems, k = status_QK.shape
    low, high = metrics.interval(right_QK)
    return Result(
        source=source,
        num_problems=num_problems,
        k=k,
        correct=int(right_QK.sum()),
        ci_low=low,
        ci_high=high,
        passes={j: float(metrics.pass_at_k(right_QK.sum(axis=1), k, j).mean()) for j in metrics.powers_of_two(k)},
        majority_k=metrics.mean_or_nan(metrics.majority(answer_QK, right_QK)),
        answer_tokens_mean=float(tokens_QK.mean()),
        truncated=int((status_QK == int(Status.TRUNCATED)).sum()),
        no_answer=int((status_QK == int(Status.NO_ANSWER)).sum()),
        ungraded=int((~np.isin(status_QK, GRADED_VALUES)).sum()),
    )
