"""The trained parameters, cut along dimension 0 over the training ranks (FSDP2), or whole on a single rank.

Cut as torch does: `tensor.chunk(num_ranks)`, so the last ranks may own fewer rows or none. A rank sees its own rows as plain tensors (`local`), live views of
the sharded parameters: optimiser, clipping and weight push work on those, which spares DTensor's dispatch (one AdamW step on 0.8 M parameters in 37 tensors:
30 ms on DTensors, 8 ms on their rows, 2 ms with the fused kernel).

With `train.replicas` = R > 1 the mesh has two dimensions (HSDP): each of R replicas is cut over T/R ranks, training rank t = replica * T/R + shard; gradients are
reduced over the shards, then over the replicas. For the weight push each rank hands out a part of its own, chunk `replica` of R of the rows of its shard: every
row once, from all ranks (`transport.manifest.shard_rows`).

A single rank in float32 is not wrapped at all: there is nothing to shard, and FSDP's hooks and copies cost 7 to 12 % of forward and backward on a model of
that size with 1,300 to 2,800 tokens in a micro-batch, 44 % with 280. Names, shapes and results are the same either way, so nothing above this file knows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from areal_hpc.config import ConfigError, Train
from areal_hpc.models import hf
from areal_hpc.models.decoder import Decoder, DecoderConfig
from areal_hpc.models.packed import choose_attention
from areal_hpc.transport.manifest import shard_rows

# Decoder's outputs are views, and nobody changes them in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")

KEEP_GATHERED_PARAMETERS = 1_000_000_000
"""Models up to this many parameters stay gathered from the first micro-batch to the last, whose backward alone reduces gradients; larger ones are gathered layer by
layer, in forward and backward, and reduce each layer's gradients at once: no rank holds more than a layer of either beyond its own rows."""


class Rows(Protocol):
    """A tensor of which rows can be read: torch.Tensor, or `hf.SavedTensor`, of which only those rows are ever in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one parameter that this rank pushes: all that it owns, or its part of what its replicas own as well."""

    name: str
    """Hugging Face name; tied tensors appear once."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    row_start: int
    """First row (dimension 0) that is ours; the shape's first entry when none is."""
    local: Tensor
    """float32 [rows, ...], possibly without rows. Live: the next update changes it."""


