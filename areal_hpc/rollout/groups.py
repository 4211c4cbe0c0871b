"""Groups on their way through a generation rank: sampling -> grading -> complete."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from areal_hpc.config import Config, Reward
from areal_hpc.reward.service import Verdict
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.sampling import stream_key
from areal_hpc.rollout.turns import Answer
from areal_hpc.transport.samples import AnswerText
from areal_hpc.transport.trajectory import GRADED, Group, Status, Trajectory


def training_request(config: Config, ticket: int, sample: int, prompt_P: np.ndarray) -> Request:
    """One sample of a ticket for the engine."""
    generation = config.generation
    imposed = generation.imposed_mean > 0
    return Request(
        request_id=ticket * config.train.group_size + sample,
        prompt_tokens=prompt_P,
        stream=stream_key(config.seed, ticket, sample),
        max_new_tokens=imposed_length(config, ticket, sample) if imposed else generation.max_new_tokens,
        is_imposed=imposed,
        temperature=generation.temperature,
    )


def imposed_length(config: Config, ticket: int, sample: int) -> int:
    """Tokens of an answer under `generation.imposed_mean`: log-normal, its mean before the cut at max_new_tokens the one asked for."""
    generation = config.generation
    normal = np.random.Generator(np.random.PCG64((config.seed % 2**64, ticket, sample))).standard_normal()
    length = generation.imposed_mean * math.exp(generation.imposed_sigma * normal - generation.imposed_sigma**2 / 2)
    return min(max(1, round(length)), generation.max_new_tokens)


@dataclass(slots=True)
class GroupInProgress:
    """One ticket between admission and the ring."""

    ticket: int
    problem_index: int
    prompt_P: np.ndarray
    size: int
    admitted_at: float = field(default_factory=time.monotonic)
    start_version: int | None = None
    completions: dict[int, tuple[Answer, float]] = field(default_factory=dict)
    """sample -> (answer, time its last turn ended)."""
    verdicts: dict[int, tuple[Verdict, float]] = field(default_factory=dict)
    """sample -> (verdict, time it came)."""
    texts: dict[int, str] = field(default_factory=dict)
    """sample -> answer; only of a group that is saved for reading."""

    @property
    def complete(self) -> bool:
        """Every sample is graded, or could not be."""
        return len(self.verdicts) == self.size

    def saved_answers(self) -> list[AnswerText]:
        """The answers as texts, if this group is saved for reading."""
        return [self._answer_text(sample, self.texts[sample]) for sample in sorted(self.texts)]

    def _answer_text(self, sample: int, text: str) -> AnswerText:
        (completion, _), (verdict, _) = self.completions[sample], self.verdicts[sample]
        versions_R = completion.versions_R
        return AnswerText.of(
            self.problem_index,
            sample,
            text,
            verdict.extracted,
            verdict.status,
            verdict.score,
            tokens=len(completion.tokens_R),
            versions=(int(versions_R.min()), int(versions_R.max())),
        )

    def to_group(self, reward: Reward) -> Group:
        """The finished group; samples without a grade keep reward NaN and never train."""
        return Group(self.ticket, tuple(self._trajectory(sample, reward) for sample in range(self.size)))

    def _trajectory(self, sample: int, reward: Reward) -> Trajectory:
        completion, finished_at = self.completions[sample]
        verdict, graded_at = self.verdicts[sample]
        if verdict.status not in GRADED:
            value = float("nan")
        else:
            value = reward.right if verdict.status == Status.RIGHT else reward.wrong
        return Trajectory(
            ticket=self.ticket,
            sample=sample,
            prompt_P=self.prompt_P,
            tokens_R=completion.tokens_R,
            logprobs_R=completion.logprobs_R,
            versions_R=completion.versions_R,
            loss_mask_R=completion.loss_mask_R,
            reward=value,
            status=verdict.status,
            generated_s=finished_at - self.admitted_at,
            graded_s=graded_at - finished_at,
            num_turns=completion.num_turns,
        )
