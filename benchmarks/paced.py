"""PACED EMULATION, not a measurement of GPUs: real ranks, control code, ring and weight push; what a device would do is slept, from the simulator's H800 presets.

    .venv/bin/python benchmarks/paced.py                 # about 15 minutes on 2 quiet cores
    .venv/bin/python benchmarks/paced.py --quick         # 4 ranks, short answers, one round: does it run?

The paper's 1.5B setting (32k context, eta 8) on an eighth of its 128 GPUs: 16 ranks, each a GPU, and an eighth of its batch, 1,024 trajectories, so that a GPU has the
same load: 12 generate and 4 train, or all 16 do both (colocated). Two scales make it fit: one token here stands for TOKENS real ones (a step of the engine takes as
long as TOKENS decode steps), and time runs SPEED times faster. Lengths are the paper's: 9,276 tokens on average, prompt included, log-normal, sigma 0.85, cut at 27,648.

    engine     `EmbeddedEngine` whose decoder sleeps `DecodeCost` (prefill and recomputation included) and draws every token evenly; the KV cache always suffices
    trainer    `Trainer` that sleeps `TrainCost` for each mini-batch's micro-batches and meets the other ranks, as FSDP would; parameters do not change
    the rest   is the job itself, at its real cost on this machine, which the scale makes SPEED times larger: pushes of a small model, the ring, grading, Python

So the ratios say what the control code makes of such devices; beside them stands what the simulator alone says. Rounds, ratios, intervals: benchmarks/speedup.py.
Last line: one JSON object; `speedup_paced` is eta 8 over the synchronous split (paper: 2.77), `speedup_paced_colocated` that over the colocated run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import NO_MODEL, QUIET, Row, beside, commit, in_rounds, show, steady

from areal_hpc.launch.local import find_launcher
from areal_hpc.observe.telemetry import hardware
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.engines.fused import FusedDecoder
from areal_hpc.simulate import paper
from areal_hpc.simulate.costs import DecodeCost, TrainCost
from areal_hpc.simulate.lengths import LogNormalLengths
from areal_hpc.train.diagnostics import BatchStats, Tally
from areal_hpc.train.trainer import LocalBatch, Trainer

TOKENS, SPEED = 32, 32
SYNCHRONOUS, COLOCATED, ASYNCHRONOUS = "split, eta 0", "colocated", "eta 8"
JOB = paper.asynchronous("1.5b", 128, 32768, 8, 1)


class Clock:
    """A device that is busy until some moment. Emulated seconds go in, seconds / SPEED are slept."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def work(self, seconds: float, *, overlapped: bool = False) -> None:
        """`overlapped`: the host's work since the device became free, up to as long as this work, was done beside it (`DecodeCost.host_s` has it)."""
        now, slept = time.monotonic(), seconds / SPEED
        start = self._free_at if overlapped and now - self._free_at < slept else now
        self._free_at = max(now, start + slept)
        time.sleep(self._free_at - now)


