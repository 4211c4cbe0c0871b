"""Whole jobs that are killed, stopped and starved; the helpers that start them are those of tests/mpi."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

if "jobs" not in sys.modules:  # pytest's importlib mode adds no folder to sys.path
    spec = importlib.util.spec_from_file_location("jobs", Path(__file__).parents[1] / "mpi" / "jobs.py")
    assert spec is not None and spec.loader is not None
    sys.modules["jobs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["jobs"])
jobs = sys.modules["jobs"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory):
    """Configuration of a job that takes seconds, on a model made for this session."""
    folder = jobs.make_model(tmp_path_factory.mktemp("model") / "tiny")
    return replace(jobs.BASE, model=replace(jobs.BASE.model, path=str(folder)))


@pytest.fixture
def chaos(base, tmp_path, monkeypatch):
    """The same with rewards that a random model gets right half of the time, so that every step changes the parameters."""
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return replace(base, reward=replace(base.reward, custom="parity_reward:grade"))


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test():
    yield
    for process in jobs.STARTED:
        if process.poll() is None:
            process.kill()
            process.communicate()
    jobs.STARTED.clear()
