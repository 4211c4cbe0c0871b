"""What the scripts behind the tables share: jobs that all do the same work, rivals paired in rounds, and what becomes of the rounds.

A job is `areal-hpc run laptop` with random weights and imposed lengths (`benchmarks/speedup.py` says why); its rate is all trained tokens over the time from the
beginning of training, engines empty, to the end of the last step. A ratio is that of two runs of the same round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedup import CAP, MEAN, SIGMA, SLOTS, interval

from areal_hpc.observe.telemetry import read_table

Row = dict[str, float]
"""Numbers of one run."""
NO_MODEL = ("--model.warmstart-steps", "0", "--model.warmstart-direct-steps", "0", "--data.size", "4000")
QUIET = ("--checkpoint.every", "0", "--log.record", "none", "--train.flat-alarm", "0", "--evaluation.num-problems", "2", "--evaluation.temperature", "1")


@dataclass(frozen=True)
class Work:
    """What every rival of a table does."""

    batch_size: int
    num_steps: int
    sigma: float = SIGMA
    mean: int = MEAN

    def options(self) -> tuple[str, ...]:
        """Of `areal-hpc run`."""
        lengths = ("--generation.imposed-mean", self.mean, "--generation.imposed-sigma", self.sigma, "--generation.max-new-tokens", CAP * self.mean)
        batch = ("--train.batch-size", self.batch_size, "--train.group-size", 4, "--train.num-steps", self.num_steps, "--generation.max-num-running", SLOTS)
        return (*map(str, (*lengths, *batch)), *NO_MODEL, *QUIET)


def run(options: Sequence[str], seed: int, run_dir: Path, recipe: str = "laptop") -> Row:
    """One job. Raises CalledProcessError when it fails."""
    command = [str(Path(sys.executable).parent / "areal-hpc"), "run", recipe, "--run-dir", str(run_dir), "--seed", str(seed), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return rates(run_dir)


def rates(run_dir: Path) -> Row:
    """Numbers of a run that is there."""
    steps = read_table(run_dir / "attempt-1" / "log.h5", "steps")
    seconds = float(steps["end_s"][-1] - (steps["end_s"][0] - steps["wall_s"][0]))
    return {
        "tokens_per_s": float(steps["tokens"].sum()) / seconds,
        "seconds": seconds,
        "staleness_mean": float(steps["staleness_mean"].mean()),
        "training_waits": float(steps["generation_wait_s"].sum()) / seconds,
    }


def steady(run_dir: Path) -> Row:
    """The same of a run that is long enough for a steady state: the rate leaves out the first step, or of 8 and more the first third, in which slots fill up."""
    steps = read_table(run_dir / "attempt-1" / "log.h5", "steps")
    first = 1 if len(steps) < 8 else len(steps) // 3
    seconds = float(steps["end_s"][-1] - steps["end_s"][first - 1])
    return rates(run_dir) | {"tokens_per_s": float(steps["tokens"][first:].sum()) / seconds, "seconds": seconds, "steps": len(steps) - first}


def in_rounds(variants: dict[str, Sequence[str]], rounds: int, job: Callable[[Sequence[str], int, Path], Row]) -> list[dict[str, Row]]:
    """Every variant once a round, in an order that turns around, so that a drift of the machine meets all alike. The seed is the round's number."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(rounds):
            order = list(variants.items())
            done: dict[str, Row] = {}
            for name, options in order if seed % 2 == 0 else order[::-1]:
                done[name] = job(options, seed, Path(folder) / f"{seed}-{len(done)}")
                print(f"round {seed + 1}: {name:28s} {done[name]['tokens_per_s']:8,.0f} tokens/s", file=sys.stderr, flush=True)
            found.append({name: done[name] for name in variants})
    return found


def beside(rounds: Sequence[dict[str, Row]], baseline: str) -> dict[str, dict[str, Any]]:
    """Medians of every variant, and its ratio to `baseline` of the same round with a bootstrap interval (95 %)."""
    rows: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        ratios = [found[name]["tokens_per_s"] / found[baseline]["tokens_per_s"] for found in rounds]
        medians = {key: statistics.median(found[name][key] for found in rounds) for key in rounds[0][name]}
        rows[name] = medians | {"ratio": statistics.median(ratios), "ratio_ci": interval(ratios), "ratios": ratios}
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """One line a variant."""
    for name, row in rows.items():
        low, high = row["ratio_ci"]
        print(f"  {name:28s} {row['tokens_per_s']:9,.0f} tokens/s  age {row['staleness_mean']:4.1f}  {row['ratio']:5.2f}x  {low:.2f} to {high:.2f}")


def commit() -> str:
    """Short hash of the tree that was measured."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