class ShardedDecoder:
    """A decoder whose parameters live on `mesh` (one dimension: the training ranks), or on this rank alone when there is no mesh.

    Starts without values: call `load`. All ranks of the mesh call the same methods in the same order. `options`: replicas, cpu_offload, attention,
    activation_checkpointing. Raises ConfigError when the options do not fit the ranks or the device.
    """

    def __init__(
        self, config: DecoderConfig, *, device: torch.device, mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32, options: Train | None = None
    ) -> None:
        options = options or Train()
        self.config, self.device = config, device
        self.num_ranks = 1 if mesh is None else mesh.size()
        self.role_rank = 0 if mesh is None else mesh.get_local_rank()
        self.group = None if mesh is None else mesh.get_group()
        self.num_replicas = options.replicas
        if self.num_ranks % self.num_replicas:
            raise ConfigError(f"train.replicas={self.num_replicas} does not divide the {self.num_ranks} training ranks")
        self.num_shards = self.num_ranks // self.num_replicas
        self.replica, self.shard = divmod(self.role_rank, self.num_shards)
        wrapped = self.num_ranks > 1 or dtype != torch.float32 or options.cpu_offload
        assert mesh is not None or not wrapped, "computing in another type than the master weights, or off the CPU, takes FSDP, hence a mesh"
        self.mesh = mesh if wrapped else None
        if self.mesh is not None and self.num_replicas > 1:
            self.mesh = init_device_mesh(device.type, (self.num_replicas, self.num_shards), mesh_dim_names=("replicate", "shard"))
        self.shard_group = self.group if self.mesh is None or self.num_replicas == 1 else self.mesh.get_group("shard")
        with torch.device("meta"):
            self.decoder = Decoder(config)
        self.decoder.choose(choose_attention(options.attention, device, dtype), recompute_layers=options.activation_checkpointing == "layer")
        self.stays_gathered = sum(parameter.numel() for parameter in self.decoder.parameters()) <= KEEP_GATHERED_PARAMETERS
        if self.mesh is not None:
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.cpu_offload else OffloadPolicy()
            _shard(self.decoder, self.mesh, dtype, offload, stays_gathered=self.stays_gathered)
        self.decoder.to_empty(device=torch.device("cpu") if options.cpu_offload else device)
        self.parameters: dict[str, nn.Parameter] = dict(self.decoder.named_parameters())
        self.local: dict[str, nn.Parameter] = {name: _local_view(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, Rows]]) -> None:
        """Copy this rank's rows of whole tensors (`hf.open_weights` reads no others). Raises ConfigError for a missing, unknown or misshapen one."""
        self.reshard()
        missing = dict(self.parameters)
        for name, tensor in named_tensors:
            if hf.is_derived(self.config, name):
                continue
            if name not in self.parameters:
                raise ConfigError(f"weights: {name} is not a parameter of this {self.config.model_type} model")
            if tuple(tensor.shape) != tuple(self.parameters[name].shape):
                raise ConfigError(f"weights: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(self.parameters[name].shape)}")
            start = self.row_start(name)
            self.local[name].copy_(tensor[start : start + len(self.local[name])])
            missing.pop(name, None)
        if missing:
            raise ConfigError(f"weights: {len(missing)} are missing, first {min(missing)}")

    def row_start(self, name: str) -> int:
        """First row of a parameter that this rank owns under torch's dim-0 chunking."""
        num_rows = self.parameters[name].shape[0]
        return num_rows if len(self.local[name]) == 0 else self.shard * -(-num_rows // self.num_shards)

    def shards(self) -> list[Shard]:
        """The rows of every parameter that this rank pushes, in the order of the model: the same names and shapes on all ranks, every row on one of them."""
        result = []
        for name, local in self.local.items():
            shape = tuple(self.parameters[name].shape)
            start, num_rows = shard_rows(shape[0], self.num_ranks, self.role_rank, self.num_replicas)
            offset = start - self.row_start(name) if num_rows else 0
            result.append(Shard(name, shape, start, local.detach()[offset : offset + num_rows]))
        return result

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter, one at a time. Collective: every rank iterates to the end."""
        for name, parameter in self.parameters.items():
            yield name, self._whole(parameter)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter.detach()
        rows = parameter.detach().to(self.device)  # a copy where parameters live off the GPU, whose network gathers them
        assert isinstance(rows, DTensor)
        return rows.full_tensor()

    def accumulate_only(self, accumulate: bool) -> None:
        """Whether the next backward is not the last of its update. Gradients of a model that stays gathered then stay here; others are reduced over shards only."""
        if self.mesh is None:
            return
        root = _as_fsdp(self.decoder)
        root.set_is_last_backward(not accumulate)
        if self.stays_gathered:
            root.set_requires_gradient_sync(not accumulate)
            root.set_reshard_after_backward(not accumulate)
        elif self.num_replicas > 1:
            root.set_requires_all_reduce(not accumulate)

    def collect_gradients(self) -> list[Tensor]:
        """Hand the gradients over to `local` and return them: this rank's rows of the sum over all ranks."""
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            assert gradient is not None, name
            self.local[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return [local.grad for local in self.local.values() if local.grad is not None]

    def drop_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.local[name].grad = None

    def reshard(self) -> None:
        """Free gathered parameters (they would hide new values from the next forward)."""
        if self.mesh is not None:
            for module in self.decoder.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def as_global(self, name: str, local: Tensor) -> Tensor:
        """A tensor shaped and cut like a parameter, from this rank's rows (optimiser state for a checkpoint): shares their memory."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return local.detach()
        return DTensor.from_local(
            local.detach(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def gradient_norm(self, gradients: list[Tensor]) -> float:
        """Norm of the whole gradient, from this rank's rows of it; each row counts once, whatever the replicas. Collective."""
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(self.device)
        if self.num_shards > 1:
            dist.all_reduce(squares, group=self.shard_group)
        return math.sqrt(float(squares))

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce in place over all training ranks; returns its argument."""
        if self.num_ranks > 1:
            dist.all_reduce(value, op=op, group=self.group)
        return value


def _shard(decoder: Decoder, mesh: DeviceMesh, dtype: torch.dtype, offload: OffloadPolicy, *, stays_gathered: bool) -> None:
    """FSDP2, one unit per layer and one for embedding, last norm and head. Gradients are summed, not averaged: losses are divided by global token counts."""
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*decoder.model.layers, decoder):
        fully_shard(module, mesh=mesh, reshard_after_forward=not stays_gathered, mp_policy=policy, offload_policy=offload)
        _as_fsdp(module).set_gradient_divide_factor(1.0)
        _as_fsdp(module).set_force_sum_reduction_for_comms(True)  # Gloo knows neither averages nor pre-multiplied sums


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    rows = parameter.detach()
    return nn.Parameter(rows.to_local()) if isinstance(rows, DTensor) else parameter