class PacedDecoder(FusedDecoder):
    """Weights that are pushed and swapped as ever; what would be computed from them is slept."""

    def pace(self, cost: DecodeCost) -> None:
        """Before the first step."""
        self.cost, self.clock = cost, Clock()

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """There is no cache to copy (and a paged one would not be copied)."""

    def prefill(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        """At an admission, and of everything that runs at new weights."""
        lengths_S = TOKENS * np.array([len(sequence) for sequence in sequences], np.float64)
        self.clock.work(self.cost.prefill_seconds(float(lengths_S.sum()), float(np.square(lengths_S).sum())))

    def decode(self, tokens_n: torch.Tensor, positions_n: torch.Tensor, span: int) -> torch.Tensor:
        """TOKENS decode steps of all running sequences; every token of the vocabulary is as likely."""
        context = TOKENS * (int(positions_n.sum()) + len(positions_n))
        self.clock.work(self.cost.decode_seconds(len(tokens_n), context, TOKENS), overlapped=True)
        return torch.zeros(len(tokens_n), self.config.vocab_size)


def pace(engine: EmbeddedEngine) -> EmbeddedEngine:
    """The same engine with the sleeping decoder."""
    engine._model.__class__ = PacedDecoder  # the same state, other methods
    engine._model.pace(JOB.decode)  # type: ignore[attr-defined]
    return engine


class PacedTrainer(Trainer):
    """Trains nothing, for as long as it would take."""

    cost: TrainCost = replace(JOB.train, serial_token_s=0.0)
    """Ours moves payloads once, between the ranks: what the paper's system spends on one process is not charged."""

    def train_batch(self, batch: LocalBatch) -> BatchStats:
        """Ranks meet after each mini-batch."""
        tally = Tally(self.device)
        clock = Clock()
        lengths_S = TOKENS * np.array([trajectory.num_tokens for trajectory in batch.trajectories], np.float64)
        seconds_S = self.cost.token_s * lengths_S + self.cost.pair_s * np.square(lengths_S)
        for minibatch in range(len(batch.num_microbatches)):
            clock.work(float(seconds_S[batch.minibatch_S == minibatch].sum()))
            tally.take_loss_not_finite(self.model)
            tally.num_updates += 1
        self.policy_version += 1
        return tally.stats(self.model, has_reference=False, peak_flops=math.nan, peak_memory_bytes=0)


def be_rank(arguments: Sequence[str]) -> int:
    """`areal-hpc run`, with both leaves in the place of those that compute."""
    from areal_hpc import cli, run

    real_engine = run.create_engine

    def paced_engine(*given: Any) -> EmbeddedEngine:
        engine = real_engine(*given)
        assert isinstance(engine, EmbeddedEngine)
        return pace(engine)

    run.create_engine, run.Trainer = paced_engine, PacedTrainer  # type: ignore[assignment, misc]
    return cli.main(["run", "smoke", *arguments])


def work(ranks: int, cap: int) -> tuple[str, ...]:
    """The paper's setting for this many GPUs, in tokens of TOKENS."""
    mean = (paper.MEAN_TOKENS - paper.PROMPT) * cap / 27648
    uncut = LogNormalLengths.with_mean(mean, paper.SIGMA, cap, paper.PROMPT).median * math.exp(paper.SIGMA**2 / 2)
    batch = ("--train.batch-size", 64 * ranks, "--train.group-size", 16, "--train.num-minibatches", 4, "--train.microbatch-tokens", 32768 // TOKENS)
    lengths = ("--generation.imposed-mean", uncut / TOKENS, "--generation.imposed-sigma", paper.SIGMA, "--generation.max-new-tokens", cap // TOKENS)
    return (*map(str, (*batch, *lengths)), "--generation.max-num-running", str(JOB.decode.max_num_running), *NO_MODEL, *QUIET)


def variants(ranks: int) -> dict[str, tuple[str, ...]]:
    """Name -> options. Steps are many enough that those before the steady state can be left out."""
    split = ("--topology.num-ranks", str(ranks), "--topology.generation-fraction", "0.75")
    together = ("--topology.num-ranks", str(ranks), "--topology.mode", "colocated", "--train.replicas", str(ranks))
    return {
        SYNCHRONOUS: (*split, "--staleness.max-staleness", "0", "--train.num-steps", "4"),
        COLOCATED: (*together, "--staleness.max-staleness", "0", "--train.num-steps", "4"),
        ASYNCHRONOUS: (*split, "--staleness.max-staleness", "8", "--train.num-steps", "24"),
    }


def run(ranks: int, options: Sequence[str], seed: int, run_dir: Path) -> Row:
    """One job under mpiexec. Rates are those of the steady state, in tokens of the emulated devices and their seconds."""
    command = [*find_launcher().command(ranks), sys.executable, __file__, "--be-rank", "--run-dir", str(run_dir), "--seed", str(seed), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | find_launcher().environment() | {"OMP_NUM_THREADS": "1"})
    found = steady(run_dir)
    return found | {"tokens_per_s": found["tokens_per_s"] * TOKENS / SPEED}


def simulated() -> dict[str, float]:
    """The same ratios by the simulator alone: what they would be if everything but devices took no time."""
    asynchronous = replace(JOB, num_steps=24, train=PacedTrainer.cost)
    synchronous = replace(asynchronous, eta=0, num_steps=4)
    together = replace(synchronous, colocated=True, num_generation=128, num_training=128)
    rate = paper.throughput(asynchronous)
    return {SYNCHRONOUS: rate / paper.throughput(synchronous), COLOCATED: rate / paper.throughput(together)}


def main() -> None:
    """A table, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 4 ranks, answers cut at 6,912 tokens")
    arguments = parser.parse_args()
    ranks, cap, rounds = (4, 6912, 1) if arguments.quick else (16, 27648, arguments.rounds)
    found = in_rounds(variants(ranks), rounds, lambda options, seed, to: run(ranks, (*work(ranks, cap), *options), seed, to))
    rows, other = beside(found, SYNCHRONOUS), beside(found, COLOCATED)
    predicted = simulated()
    print(f"PACED EMULATION of {ranks} H800, 1.5B, answers up to {cap:,} tokens; tokens/s of the emulated devices")
    show(rows)
    split, together = rows[ASYNCHRONOUS], other[ASYNCHRONOUS]
    print(
        f"  {ASYNCHRONOUS} beside {COLOCATED}: {together['ratio']:.2f}x; the simulator at 128 GPUs: {predicted[SYNCHRONOUS]:.2f}x and {predicted[COLOCATED]:.2f}x"
    )
    headline = {"speedup_paced": split["ratio"], "speedup_paced_ci": split["ratio_ci"], "speedup_paced_colocated": together["ratio"], "simulated": predicted}
    scales = {"ranks": ranks, "cap_tokens": cap, "tokens_per_token": TOKENS, "speed": SPEED}
    print(json.dumps({"benchmark": "paced", "emulation": True, **headline, **scales, "commit": commit(), "hardware": hardware(), "variants": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-rank"]:
        sys.exit(be_rank(sys.argv[2:]))
    main()
