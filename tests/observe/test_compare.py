"""Several runs: groups over seeds, options that differ, intervals against the formula."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.cli import main
from areal_hpc.observe import plots
from areal_hpc.observe.compare import T_95, band, differences, group_by_seed, interval
from areal_hpc.observe.report import comparison_paragraphs, comparison_tables
from areal_hpc.observe.runs import Run, load

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
synthetic = importlib.util.module_from_spec(_spec)
sys.modules["synthetic"] = synthetic
_spec.loader.exec_module(synthetic)


def write_run(folder: Path, seed: int, eta: int, **shape: float) -> Run:
    config = f"recipe: laptop\nseed: {seed}\nrun_dir: {folder}\nstaleness:\n  max_staleness: {eta}\n"
    synthetic.write_attempt(folder, 1, synthetic.Shape(seed=seed, eta=eta, last_step=12, attributes={"cores": 8, "config": config}, **shape))
    return load(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two settings, of one two seeds, interleaved."""
    return [write_run(tmp_path / "a0", 0, 4), write_run(tmp_path / "b0", 0, 1, train_s=3.6), write_run(tmp_path / "a1", 1, 4)]


def test_runs_that_differ_in_their_seed_are_one_group(runs: list[Run]) -> None:
    groups = group_by_seed(runs)
    assert [(group.label, [run.name for run in group.runs]) for group in groups] == [("max_staleness 4 (2 seeds)", ["a0", "a1"]), ("max_staleness 1", ["b0"])]
    assert differences(runs) == {"seed": ["0", "0", "1"], "staleness.max_staleness": ["4", "1", "4"]}


@pytest.mark.parametrize("degrees", range(1, len(T_95) + 1))
def test_quantiles_of_students_t(degrees: int) -> None:
    """The density, integrated numerically between the quantiles, gives 95 %."""
    quantile = T_95[degrees - 1]
    x = np.linspace(0, quantile, 200_001)
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    assert 2 * np.trapezoid(norm * (1 + x * x / degrees) ** (-(degrees + 1) / 2), x) == pytest.approx(0.95, abs=1e-4)


def test_interval_over_seeds() -> None:
    mean, half = interval([1.0, 2.0, 6.0, math.nan])
    assert mean == pytest.approx(3.0) and half == pytest.approx(4.303 * np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert interval([2.0])[0] == 2.0 and math.isnan(interval([2.0])[1])
    assert all(map(math.isnan, interval([])))


def test_interval_covers_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(5.0, 2.0, (2000, 3))
    found = [interval(row) for row in draws]
    assert np.mean([abs(mean - 5.0) <= half for mean, half in found]) == pytest.approx(0.95, abs=0.015)


def test_band_takes_the_steps_that_all_seeds_have() -> None:
    over = band([(np.array([1, 2, 3, 5]), np.array([1.0, 2.0, 3.0, 5.0])), (np.array([2, 3, 4, 5]), np.array([4.0, 3.0, 9.0, 7.0]))])
    assert over.x.tolist() == [2, 3, 5] and over.mean.tolist() == [3.0, 3.0, 6.0]
    assert over.high[0] - over.mean[0] == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2)) and over.high[1] == 3.0


def test_words_and_tables(runs: list[Run]) -> None:
    groups = group_by_seed(runs)
    said = comparison_paragraphs(groups)
    assert "one seed" in said[0] and "1.9" in said[1] and said[1].startswith("Highest throughput: max_staleness 4 (2 seeds)")
    assert said[2].startswith("max_staleness 4 (2 seeds) was training bound") and said[3].startswith("max_staleness 1 was training bound")
    of_groups, of_runs, differing = comparison_tables(groups)
    assert [row[:2] for row in of_groups.rows] == [["max_staleness 4 (2 seeds)", "2"], ["max_staleness 1", "1"]]
    assert "+-" in of_groups.rows[0][3] and "+-" not in of_groups.rows[1][3]
    assert [row[0] for row in of_runs.rows] == ["a0", "a1", "b0"] and [row[0] for row in differing.rows] == ["seed", "staleness.max_staleness"]


def test_differences_beyond_chance_are_told_from_others(tmp_path: Path) -> None:
    """Two settings with two equal seeds each have intervals of width zero: different means are then different."""
    runs = [write_run(tmp_path / name, seed, eta) for name, seed, eta in (("a0", 0, 4), ("a1", 1, 4), ("b0", 0, 1), ("b1", 1, 1))]
    assert "not told apart from max_staleness 1 (2 seeds)" in comparison_paragraphs(group_by_seed(runs))[0]
    for run in runs[2:]:
        run.evaluations["accuracy"] /= 2
    assert "told apart" not in comparison_paragraphs(group_by_seed(runs))[0]


def test_comparison_folder(tmp_path: Path, runs: list[Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "COMPARED", plots.COMPARED[:2])  # test_page.py draws all
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.png").write_text("not ours")
    assert main(["report", *(str(run.folder) for run in runs), "--out", str(out)]) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    text = (out / "report.md").read_text()
    assert "![reward](reward.png)" in text and "## Options that differ" in text and (out / "mine.png").exists()
    rows = (out / "steps.csv").read_text().splitlines()
    assert rows[0].startswith("run,step,") and len(rows) == 1 + 3 * 12 and rows[13].startswith("b0,1,")
