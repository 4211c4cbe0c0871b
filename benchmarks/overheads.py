"""What safety costs: watchdog and log as shares of a run's time, and whatever else options switch on.

    .venv/bin/python benchmarks/overheads.py                                              # about ten minutes on 2 cores
    .venv/bin/python benchmarks/overheads.py --variant "checkpoints=--checkpoint.every 10" # one more variant: name=options of `areal-hpc run`

Runs come in rounds: the laptop recipe without watchdog (the baseline) and with each variant, in an order that turns around from round to round. The time of a run is that
from the end of its first step to the end of its last. The share of a variant is the median over rounds of (time / time of the baseline of that round) - 1, with the
spread of the baseline beside it: below that nothing is resolved. The log cannot be turned off; its share is what training rank 0 spends in phase "log".
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from areal_hpc.observe.schema import PHASES
from areal_hpc.observe.telemetry import hardware, read_table

BASELINE = ("baseline", "--watchdog.no-enabled")
WATCHDOG = ("watchdog", "")


def run(run_dir: Path, options: str, num_steps: int) -> tuple[float, float]:
    """(seconds from the end of the first step to the end of the last, share of them that training rank 0 spent in phase "log")."""
    command = [str(Path(sys.executable).parent / "areal-hpc"), "run", "laptop", "--run-dir", str(run_dir), "--train.num-steps", str(num_steps)]
    subprocess.run([*command, "--evaluation.num-problems", "16", *shlex.split(options)], check=True, stdout=subprocess.DEVNULL)
    log = run_dir / "attempt-1" / "log.h5"
    ends = read_table(log, "steps")["end_s"]
    timeline = read_table(log, "timeline")
    head = timeline[(timeline["role"] == 1) & (timeline["phase"] == PHASES.index("log"))]
    within = np.clip(np.minimum(head["stop_s"], ends[-1]) - np.maximum(head["start_s"], ends[0]), 0, None)
    seconds = float(ends[-1] - ends[0])
    return seconds, float(within.sum()) / seconds


def main() -> None:
    """Print one line per variant, then the JSON object."""
    parser = argparse.ArgumentParser(description="cost of watchdog, log and other options", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS")
    arguments = parser.parse_args()
    variants = [BASELINE, WATCHDOG, *(tuple(text.split("=", 1)) for text in arguments.variant)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in variants}
    log_shares = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            for name, options in variants if turn % 2 == 0 else variants[::-1]:
                found_s, log_share = run(Path(folder) / f"{name}-{turn}", options, arguments.steps)
                seconds[name].append(found_s)
                log_shares.append(log_share)
                print(f"round {turn + 1}: {name:12s} {found_s:7.2f} s, log {100 * log_share:.2f} %", file=sys.stderr, flush=True)
    base = seconds["baseline"]
    shares = {name: statistics.median(a / b for a, b in zip(values, base, strict=True)) - 1 for name, values in seconds.items() if name != "baseline"}
    spread = (max(base) - min(base)) / statistics.median(base)
    for name, share in shares.items():
        print(f"{name:12s} {100 * share:+.2f} % of the run's time (baseline runs differ by {100 * spread:.1f} %)")
    print(f"{'log':12s} {100 * statistics.median(log_shares):.2f} %")
    found = {"seconds": seconds, "share": shares, "baseline_spread": spread, "log_share": statistics.median(log_shares), "steps": arguments.steps}
    print(json.dumps({"benchmark": "overheads", "hardware": hardware(), "variants": dict(variants), **found}))


if __name__ == "__main__":
    main()
