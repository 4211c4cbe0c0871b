"""Markdown tables from the files in `benchmarks/results/`, the paper beside ours: what README.md and docs/performance.md show.

    .venv/bin/python benchmarks/tables.py                      # all that have a file
    .venv/bin/python benchmarks/tables.py speedup interrupt

A result file is the last line of a script's output (`benchmarks/run_all.sh` keeps it). The last line here is one JSON object: which tables there are, and which have no
result yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Found = dict[str, Any]


def times(row: Found) -> str:
    """`2.31x (2.20 to 2.40)`."""
    low, high = row["ratio_ci"]
    return f"{row['ratio']:.2f}x ({low:.2f} to {high:.2f})"


def markdown(header: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def speedup(found: Found) -> list[str]:
    """Asynchronous beside both synchronous baselines; ratios to the better one of the same round."""

    def rows() -> Iterator[Sequence[str]]:
        for name, setting in found["settings"].items():
            for variant, row in setting["variants"].items():
                share = f"{row['tokens_per_s'] / setting['bare_tokens_per_s']:.2f}"
                yield name, variant, f"{row['tokens_per_s']:,.0f}", share, f"{row['staleness_mean']:.1f}", times(row), setting["regime"]

    return markdown(
        ("setting", "variant", "tokens/s", "of the bare engine", "mean age", "beside the better baseline", "regime of the synchronous split"), rows()
    )


def paced(found: Found) -> list[str]:
    """PACED EMULATION, not a measurement of GPUs: the paper's 1.5B setting with device time slept."""
    paper = {"eta 8": "2.77x (hours, Table 1)"}
    simulated = {"split, eta 0": 1.0, "eta 8": found["simulated"]["split, eta 0"]}
    simulated["colocated"] = found["simulated"]["split, eta 0"] / found["simulated"]["colocated"]
    rows = (
        (variant, f"{row['tokens_per_s'] / 1e3:,.0f}k", times(row), f"{simulated[variant]:.2f}x", paper.get(variant, "-"))
        for variant, row in found["variants"].items()
    )
    return markdown(("variant", f"tokens/s of {found['ranks']} emulated H800", "beside split, eta 0", "the simulator alone", "paper"), rows)


def interrupt(found: Found) -> list[str]:
    """Interruptible generation or not."""
    rows = ((name, variant, f"{row['tokens_per_s']:,.0f}", times(row)) for name, variants in found["settings"].items() for variant, row in variants.items())
    paper = ", ".join(f"{model} {1 + gain:.2f}x" for model, gain in found["paper"].items())
    return markdown(("setting", "weights are taken", "tokens/s", f"beside drain (paper: {paper})"), rows)


def staleness(found: Found) -> list[str]:
    """Accuracy and throughput by eta, naive and decoupled."""
    paper = found["paper"]
    base = paper["0"][2]

    def rows() -> Iterator[Sequence[str]]:
        for row in found["table"]:
            naive, decoupled, rate = paper[row["eta"]]
            theirs = naive if row["objective"] == "ppo" else decoupled
            ours = f"{100 * row['accuracy']:.1f} %"
            faster = f"{row['speed_up']:.2f}x" if row["speed_up"] else "-"
            beside = (f"{theirs} %", f"{rate / base:.2f}x") if row["mode"] == "count" else ("-", "-")
            yield row["eta"], row["mode"], row["objective"], ours, beside[0], f"{row['staleness_mean']:.1f}", faster, beside[1]

    return markdown(("eta", "mode", "objective", "accuracy", "paper (AIME24)", "mean age", "speed-up over eta 0", "paper"), rows())


def scaling(found: Found) -> list[str]:
    """By number of ranks."""
    rows = ((ranks, variant, f"{row['tokens_per_s']:,.0f}", times(row)) for ranks, variants in found["ranks"].items() for variant, row in variants.items())
    return markdown(("ranks", "variant", "tokens/s", "beside split, eta 0"), rows)


def quality(found: Found) -> list[str]:
    """Final accuracy, asynchronous beside synchronous."""

    def rows() -> Iterator[Sequence[str]]:
        for task, results in found["tasks"].items():
            for row in results["variants"]:
                spread = f"{100 * row['accuracy_min']:.1f} to {100 * row['accuracy_max']:.1f}"
                within = "yes" if row["within_synchronous_spread"] else "no"
                yield task, row["variant"], f"{100 * row['accuracy_mean']:.1f} % ({spread})", within, f"{row['speed_up']:.2f}x"

    return markdown(("task", "variant", "final accuracy (range of seeds)", "within the synchronous spread", "speed-up"), rows())


def simulated(found: Found) -> list[str]:
    """The simulator beside the paper."""
    rows = (
        (row["table"], row["setting"], row["unit"], f"{row['paper']:.2f}", f"{row['ours']:.2f}", f"{100 * row['error']:+.1f} %", row["verdict"])
        for row in found["rows"]
    )
    return markdown(("table", "setting", "unit", "paper", "simulated", "error", "verdict"), rows)


TABLES: dict[str, Callable[[Found], list[str]]] = {table.__name__: table for table in (speedup, paced, interrupt, staleness, scaling, quality, simulated)}


def main() -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"some of: {', '.join(TABLES)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are: {', '.join(TABLES)}")
    names = arguments.tables or list(TABLES)
    missing = [name for name in names if not (arguments.results / f"{name}.json").exists()]
    for name in names:
        if name not in missing:
            found = json.loads((arguments.results / f"{name}.json").read_text())
            where = found.get("hardware", {})
            print(f"\n### {name}: {(TABLES[name].__doc__ or '').splitlines()[0]}")
            print(f"\n{where.get('cpu_model', '?')}, {where.get('cores', '?')} cores, commit {found.get('commit', 'not noted')}\n")
            print("\n".join(TABLES[name](found)))
    print(json.dumps({"benchmark": "tables", "shown": [name for name in names if name not in missing], "missing": missing}))


if __name__ == "__main__":
    main()
