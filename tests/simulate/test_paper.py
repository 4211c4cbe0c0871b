"""The table of docs/simulator.md is what the results file says, and the results file is what the simulator computes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from areal_hpc.simulate import paper

ROOT = Path(__file__).parents[2]
RESULTS = {(row["table"], row["setting"]): row for row in json.loads((ROOT / "benchmarks" / "results" / "simulated.json").read_text())["rows"]}


def test_documented_table_is_the_results() -> None:
    """Every row, in both directions, with the digits that are printed."""
    text = (ROOT / "docs" / "simulator.md").read_text()
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) % \| (\w+) \|$", text, re.MULTILINE)
    documented = {(table, setting): (float(theirs), float(ours), float(error), verdict) for table, setting, theirs, ours, error, verdict in found}
    assert documented == {key: (round(row["paper"], 2), round(row["ours"], 2), round(100 * row["error"], 1), row["verdict"]) for key, row in RESULTS.items()}


def test_results_hold_every_number_of_the_paper() -> None:
    expected = len(paper.FIG_5C) + sum(map(len, paper.FIG_4.values())) + len(paper.TABLE_7) + len(paper.INTERRUPTION) + len(paper.DYNAMIC_BATCHING)
    assert len(RESULTS) == expected
    assert [key for key, row in RESULTS.items() if row["verdict"] == "calibrated"] == [("Fig. 5c", "eta = inf")]


def test_cheap_rows_are_computed_again() -> None:
    check([*paper.dynamic_batching(), *itertools.islice(paper.table_7(), 2)])


@pytest.mark.slow
def test_more_rows_are_computed_again() -> None:
    """Fig. 5c without eta = inf, and the rest of Table 7."""
    check([*itertools.islice(paper.fig_5c(), 6), *paper.table_7()])


def check(rows: list[paper.Row]) -> None:
    assert rows
    for row in rows:
        assert row.ours == pytest.approx(RESULTS[row.table, row.setting]["ours"], abs=1e-3), row
