"""The story of one rank: start the reward server, join the world, agree on everything, then generate or train until the end.

srun / mpiexec ──▶ run_rank on every rank ──▶ generation rank: rollout/worker.py        training rank: train/loop.py
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from areal_hpc import cluster, fence, groups, guard, topology
from areal_hpc.checks import cache_dir, check_start
from areal_hpc.config import Config, ConfigError
from areal_hpc.config_io import save_yaml
from areal_hpc.data.datasets import Problems, load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.launch.local import world_rank_hint
from areal_hpc.models import hf
from areal_hpc.models.flops import attention_crossover_tokens
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.observe import samples
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.telemetry import Log, hardware
from areal_hpc.observe.timeline import Phases
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines import create_engine
from areal_hpc.rollout.worker import RolloutWorker
from areal_hpc.signals import StopFlag
from areal_hpc.topology import World
from areal_hpc.train.checkpoint import open_weights_of, save_checkpoint, save_model
from areal_hpc.train.collect import Collector
from areal_hpc.train.compose import Composer
from areal_hpc.train.loop import Head, TrainingRank, end_run, training_loop
from areal_hpc.train.publish import Publisher
from areal_hpc.train.record import Recorder
from areal_hpc.train.saved import SavedAnswers
from areal_hpc.train.trainer import Trainer
from areal_hpc.transport.evaluation import source_of
from areal_hpc.transport.lanes import open_incoming, open_outgoing
from areal_hpc.transport.messages import Mailbox
from areal_hpc.transport.weights import Manifest, Network, Receiver, Sender
from areal_hpc.validate import model_folder
from areal_hpc.walltime import Walltime

UNBOUNDED_HELD = 2**31
"""Groups a training rank may hold when the gate bounds them anyway."""


def run_rank(config: Config, attempt_dir: Path) -> NoReturn:
    """Be one rank of the job. `config` has passed `check`; ends the process."""
    rewards = RewardService.start()  # before MPI: a process started afterwards can upset the interconnect
    end = cluster.end_time() if world_rank_hint() == 0 else None  # also a process
    torch.set_num_threads(config.topology.threads_per_rank)
    with guard.AbortGuard(attempt_dir) as abort:
        world = topology.join(config)
        abort.name = world.name()
        stop = StopFlag()
        stop.install()
        fence.watch(attempt_dir.parent, cluster.Incarnation.mine(), world.name())
        walltime = Walltime(world.comm.bcast(end, root=0), config.walltime.stop_before_s)
        check_start(config, world, attempt_dir, cache_dir(), walltime.end)
        phases = Phases(world.world_rank, world.role, clock=world.clock)
        connection = groups.connect(world, config.device, config.transport.start_deadline_s)
        problems = load_problems(config.data)
        model_dir = prepare_model(config, world)
        problems = Prompts(config.data, Tokenizer.from_folder(model_dir)).fitting(problems)
        status, summary = guard.DONE, dict[str, Any]()
        if world.role == "generation":
            rewards.configure(config.data, config.reward)
            generate(config, world, connection, problems, model_dir, rewards, phases)
        else:
            rewards.close()
            status, summary = train(config, world, connection, problems, model_dir, attempt_dir, phases, stop, walltime)
        rewards.close()
        world.barrier(config.transport.data_deadline_s, "end")
        status = world.control.bcast(status, root=world.training_ranks[0])
        guard.finish(world, attempt_dir, status, summary)


def agree_on_attempt(config: Config) -> Path:
    """Without the local launcher: world rank 0 creates the run folder and all others use it. Collective."""
    from mpi4py import MPI

    from areal_hpc.launch.local import create_run_dir

    topology.check_size(MPI.COMM_WORLD.size)  # before each of N worlds of size 1 makes the folder
    made: Path | ConfigError | None = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            fence.claim(Path(config.run_dir))
            made = create_run_dir(config)
        except ConfigError as error:
            made = error
    made = MPI.COMM_WORLD.bcast(made, root=0)
    if isinstance(made, ConfigError):
        raise made
    assert made is not None
    blind = sorted({host for host in MPI.COMM_WORLD.allgather("" if made.is_dir() else socket.gethostname()) if host})
    if blind:
        raise ConfigError(
            f"run_dir={made.parent}: made by world rank 0 but not seen on {', '.join(blind)}; use --run-dir on a file system that all nodes share"
        )
    return made


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


def generate(config: Config, world: World, connection: groups.Connection, problems: Problems, model_dir: Path, rewards: RewardService, phases: Phases) -> None:
    """A generation rank: its engine starts empty and gets version 0 by the first push, as every other version."""
    tokenizer = Tokenizer.from_folder(model_dir)
    engine = create_engine(config, hf.load_config(model_dir), tokenizer.stop_token_ids, connection.device)
    lane = open_outgoing(config, world)
    shapes = ((name, tensor.shape) for name, tensor in engine.named_weights())
    manifest = Manifest.of(shapes, wire_dtype(config), world.num_training, config.train.replicas)
    manifest.agree(world.comm)
    network = Network(world, connection, config.transport.bucket_bytes)
    worker = RolloutWorker(
        config=config,
        world=world,
        engine=engine,
        receiver=Receiver(manifest, network, connection.device),
        lane=lane,
        rewards=rewards,
        problems=problems,
        tokenizer=tokenizer,
        mailbox=Mailbox(world.control),
        phases=phases,
    )
    worker.run()
    worker.mailbox.drain(config.transport.push_deadline_s)
    lane.close(config.transport.push_deadline_s)


def train(
    config: Config,
    world: World,
    connection: groups.Connection,
    problems: Problems,
    model_dir: Path,
    attempt_dir: Path,
    phases: Phases,
    stop: StopFlag,
    walltime: Walltime,
) -> tuple[int, dict]:
    """A training rank. Returns the exit status and, on training rank 0, the summary for exit.json."""
    decoder_config = hf.load_config(model_dir)
    mesh = groups.training_mesh(world, connection.device)
    trainer = Trainer(decoder_config, config.train, temperature=config.generation.temperature, device=connection.device, mesh=mesh, dtype=wire_dtype(config))
    trainer.load(open_weights_of(model_dir))
    lanes = open_incoming(config, world)
    shapes = ((shard.name, shard.shape) for shard in trainer.named_shards())
    manifest = Manifest.of(shapes, wire_dtype(config), world.num_training, config.train.replicas)
    manifest.agree(world.comm)
    network = Network(world, connection, config.transport.bucket_bytes)
    mailbox = Mailbox(world.control)
    sender = Sender(manifest, world.role_rank, network, connection.device)
    publisher = Publisher(world, mailbox, sender, phases, config.transport.push_deadline_s)
    held = UNBOUNDED_HELD if config.staleness.max_staleness != "inf" else 2 * config.groups_per_batch
    collector = Collector(world.role_rank, lanes, max_held=held)
    composer = Composer(config, world.num_training, attention_crossover_tokens(decoder_config))
    head = open_head(config, world, mailbox, publisher, composer, attempt_dir, phases, problems, stop, walltime) if world.is_first_trainer else None
    rank = TrainingRank(config, world, trainer, collector, publisher, mailbox, phases, head)
    tokenizer_files = hf.tokenizer_files(model_dir)

    def save(step: int) -> None:
        meta = {"policy_version": step, "fingerprint": problems.fingerprint, "closed_tickets": head.composer.ledger.closed.to_list() if head else []}
        save_checkpoint(attempt_dir.parent / "checkpoints" / f"step-{step:06d}", trainer, meta, tokenizer_files)

    steps = training_loop(rank, save)
    finished = steps == config.train.num_steps
    with phases("save"):
        if finished:
            save_model(attempt_dir.parent / "model", trainer, decoder_config, tokenizer_files)
        else:
            save(steps)
    summary = end_run(rank, finished=finished)
    lanes.close(config.transport.push_deadline_s)
    if head is not None:
        if not finished:
            text = f"stopped on request ({stop.signal_name}) after step {steps}; checkpoint written"
            head.recorder.log.event(world.world_rank, "stopped", text)
            head.recorder.progress.message(text)
        head.recorder.log.close()
        head.recorder.progress.finish()
    return (guard.DONE if finished else guard.REQUEUE), {"steps": steps, **summary}


def open_head(
    config: Config,
    world: World,
    mailbox: Mailbox,
    publisher: Publisher,
    composer: Composer,
    attempt_dir: Path,
    phases: Phases,
    problems: Problems,
    stop: StopFlag,
    walltime: Walltime,
) -> Head:
    """The log and the progress display of training rank 0."""
    save_yaml(config, attempt_dir / "config.yaml")
    attributes = {
        "config": (attempt_dir / "config.yaml").read_text(),
        "fingerprint": problems.fingerprint,
        **problems.report.attributes(),
        "num_generation_ranks": world.num_generation,
        "num_training_ranks": world.num_training,
        **hardware(),
    }
    log = Log.create(attempt_dir / "log.h5", attributes, clock=time.monotonic)
    mode = os.environ.get("AREAL_HPC_PROGRESS", "lines")
    progress = Progress(config.train.num_steps, "live" if mode == "live" else "none" if mode == "none" else "lines", walltime=walltime)
    recorder = Recorder(config, world, log, progress, phases, SavedAnswers(config, problems, attempt_dir / samples.FOLDER))
    progress.message(f"{world.num_generation} generation + {world.num_training} training ranks")
    for line in problems.report.lines():
        progress.message(line)
    progress.message(f"{len(problems.train)} training and {len(problems.heldout)} held-out problems")
    sources = [source_of(problem) for problem in problems.heldout]
    return Head(config, world, mailbox, publisher, composer, recorder, stop_requested=lambda: walltime.ask(stop), heldout_sources=sources)
