"""Checkpoints while training goes on: a consistent cut, written by threads.

    training rank 0 (Saves)             every training rank (RankSaver)              generation rank (rollout/snapshot.py)
    step i trained ────────────────────  step i trained
    SNAPSHOT to all generation ranks ─────────────────────────────────────────────▶  copy what runs, marker into the lane
                                         copy parameters, note what is held
    publish(i), train on                 publish(i), train on; note what each        generate on
                                         lane brings up to its marker
    SAVED ◀────────────────────────────  a thread writes                      ◀────  a thread writes
    all are here: a thread writes meta.json and manifest.json, renames, deletes what is superseded

No collective is open while anybody waits: the one of torch.distributed.checkpoint runs in the threads, on a process group of its own. A save that fails (full
disk) or takes longer than `checkpoint.deadline_s` is said once and counted; the checkpoints there are stay, and training goes on. One save at a time: what is due
meanwhile is skipped and counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from areal_hpc import checkpoints
from areal_hpc.checkpoints import SavedFile, folder_of, partial_of
from areal_hpc.config import Config
from areal_hpc.groups import NEVER
from areal_hpc.observe.schema import SAVE_OUTCOMES
from areal_hpc.topology import World
from areal_hpc.train.checkpoint import copy_state, write_model_files, write_parameters
from areal_hpc.train.collect import Collector
from areal_hpc.train.trainer import Trainer
from areal_hpc.transport import random_state
from areal_hpc.transport.cut import RankState, Saved, file_name, write_state
from areal_hpc.transport.messages import Mailbox, Tag

ROOM_BYTES = 1 << 16
"""Free space that a save wants beyond what the one before took, or the parameters will take."""


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


@dataclass(slots=True)
class RankSaver:
    """A training rank's share of a checkpoint. Lifecycle: `begin`, then `poll` until it returns a report; then the next one."""

    run_dir: Path
    role_rank: int
    trainer: Trainer
    collector: Collector
    tokenizer_files: Mapping[str, bytes]
    group: dist.ProcessGroup | None
    """Of the training ranks, for the thread alone; None: there is one training rank."""
    _step: int = 0
    _parameters: Future[list[SavedFile]] | None = None
    _waiting: Future[tuple[SavedFile, int]] | None = None
    _random: dict[str, Any] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=_thread)

    @classmethod
    def create(cls, world: World, run_dir: Path, trainer: Trainer, collector: Collector, tokenizer_files: Mapping[str, bytes]) -> RankSaver:
        """Collective over the training ranks."""
        group = dist.new_group(backend="gloo", timeout=NEVER) if world.num_training > 1 else None
        return cls(run_dir, world.role_rank, trainer, collector, tokenizer_files, group)

    @property
    def busy(self) -> bool:
        """A share is under way."""
        return self._parameters is not None

    @property
    def missing(self) -> str:
        """What it waits for, for messages."""
        lanes = self.collector.lanes_before_marker()
        return f"the markers of generation ranks {lanes}" if lanes else "the disk"

    def begin(self, step: int) -> None:
        """The cut of this rank, right after training step `step`: copy parameters, note what is held, start writing. On all training ranks."""
        assert not self.busy, f"checkpoint {step} begun while that of step {self._step} is under way"
        self._step, self._random = step, random_state.capture()
        self._parameters = self._pool.submit(self._write_parameters, self._partial, copy_state(self.trainer))
        self.collector.begin_cut(step)

    def poll(self) -> Saved | None:
        """The report for training rank 0, once everything of this rank is on the disk or the disk has refused it. Never blocks."""
        if self._parameters is not None and self._waiting is None and (groups := self.collector.take_cut()) is not None:
            state = RankState(finished=tuple(groups), random=self._random)
            self._waiting = self._pool.submit(self._write_waiting, self._partial, state)
        if self._parameters is None or self._waiting is None or not self._waiting.done():  # one thread: parameters are done before
            return None
        parameters, waiting, self._parameters, self._waiting = self._parameters, self._waiting, None, None
        try:
            file, num_groups = waiting.result()
            return Saved(self._step, (*parameters.result(), file), num_finished=num_groups)
        except OSError as error:
            return Saved(self._step, error=str(error.strerror or error))

    @property
    def _partial(self) -> Path:
        return partial_of(folder_of(self.run_dir, self._step))

    def _write_parameters(self, partial: Path, state: dict[str, Any]) -> list[SavedFile]:
        files = write_parameters(partial, state, self.role_rank, self.group)
        return files + (write_model_files(partial, self.trainer.decoder_config, self.tokenizer_files) if self.role_rank == 0 else [])

    def _write_waiting(self, partial: Path, state: RankState) -> tuple[SavedFile, int]:
        return write_state(partial, file_name("training", self.role_rank), state), len(state.finished)


