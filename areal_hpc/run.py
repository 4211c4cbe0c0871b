"""The story of one rank: start the reward server, join the world, agree on everything, then generate or train until the end.

srun / mpiexec ──▶ run_rank on every rank ──▶ generation rank: rollout/worker.py        training rank: train/loop.py
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from areal_hpc import cluster, fence, groups, guard, topology
from areal_hpc.checks import cache_dir, check_start
from areal_hpc.colocated import ColocatedRank, colocated_loop
from areal_hpc.colocated import end as end_colocated
from areal_hpc.config import Config, ConfigError
from areal_hpc.config_io import as_yaml
from areal_hpc.data.datasets import Problems, load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.launch.local import begin_attempt, world_rank_hint
from areal_hpc.launch.ownership import Ownership
from areal_hpc.launch.resume import Attempt
from areal_hpc.models import hf
from areal_hpc.models.decoder import named_shapes
from areal_hpc.models.flops import attention_crossover_tokens
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.observe import samples
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.telemetry import Log, hardware
from areal_hpc.observe.timeline import Phases
from areal_hpc.observe.watchdog import Watchdog, announce
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines import create_engine
from areal_hpc.rollout.script import open_script as generation_script
from areal_hpc.rollout.sinks import layout_of, open_receiver
from areal_hpc.rollout.tape import open_recording as generation_tape
from areal_hpc.rollout.worker import RolloutWorker
from areal_hpc.signals import StopFlag
from areal_hpc.topology import World
from areal_hpc.train.checkpoint import load_checkpoint, open_weights_of, save_model
from areal_hpc.train.collect import Collector
from areal_hpc.train.compose import Composer
from areal_hpc.train.loop import Head, TrainingRank, end_run, training_loop
from areal_hpc.train.publish import Publisher
from areal_hpc.train.record import Recorder
from areal_hpc.train.saved import SavedAnswers
from areal_hpc.train.saving import RankSaver, Saves
from areal_hpc.train.script import open_script as training_script
from areal_hpc.train.tape import open_recording as training_tape
from areal_hpc.train.trainer import Trainer
from areal_hpc.transport import random_state
from areal_hpc.transport.cut import Restart
from areal_hpc.transport.evaluation import source_of
from areal_hpc.transport.lanes import no_lanes, open_incoming, open_outgoing
from areal_hpc.transport.messages import Mailbox
from areal_hpc.transport.paths import open_paths
from areal_hpc.transport.tape import Replay
from areal_hpc.transport.weights import Manifest, Sender
from areal_hpc.validate import model_folder
from areal_hpc.walltime import Walltime

UNBOUNDED_HELD = 2**31
"""Groups a training rank may hold when the gate bounds them anyway."""


def run_rank(config: Config, attempt: Attempt, ownership: Ownership | None = None, replay: Replay | None = None) -> NoReturn:
    """Be one rank of the job, or of its replay. `config` has passed `check`; ends the process. `ownership`: of the run folder, if this process holds it."""
    attempt_dir = attempt.folder
    rewards = RewardService.start()  # before MPI: a process started afterwards can upset the interconnect
    end = cluster.end_time() if world_rank_hint() == 0 and replay is None else None  # also a process; a replay stops nowhere but at its end
    torch.set_num_threads(config.topology.threads_per_rank)
    stop = StopFlag()
    stop.install()
    place = announce(attempt_dir, world_rank_hint())
    with guard.deadline_of_mpi_start(attempt_dir, place.name, config.transport.start_deadline_s):
        abort = guard.AbortGuard(attempt_dir)
    with abort:
        world = topology.join(config)
        abort.name = world.name()
        fence.watch(attempt_dir.parent, cluster.Incarnation.mine(), world.name())
        walltime = Walltime(world.comm.bcast(end, root=0), config.walltime.stop_before_s)
        check_start(config, world, attempt_dir, cache_dir(), walltime.end)
        phases = Phases(world.world_rank, world.role, clock=world.clock)
        connection = groups.connect(world, config.device, config.transport.start_deadline_s)
        watchdog = Watchdog.start(config, world, phases, stop, place, connection.address)
        abort.table, abort.watched = watchdog.table, config.watchdog.enabled
        problems = load_problems(config.data)
        restart = Restart.open(attempt.checkpoint) if attempt.checkpoint is not None else None
        model_dir = prepare_model(config, world) if restart is None or needs_first_weights(config) else restart.folder
        problems = Prompts(config.data, Tokenizer.from_folder(model_dir)).fitting(problems)
        if restart is not None:
            restart.check_data(problems.fingerprint)
        status, summary = guard.DONE, dict[str, Any]()
        if world.is_colocated:
            rewards.configure(config.data, config.reward, environment=config.environment)
            status, summary = generate_and_train(config, world, connection, problems, model_dir, rewards, attempt, phases, stop, walltime)
        elif world.role == "generation":
            rewards.configure(config.data, config.reward, environment=config.environment)
            generate(config, world, connection, problems, model_dir, rewards, phases, stop, attempt, restart, replay)
        else:
            rewards.close()
            status, summary = train(config, world, connection, problems, model_dir, attempt, phases, stop, walltime, restart, replay)
        rewards.close()
        world.barrier(config.transport.data_deadline_s + 2 * config.checkpoint.deadline_s, "end")
        status = world.control.bcast(status, root=world.training_ranks[0])
        if ownership is not None:
            ownership.release()
        guard.finish(world, attempt_dir, status, summary, watchdog.stop)


def agree_on_attempt(config: Config, *, resume: bool, fingerprint: str) -> tuple[Attempt, Ownership | None]:
    """Without the local launcher: world rank 0 owns the run folder, makes that of the attempt, and all others use it. Collective."""
    with guard.deadline_of_mpi_start(None, f"rank {world_rank_hint()} on host {socket.gethostname()}", config.transport.start_deadline_s):
        from mpi4py import MPI

    topology.check_size(MPI.COMM_WORLD.size)  # before each of N worlds of size 1 makes the folder
    made: Attempt | ConfigError | None = None
    ownership: Ownership | None = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            fence.claim(Path(config.run_dir))  # first: ranks of an earlier life, whose lock may live as long as they do, leave when they see it
            ownership = Ownership.take(Path(config.run_dir))
            try:
                made = begin_attempt(config, resume=resume, fingerprint=fingerprint)
            except ConfigError:
                ownership.release()
                raise
            ownership.keep_alive()
            for line in [f"took over from {ownership.took_over}, which is gone"] * bool(ownership.took_over) + made.notes:
                print(line, flush=True)
        except ConfigError as error:
            made = error
    made = MPI.COMM_WORLD.bcast(made, root=0)
    if isinstance(made, ConfigError):
        raise made
    assert made is not None
    blind = sorted({host for host in MPI.COMM_WORLD.allgather("" if made.folder.is_dir() else socket.gethostname()) if host})
    if blind:
        if ownership is not None:
            ownership.release()
        raise ConfigError(
            f"run_dir={made.folder.parent}: made by world rank 0 but not seen on {', '.join(blind)}; use --run-dir on a file system that all nodes share"
        )
    return made, ownership


def needs_first_weights(config: Config) -> bool:
    """The weights that the run began with are its reference model, also after a restart."""
    return config.train.kl_coef > 0 and not config.train.reference_path


def prepare_model(config: Config, world: World) -> Path:
    """Folder with config.json, tokenizer and first weights. Without a source, training rank 0 builds and warm-starts the small model, or finds it in the cache."""
    if config.model_source:
        return model_folder(Path(config.model_source))
    folder = None
    if world.is_first_trainer:
        from areal_hpc.train.warmstart import cached_model

        folder = cached_model(config.model, config.data, cache_dir())
    found = Path(patient_bcast(world, str(folder), config.transport.start_deadline_s))
    if not found.is_dir():
        raise ConfigError(f"the small model is in {found}, which host {world.host} does not see; set AREAL_HPC_CACHE to a folder that all nodes share")
    return found


def patient_bcast(world: World, text: str, deadline_s: float) -> str:
    """Broadcast from training rank 0, which may take minutes to get there: the others sleep between looks instead of spinning on cores that it needs."""
    root = world.training_ranks[0]
    if world.world_rank == root:
        for rank in range(world.size):
            if rank != root:
                world.comm.isend(text, dest=rank).wait()
        return text
    stop_at = time.monotonic() + deadline_s
    while not world.comm.iprobe(source=root):
        if time.monotonic() > stop_at:
            raise TimeoutError(f"training rank 0 did not have the model ready within {deadline_s:g} s")
        time.sleep(0.01)
    return world.comm.recv(source=root)


def wire_dtype(config: Config) -> torch.dtype:
    """Type that weights travel and are generated with."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def manifest_of(config: Config, world: World, named_shapes: Iterable[tuple[str, Sequence[int]]]) -> Manifest:
    """What the push moves, equal on all ranks. Collective."""
    all_roots = config.transport.push == "all-roots"
    manifest = Manifest.of(named_shapes, wire_dtype(config), world.num_training if all_roots else 1, config.train.replicas if all_roots else 1)
    manifest.agree(world.comm)
    return manifest


