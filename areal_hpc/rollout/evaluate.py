"""Evaluation of one fixed policy version by a generation rank: its share of the held-out problems, decoded beside the training sequences.

While an evaluation runs, the rank keeps its weights: newer versions are received into staging and used afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from areal_hpc.config import Config
from areal_hpc.data.datasets import Problem
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.reward.service import Verdict
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.sampling import stream_key
from areal_hpc.transport.evaluation import Share

EVALUATION_IDS = 1 << 60
"""Request ids from here on belong to evaluations; below are training samples (ticket * n + sample)."""
EVALUATION_TICKETS = 1 << 40
"""Random streams of evaluations: problem j draws from ticket EVALUATION_TICKETS + j, the same numbers for every version and number of ranks."""


@dataclass(slots=True)
class EvaluationInProgress:
    """The share of one rank, while it runs."""

    version: int
    problems: list[int]
    started_at: float = field(default_factory=time.monotonic)
    tokens: dict[int, int] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.verdicts) == len(self.problems)

    def share(self) -> Share:
        """The result, in the order of the problems."""
        return Share(
            version=self.version,
            problem_Q=np.array(self.problems, np.int32),
            status_Q=np.array([int(self.verdicts[j].status) for j in self.problems], np.int32),
            tokens_Q=np.array([self.tokens[j] for j in self.problems], np.int32),
            seconds=time.monotonic() - self.started_at,
        )


def evaluation_request(config: Config, problem: Problem, index: int, tokenizer: Tokenizer) -> Request:
    """The request of held-out problem `index`."""
    return Request(
        request_id=EVALUATION_IDS + index,
        prompt_tokens=tokenizer.encode(problem.question + config.data.suffix),
        stream=stream_key(config.seed, EVALUATION_TICKETS + index, 0),
        max_new_tokens=config.generation.max_new_tokens,
        temperature=config.evaluation.temperature,
    )
