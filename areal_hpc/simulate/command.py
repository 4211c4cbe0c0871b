"""`areal-hpc simulate` and `areal-hpc plan`: arguments, tables, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from areal_hpc.config import Config, ConfigError, check
from areal_hpc.config_io import parse_options
from areal_hpc.recipes import RECIPES, recipe
from areal_hpc.simulate import fit, hardware, planner
from areal_hpc.simulate.cluster import Job, simulate
from areal_hpc.simulate.costs import FailureCost
from areal_hpc.simulate.planner import Choice, Plan, Wanted


class _Parser(argparse.ArgumentParser):
    """A mistake is a ConfigError: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def _number(text: str, kind: Callable[[str], Any], rule: str, ok: Callable[[Any], bool]) -> Any:
    with contextlib.suppress(ValueError):
        if ok(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not {rule}")


def context_tokens(text: str) -> int:
    """32k or 32768."""
    found = _number(text, lambda t: int(t[:-1]) * 1024 if t.lower().endswith("k") else int(t), "a number of tokens, at least 2: 32k or 32768", lambda n: n >= 2)
    return int(found)


def staleness(text: str) -> float:
    """0, 1, 2, ... or inf."""
    return float(_number(text, lambda t: math.inf if t == "inf" else float(int(t)), "a number of versions: 0, 1, 2, ... or inf", lambda n: n >= 0))


def positive(text: str) -> int:
    """A whole number above zero."""
    return int(_number(text, int, "a whole number above zero", lambda n: n >= 1))


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=positive, help="GPUs of the job")
    parser.add_argument("--context", type=context_tokens, default=32768, help="prompt and answer, tokens: 32k or 32768")
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(hardware.DEVICES)}")
    parser.add_argument("--batch", type=positive, help="B: trajectories of a global batch (8192)")
    parser.add_argument("--group", type=positive, help="n: answers to one prompt (16)")
    parser.add_argument("--mean", type=float, help="mean answer tokens (8776, the paper's, cut at the context)")
    parser.add_argument("--sigma", type=float, default=0.85, help="standard deviation of the log length")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and failures")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _wanted(name: str, given: argparse.Namespace, config: Config | None = None) -> Wanted:
    gpus = given.gpus or (config.topology.num_ranks if config is not None else 128)
    if gpus < 2:
        raise ConfigError(f"--gpus {gpus}: one generates and one trains at the least; use 2 or more")
    if given.sigma < 0 or (given.mean is not None and given.mean < 1):
        raise ConfigError(f"--sigma {given.sigma:g} must be zero or more, and --mean at least 1")
    hardware.model(name), hardware.device(given.device)
    return Wanted(
        model=name.lower(),
        gpus=gpus,
        context=given.context,
        device=given.device.lower(),
        batch_size=given.batch or (config.train.batch_size if config is not None else 8192),
        group_size=given.group or (config.train.group_size if config is not None else 16),
        num_minibatches=config.train.num_minibatches if config is not None else 4,
        mean_answer=given.mean,
        sigma=given.sigma,
        seed=given.seed,
    )


