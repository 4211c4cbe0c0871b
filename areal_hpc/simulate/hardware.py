"""Costs from data sheets: devices, model shapes, and what share of a device's peak programs reach. docs/simulator.md lists every source.

Decoding one token reads all weights once per step and the KV cache of every running sequence; prefill and training are bound by FLOP/s. Nothing here is fitted to
the tables that the simulator is compared with; the one number that is calibrated (`PAPER_SERIAL_TOKEN_S` in paper.py) is not counted as a success.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_hpc.config import ConfigError
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.flops import matrix_parameters
from areal_hpc.simulate.costs import DecodeCost, PushCost, TrainCost

BYTES = 2
"""Of a weight or a number in the KV cache: bfloat16."""
STATE_BYTES = 16
"""Of a trained parameter: float32 master weight, gradient and two moments (AdamW)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU."""

    name: str
    memory_bytes: float
    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """Dense bf16 FLOP/s."""
    network: float = 50e9
    """Bytes per second to other nodes (one 400 Gbit/s port for each GPU)."""


DEVICES = {
    "h800": Device(name="H800", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12),
    "h100": Device(name="H100", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12),
    "h200": Device(name="H200", memory_bytes=141e9, bandwidth=4.8e12, flops=989e12),
    "a100": Device(name="A100", memory_bytes=80e9, bandwidth=2.039e12, flops=312e12, network=25e9),
}


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPreset:
    """A model and how it is usually run."""

    name: str
    shape: DecoderConfig
    train_utilisation: float
    """Share of peak FLOP/s that training with packed micro-batches reaches while it computes."""
    tensor_parallel: int
    """Devices of one engine, in the comparisons; the planner chooses for itself."""

    @property
    def parameters(self) -> int:
        """Matrices of the layers, head and embedding (these models do not tie them)."""
        return matrix_parameters(self.shape) + self.shape.vocab_size * self.shape.hidden_size

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token in the KV cache, over all devices of an engine."""
        return 2 * BYTES * self.shape.num_hidden_layers * self.shape.num_key_value_heads * self.shape.head_dim


# Shapes: R1-Distill-Qwen's config.json. Utilisation: the paper's TFLOP/s per GPU with dynamic micro-batches (427, 455, 388) over 989; 14B is not in that
# figure: the mean of its neighbours.
MODELS = {
    "1.5b": ModelPreset(name="1.5B", shape=_qwen2(28, 1536, 8960, 12, 2, 151936), train_utilisation=427 / 989, tensor_parallel=1),
    "7b": ModelPreset(name="7B", shape=_qwen2(28, 3584, 18944, 28, 4, 152064), train_utilisation=455 / 989, tensor_parallel=1),
    "14b": ModelPreset(name="14B", shape=_qwen2(48, 5120, 13824, 40, 8, 152064), train_utilisation=421 / 989, tensor_parallel=2),
    "32b": ModelPreset(name="32B", shape=_qwen2(64, 5120, 27648, 40, 8, 152064), train_utilisation=388 / 989, tensor_parallel=4),
}

HOST_STEP_S = 0.0125
"""Least time of a decode step: 64 and 128 sequences on a GPU both take 12.7 to 13.2 ms on the published batched-generation curve (paper.md: .645 and .62 M tokens/s)."""
BANDWIDTH_SHARE = 0.8
"""Of peak memory bandwidth that decoding reaches (decode attention kernels: FlashInfer, arXiv 2501.01005, reports about 0.7 to 0.85)."""
PREFILL_UTILISATION = 0.5
"""Of peak FLOP/s that prefill reaches (usual range 0.4 to 0.6 for dense models and prompts of hundreds of tokens)."""
ALL_REDUCE_S = 10e-6
"""One small all-reduce within a node; a tensor-parallel step has two in each layer."""
MEMORY_SHARE = 0.9
"""Of device memory that an engine takes (vLLM's default `gpu_memory_utilization`)."""
RESERVED_BYTES = 2e9
"""Of that, for activations and graphs."""
PUSH_BANDWIDTH_SHARE = 0.5
"""Of a network port that a sharded, staged broadcast reaches (an 8th to a half in public systems)."""
SWAP_BYTES_PER_S = 100e9
"""Copying staged weights into place, per device, with everything around it."""


