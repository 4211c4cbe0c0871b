"""Jobs of tests/mpi (their helper, their tiny model), to be disturbed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

if "jobs" not in sys.modules:  # imported by name, as in tests/mpi
    spec = importlib.util.spec_from_file_location("jobs", Path(__file__).parents[1] / "mpi" / "jobs.py")
    assert spec is not None and spec.loader is not None
    sys.modules["jobs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["jobs"])

import jobs


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory):
    """Configuration of a job that takes seconds, on a model made for this session."""
    folder = jobs.make_model(tmp_path_factory.mktemp("model") / "tiny")
    return replace(jobs.BASE, model=replace(jobs.BASE.model, path=str(folder)))


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test():
    yield
    for process in jobs.STARTED:
        if process.poll() is None:
            process.kill()
            process.communicate()
    jobs.STARTED.clear()
