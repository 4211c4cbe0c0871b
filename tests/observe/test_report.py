"""The report says what the hand-made runs of synthetic.py are known to contain."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from areal_hpc.config import ConfigError
from areal_hpc.observe import plots
from areal_hpc.observe.report import format_summary, markdown, summary, write_report
from areal_hpc.observe.runs import load, phase_seconds, rank_seconds, wall_time
from areal_hpc.observe.schema import PHASES, TABLES
from areal_hpc.observe.telemetry import Log, read_table

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
synthetic = importlib.util.module_from_spec(_spec)
sys.modules["synthetic"] = synthetic
_spec.loader.exec_module(synthetic)
Shape, write_attempt = synthetic.Shape, synthetic.write_attempt


@pytest.fixture
def few_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at the text: drawing all takes seconds."""
    monkeypatch.setattr(plots, "COMPARED", plots.COMPARED[:2])
    monkeypatch.setattr(plots, "SINGLE", ())


def test_summary_of_a_known_run(tmp_path: Path) -> None:
    """3 + 1 ranks, 40 steps of 2 s: decode 1 s of it; train 1.6 s, push 0.4 s. 10 s of start and 2 x 5 s of evaluation around them."""
    log = write_attempt(tmp_path, 0, Shape())
    numbers = summary(tmp_path)
    assert (numbers["steps"], numbers["attempts"], numbers["generation_ranks"], numbers["training_ranks"]) == (40, 1, 3, 1)
    assert numbers["training_s"] == pytest.approx(80.0) and numbers["wall_s"] == pytest.approx(100.0)
    assert numbers["generation_busy"] == pytest.approx(0.5) and numbers["training_busy"] == pytest.approx(0.8)
    trained = read_table(log, "trajectories")
    assert numbers["staleness_mean"] == pytest.approx(trained["age"].mean())
    assert (numbers["staleness_max"], numbers["staleness_bound"]) == (trained["age"].max(), 4)
    tokens_per_step = [int((rows["prompt_tokens"] + rows["answer_tokens"]).sum()) for k in range(1, 41) for rows in [trained[trained["batch"] == k]]]
    assert numbers["tokens"] == sum(tokens_per_step)
    assert numbers["tokens_per_s_median"] == pytest.approx(np.median(tokens_per_step) / 2.0)
    assert numbers["accuracy_before"] == pytest.approx(205 / 512) and numbers["accuracy_after"] == pytest.approx(443 / 512)
    text = format_summary(numbers)
    assert "40.0 % -> 86.5 % (+- 3.0) of 512 held-out problems" in text
    assert "generation 50.0 %, training 80.0 % (3 + 1 ranks)" in text
    assert len({line[:12].rstrip() for line in text.splitlines()}) == len(text.splitlines()) == 6


@pytest.mark.parametrize(
    ("shape", "starts", "contains"),
    [
        (Shape(), "training bound", "generation ranks stood at the gate 50 %; 2 + 2 ranks would balance (--topology.generation-fraction 0.5; it was 3 + 1)"),
        (
            Shape(wait_s=2.0, decode_s=9.0),
            "generation bound",
            "waited for data 50 % of the time, generation ranks stood at the gate 0 %; 3 + 1 is the best split of these ranks: add generation ranks",
        ),
        (Shape(wait_s=2.0, decode_s=3.0), "generation bound", "A larger max_staleness would open the gate earlier"),
        (Shape(decode_s=1.9), "balanced", "waited for data 0 %"),
        (Shape(wait_s=1.0, decode_s=1.0, eta=0), "synchronous", "the roles take turns: training ranks waited for data 33 %"),
        (Shape(push_s=1.6), "training bound", "Weight pushes took 50 %"),
        (Shape(attributes={"cores": 2}), "training bound", "All 4 ranks were seen from a node with 2 usable cores"),
    ],
)
def test_bottleneck_in_words(tmp_path: Path, shape: Shape, starts: str, contains: str) -> None:
    write_attempt(tmp_path, 0, shape)
    text = summary(tmp_path)["bottleneck"]
    assert text.startswith(starts) and contains in text


def test_attempts_join_without_gap_or_double(tmp_path: Path) -> None:
    """The second attempt went back to step 30 of 40: its rows of 30 to 60 count."""
    first, second = write_attempt(tmp_path, 0, Shape()), write_attempt(tmp_path, 10, Shape(first_step=30, last_step=60, seed=1))
    (tmp_path / "attempt-2").mkdir()  # died before it had a log
    run = load(tmp_path)
    assert run.steps["step"].tolist() == list(range(1, 61))
    assert run.steps["reward_mean"][29:].tolist() == read_table(second, "steps")["reward_mean"].tolist()
    assert run.steps["reward_mean"][:29].tolist() == read_table(first, "steps")["reward_mean"][:29].tolist()
    assert np.bincount(run.trajectories["batch"])[1:].tolist() == [8] * 60
    assert run.evaluations["policy_version"].tolist() == [0, 29, 60]
    assert wall_time(run) == pytest.approx(100.0 + 82.0)
    assert summary(tmp_path)["attempts"] == 2 and "in 2 attempts" in format_summary(summary(tmp_path))


