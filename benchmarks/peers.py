"""Samples/s of our whole loop (generate, grade, train, push) beside TRL's, on 2 cores: 64 samples a step in groups of 8, at most 64 tokens each, 1 M and 4 M parameters.

    .venv/bin/python benchmarks/peers.py                                   # everything: half an hour on 2 idle cores; makes build/peers-venv on first use
    .venv/bin/python benchmarks/peers.py --sizes 1M --lengths varying --steps 12 --turns 1

Weights are random. `varying`: each token ends the answer with 5 % probability (19 tokens on average); `constant`: none does, all answers have 64 tokens.
Ours: `areal-hpc run` with one generation and one training rank at several eta. TRL: GRPOTrainer with `generate` on 1 and on 2 threads, and with continuous batching
(minutes where cores are busy); its best counts. Samples/s: 64 / median wall time of a step, over all steps but the first ones; sides run in turns.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import trl_rival
from small_models import SHAPES, write_model

from areal_hpc.observe.telemetry import hardware

SAMPLES, GROUP_SIZE, MAX_NEW_TOKENS = 64, 8, 64
WARM_UP = 3
"""Steps that do not count."""
RIVALS = {"trl-generate-1": (1, False), "trl-generate-2": (2, False), "trl-continuous-2": (2, True)}
"""name -> threads, continuous batching"""


def ours(folder: Path, model: Path, eta: str, steps: int, run_dir: Path) -> tuple[list[float], float]:
    """(seconds of each step, mean tokens of an answer) of one run. Raises CalledProcessError when it fails."""
    options = {
        "run-dir": run_dir,
        "model.path": model,
        "data.path": folder / "problems.jsonl",
        "data.max-prompt-tokens": 16,
        "generation.max-new-tokens": MAX_NEW_TOKENS,
        "generation.max-num-running": SAMPLES,
        "train.batch-size": SAMPLES,
        "train.group-size": GROUP_SIZE,
        "train.num-steps": steps,
        "train.lr": 1e-6,
        "train.warmup-steps": 0,
        "evaluation.num-problems": 8,
        "evaluation.every": 0,
        "staleness.max-staleness": eta,
    }
    command = [str(Path(sys.executable).parent / "areal-hpc"), "run", "laptop"]
    done = subprocess.run(command + [f"--{name}={value}" for name, value in options.items()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"areal-hpc ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    with h5py.File(next(run_dir.glob("attempt-*")) / "log.h5") as log:
        step_s = log["steps"]["wall_s"].tolist()
        lengths = log["trajectories"]["answer_tokens"]
        return step_s, float(lengths[:].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SHAPES, nargs="+", default=list(SHAPES), help="models")
    parser.add_argument("--lengths", choices=("varying", "constant"), nargs="+", default=["varying", "constant"], help="lengths of answers")
    parser.add_argument("--etas", nargs="+", default=["0", "1", "4"], help="ours: staleness.max_staleness")
    parser.add_argument("--rivals", choices=RIVALS, nargs="+", default=list(RIVALS), help="ways to run TRL")
    parser.add_argument("--steps", type=int, default=23, help="steps of each run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each side")
    args = parser.parse_args()
    results = []
    for size in args.sizes:
        for lengths in args.lengths:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                model = write_model(folder, size, stops=lengths == "varying")
                settings = {
                    "model": str(model),
                    "problems": str(folder / "problems.jsonl"),
                    "samples": SAMPLES,
                    "microbatch": SAMPLES,
                    "group_size": GROUP_SIZE,
                    "max_new_tokens": MAX_NEW_TOKENS,
                    "steps": args.steps,
                    "lr": 1e-6,
                }
                step_s: dict[str, list[float]] = {name: [] for name in (*(f"eta-{eta}" for eta in args.etas), *args.rivals)}
                answer_tokens: dict[str, float] = {}
                for turn in range(args.turns):
                    for side, found in step_s.items():
                        if side.startswith("eta-"):
                            seconds, answer_tokens[side] = ours(folder, model, side.removeprefix("eta-"), args.steps, folder / f"{side}-{turn}")
                        else:
                            threads, continuous = RIVALS[side]
                            reply = trl_rival.run("loop", settings | {"threads": threads, "continuous": continuous})
                            seconds, answer_tokens[side] = reply["step_s"], reply["mean_answer_tokens"]
                        found += seconds[WARM_UP:]
                        rate = SAMPLES / statistics.median(found)
                        print(f"{size} {lengths} turn {turn}  {side:18s} {rate:8.1f} samples/s, {answer_tokens[side]:.1f} tokens an answer", flush=True)
            rates = {side: SAMPLES / statistics.median(found) for side, found in step_s.items()}
            best = {mine: max((rate for side, rate in rates.items() if side.startswith("eta-") == mine), default=None) for mine in (True, False)}
            row = {"size": size, "lengths": lengths, "samples_per_s": rates, "answer_tokens": answer_tokens}
            results.append(row | {"ratio_of_the_best": best[True] / best[False] if best[True] and best[False] else None})
    print(json.dumps({"benchmark": "peers", "unit": "samples/s", **vars(args), "results": results, "hardware": hardware()}))


if __name__ == "__main__":
    main()
