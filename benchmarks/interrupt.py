"""What interrupting generation for new weights is worth: tokens/s with it and without, the same lengths, eta 8, one generation and one training rank.

    .venv/bin/python benchmarks/interrupt.py                  # about 8 minutes on 2 quiet cores
    .venv/bin/python benchmarks/interrupt.py --quick          # one round of a few steps: does it run?

    drain                 no new answers are begun until those that run are finished; then the new weights are taken   not interruptible
    interrupt, recompute  weights are swapped between two tokens; the KV cache is computed anew with them              the paper
    interrupt, keep       the same, with the old cache

The paper: +12 % (1.5B) and +17 % (7B) on 4 nodes. Rounds, ratios and intervals are those of benchmarks/speedup.py. Last line: one JSON object; `gain` is the median
gain of the paper's way in the long-tail setting of 16 a batch.
"""

from __future__ import annotations

import argparse
import json

from measured import Work, beside, commit, in_rounds, run, show

from areal_hpc.observe.telemetry import hardware

NOT_INTERRUPTIBLE, PAPER = "drain", "interrupt, recompute"
VARIANTS = {
    NOT_INTERRUPTIBLE: ("--generation.on-update", "drain", "--staleness.max-staleness", "8"),
    PAPER: ("--generation.kv-on-update", "recompute", "--staleness.max-staleness", "8"),
    "interrupt, keep": ("--generation.kv-on-update", "keep", "--staleness.max-staleness", "8"),
}
WORKS = {"long tail, B = 16": Work(16, 60), "long tail, B = 64": Work(64, 30), "constant, B = 16": Work(16, 60, sigma=0.0)}


def main() -> None:
    """A table per setting, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps in the first setting")
    arguments = parser.parse_args()
    works = {name: Work(work.batch_size, 8) for name, work in list(WORKS.items())[:1]} if arguments.quick else WORKS
    found = {}
    for name, work in works.items():
        print(f"\n{name}")
        rounds = in_rounds(
            VARIANTS, 1 if arguments.quick else arguments.rounds, lambda options, seed, to, work=work: run((*work.options(), *options), seed, to)
        )
        found[name] = beside(rounds, NOT_INTERRUPTIBLE)
        show(found[name])
    headline = found[next(iter(found))][PAPER]
    gain = {"gain": headline["ratio"] - 1, "gain_ci": [bound - 1 for bound in headline["ratio_ci"]], "paper": {"1.5B": 0.12, "7B": 0.17}}
    print(json.dumps({"benchmark": "interrupt", **gain, "commit": commit(), "hardware": hardware(), "ranks": "1 + 1", "settings": found}))


if __name__ == "__main__":
    main()
