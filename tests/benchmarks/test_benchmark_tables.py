"""The arithmetic of the speed-up tables, on made-up rounds; slow: the scripts themselves, short."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import each other by name."""
    monkeypatch.syspath_prepend(SCRIPTS)


def row(tokens_per_s: float, **others: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "seconds": 1.0, "staleness_mean": 0.0, "training_waits": 0.8} | others


def test_interval_is_the_medians_distribution() -> None:
    """Of three values the bootstrap's median is the lowest with probability 7/27, so at 95 % the interval is their range; of equal ones it is a point."""
    from speedup import interval

    assert interval([1.0, 2.0, 3.0]) == (1.0, 3.0)
    assert interval([2.0, 2.0]) == (2.0, 2.0)
    values = np.random.default_rng(0).normal(10, 1, 201).tolist()
    low, high = interval(values)
    error = 1.96 * math.sqrt(math.pi / 2 / 201)  # of the median of as many normal values
    assert low < statistics.median(values) < high
    assert high - low == pytest.approx(2 * error, rel=0.35)


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is twice as slow in one round changes rates and no ratio; the better baseline is chosen in each round."""
    from measured import beside
    from speedup import BASELINES, LONG_TAIL, judge

    names = list(BASELINES)
    rounds = [{names[0]: row(100 * f), names[1]: row(80 * f), names[2]: row(60 * f), "eta 1": row(150 * f), "eta 8": row(200 * f)} for f in (1.0, 0.5, 2.0)]
    found = judge(LONG_TAIL, rounds)
    assert found["best"] == "eta 8" and found["baseline"] == names[0]
    assert found["variants"]["eta 8"]["ratio"] == 2.0 and found["variants"]["eta 8"]["ratio_ci"] == (2.0, 2.0)
    assert found["variants"][names[2]]["ratio"] == 0.6
    assert found["regime"].startswith("generation bound (80 %")
    rows = beside(rounds, names[2])
    assert rows["eta 8"]["ratio"] == pytest.approx(10 / 3) and rows["eta 8"]["tokens_per_s"] == 200.0


def test_imposed_lengths_have_the_mean_and_tail_asked_for() -> None:
    """And are the same for a ticket and sample whatever else is configured: all modes do the same work."""
    from speedup import CAP, MEAN, SIGMA

    from areal_hpc.config import Config, Generation, Staleness
    from areal_hpc.rollout.groups import imposed_length

    generation = Generation(imposed_mean=MEAN, imposed_sigma=SIGMA, max_new_tokens=CAP * MEAN)
    lengths = np.array([imposed_length(Config(generation=generation), ticket, 0) for ticket in range(4000)])
    uncut = lengths[lengths < CAP * MEAN]
    below = (math.log(CAP) + SIGMA**2 / 2) / SIGMA
    assert len(uncut) / len(lengths) == pytest.approx(0.5 * math.erfc(-below / math.sqrt(2)), abs=0.01)
    assert np.median(lengths) == pytest.approx(MEAN * math.exp(-(SIGMA**2) / 2), rel=0.05)
    other = Config(generation=generation, staleness=Staleness(max_staleness=0))
    assert [imposed_length(other, ticket, 0) for ticket in range(50)] == lengths[:50].tolist()


def test_paced_clock_hides_the_hosts_work_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-to-back steps take what the device takes, though the host works between them; after a longer pause nothing is credited."""
    import paced

    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    clock, step_s = paced.Clock(), 0.25
    for _ in range(5):
        clock.work(paced.SPEED * step_s, overlapped=True)
        sleep(step_s / 2)
    assert now == 100.0 + 5 * step_s + step_s / 2
    clock.work(paced.SPEED * step_s, overlapped=True)
    assert now == 100.0 + 6 * step_s
    sleep(2 * step_s)
    clock.work(paced.SPEED * step_s, overlapped=True)
    assert now == 100.0 + 9 * step_s
    sleep(step_s / 2)
    clock.work(paced.SPEED * step_s)
    assert now == 100.0 + 10.5 * step_s, "a prefill overlaps with nothing"