def simulate_command(arguments: Sequence[str]) -> int:
    """Predicted throughput of a model preset or a recipe on GPUs, or of other settings of a run of ours."""
    if any(argument.split("=")[0] == "--from-run" for argument in arguments):
        return _from_run(list(arguments))
    parser = _Parser(prog="areal-hpc simulate", description="Predict throughput, asynchronous beside synchronous.")
    parser.add_argument("preset", metavar="PRESET_OR_RECIPE", help=f"a model ({', '.join(hardware.MODELS)}) or a recipe ({', '.join(RECIPES)}) with --model")
    _common(parser)
    parser.add_argument("--model", help="model of a recipe's job")
    parser.add_argument("--eta", type=staleness, help="permitted staleness (8, or the recipe's)")
    parser.add_argument("--mode", choices=("count", "dropless", "drop", "mask"), help="staleness mode (count, or the recipe's)")
    parser.add_argument("--fraction", type=float, default=0.75, help="share of the GPUs that generate")
    parser.add_argument("--tp", type=positive, help="GPUs of one engine")
    parser.add_argument("--steps", type=positive, default=20, help="training steps")
    parser.add_argument("--mtbf-hours", type=float, help="mean time between failures of one GPU; none: nothing fails")
    given = parser.parse_args(list(arguments))
    config = None
    name = given.preset
    if name.lower() not in hardware.MODELS:
        if name not in RECIPES:
            raise ConfigError(f"'{name}' is neither a model ({', '.join(hardware.MODELS)}) nor a recipe ({', '.join(RECIPES)})")
        config, name = recipe(name), given.model
        if name is None:
            raise ConfigError(f"recipe {given.preset}: --model says which model the GPUs run; there are: {', '.join(hardware.MODELS)}")
    wanted = _wanted(name, given, config)
    preset = hardware.model(name)
    if not 0 < given.fraction < 1:
        raise ConfigError(f"--fraction {given.fraction:g} must lie between 0 and 1")
    if given.mtbf_hours is not None and given.mtbf_hours <= 0:
        raise ConfigError(f"--mtbf-hours {given.mtbf_hours:g} must be above zero")
    num_training = min(wanted.gpus - 1, max(1, round(wanted.gpus * (1 - given.fraction))))
    tensor_parallel = given.tp or preset.tensor_parallel
    eta = given.eta if given.eta is not None else config.staleness.eta if config is not None else 8.0
    mode = given.mode or (config.staleness.mode if config is not None else "count")
    if mode != "count" and math.isinf(eta):
        raise ConfigError(f"--mode {mode} bounds the age by eta, which is inf; use --mode count or a finite --eta")
    failures = FailureCost(rank_mtbf_s=given.mtbf_hours * 3600) if given.mtbf_hours is not None else FailureCost()

    def job(at: float, both: bool) -> Job:
        found = planner.job(
            wanted, num_training=num_training, tensor_parallel=tensor_parallel, eta=at, batch_size=wanted.batch_size, num_steps=given.steps, colocated=both
        )
        return replace(found, failures=failures, seed=given.seed, mode=mode if not both else "count")

    jobs = {"asynchronous": job(eta, False), "synchronous, split": job(0, False)}
    if wanted.gpus % tensor_parallel == 0 and wanted.batch_size // wanted.num_minibatches >= wanted.gpus:
        jobs["synchronous, colocated"] = job(0, True)
    rows = {label: _row(described, tensor_parallel, wanted.gpus) for label, described in jobs.items()}
    first = rows["asynchronous"]["tokens_per_s"]
    for row in rows.values():
        row["ratio"] = first / row["tokens_per_s"]
    if given.json:
        print(json.dumps({"model": preset.name, **_plain(asdict(wanted)), "num_training": num_training, "tensor_parallel": tensor_parallel, "jobs": rows}))
        return 0
    print(
        f"{preset.name} on {wanted.gpus} {hardware.device(given.device).name}, context {wanted.context:,}, B = {wanted.batch_size:,}, n = {wanted.group_size}"
    )
    print(
        f"{wanted.gpus - num_training} GPUs generate (engines of {tensor_parallel}), {num_training} train; {given.steps} steps, the first quarter left out of rates"
    )
    print(f"{'':24s} {'eta':>4s} {'tokens/s':>10s} {'s/step':>8s} {'age':>6s} {'training waits':>14s} {'engines idle':>12s} {'ratio':>6s}  bound")
    for label, row in rows.items():
        print(
            f"{label:24s} {row['eta']!s:>4s} {row['tokens_per_s']:10,.0f} {row['step_s']:8.1f} {row['staleness_mean']:6.2f} "
            f"{100 * row['waiting_share']:13.0f}% {100 * row['idle_share']:11.0f}% {row['ratio']:5.2f}x  {row['bound']}"
        )
        if row["num_failures"]:
            print(f"{'':24s} {row['num_failures']} failures, {row['lost_s']:,.0f} s lost to them")
    return 0


def _row(described: Job, tensor_parallel: int, gpus: int) -> dict[str, Any]:
    result = simulate(described)
    choice = planner.choice_of(described, result, tensor_parallel, gpus)
    steady = result.steady()
    return {
        "eta": "inf" if math.isinf(choice.eta) else int(choice.eta),
        "tokens_per_s": steady.tokens_per_s,
        "step_s": steady.wall_s / len(steady.steps),
        "staleness_mean": steady.staleness_mean,
        "waiting_share": choice.waiting_share,
        "idle_share": choice.idle_share,
        "num_failures": result.num_failures,
        "lost_s": result.lost_s,
        "bound": choice.bound,
    }


def _from_run(arguments: list[str]) -> int:
    """`--from-run RUN [--section.option value ...]`: fitted from the run's log; options change the job that is predicted."""
    at = next(k for k, argument in enumerate(arguments) if argument.split("=")[0] == "--from-run")
    name, _, value = arguments[at].partition("=")
    rest = arguments[:at] + arguments[at + 1 :]
    if not value:
        if at == len(rest) or rest[at].startswith("--"):
            raise ConfigError("--from-run needs the folder of a run: areal-hpc simulate --from-run RUN")
        value = rest.pop(at)
    as_json = "--json" in rest
    fitted = fit.fit(Path(value))
    config = parse_options([argument for argument in rest if argument != "--json"], fitted.config, f"areal-hpc simulate {name} RUN")
    check(config)
    again, wanted = fit.predict(fitted.job(fitted.config)), fit.predict(fitted.job(config))
    rows = {
        "logged": {"tokens_per_s": fitted.tokens_per_s, "staleness_mean": fitted.staleness_mean},
        "the same job, simulated": {"tokens_per_s": again.tokens_per_s, "staleness_mean": again.staleness_mean},
        "predicted": {"tokens_per_s": wanted.tokens_per_s, "staleness_mean": wanted.staleness_mean},
    }
    if as_json:
        print(json.dumps({"parameters": fitted.parameters(), "jobs": rows}))
        return 0
    print("fitted: " + ", ".join(f"{key} {1e3 * seconds:.3g} ms" for key, seconds in fitted.parameters().items()))
    for label, row in rows.items():
        print(f"{label:24s} {row['tokens_per_s']:10,.0f} tokens/s  mean age {row['staleness_mean']:.2f}")
    return 0