@dataclass(slots=True)
class Saves:
    """Training rank 0's book of checkpoints: when one is due, who has written its share, what became of it."""

    config: Config
    world: World
    mailbox: Mailbox
    run_dir: Path
    expected_bytes: int
    """What the parameters take; from the first checkpoint on, what that took."""
    say: Callable[[str, str], None]
    """(kind of event, text): into the log, and onto the terminal."""
    record: Callable[[Mapping[str, Any]], None] = lambda row: None
    """A row of /checkpoints."""
    counts: Counter[str] = field(default_factory=Counter)
    """complete, failed, skipped_busy, skipped_no_room."""
    newest: int | None = None
    """Step of the newest complete checkpoint."""
    _step: int = 0
    _meta: dict[str, Any] = field(default_factory=dict)
    _began_at: float = 0.0
    _reports: dict[int, Saved] = field(default_factory=dict)
    _under_way: bool = False
    _overdue: bool = False
    _finishing: Future[str] | None = None
    _in_trouble: bool = False
    """The latest save failed or was skipped for want of room: said once, until one succeeds."""
    _pool: ThreadPoolExecutor = field(default_factory=_thread)

    @property
    def busy(self) -> bool:
        """A checkpoint is under way, or its remains are being removed."""
        return self._under_way

    @property
    def overdue(self) -> bool:
        """The one under way has been given up; whoever still works on it has not answered."""
        return self._overdue

    @property
    def step(self) -> int:
        """That of the checkpoint under way."""
        return self._step

    @property
    def all_written(self) -> bool:
        """Every rank has done its share of the one under way."""
        return self._under_way and len(self._reports) == self.world.size

    def is_due(self, step: int) -> bool:
        """Will there be a checkpoint after this step? Decided before the step, for all training ranks; true: its folder is there, `begin` has to follow.

        The last step has one too: who then wants more steps goes on from there.
        """
        every = self.config.checkpoint.every
        if not every or (step % every and step != self.config.train.num_steps):
            return False
        if self.busy:
            self._count("skipped_busy", step)
            self.say("save_skipped", f"step {step}: no checkpoint, since that of step {self._step} is still being written")
            return False
        return self.prepare(step)

    def prepare(self, step: int) -> bool:
        """Is there room for a checkpoint of this step? Makes its folder."""
        folder = folder_of(self.run_dir, step)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            checkpoints.remove_partial(self.run_dir)
            disk = os.statvfs(folder.parent)
            free, needed = disk.f_bavail * disk.f_frsize, self.expected_bytes + ROOM_BYTES
            if free < needed:
                raise OSError(f"about {needed} bytes are needed and {free} are free")
            partial_of(folder).mkdir()
        except OSError as error:
            self._trouble("skipped_no_room", step, f"{folder.parent}: {error.strerror or error}")
            return False
        return True

    def begin(self, step: int, meta: Mapping[str, Any]) -> None:
        """The cut: every generation rank copies what is on its way. `meta`: what meta.json will hold, as of now; ready for JSON."""
        assert not self._under_way
        self._step, self._meta, self._began_at, self._reports = step, dict(meta), time.monotonic(), {}
        self._under_way, self._overdue = True, False
        folder = str(partial_of(folder_of(self.run_dir, step)))
        for rank in self.world.generation_ranks:
            self.mailbox.post(rank, Tag.SNAPSHOT, (step, folder))

    def receive(self, world_rank: int, saved: Saved) -> None:
        """A rank has done its share."""
        assert self._under_way and saved.step == self._step, f"{self.world.name_of(world_rank)} saved step {saved.step} out of turn"
        self._reports[world_rank] = saved

    def poll(self, *, is_logged: bool = True) -> None:
        """Go on with the checkpoint under way. Never blocks.

        `is_logged`: the log has the rows of all steps up to it. It is not complete before: a run that goes on from it writes the rows of later steps only.
        """
        if not self._under_way:
            return
        late_s = time.monotonic() - self._began_at - self.config.checkpoint.deadline_s
        if self._finishing is None and self.all_written and (is_logged or self._overdue):
            self._finishing = self._pool.submit(self._finish, self._why_not())
        if self._finishing is not None and self._finishing.done():
            self._end(self._finishing)
        elif late_s > 0 and not self._overdue:
            self._overdue = True
            late = [self.world.full_name_of(rank) for rank in range(self.world.size) if rank not in self._reports] or ["the disk" if is_logged else "the log"]
            self._trouble("failed", self._step, f"not written within {self.config.checkpoint.deadline_s:g} s by {', '.join(late)}")

    def _why_not(self) -> str:
        """Why the checkpoint cannot be completed though every rank has answered; empty if it can."""
        errors = [f"{self.world.name_of(rank)}: {saved.error}" for rank, saved in sorted(self._reports.items()) if saved.error]
        return "given up" if self._overdue else errors[0] if errors else ""

    def _finish(self, why_not: str) -> str:
        """In the thread: complete the folder, or remove it. Returns what to say; raises OSError with the reason of a failure."""
        folder = folder_of(self.run_dir, self._step)
        try:
            if why_not:
                raise OSError(why_not)
            reports = list(self._reports.values())
            files = [file for saved in reports for file in saved.files]
            self.expected_bytes = checkpoints.finish(folder, files, self._meta)
            gone = checkpoints.remove_superseded(self.run_dir, self.config.checkpoint.keep, self.config.checkpoint.keep_every, self._step)
        except OSError:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
            raise
        finished, unfinished, tokens = (sum(getattr(saved, name) for saved in reports) for name in ("num_finished", "num_unfinished", "num_tokens"))
        text = f"{self.expected_bytes} bytes; {finished} groups waiting, {unfinished} on their way with {tokens} tokens"
        return text + (f"; deleted: {', '.join(f'step {step}' for step in gone)}" if gone else "")

    def _end(self, finishing: Future[str]) -> None:
        self._under_way, self._finishing = False, None
        try:
            text = finishing.result()
        except OSError as error:
            if not self._overdue:
                self._trouble("failed", self._step, str(error.strerror or error))
            return
        self._count("complete", self._step)
        self.newest = self._step
        self.say("save", f"checkpoint of step {self._step}: {text}; {time.monotonic() - self._began_at:.2f} s")
        if self._in_trouble:
            self._in_trouble = False
            lost = self.counts["failed"] + self.counts["skipped_no_room"]
            self.say("save_recovered", f"checkpoints are written again, at step {self._step}; {lost} could not be written so far")

    def _count(self, outcome: str, step: int) -> None:
        """What became of the checkpoint of `step`: that under way, or one that was not begun."""
        self.counts[outcome] += 1
        now = time.monotonic()
        begun = self._began_at if step == self._step else now
        complete = outcome == "complete"
        row: dict[str, Any] = {"step": step, "begun_s": begun, "seconds": now - begun, "outcome": SAVE_OUTCOMES.index(outcome)}
        row |= {"bytes": self.expected_bytes if complete else 0}
        found = self._reports.values() if complete else ()
        for column, name in (("waiting_groups", "num_finished"), ("unfinished_groups", "num_unfinished"), ("unfinished_tokens", "num_tokens")):
            row[column] = sum(getattr(saved, name) for saved in found)
        self.record(row)

    def _trouble(self, count: str, step: int, why: str) -> None:
        """A checkpoint could not be written: counted, and said once until one can be written again."""
        self._count(count, step)
        if not self._in_trouble:
            self._in_trouble = True
            kept = "there is no older one" if self.newest is None else f"that of step {self.newest} stays"
            self.say("save_failed", f"warning: no checkpoint of step {step}: {why}; {kept}, training goes on, the next one that is due is tried again")
