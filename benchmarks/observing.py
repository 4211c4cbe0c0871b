"""How long it takes to look at large logs: the live view, the tables, the report, the timeline.

    .venv/bin/python benchmarks/observing.py                 # a log of 1 GB in a temporary folder; two minutes on 2 cores
    .venv/bin/python benchmarks/observing.py --gigabytes 0.1

The log has the shape of a long run of 64 ranks: mostly trajectories and intervals. Each command is a process of its own, as a user starts it, and its time is that of the
whole process, imports included: the best of `--repeat`. Tables are read in this process. Targets: watch on 1 GB, and 10^6 trajectories, in 2 s each.
The last line is one JSON object.
What recording costs a run: benchmarks/overheads.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from areal_hpc.observe.schema import PHASES, TABLES
from areal_hpc.observe.telemetry import Log, hardware, read_tail

NUM_RANKS, NUM_GENERATION, BATCH = 64, 48, 512
STEP_S = 30.0
PIECES = 20
"""Flushes in which the log is written."""


def write_log(path: Path, num_bytes: int) -> dict[str, int]:
    """Write a log of about this size; returns table -> rows. A step has 512 trajectories, 64 * 4 intervals, 64 states and one row of /steps."""
    draws = np.random.default_rng(0)
    sizes = {name: TABLES[name].dtype.itemsize for name in ("steps", "trajectories", "timeline", "ranks")}
    per_step = {"steps": 1, "trajectories": BATCH, "timeline": 4 * NUM_RANKS, "ranks": NUM_RANKS}
    num_steps = max(PIECES, num_bytes // sum(sizes[name] * count for name, count in per_step.items()))
    log = Log.create(path, {"config": f"recipe: laptop\ntrain:\n  num_steps: {num_steps}\n", "start_s": 0.0})
    for steps in np.array_split(np.arange(1, num_steps + 1), PIECES):
        rows = {name: np.zeros(len(steps) * count, TABLES[name].dtype) for name, count in per_step.items()}
        for name, count in per_step.items():
            step = np.repeat(steps, count)
            if name == "steps":
                rows[name]["step"] = rows[name]["policy_version"] = step
                rows[name]["wall_s"], rows[name]["end_s"], rows[name]["tokens"] = STEP_S, STEP_S * step, 1_000_000
                rows[name]["reward_mean"], rows[name]["tokens_per_s"] = draws.normal(size=len(step)), 1_000_000 / STEP_S
            elif name == "trajectories":
                rows[name]["batch"], rows[name]["answer_tokens"] = step, draws.integers(100, 30_000, len(step))
            elif name == "ranks":
                rows[name]["rank"] = np.tile(np.arange(NUM_RANKS), len(steps))
                rows[name]["role"], rows[name]["time_s"] = rows[name]["rank"] >= NUM_GENERATION, STEP_S * step
            else:
                ranks, quarter = np.tile(np.repeat(np.arange(NUM_RANKS), 4), len(steps)), np.tile(np.arange(4), len(steps) * NUM_RANKS)
                training = ranks >= NUM_GENERATION
                names = [["decode", "gated", "decode", "swap"], ["wait_data", "prox", "train", "push_wait"]]
                numbers = np.array([[PHASES.index(phase) for phase in phases] for phases in names])
                rows[name]["rank"], rows[name]["role"], rows[name]["phase"] = ranks, training, numbers[training.astype(int), quarter]
                rows[name]["start_s"] = STEP_S * (step - 1 + quarter / 4)
                rows[name]["stop_s"] = rows[name]["start_s"] + STEP_S / 4
            log.append(name, rows[name])
        log.flush()
    log.close()
    return {name: int(num_steps) * count for name, count in per_step.items()}


def best_s(command: list[str], repeat: int) -> float:
    """Wall seconds of the fastest of `repeat` processes."""
    found = []
    for _ in range(repeat):
        began_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - began_s)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the log [GB]")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each command")
    parser.add_argument("--no-report", action="store_true", help="leave out the report, which reads everything")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "attempt-1" / "log.h5"
        path.parent.mkdir(parents=True)
        rows = write_log(path, int(1e9 * arguments.gigabytes))
        program = [sys.executable, "-m", "areal_hpc"]
        result = {"bytes": path.stat().st_size, "rows": rows, "watch_once_s": best_s([*program, "watch", str(path.parents[1]), "--once"], arguments.repeat)}
        most = min(1_000_000, rows["trajectories"])
        began_s = time.perf_counter()
        read = read_tail(path, "trajectories", most)
        result |= {"trajectories_read": len(read), "trajectories_s": time.perf_counter() - began_s}
        if not arguments.no_report:
            result["report_s"] = best_s([*program, "report", str(path.parents[1])], 1)
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps({"benchmark": "observing", **result, **hardware()}))


if __name__ == "__main__":
    main()