def plan_command(arguments: Sequence[str]) -> int:
    """Recommended split, staleness and batch for a model on a number of GPUs."""
    parser = _Parser(prog="areal-hpc plan", description="Best split, tensor parallelism, staleness and batch, and what they give.")
    parser.add_argument("--model", required=True, help=f"one of {', '.join(hardware.MODELS)}")
    _common(parser)
    parser.add_argument("--trajectories", type=positive, default=250 * 8192, help="to train, for the hours (250 batches of 8,192)")
    parser.add_argument("--plot", metavar="FILE", help="PNG of throughput over splits and staleness")
    given = parser.parse_args(list(arguments))
    if given.gpus is None:
        raise ConfigError("areal-hpc plan needs --gpus, the GPUs of the job")
    if given.plot and not Path(given.plot).absolute().parent.is_dir():
        raise ConfigError(f"--plot {given.plot}: no such folder")
    found = planner.plan(_wanted(given.model, given), (lambda text: print(text, file=sys.stderr)) if sys.stderr.isatty() else lambda text: None)
    if given.plot:
        planner.plot(found, Path(given.plot))
    print(json.dumps(_plan_object(found, given.trajectories)) if given.json else _plan_text(found, given.trajectories))
    return 0


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in values.items()}


def _plan_object(found: Plan, trajectories: int) -> dict[str, Any]:
    def entry(choice: Choice) -> dict[str, Any]:
        return {**_plain(asdict(choice)), "bound": choice.bound}

    return {
        "wanted": asdict(found.wanted),
        "best": {**entry(found.best), "num_generation_gpus": found.wanted.gpus - found.best.num_training, "hours": planner.hours(found.best, trajectories)},
        **{name: [entry(choice) for choice in getattr(found, name)] for name in ("splits", "engines", "etas", "batches", "synchronous")},
        "generation_bytes": found.generation_bytes,
        "training_bytes": found.training_bytes,
        "sbatch": planner.sbatch_line(found),
    }


def _plan_text(found: Plan, trajectories: int) -> str:
    wanted, best = found.wanted, found.best
    gpu, preset = hardware.device(wanted.device), hardware.model(wanted.model)
    generating = wanted.gpus - best.num_training
    lines = [
        f"{preset.name} on {wanted.gpus} {gpu.name}, context {wanted.context:,}: {generating} GPUs generate ({100 * generating / wanted.gpus:.0f} %), "
        f"{best.num_training} train, engines of {best.tensor_parallel}, eta = {best.eta:g}, B = {best.batch_size:,}",
        f"{best.tokens_per_s:,.0f} tokens/s, {best.step_s:.0f} s a step, {planner.hours(best, trajectories):.1f} hours to {trajectories:,} trajectories; "
        f"mean age {best.staleness_mean:.1f}; bound by: {best.bound}",
        "",
        f"Splits at eta = {planner.PLANNED_ETA}, B = {wanted.batch_size:,}, and what a wrong one costs",
    ]
    top = max(choice.tokens_per_s for choice in found.splits)
    lines += [
        f"  {wanted.gpus - c.num_training:5d} generate, {c.num_training:5d} train, engines of {c.tensor_parallel}: {c.tokens_per_s:12,.0f} tokens/s "
        f"{100 * (c.tokens_per_s / top - 1):+5.0f} %  {c.bound}"
        for c in found.splits + found.engines
    ]
    lines += ["", "Staleness"] + [f"  eta = {c.eta:g}: {c.tokens_per_s:12,.0f} tokens/s, mean age {c.staleness_mean:.1f}  {c.bound}" for c in found.etas]
    lines += ["", "Batch"] + [f"  B = {c.batch_size:6,}: {c.tokens_per_s:12,.0f} tokens/s  {c.bound}" for c in found.batches]
    lines += ["", "Synchronous"] + [
        f"  {'colocated' if c.colocated else 'same split, eta = 0'}: {c.tokens_per_s:12,.0f} tokens/s; asynchronous is {best.tokens_per_s / c.tokens_per_s:.2f} x that"
        for c in found.synchronous
    ]
    for role, parts in (("generation", found.generation_bytes), ("training", found.training_bytes)):
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
        lines += ["", f"Memory of a {role} GPU, GB of {gpu.memory_bytes / 1e9:.0f}: {listed}; together {sum(parts.values()) / 1e9:.1f}"]
    return "\n".join([*lines, "", planner.sbatch_line(found)])
