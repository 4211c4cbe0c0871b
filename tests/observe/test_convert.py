"""The log in other forms holds the same numbers, in the right order, once; what is missing is named in one line. The index joins attempts as the report does."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest

from areal_hpc.cli import main
from areal_hpc.config import ConfigError
from areal_hpc.observe import convert as module
from areal_hpc.observe.convert import Sink, convert, send
from areal_hpc.observe.index import write_index
from areal_hpc.observe.runs import SAMPLED, STEP_OF, load
from areal_hpc.observe.schema import TABLES
from areal_hpc.observe.telemetry import Log, read_table, sidecar_path

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
synthetic = importlib.util.module_from_spec(_spec)
sys.modules["synthetic"] = synthetic
_spec.loader.exec_module(synthetic)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 1 to 12, then from step 9 on again, to 15."""
    folder = tmp_path / "run"
    for attempt, first, last in ((1, 1, 12), (2, 9, 15)):
        attributes = {"attempt": attempt, "start_unix": 1000.0 * attempt, "config": "recipe: laptop\nseed: 0\n"}
        synthetic.write_attempt(folder, attempt, synthetic.Shape(first_step=first, last_step=last, seed=attempt, attributes=attributes))
    return folder


class Collected(Sink):
    def __init__(self) -> None:
        self.rows: list[tuple[int, float, dict[str, float]]] = []
        self.closed = False

    def add(self, step: int, at_unix: float, values: Mapping[str, float]) -> None:
        self.rows.append((step, at_unix, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_every_step_is_sent_once_with_its_time(run_dir: Path) -> None:
    run, sink, sent = load(run_dir), Collected(), set()
    send(run, sink, sent)
    send(run, sink, sent)
    steps = [(step, at, values["steps/reward_mean"]) for step, at, values in sink.rows if "steps/reward_mean" in values]
    ends = [1000 + 15 + 2.0 * k for k in range(1, 9)] + [2000 + 15 + 2.0 * k for k in range(1, 8)]
    assert [step for step, _, _ in steps] == list(range(1, 16)) and [at for _, at, _ in steps] == pytest.approx(ends)
    assert [reward for _, _, reward in steps] == run.steps["reward_mean"].tolist()
    assert [step for step, _, values in sink.rows if "evaluations/accuracy" in values] == sorted(run.evaluations["policy_version"].tolist())
    assert all(np.isfinite(value) for _, _, values in sink.rows for value in values.values())


def test_following_sends_what_is_new_and_stops_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sink = tmp_path / "run", Collected()
    synthetic.write_attempt(folder, 1, synthetic.Shape(last_step=4))
    monkeypatch.setattr(module, "TensorBoardSink", lambda _: sink)
    seen = []

    def go_on(_: float) -> None:
        seen.append([step for step, _, values in sink.rows if "steps/loss" in values])
        if len(seen) == 1:
            synthetic.write_attempt(folder, 2, synthetic.Shape(first_step=5, last_step=6))
        else:
            (folder / "attempt-2" / "exit.json").write_text('{"status": 0}')

    convert(folder, "tensorboard", tmp_path / "out", follow=True, sleep=go_on)
    assert seen == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]] and sink.closed


def test_csv_holds_the_joined_tables(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(run_dir), "--to", "csv", "--out", str(tmp_path / "out")]) == 0
    run = load(run_dir)
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(TABLES) == set(STEP_OF) | set(SAMPLED)
    with (tmp_path / "out" / "steps.csv").open() as file:
        assert [float(row["tokens_per_s"]) for row in csv.DictReader(file)] == run.steps["tokens_per_s"].tolist()
    with (tmp_path / "out" / "events.csv").open() as file:
        assert [(row["attempt"], row["text"]) for row in csv.DictReader(file)] == [("1", "done"), ("2", "done")]
    with (tmp_path / "out" / "timeline.csv").open() as file:
        assert sum(1 for _ in file) == 1 + sum(map(len, run.timelines))


