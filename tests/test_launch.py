"""The local launcher: which mpiexec, what it decides from the files a job leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_hpc.config import Config, ConfigError
from areal_hpc.launch.local import Launcher, create_run_dir, discard_run_dir, final_status, find_launcher, is_rank, world_rank_hint


def test_finds_the_mpiexec_beside_python() -> None:
    launcher = find_launcher()
    assert Path(launcher.path).exists()
    assert launcher.flavour in ("mpich", "openmpi")


def test_open_mpi_gets_what_shared_cores_need(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher("mpiexec", "openmpi")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert launcher.command(3) == ["mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in launcher.command(3)
    assert launcher.environment()["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert Launcher("mpiexec", "mpich").command(3) == ["mpiexec", "-n", "3"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"exit.json": {"status": 0}}, 0),
        ({"exit.json": {"status": 75}}, 75),
        ({"failure.json": {"exit_status": 1, "name": "rank 3", "error": "boom"}}, 1),
        ({"failure.json": {"exit_status": 2, "name": "rank 3", "error": "no"}}, 2),
        ({}, 1),  # mpiexec said 0, but no rank wrote that the run is done: a node may have died
    ],
)
def test_status_comes_from_the_job_not_from_mpiexec(files: dict, expected: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert final_status(0, tmp_path, num_signals=0) == expected
    said = capfd.readouterr().err
    assert ("failed: " in said) == (expected == 1)
    if not files:
        assert json.loads((tmp_path / "failure.json").read_text())["error"] in said


def test_a_discarded_run_takes_nothing_of_the_users_with_it(tmp_path: Path) -> None:
    """A mistake that only a rank finds: what the launcher made goes, what was there before stays; a file that would be overwritten is refused."""
    mine = tmp_path / "results"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    attempt = create_run_dir(Config(run_dir=str(mine)))
    (attempt / "log.h5").write_text("a rank was here")
    discard_run_dir(attempt)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    discard_run_dir(create_run_dir(Config(run_dir=str(tmp_path / "new"))))
    assert not (tmp_path / "new").exists()
    (mine / "config.yaml").write_text("the user's own")
    with pytest.raises(ConfigError, match="another folder"):
        create_run_dir(Config(run_dir=str(mine)))
    assert (mine / "config.yaml").read_text() == "the user's own"
    assert not (mine / "attempt-1").exists()


def test_rank_or_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank()
    monkeypatch.setenv("SLURM_PROCID", "0")  # also set in a batch script, which is no rank
    assert not is_rank()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert is_rank() and world_rank_hint() == 5
    monkeypatch.setenv("PMI_RANK", "7")
    assert is_rank() and world_rank_hint() == 7
