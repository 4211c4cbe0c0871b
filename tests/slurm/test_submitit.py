"""Runs as submitit jobs: on the tests' Slurm and on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import areal_hpc
from areal_hpc.cli import USAGE
from areal_hpc.config import ConfigError
from areal_hpc.launch.slurm import Resources, script
from tests.slurm.batch import Slurm, accounted, exit_of

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.slow]
TINY = ("--train.num-steps", "3", "--generation.max-new-tokens", "12")
RESOURCES = {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 0, "cpus_per_rank": 2, "time_min": 10}


def python(slurm: Slurm, cwd: Path, code: str) -> str:
    """Run this program as a user of the cluster would; what it printed last."""
    program = f"import areal_hpc, json, os, sys, time\nfrom areal_hpc.launch.slurm import Resources, executor, prepared\n{textwrap.dedent(code)}"
    environment = slurm.environment | {"PYTHONPATH": str(Path(areal_hpc.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in (cwd / "runs" / "submitit").glob("*_0_log.out"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout.splitlines()[-1]


def test_one_run_has_a_result_per_rank(slurm: Slurm, tmp_path: Path) -> None:
    """And the script that was given to sbatch is the one that --dry-run prints."""
    code = f"""
        job = areal_hpc.submit("smoke", *{TINY!r}, run_dir="runs/one", **{RESOURCES!r})
        results = job.results()
        print(json.dumps([results, str(job.paths.submission_file), job.job_id]))
    """
    results, script_path, _ = json.loads(python(slurm, tmp_path, code))
    assert len(results) == 4 and all(result == results[0] for result in results)
    assert results[0]["status"] == 0 and results[0]["steps"] == 3 and accounted(results[0]["groups"])
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert Path(script_path).read_text() == script(Resources(**RESOURCES))
    finally:
        os.chdir(here)


def test_array_of_three_seeds(slurm: Slurm, tmp_path: Path) -> None:
    code = f"""
        ex = executor(Resources(**{RESOURCES!r}))
        with ex.batch():
            jobs = [ex.submit(prepared("smoke", [*{TINY!r}, "--seed", str(seed)], f"runs/seed-{{seed}}")) for seed in range(3)]
        print(json.dumps([[job.job_id for job in jobs], [job.results()[0]["status"] for job in jobs]]))
    """
    ids, statuses = json.loads(python(slurm, tmp_path, code))
    assert statuses == [0, 0, 0] and [name.partition("_")[2] for name in ids] == ["0", "1", "2"]


def test_interrupted_run_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """USR2 to all tasks, as before the time limit: the ranks stop with a checkpoint, task 0 requeues the job, Slurm starts it again."""
    code = f"""
        from pathlib import Path
        job = areal_hpc.submit("smoke", "--train.num-steps", "100000", run_dir="runs/long", **{RESOURCES!r})
        def until(condition, seconds=240):
            stop_at = time.monotonic() + seconds
            while not condition():
                assert time.monotonic() < stop_at, job.stdout()
                time.sleep(0.5)
        until(lambda: "step 1/" in (job.stdout() or "") or any("step 1/" in p.read_text() for p in Path("runs/submitit").glob("*_log.out")))
        job._interrupt(timeout=False)
        until(lambda: Path("runs/long/attempt-1/exit.json").exists())
        until(lambda: any("Requeued job" in p.read_text() for p in Path("runs/submitit").glob("*_log.out")))
        job.cancel()
        print(json.dumps(json.loads(Path("runs/long/attempt-1/exit.json").read_text())))
    """
    done = json.loads(python(slurm, tmp_path, code))
    assert done["status"] == 75 and done["steps"] > 0
    assert (tmp_path / "runs" / "long" / "checkpoints" / f"step-{done['steps']:06d}").is_dir()


@pytest.mark.skipif("--resume" not in USAGE, reason="runs cannot be resumed in this version")
def test_interrupted_run_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """From its checkpoint to its end, with the results of the second life."""
    code = f"""
        from pathlib import Path
        job = areal_hpc.submit("smoke", "--train.num-steps", "60", run_dir="runs/long", **{RESOURCES!r})
        while not any("step 1/" in p.read_text() for p in Path("runs/submitit").glob("*_log.out")):
            time.sleep(0.2)
        job._interrupt(timeout=False)
        print(json.dumps(job.results()))
    """
    results = json.loads(python(slurm, tmp_path, code))
    assert [result["status"] for result in results] == [0] * 4 and results[0]["steps"] == 60
    assert exit_of(tmp_path / "runs" / "long", 1)["status"] == 75


def test_failing_rank_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """A reward that raises at import ends the job with a cause, within its time."""
    (tmp_path / "bad_reward.py").write_text("def grade(problem, text):\n    raise RuntimeError('no reward today')\n")
    code = f"""
        os.environ["PYTHONPATH"] += ":{tmp_path}"
        job = areal_hpc.submit("smoke", "--reward.custom", "bad_reward:grade", run_dir="runs/bad", **{RESOURCES!r})
        try:
            job.results()
        except Exception as error:
            print(json.dumps(str(error)))
    """
    said = json.loads(python(slurm, tmp_path, code))
    failure = json.loads((tmp_path / "runs" / "bad" / "attempt-1" / "failure.json").read_text())
    assert failure["name"].startswith("rank ") and "reward.max_failure_rate" in failure["error"], failure
    assert failure["name"] in said and failure["error"].splitlines()[0] in said


def test_local_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run on this machine, in the background."""
    monkeypatch.chdir(tmp_path)
    job = areal_hpc.submit("smoke", *TINY, run_dir=tmp_path / "run", target="local", time_min=10)
    result = job.result()
    assert result["status"] == 0 and result["steps"] == 3
    assert exit_of(tmp_path / "run")["status"] == 0


def test_mistakes_are_found_before_anything_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="use 2 or more"):
        areal_hpc.submit("smoke", nodes=1, ranks_per_node=1)
    with pytest.raises(ConfigError, match="did you mean"):
        areal_hpc.submit("smoke", "--train.num-stepz", "3")
    assert list(tmp_path.iterdir()) == []
