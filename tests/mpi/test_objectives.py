"""A whole job with what the default leaves out: filtered groups, reference model, loglinear pi_prox, truncated weights, penalties, a falling learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.config import Config, Staleness, Topology
from areal_hpc.observe.schema import OUTCOMES

pytestmark = pytest.mark.mpi


@pytest.mark.slow
def test_dapo_with_everything(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quarter_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 4 == 0)\n")  # a third of the groups agree
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    options = {"old_policy": "prox", "prox": "loglinear", "behav_weight": "truncated", "kl_coef": 0.05, "schedule": "cosine", "truncated": "penalise"}
    config = replace(
        base,
        staleness=Staleness(max_staleness=1),
        reward=replace(base.reward, custom="quarter_reward:grade"),
        train=replace(base.train, objective="dapo", num_steps=6, num_minibatches=2, **options),
        topology=Topology(num_ranks=3, generation_fraction=0.3),
    )
    job = jobs.run(config, tmp_path / "run")
    steps, trajectories, groups = job.table("steps"), job.table("trajectories"), job.exit["groups"]
    assert groups["trained"] == 6 * config.groups_per_batch
    assert groups["filtered"] > 0
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    outcome = np.array(OUTCOMES)[trajectories["outcome"]]
    at_limit = trajectories["answer_tokens"] == config.generation.max_new_tokens
    reward = np.where(at_limit, config.reward.wrong, trajectories["reward"])
    for ticket in np.unique(trajectories["ticket"]):
        mine = trajectories["ticket"] == ticket
        assert (outcome[mine] == ("trained" if len(np.unique(reward[mine])) > 1 else "filtered")).all()
    assert (outcome == "filtered").sum() == groups["filtered"] * config.train.group_size >= steps["filtered"].sum()
    assert steps["penalised"].tolist() == [(at_limit & (outcome == "trained") & (trajectories["batch"] == step)).sum() for step in steps["step"]]
    assert (steps["overlong"] >= steps["penalised"]).all()
    assert (np.diff(steps["lr"]) < 0).all() and steps["lr"][-1] == pytest.approx(0.1 * config.train.lr)
    assert (steps["kl_reference"] >= 0).all() and steps["kl_reference"][-1] > 0
    assert ((steps["effective_share"] > 0) & (steps["effective_share"] <= 1)).all()
    assert (steps["mfu"] > 0).all() and (steps["peak_memory_bytes"] > 2**26).all()
    tokens = [trajectories["answer_tokens"][(outcome == "trained") & (trajectories["batch"] == step)].sum() for step in steps["step"]]
    assert steps["trained_tokens"].tolist() == tokens


def test_a_job_that_filters_everything_ends_with_the_reason(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_reward.py").write_text("def grade(problem, text):\n    return 0.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = replace(
        base, reward=replace(base.reward, custom="never_reward:grade"), train=replace(base.train, dynamic_sampling="refill", max_filtered=4, num_steps=1000)
    )
    job = jobs.finish(jobs.start(config, tmp_path / "run"), tmp_path / "run")
    assert job.status not in (0, 2, 75)
    assert "17 groups in a row were filtered out" in job.stderr and "train.max_filtered=4" in job.stderr
