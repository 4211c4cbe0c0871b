"""`areal-hpc simulate` and `plan`: mistakes are one line, JSON is complete, the planner answers sensibly, a log gives back the costs it was made with."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from areal_hpc.cli import main
from areal_hpc.config import Config, ConfigError, Generation, Staleness, Topology, Train
from areal_hpc.config_io import save_yaml
from areal_hpc.observe.schema import PHASES, TABLES
from areal_hpc.observe.telemetry import Log
from areal_hpc.simulate import fit, hardware, planner
from areal_hpc.simulate.cluster import Cluster, Job
from areal_hpc.simulate.costs import DecodeCost, PushCost, TrainCost
from areal_hpc.simulate.lengths import LogNormalLengths

SMALL = ["--gpus", "8", "--batch", "256", "--group", "8", "--context", "4k", "--mean", "800"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "PRESET_OR_RECIPE"),
        (["simulate", "8b"], "'8b' is neither a model (1.5b, 7b, 14b, 32b) nor a recipe"),
        (["simulate", "laptop"], "--model says which model"),
        (["simulate", "7b", "--device", "k80"], "unknown device 'k80'; there are: h800"),
        (["simulate", "7b", "--eta", "-1"], "--eta"),
        (["simulate", "7b", "--eta", "inf", "--mode", "drop"], "which is inf"),
        (["simulate", "7b", "--fraction", "1.5"], "must lie between 0 and 1"),
        (["simulate", "7b", "--gpus", "1"], "one generates and one trains"),
        (["simulate", "7b", "--gpus", "8", "--batch", "100"], "--batch 100 is not a multiple of 64"),
        (["simulate", "7b", "--gpus", "8", "--tp", "5"], "do not divide into engines of 5"),
        (["simulate", "7b", "--mtbf-hours", "0"], "must be above zero"),
        (["simulate", "--from-run"], "needs the folder of a run"),
        (["simulate", "--from-run", "nowhere"], "nowhere: no such folder"),
        (["plan", "--model", "7b"], "needs --gpus"),
        (["plan", "--gpus", "8"], "--model"),
        (["plan", "--model", "32b", "--gpus", "2"], "does not fit"),
        (["plan", "--model", "7b", "--gpus", "8", "--plot", "no/such/folder/x.png"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert says in told


def test_simulate_puts_modes_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "simulate", "1.5b", *SMALL, "--steps", "6", "--json"))
    jobs = found["jobs"]
    assert list(jobs) == ["asynchronous", "synchronous, split", "synchronous, colocated"]
    for row in jobs.values():
        assert row["ratio"] == pytest.approx(jobs["asynchronous"]["tokens_per_s"] / row["tokens_per_s"])
    assert jobs["synchronous, split"]["ratio"] > 1
    text = output(capsys, "simulate", "1.5b", *SMALL, "--steps", "6")
    assert f"{jobs['asynchronous']['tokens_per_s']:,.0f}" in text


def test_plan_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The recommended split is the best of its own table, everything listed adds up, the sbatch line names it, the plot is a PNG."""
    plot = tmp_path / "plan.png"
    found = json.loads(output(capsys, "plan", "--model", "1.5b", *SMALL, "--json", "--plot", str(plot)))
    best = found["best"]
    assert max(split["tokens_per_s"] for split in found["splits"]) <= 1.021 * next(
        split["tokens_per_s"] for split in found["splits"] if split["num_training"] == best["num_training"]
    )
    assert best["num_training"] + best["num_generation_gpus"] == 8
    assert best["hours"] == pytest.approx(250 * 8192 / best["batch_size"] * best["step_s"] / 3600)
    assert f"--topology.generation-fraction {best['num_generation_gpus'] / 8:g}" in found["sbatch"]
    assert found["sbatch"].startswith("sbatch --nodes=1 slurm/areal_64gpu.sh ")
    assert sum(found["generation_bytes"].values()) <= 80e9 and sum(found["training_bytes"].values()) <= 80e9
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_finds_the_papers_split_by_itself() -> None:
    """1.5B on 128 H800 with 32k context: three quarters generate."""
    found = planner.plan(planner.Wanted(model="1.5b", gpus=128, device="h800"))
    assert found.best.num_training == 32


