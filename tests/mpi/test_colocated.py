"""Colocated ranks, the synchronous baseline: the same run as an eta = 0 split, by other ranks."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_hpc.config import Config, Staleness

pytestmark = pytest.mark.mpi


def colocated(config: Config, num_ranks: int, replicas: int = 1) -> Config:
    config = replace(config, topology=replace(config.topology, mode="colocated", num_ranks=num_ranks))
    return replace(config, staleness=Staleness(max_staleness=0), train=replace(config.train, replicas=replicas))


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_colocated_equals_split(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, replicas: int) -> None:
    """The same seed: the same answers, rewards, batches and, but for rounding, parameters, with imposed lengths; the log is complete, every group accounted for."""
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")  # half of a random model's answers
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    generation = replace(base.generation, imposed_mean=5.0)
    base = replace(base, generation=generation, reward=replace(base.reward, custom="parity_reward:grade"), train=replace(base.train, num_steps=2))
    job = jobs.run(colocated(base, num_ranks, replicas), tmp_path / "colocated")
    split = jobs.run(replace(jobs.with_ranks(base, 2), staleness=Staleness(max_staleness=0)), tmp_path / "split")
    assert (job.table("steps")["grad_norm"] > 0).all() and job.table("steps")["staleness_max"].tolist() == [0, 0]
    columns = ["ticket", "sample", "batch", "answer_tokens", "version_min", "version_max", "reward"]
    found, expected = (np.sort(run.table("trajectories")[columns], order=["ticket", "sample"]) for run in (job, split))
    assert found.tolist() == expected.tolist() and len(set(found["answer_tokens"])) > 3
    weights, reference = (load_file(run.run_dir / "model" / "model.safetensors") for run in (job, split))
    for name in reference:
        np.testing.assert_allclose(weights[name], reference[name], atol=1e-5, err_msg=name)
    assert job.table("evaluations")["correct"].tolist() == split.table("evaluations")["correct"].tolist()
    assert job.exit["groups"]["admitted"] == job.exit["groups"]["trained"] == 2 * base.groups_per_batch
    timeline = job.table("timeline")
    for rank in range(num_ranks):
        mine = np.sort(timeline[timeline["rank"] == rank], order="start_s")
        assert len(mine) and np.allclose(mine["start_s"][1:], mine["stop_s"][:-1]), "no gap and no overlap in a rank's time"
    jobs.check_no_lane_left()


@pytest.mark.slow
def test_a_signal_stops_between_two_steps(base: Config, tmp_path: Path) -> None:
    process = jobs.start(colocated(replace(base, train=replace(base.train, num_steps=100_000)), 2), tmp_path / "run")
    jobs.wait_for_step(tmp_path / "run", process)
    process.send_signal(signal.SIGTERM)
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 1 and "a colocated run writes no checkpoints" in job.stdout + job.stderr
    done = json.loads((job.attempt / "exit.json").read_text())
    assert done["steps"] >= 1 and done["groups"]["admitted"] == done["groups"]["trained"]
