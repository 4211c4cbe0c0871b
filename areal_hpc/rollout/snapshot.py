"""A generation rank's part of a checkpoint: copy what is on its way, mark the lane, write the copy behind the decode loop's back; and take it up again.

Order is everything. The copy is made between two decode steps, when training rank 0's SNAPSHOT is read; until the marker is in the lane nothing of the outbox may
follow into it. So each group is either in the copy, or in the lane before the marker, where the training rank that reads the lane saves it: never in both, never in
neither (docs/checkpoints.md).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc.reward.service import Verdict
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.groups import GroupInProgress, training_request
from areal_hpc.rollout.turns import Answer
from areal_hpc.transport import random_state
from areal_hpc.transport.cut import Grade, RankState, Saved, UnfinishedGroup, UnfinishedSample, file_name, write_state
from areal_hpc.transport.samples import is_saved

if TYPE_CHECKING:
    from areal_hpc.rollout.worker import RolloutWorker
    from areal_hpc.transport.ring import RingProducer


@dataclass(slots=True)
class Snapshots:
    """Lifecycle: `take`, then `push_marker` until it returns True and `poll` until it returns a report; then the next one."""

    marker: int | None = None
    """Id of the marker that has yet to enter the lane: the step of the checkpoint."""
    _step: int = 0
    _writing: Future[Saved] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))

    def take(self, worker: RolloutWorker, step: int, folder: str) -> None:
        """Copy, and start writing to `folder`. Between two decode steps."""
        assert self.marker is None and self._writing is None, f"checkpoint {step} asked for while that of step {self._step} is under way"
        state = RankState(tuple(worker.outbox), tuple(unfinished_groups(worker)), random_state.capture())
        self._step, self.marker = step, step
        self._writing = self._thread.submit(_write, step, Path(folder), file_name("generation", worker.world.role_rank), state)

    def push_marker(self, producer: RingProducer) -> bool:
        """Whether groups may follow into the lane: the marker, if there is one, has found room."""
        if self.marker is not None and producer.try_push_marker(self.marker) is not None:
            self.marker = None
        return self.marker is None

    def poll(self) -> Saved | None:
        """The report for training rank 0, once the file is on the disk (or the disk has refused it) and the marker is in the lane."""
        if self._writing is None or not self._writing.done() or self.marker is not None:
            return None
        saved, self._writing = self._writing.result(), None
        return saved


def _write(step: int, folder: Path, name: str, state: RankState) -> Saved:
    """In the thread. What goes wrong is told, not raised: a full disk must not end the run."""
    try:
        file = write_state(folder, name, state)
    except OSError as error:
        return Saved(step, error=f"{name}: {error.strerror or error}")
    tokens = sum(len(sample.tokens_R) for group in state.unfinished for sample in group.samples)
    return Saved(step, (file,), len(state.finished), len(state.unfinished), tokens)


def unfinished_groups(worker: RolloutWorker) -> list[UnfinishedGroup]:
    """Copies of all groups of which some sample has a token; a ticket without one is granted anew after a restart, as if it had not been."""
    open_answers, now = worker.turns.open_answers(), time.monotonic()
    size = worker.config.train.group_size
    groups = []
    for group in worker.groups.values():
        samples = tuple(_copy(group, sample, open_answers.get(group.ticket * size + sample), now) for sample in range(group.size))
        if any(len(sample.tokens_R) for sample in samples):
            groups.append(UnfinishedGroup(group.ticket, samples, now - group.admitted_at))
    return groups + worker.resumed


def _copy(group: GroupInProgress, sample: int, still_open: tuple[Answer, bool] | None, now: float) -> UnfinishedSample:
    if still_open is not None:
        answer, has_ended = still_open
        return _unfinished(answer, now - answer.ended_at, has_ended=has_ended)
    (answer, ended_at), (verdict, graded_at) = group.completions[sample], group.verdicts[sample]
    return _unfinished(answer, now - ended_at, has_ended=True, grade=Grade(verdict.status, verdict.score, verdict.extracted, verdict.seconds, now - graded_at))


def _unfinished(answer: Answer, ended_ago_s: float, *, has_ended: bool, grade: Grade | None = None) -> UnfinishedSample:
    return UnfinishedSample(
        answer.tokens_R,
        answer.logprobs_R,
        answer.versions_R,
        ("length" if answer.truncated else "stop") if has_ended else None,
        ended_ago_s if has_ended else 0.0,
        grade,
        answer.loss_mask_R,
        answer.turns,
    )


def take_up(worker: RolloutWorker, saved: UnfinishedGroup, problem_index: int, prompt_P: np.ndarray) -> None:
    """Go on with a group from a checkpoint: its graded samples are done, the others go on where they were, half-finished ones behind the tokens they have."""
    now, config = time.monotonic(), worker.config
    group = GroupInProgress(saved.ticket, problem_index, prompt_P, config.train.group_size, now - saved.admitted_ago_s, saved.start_version)
    still_open: list[tuple[Request, Answer, bool]] = []
    for sample, part in enumerate(saved.samples):
        request = training_request(config, saved.ticket, sample, prompt_P)
        answer = Answer(
            tokens_R=part.tokens_R,
            logprobs_R=part.logprobs_R,
            versions_R=part.versions_R,
            loss_mask_R=np.ones(len(part.tokens_R), bool) if part.loss_mask_R is None else part.loss_mask_R,
            turns=part.turns,
            truncated=part.finish == "length",
            ended_at=now - part.finished_ago_s,
        )
        if part.grade is None:
            still_open.append((request, answer, part.finish is not None))
            continue
        grade = part.grade
        group.completions[sample] = (answer, answer.ended_at)
        group.verdicts[sample] = (Verdict(request.request_id, grade.status, grade.score, grade.extracted, grade.seconds), now - grade.ago_s)
        if is_saved(saved.ticket, config):
            group.texts[sample] = answer.text
    worker.groups[saved.ticket] = group
    worker.lane.producer.begin(saved.ticket)
    worker.turns.take_up(still_open, worker.problems.position("train", problem_index))
