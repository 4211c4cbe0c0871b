"""Models in and out of Hugging Face folders: `config.json`, `*.safetensors` (one file or sharded by an index), tokenizer files.

Writing is atomic: everything goes into a temporary sibling folder that is renamed over the target at the end, so a reader never meets half a model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_hpc.config import ConfigError
from areal_hpc.models.decoder import Decoder
from areal_hpc.models.decoder_config import DecoderConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 << 30


def load_config(folder: str | Path) -> DecoderConfig:
    """Shape of the model in a folder. Raises ConfigError when `config.json` is missing, malformed or not supported."""
    return DecoderConfig.from_hf(_read_json(Path(folder) / "config.json"))


class SavedTensor:
    """A tensor in a safetensors file: `shape`, and `[start:stop]` reads those rows (of dimension 0) alone. Valid while its file is open."""

    def __init__(self, file: Any, name: str) -> None:
        self._rows = file.get_slice(name)
        self.shape = tuple(self._rows.get_shape())

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._rows[rows]


def open_weights(folder: str | Path) -> Iterator[tuple[str, SavedTensor]]:
    """(name, tensor on the disk) of every weight, each valid until the next is taken. Raises ConfigError when files are missing or damaged."""
    for path in _weight_files(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    yield name, SavedTensor(file, name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error


def load_weights(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, one in memory at a time, in the type it was saved in. Raises ConfigError when files are missing or damaged."""
    for name, saved in open_weights(folder):
        yield name, saved[:]


def load_decoder(folder: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a folder on the CPU. Raises ConfigError when weights are missing, unknown or of another shape."""
    decoder = Decoder(load_config(folder)).to(dtype)
    copy_weights(decoder, load_weights(folder), source=str(folder))
    return decoder


@torch.no_grad()
def copy_weights(decoder: Decoder, named_tensors: Iterable[tuple[str, torch.Tensor]], *, source: str = "weights") -> None:
    """Copy weights by name into the parameters of a decoder that is not sharded.

    A tied `lm_head.weight` and old rotary buffers are skipped: they repeat what the decoder derives. Raises ConfigError for any other mismatch.
    """
    parameters = dict(decoder.named_parameters())
    missing = set(parameters)
    for name, tensor in named_tensors:
        if is_derived(decoder.config, name):
            continue
        if name not in parameters:
            raise ConfigError(f"{source}: unknown weight {name}")
        if tensor.shape != parameters[name].shape:
            raise ConfigError(f"{source}: {name} has shape {tuple(tensor.shape)}, config.json needs {tuple(parameters[name].shape)}")
        parameters[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ConfigError(f"{source}: {len(missing)} weights are missing, first {min(missing)}")


def is_derived(config: DecoderConfig, name: str) -> bool:
    """Whether a saved tensor only repeats what the model derives: a tied head, or the rotary frequencies of old checkpoints."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def build_random(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder with random float32 weights on the CPU; the same seed gives the same bits."""
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def tokenizer_files(folder: str | Path) -> dict[str, bytes]:
    """Content of the tokenizer files of a folder, by name, to be carried over by `save`."""
    return {name: (Path(folder) / name).read_bytes() for name in TOKENIZER_FILES if (Path(folder) / name).is_file()}


def save(
    folder: str | Path,
    config: Mapping[str, Any],
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer_files: Mapping[str, bytes] | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM read; replaces an older one of that name.

    config: content of `config.json` (`DecoderConfig.to_hf()`). Tensors are copied to the CPU in their own type. Raises OSError when the disk refuses.
    """
    target = Path(folder)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_synced(partial / "config.json", (json.dumps(dict(config), indent=2, sort_keys=True) + "\n").encode())
        for name, content in (tokenizer_files or {}).items():
            write_synced(partial / name, content)
        _save_weights(partial, named_tensors, max_file_bytes)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _save_weights(folder: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], max_file_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = total_bytes = 0
    for name, tensor in named_tensors:
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if shards[-1] and shard_bytes + tensor.nbytes > max_file_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    files = [SINGLE_FILE] if len(shards) == 1 else [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        sync(folder / file)
    if len(files) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_synced(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file (weights are read from {SINGLE_FILE} or the files of {INDEX_FILE})")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and push it to the disk."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Push a file, or a folder's entries, to the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
