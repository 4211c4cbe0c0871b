"""How long answers are: the same lengths for the same seed and ticket, whatever runs beside them, so that rivals do the same work.

A problem has a difficulty of its own, shared by its n answers: log length = log median + sigma (sqrt(rho) z_problem + sqrt(1 - rho) z_answer), cut at a cap.
Which problem a ticket asks is decided by the run's own permutation (`data.tickets`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from areal_hpc.data.tickets import Tickets

BLOCK = 512
"""Tickets whose lengths are drawn together."""


class Lengths(Protocol):
    """Lengths of the answers to one ticket."""

    def group(self, ticket: int, size: int) -> tuple[int, list[int]]:
        """(prompt tokens, answer tokens of each of `size` answers), all at least 1."""
        ...


@dataclass(slots=True)
class ConstantLengths:
    """Every prompt and every answer alike."""

    prompt: int
    answer: int

    def group(self, ticket: int, size: int) -> tuple[int, list[int]]:
        return self.prompt, [self.answer] * size


@dataclass(slots=True)
class LogNormalLengths:
    """Log-normal answers with a tail that the answers to one problem share."""

    median: float
    """Tokens, before the cap."""
    sigma: float
    """Standard deviation of the log length over all answers."""
    cap: int
    """Longest answer, tokens (`generation.max_new_tokens`); a longer one is cut there."""
    prompt: int
    """Tokens of every prompt."""
    group_correlation: float = 0.5
    """rho: share of the variance of the log length that lies between problems."""
    num_problems: int = 40_000
    seed: int = 0
    _tickets: Tickets = field(init=False)
    _difficulty: np.ndarray = field(init=False)
    _blocks: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tickets = Tickets(self.num_problems, self.seed)
        self._difficulty = np.random.Generator(np.random.PCG64((self.seed, 1))).standard_normal(self.num_problems)

    @classmethod
    def with_mean(cls, mean: float, sigma: float, cap: int, prompt: int, group_correlation: float = 0.5, seed: int = 0) -> LogNormalLengths:
        """The log-normal whose mean after the cap is `mean` tokens (bisection). Raises ValueError when the cap is not above the mean."""
        if not 1 <= mean < cap:
            raise ValueError(f"mean answer of {mean:g} tokens under a cap of {cap}: the mean must lie below the cap")
        low, high = 1e-3, float(cap) * 1e3
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if capped_mean(middle, sigma, cap) < mean else (low, middle)
        return cls(median=low, sigma=sigma, cap=cap, prompt=prompt, group_correlation=group_correlation, seed=seed)

    def group(self, ticket: int, size: int) -> tuple[int, list[int]]:
        block, offset = divmod(ticket, BLOCK)
        noise = self._blocks.get(block)
        if noise is None:
            noise = np.random.Generator(np.random.PCG64((self.seed, 2, block))).standard_normal((BLOCK, size))
            while len(self._blocks) > 64:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = noise
        shared = math.sqrt(self.group_correlation) * self._difficulty[self._tickets.problem_index(ticket)]
        logs = math.log(self.median) + self.sigma * (shared + math.sqrt(1 - self.group_correlation) * noise[offset])
        return self.prompt, np.clip(np.rint(np.exp(logs)), 1, self.cap).astype(int).tolist()


@dataclass(slots=True)
class LoggedLengths:
    """Groups as a run logged them, drawn with replacement: keeps the tail, its cap, and what answers to one prompt share."""

    groups: Sequence[tuple[int, tuple[int, ...]]]
    """(prompt tokens, answer tokens) of each logged group."""
    seed: int = 0

    def group(self, ticket: int, size: int) -> tuple[int, list[int]]:
        rng = np.random.Generator(np.random.PCG64((self.seed, 3, ticket)))
        prompt, answers = self.groups[int(rng.integers(len(self.groups)))]
        if size == len(answers):
            return prompt, list(answers)
        return prompt, [int(length) for length in rng.choice(answers, size)]


def capped_mean(median: float, sigma: float, cap: float) -> float:
    """E min(X, cap) of a log-normal X: e^(mu + sigma^2 / 2) Phi((ln cap - mu - sigma^2) / sigma) + cap (1 - Phi((ln cap - mu) / sigma))."""
    if sigma == 0:
        return min(median, cap)
    mu = math.log(median)
    below = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma * sigma / 2) * _phi(below - sigma) + cap * (1 - _phi(below))


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
