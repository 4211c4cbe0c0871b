"""Asynchronous against both synchronous ways of using the same two ranks: the speed-up table, measured on CPU ranks.

    .venv/bin/python benchmarks/speedup.py                 # about 25 minutes on 2 quiet cores
    .venv/bin/python benchmarks/speedup.py --quick         # the long-tail setting alone, one round, few steps: does it run?

Every variant is a whole job of `areal-hpc run laptop` (random weights, one thread a rank) over the same prompts with imposed lengths: the answer of
ticket k, sample s has the same number of tokens everywhere, log-normal with sigma 0.85 cut at three times its mean (the paper's dispersion), or constant. So
all do the same work, and a policy that answers shorter cannot buy a ratio. Time runs from the beginning of training, engines empty, to the end of the last
step; tokens are those that were trained.

    colocated     both ranks generate a batch, then both train on it: the model sharded over both, or a copy on each                   synchronous
    split, eta 0  one generates, the other trains, in turn                                                                             synchronous
    eta 1 ...     one generates while the other trains (staleness mode `count`; KV cache kept, or recomputed at new weights)           asynchronous

Rounds go over all variants in an order that turns around, each with a seed of its own. A ratio is that of a run to the fastest baseline of the same round;
its median over the rounds is reported with a bootstrap interval (95 %). Beside it stands the engine's bare throughput on one core at the asynchronous batch,
so that a slow engine cannot buy the ratio unseen. The last line is one JSON object; `speedup` is the best median in the long-tail setting of 16 a batch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import demo_model

from areal_hpc.config import Config, Generation
from areal_hpc.models.hf import build_random
from areal_hpc.observe.telemetry import hardware, read_table
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.groups import training_request

MEAN, SIGMA, CAP = 64, 0.85, 3
SLOTS = 64
GOAL = 2.57
BASELINES = {
    "colocated, sharded": ("--topology.mode", "colocated", "--staleness.max-staleness", "0"),
    "colocated, copies": ("--topology.mode", "colocated", "--staleness.max-staleness", "0", "--train.replicas", "2"),
    "split, eta 0": ("--staleness.max-staleness", "0"),
}


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    batch_size: int
    sigma: float
    etas: tuple[str, ...]
    num_steps: int
    recompute: tuple[str, ...] = ()
    """Values of eta that are run with the KV cache recomputed at new weights too."""

    def variants(self) -> dict[str, tuple[str, ...]]:
        """Name -> options."""
        asynchronous = {f"eta {eta}": ("--staleness.max-staleness", eta, "--generation.kv-on-update", "keep") for eta in self.etas}
        asynchronous |= {f"eta {eta}, recompute": ("--staleness.max-staleness", eta, "--generation.kv-on-update", "recompute") for eta in self.recompute}
        return BASELINES | asynchronous


LONG_TAIL = Setting("long tail, B = 16", 16, SIGMA, ("1", "2", "4", "8", "16", "inf"), 60, recompute=("8",))
SETTINGS = (
    LONG_TAIL,
    Setting("long tail, B = 32", 32, SIGMA, ("1", "4", "8"), 40),
    Setting("long tail, B = 64", 64, SIGMA, ("1", "4"), 30),
    Setting("long tail, B = 128", 128, SIGMA, ("1", "4"), 20),
    Setting("constant, B = 16", 16, 0.0, ("1", "4", "8"), 60),
    Setting("constant, B = 64", 64, 0.0, ("1", "4"), 30),
)


def run(setting: Setting, options: Sequence[str], seed: int, run_dir: Path) -> dict[str, float]:
    """One job."""
    lengths = ("--generation.imposed-mean", MEAN, "--generation.imposed-sigma", setting.sigma, "--generation.max-new-tokens", CAP * MEAN)
    batch = ("--train.batch-size", setting.batch_size, "--train.group-size", 4, "--train.num-steps", setting.num_steps)
    rest = (
        "--model.warmstart-steps",
        0,
        "--model.warmstart-direct-steps",
        0,
        "--data.size",
        4000,
        "--evaluation.num-problems",
        2,
        "--evaluation.temperature",
        1,
    )
    quiet = ("--checkpoint.every", 0, "--log.record", "none", "--train.flat-alarm", 0, "--generation.max-num-running", SLOTS, "--seed", seed)
    command = [str(Path(sys.executable).parent / "areal-hpc"), "run", "laptop", "--run-dir", run_dir, *lengths, *batch, *rest, *quiet, *options]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    steps = read_table(run_dir / "attempt-1" / "log.h5", "steps")
    seconds = float(steps["end_s"][-1] - (steps["end_s"][0] - steps["wall_s"][0]))
    return {
        "tokens_per_s": float(steps["tokens"].sum()) / seconds,
        "seconds": seconds,
        "staleness_mean": float(steps["staleness_mean"].mean()),
        "training_waits": float(steps["generation_wait_s"].sum()) / seconds,
    }


def bare_engine(sigma: float) -> float:
    """Tokens/s of the embedded engine alone, prompts counted as in the jobs: one thread, `SLOTS` sequences always running, lengths as there."""
    torch.set_num_threads(1)
    config = Config(generation=Generation(imposed_mean=MEAN, imposed_sigma=sigma, max_new_tokens=CAP * MEAN, max_num_running=SLOTS))
    model = build_random(demo_model(), seed=0)
    engine = EmbeddedEngine(model.config, max_num_running=SLOTS, max_context_tokens=CAP * MEAN + 32, stop_tokens=())
    engine.update_weights(model.named_parameters(), 0)
    prompt, ticket, tokens = np.arange(1, 13, dtype=np.int32), 0, 0
    started = 0.0
    for turn in range(1500):
        while engine.num_running + engine.num_waiting < SLOTS:
            engine.add([training_request(config, ticket, 0, prompt)])
            ticket += 1
            tokens += len(prompt)
        if turn == 300:
            started, tokens = time.perf_counter(), 0
        tokens += SLOTS
        engine.step()
    return tokens / (time.perf_counter() - started)


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the median. With few values it cannot be wider than their range."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def judge(setting: Setting, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of every variant, and ratios to the better baseline of the same round."""
    names = list(rounds[0])
    best_S = [max(found[name]["tokens_per_s"] for name in BASELINES) for found in rounds]
    rows: dict[str, Any] = {}
    for name in names:
        ratios = [found[name]["tokens_per_s"] / best for found, best in zip(rounds, best_S, strict=True)]
        rows[name] = {key: statistics.median(found[name][key] for found in rounds) for key in rounds[0][name]}
        rows[name] |= {"ratio": statistics.median(ratios), "ratio_ci": interval(ratios), "ratios": ratios}
    better = max(BASELINES, key=lambda name: rows[name]["tokens_per_s"])
    asynchronous = {name: row for name, row in rows.items() if name not in BASELINES}
    best = max(asynchronous, key=lambda name: asynchronous[name]["ratio"])
    waits = rows["split, eta 0"]["training_waits"]
    regime = f"{'generation' if waits > 0.5 else 'training'} bound ({100 * waits:.0f} % of a step of split, eta 0, is generation)"
    return {"batch_size": setting.batch_size, "sigma": setting.sigma, "variants": rows, "baseline": better, "best": best, "regime": regime}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: better baseline {found['baseline']}, {found['regime']}; bare engine {found['bare_tokens_per_s']:,.0f} tokens/s")
    print(f"  {'':22s} {'tokens/s':>9s} {'age':>5s} {'training waits':>14s} {'ratio':>6s}  95 %")
    for variant, row in found["variants"].items():
        low, high = row["ratio_ci"]
        print(
            f"  {variant:22s} {row['tokens_per_s']:9,.0f} {row['staleness_mean']:5.1f} {100 * row['training_waits']:13.0f}% {row['ratio']:5.2f}x  {low:.2f} to {high:.2f}"
        )