def device(name: str) -> Device:
    """Raises ConfigError with those there are."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"unknown device '{name}'; there are: {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def model(name: str) -> ModelPreset:
    """Raises ConfigError with those there are."""
    if name.lower() not in MODELS:
        raise ConfigError(f"unknown model '{name}'; there are: {', '.join(MODELS)}")
    return MODELS[name.lower()]


def kv_capacity(gpu: Device, preset: ModelPreset, tensor_parallel: int, memory_share: float = MEMORY_SHARE, staging: bool = False) -> float:
    """Tokens that the KV cache of an engine on `tensor_parallel` devices holds; zero or less: the weights do not fit. `staging`: a second copy of the weights."""
    shard = preset.weight_bytes / tensor_parallel
    room = memory_share * gpu.memory_bytes - RESERVED_BYTES - shard * (2 if staging else 1)
    heads = preset.shape.num_key_value_heads
    per_device = preset.kv_bytes / min(tensor_parallel, heads)  # beyond its heads, devices hold copies
    return math.floor(room / per_device)


def decode_cost(
    gpu: Device, preset: ModelPreset, tensor_parallel: int, *, max_num_running: int = 256, memory_share: float = MEMORY_SHARE, staging: bool = False
) -> DecodeCost:
    """An engine on `tensor_parallel` devices of one node. Raises ConfigError when the weights leave no room for a KV cache."""
    shape, bandwidth = preset.shape, BANDWIDTH_SHARE * gpu.bandwidth
    capacity = kv_capacity(gpu, preset, tensor_parallel, memory_share, staging)
    if capacity < 32768:
        raise ConfigError(
            f"{preset.name} on {tensor_parallel} {gpu.name} leaves room for {max(0, capacity):,.0f} tokens of KV cache; "
            "32,768 are the least; use more devices for an engine"
        )
    flops = PREFILL_UTILISATION * gpu.flops * tensor_parallel
    width = shape.num_attention_heads * shape.head_dim
    return DecodeCost(
        host_s=HOST_STEP_S,
        base_s=preset.weight_bytes / tensor_parallel / bandwidth + (2 * shape.num_hidden_layers * ALL_REDUCE_S if tensor_parallel > 1 else 0.0),
        per_sequence_s=2 * matrix_parameters(shape) / flops,
        per_context_token_s=preset.kv_bytes / min(tensor_parallel, shape.num_key_value_heads) / bandwidth,
        prefill_token_s=2 * matrix_parameters(shape) / flops,
        prefill_pair_s=2 * shape.num_hidden_layers * width / flops,
        kv_tokens=capacity,
        max_num_running=max_num_running,
    )


def train_cost(gpu: Device, preset: ModelPreset, *, num_minibatches: int = 4, utilisation: float | None = None) -> TrainCost:
    """Decoupled PPO: forward and backward (`models.flops.train_flops`) and, for pi_prox, one forward more: 4/3 of it."""
    shape, flops = preset.shape, (preset.train_utilisation if utilisation is None else utilisation) * gpu.flops
    width = shape.num_attention_heads * shape.head_dim
    return TrainCost(
        token_s=8 * matrix_parameters(shape) / flops,
        pair_s=8 * shape.num_hidden_layers * width / flops,
        num_minibatches=num_minibatches,
    )


def push_cost(gpu: Device, preset: ModelPreset, tensor_parallel: int, num_training: int) -> PushCost:
    """Our staged, sharded push: every training rank sends its shard, every engine receives all of it."""
    shard, received = preset.weight_bytes / num_training, preset.weight_bytes / tensor_parallel
    return PushCost(
        pack_s=3 * shard / (BANDWIDTH_SHARE * gpu.bandwidth),  # read float32 and write bf16
        transfer_s=received / (PUSH_BANDWIDTH_SHARE * gpu.network),
        swap_s=received / SWAP_BYTES_PER_S,
    )


def training_bytes(preset: ModelPreset, num_training: int, microbatch_tokens: int) -> dict[str, float]:
    """Bytes on each training device: optimiser state and sharded weights (FSDP2), one gathered layer, activations at layer borders, packing buffers."""
    shape = preset.shape
    layer = BYTES * matrix_parameters(shape) / shape.num_hidden_layers
    return {
        "master weights, gradients, AdamW": STATE_BYTES * preset.parameters / num_training,
        "gathered layers": 3 * layer,
        "activations": BYTES * microbatch_tokens * (shape.hidden_size * (shape.num_hidden_layers + 16) + 3 * shape.intermediate_size),
        "staging": BYTES * preset.parameters / num_training,
    }
