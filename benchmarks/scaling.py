"""Throughput by number of ranks, asynchronous beside the synchronous split and colocated runs: here on ranks that share 2 cores, on a cluster from its runs.

    .venv/bin/python benchmarks/scaling.py                       # 1+1, 2+1, 3+1 and 6+2 ranks, about 12 minutes on 2 quiet cores
    .venv/bin/python benchmarks/scaling.py --quick               # one round of a few steps on 1+1 and 2+1: does it run?
    .venv/bin/python benchmarks/scaling.py --runs runs/scaling-* # sums up what slurm/benchmarks_64gpu.sh left: a folder for each number of ranks

The batch is the same at every number of ranks (strong scaling, as in the paper's Fig. 4). Where ranks share cores, more of them cannot compute more: the rows
beyond one rank a core show what the control plane and the exchange cost, not how the program scales. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from measured import Row, Work, beside, commit, in_rounds, run, show, steady

from areal_hpc.observe.telemetry import hardware

SPLITS = ((1, 1), (2, 1), (3, 1), (6, 2))
WORK = Work(96, 20)
SYNCHRONOUS, ASYNCHRONOUS = "split, eta 0", "eta 8"


def variants(generation: int, training: int) -> dict[str, tuple[str, ...]]:
    """Name -> options, on `generation + training` ranks. A colocated run has a copy of the model on each rank: the cheapest hand-over."""
    ranks = generation + training
    split = ("--topology.num-ranks", str(ranks), "--topology.generation-fraction", f"{generation / ranks:.4f}")
    together = ("--topology.num-ranks", str(ranks), "--topology.mode", "colocated", "--train.replicas", str(ranks))
    return {
        "colocated": (*together, "--staleness.max-staleness", "0"),
        SYNCHRONOUS: (*split, "--staleness.max-staleness", "0"),
        ASYNCHRONOUS: (*split, "--staleness.max-staleness", "8"),
    }


def of_runs(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Rows of runs of a cluster: FOLDER/life-K/VARIANT is a run folder; only runs that came to their end count."""
    found = {}
    for folder in folders:
        ends = [path for path in sorted(folder.glob("life-*/*/attempt-1/exit.json")) if json.loads(path.read_text())["status"] == 0]
        done: dict[str, Row] = {path.parents[1].name: steady(path.parents[1]) for path in ends}
        if done:
            found[folder.name] = beside([done], "split-eta-0" if "split-eta-0" in done else min(done))
    return found


def main() -> None:
    """A table per number of ranks, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps on the two smallest numbers of ranks")
    parser.add_argument("--runs", type=Path, nargs="+", help="sum up runs that are there")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if arguments.runs:
        found = of_runs(arguments.runs)
        for name, rows in found.items():
            print(f"\n{name}")
            show(rows)
    work = Work(WORK.batch_size, 6) if arguments.quick else WORK
    for generation, training in () if arguments.runs else SPLITS[: 2 if arguments.quick else None]:
        name, cores = f"{generation} + {training}", os.cpu_count() or 1
        print(f"\n{name} ranks on {cores} cores{' (shared)' if generation + training > cores else ''}")
        rounds = in_rounds(
            variants(generation, training),
            1 if arguments.quick else arguments.rounds,
            lambda options, seed, to: run((*work.options(), *options), seed, to),
        )
        found[name] = beside(rounds, SYNCHRONOUS)
        show(found[name])
    print(json.dumps({"benchmark": "scaling", "commit": commit(), "hardware": hardware(), "batch_size": work.batch_size, "ranks": found}))


if __name__ == "__main__":
    main()
