"""The simulator against every table of the paper (arXiv 2505.24298), and how fast it is. No run, no GPU: one core, about six minutes.

    .venv/bin/python benchmarks/simulated.py                       # all tables
    .venv/bin/python benchmarks/simulated.py --tables fig-5c       # some of them

One row per number of the paper: paper, ours, error, and whether it lies within what was aimed at (10 % for Fig. 5c, 15 % for the ratios of Fig. 4, 20 % for the
hold-outs: Table 7, interruption, dynamic batching). Parameters and their sources: docs/simulator.md. Then seconds of processor time for 512 and 4,096 GPUs.
Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

from areal_hpc.observe.telemetry import hardware
from areal_hpc.simulate import paper
from areal_hpc.simulate.cluster import simulate


def compare(names: list[str]) -> list[dict]:
    """Rows of these tables, printed as they come."""
    print(f"{'table':18s} {'setting':24s} {'unit':8s} {'paper':>8s} {'ours':>8s} {'error':>8s}  aimed at")
    rows = []
    for name in names:
        for row in paper.TABLES[name]():
            aim = f"{100 * row.target:.0f} %: {row.verdict}" if row.target else row.verdict
            print(f"{row.table:18s} {row.setting:24s} {row.unit:8s} {row.paper:8.2f} {row.ours:8.2f} {100 * row.error:+7.1f}%  {aim}", flush=True)
            rows.append(
                {"table": row.table, "setting": row.setting, "unit": row.unit, "paper": round(row.paper, 3), "ours": round(row.ours, 3)}
                | {"error": round(row.error, 4), "target": row.target, "verdict": row.verdict}
            )
    return rows


def speed() -> list[dict]:
    """Processor seconds of the simulator itself: 7B, 32k, eta 8."""
    found = []
    for gpus, steps, batch in ((512, 250, paper.BATCH), (4096, 10, 8 * paper.BATCH)):
        job = paper.asynchronous("7b", gpus, 32768, 8, steps, batch=batch)
        began = time.process_time()
        result = simulate(job)
        seconds = time.process_time() - began
        print(f"{gpus} GPUs, batches of {batch}, {steps} steps ({result.num_tokens_decoded:.3g} tokens): {seconds:.1f} s of one core", flush=True)
        found.append({"gpus": gpus, "batch_size": batch, "steps": steps, "tokens_decoded": result.num_tokens_decoded, "cpu_s": round(seconds, 1)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(paper.TABLES), default=list(paper.TABLES))
    parser.add_argument("--no-speed", action="store_true", help="leave out how fast the simulator is")
    arguments = parser.parse_args()
    rows = compare(arguments.tables)
    counted = [row for row in rows if row["target"]]
    missed = sum(row["verdict"] == "MISSED" for row in counted)
    print(f"{len(counted) - missed} of {len(counted)} within what was aimed at, {missed} missed; {len(rows) - len(counted)} calibrated")
    result = {"benchmark": "simulated", "hardware": hardware(), "rows": rows, "within": len(counted) - missed, "missed": missed}
    print(json.dumps(result | ({} if arguments.no_speed else {"speed": speed()})))


if __name__ == "__main__":
    main()
