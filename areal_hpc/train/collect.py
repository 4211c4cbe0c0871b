"""From ring lanes to this rank's share of the batch.

Each training rank empties the lanes it owns (g mod T) into host memory and reports what arrived to training rank 0. Training rank 0 composes the batch and
sends the plan to all; the payloads then move once, by Alltoallv of bytes, from the rank that holds them to the rank that trains them.
A checkpoint's cut goes through here: from `begin_cut` on, what is held and what each lane brings before its marker is also noted for the checkpoint.
Host memory is bounded by the gate; without a gate (eta = inf) lanes are left full beyond `max_held`, and the ring holds the generators back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc.train.trainer import LocalBatch
from areal_hpc.transport.lanes import Incoming
from areal_hpc.transport.ring import ProducerDead, Record, RingConsumer
from areal_hpc.transport.trajectory import Group, Trajectory, group_bytes, read_group, read_table, record_size, write_group

if TYPE_CHECKING:
    from mpi4py import MPI

    from areal_hpc.train.compose import Plan


EARLIER = -1
"""In place of a generation rank: the group was finished in an earlier attempt."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What training rank 0 learns of a group: everything but the columns."""

    ticket: int
    generation_rank: int
    owner: int
    """Training rank that holds the payload."""
    start_version: int
    prompt_tokens: int
    table: np.ndarray
    """One SAMPLE_DTYPE row per answer (trajectory.py)."""
    arrived_at: float = math.nan
    """When training rank 0 heard of it, on its clock."""
    waited_s: float = math.nan
    """From then until it was closed or taken into a batch."""


@dataclass(slots=True)
class _CutUnderWay:
    """What waits to be trained at a cut, as far as it is known."""

    marker: int
    groups: dict[int, Group]
    lanes: set[int]
    """Generation ranks whose marker has yet to come."""


