"""Tapes: what is written is read back, a killed writer leaves a prefix, and a step counts only when it is there as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import Config, ConfigError, Log
from areal_hpc.topology import World
from areal_hpc.train.script import recorded_batch
from areal_hpc.train.sharding import Shard
from areal_hpc.train.tape import Recording, batch_rows, checksums, minibatch_rows
from areal_hpc.train.trainer import LocalBatch
from areal_hpc.transport.tape import Tape, TapeWriter, check_machine, machine, machine_of_rank, tape_path, trajectory_digest
from areal_hpc.transport.trajectory import Status, Trajectory

ATTRIBUTES = {"tensors": "embed\nhead", "first_step": 0}
CONFIG = Config(log=Log(record="tokens"))


def a_world(world_rank: int = 1, role: str = "training") -> World:
    """What a tape's attributes need of a world; no MPI here."""
    place = {"world_rank": world_rank, "role": role, "num_generation": 1, "num_training": 1, "host": "n1"}
    return cast(World, SimpleNamespace(**place))


def trajectory(rng: np.random.Generator, ticket: int, sample: int) -> Trajectory:
    answer = int(rng.integers(1, 9))
    status = Status(int(rng.integers(8)))
    return Trajectory(
        ticket=ticket,
        sample=sample,
        prompt_P=rng.integers(0, 99, int(rng.integers(1, 6)), dtype=np.int32),
        tokens_R=rng.integers(0, 99, answer, dtype=np.int32),
        logprobs_R=rng.normal(size=answer).astype(np.float32),
        versions_R=np.sort(rng.integers(0, 5, answer, dtype=np.int32)),
        loss_mask_R=rng.random(answer) < 0.8,
        reward=float("nan") if status > 3 else 5.0,
        status=status,
    )


def local_batch(rng: np.random.Generator, num: int) -> LocalBatch:
    return LocalBatch(
        trajectories=[trajectory(rng, int(rng.integers(1000)), k) for k in range(num)],
        advantage_S=rng.normal(size=num),
        weight_S=rng.integers(0, 2, num).astype(np.float32),
        minibatch_S=rng.integers(0, 2, num),
        microbatch_S=rng.integers(0, 3, num),
        num_microbatches=[3, 2],
        trained_tokens=[17, 0],
        denominators=[17, 1],
    )