def test_time_of_every_rank_sums_to_the_wall_time(tmp_path: Path) -> None:
    write_attempt(tmp_path, 0, Shape(wait_s=0.7, decode_s=1.3))
    run = load(tmp_path)
    for seconds in rank_seconds(run, whole=True).values():
        assert seconds.sum() == pytest.approx(wall_time(run), rel=1e-9)
    for seconds in rank_seconds(run, whole=False).values():
        assert seconds.sum() == pytest.approx(40 * 2.7, rel=1e-9)


def test_phases_are_cut_at_the_window() -> None:
    rows = np.array([(3, 0, 1, 0.0, 4.0), (3, 0, 2, 4.0, 10.0), (4, 0, 1, 8.0, 9.0)], TABLES["timeline"].dtype)
    seconds = phase_seconds(rows, 3.0, 6.0)
    assert {rank: {PHASES[k]: s for k, s in enumerate(of_phase) if s} for rank, of_phase in seconds.items()} == {3: {"decode": 1.0, "gated": 2.0}, 4: {}}


def test_report_folder(tmp_path: Path) -> None:
    write_attempt(tmp_path, 0, Shape(last_step=5, eta=1))
    report = write_report(tmp_path)
    text = report.read_text()
    assert report == tmp_path / "report" / "report.md"
    assert text.splitlines()[2].startswith("The run was training bound: ")
    assert "Some trajectories were older than eta = 1" in text
    assert "recipe: laptop" in text and "| 0 | generation |" in text and "| stop | done |" in text
    for name in ("reward", "held_out", "staleness", "throughput", "time", "lengths", "pushes", "ring", "verdicts", "queues", "step_time", "waiting"):
        assert f"({name}.png)" in text
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "report" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert [float(row["reward_mean"]) for row in rows] == load(tmp_path).steps["reward_mean"].tolist()


def test_several_answers_and_sources(tmp_path: Path, few_plots: None) -> None:
    (tmp_path / "attempt-1").mkdir()
    log = Log.create(tmp_path / "attempt-1" / "log.h5", {})
    found = {"num_problems": 8, "k": 4, "correct": 8, "accuracy": 0.25, "ci95": 0.2, "ci_low": 0.1, "ci_high": 0.5, "pass_k": 0.75, "answer_tokens_mean": 9.5}
    for version in (0, 5):
        log.append("evaluations", synthetic.row_of("evaluations", policy_version=version, step=version, majority_k=np.nan, **found))
        for source in ("a|b", "c"):
            row = synthetic.row_of("evaluation_sources", policy_version=version, step=version, source=source, majority_k=0.5, **found)
            log.append("evaluation_sources", row)
    log.close()
    text = write_report(tmp_path).read_text()
    assert "4 answers each, pass@4 75.0 %" in text
    assert "| 5 | 25.0 % (10.0 to 50.0) | 75.0 % | - | 8 | 4 | 9.5 |" in text
    assert "## Evaluation of version 5 by source" in text and "| a\\|b | 25.0 % (10.0 to 50.0) | 75.0 % | 50.0 % | 8 | 4 | 9.5 |" in text


def test_log_of_an_earlier_version(tmp_path: Path, few_plots: None) -> None:
    """Without the table and the columns that came later: its numbers as they were."""
    path = write_attempt(tmp_path, 0, Shape(last_step=5))
    added = {"k", "ci_low", "ci_high", "pass_k", "majority_k", "truncated", "no_answer", "ungraded"}
    with h5py.File(path, "r", locking=False) as new, h5py.File(path.with_name("old.h5"), "w", libver=("v110", "v110")) as old:
        old.attrs.update(new.attrs)
        for name in new:
            if name != "evaluation_sources":
                rows = new[name][:]
                old.create_dataset(name, data=rows[[column for column in rows.dtype.names if name != "evaluations" or column not in added]])
    path.with_name("old.h5").replace(path)
    assert summary(tmp_path)["pass_k"] is None
    assert "| 5 | 54.1 % (+- 4.3) | 512 | 1 | 40.0 | 5.0 |" in write_report(tmp_path).read_text()


def test_run_that_died_before_its_first_step(tmp_path: Path, few_plots: None) -> None:
    (tmp_path / "attempt-0").mkdir()
    Log.create(tmp_path / "attempt-0" / "log.h5", {}).close()
    numbers = summary(tmp_path)
    assert numbers["steps"] == 0 and numbers["accuracy_after"] is None and "no training step finished" in numbers["bottleneck"]
    assert "accuracy    - -> -" in format_summary(numbers)
    assert "no training step finished" in write_report(tmp_path).read_text()


def test_without_a_bound(tmp_path: Path) -> None:
    write_attempt(tmp_path, 0, Shape(eta=-1, last_step=5))
    assert "bound inf versions" in format_summary(summary(tmp_path))
    assert "older than eta" not in markdown(load(tmp_path), [])


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        summary(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no log of a run"):
        write_report(tmp_path)
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0" / "log.h5").write_text("not HDF5")
    with pytest.raises(ConfigError, match="not a readable log") as caught:
        summary(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


def test_plots_are_imported_only_to_draw() -> None:
    code = "import sys, areal_hpc.observe.report; print([m for m in ('torch', 'matplotlib', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
