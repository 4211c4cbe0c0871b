"""What a training rank records, and compares in a replay: its share of every batch, in order, and checksums of its parameters after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal_hpc.config import Config
from areal_hpc.observe.schema import TRAINING_TAPE
from areal_hpc.topology import World
from areal_hpc.train.sharding import Shard
from areal_hpc.train.trainer import LocalBatch, Trainer
from areal_hpc.transport.ring import crc32c
from areal_hpc.transport.tape import TOKEN_COLUMNS, TapeWriter, trajectory_digest
from areal_hpc.transport.trajectory import Trajectory

if TYPE_CHECKING:
    from areal_hpc.train.loop import TrainingRank


class NoTape:
    """Nothing is recorded. Also the verbs of all tapes: `attach`, then `weights` once and `step` after each training step, `close` at the end."""

    keeps_results = True
    """The model or a checkpoint is written at the end; the run is done when its last step is."""

    def attach(self, rank: TrainingRank) -> None:
        """The rank is complete and about to begin."""

    def weights(self, step: int, shards: Sequence[Shard]) -> None:
        """What training begins with: the parameters after `step` (0: the model's own)."""

    def step(self, step: int, batch: LocalBatch, shards: Sequence[Shard]) -> None:
        """A step has been trained: its batch, and the parameters after it. Collective over the training ranks."""

    def summary(self, rank: TrainingRank) -> dict[str, int]:
        """For exit.json (training rank 0)."""
        return {}

    def close(self) -> None:
        """Nothing more comes."""


class Recording(NoTape):
    """Writes the tape of this rank. `with_tokens`: the trajectories themselves, not only their hashes."""

    def __init__(self, writer: TapeWriter, *, with_tokens: bool) -> None:
        self._writer, self._with_tokens = writer, with_tokens

    def weights(self, step: int, shards: Sequence[Shard]) -> None:
        for tensor, checksum in enumerate(checksums(shards)):
            self._writer.add("tensors", step, tensor, checksum)
        self._writer.flush_when_due()

    def step(self, step: int, batch: LocalBatch, shards: Sequence[Shard]) -> None:
        if self._with_tokens:
            for table, rows in payload(batch.trajectories).items():
                self._writer.add_rows(table, rows)
        self._writer.add_rows("batches", batch_rows(step, batch))
        self._writer.add_rows("minibatches", minibatch_rows(step, batch))
        self.weights(step, shards)

    def close(self) -> None:
        self._writer.close()


def checksums(shards: Sequence[Shard]) -> Iterator[int]:
    """CRC32C of this rank's rows of each parameter: no change of a single number can keep it."""
    for shard in shards:
        data = shard.local.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        yield crc32c(data.data) if len(data) else 0


def batch_rows(step: int, batch: LocalBatch) -> np.ndarray:
    """Rows of /batches."""
    trajectories = batch.trajectories
    columns: dict[str, Sequence[float] | np.ndarray] = {
        "ticket": [t.ticket for t in trajectories],
        "sample": [t.sample for t in trajectories],
        "minibatch": batch.minibatch_S,
        "microbatch": batch.microbatch_S,
        "advantage": batch.advantage_S,
        "weight": batch.weight_S,
        "reward": [t.reward for t in trajectories],
        "status": [int(t.status) for t in trajectories],
        "num_prompt": [len(t.prompt_P) for t in trajectories],
        "num_answer": [len(t.tokens_R) for t in trajectories],
        "digest": np.array([trajectory_digest(t) for t in trajectories], np.uint64),
    }
    rows = np.zeros(len(trajectories), TRAINING_TAPE["batches"].dtype)
    rows["step"] = step
    for column, values in columns.items():
        rows[column] = values
    return rows


def minibatch_rows(step: int, batch: LocalBatch) -> np.ndarray:
    """Rows of /minibatches."""
    columns = (batch.num_microbatches, batch.trained_tokens, batch.denominators)
    values = [(step, m, *counts) for m, counts in enumerate(zip(*columns, strict=True))]
    return np.array(values, TRAINING_TAPE["minibatches"].dtype)


def payload(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Rows of /prompt_tokens and /answer_tokens."""
    prompts = np.zeros(sum(len(t.prompt_P) for t in trajectories), TRAINING_TAPE["prompt_tokens"].dtype)
    answers = np.zeros(sum(len(t.tokens_R) for t in trajectories), TRAINING_TAPE["answer_tokens"].dtype)
    if trajectories:
        prompts["token"] = np.concatenate([t.prompt_P for t in trajectories])
        for column, name in TOKEN_COLUMNS.items():
            answers[column] = np.concatenate([getattr(t, name) for t in trajectories])
    return {"prompt_tokens": prompts, "answer_tokens": answers}


def open_recording(config: Config, world: World, trainer: Trainer, attempt_dir: Path) -> NoTape:
    """What `log.record` asks for. `trainer` has its first weights."""
    if config.log.record == "none":
        return NoTape()
    names = "\n".join(shard.name for shard in trainer.named_shards())
    writer = TapeWriter(attempt_dir, config, world, {"tensors": names, "first_step": trainer.policy_version})
    return Recording(writer, with_tokens=config.log.record == "tokens")