def generate(
    config: Config,
    world: World,
    connection: groups.Connection,
    problems: Problems,
    model_dir: Path,
    rewards: RewardService,
    phases: Phases,
    stop: StopFlag,
    attempt: Attempt,
    restart: Restart | None,
    replay: Replay | None,
) -> None:
    """A generation rank: its engine starts empty and gets its first version by a push, as every other."""
    tokenizer = Tokenizer.from_folder(model_dir)
    tape = generation_script(replay, world, config.train.group_size) if replay else generation_tape(config, world, attempt.folder)
    decoder_config = hf.load_config(model_dir)
    engine = create_engine(config, decoder_config, tokenizer.stop_token_ids, connection.device)
    lane = open_outgoing(config, world, attempt.number)
    manifest = manifest_of(config, world, named_shapes(decoder_config))
    paths = open_paths(config, world, connection, layout_of(engine))
    worker = RolloutWorker(
        config=config,
        world=world,
        engine=tape.engine(engine),
        receiver=open_receiver(config, world, engine, manifest, paths, connection.device),
        lane=lane,
        rewards=rewards,
        problems=problems,
        tokenizer=tokenizer,
        mailbox=Mailbox(world.control),
        phases=phases,
        stop=stop,
        tape=tape,
        **(resumed_work(config, world, restart) if restart is not None else {}),
    )
    tape.attach(worker)
    worker.run()
    topology.clock_drifts(world, config.transport.push_deadline_s)
    tape.close()
    phases.enter("stop")
    worker.mailbox.drain(config.transport.push_deadline_s)
    lane.close(config.transport.push_deadline_s)


