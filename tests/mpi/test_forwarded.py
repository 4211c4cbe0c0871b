"""Whole jobs whose lanes go by MPI messages, as between nodes, though all ranks are on one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import jobs
import pytest

from areal_hpc.config import Config, Staleness

pytestmark = pytest.mark.mpi


def forwarded(config: Config) -> Config:
    return replace(config, transport=replace(config.transport, lanes="forwarded"))


@pytest.mark.parametrize(("num_ranks", "fraction"), [(3, 0.75), (4, 0.5)], ids=["2+1", "2+2"])
def test_every_group_is_accounted_for(base: Config, tmp_path: Path, num_ranks: int, fraction: float) -> None:
    """Each admitted group is trained, waiting, in the ring or unfinished; the log has each closed ticket once."""
    config = forwarded(jobs.with_ranks(base, num_ranks, fraction))
    job = jobs.run(config, tmp_path / "run")
    groups = job.exit["groups"]
    assert groups["trained"] == 3 * config.groups_per_batch
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    trajectories = job.table("trajectories")
    assert len(trajectories) == (groups["trained"] + groups["dropped"] + groups["failed"]) * config.train.group_size
    assert set(trajectories["generation_rank"]) == {0, 1}
    jobs.check_no_lane_left()
    jobs.check_ring(job, way=1)


@pytest.mark.slow
def test_same_bits_as_through_shared_memory(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eta = 0: the way that a trajectory takes changes nothing."""
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = jobs.with_ranks(replace(base, staleness=Staleness(max_staleness=0), reward=replace(base.reward, custom="parity_reward:grade")), 3)
    shared, messages = jobs.run(config, tmp_path / "shared"), jobs.run(forwarded(config), tmp_path / "messages")
    assert shared.weights() == messages.weights()
    columns = ["ticket", "sample", "batch", "answer_tokens", "version_min", "version_max", "reward", "advantage"]
    assert shared.table("trajectories")[columns].tolist() == messages.table("trajectories")[columns].tolist()
    assert (shared.table("steps")["grad_norm"] > 0).all(), "without gradients equality would prove nothing"


@pytest.mark.slow
def test_silent_generation_rank_ends_the_job(base: Config, tmp_path: Path) -> None:
    """SIGSTOP of a generation rank: no beat comes, and the job ends with a message that names rank and host."""
    config = forwarded(jobs.with_ranks(replace(base, train=replace(base.train, num_steps=100_000)), 3))
    config = replace(config, transport=replace(config.transport, silence_deadline_s=3.0))
    process = jobs.start(config, tmp_path / "run")
    jobs.wait_for_step(tmp_path / "run", process)
    os.kill(jobs.ranks_of(tmp_path / "run")[1], signal.SIGSTOP)
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 1
    error = json.loads((job.attempt / "failure.json").read_text())["error"]
    assert "rank 1 (generation 1) on host" in error and "has been silent for" in error and "tickets in flight: " in error
    assert not jobs.ranks_of(tmp_path / "run")