def shards(step: int) -> list[Shard]:
    return [Shard("embed", (3, 2), 0, torch.full((3, 2), float(step))), Shard("head", (2,), 2, torch.zeros(0))]


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_batches_are_read_back(sizes: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every array of the batch that will be trained again, bit for bit, for ranks that got nothing too."""
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("tape")
    recording = Recording(TapeWriter(folder, CONFIG, a_world(), ATTRIBUTES), with_tokens=True)
    recording.weights(0, shards(0))
    batches = [local_batch(rng, num) for num in sizes]
    for step, batch in enumerate(batches, 1):
        recording.step(step, batch, shards(step))
    recording.close()
    tape = Tape(folder, 1)
    assert tape.num_steps == len(sizes) and tape.first_step == 0 and tape.tensor_names == ["embed", "head"]
    for step, batch in enumerate(batches, 1):
        found = recorded_batch(tape, step)
        assert batch_rows(step, found).tobytes() == batch_rows(step, batch).tobytes() == tape.at_step("batches", step).tobytes()
        assert minibatch_rows(step, found).tolist() == minibatch_rows(step, batch).tolist()
        for ours, recorded in zip(batch.trajectories, found.trajectories, strict=True):
            for name in ("prompt_P", "tokens_R", "logprobs_R", "versions_R", "loss_mask_R"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(recorded, name), strict=True)
        assert tape.at_step("tensors", step)["crc32c"].tolist() == list(checksums(shards(step)))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), bit=st.integers(0, 2**32))
def test_digest_sees_every_bit_of_every_column(seed: int, bit: int) -> None:
    rng = np.random.default_rng(seed)
    first = trajectory(rng, 1, 2)
    for name in ("prompt_P", "tokens_R", "logprobs_R", "versions_R", "loss_mask_R"):
        changed = getattr(first, name).copy()
        raw = changed.view(np.uint8)
        raw[bit // 8 % len(raw)] ^= 1 << bit % 8
        assert trajectory_digest(replace(first, **{name: changed})) != trajectory_digest(first)
    assert trajectory_digest(replace(first, reward=-5.0)) != trajectory_digest(first)
    assert trajectory_digest(replace(first, status=Status((first.status + 1) % 8))) != trajectory_digest(first)
    longer = replace(first, prompt_P=np.append(first.prompt_P, first.tokens_R[:1]), tokens_R=first.tokens_R[1:])
    assert trajectory_digest(longer) != trajectory_digest(first), "the border between two columns counts"
    assert trajectory_digest(replace(first, generated_s=3.0, graded_s=4.0)) == trajectory_digest(first), "times do not"


def test_checksum_sees_one_number() -> None:
    weights = torch.zeros(1000)
    (before,) = checksums([Shard("w", (1000,), 0, weights)])
    weights[567] = 1e-38
    (after,) = checksums([Shard("w", (1000,), 0, weights)])
    assert before != after
    weights[567] = -0.0
    (signed,) = checksums([Shard("w", (1000,), 0, weights)])
    assert signed != before, "equal numbers of other bits are another result"


WRITER = """
import sys
import numpy as np
from pathlib import Path
from tests.transport import test_tape as t
from areal_hpc.transport import tape
tape.FLUSH_S = 0.02
recording = t.Recording(tape.TapeWriter(Path(sys.argv[1]), t.CONFIG, t.a_world(), t.ATTRIBUTES), with_tokens=True)
recording.weights(0, t.shards(0))
for step in range(1, 1_000_000):
    recording.step(step, t.local_batch(np.random.default_rng(step), 4), t.shards(step))
    print(step, flush=True)
"""


def test_killed_writer_leaves_whole_steps(tmp_path: Path) -> None:
    """kill -9 while it writes: what is called complete can be trained again, and equals what was written."""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 400:
                process.send_signal(signal.SIGKILL)
                break
    tape = Tape(tmp_path, 1)
    assert tape.num_steps >= 1
    for step in (1, tape.num_steps):
        written = local_batch(np.random.default_rng(step), 4)
        assert batch_rows(step, recorded_batch(tape, step)).tobytes() == batch_rows(step, written).tobytes()
        assert tape.at_step("tensors", step)["crc32c"].tolist() == list(checksums(shards(step)))


def test_step_without_all_its_checksums_is_no_step(tmp_path: Path) -> None:
    writer = TapeWriter(tmp_path, CONFIG, a_world(), ATTRIBUTES)
    for row in ((0, 0, 7), (0, 1, 7), (1, 0, 7), (1, 1, 7), (2, 0, 7)):
        writer.add("tensors", *row)
    writer.close()
    assert Tape(tmp_path, 1).num_steps == 1


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """No tape; not a tape; a tape without tokens; another machine."""
    with pytest.raises(ConfigError, match=r"tape-0001\.h5: not a readable tape"):
        Tape(tmp_path, 1)
    tape_path(tmp_path, 2).write_text("no HDF5")
    with pytest.raises(ConfigError, match="not a readable tape"):
        Tape(tmp_path, 2)
    recording = Recording(TapeWriter(tmp_path, CONFIG, a_world(), ATTRIBUTES), with_tokens=False)
    recording.step(1, local_batch(np.random.default_rng(0), 3), shards(1))
    recording.close()
    tape = Tape(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"tokens of step 1 are not on it; record them with --log\.record tokens"):
        tape.trajectories(1)
    here = machine() | machine_of_rank()
    check_machine(tape, here)
    with pytest.raises(ConfigError, match="threads is 64, recorded 1: bits may differ for that alone; --force"):
        check_machine(tape, here | {"threads": 64})
    os.truncate(tape_path(tmp_path, 1), 5000)
    with pytest.raises(ConfigError, match="cut short: 5000 of"):  # HDF5 itself would ask for the rest for minutes
        Tape(tmp_path, 1)
