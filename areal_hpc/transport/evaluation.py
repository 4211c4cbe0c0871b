"""What an evaluation found: sent by generation ranks, summed up by training rank 0 and by `areal-hpc eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.transport.trajectory import Status


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part: index, status and answer length of each held-out problem it took."""

    version: int
    problem_Q: np.ndarray
    status_Q: np.ndarray
    tokens_Q: np.ndarray
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy over all shares. Answers that could not be graded count as wrong."""

    version: int
    num_problems: int
    correct: int
    ci95: float
    """Half-width of the 95 % confidence interval of the accuracy (normal approximation)."""
    answer_tokens_mean: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.num_problems


def summarise(shares: Sequence[Share]) -> Evaluation:
    """Join the shares of one version."""
    status_Q = np.concatenate([share.status_Q for share in shares])
    tokens_Q = np.concatenate([share.tokens_Q for share in shares])
    correct, total = int(np.sum(status_Q == int(Status.RIGHT))), len(status_Q)
    accuracy = correct / total
    return Evaluation(
        version=shares[0].version,
        num_problems=total,
        correct=correct,
        ci95=1.96 * float(np.sqrt(accuracy * (1 - accuracy) / total)),
        answer_tokens_mean=float(tokens_Q.mean()),
        seconds=max(share.seconds for share in shares),
    )