def test_paced_leaves_take_as_long_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of the real engine, and a batch of the real trainer, on a clock that only sleeping moves: the sums of DecodeCost and TrainCost."""
    import paced
    import torch
    from generation import demo_model

    from areal_hpc.config import Train
    from areal_hpc.models.hf import build_random
    from areal_hpc.rollout.engines.base import Request
    from areal_hpc.rollout.engines.embedded import EmbeddedEngine
    from areal_hpc.train.trainer import LocalBatch

    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    model = build_random(demo_model(), seed=0)
    engine = paced.pace(EmbeddedEngine(model.config, max_num_running=4, max_context_tokens=64, stop_tokens=()))
    engine.update_weights(model.named_parameters(), 0)
    prompt = np.arange(1, 9, dtype=np.int32)
    engine.add([Request(request_id=k, prompt_tokens=prompt, stream=k, max_new_tokens=length, is_imposed=True) for k, length in enumerate((3, 5))])
    done = [completion for _ in range(5) for completion in engine.step()]
    assert [(completion.request_id, len(completion.tokens_R), completion.finish) for completion in done] == [(0, 3, "stop"), (1, 5, "stop")]
    cost, each = paced.JOB.decode, paced.TOKENS
    expected = cost.prefill_seconds(7 * each, (7 * each) ** 2)
    expected += sum(cost.decode_seconds(2 if k < 3 else 1, (2 if k < 3 else 1) * (8 + k) * each, each) for k in range(5))
    assert now * paced.SPEED == pytest.approx(expected)

    trainer = paced.PacedTrainer(model.config, Train(), temperature=1.0, device=torch.device("cpu"), mesh=None)
    began, lengths = now, (10, 30)
    batch = LocalBatch(
        trajectories=[SimpleNamespace(num_tokens=length) for length in lengths],  # type: ignore[misc]
        advantage_S=np.zeros(2),
        weight_S=np.ones(2),
        minibatch_S=np.array([0, 1]),
        microbatch_S=np.zeros(2, int),
        num_microbatches=[1, 1],
        trained_tokens=[5, 5],
        denominators=[5, 5],
    )
    stats = trainer.train_batch(batch)
    train = paced.PacedTrainer.cost
    assert trainer.policy_version == 1 and stats.num_updates == 2 and stats.train_tokens == 0
    assert (now - began) * paced.SPEED == pytest.approx(sum(train.token_s * n * each + train.pair_s * (n * each) ** 2 for n in lengths))


def test_staleness_table_speaks_of_means_and_of_eta_zero() -> None:
    from staleness import table, variants

    assert variants(["0", "4", "inf"], ["count", "drop"]) == [
        ("0", "count", "decoupled"),
        ("4", "count", "decoupled"),
        ("4", "count", "ppo"),
        ("4", "drop", "decoupled"),
        ("inf", "count", "decoupled"),
        ("inf", "count", "ppo"),
    ]
    common = {"mode": "count", "objective": "decoupled", "tokens_per_s_median": 1.0, "staleness_mean": 1.0, "staleness_max": 1}
    rows = [
        common | {"eta": eta, "accuracy_after": accuracy, "training_s": seconds} for eta, accuracy, seconds in (("0", 0.5, 30), ("4", 0.4, 10), ("4", 0.6, 20))
    ]
    synchronous, asynchronous = table(rows)
    assert synchronous["speed_up"] == 1.0
    assert asynchronous["speed_up"] == 2.0 and asynchronous["accuracy"] == 0.5 and asynchronous["range"] == [0.4, 0.6]


def test_tables_are_rendered_from_what_the_scripts_write(tmp_path: Path) -> None:
    """Every row has as many cells as its header; a table without a result is named as missing."""
    from measured import beside
    from speedup import BASELINES, LONG_TAIL, judge

    rounds = [{name: row(10.0) for name in (*BASELINES, "eta 4")}]
    variants = beside(rounds, "eta 4")
    accuracy = {"accuracy": 0.5, "range": [0.4, 0.6], "tokens_per_s_median": 1.0, "staleness_mean": 1.0, "speed_up": None}
    verdict = {"variant": "x", "accuracy_mean": 0.5, "accuracy_min": 0.4, "accuracy_max": 0.6, "within_synchronous_spread": True, "speed_up": 1.1}
    from staleness import PAPER

    made: dict[str, Any] = {
        "speedup": {"settings": {"long tail": judge(LONG_TAIL, rounds) | {"bare_tokens_per_s": 20.0}}},
        "paced": {
            "ranks": 16,
            "simulated": {"split, eta 0": 4.0, "colocated": 2.0},
            "variants": {"split, eta 0": variants["eta 4"], "eta 8": variants["eta 4"]},
        },
        "interrupt": {"paper": {"1.5B": 0.12}, "settings": {"long tail": variants}},
        "staleness": {"paper": PAPER, "table": [{"eta": "4", "mode": "count", "objective": "ppo", **accuracy}]},
        "scaling": {"ranks": {"1 + 1": variants}},
    }
    made["quality"] = {"tasks": {"sums": {"variants": [verdict]}}}
    for name, found in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    done = subprocess.run([sys.executable, SCRIPTS / "tables.py", "--results", tmp_path], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {"benchmark": "tables", "shown": list(made), "missing": ["simulated"]}
    for title in (k for k, line in enumerate(lines) if line.startswith("### ")):
        table = lines[title + 4 : title + 7]
        assert len({line.count("|") for line in table}) == 1 and table[1].startswith("| --- |"), lines[title]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["speedup", "paced", "interrupt", "scaling"])
def test_script_runs_short(name: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", "--quick"], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == name
    if name == "speedup":
        low, high = found["speedup_ci"]
        assert low <= found["speedup"] <= high