def main() -> None:
    """Print a table per setting, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--settings", type=int, nargs="+", choices=range(len(SETTINGS)), default=list(range(len(SETTINGS))), help="rows of the table, by number"
    )
    parser.add_argument("--quick", action="store_true", help="one round of a few steps in the long-tail setting")
    arguments = parser.parse_args()
    settings = [SETTINGS[k] for k in arguments.settings]
    if arguments.quick:
        settings = [Setting(LONG_TAIL.name, LONG_TAIL.batch_size, SIGMA, ("4",), 8)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            rounds: list[dict[str, dict[str, float]]] = []
            for seed in range(1 if arguments.quick else arguments.rounds):
                order = list(setting.variants().items())
                done: dict[str, dict[str, float]] = {}
                for name, options in order if seed % 2 == 0 else order[::-1]:
                    done[name] = run(setting, options, seed, Path(folder) / f"{len(found)}-{seed}-{len(done)}")
                    print(f"{setting.name}, round {seed + 1}: {name:22s} {done[name]['tokens_per_s']:8,.0f} tokens/s", file=sys.stderr, flush=True)
                rounds.append({name: done[name] for name, _ in order})
            found[setting.name] = judge(setting, rounds) | {"bare_tokens_per_s": bare_engine(setting.sigma), "steps": setting.num_steps}
            show(setting.name, found[setting.name])
    first = found.get(LONG_TAIL.name)
    best = None if first is None else first["variants"][first["best"]]
    lengths = {"mean": MEAN, "sigma": SIGMA, "cap": CAP * MEAN}
    headline = {"speedup": best and best["ratio"], "speedup_ci": best and best["ratio_ci"], "variant": first and first["best"], "goal": GOAL}
    print(json.dumps({"benchmark": "speedup", **headline, "ranks": "1 + 1, or 2 colocated", "lengths": lengths, "hardware": hardware(), "settings": found}))


if __name__ == "__main__":
    main()
