"""Where the weight push ends at the embedded engine (`transport.weights.WeightSink`), and how much memory staging may take.

staged     rows go to a spare image while the engine decodes; the swap is a pointer
in place   rows go over the weights in use: a pause from the first receive to the swap (`transport.staging = off`, or no memory for a spare image)
mapped     the image is shared memory that the training ranks wrote; the swap is a pointer
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.transport.manifest import Entry, Manifest
from areal_hpc.transport.paths import Paths
from areal_hpc.transport.weights import NetworkReceiver, Receiver, SharedReceiver

if TYPE_CHECKING:
    from areal_hpc.config import Config
    from areal_hpc.rollout.engines.base import Engine
    from areal_hpc.rollout.engines.fused import FusedWeights
    from areal_hpc.topology import World
    from areal_hpc.transport.images import ImageLayout

STAGING_SHARE = 0.25
"""Of the KV budget; above it `transport.staging = auto` goes without."""


class EmbeddedSink:
    """Staged, or in place. The engine refuses to step between the first row written in place and the swap: no token comes from a mixed model."""

    def __init__(self, engine: EmbeddedEngine, *, is_staged: bool) -> None:
        self.engine, self.is_staged = engine, is_staged
        self._target = engine.new_weights() if is_staged else engine.weights

    def write(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        if not self.is_staged:
            self.engine.interrupt()
        self._target.places[entry.name].put(self._target.image, first_row, rows)

    def swap(self, version: int, image: Tensor | None = None) -> None:
        used = self.engine.swap_weights(self._target, version)
        if self.is_staged:
            self._target = used


class MappedSink:
    """The engine computes from shared images. Its own memory for weights is given up at the first swap."""

    is_staged = True

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._weights_in: dict[int, FusedWeights] = {}

    def write(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        raise AssertionError(f"{entry.name}: rows for a rank that maps what the training ranks wrote")

    def swap(self, version: int, image: Tensor | None = None) -> None:
        assert image is not None
        weights = self._weights_in.get(image.data_ptr())
        if weights is None:  # once per image: a large model has a thousand views
            weights = self._weights_in[image.data_ptr()] = self.engine.new_weights(image)
        self.engine.swap_weights(weights, version)


class TensorSink:
    """Whole tensors beside an engine that loads them itself (vLLM); the swap is its reload."""

    is_staged = True

    def __init__(self, engine: Engine, manifest: Manifest) -> None:
        self.engine = engine
        self._tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in manifest.entries}
        self._rows = {entry.name: self._tensors[entry.name].view(entry.num_rows, -1) for entry in manifest.entries}

    def write(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        self._rows[entry.name][first_row : first_row + len(rows)] = rows

    def swap(self, version: int, image: Tensor | None = None) -> None:
        self.engine.update_weights(self._tensors.items(), version)


def kv_budget_bytes(engine: EmbeddedEngine, device: torch.device, ranks_on_node: int) -> int:
    """What the KV cache of this rank could have: what it has, and this rank's share of the memory that is free now, of the GPU or of the node."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return engine.cache_bytes + free
    return engine.cache_bytes + available_bytes() // ranks_on_node


def available_bytes() -> int:
    """Memory of the node that can be had without swapping (MemAvailable of /proc/meminfo)."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def is_staged(wanted: str, spare_bytes: int, budget_bytes: int) -> bool:
    """`transport.staging`: on, off, or auto, which stages where the spare image takes at most `STAGING_SHARE` of the KV budget."""
    return wanted == "on" or (wanted == "auto" and spare_bytes <= STAGING_SHARE * budget_bytes)


def layout_of(engine: Engine) -> ImageLayout | None:
    """How the engine's weights lie in memory; None for an engine that takes whole tensors only."""
    return engine.weights.layout(engine.weights.config, engine.weights.dtype) if isinstance(engine, EmbeddedEngine) else None


def open_receiver(config: Config, world: World, engine: Engine, manifest: Manifest, paths: Paths, device: torch.device) -> Receiver:
    """This generation rank's end of the push. The first one says what staging takes."""
    speaks = world.role_rank == 0
    if not isinstance(engine, EmbeddedEngine):
        assert paths.network is not None, "images are laid out for the embedded engine"
        if speaks:
            print(f"weights: {mib(sum(entry.num_bytes for entry in manifest.entries))} of whole tensors a rank, loaded by the engine at each swap", flush=True)
        return NetworkReceiver(manifest, paths.network, TensorSink(engine, manifest), device)
    if paths.images is not None and world.world_rank in paths.shared:
        if speaks:
            num_images = len(paths.images.images)
            print(f"weights: {num_images} images of {mib(paths.images.image_bytes)} in shared memory, for all ranks of host {world.host}", flush=True)
        return SharedReceiver(paths.images, MappedSink(engine), world.num_training)
    assert paths.network is not None
    budget_bytes = kv_budget_bytes(engine, device, world.node_comm.size)
    spare_bytes = engine.weights.image.numel()
    wanted = "on" if config.generation.on_update == "drain" else config.transport.staging  # those in use are needed until running answers have ended
    staged = is_staged(wanted, spare_bytes, budget_bytes)
    receiver = NetworkReceiver(manifest, paths.network, EmbeddedSink(engine, is_staged=staged), device)
    if speaks:
        share = f"{spare_bytes / budget_bytes:.1%} of the {mib(budget_bytes)} that the KV cache could have"
        print(
            f"weights: staging {'on' if staged else 'off'}, a spare model takes {mib(spare_bytes)} a rank ({share}); buckets {mib(receiver.buffer_bytes)}",
            flush=True,
        )
    return receiver


def mib(num_bytes: int) -> str:
    """For messages."""
    return f"{num_bytes / (1 << 20):.1f} MiB"
