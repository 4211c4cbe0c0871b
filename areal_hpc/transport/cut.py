"""What is on its way at a consistent cut of a run: groups that wait to be trained, and groups that are still sampled or graded; as files, and dealt out again.

A checkpoint holds one file per rank, `rank-generation-3.safetensors` or `rank-training-0.safetensors` (no pickle in it), of these tensors:

    finished_F                            FINISHED_COLUMNS of each group that is complete, int64
    finished_records                      uint8, their ring records (trajectory.py) back to back
    group_U                               GROUP_COLUMNS of each group that is not complete, float64
    sample_UN                             SAMPLE_COLUMNS of each of its n samples, float64
    tokens_R, logprobs_R, versions_R      of all those samples back to back, and loss_mask_R, 0 at tokens of an environment (uint8)
    turns                                 uint8: JSON, for each sample the texts of its turns that have ended
    random.*                              the rank's random number generators (random_state.py)

and, as metadata, the texts of extracted answers. Shapes: F finished groups, U unfinished ones, n samples a group, R tokens.
On resume every rank reads the tables of all files, which are small, and the contents of its own share: `Cut.open`, then `finished_of` or `unfinished_of`. The
number of ranks may be another one. A ticket is taken once, whatever the files hold: closed counts before finished, finished before unfinished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from areal_hpc.checkpoints import SavedFile, read_meta, slow_down, sync
from areal_hpc.config import ConfigError
from areal_hpc.intervals import IntervalSet
from areal_hpc.transport.trajectory import Group, Status, group_bytes, read_group, write_group

FINISHED_COLUMNS = ("ticket", "start_version", "num_bytes")
GROUP_COLUMNS = ("ticket", "start_version", "admitted_ago_s", "num_samples")
SAMPLE_COLUMNS = ("num_tokens", "finish", "status", "score", "seconds", "finished_ago_s", "graded_ago_s")
FINISHES: tuple[Literal["stop", "length"], ...] = ("stop", "length")
NOT_YET = -1


@dataclass(frozen=True, slots=True)
class Grade:
    """What the reward service said of a sample."""

    status: Status
    score: float | None
    extracted: str | None
    seconds: float
    ago_s: float
    """Seconds from its arrival to the cut."""


@dataclass(frozen=True, slots=True)
class UnfinishedSample:
    """One answer at the cut: not begun (R = 0), half sampled, sampled, or graded."""

    tokens_R: np.ndarray
    """int32 [R]."""
    logprobs_R: np.ndarray
    """float32 [R]."""
    versions_R: np.ndarray
    """int32 [R]."""
    finish: Literal["stop", "length"] | None = None
    """How its last turn ended; None: more tokens are to be sampled in this one."""
    finished_ago_s: float = 0.0
    """Seconds from the last token to the cut."""
    grade: Grade | None = None
    loss_mask_R: np.ndarray | None = None
    """bool [R]: sampled by the model. None: all of them."""
    turns: tuple[str, ...] = ()
    """Texts of the turns that have ended, the model's and the environment's in turn."""


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group of which some sample is not graded, and some sample has a token."""

    ticket: int
    samples: tuple[UnfinishedSample, ...]
    admitted_ago_s: float = 0.0
    """Seconds from admission to the cut."""

    @property
    def start_version(self) -> int:
        """Version of its oldest token."""
        return min(int(sample.versions_R[0]) for sample in self.samples if len(sample.versions_R))


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank contributes to a cut."""

    finished: tuple[Group, ...] = ()
    unfinished: tuple[UnfinishedGroup, ...] = ()
    random: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """Body of the SAVED message: what a rank has written for the checkpoint of a step, or why it could not."""

    step: int
    files: tuple[SavedFile, ...] = ()
    num_finished: int = 0
    num_unfinished: int = 0
    num_tokens: int = 0
    """Tokens of the unfinished groups."""
    error: str = ""


def file_name(role: str, role_rank: int) -> str:
    """Of the file of one rank, inside the checkpoint's folder."""
    return f"rank-{role}-{role_rank}.safetensors"


def write_state(folder: Path, name: str, state: RankState) -> SavedFile:
    """Write one rank's file and push it to the disk. Raises OSError."""
    slow_down()
    tensors = _finished_tensors(state.finished) | _unfinished_tensors(state.unfinished)
    tensors |= {f"random.{key}": value for key, value in state.random.items()}
    extracted = [[None if sample.grade is None else sample.grade.extracted for sample in group.samples] for group in state.unfinished]
    data = save(tensors, {"extracted": json.dumps(extracted)})
    path = folder / name
    with path.open("wb") as file:  # not safetensors' own writer: it hides the reason of a failure
        file.write(data)
    sync(path)
    return SavedFile.of(folder, name)


