"""A run directory with logs written by the real `Log` and `Phases` on a hand-driven clock: what each number must be is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.observe.schema import TABLES
from areal_hpc.observe.telemetry import Log
from areal_hpc.observe.timeline import Phases


@dataclass
class Clock:
    """Seconds that only `now_s` moves."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Seconds of one step: generation decodes `decode_s` and stands at the gate for the rest; training waits `wait_s`, trains, pushes."""

    wait_s: float = 0.0
    train_s: float = 1.6
    push_s: float = 0.4
    decode_s: float = 1.0
    eta: int = 4
    ranks: int = 4
    seed: int = 0
    first_step: int = 1
    last_step: int = 40
    attributes: dict[str, Any] = field(
        default_factory=lambda: {"cores": 8, "cpu_model": "a processor", "fingerprint": "f00d", "config": "recipe: laptop\nseed: 0\n"}
    )

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s + self.push_s


def row_of(table: str, **values: Any) -> dict[str, Any]:
    """A row with zeros (or empty text) wherever no value is given."""
    return {name: values.get(name, "" if TABLES[table].dtype[name].kind == "S" else 0) for name in TABLES[table].column_names}


def write_attempt(run_dir: Path, attempt: int, shape: Shape, *, batch: int = 8) -> Path:
    """RUN/attempt-K/log.h5 with 10 s of start, the steps, an evaluation before and after (5 s each)."""
    folder = run_dir / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    clock, draws = Clock(), np.random.default_rng(shape.seed)
    log = Log.create(folder / "log.h5", shape.attributes, clock)
    generation = [Phases(rank, "generation", clock) for rank in range(shape.ranks * 3 // 4)]
    training = [Phases(rank, "training", clock) for rank in range(len(generation), shape.ranks)]
    clock.now_s += 10.0
    evaluate(log, clock, generation, training, shape.first_step - 1)
    for step in range(shape.first_step, shape.last_step + 1):
        run_step(log, clock, generation, training, shape, step, draws, batch)
    evaluate(log, clock, generation, training, shape.last_step)
    log.event(0, "stop", "done")
    for phases in generation + training:
        log.append("timeline", phases.drain())
    log.close()
    return folder / "log.h5"


def evaluate(log: Log, clock: Clock, generation: list[Phases], training: list[Phases], version: int) -> None:
    for phases in generation + training:
        phases.enter("evaluate")
    clock.now_s += 5.0
    correct = round(512 * (0.40 + 0.5 * (1 - np.exp(-version / 15))))
    accuracy = correct / 512
    ci95 = 1.96 * np.sqrt(accuracy * (1 - accuracy) / 512)
    row = {"num_problems": 512, "correct": correct, "accuracy": accuracy, "ci95": ci95, "answer_tokens_mean": 40, "seconds": 5.0, "temperature": 1}
    log.append("evaluations", row_of("evaluations", policy_version=version, step=version, **row))


def run_step(log: Log, clock: Clock, generation: list[Phases], training: list[Phases], shape: Shape, step: int, draws: np.random.Generator, batch: int) -> None:
    start_s = clock.now_s
    switches = [(0.0, generation, "decode"), (shape.decode_s, generation, "gated")] if shape.decode_s < shape.step_s else [(0.0, generation, "decode")]
    switches += [
        (0.0, training, "wait_data" if shape.wait_s else "train"),
        (shape.wait_s, training, "train"),
        (shape.wait_s + shape.train_s, training, "push_wait"),
    ]
    for after_s, ranks, phase in sorted(switches, key=lambda switch: switch[0]):
        clock.now_s = start_s + after_s
        for phases in ranks:
            phases.enter(phase)
    clock.now_s = start_s + shape.step_s
    for phases in generation + training:
        phases.enter("swap" if phases in generation else "log")
    ages = np.minimum(draws.poisson(1.2, batch), step - 1)
    right = draws.random(batch) < 0.40 + 0.5 * (1 - np.exp(-step / 15))
    lengths = draws.integers(20, 60, batch)
    log.append("trajectories", [trajectory(step, k, ages[k], right[k], lengths[k], batch) for k in range(batch)])
    tokens = int(lengths.sum()) + 16 * batch
    log.append("pushes", row_of("pushes", version=step, bytes=4_000_000, pack_s=0.01, transfer_s=0.02 + 0.01 * draws.random(), pause_max_s=0.005))
    for number, phases in enumerate(generation):
        used = {
            "rank": training[number % len(training)].rank,
            "records": 2 * step,
            "bytes": 4096 * step,
            "used_bytes": 512 * (1 + step % 3),
            "high_water_bytes": 2048,
        }
        log.append(
            "ranks", row_of("ranks", rank=phases.rank, role=0, time_s=clock.now_s, tokens=100 * step, running=4 + step % 5, waiting=step % 2, rss_bytes=10**8)
        )
        log.append("ring", row_of("ring", time_s=clock.now_s, lane=number, **used))
    for phases in training:
        log.append("ranks", row_of("ranks", rank=phases.rank, role=1, time_s=clock.now_s, tokens=tokens * step, rss_bytes=10**8))
    log.append(
        "steps",
        row_of(
            "steps",
            step=step,
            policy_version=step,
            wall_s=shape.step_s,
            tokens=tokens,
            trajectories=batch,
            tokens_per_s=tokens / shape.step_s,
            reward_mean=10 * right.mean() - 5,
            accuracy=right.mean(),
            staleness_max=ages.max(),
            staleness_mean=ages.mean(),
            staleness_bound=shape.eta,
            entropy=0.1 + 1 / step,
            answer_tokens_mean=lengths.mean(),
            waiting_groups=2 + step % 4,
            generation_wait_s=shape.wait_s,
            train_s=shape.train_s,
            push_s=shape.push_s,
            end_s=clock.now_s,
        ),
    )


def trajectory(step: int, k: int, age: int, right: bool, length: int, batch: int) -> dict[str, Any]:
    version = step - 1
    values = {
        "prompt_tokens": 16,
        "answer_tokens": length,
        "sampled_tokens": length,
        "turns": 1,
        "version_min": version - age,
        "version_max": version,
        "age": age,
    }
    return row_of(
        "trajectories", ticket=(step - 1) * batch // 4 + k // 4, sample=k % 4, batch=step, reward=5.0 if right else -5.0, status=0 if right else 1, **values
    )
