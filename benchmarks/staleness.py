"""Throughput and final accuracy by permitted staleness, naive and decoupled PPO: the paper's Table 2 and Fig. 5c on the demo's job (it learns sums).

    .venv/bin/python benchmarks/staleness.py                          # 13 jobs of 150 steps, about 25 minutes on 2 quiet cores
    .venv/bin/python benchmarks/staleness.py --etas 0 4 16 --seeds 0 1 2
    .venv/bin/python benchmarks/staleness.py --modes dropless drop    # decoupled PPO under a hard bound too: every trained trajectory is at most eta old

Accuracy is that of held-out problems at temperature 1. Throughput is the median step's. The demo is training bound, so staleness buys less speed here than in the
paper, where generation is the slower half; benchmarks/speedup.py measures that end. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from learning import run
from measured import commit

from areal_hpc.observe.telemetry import hardware

PAPER = {
    "0": (42.0, 42.0, 128.7),
    "1": (41.8, 42.1, 269.3),
    "2": (40.0, 41.8, 356.6),
    "4": (23.3, 42.2, 356.6),
    "8": (35.7, 41.0, 371.7),
    "16": (35.8, 38.7, 382.4),
    "inf": (34.0, 36.9, 396.8),
}
"""eta -> AIME24 accuracy naive, decoupled (%), throughput (k tokens/s) of arXiv 2505.24298."""


def variants(etas: Sequence[str], modes: Sequence[str]) -> list[tuple[str, str, str]]:
    """(eta, mode, objective). At eta 0 the two objectives are one and every mode is the same; without a gate there is no bound to keep."""
    found = []
    for eta in etas:
        found += [(eta, "count", objective) for objective in (("decoupled",) if eta == "0" else ("decoupled", "ppo"))]
        found += [(eta, mode, "decoupled") for mode in modes if mode != "count" and eta not in ("0", "inf")]
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds of each variant: mean accuracy with its range, medians of the rest; the speed-up over eta = 0 where that was run."""
    keys = list(dict.fromkeys((row["eta"], row["mode"], row["objective"]) for row in rows))
    found: list[dict[str, Any]] = []
    for eta, mode, objective in keys:
        members = [row for row in rows if (row["eta"], row["mode"], row["objective"]) == (eta, mode, objective)]
        accuracy = [row["accuracy_after"] for row in members]
        medians = {key: statistics.median(row[key] for row in members) for key in ("tokens_per_s_median", "staleness_mean", "staleness_max", "training_s")}
        found.append(
            {"eta": eta, "mode": mode, "objective": objective, "accuracy": statistics.mean(accuracy), "range": [min(accuracy), max(accuracy)], **medians}
        )
    synchronous = next((row["training_s"] for row in found if row["eta"] == "0"), None)
    return [row | {"speed_up": synchronous / row["training_s"] if synchronous else None} for row in found]


def main() -> None:
    """Run the jobs, seeds outermost, so that a busy moment of the machine meets all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--etas", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--modes", nargs="+", choices=("count", "dropless", "drop", "mask"), default=["count"], help="staleness modes, for decoupled PPO")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        for eta, mode, objective in variants(arguments.etas, arguments.modes):
            options = ["--staleness.max-staleness", eta, "--staleness.mode", mode, "--train.objective", objective]
            found = run(f"eta {eta} {mode} {objective}", seed, [*options, "--train.num-steps", str(arguments.steps), "--evaluation.every", "0"])
            rows.append(found | {"eta": eta, "mode": mode, "objective": objective})
    summary = table(rows)
    for row in summary:
        speed_up = f"{row['speed_up']:.2f}x" if row["speed_up"] else "-"
        accuracy = f"{100 * row['accuracy']:5.1f} % ({100 * row['range'][0]:.1f} to {100 * row['range'][1]:.1f})"
        rate = f"age {row['staleness_mean']:.1f}  {row['tokens_per_s_median']:7,.0f} tokens/s  {speed_up}"
        print(f"eta {row['eta']:>3} {row['mode']:<8} {row['objective']:<9} {accuracy}  {rate}")
    print(json.dumps({"benchmark": "staleness", "commit": commit(), "hardware": hardware(), "paper": PAPER, "table": summary, "runs": rows}))


if __name__ == "__main__":
    main()