def train(
    config: Config,
    world: World,
    connection: groups.Connection,
    problems: Problems,
    model_dir: Path,
    attempt: Attempt,
    phases: Phases,
    stop: StopFlag,
    walltime: Walltime,
    restart: Restart | None,
    replay: Replay | None,
) -> tuple[int, dict]:
    """A training rank. Returns the exit status and, on training rank 0, the summary for exit.json."""
    decoder_config = hf.load_config(model_dir)
    mesh = groups.training_mesh(world, connection.device)
    trainer = Trainer(decoder_config, config.train, temperature=config.generation.temperature, device=connection.device, mesh=mesh, dtype=wire_dtype(config))
    if restart is None or config.train.kl_coef > 0:
        trainer.load(open_weights_of(model_dir))
    if restart is not None:
        load_checkpoint(restart.folder, trainer)
    lanes = open_incoming(config, world, attempt.number)
    shapes = ((shard.name, shard.shape) for shard in trainer.named_shards())
    manifest = manifest_of(config, world, shapes)
    paths = open_paths(config, world, connection, None)
    mailbox = Mailbox(world.control)
    root = world.role_rank if world.world_rank in paths.senders else None
    sender = Sender(manifest, root, connection.device, network=paths.network, images=paths.images, layout=paths.layout)
    publisher = Publisher(world, mailbox, sender, phases, config.transport.push_deadline_s, paths.shared)
    publisher.head_deadline_s = config.transport.data_deadline_s + 2 * config.transport.push_deadline_s
    held = UNBOUNDED_HELD if config.staleness.max_staleness != "inf" else 2 * config.groups_per_batch
    collector = Collector(world.role_rank, lanes, max_held=held)
    composer = Composer(config, world.num_training, attention_crossover_tokens(decoder_config))
    run_dir, tokenizer_files = attempt.folder.parent, hf.tokenizer_files(model_dir)
    saver = RankSaver.create(world, run_dir, trainer, collector, tokenizer_files)
    head = None
    if world.is_first_trainer:
        expected_bytes = 3 * 4 * sum(math.prod(entry.shape) for entry in manifest.entries)  # float32 parameters and two moments
        head = open_head(config, world, mailbox, publisher, composer, attempt, phases, problems, stop, walltime, restart, expected_bytes)
        head.recorder.progress.message(paths.described(world.num_generation))
    if restart is not None:
        collector.put_back(restart.cut.finished_of(world.role_rank, world.num_training))
        restore_random_state(restart, world)
    tape = training_script(replay, world) if replay else training_tape(config, world, trainer, attempt.folder)
    rank = TrainingRank(config, world, trainer, collector, publisher, mailbox, phases, saver, head, stop, tape)
    tape.attach(rank)
    steps = training_loop(rank)
    finished = steps == config.train.num_steps
    if finished and tape.keeps_results:
        rank.finish_saving()  # first what can be gone on from, whatever becomes of the model's folder
        with phases("save"):
            save_model(run_dir / "model", trainer, decoder_config, tokenizer_files)
    summary = end_run(rank, finished=finished) | tape.summary(rank)
    drifts = topology.clock_drifts(world, config.transport.push_deadline_s)
    if head is not None:
        head.recorder.log.append("clocks", drifts)
    tape.close()
    phases.enter("stop")
    lanes.close(config.transport.push_deadline_s)
    status = guard.DONE
    if head is not None:
        if not finished and tape.keeps_results:
            newest = head.saves.newest
            status = guard.FAILED if newest is None else guard.REQUEUE
            kept = "no checkpoint could be written" if newest is None else f"complete checkpoint of step {newest}"
            text = f"stopped on request ({head.stop_reason}) after step {steps}; {kept}"
            head.recorder.log.event(world.world_rank, "stopped", text)
            head.recorder.progress.message(text)
        head.recorder.log.close()
        head.recorder.progress.finish()
        summary["log"] = head.recorder.log.state()
        if finished and head.recorder.log.num_missing:
            status = guard.LOG_INCOMPLETE
    return status, {"steps": steps, **summary}


