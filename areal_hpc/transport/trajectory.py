"""The record that crosses the ring: one group, that is the n answers to one prompt, as 64-byte-aligned columns.

    sample table  n x SAMPLE_DTYPE   one fixed-size row per answer
    prompt_P      int32              tokens of the prompt, once
    tokens_R      int32              tokens of all answers back to back, stop tokens included
    logprobs_R    float32            log-probability of each token under the policy that sampled it (pi_behav)
    versions_R    int32              policy version that sampled each token
    loss_mask_R   uint8              1: the model sampled this token, and it trains; 0: an environment put it there between two turns

The ring adds its own 64-byte header (see ring.py), which carries the ticket and the version range, so that the batch can be composed without touching payloads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64


class Status(enum.IntEnum):
    """Why an answer has, or has not, a reward. Only graded answers train."""

    RIGHT = 0
    WRONG = 1
    NO_ANSWER = 2
    TRUNCATED = 3
    TIMEOUT = 4
    INFRA_ERROR = 5
    HOSTILE = 6
    GOLD_BAD = 7


GRADED = (Status.RIGHT, Status.WRONG, Status.NO_ANSWER, Status.TRUNCATED, Status.TIMEOUT, Status.HOSTILE)
"""Statuses that come with a reward; the others are counted and never train. Their meaning: areal_hpc.reward.verdict.Outcome, which has the same names."""

SAMPLE_DTYPE = np.dtype(
    [
        ("num_tokens", "<i4"),  # of the whole answer, an environment's tokens included: what it takes to compute
        ("num_sampled", "<i4"),  # of these, the model's own: what trains
        ("num_turns", "<i4"),  # of the model
        ("status", "<i4"),
        ("reward", "<f4"),
        ("version_min", "<i4"),
        ("version_max", "<i4"),
        ("generated_s", "<f4"),  # first admission to last token
        ("graded_s", "<f4"),  # last token to verdict
        ("sample", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer with everything the trainer needs."""

    ticket: int
    sample: int
    prompt_P: np.ndarray
    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    versions_R: np.ndarray
    loss_mask_R: np.ndarray
    """bool: the model sampled this token. An environment's tokens have log-probability 0 and the version of the model's token before them; they never train."""
    reward: float
    status: Status
    generated_s: float = 0.0
    graded_s: float = 0.0
    num_turns: int = 1
    """Of the model."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.prompt_P) + len(self.tokens_R)

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer that the model sampled."""
        return int(self.loss_mask_R.sum())

    @property
    def start_version(self) -> int:
        """Version of the first token: the oldest, since versions only rise."""
        return int(self.versions_R[0])


@dataclass(frozen=True, slots=True)
class Group:
    """The n answers to the prompt of one ticket."""

    ticket: int
    trajectories: tuple[Trajectory, ...]

    @property
    def start_version(self) -> int:
        return min(t.start_version for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _columns(num_samples: int, prompt: int, answers: int) -> list[tuple[int, int, np.dtype]]:
    """(offset, count, dtype) of each column behind the 64-byte preamble."""
    columns, offset = [], ALIGNMENT
    for count, dtype in (
        (num_samples, SAMPLE_DTYPE),
        (prompt, np.dtype("<i4")),
        (answers, np.dtype("<i4")),
        (answers, np.dtype("<f4")),
        (answers, np.dtype("<i4")),
        (answers, np.dtype("u1")),
    ):
        columns.append((offset, count, dtype))
        offset = _aligned(offset + count * dtype.itemsize)
    return columns


def group_bytes(group: Group) -> int:
    """Payload bytes of the record."""
    answers = sum(len(t.tokens_R) for t in group.trajectories)
    offset, count, dtype = _columns(len(group.trajectories), len(group.trajectories[0].prompt_P), answers)[-1]
    return _aligned(offset + count * dtype.itemsize)


def write_group(group: Group, buffer: memoryview | np.ndarray) -> None:
    """Write the record into a reserved slot of `group_bytes(group)` bytes."""
    raw = np.frombuffer(buffer, np.uint8)
    first = group.trajectories[0]
    answers = sum(len(t.tokens_R) for t in group.trajectories)
    raw[:ALIGNMENT].view("<i8")[:4] = (group.ticket, len(group.trajectories), len(first.prompt_P), answers)
    table, prompt, tokens, logprobs, versions, mask = _views(raw)
    prompt[:] = first.prompt_P
    start = 0
    for row, t in zip(table, group.trajectories, strict=True):
        stop = start + len(t.tokens_R)
        row["num_tokens"], row["num_sampled"], row["num_turns"] = len(t.tokens_R), t.num_sampled, t.num_turns
        row["status"], row["reward"] = int(t.status), t.reward
        row["version_min"], row["version_max"] = t.versions_R.min(), t.versions_R.max()
        row["generated_s"], row["graded_s"], row["sample"] = t.generated_s, t.graded_s, t.sample
        tokens[start:stop], logprobs[start:stop], versions[start:stop], mask[start:stop] = t.tokens_R, t.logprobs_R, t.versions_R, t.loss_mask_R
        start = stop


def _views(raw: np.ndarray) -> list[np.ndarray]:
    ticket_n_prompt_answers = raw[:ALIGNMENT].view("<i8")
    _, num_samples, prompt, answers = (int(x) for x in ticket_n_prompt_answers[:4])
    return [raw[offset : offset + count * dtype.itemsize].view(dtype) for offset, count, dtype in _columns(num_samples, prompt, answers)]


def record_size(buffer: memoryview | np.ndarray) -> int:
    """Bytes of the record that starts here."""
    _, num_samples, prompt, answers = (int(x) for x in np.frombuffer(buffer, "<i8", 4))
    offset, count, dtype = _columns(num_samples, prompt, answers)[-1]
    return _aligned(offset + count * dtype.itemsize)


def read_table(buffer: memoryview | np.ndarray) -> tuple[int, int, np.ndarray]:
    """(ticket, prompt tokens, copy of the sample table) of a record: what composing a batch needs."""
    raw = np.frombuffer(buffer, np.uint8)
    head = raw[:ALIGNMENT].view("<i8")
    return int(head[0]), int(head[2]), _views(raw)[0].copy()


def read_group(buffer: memoryview | np.ndarray) -> Group:
    """The group of a record; all columns are copies, so the slot may be released."""
    raw = np.frombuffer(buffer, np.uint8)
    ticket = int(raw[:ALIGNMENT].view("<i8")[0])
    table, prompt, tokens, logprobs, versions, mask = (view.copy() for view in _views(raw))
    stops = np.cumsum(table["num_tokens"])
    trajectories = tuple(
        Trajectory(
            ticket=ticket,
            sample=int(row["sample"]),
            prompt_P=prompt,
            tokens_R=tokens[stop - row["num_tokens"] : stop],
            logprobs_R=logprobs[stop - row["num_tokens"] : stop],
            versions_R=versions[stop - row["num_tokens"] : stop],
            reward=float(row["reward"]),
            status=Status(int(row["status"])),
            generated_s=float(row["generated_s"]),
            graded_s=float(row["graded_s"]),
            loss_mask_R=mask[stop - row["num_tokens"] : stop].astype(bool),
            num_turns=int(row["num_turns"]),
        )
        for row, stop in zip(table, stops, strict=True)
    )
    return Group(ticket, trajectories)
