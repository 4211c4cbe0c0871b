"""The simulator against a reference that goes token by token and shares no code with it, on random small jobs."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.simulate.cluster import Cluster, Job
from areal_hpc.simulate.costs import DecodeCost, PushCost, TrainCost
from areal_hpc.simulate.lengths import LogNormalLengths

spec = importlib.util.spec_from_file_location("simulate_reference", Path(__file__).with_name("reference.py"))
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = reference
spec.loader.exec_module(reference)


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    """Irregular numbers, so that no two events fall together."""
    return st.floats(low, high).map(lambda value: value * (1 + math.pi * 1e-3) + 1e-7 * math.e)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    eta = draw(st.sampled_from([0, 1, 2, 3, math.inf]))
    group_size = draw(st.integers(1, 3))
    return Job(
        num_generation=draw(st.integers(1, 3)) if eta == 0 else 1,
        num_training=1,
        batch_size=group_size * draw(st.integers(1, 4)),
        group_size=group_size,
        eta=eta,
        num_steps=draw(st.integers(1, 5)),
        decode=DecodeCost(
            host_s=draw(seconds(0, 0.02)),
            base_s=draw(seconds(0.001, 0.02)),
            per_sequence_s=draw(seconds(0, 0.002)),
            per_context_token_s=draw(seconds(0, 0.0005)),
            prefill_token_s=draw(seconds(0, 0.001)),
            prefill_pair_s=draw(seconds(0, 1e-5)),
            kv_tokens=draw(st.sampled_from([60, 90, 150, math.inf])),
            max_num_running=draw(st.integers(1, 8)),
        ),
        train=TrainCost(token_s=draw(seconds(0, 0.01)), step_s=draw(seconds(0.001, 0.3)), capacity_tokens=64),
        push=PushCost(pack_s=draw(seconds(0, 0.05)), transfer_s=draw(seconds(0, 0.4)), swap_s=draw(seconds(0, 0.02))),
        lengths=LogNormalLengths(median=12, sigma=0.8, cap=40, prompt=draw(st.integers(1, 9)), seed=draw(st.integers(0, 999)), num_problems=17),
        reward_s=draw(seconds(0, 0.1)),
        interruptible=draw(st.booleans()),
        kv_on_update=draw(st.sampled_from(["recompute", "keep"])),
    )


@settings(max_examples=120, deadline=None)
@given(jobs())
def test_same_as_token_by_token(job: Job) -> None:
    slow = reference.Reference(job)
    slow.run()
    fast = Cluster(job)
    result = fast.run()
    found = [(step.end_s, step.wait_s, step.staleness_mean, step.staleness_max) for step in result.steps]
    for ours, theirs in zip(found, slow.rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    assert result.num_preempted == pytest.approx(sum(machine.preempted for machine in slow.machines), abs=0 if job.num_steps == 0 else 3)
