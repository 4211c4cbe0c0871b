"""Evaluation of one fixed policy version by a generation rank: its share of the held-out problems, decoded beside the training sequences.

While an evaluation runs, the rank keeps its weights: newer versions are received into staging and used afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_hpc.config import Config
from areal_hpc.data.datasets import Problem
from areal_hpc.data.prompts import Prompts
from areal_hpc.metrics import answer_key
from areal_hpc.reward.service import Verdict
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.sampling import stream_key
from areal_hpc.rollout.turns import Answer
from areal_hpc.transport.evaluation import Share
from areal_hpc.transport.samples import AnswerText
from areal_hpc.transport.trajectory import Status

EVALUATION_IDS = 1 << 60
"""Request ids from here on belong to evaluations (+ problem * k + sample); below are training samples (ticket * n + sample)."""
EVALUATION_TICKETS = 1 << 40
"""Random streams of evaluations: problem j draws from ticket EVALUATION_TICKETS + j, the same numbers for every version and number of ranks."""


@dataclass(slots=True)
class EvaluationInProgress:
    """The share of one rank, while it runs. Answers are numbered problem * k + sample."""

    version: int
    problems: list[int]
    k: int
    """Answers to each problem."""
    num_saved: int
    """Problems below this are saved for reading."""
    started_at: float = field(default_factory=time.monotonic)
    tokens: dict[int, int] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)
    """Answer -> `metrics.answer_key`."""
    texts: dict[int, str] = field(default_factory=dict)
    """Answer -> text, of the problems that are saved."""

    @classmethod
    def of(cls, config: Config, version: int, problems: list[int]) -> EvaluationInProgress:
        return cls(version, problems, config.evaluation.num_samples, config.evaluation.save_samples)

    @property
    def complete(self) -> bool:
        return len(self.verdicts) == len(self.problems) * self.k

    def problem_of(self, request_id: int) -> int:
        """Position of the problem that a request answers."""
        return (request_id - EVALUATION_IDS) // self.k

    def graded(self, answer: Answer, verdict: Verdict, heldout: Sequence[Problem]) -> None:
        """An answer is complete."""
        number = verdict.job_id - EVALUATION_IDS
        self.tokens[number] = len(answer.tokens_R)
        if number // self.k < self.num_saved:
            self.texts[number] = answer.text
        self.verdicts[number] = verdict
        unmarked = verdict.extracted is None and verdict.status in (Status.RIGHT, Status.WRONG)  # judged by the whole text
        program = heldout[number // self.k].kind == "code"
        self.keys[number] = answer_key(verdict.extracted, votes=not (unmarked or program))

    def share(self) -> Share:
        """The result, in the order of the problems."""
        numbers = [[problem * self.k + sample for sample in range(self.k)] for problem in self.problems]
        shape = (len(self.problems), self.k)
        return Share(
            version=self.version,
            problem_Q=np.array(self.problems, np.int32),
            status_QK=np.array([[int(self.verdicts[j].status) for j in row] for row in numbers], np.int32).reshape(shape),
            tokens_QK=np.array([[self.tokens[j] for j in row] for row in numbers], np.int32).reshape(shape),
            answer_QK=np.array([[self.keys[j] for j in row] for row in numbers], np.int64).reshape(shape),
            seconds=time.monotonic() - self.started_at,
        )

    def saved_answers(self) -> list[AnswerText]:
        """What is saved for reading, in the order of problems and samples."""
        return [self._answer_text(number) for number in sorted(self.texts)]

    def _answer_text(self, number: int) -> AnswerText:
        verdict = self.verdicts[number]
        return AnswerText.of(
            *divmod(number, self.k),
            self.texts[number],
            verdict.extracted,
            verdict.status,
            verdict.score,
            tokens=self.tokens[number],
            versions=(self.version, self.version),
        )


def evaluation_requests(config: Config, problem: Problem, index: int, prompts: Prompts) -> list[Request]:
    """The k requests of held-out problem `index`."""
    prompt_P = prompts.tokens(problem)
    k = config.evaluation.num_samples
    return [
        Request(
            request_id=EVALUATION_IDS + index * k + sample,
            prompt_tokens=prompt_P,
            stream=stream_key(config.seed, EVALUATION_TICKETS + index, sample),
            max_new_tokens=config.generation.max_new_tokens,
            temperature=config.evaluation.temperature,
        )
        for sample in range(k)
    ]