@dataclass(slots=True)
class Collector:
    """The consuming end of this training rank's lanes."""

    role_rank: int
    lanes: Incoming
    max_held: int
    """Groups kept in host memory before records are left in their lanes."""
    held: dict[int, Group] = field(default_factory=dict)
    _cut: _CutUnderWay | None = None
    _put_back: list[Arrival] = field(default_factory=list)
    _order: deque[int] = field(init=False)
    """Generation ranks, the one whose lane is looked at next first."""

    def __post_init__(self) -> None:
        self._order = deque(self.lanes.consumers)

    def drain(self) -> list[Arrival]:
        """Take all records that are there, first what was put back. Never blocks.

        Raises RuntimeError that names the generation rank behind an empty lane whose process has died.
        """
        self.lanes.receiver.progress()
        arrivals, self._put_back = self._put_back, []
        num_empty = 0
        while len(self.held) < self.max_held and num_empty < len(self._order):  # one record a lane in turn: under `max_held` none may starve
            generation_rank = self._order[0]
            self._order.rotate(-1)
            record = self._peek(generation_rank, self.lanes.consumers[generation_rank])
            if record is None:
                num_empty += 1
                continue
            num_empty = 0
            if record.kind == "marker":
                if self._cut is not None and record.ticket == self._cut.marker:
                    self._cut.lanes.discard(generation_rank)
                record.release()
                continue
            ticket, prompt_tokens, table = read_table(record.buffer)
            self.held[ticket] = read_group(record.buffer)
            record.release()
            if self._cut is not None and generation_rank in self._cut.lanes:
                self._cut.groups[ticket] = self.held[ticket]
            arrivals.append(Arrival(ticket, generation_rank, self.role_rank, int(table["version_min"].min()), prompt_tokens, table))
        return arrivals

    def put_back(self, groups: Sequence[Group], generation_rank: int = EARLIER) -> None:
        """Groups that came by no lane, as those that waited at the cut of the checkpoint from which the run goes on: they arrive with the next `drain`."""
        for group in groups:
            record = np.zeros(group_bytes(group), np.uint8)
            write_group(group, record)
            ticket, prompt_tokens, table = read_table(record)
            self.held[ticket] = group
            self._put_back.append(Arrival(ticket, generation_rank, self.role_rank, group.start_version, prompt_tokens, table))

    def begin_cut(self, marker: int) -> None:
        """The cut of a checkpoint, between two batches: what is held now belongs to it, and what comes before the marker of each lane."""
        self._cut = _CutUnderWay(marker, dict(self.held), set(self.lanes.consumers))

    def take_cut(self) -> list[Group] | None:
        """All groups of the cut, by ticket, once the marker of every lane is here; None before."""
        if self._cut is None or self._cut.lanes:
            return None
        cut, self._cut = self._cut, None
        return [cut.groups[ticket] for ticket in sorted(cut.groups)]

    def lanes_before_marker(self) -> list[int]:
        """Generation ranks whose marker has not come."""
        return sorted(self._cut.lanes) if self._cut is not None else []

    def _peek(self, generation_rank: int, lane: RingConsumer) -> Record | None:
        try:
            return lane.peek()
        except ProducerDead as error:
            raise self._lost(generation_rank, error) from error

    def check_producers(self) -> None:
        """Raises RuntimeError that names a generation rank of another node that has fallen silent. Never blocks."""
        try:
            self.lanes.receiver.progress()
            self.lanes.receiver.check()
        except ProducerDead as error:
            raise self._lost(error.lane, error) from error

    def _lost(self, generation_rank: int, error: ProducerDead) -> RuntimeError:
        told = generation_rank in self.lanes.receiver.lanes  # by the forwarder, which knows names
        return RuntimeError(str(error) if told else f"{self.lanes.names[generation_rank]} is lost: {error}")

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget groups that will not be trained."""
        for ticket in tickets:
            self.held.pop(ticket, None)


def exchange(plan: Plan, collector: Collector, role_comm: MPI.Comm) -> LocalBatch:
    """Move the payloads of the planned batch to the ranks that train them. Collective over the training ranks."""
    from mpi4py import MPI

    outgoing = [_pack(plan, collector, destination) for destination in range(role_comm.size)]
    collector.drop([int(ticket) for ticket in set(plan.ticket_S.tolist())])
    send_sizes = np.array([len(block) for block in outgoing], np.int64)
    receive_sizes = np.empty_like(send_sizes)
    role_comm.Alltoall(send_sizes, receive_sizes)
    received = np.empty(int(receive_sizes.sum()), np.uint8)
    send = [np.concatenate(outgoing), (send_sizes, _offsets(send_sizes)), MPI.BYTE]
    role_comm.Alltoallv(send, [received, (receive_sizes, _offsets(receive_sizes)), MPI.BYTE])
    return _local_batch(plan, _unpack(received), role_comm.rank)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def _pack(plan: Plan, collector: Collector, destination: int) -> np.ndarray:
    """The samples held here that `destination` trains, as records of partial groups."""
    mine = (plan.rank_S == destination) & (plan.owner_S == collector.role_rank)
    records = []
    for ticket in dict.fromkeys(plan.ticket_S[mine].tolist()):
        chosen = set(plan.sample_S[mine & (plan.ticket_S == ticket)].tolist())
        group = Group(ticket, tuple(t for t in collector.held[ticket].trajectories if t.sample in chosen))
        record = np.zeros(group_bytes(group), np.uint8)
        write_group(group, record)
        records.append(record)
    return np.concatenate(records) if records else np.empty(0, np.uint8)


def _unpack(received: np.ndarray) -> dict[tuple[int, int], Trajectory]:
    found, offset = {}, 0
    while offset < len(received):
        stop = offset + record_size(received[offset:])
        for trajectory in read_group(received[offset:stop]).trajectories:
            found[trajectory.ticket, trajectory.sample] = trajectory
        offset = stop
    return found


def _local_batch(plan: Plan, found: dict[tuple[int, int], Trajectory], role_rank: int) -> LocalBatch:
    mine = np.flatnonzero(plan.rank_S == role_rank)
    return LocalBatch(
        trajectories=[found[int(plan.ticket_S[s]), int(plan.sample_S[s])] for s in mine],
        advantage_S=plan.advantage_S[mine],
        weight_S=plan.weight_S[mine],
        minibatch_S=plan.minibatch_S[mine],
        microbatch_S=plan.microbatch_S[mine],
        num_microbatches=plan.num_microbatches,
        trained_tokens=plan.trained_tokens,
        denominators=plan.denominators,
    )