@pytest.mark.parametrize(("name", "billions"), [("1.5b", 1.78), ("7b", 7.62), ("14b", 14.77), ("32b", 32.76)])
def test_model_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    """Parameters on the model cards, within the norms and biases that are left out."""
    assert hardware.model(name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_data_sheet_arithmetic() -> None:
    """KV bytes by hand; a decode step at least reads weights and cache once; a second copy of the weights costs cache."""
    gpu, preset = hardware.device("h800"), hardware.model("7b")
    assert preset.kv_bytes == 28 * 2 * 4 * 128 * 2
    cost = hardware.decode_cost(gpu, preset, 1)
    assert cost.step_s(100, 900_000) >= (preset.weight_bytes + 900_000 * preset.kv_bytes) / gpu.bandwidth
    assert hardware.kv_capacity(gpu, preset, 1) - hardware.kv_capacity(gpu, preset, 1, staging=True) == pytest.approx(
        preset.weight_bytes / preset.kv_bytes, abs=1
    )
    with pytest.raises(ConfigError, match="leaves room for 17,068 tokens"):
        hardware.decode_cost(gpu, hardware.model("32b"), 1)


class Report(NamedTuple):
    """What a generation rank tells about once a second."""

    clock_s: float
    num_tokens: int
    num_running: int
    decode_s: float


class Reporting(Cluster):
    """A cluster whose engines report."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.reports = [[Report(0.0, 0, 0, 0.0)] for _ in self.engines]

    def _turn(self, g: int) -> None:
        super()._turn(g)
        engine = self.engines[g]
        if engine.clock_s >= self.reports[g][-1].clock_s + 1.0:
            self.reports[g].append(Report(engine.clock_s, engine.num_tokens, engine.num_running, engine.seconds.decode))


def logged(run_dir: Path, config: Config, job: Job) -> None:
    """The log that a run with exactly these costs would have written."""
    folder = run_dir / "attempt-1"
    folder.mkdir(parents=True)
    save_yaml(config, folder / "config.yaml")
    cluster = Reporting(job)
    result = cluster.run()
    attributes = {"num_generation_ranks": job.num_generation, "num_training_ranks": job.num_training, "config": "", "fingerprint": ""}
    log = Log.create(folder / "log.h5", attributes, lambda: 0.0)

    def row(table: str, **values: float) -> dict[str, float | str]:
        return {name: values.get(name, "" if TABLES[table].dtype[name].kind == "S" else 0) for name in TABLES[table].column_names}

    before = 0.0
    for step in result.steps:
        wall_s, before = step.end_s - before, step.end_s
        given = {"step": step.step, "wall_s": wall_s, "tokens": step.tokens, "generation_wait_s": step.wait_s, "train_s": step.train_s}
        log.append("steps", row("steps", staleness_mean=step.staleness_mean, end_s=step.end_s, **given))
        log.append("pushes", row("pushes", version=step.step, transfer_s=job.push.transfer_s))
        swaps = [
            row("timeline", rank=g, phase=PHASES.index("swap"), start_s=step.end_s, stop_s=step.end_s + job.push.swap_s) for g in range(job.num_generation)
        ]
        log.append("timeline", swaps)
    for ticket in range(result.num_groups["trained"]):
        prompt, answers = job.lengths.group(ticket, job.group_size)
        rows = [row("trajectories", ticket=ticket, sample=k, prompt_tokens=prompt, answer_tokens=n, graded_s=job.reward_s) for k, n in enumerate(answers)]
        log.append("trajectories", rows)
    for g, reports in enumerate(cluster.reports):
        for report in reports:
            log.append("ranks", row("ranks", rank=g, time_s=report.clock_s, tokens=report.num_tokens, running=report.num_running))
        for before, after in itertools.pairwise(reports):
            decoded_s = before.clock_s + after.decode_s - before.decode_s
            for phase, start_s, stop_s in (("decode", before.clock_s, decoded_s), ("gated", decoded_s, after.clock_s)):
                log.append("timeline", row("timeline", rank=g, phase=PHASES.index(phase), start_s=start_s, stop_s=stop_s))
    log.close()


def test_fit_gives_back_the_costs_of_a_log(tmp_path: Path) -> None:
    """Training costs, push and grading exactly; predicted throughput and age of another eta and another batch as the true job has them."""
    config = Config(
        generation=Generation(max_new_tokens=90, max_num_running=12),
        staleness=Staleness(max_staleness=2),
        train=Train(num_steps=40, batch_size=32, group_size=4, microbatch_tokens=100_000),
        topology=Topology(num_ranks=3, generation_fraction=0.67),
    )
    job = Job(
        num_generation=2,
        num_training=1,
        batch_size=32,
        group_size=4,
        eta=2,
        num_steps=40,
        decode=DecodeCost(base_s=0.01, per_sequence_s=0.001, max_num_running=12),
        train=TrainCost(token_s=1e-3, step_s=0.3, capacity_tokens=100_000),
        lengths=LogNormalLengths(median=30, sigma=0.7, cap=90, prompt=12),
        push=PushCost(transfer_s=0.05, swap_s=0.02),
        reward_s=0.03,
    )
    logged(tmp_path / "run", config, job)
    found = fit.fit(tmp_path / "run")
    assert (found.token_s, found.step_s) == pytest.approx((1e-3, 0.3), rel=1e-4)
    assert (found.push.transfer_s, found.push.swap_s, found.reward_s) == pytest.approx((0.05, 0.02, 0.03))
    for changed in ({}, {"eta": math.inf}, {"eta": 0}, {"eta": 4}, {"batch_size": 64}):
        eta = changed.get("eta", 2)
        wanted = replace(config, staleness=Staleness(max_staleness="inf" if math.isinf(eta) else int(eta)))
        wanted = replace(wanted, train=replace(config.train, batch_size=int(changed.get("batch_size", 32))))
        truth, ours = fit.predict(replace(job, **changed)), fit.predict(found.job(wanted))
        assert ours.tokens_per_s == pytest.approx(truth.tokens_per_s, rel=0.05)
        if eta < math.inf:  # without a gate the age is how much faster generation is, times the steps: no fit is good enough for that
            assert ours.staleness_mean == pytest.approx(truth.staleness_mean, rel=0.10, abs=0.05)
    with pytest.raises(ConfigError, match="use at most 90"):
        found.job(replace(config, generation=Generation(max_new_tokens=91)))


def test_least_squares_without_negative_costs() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit.nonnegative(columns, columns @ [0.5, 2.0]) == pytest.approx([0.5, 2.0])
    assert fit.nonnegative(columns, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])  # a falling line: the best without a negative slope