def generate_and_train(
    config: Config,
    world: World,
    connection: groups.Connection,
    problems: Problems,
    model_dir: Path,
    rewards: RewardService,
    attempt: Attempt,
    phases: Phases,
    stop: StopFlag,
    walltime: Walltime,
) -> tuple[int, dict]:
    """A rank that does both in turn. Returns the exit status and, on rank 0, the summary for exit.json."""
    decoder_config, tokenizer = hf.load_config(model_dir), Tokenizer.from_folder(model_dir)
    mesh = groups.training_mesh(world, connection.device)
    trainer = Trainer(decoder_config, config.train, temperature=config.generation.temperature, device=connection.device, mesh=mesh, dtype=wire_dtype(config))
    trainer.load(open_weights_of(model_dir))
    recorder = None
    if world.is_first_trainer:
        recorder = open_recorder(config, world, attempt, phases, problems, walltime)
        recorder.progress.message("colocated: generation and training in turn; no checkpoints, no tape, and of saved answers those of rank 0 only")
    rank = ColocatedRank(
        config=config,
        world=world,
        engine=create_engine(config, decoder_config, tokenizer.stop_token_ids, connection.device),
        trainer=trainer,
        collector=Collector(world.role_rank, no_lanes(config, world), max_held=UNBOUNDED_HELD),
        composer=Composer(config, world.num_training, attention_crossover_tokens(decoder_config)),
        rewards=rewards,
        problems=problems,
        tokenizer=tokenizer,
        phases=phases,
        stop=stop,
        walltime=walltime,
        recorder=recorder,
    )
    steps, reason = colocated_loop(rank)
    if not reason:
        with phases("save"):
            save_model(attempt.folder.parent / "model", trainer, decoder_config, hf.tokenizer_files(model_dir))
    summary = end_colocated(rank, finished=not reason)
    phases.enter("stop")
    status = guard.FAILED if reason else guard.DONE
    if recorder is not None:
        if reason:
            text = f"stopped on request ({reason}) after step {steps}; a colocated run writes no checkpoints"
            recorder.log.event(world.world_rank, "stopped", text)
            recorder.progress.message(text)
        recorder.log.close()
        recorder.progress.finish()
        summary["log"] = recorder.log.state()
        if not reason and recorder.log.num_missing:
            status = guard.LOG_INCOMPLETE
    return status, {"steps": steps, **summary}


