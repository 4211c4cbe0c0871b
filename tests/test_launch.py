"""The local launcher: which mpiexec, what it decides from the files a job leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc import signals
from areal_hpc.config import Config, ConfigError
from areal_hpc.launch.local import (
    Launcher,
    LocalJob,
    create_run_dir,
    discard_run_dir,
    final_status,
    find_launcher,
    is_rank,
    remove_stale_files,
    world_rank_hint,
)


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


USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("heard", "in_slurm", "insists"),
    [
        ([(USR1, 0), (USR1, 0.5)], False, False),  # one request on two ways
        ([(USR1, 0), (USR1, 1.5)], False, True),
        ([(USR1, 0), (USR1, 1.5)], True, True),  # scancel --signal=USR1 twice
        ([(USR1, 0), (TERM, 15)], True, False),  # preemption: the warning, then the end of the grace time
        ([(USR1, 0), (TERM, 300)], False, False),  # another scheduler's time limit
        ([(TERM, 0), (TERM, 15)], True, False),  # preemption without a warning signal: both ends of the grace time
        ([(TERM, 0), (TERM, 3)], True, False),  # scancel: slurmd, and srun once more
        ([(TERM, 0), (USR1, 3), (TERM, 4)], False, True),
        ([(INT, 0), (INT, 0.2)], True, True),  # Ctrl-C, Ctrl-C
        ([(INT, 0), (TERM, 5)], False, False),
    ],
)
def test_who_insists(heard: list[tuple[int, float]], in_slurm: bool, insists: bool) -> None:
    """A second request ends the run without a checkpoint: a scheduler's sequence must not look like one."""
    listener = signals.Insistence(in_slurm=in_slurm)
    found = [listener.hear(number, 100 + at) for number, at in heard]
    assert found[-1] == insists and not any(found[:-1])


def test_ranks_and_launcher_hear_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted with a warning (USR1, then TERM), then asked once more: stop flag of a rank, and the launcher with a process that stands for mpiexec."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    flag = signals.StopFlag()
    flag._pipe = os.pipe2(os.O_NONBLOCK)
    job = LocalJob(["sleep", "60"], dict(os.environ))
    passed_on: list[object] = []
    monkeypatch.setattr(job.process, "send_signal", passed_on.append)
    monkeypatch.setattr(job.process, "terminate", lambda: passed_on.append("end"))
    try:
        for number, again, seen in ((USR1, "", [USR1]), (TERM, "", [USR1]), (USR1, "SIGUSR1", [USR1, "end"])):
            os.write(flag._pipe[1], bytes([number]))
            flag.read_signals()
            job._forward(number, None)
            assert (flag.requested_at, flag.signal_name, flag.again) == (100.0, "SIGUSR1", again) and passed_on == seen
            now[0] += 15
    finally:
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        for descriptor in flag._pipe:
            os.close(descriptor)


def test_a_stop_that_nobody_signalled_is_no_first_signal() -> None:
    """The end of the job's time has asked already (walltime.py) when the scheduler's warning comes: that is not a second request."""
    flag = signals.StopFlag()
    flag.request("the job ends in 0:05:00")
    flag._pipe = os.pipe2(os.O_NONBLOCK)
    os.write(flag._pipe[1], bytes([USR1]))
    flag.read_signals()
    assert flag.signal_name == "the job ends in 0:05:00" and not flag.again
    for descriptor in flag._pipe:
        os.close(descriptor)


def test_a_signal_while_a_resumed_run_loads_has_lost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert final_status(10, tmp_path, num_signals=1, goes_on_from=tmp_path / "step-000090") == 75
    assert "step-000090, is complete" in capsys.readouterr().out
    (tmp_path / "log.h5").touch()
    assert final_status(10, tmp_path, num_signals=1, goes_on_from=tmp_path / "step-000090") == 1, "a rank that dies while it trains is a failure"


def test_leftovers_go_and_files_of_a_job_that_starts_beside_stay() -> None:
    """Between opening and mapping its shared memory another job's rank holds no more than a descriptor; deleted then, its MPI_Init never ends."""
    segment = Path(f"/dev/shm/mpich_shm_{os.getpid():x}{time.time_ns() & 0xFFFF:x}_0")
    code = f"import sys; file = open({str(segment)!r}, 'w'); print(flush=True); sys.stdin.read()"
    began_at = time.time() - 1
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdin is not None
        rank.stdout.readline()
        remove_stale_files(began_at)
        assert segment.exists()
        rank.stdin.close()
        rank.wait()
    remove_stale_files(began_at)
    assert not segment.exists()
