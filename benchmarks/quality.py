"""Is what is learnt asynchronously as good? Final held-out accuracy on two tasks, eta 4 beside synchronous, several seeds.

    .venv/bin/python benchmarks/quality.py                                   # 12 jobs, about 25 minutes on 2 cores
    .venv/bin/python benchmarks/quality.py --tasks "sums of 3 to 6 terms" --seeds 0 --steps 20

The same judgement as benchmarks/learning.py (which also has naive PPO, on the first task): the mean over the seeds lies within the range of the synchronous seeds,
widened by one standard error of an accuracy on that many problems. The paper: 42.2 against 42.0 (1.5B), 63.1 against 63.0 (7B). Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json

from learning import judge, run, variants
from measured import commit

from areal_hpc.observe.telemetry import hardware

TASKS = {
    "sums of 3 to 6 terms": [],
    "products of 2 factors": ["--data.tasks", "products", "--data.min-terms", "2", "--data.max-terms", "2", "--data.max-digits", "2"],
}
"""Name -> options on top of the recipe `laptop`."""


def main() -> None:
    """Run the jobs, seeds outermost within a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    rivals = {name: options for name, options in variants(4).items() if "naive" not in name}
    found = {}
    for task in arguments.tasks:
        common = [*TASKS[task], "--train.num-steps", str(arguments.steps), "--evaluation.every", "0"]
        rows = [run(name, seed, [*options, *common]) for seed in arguments.seeds for name, options in rivals.items()]
        verdicts = judge(rows)
        before = min(row["accuracy_before"] for row in rows)
        for verdict in verdicts:
            low, mean, high = (100 * verdict[key] for key in ("accuracy_min", "accuracy_mean", "accuracy_max"))
            word = "within" if verdict["within_synchronous_spread"] else "OUTSIDE"
            print(
                f"{task:24s} {verdict['variant']:<24} {100 * before:.1f} -> {mean:.1f} % ({low:.1f} to {high:.1f}), {word} the synchronous spread", flush=True
            )
        found[task] = {"runs": rows, "variants": verdicts}
    within = all(verdict["within_synchronous_spread"] for task in found.values() for verdict in task["variants"])
    print(json.dumps({"benchmark": "quality", "within": within, "commit": commit(), "hardware": hardware(), "tasks": found}))


if __name__ == "__main__":
    main()