def resumed_work(config: Config, world: World, restart: Restart) -> dict[str, Any]:
    """Fields of a RolloutWorker that goes on from a checkpoint: what may not be granted again, and this rank's share of what was on its way."""
    restore_random_state(restart, world)
    unfinished = restart.cut.unfinished_of(world.role_rank, world.num_generation, static=config.staleness.eta == 0)
    return {"known": restart.cut.known(), "resumed": unfinished}


def restore_random_state(restart: Restart, world: World) -> None:
    """Of the rank that had this place when the checkpoint was written, if there was one."""
    if saved := restart.cut.random_of(world.role, world.role_rank):
        random_state.restore(saved)


def open_recorder(
    config: Config, world: World, attempt: Attempt, phases: Phases, problems: Problems, walltime: Walltime, resumed_from_step: int = -1
) -> Recorder:
    """The log and the progress display of training rank 0."""
    attempt_dir = attempt.folder
    attributes = {
        "config": as_yaml(config),
        "fingerprint": problems.fingerprint,
        "attempt": attempt.number,
        "resumed_from_step": resumed_from_step,
        **problems.report.attributes(),
        "num_generation_ranks": world.num_generation,
        "num_training_ranks": world.num_training,
        "hosts": ", ".join(world.hosts),
        "node_of_rank": " ".join(map(str, world.node_of_rank)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "",
        "job_end_unix": walltime.end or 0.0,
        **hardware(),
    }
    guard.reserve(attempt_dir)
    fallback = Path(config.storage.log_fallback) if config.storage.log_fallback else None
    log = Log.create(attempt_dir / "log.h5", attributes, clock=time.monotonic, fallback=fallback, retry_s=config.storage.log_retry_s)
    mode = os.environ.get("AREAL_HPC_PROGRESS", "lines")
    progress = Progress(config.train.num_steps, "live" if mode == "live" else "none" if mode == "none" else "lines", walltime=walltime)
    recorder = Recorder(config, world, log, progress, phases, SavedAnswers(config, problems, attempt_dir / samples.FOLDER))
    progress.message(f"{world.num_generation} generation + {world.num_training} training ranks")
    for line in problems.report.lines():
        progress.message(line)
    progress.message(f"{len(problems.train)} training and {len(problems.heldout)} held-out problems")
    return recorder


def open_head(
    config: Config,
    world: World,
    mailbox: Mailbox,
    publisher: Publisher,
    composer: Composer,
    attempt: Attempt,
    phases: Phases,
    problems: Problems,
    stop: StopFlag,
    walltime: Walltime,
    restart: Restart | None,
    expected_bytes: int,
) -> Head:
    """What training rank 0 has besides: the log, the book of checkpoints. `expected_bytes`: of the parameters and their moments."""
    attempt_dir = attempt.folder
    recorder = open_recorder(config, world, attempt, phases, problems, walltime, -1 if restart is None else restart.meta["step"])
    log, progress = recorder.log, recorder.progress
    sources = [source_of(problem) for problem in problems.heldout]

    said = set[str]()

    def say(kind: str, text: str) -> None:
        log.event(world.world_rank, kind, text)
        if kind not in ("save", *(said & {"save_skipped"})):  # the rest is in the log
            progress.message(text)
        said.add(kind)

    saves = Saves(config, world, mailbox, attempt_dir.parent, expected_bytes, say, lambda row: log.append("checkpoints", row))
    if restart is not None:
        composer.restore(restart.meta, restart.cut)
        recorder.tokens_trained, recorder.accuracy_before = restart.meta["tokens_trained"], restart.meta["accuracy_before"]
        recorder.earlier_s = restart.meta["elapsed_s"]
        recorder.logged_step = saves.newest = restart.meta["step"]
        text = f"goes on from step {restart.meta['step']}: {restart.cut.num_finished} groups waiting, {restart.cut.num_unfinished} on their way"
        say("resume", text + (f"; {restart.cut.num_duplicates} duplicates left out" if restart.cut.num_duplicates else ""))
    data_state = {
        "fingerprint": problems.fingerprint,
        "attempt": attempt.number,
        "generation_ranks": world.num_generation,
        "training_ranks": world.num_training,
        "config": as_yaml(config),
    }
    return Head(config, world, mailbox, publisher, composer, recorder, stop, walltime, saves, data_state, heldout_sources=sources)
