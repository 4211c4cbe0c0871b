"""Does asynchrony cost anything in what is learnt? The demo's job: synchronous, and asynchronous with decoupled and with naive PPO, three seeds each.

    .venv/bin/python benchmarks/learning.py [--steps 150] [--staleness 4] [--seeds 0 1 2]      # 9 jobs, about 25 minutes on 2 cores
    .venv/bin/python benchmarks/learning.py --staleness 16 --options "--train.lr 1e-4"         # where it should matter more

One row per job: held-out accuracy before and after (512 problems, temperature 1), wall time of training, tokens/s, staleness. Then a table per variant: mean and
range over the seeds, and whether it lies within the range of the synchronous seeds, widened by one standard error of an accuracy on that many problems.
The paper's Table 2 (arXiv 2505.24298) is the original of the comparison. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from areal_hpc.observe.report import summary
from areal_hpc.observe.telemetry import hardware

SHOWN = ("accuracy_before", "accuracy_after", "num_problems", "steps", "training_s", "tokens_per_s_median", "staleness_mean", "staleness_max")
SYNCHRONOUS = "synchronous, decoupled"


def variants(staleness: int) -> dict[str, list[str]]:
    """Name of each variant -> its options."""
    return {
        SYNCHRONOUS: ["--staleness.max-staleness", "0", "--train.objective", "decoupled"],
        f"eta {staleness}, decoupled": ["--staleness.max-staleness", str(staleness), "--train.objective", "decoupled"],
        f"eta {staleness}, naive ppo": ["--staleness.max-staleness", str(staleness), "--train.objective", "ppo"],
    }


def run(name: str, seed: int, options: list[str]) -> dict:
    """One job; its summary. Raises CalledProcessError when it fails."""
    label = name.replace(", ", "-").replace(" ", "")
    run_dir = Path("runs") / f"learning-{label}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(Path(sys.executable).parent / "areal-hpc"), "run", "laptop", "--seed", str(seed), "--run-dir", str(run_dir), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = summary(run_dir)
    return {"variant": name, "seed": seed} | {key: found[key] for key in SHOWN}


def judge(rows: list[dict]) -> list[dict]:
    """Mean and range of each variant over its seeds, beside the synchronous one."""
    by_variant = {name: [row for row in rows if row["variant"] == name] for name in dict.fromkeys(row["variant"] for row in rows)}
    baseline = [row["accuracy_after"] for row in by_variant[SYNCHRONOUS]]
    verdicts = []
    for name, members in by_variant.items():
        found = [row["accuracy_after"] for row in members]
        mean = statistics.mean(found)
        error = math.sqrt(mean * (1 - mean) / members[0]["num_problems"])
        verdicts.append(
            {
                "variant": name,
                "accuracy_mean": mean,
                "accuracy_min": min(found),
                "accuracy_max": max(found),
                "difference": mean - statistics.mean(baseline),
                "within_synchronous_spread": min(baseline) - error <= mean <= max(baseline) + error,
                "training_s": statistics.median(row["training_s"] for row in members),
                "speed_up": statistics.median(row["training_s"] for row in by_variant[SYNCHRONOUS]) / statistics.median(row["training_s"] for row in members),
            }
        )
    return verdicts


def main() -> None:
    """Run the jobs, seeds outermost, so that a busy moment of the machine meets all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of each job")
    parser.add_argument("--staleness", type=int, default=4, help="eta of the asynchronous variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--options", default="", help="further options of `areal-hpc run laptop`, for all variants")
    arguments = parser.parse_args()
    common = ["--train.num-steps", str(arguments.steps), "--evaluation.every", "0", *shlex.split(arguments.options)]
    rows = []
    for seed in arguments.seeds:
        for name, options in variants(arguments.staleness).items():
            rows.append(run(name, seed, [*options, *common]))
            print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    verdicts = judge(rows)
    for verdict in verdicts:
        low, mean, high = (100 * verdict[key] for key in ("accuracy_min", "accuracy_mean", "accuracy_max"))
        print(f"{verdict['variant']:<28}{mean:6.1f} % ({low:.1f} to {high:.1f})  {verdict['training_s']:6.0f} s  x{verdict['speed_up']:.2f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(json.dumps({"benchmark": "learning", "commit": commit, "hardware": hardware(), "runs": rows, "variants": verdicts}))


if __name__ == "__main__":
    main()
