"""What recording costs a run (log.record): processor seconds of a rank, and bytes of its tape, at the sizes of the demo.

.venv/bin/python benchmarks/tape.py      # a few seconds; the last line is one JSON object
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from areal_hpc.config import Config, Data, Log
from areal_hpc.data.datasets import load_problems
from areal_hpc.models.hf import build_random
from areal_hpc.models.tokenizer import build
from areal_hpc.observe.telemetry import hardware
from areal_hpc.rollout import tape as generation
from areal_hpc.topology import World
from areal_hpc.train import tape as training
from areal_hpc.train.sharding import Shard
from areal_hpc.train.trainer import LocalBatch
from areal_hpc.train.warmstart import decoder_config
from areal_hpc.transport.tape import TapeWriter, digest, tape_path
from areal_hpc.transport.trajectory import Status, Trajectory

STEPS, TRAJECTORIES, PROMPT, ANSWER = 100, 128, 24, 48
"""Of the demo: batches of 128 trajectories, answers of about 48 tokens."""


def a_world(role: str) -> World:
    """What the attributes of a tape need of a world."""
    return cast(World, SimpleNamespace(world_rank=0, role=role, num_generation=1, num_training=1, host="here"))


def shards() -> list[Shard]:
    """The demo's model, about 1 M parameters, whole."""
    words = build(load_problems(Data(size=100)))
    model = build_random(decoder_config(Config().model, words), seed=0)
    return [Shard(name, tuple(tensor.shape), 0, tensor.detach()) for name, tensor in model.named_parameters()]


def a_batch(rng: np.random.Generator) -> LocalBatch:
    """A batch of the demo's size."""
    trajectories = [
        Trajectory(
            ticket=k // 8,
            sample=k % 8,
            prompt_P=rng.integers(0, 60, PROMPT, dtype=np.int32),
            tokens_R=rng.integers(0, 60, ANSWER, dtype=np.int32),
            logprobs_R=rng.normal(size=ANSWER).astype(np.float32),
            versions_R=np.full(ANSWER, 3, np.int32),
            reward=5.0,
            status=Status.RIGHT,
        )
        for k in range(TRAJECTORIES)
    ]
    zeros = np.zeros(TRAJECTORIES, np.int64)
    return LocalBatch(trajectories, rng.normal(size=TRAJECTORIES), np.ones(TRAJECTORIES, np.float32), zeros, zeros, [1], [TRAJECTORIES * ANSWER], [1])


def train(folder: Path, record: str) -> tuple[float, float]:
    """(processor seconds, bytes) a training step."""
    config, parameters = Config(log=Log(record=record)), shards()  # type: ignore[arg-type]
    writer = TapeWriter(folder, config, a_world("training"), {"tensors": "", "first_step": 0})
    empty = os.path.getsize(tape_path(folder, 0))
    recording = training.Recording(writer, with_tokens=record == "tokens")
    batches = [a_batch(np.random.default_rng(step)) for step in range(STEPS)]
    began_at = time.process_time()
    for step, batch in enumerate(batches, 1):
        recording.step(step, batch, parameters)
    recording.close()
    return (time.process_time() - began_at) / STEPS, (os.path.getsize(tape_path(folder, 0)) - empty) / STEPS


def generate(folder: Path) -> tuple[float, float]:
    """(processor seconds, bytes) an answer, with its share of the call that added its group."""
    writer = TapeWriter(folder, Config(), a_world("generation"), {})
    empty = os.path.getsize(tape_path(folder, 0))
    recording = generation.Recording(writer)
    tokens, logprobs = np.zeros(ANSWER, np.int32), np.zeros(ANSWER, np.float32)
    began_at = time.process_time()
    for answer in range(STEPS * TRAJECTORIES):
        if answer % 8 == 0:
            recording.call((answer, generation.ADD, answer, 8, 0, digest([tokens])))
        recording.call((answer, generation.FINISH, answer, ANSWER, 0, digest([tokens, logprobs, tokens])))
    recording.close()
    num = STEPS * TRAJECTORIES
    return (time.process_time() - began_at) / num, (os.path.getsize(tape_path(folder, 0)) - empty) / num


def main() -> None:
    """One line per level, then the JSON object."""
    torch.set_num_threads(1)
    found: dict[str, object] = {"trajectories": TRAJECTORIES, "answer_tokens": ANSWER, "prompt_tokens": PROMPT}
    found["parameters"] = sum(shard.local.numel() for shard in shards())
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b", "c"):
            (Path(folder) / name).mkdir()
        found["answer_s"], found["answer_bytes"] = generate(Path(folder) / "a")
        for place, record in (("b", "order"), ("c", "tokens")):
            found[f"step_s_{record}"], found[f"step_bytes_{record}"] = train(Path(folder) / place, record)
    for name, value in found.items():
        print(f"{name:18} {value:.6g}")
    print(json.dumps({"benchmark": "tape", **hardware(), **found}))


if __name__ == "__main__":
    main()
