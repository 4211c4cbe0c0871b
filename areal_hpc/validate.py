"""Checks that need files but no rank, no GPU and no torch: found by the launcher before `mpiexec` starts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from areal_hpc.checkpoints import is_complete, steps_of
from areal_hpc.config import Config, ConfigError, num_training_ranks


def check_inputs(config: Config) -> str:
    """Data and model folder; returns the fingerprint of the data.

    Raises ConfigError: malformed data, no prompt short enough, a chat template that refuses the prompts, missing model files.
    """
    from areal_hpc.data.datasets import load_problems
    from areal_hpc.data.prompts import Prompts
    from areal_hpc.models.tokenizer import Tokenizer, build

    check_machine(config)
    problems = load_problems(config.data)
    if config.model_source:
        folder = model_folder(Path(config.model_source))
        check_weight_files(folder)
        tokenizer = Tokenizer.from_folder(folder)
    else:
        from areal_hpc.data.worked import worked_turns

        if config.model.warmstart_steps:
            for problem in {problem.source: problem for problem in problems.train}.values():
                worked_turns(problem, config.data.worked)  # raises when a task has no worked solutions to warm-start on
        tokenizer = build(problems, config.data.suffix + config.data.system_prompt)
    if config.train.reference_path:
        reference = Path(config.train.reference_path)
        if not (reference / "config.json").is_file():
            raise ConfigError(f"train.reference_path={reference}: neither a Hugging Face folder nor a checkpoint (no config.json)")
        check_weight_files(reference)
    return Prompts(config.data, tokenizer).fitting(problems).fingerprint


PAGE_BYTES = 4096
MPI_SHM_BYTES = 15 << 20
"""What an MPI library may take of /dev/shm for itself (MPICH 5 with three ranks: 14 MiB)."""


def sweep_lanes() -> None:
    """Remove what killed runs left in /dev/shm, and say so: it would take the room that this run needs."""
    from areal_hpc.transport.ring import sweep_stale

    for name in sweep_stale():
        print(f"removed /dev/shm/{name}, left by a killed run", flush=True)


def check_machine(config: Config) -> None:
    """What the ranks of this machine will need: a GPU if one is asked for, a reward and an environment that can be found, a sandbox that holds."""
    if config.device == "cuda" and not Path("/dev/nvidiactl").exists():
        raise ConfigError("device=cuda but this machine has no NVIDIA GPU; use --device auto or cpu")
    if config.generation.engine == "vllm":
        from areal_hpc.rollout.engines import check_vllm

        check_vllm()
    sweep_lanes()
    for option, name in (("reward.custom", config.reward.custom), ("environment.name", config.environment.name)):
        module, is_function, _ = name.partition(":")
        if is_function and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ConfigError(f"{option}={name}: there is no module '{module.partition('.')[0]}' on the Python path")
    if config.environment.name == "python":
        from areal_hpc.reward.sandbox import probe

        probe(config.reward.code_sandbox, config.reward.code_floor, config.reward.code_packages)


def check_shm(config: Config) -> None:
    """Room for the lanes of the recipe's ranks, all on this machine. In a job step each rank counts those that really run on its node (checks.py)."""
    if config.topology.mode == "colocated":
        return  # no lanes
    num_ranks = config.topology.num_ranks
    num_lanes = num_ranks - num_training_ranks(num_ranks, config.topology.generation_fraction)
    shared = os.statvfs("/dev/shm")
    times = 2 if config.transport.lanes == "forwarded" else 1  # with a lane at both ends
    pages = -(-config.transport.lane_bytes // PAGE_BYTES) + 1  # and a page for the header
    needed, free = times * num_lanes * pages * PAGE_BYTES + MPI_SHM_BYTES, shared.f_bavail * shared.f_frsize
    if needed > free:
        raise ConfigError(
            f"{times * num_lanes} lanes of transport.lane_bytes={config.transport.lane_bytes}, and MPI itself, need {needed} bytes of /dev/shm, which has {free} free; "
            "use smaller lanes, fewer ranks, or enlarge /dev/shm"
        )


def check_weight_files(folder: Path) -> None:
    """The headers of all safetensors files can be read. Raises ConfigError naming the first that is damaged."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"{path}: {error}") from error


def model_folder(path: Path) -> Path:
    """A Hugging Face folder or checkpoint; for a run folder its final model, else its newest complete checkpoint. Raises ConfigError when there is none."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    if (path / "config.json").is_file():
        return path
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if complete := [folder for folder in steps_of(path).values() if is_complete(folder)]:
        return complete[-1]
    raise ConfigError(f"{path} holds neither a model (config.json) nor a run with a model or checkpoint")
