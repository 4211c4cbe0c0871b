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
from areal_hpc.rollout.engines.base import Begun, Completion, Request
from areal_hpc.rollout.groups import GroupInProgress, training_request
from areal_hpc.transport import random_state
from areal_hpc.transport.cut import Grade, RankState, Saved, UnfinishedGroup, UnfinishedSample, file_name, write_state
from areal_hpc.transport.samples import is_saved

if TYPE_CHECKING:
    from areal_hpc.rollout.worker import RolloutWorker
    from areal_hpc.transport.ring import RingProducer

_NOTHING = Begun(tokens_R=np.empty(0, np.int32), logprobs_R=np.empty(0, np.float32), versions_R=np.empty(0, np.int32))


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
    begun, now = worker.engine.running(), time.monotonic()
    size = worker.config.train.group_size
    groups = []
    for group in worker.groups.values():
        samples = tuple(_copy(group, sample, begun.get(group.ticket * size + sample, _NOTHING), now) for sample in range(group.size))
        if any(len(sample.tokens_R) for sample in samples):
            groups.append(UnfinishedGroup(group.ticket, samples, now - group.admitted_at))
    return groups + worker.resumed


def _copy(group: GroupInProgress, sample: int, begun: Begun, now: float) -> UnfinishedSample:
    if sample not in group.completions:
        return UnfinishedSample(begun.tokens_R, begun.logprobs_R, begun.versions_R)
    completion, finished_at = group.completions[sample]
    grade = None
    if sample in group.verdicts:
        verdict, graded_at = group.verdicts[sample]
        grade = Grade(verdict.status, verdict.score, verdict.extracted, verdict.seconds, now - graded_at)
    return UnfinishedSample(completion.tokens_R, completion.logprobs_R, completion.versions_R, completion.finish, now - finished_at, grade)


def take_up(worker: RolloutWorker, saved: UnfinishedGroup, problem_index: int, prompt_P: np.ndarray) -> None:
    """Go on with a group from a checkpoint: half-finished samples to the engine, behind the tokens they have; finished ones to the reward service unless graded."""
    now, config = time.monotonic(), worker.config
    group = GroupInProgress(saved.ticket, problem_index, prompt_P, config.train.group_size, now - saved.admitted_ago_s, saved.start_version)
    requests: list[Request] = []
    for sample, part in enumerate(saved.samples):
        if part.finish is None:
            begun = Begun(tokens_R=part.tokens_R, logprobs_R=part.logprobs_R, versions_R=part.versions_R) if len(part.tokens_R) else None
            requests.append(training_request(config, saved.ticket, sample, prompt_P, begun))
            continue
        job_id = saved.ticket * group.size + sample
        completion = Completion(request_id=job_id, tokens_R=part.tokens_R, logprobs_R=part.logprobs_R, versions_R=part.versions_R, finish=part.finish)
        group.completions[sample] = (completion, now - part.finished_ago_s)
        text = worker.tokenizer.decode(part.tokens_R)
        if is_saved(saved.ticket, config):
            group.texts[sample] = text
        if part.grade is None:
            worker.rewards.submit(job_id, worker.problems.position("train", problem_index), text, truncated=part.finish == "length")
        else:
            grade = part.grade
            group.verdicts[sample] = (Verdict(job_id, grade.status, grade.score, grade.extracted, grade.seconds), now - grade.ago_s)
    worker.groups[saved.ticket] = group
    worker.lane.producer.begin(saved.ticket)
    worker.engine.add(requests)
