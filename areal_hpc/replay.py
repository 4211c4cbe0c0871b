"""`areal-hpc replay RUN`: do again what the tapes of an attempt say, and compare bit for bit. docs/replay.md says what equal means, and when it can be expected.

    --level train   T ranks: the recorded trajectories are trained again; parameters are compared after each step
    --level full    G + T ranks, the job of the run itself: answers are generated again too, engine step by engine step

Nothing of the run is changed: a replay writes into RUN/replay/.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from areal_hpc.config import Config, ConfigError, Log
from areal_hpc.config_io import load_yaml
from areal_hpc.guard import Difference
from areal_hpc.launch.deaths import Deaths
from areal_hpc.launch.local import LocalJob, final_status, find_launcher, is_rank, rank_environment, remove_stale_files, world_rank_hint
from areal_hpc.launch.resume import Attempt
from areal_hpc.observe.schema import CALLS
from areal_hpc.recipes import recipe
from areal_hpc.transport.tape import Replay, Tape, check_machine, machine, of_role, read_tapes, tape_path

LEVELS = ("train", "full")
PATIENCE_S = 600.0
"""Shortest deadline of pushes and batches: ranks wait for each other where the recorded run did not."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay that can begin."""

    config: Config
    """Of the recorded attempt, with what only concerns files and deadlines changed."""
    level: str
    num_ranks: int
    replay: Replay
    out: Path
    """Folder for what the replay itself writes."""


def main(args: Sequence[str]) -> int:
    """Be one rank of a replay, or check everything and start the ranks. Exit status 0: equal; 1: different, or failed; 2: a user's mistake."""
    if not is_rank():
        plan = prepare(args)
        plan.out.mkdir(parents=True)
        return _launch(plan, args)
    try:
        _be_rank(prepare(args))
    except ConfigError as error:  # every rank finds the same mistake before MPI starts: one of them says it
        if world_rank_hint() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2


def prepare(args: Sequence[str]) -> Plan:
    """What the arguments and the tapes allow. Raises ConfigError in one line when that is nothing."""
    run_dir, options, flags = _parse(args)
    attempt_dir = _attempt(run_dir, options.get("--attempt", ""))
    level = options.get("--level", "train")
    if level not in LEVELS:
        raise ConfigError(f"--level={level}: use {' or '.join(LEVELS)}")
    if not tape_path(attempt_dir, 0).exists():
        raise ConfigError(f"{attempt_dir} has no tape; record one with --log.record order or tokens")
    config, tapes = load_yaml(str(attempt_dir / "config.yaml"), recipe("laptop")), read_tapes(attempt_dir)
    training = of_role(tapes, "training")
    if training[0].first_step > 0:
        raise ConfigError(f"{attempt_dir} began at the checkpoint of step {training[0].first_step}; only attempts that began with a model can be replayed")
    engine: str = config.generation.engine
    if level == "full" and engine != "embedded":
        raise ConfigError(f"--level=full needs the embedded engine, the run had {engine}; use --level train")
    if level == "train" and config.log.record != "tokens":
        raise ConfigError(f"--level=train needs a run with --log.record tokens, this one had {config.log.record}; use --level full")
    if "--force" not in flags:
        check_machine(tapes[0], machine())
    available = num_replayable_steps(tapes, level, config.train.group_size)
    steps = _number("--steps", options.get("--steps", str(available)))
    if not 1 <= steps <= available:
        raise ConfigError(f"--steps={steps}: the tapes of {attempt_dir} hold {available} complete steps")
    replay = Replay(attempt_dir.absolute(), steps, grade_again="--grade-again" in flags, force="--force" in flags)
    num_ranks = len(tapes) if level == "full" else len(training)
    return Plan(_adapted(config), level, num_ranks, replay, _new_folder(run_dir, attempt_dir.name, level))


def _parse(args: Sequence[str]) -> tuple[Path, dict[str, str], set[str]]:
    """(run folder, options with a value, flags)."""
    if not args or args[0].startswith("-"):
        raise ConfigError("areal-hpc replay needs a run folder: areal-hpc replay RUN [--attempt K] [--level train|full] [--steps N] [--grade-again] [--force]")
    options: dict[str, str] = {}
    flags: set[str] = set()
    rest = iter(args[1:])
    for argument in rest:
        name, _, value = argument.partition("=")
        if name in ("--force", "--grade-again") and not value:
            flags.add(name)
        elif name in ("--attempt", "--level", "--steps"):
            options[name] = value or next(rest, "")
        else:
            raise ConfigError(f"unknown option '{name}' of replay; there are: --attempt, --level, --steps, --grade-again, --force")
    return Path(args[0]), options, flags


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{name}={text}: expected a number")
    return int(text)


def _attempt(run_dir: Path, number: str) -> Path:
    """attempt-K; the last one by default. Raises ConfigError when there is none."""
    if number:
        attempt_dir = run_dir / f"attempt-{_number('--attempt', number)}"
        if not attempt_dir.is_dir():
            raise ConfigError(f"{attempt_dir}: no such attempt")
        return attempt_dir
    attempts = [path for path in run_dir.glob("attempt-*") if path.name.removeprefix("attempt-").isdigit()]
    if not attempts:
        raise ConfigError(f"{run_dir}: not the folder of a run (looked for attempt-*)")
    return max(attempts, key=lambda path: int(path.name.removeprefix("attempt-")))


