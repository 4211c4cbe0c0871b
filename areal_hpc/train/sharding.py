"""The trained parameters, cut along dimension 0 over the training ranks (FSDP2), or whole on a single rank.

Cut as torch does: `tensor.chunk(num_ranks)`, so the last ranks may own fewer rows or none. A rank sees its own rows as plain tensors (`local`), live views of
the sharded parameters: optimiser, clipping and weight push work on those, which spares DTensor's dispatch (one AdamW step on 0.8 M parameters in 37 tensors:
30 ms on DTensors, 8 ms on their rows, 2 ms with the fused kernel).

A single rank in float32 is not wrapped at all: there is nothing to shard, and FSDP's hooks and copies cost 7 to 12 % of forward and backward on a model of
that size with 1,300 to 2,800 tokens in a micro-batch, 44 % with 280. Names, shapes and results are the same either way, so nothing above this file knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from areal_hpc.config import ConfigError
from areal_hpc.models import hf
from areal_hpc.models.decoder import Decoder, DecoderConfig

# Decoder's outputs are views, and nobody changes them in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")

KEEP_GATHERED_PARAMETERS = 1_000_000_000
"""Models up to this many parameters stay gathered between forward and backward; larger ones are freed after each layer and gathered again."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one parameter that this rank owns."""

    name: str
    """Hugging Face name; tied tensors appear once."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    row_start: int
    """First row (dimension 0) that is ours; the shape's first entry when none is."""
    local: Tensor
    """float32 [rows, ...], possibly without rows. Live: the next update changes it."""


class ShardedDecoder:
    """A decoder whose parameters live on `mesh` (one dimension), or on this rank alone when there is no mesh.

    Starts without values: call `load`. All ranks of the mesh call the same methods in the same order.
    """

    def __init__(self, config: DecoderConfig, *, device: torch.device, mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.device = config, device
        self.num_ranks = 1 if mesh is None else mesh.size()
        self.role_rank = 0 if mesh is None else mesh.get_local_rank()
        self.group = None if mesh is None else mesh.get_group()
        assert mesh is not None or dtype == torch.float32, "computing in another type than the master weights takes FSDP's mixed precision, hence a mesh"
        self.mesh = mesh if mesh is not None and (mesh.size() > 1 or dtype != torch.float32) else None
        with torch.device("meta"):
            self.decoder = Decoder(config)
        if self.mesh is not None:
            _shard(self.decoder, self.mesh, dtype)
        self.decoder.to_empty(device=device)
        self.parameters: dict[str, nn.Parameter] = dict(self.decoder.named_parameters())
        self.local: dict[str, nn.Parameter] = {name: _local_view(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's rows of whole tensors (see `hf.load_weights`), one in memory at a time. Raises ConfigError for a missing, unknown or misshapen one."""
        self.reshard()
        missing = dict(self.parameters)
        for name, tensor in named_tensors:
            if hf.is_derived(self.config, name):
                continue
            if name not in self.parameters:
                raise ConfigError(f"weights: {name} is not a parameter of this {self.config.model_type} model")
            if tensor.shape != self.parameters[name].shape:
                raise ConfigError(f"weights: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(self.parameters[name].shape)}")
            start = self.row_start(name)
            self.local[name].copy_(tensor[start : start + len(self.local[name])])
            missing.pop(name, None)
        if missing:
            raise ConfigError(f"weights: {len(missing)} are missing, first {min(missing)}")

    def row_start(self, name: str) -> int:
        """First row of a parameter that this rank owns under torch's dim-0 chunking."""
        num_rows = self.parameters[name].shape[0]
        return num_rows if len(self.local[name]) == 0 else self.role_rank * -(-num_rows // self.num_ranks)

    def shards(self) -> list[Shard]:
        """This rank's rows of every parameter, in the order of the model: the same names and shapes on all ranks."""
        return [Shard(name, tuple(self.parameters[name].shape), self.row_start(name), local.detach()) for name, local in self.local.items()]

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter, one at a time. Collective: every rank iterates to the end."""
        for name, parameter in self.parameters.items():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def accumulate_only(self, accumulate: bool) -> None:
        """Whether the next backward keeps its gradients on this rank (all micro-batches but the last) or reduces them over the ranks."""
        if self.mesh is not None:
            root = _as_fsdp(self.decoder)
            root.set_requires_gradient_sync(not accumulate)
            root.set_is_last_backward(not accumulate)
            root.set_reshard_after_backward(not accumulate)

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

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce in place over the training ranks; returns its argument."""
        if self.num_ranks > 1:
            dist.all_reduce(value, op=op, group=self.group)
        return value


def _shard(decoder: Decoder, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2, one unit per layer and one for embedding, last norm and head. Gradients are summed, not averaged: losses are divided by global token counts."""
    assert mesh.ndim == 1, mesh
    keep = sum(parameter.numel() for parameter in decoder.parameters()) <= KEEP_GATHERED_PARAMETERS
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*decoder.model.layers, decoder):
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
        _as_fsdp(module).set_gradient_divide_factor(1.0)
        _as_fsdp(module).set_force_sum_reduction_for_comms(True)  # Gloo knows neither averages nor pre-multiplied sums


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    rows = parameter.detach()
    return nn.Parameter(rows.to_local()) if isinstance(rows, DTensor) else parameter