def _finished_tensors(groups: Iterable[Group]) -> dict[str, np.ndarray]:
    rows, records = [], []
    for group in groups:
        record = np.zeros(group_bytes(group), np.uint8)
        write_group(group, record)
        rows.append((group.ticket, group.start_version, len(record)))
        records.append(record)
    return {
        "finished_F": np.array(rows, np.int64).reshape(len(rows), len(FINISHED_COLUMNS)),
        "finished_records": np.concatenate([np.empty(0, np.uint8), *records]),
    }


def _unfinished_tensors(groups: Iterable[UnfinishedGroup]) -> dict[str, np.ndarray]:
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    group_rows = [(group.ticket, group.start_version, group.admitted_ago_s, len(group.samples)) for group in groups]
    empty: dict[str, np.ndarray] = {"tokens_R": np.empty(0, np.int32), "logprobs_R": np.empty(0, np.float32), "versions_R": np.empty(0, np.int32)}
    columns = {name: np.concatenate([nothing, *(getattr(sample, name).astype(nothing.dtype) for sample in samples)]) for name, nothing in empty.items()}
    columns["loss_mask_R"] = np.concatenate([np.empty(0, np.uint8), *(_mask(sample).astype(np.uint8) for sample in samples)])
    turns = json.dumps([[list(sample.turns) for sample in group.samples] for group in groups])
    return {
        "turns": np.frombuffer(turns.encode(), np.uint8),
        "group_U": np.array(group_rows, np.float64).reshape(len(groups), len(GROUP_COLUMNS)),
        "sample_UN": np.array([_sample_row(sample) for sample in samples], np.float64).reshape(len(samples), len(SAMPLE_COLUMNS)),
        **columns,
    }


def _mask(sample: UnfinishedSample) -> np.ndarray:
    return np.ones(len(sample.tokens_R), bool) if sample.loss_mask_R is None else sample.loss_mask_R


def _sample_row(sample: UnfinishedSample) -> tuple[float, ...]:
    finish = NOT_YET if sample.finish is None else FINISHES.index(sample.finish)
    grade = sample.grade
    if grade is None:
        return (len(sample.tokens_R), finish, NOT_YET, math.nan, 0.0, sample.finished_ago_s, 0.0)
    score = math.nan if grade.score is None else grade.score
    return (len(sample.tokens_R), finish, int(grade.status), score, grade.seconds, sample.finished_ago_s, grade.ago_s)


@dataclass(frozen=True, slots=True)
class Restart:
    """The checkpoint that a run goes on from, as every rank sees it."""

    folder: Path
    meta: Mapping[str, Any]
    cut: Cut

    @classmethod
    def open(cls, folder: Path) -> Restart:
        """Raises ConfigError when the checkpoint is not complete."""
        meta = read_meta(folder)
        return cls(folder, meta, Cut.open(folder, IntervalSet.from_list(meta["closed_tickets"])))

    def check_data(self, fingerprint: str) -> None:
        """Raises ConfigError when tickets would name other problems than before."""
        if self.meta["fingerprint"] != fingerprint:
            raise ConfigError(f"{self.folder}: saved with data of fingerprint {self.meta['fingerprint']}, these have {fingerprint}; use the same data")


@dataclass(frozen=True, slots=True)
class _FinishedAt:
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _UnfinishedAt:
    path: Path
    row: int


