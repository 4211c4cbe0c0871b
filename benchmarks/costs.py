"""What surrounds a step: logging it, reading the log, loading data, asking for help.

.venv/bin/python benchmarks/costs.py      # a few seconds; medians; the last line is one JSON object
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from areal_hpc.config import Data
from areal_hpc.data.datasets import load_problems
from areal_hpc.observe.schema import TABLES
from areal_hpc.observe.telemetry import Log, hardware, read_table
from areal_hpc.observe.timeline import Phases

LOGGED = {"steps": 1, "trajectories": 512, "timeline": 512, "ranks": 64, "pushes": 1}
"""Rows of one step of 512 trajectories on 64 ranks."""


def median_s(action: Callable[[], object], repeat: int) -> float:
    """Median seconds of `repeat` calls."""
    seconds = []
    for _ in range(repeat):
        began_at = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds)


def main() -> None:
    """Print one line per cost, then the JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        log = Log.create(Path(folder) / "step.h5", {})
        rows = {table: np.zeros(num, TABLES[table].dtype) for table, num in LOGGED.items()}

        def log_step() -> None:
            for table in LOGGED:
                log.append(table, rows[table])
            log.flush()

        found = {"log_step_s": median_s(log_step, 20)}
        log.close()
        large = Log.create(Path(folder) / "large.h5", {})
        large.append("trajectories", np.zeros(1_000_000, TABLES["trajectories"].dtype))
        large.close()
        found["read_million_trajectories_s"] = median_s(lambda: read_table(large.path, "trajectories"), 5)
        lines = "".join(f'{{"question": "What is {k} plus 1?", "answer": "{k + 1}"}}\n' for k in range(20_000))
        (Path(folder) / "data.jsonl").write_text(lines)
        found["load_20k_jsonl_rows_s"] = median_s(lambda: load_problems(Data(path=str(Path(folder) / "data.jsonl"))), 3)
    found["load_20k_generated_problems_s"] = median_s(lambda: load_problems(Data()), 3)
    phases = Phases(0, "generation")
    found["sign_of_life_s"] = median_s(lambda: [phases.enter("decode") for _ in range(10_000)], 9) / 10_000
    help_command = [str(Path(sys.executable).parent / "areal-hpc"), "--help"]
    found["help_s"] = median_s(lambda: subprocess.run(help_command, check=True, capture_output=True), 5)
    for name, seconds in found.items():
        print(f"{name:32s} {seconds:.4f}")
    print(json.dumps({"benchmark": "costs", "hardware": hardware(), **found}))


if __name__ == "__main__":
    main()
