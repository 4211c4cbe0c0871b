"""Checkpoints of the trainer (sharded, for resuming) and models in Hugging Face format (whole, for everybody else).

    step-000123/
      state/        parameters, AdamW moments and counters: torch.distributed.checkpoint, each rank writes its own rows; readable on any number of ranks
      meta.json     what the run knows: policy version, closed tickets, config, data fingerprint; written last, so its presence means "complete"
      config.json, tokenizer.json, ...   as in a Hugging Face folder, so that `export_checkpoint` needs nothing else

Both kinds are written beside their target and renamed: a reader, or a resumed run, never meets half of one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_hpc.config import ConfigError
from areal_hpc.models import hf
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.train.sharding import Rows
from areal_hpc.train.trainer import Trainer

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")  # a single rank needs none

META_FILE = "meta.json"
STATE_FOLDER = "state"


def save_checkpoint(folder: Path, trainer: Trainer, meta: Mapping[str, Any], tokenizer_files: Mapping[str, bytes] | None = None) -> None:
    """Write a checkpoint; collective over the training ranks, complete on return. An older one of that name is replaced.

    `meta` must be JSON-serialisable. Every training rank sees `folder` (a shared file system where they span nodes). Raises OSError when the disk refuses.
    """
    partial = folder.with_name(f"{folder.name}.tmp")
    is_root = trainer.model.role_rank == 0
    if is_root:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(trainer)
    dcp.save(trainer.state_dict(), checkpoint_id=partial / STATE_FOLDER, **_collective(trainer))
    if is_root:
        for name, content in (tokenizer_files or {}).items():
            hf.write_synced(partial / name, content)
        hf.write_synced(partial / "config.json", (json.dumps(trainer.decoder_config.to_hf(), indent=2) + "\n").encode())
        hf.sync(partial / STATE_FOLDER)
        hf.write_synced(partial / META_FILE, (json.dumps(dict(meta), indent=2) + "\n").encode())
        hf.sync(partial)
        _replace(folder, partial)
    _barrier(trainer)


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore parameters, optimiser and counters on any number of training ranks; returns `meta`. Collective. Raises ConfigError if incomplete."""
    meta = read_meta(folder)
    state = trainer.state_dict()
    dcp.load(state, checkpoint_id=folder / STATE_FOLDER, **_collective(trainer))
    trainer.load_state_dict(state)
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """`meta.json` of a complete checkpoint. Raises ConfigError when there is none."""
    if not is_checkpoint(folder):
        raise ConfigError(f"{folder}: not a complete checkpoint (no {META_FILE})")
    return json.loads((folder / META_FILE).read_text())


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a complete checkpoint (rather than a Hugging Face model, or nothing)."""
    return (folder / META_FILE).is_file()


def open_weights_of(path: Path) -> Iterator[tuple[str, Rows]]:
    """(name, tensor of which rows can be read) of every weight: of a Hugging Face folder no more than those rows is read. Raises as `load_weights_from`."""
    return load_weights_from(path) if is_checkpoint(path) else hf.open_weights(path)


def load_weights_from(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every weight of a checkpoint or a Hugging Face folder, one in memory at a time. No process group needed.

    `hf.load_config` and `hf.tokenizer_files` read either kind of folder as well. Raises ConfigError when files are missing or damaged.
    """
    if not is_checkpoint(path):
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
    _barrier(trainer)


def _collective(trainer: Trainer) -> dict[str, Any]:
    return {"no_dist": True} if trainer.model.num_ranks == 1 else {"process_group": trainer.model.group}


def _barrier(trainer: Trainer) -> None:
    if trainer.model.num_ranks > 1:
        dist.barrier(group=trainer.model.group)


def _replace(folder: Path, partial: Path) -> None:
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    hf.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
