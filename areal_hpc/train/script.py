"""A training rank in a replay: batches are those of the tape, and what is trained, and what it gives, is compared with the tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc.guard import Difference
from areal_hpc.observe.schema import CALLS
from areal_hpc.staleness import NO_LIMIT, Ledger
from areal_hpc.topology import World
from areal_hpc.train.sharding import Shard
from areal_hpc.train.tape import NoTape, batch_rows, checksums, minibatch_rows
from areal_hpc.train.trainer import LocalBatch
from areal_hpc.transport.tape import Replay, Tape, of_role, tapes_of_replay

if TYPE_CHECKING:
    from areal_hpc.train.loop import TrainingRank

UNBOUNDED_HELD = 2**62


@dataclass(slots=True)
class ScriptedLedger(Ledger):
    """Composes the recorded batches, each as soon as its groups are here; what no batch needs is closed when it comes."""

    batches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Policy version -> tickets of the batch that was trained in it."""
    _needed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._needed = {ticket for batch in self.batches.values() for ticket in batch}

    @property
    def limit(self) -> int:
        """Nothing is gated: the tapes say which tickets start."""
        return NO_LIMIT

    def compose(self) -> list[int] | None:
        for ticket in [ticket for ticket in self.waiting if ticket not in self._needed]:
            self.reject(ticket, "stale")
        batch = self.batches.get(self.policy_version)
        if batch is None or not all(ticket in self.waiting for ticket in batch):
            return None
        for ticket in batch:
            del self.waiting[ticket]
            self._close(ticket, "trained")
        return sorted(batch)


class Script(NoTape):
    """Compares with the tape of this rank. Any difference, on whatever rank, is raised on all training ranks."""

    keeps_results = False

    def __init__(self, replay: Replay, world: World, tapes: Sequence[Tape]) -> None:
        """`tapes`: of all ranks."""
        self._num_steps, self._world, self._tapes = replay.num_steps, world, of_role(tapes, "training")
        self._calls = [tape.table("calls") for tape in of_role(tapes, "generation")]
        self.tape = self._tapes[world.role_rank]
        self._num_trajectories = self._num_tensors = 0

    def attach(self, rank: TrainingRank) -> None:
        rank.collector.max_held = UNBOUNDED_HELD  # groups may come in another order than those of the batches
        head = rank.head
        if head is None:
            return
        ledger = head.composer.ledger
        batches = {step - 1: self._tickets(step) for step in range(ledger.policy_version + 1, self._num_steps + 1)}
        head.composer.ledger = ScriptedLedger(ledger.eta, ledger.mode, ledger.groups_per_batch, policy_version=ledger.policy_version, batches=batches)
        head.replayed_steps = self._num_steps

    def _tickets(self, step: int) -> list[int]:
        return np.unique(np.concatenate([tape.at_step("batches", step)["ticket"] for tape in self._tapes])).tolist()

    def weights(self, step: int, shards: Sequence[Shard]) -> None:
        self._agree(step, self._tensor_difference(step, shards))

    def step(self, step: int, batch: LocalBatch, shards: Sequence[Shard]) -> None:
        self._agree(step, self._batch_difference(step, batch))
        self._agree(step, self._tensor_difference(step, shards))

    def summary(self, rank: TrainingRank) -> dict[str, int]:
        finals = rank.head.recorder.finals.values() if rank.head is not None else ()
        return self.conclude(rank.trainer.policy_version, sum(counters["compared_answers"] for counters in finals))

    def conclude(self, num_steps: int, num_answers: int) -> dict[str, int]:
        """Say that all was equal, and return what was compared, over all ranks. Collective over the training ranks."""
        trajectories, tensors = np.sum(self._world.role_comm.allgather((self._num_trajectories, self._num_tensors)), axis=0).tolist()
        if self._world.is_first_trainer:
            recorded = sum(int((calls["kind"] == CALLS.index("finish")).sum()) for calls in self._calls)
            answers = f"{num_answers} of {recorded} recorded answers, " if num_answers else ""
            print(f"equal: {num_steps} steps, {answers}{trajectories} trajectories, {tensors} checksums of tensors", flush=True)
        return {"compared_answers": num_answers, "compared_trajectories": trajectories, "compared_tensors": tensors}

    def _agree(self, step: int, difference: str | None) -> None:
        """Raises Difference with the first rank's, if any rank has one. Collective."""
        for role_rank, found in enumerate(self._world.role_comm.allgather(difference)):
            if found is not None:
                raise Difference(f"step {step}, rank {self._tapes[role_rank].attributes['rank']} (training {role_rank}): {found}")

    def _batch_difference(self, step: int, batch: LocalBatch) -> str | None:
        found, recorded = batch_rows(step, batch), self.tape.at_step("batches", step)
        if len(found) != len(recorded):
            return f"{len(found)} trajectories in the batch, recorded {len(recorded)}"
        for position, (row, expected) in enumerate(zip(found, recorded, strict=True)):
            for column in found.dtype.names or ():
                if row[column] != expected[column] and not (np.isnan(row[column]) and np.isnan(expected[column])):
                    where = f"trajectory {position} of the batch (ticket {row['ticket']}, sample {row['sample']})"
                    return f"{where}: {column} is {row[column]}, recorded {expected[column]}"
        minibatches, expected_minibatches = minibatch_rows(step, batch), self.tape.at_step("minibatches", step)
        if minibatches.tolist() != expected_minibatches.tolist():
            return f"mini-batches {minibatches.tolist()}, recorded {expected_minibatches.tolist()} (step, mini-batch, micro-batches, tokens, denominator)"
        self._num_trajectories += len(found)
        return None

    def _tensor_difference(self, step: int, shards: Sequence[Shard]) -> str | None:
        recorded = self.tape.at_step("tensors", step)["crc32c"].tolist()
        if len(recorded) != len(shards):
            return f"{len(shards)} tensors, recorded {len(recorded)}"
        for shard, found, expected in zip(shards, checksums(shards), recorded, strict=True):
            if found != expected:
                return f"tensor {shard.name}: checksum {found:08x}, recorded {expected:08x}"
            self._num_tensors += 1
        return None


def open_script(replay: Replay, world: World) -> Script:
    """The script of this rank. Raises ConfigError when a tape is missing or cannot be read."""
    return Script(replay, world, tapes_of_replay(replay))


def recorded_batch(tape: Tape, step: int) -> LocalBatch:
    """This rank's batch of a step, trajectories included. Raises ConfigError when the tape does not hold them."""
    rows, minibatches = tape.at_step("batches", step), tape.at_step("minibatches", step)
    return LocalBatch(
        trajectories=tape.trajectories(step),
        advantage_S=rows["advantage"],
        weight_S=rows["weight"],
        minibatch_S=rows["minibatch"].astype(np.int64),
        microbatch_S=rows["microbatch"].astype(np.int64),
        num_microbatches=minibatches["num_microbatches"].tolist(),
        trained_tokens=minibatches["trained_tokens"].tolist(),
        denominators=minibatches["denominator"].tolist(),
    )
