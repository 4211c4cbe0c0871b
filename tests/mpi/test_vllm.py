"""Whole jobs whose generation ranks are vLLM: MPI, push, staleness and log as with the embedded engine.

make test-vllm
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.config import Config, Staleness

pytest.importorskip("vllm", reason="vLLM is not installed here; its tests: make test-vllm")
pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The usual one with heads of 32: on CPUs vLLM has kernels for no smaller ones."""
    model = replace(jobs.BASE.model, hidden_size=64, num_heads=2, num_kv_heads=1)
    folder = jobs.make_model(tmp_path_factory.mktemp("model") / "wide", model=model)
    return replace(jobs.BASE, model=replace(model, path=str(folder)))


def vllm(base: Config, **changes) -> Config:
    return replace(base, generation=replace(base.generation, engine="vllm", **changes), transport=replace(base.transport, start_deadline_s=300.0))


@pytest.mark.parametrize(("num_ranks", "fraction", "kv"), [(2, 0.5, "recompute"), (4, 0.5, "keep")])
def test_a_run_with_vllm(base: Config, tmp_path: Path, num_ranks: int, fraction: float, kv: str) -> None:
    """Exit status, accounting, versions; the trainer finds the log-probabilities of tokens of its own version as vLLM told them."""
    config = replace(vllm(base, kv_on_update=kv), staleness=Staleness(max_staleness=2), train=replace(base.train, num_steps=6))
    job = jobs.run(jobs.with_ranks(config, num_ranks, fraction), tmp_path / "run")
    steps, trajectories, groups = job.table("steps"), job.table("trajectories"), job.exit["groups"]
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    assert groups["trained"] == 6 * config.groups_per_batch
    assert (trajectories["version_max"] >= trajectories["version_min"]).all() and trajectories["version_max"].max() > 0
    assert steps["logprob_gap"][0] < 1e-4 and steps["ratio_max"][0] < 1.001
    assert job.table("evaluations")["policy_version"].tolist() == [0, 6]
    assert (job.table("pushes")["pause_max_s"] > 0).all()
    jobs.check_no_lane_left()


@pytest.mark.slow
def test_a_static_run_is_synchronous(base: Config, tmp_path: Path) -> None:
    """eta = 0: every batch is of the newest version, and its log-probabilities are the trainer's."""
    job = jobs.run(jobs.with_ranks(replace(vllm(base), staleness=Staleness(max_staleness=0)), 2), tmp_path / "run")
    steps = job.table("steps")
    assert (steps["staleness_max"] == 0).all() and (steps["logprob_gap"] < 1e-4).all() and np.isfinite(steps["loss"]).all()