@dataclass(slots=True)
class Cut:
    """Everything that was on its way at a cut, by ticket; contents are read when they are asked for."""

    folder: Path
    closed: IntervalSet
    """Tickets trained or rejected before the cut."""
    start_version: dict[int, int] = field(default_factory=dict)
    """Ticket, finished or not -> version of its oldest token."""
    num_duplicates: int = 0
    """Groups that the files hold beside another of the same ticket, which are not taken."""
    _finished: dict[int, _FinishedAt] = field(default_factory=dict)
    _unfinished: dict[int, _UnfinishedAt] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, closed: IntervalSet) -> Cut:
        """Read the tables of all ranks' files. Raises OSError or SafetensorError for one that is damaged."""
        cut = cls(folder, closed)
        unfinished: dict[int, tuple[_UnfinishedAt, int]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                offset = 0
                for ticket, start_version, num_bytes in file.get_tensor("finished_F").tolist():
                    where = _FinishedAt(path, offset, num_bytes)
                    offset += num_bytes
                    if ticket in closed:
                        continue  # rejected by training rank 0; the rank that held it had not heard of it
                    if ticket in cut._finished:
                        cut.num_duplicates += 1
                    else:
                        cut._finished[ticket], cut.start_version[ticket] = where, start_version
                for row, (number, version, *_) in enumerate(file.get_tensor("group_U").tolist()):
                    ticket, start_version = int(number), int(version)
                    cut.num_duplicates += ticket in unfinished
                    unfinished.setdefault(ticket, (_UnfinishedAt(path, row), start_version))
        for ticket, (begun_at, start_version) in unfinished.items():
            if ticket in closed or ticket in cut._finished:
                cut.num_duplicates += 1
            else:
                cut._unfinished[ticket], cut.start_version[ticket] = begun_at, start_version
        return cut

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def known(self) -> IntervalSet:
        """Tickets that must not be granted again: closed, finished, unfinished."""
        found = IntervalSet.from_list(self.closed.to_list())
        for ticket in (*self._finished, *self._unfinished):
            found.add(ticket)
        return found

    def finished_of(self, role_rank: int, num_training: int) -> list[Group]:
        """The share of a training rank: every `num_training`-th finished group, by ticket."""
        groups = []
        for ticket in sorted(self._finished)[role_rank::num_training]:
            where = self._finished[ticket]
            with safe_open(where.path, framework="numpy") as file:
                record = file.get_slice("finished_records")[where.offset : where.offset + where.num_bytes]
            groups.append(read_group(np.array(record)))
        return groups

    def unfinished_of(self, role_rank: int, num_generation: int, *, static: bool) -> list[UnfinishedGroup]:
        """The share of a generation rank, by ticket: every `num_generation`-th unfinished group, or (static, eta = 0) the tickets that are this rank's anyway."""
        tickets = sorted(self._unfinished)
        mine = [ticket for ticket in tickets if ticket % num_generation == role_rank] if static else tickets[role_rank::num_generation]
        return [_read_unfinished(self._unfinished[ticket]) for ticket in mine]

    def random_of(self, role: str, role_rank: int) -> dict[str, np.ndarray]:
        """State of that rank's random number generators; empty if there was no such rank."""
        path = self.folder / file_name(role, role_rank)
        if not path.exists():
            return {}
        with safe_open(path, framework="numpy") as file:
            return {name.removeprefix("random."): file.get_tensor(name) for name in file.keys() if name.startswith("random.")}  # noqa: SIM118 (not a mapping)


def _read_unfinished(where: _UnfinishedAt) -> UnfinishedGroup:
    with safe_open(where.path, framework="numpy") as file:
        group_U, sample_UN = file.get_tensor("group_U"), file.get_tensor("sample_UN")
        extracted = json.loads(file.metadata()["extracted"])[where.row]
        first = int(group_U[: where.row, 3].sum())
        rows = sample_UN[first : first + int(group_U[where.row, 3])]
        start, num_tokens = int(sample_UN[:first, 0].sum()), rows[:, 0].astype(int)
        tokens = slice(start, start + int(num_tokens.sum()))  # never empty: some sample has a token
        columns = [np.array(file.get_slice(name)[tokens]) for name in ("tokens_R", "logprobs_R", "versions_R", "loss_mask_R")]
        turns = json.loads(file.get_tensor("turns").tobytes())[where.row]
    cuts = np.cumsum(num_tokens)[:-1]
    parts = zip(*(np.split(column, cuts) for column in columns), strict=True)
    samples = [
        _read_sample(dict(zip(SAMPLE_COLUMNS, row.tolist(), strict=True)), part, text, tuple(texts))
        for row, part, text, texts in zip(rows, parts, extracted, turns, strict=True)
    ]
    return UnfinishedGroup(int(group_U[where.row, 0]), tuple(samples), float(group_U[where.row, 2]))


def _read_sample(row: dict[str, float], columns: tuple[np.ndarray, ...], extracted: str | None, turns: tuple[str, ...]) -> UnfinishedSample:
    grade = None
    if row["status"] != NOT_YET:
        score = None if math.isnan(row["score"]) else row["score"]
        grade = Grade(Status(int(row["status"])), score, extracted, row["seconds"], row["graded_ago_s"])
    finish = None if row["finish"] == NOT_YET else FINISHES[int(row["finish"])]
    tokens_R, logprobs_R, versions_R, loss_mask_R = columns
    return UnfinishedSample(tokens_R, logprobs_R, versions_R, finish, row["finished_ago_s"], grade, loss_mask_R.astype(bool), turns)
