"""The main job at seeds 0, 1 and 2: held-out accuracy before and after, throughput, staleness, busy shares.

    .venv/bin/python benchmarks/demo.py               # runs the three seeds (about six minutes on 2 cores), writes runs/bench-demo-SEED-TIME
    .venv/bin/python benchmarks/demo.py RUN [RUN ...] # sums up runs that are there

The last line is one JSON object. Throughput: all tokens, prompts and answers, of the global batch / wall time of the step; median over steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from areal_hpc.observe.report import summary
from areal_hpc.observe.telemetry import hardware

SHOWN = (
    "accuracy_before",
    "accuracy_after",
    "num_problems",
    "steps",
    "training_s",
    "tokens_per_s_median",
    "staleness_mean",
    "staleness_max",
    "staleness_bound",
    "generation_busy",
    "training_busy",
)


def run_seeds() -> list[Path]:
    """Run the laptop recipe once per seed; returns the run folders. Raises CalledProcessError when one fails."""
    runs = []
    for seed in (0, 1, 2):
        run_dir = Path("runs") / f"bench-demo-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        command = [str(Path(sys.executable).parent / "areal-hpc"), "run", "laptop", "--seed", str(seed), "--run-dir", str(run_dir)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        runs.append(run_dir)
    return runs


def main() -> None:
    """Print one row per run, then the JSON object."""
    rows = []
    for run_dir in [Path(argument) for argument in sys.argv[1:]] or run_seeds():
        found = summary(run_dir)
        row = {name: found[name] for name in SHOWN}
        rows.append(row)
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(json.dumps({"benchmark": "demo", "commit": commit, "hardware": hardware(), "runs": rows}))


if __name__ == "__main__":
    main()
