"""What a checkpoint holds of the trainer, and models in Hugging Face format (whole, for everybody else).

    step-000123/
      state/        parameters, AdamW moments and counters: torch.distributed.checkpoint, each rank writes its own rows; readable on any number of ranks
      config.json, tokenizer.json, ...   as in a Hugging Face folder, so that `export_checkpoint` needs nothing else

Parameters are written from a copy, by a thread, while training goes on: `copy_state`, then `write_parameters`. Who does it when, and what else is in the folder:
saving.py. What makes it complete: areal_hpc/checkpoints.py.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_hpc.checkpoints import SavedFile, is_complete, read_meta, slow_down, sync, write_synced
from areal_hpc.models import hf
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.train.sharding import Rows
from areal_hpc.train.trainer import Trainer

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")  # a single rank needs none

STATE_FOLDER = "state"


def copy_state(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's rows of parameters, moments and counters, copied to host memory: the next update may begin."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in trainer.state_dict().items()}


def write_parameters(partial: Path, state: dict[str, Tensor], role_rank: int, group: dist.ProcessGroup | None) -> list[SavedFile]:
    """Write a copied state and push it to the disk. Collective over `group`, which nothing else may use meanwhile; None: a single rank.

    Returns the files of this rank. Raises OSError with the reason when a disk refuses, on every rank alike.
    """
    slow_down()
    folder = partial / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"training rank {rank}: {_reason(cause)}") from error
    except RuntimeError as error:  # a single rank: torch's writer does not say OSError
        raise OSError(_reason(error)) from error
    names = sorted(path.name for path in folder.glob(f"__{role_rank}_*.distcp"))
    if role_rank == 0:
        names.append(".metadata")
    sync(folder)
    return [SavedFile.of(partial, f"{STATE_FOLDER}/{name}") for name in names]


def _reason(error: BaseException) -> str:
    """What the disk said, which torch's writer hides behind an error of its own; else that error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:200]


def write_model_files(partial: Path, decoder_config: DecoderConfig, tokenizer_files: Mapping[str, bytes]) -> list[SavedFile]:
    """config.json and the tokenizer, in Hugging Face format. Raises OSError."""
    files = {**tokenizer_files, "config.json": (json.dumps(decoder_config.to_hf(), indent=2) + "\n").encode()}
    for name, content in files.items():
        write_synced(partial / name, content)
    return [SavedFile.of(partial, name) for name in files]


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore parameters, optimiser and counters on any number of training ranks; returns `meta`. Collective. Raises ConfigError if incomplete."""
    meta = read_meta(folder)
    state = trainer.state_dict()
    single = trainer.model.num_ranks == 1
    dcp.load(state, checkpoint_id=folder / STATE_FOLDER, no_dist=single, process_group=None if single else trainer.model.group)
    trainer.load_state_dict(state)
    return meta


def open_weights_of(path: Path) -> Iterator[tuple[str, Rows]]:
    """(name, tensor of which rows can be read) of every weight: of a Hugging Face folder no more than those rows is read. Raises as `load_weights_from`."""
    return load_weights_from(path) if is_complete(path) else hf.open_weights(path)


def load_weights_from(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every weight of a checkpoint or a Hugging Face folder, one in memory at a time. No process group needed.

    `hf.load_config` and `hf.tokenizer_files` read either kind of folder as well. Raises ConfigError when files are missing or damaged.
    """
    if not is_complete(path):
        yield from hf.load_weights(path)
        return
    reader = dcp.FileSystemReader(path / STATE_FOLDER)
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith("model."):
            assert isinstance(entry, TensorStorageMetadata), key
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
            yield key.removeprefix("model."), tensor


def export_checkpoint(folder: Path, out: Path) -> None:
    """Turn a checkpoint into a Hugging Face folder; one process, no GPU. Raises ConfigError if incomplete."""
    read_meta(folder)
    hf.save(out, hf.load_config(folder).to_hf(), load_weights_from(folder), hf.tokenizer_files(folder))


def save_model(folder: Path, trainer: Trainer, decoder_config: DecoderConfig, tokenizer_files: Mapping[str, bytes] | None = None) -> None:
    """Write the current weights in Hugging Face format. Collective: rank 0 of the training ranks writes, complete on return."""
    if trainer.model.role_rank == 0:
        hf.save(folder, decoder_config.to_hf(), trainer.full_state(), tokenizer_files)
    else:
        for _ in trainer.full_state():
            pass  # takes part in gathering each tensor
    if trainer.model.num_ranks > 1:
        dist.barrier(group=trainer.model.group)