@pytest.mark.parametrize("form", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == form]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, form, None)
    assert main(["convert", str(run_dir), "--to", form, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"pip install 'areal-hpc[{form}]'" in said


def test_tensorboard_reads_it(run_dir: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="extra `tensorboard` is not installed")
    convert(run_dir, "tensorboard", tmp_path / "out")
    events = reader.EventAccumulator(str(tmp_path / "out")).Reload()
    found = events.Scalars("steps/reward_mean")
    run = load(run_dir)
    assert [event.step for event in found] == run.steps["step"].tolist()
    assert [event.value for event in found] == pytest.approx(run.steps["reward_mean"].tolist(), rel=1e-6)
    assert found[0].wall_time == pytest.approx(1017.0)
    assert [event.step for event in events.Scalars("evaluations/accuracy")] == sorted(run.evaluations["policy_version"].tolist())


def test_wandb_keeps_it_on_this_machine(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="extra `wandb` is not installed")
    convert(run_dir, "wandb", tmp_path / "out")
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    (record,) = folder.glob("run-*.wandb")
    data = record.read_bytes()
    assert b"steps/reward_mean" in data and b"evaluations/accuracy" in data


# ---- the index


def test_index_joins_as_the_report_does(run_dir: Path, tmp_path: Path) -> None:
    path = write_index(run_dir)
    run = load(run_dir)
    moved = tmp_path / "moved"
    shutil.move(run_dir, moved)
    with h5py.File(moved / path.name, "r") as file:
        for table in ("steps", "trajectories", "pushes"):
            np.testing.assert_array_equal(file[table][:], getattr(run, table))
        for table in SAMPLED:
            np.testing.assert_array_equal(file[table][:], np.concatenate(run.sampled[table]))
        assert file["steps"].attrs["wall_s"].decode().startswith("[s] duration")
        attempts = file["attempts"][:]
        assert attempts["attempt"].tolist() == [1, 2] and attempts["steps_first"].tolist() == [0, 8] and attempts["steps_rows"].tolist() == [8, 7]
        first, rows = attempts["timeline_first"][1], attempts["timeline_rows"][1]
        np.testing.assert_array_equal(file["timeline"][first : first + rows], run.timelines[1])
        assert set(TABLES) | {"attempts"} == set(file)


KILLED = """
import os, signal, sys
from pathlib import Path
from areal_hpc.observe.telemetry import Log
log = Log.create(Path(sys.argv[1]), {"attempt": 3})
log.append("timeline", [{"rank": 0, "role": 0, "phase": 1, "start_s": float(k), "stop_s": k + 1.0} for k in range(500)])
log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_index_over_an_attempt_that_was_killed(run_dir: Path) -> None:
    """HDF5 fills in zeros, without a word, for a source that it cannot open: through swmr=True it can."""
    (run_dir / "attempt-3").mkdir()
    command = [sys.executable, "-c", KILLED, str(run_dir / "attempt-3" / "log.h5")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == -signal.SIGKILL
    with h5py.File(write_index(run_dir), "r", swmr=True, locking=False) as file:
        assert file["timeline"]["stop_s"][-500:].tolist() == [k + 1.0 for k in range(500)]


def test_what_an_index_cannot_join_is_said(run_dir: Path) -> None:
    log = run_dir / "attempt-2" / "log.h5"
    sidecar_path(log).write_text("")
    with pytest.raises(ConfigError, match=r"degraded: some of its rows are in log\.degraded\.jsonl"):
        write_index(run_dir)
    sidecar_path(log).unlink()
    with h5py.File(log, "r+", libver=("v110", "v110")) as file:
        rows = read_table(run_dir / "attempt-1" / "log.h5", "pushes")
        del file["pushes"]
        file.create_dataset("pushes", data=rows[["version", "bytes"]])
    with pytest.raises(ConfigError, match="/pushes has other columns"):
        write_index(run_dir)
    assert not list(run_dir.glob("index.h5*"))


def test_index_of_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    Log.create(tmp_path / "attempt-1" / "log.h5", {}).close()
    with h5py.File(write_index(tmp_path), "r") as file:
        assert all(len(file[table]) == 0 for table in TABLES)
