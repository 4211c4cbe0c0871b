"""One tiny model for all MPI tests."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

# `jobs` beside this file is imported by name from the test files (pytest's importlib mode adds no folder to sys.path).
spec = importlib.util.spec_from_file_location("jobs", Path(__file__).with_name("jobs.py"))
assert spec is not None and spec.loader is not None
jobs = importlib.util.module_from_spec(spec)
sys.modules["jobs"] = jobs
spec.loader.exec_module(jobs)


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