def num_replayable_steps(tapes: Sequence[Tape], level: str, group_size: int) -> int:
    """Steps that all tapes hold as a whole: the tapes of a killed run end at different moments."""
    training = of_role(tapes, "training")
    steps = min(tape.num_steps for tape in training)
    if level == "train":
        return steps
    calls = [tape.table("calls") for tape in of_role(tapes, "generation")]
    finished = np.concatenate([rows["number"][rows["kind"] == CALLS.index("finish")] for rows in calls])
    batches = np.concatenate([tape.table("batches") for tape in training])
    lost = ~np.isin(batches["ticket"] * group_size + batches["sample"], finished)
    return min([steps, *(batches["step"][lost] - 1).tolist()])


def _adapted(config: Config) -> Config:
    """What a replay has no use for is off; deadlines are long; versions are staged, since they may come long before the tape takes them. No number depends on these."""
    transport = config.transport
    deadlines = {name: max(PATIENCE_S, getattr(transport, name)) for name in ("push_deadline_s", "data_deadline_s")}
    return dataclasses.replace(
        config,
        log=Log(record="none"),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        watchdog=dataclasses.replace(config.watchdog, enabled=False),
        reward=dataclasses.replace(config.reward, max_failure_rate=1.0),
        evaluation=dataclasses.replace(config.evaluation, save_samples=0, save_training_groups=0),
        transport=dataclasses.replace(transport, staging="on", **deadlines),
    )


def _new_folder(run_dir: Path, attempt: str, level: str) -> Path:
    """RUN/replay/attempt-K-LEVEL-1, -2, ...: the first that there is not."""
    number = 1
    while (out := run_dir.absolute() / "replay" / f"{attempt}-{level}-{number}").exists():
        number += 1
    return out


def _launch(plan: Plan, args: Sequence[str]) -> int:
    launcher = find_launcher()
    print(f"{plan.replay.attempt_dir}: {plan.replay.num_steps} steps on {plan.num_ranks} ranks, level {plan.level}", flush=True)
    began_at = time.time()
    command = [*launcher.command(plan.num_ranks), sys.executable, "-m", "areal_hpc", "replay", *args]
    quiet = {"AREAL_HPC_PROGRESS": "none"}
    try:
        died = Deaths(plan.out)
        job = LocalJob(command, os.environ | launcher.environment() | rank_environment(plan.config, Attempt(plan.out)) | quiet | died.environment())
        status = job.wait(died)
    finally:
        remove_stale_files(began_at)
    failure = plan.out / "failure.json"
    if failure.exists() and f'"{Difference.__name__}: ' in failure.read_text():
        return 1  # the rank that found it has said so
    return final_status(status, plan.out, job.num_signals, died)


def _be_rank(plan: Plan) -> NoReturn:
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != plan.num_ranks:
        raise ConfigError(f"{MPI.COMM_WORLD.size} ranks were started; level {plan.level} of this run needs {plan.num_ranks}")
    given = os.environ.get("AREAL_HPC_ATTEMPT_DIR")
    out = Path(given) if given else MPI.COMM_WORLD.bcast(plan.out, root=0)
    out.mkdir(parents=True, exist_ok=True)
    if plan.level == "train":
        retrain(plan.config, plan.replay, out)
    from areal_hpc.run import run_rank

    run_rank(plan.config, Attempt(out), replay=plan.replay)


def retrain(config: Config, replay: Replay, out: Path) -> NoReturn:
    """Be one training rank that trains the recorded batches; ends the process."""
    import torch

    from areal_hpc import groups, guard, topology
    from areal_hpc.models import hf
    from areal_hpc.run import prepare_model, wire_dtype
    from areal_hpc.train.checkpoint import open_weights_of
    from areal_hpc.train.script import open_script, recorded_batch
    from areal_hpc.train.trainer import Trainer

    torch.set_num_threads(config.topology.threads_per_rank)
    with guard.AbortGuard(out) as abort:
        world = topology.join(config, training_only=True)
        abort.name = world.name()
        connection = groups.connect(world, config.device, config.transport.start_deadline_s)
        model_dir = prepare_model(config, world)
        script = open_script(replay, world)
        mesh, temperature = groups.training_mesh(world, connection.device), config.generation.temperature
        trainer = Trainer(hf.load_config(model_dir), config.train, temperature=temperature, device=connection.device, mesh=mesh, dtype=wire_dtype(config))
        trainer.load(open_weights_of(model_dir))
        script.weights(0, trainer.named_shards())
        for step in range(1, replay.num_steps + 1):
            batch = recorded_batch(script.tape, step)
            trainer.train_batch(batch)
            script.step(step, batch, trainer.named_shards())
        guard.finish(world, out, guard.DONE, {"steps": replay.num_steps, **script.conclude(replay.num_steps, num_answers=0)})
