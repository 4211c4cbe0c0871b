"""Whole jobs whose answers take several turns: a small model that calls Python, an environment of a user's, and programs as answers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.config import Config, Environment, Staleness, Topology
from areal_hpc.observe import samples
from areal_hpc.observe.schema import OUTCOMES, STATUSES
from areal_hpc.recipes import code, tool
from areal_hpc.transport.samples import ENVIRONMENT_MARK

pytestmark = pytest.mark.mpi
SMALL = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "warmstart_batch_size": 32}


def columns_agree(job: jobs.Job) -> np.ndarray:
    """Rows of /trajectories, after what must hold of any run with an environment."""
    steps, rows, groups = job.table("steps"), job.table("trajectories"), job.exit["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    several = rows["turns"] > 1
    assert (rows["sampled_tokens"][several] < rows["answer_tokens"][several]).all()
    trained = np.array(OUTCOMES)[rows["outcome"]] == "trained"
    assert steps["trained_tokens"].tolist() == [rows["sampled_tokens"][trained & (rows["batch"] == step)].sum() for step in steps["step"]]
    assert steps["tokens"].tolist() == [(rows["prompt_tokens"] + rows["answer_tokens"])[trained & (rows["batch"] == step)].sum() for step in steps["step"]]
    return rows


def test_a_model_that_calls_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe, smaller, at eta = 0: the model writes programs and is right because of their output; a second run gives the same bits; offline evaluation agrees."""
    monkeypatch.setenv("AREAL_HPC_CACHE", str(tmp_path / "cache"))
    base = tool()
    config = replace(
        base,
        model=replace(base.model, **SMALL, warmstart_steps=130, warmstart_direct_steps=15),
        data=replace(base.data, size=600, min_terms=2, max_terms=3, max_digits=1),
        generation=replace(base.generation, max_new_tokens=72),
        staleness=Staleness(max_staleness=0),
        train=replace(base.train, num_steps=2, batch_size=32, group_size=8, warmup_steps=0, lr=1e-3),
        evaluation=replace(base.evaluation, num_problems=24),
        topology=Topology(num_ranks=3),
    )
    first, second = (jobs.run(config, tmp_path / name) for name in ("a", "b"))
    rows = columns_agree(first)
    called, right = rows["turns"] > 1, rows["status"] == STATUSES.index("right")
    assert called.sum() > 10 and right[called].mean() > 0.8
    assert "environment python: " in first.stdout and "python_calls" in first.stdout
    assert (first.table("steps")["grad_norm"] > 0).any(), "without gradients equality would prove nothing"
    assert first.weights() == second.weights()
    names = ["ticket", "sample", "batch", "answer_tokens", "sampled_tokens", "turns", "version_min", "version_max", "reward", "advantage"]
    assert rows[names].tolist() == second.table("trajectories")[names].tolist()
    assert first.table("steps")["loss"].tolist() == second.table("steps")["loss"].tolist()
    told = subprocess.run([sys.executable, "-m", "areal_hpc", "eval", str(first.run_dir), "--out", str(tmp_path / "eval")], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    folders = (first.attempt / "samples" / "evaluation-000002.jsonl", tmp_path / "eval" / "samples" / "evaluation-000000.jsonl")
    online, offline = ([(r["prompt"], r["status"], r["answer"]) for r in samples.read_records(path)] for path in folders)
    assert online == offline and any(ENVIRONMENT_MARK in answer and "<output>" in answer for _, _, answer in online)


SLOW = """
import time

def reply(problem, turns):
    time.sleep(0.02)
    return "+1 " if len(turns) < 5 else None
"""


@pytest.mark.slow
def test_an_environment_of_ones_own(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous, with samples at a slow environment when versions change and when the run ends: all groups accounted for, ages within the bound."""
    (tmp_path / "slow_environment.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = replace(
        base,
        environment=Environment(name="slow_environment:reply", max_turns=8, deadline_s=30),
        generation=replace(base.generation, max_new_tokens=40, max_num_running=8),
        staleness=Staleness(max_staleness=1, mode="drop"),
        train=replace(base.train, num_steps=4),
        topology=Topology(num_ranks=3),
    )
    job = jobs.run(config, tmp_path / "run")
    rows = columns_agree(job)
    assert 1 in rows["turns"] and 2 in rows["turns"] and rows["turns"].max() <= 3
    assert (rows["answer_tokens"] <= 40).all() and (rows["sampled_tokens"] > 0).all()
    cut = rows["answer_tokens"] == 40
    assert set(np.array(STATUSES)[rows["status"][cut]]) <= {"truncated", "wrong", "right", "no_answer"}
    trained = np.array(OUTCOMES)[rows["outcome"]] == "trained"
    assert rows["age"][trained].max() <= 1
    assert job.table("ranks")["running"].max() <= 8
    jobs.check_no_lane_left()


@pytest.mark.slow
def test_programs_as_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe, smaller: programs are found in answers, run against their tests in the sandbox, and trained on; some are right."""
    monkeypatch.setenv("AREAL_HPC_CACHE", str(tmp_path / "cache"))
    base = code()
    config = replace(
        base,
        model=replace(base.model, **SMALL, warmstart_steps=60),
        train=replace(base.train, num_steps=2, batch_size=16, group_size=8, warmup_steps=0),
        evaluation=replace(base.evaluation, num_problems=4, num_samples=1),
    )
    job = jobs.run(config, tmp_path / "run")
    rows, steps = job.table("trajectories"), job.table("steps")
    found = {STATUSES[status] for status in rows["status"]}
    assert {"right", "wrong"} <= found and not found & {"infra_error", "gold_bad"}
    assert (np.array(OUTCOMES)[rows["outcome"]] == "trained").all() and (steps["grad_norm"] > 0).any()
    assert rows["turns"].tolist() == [1] * len(rows)
    records = [record for path in (job.attempt / "samples").glob("training-*.jsonl") for record in samples.read_records(path)]
    right = [record for record in records if record["status"] == "right"]
    assert right and all("print" in record["extracted"] or "def " in record["extracted"] for record in right)
