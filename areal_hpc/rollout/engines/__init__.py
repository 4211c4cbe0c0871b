"""Generation engines behind one protocol (`base.Engine`). Heavy imports happen in `create_engine`, not here."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from areal_hpc.config import Config
from areal_hpc.rollout.engines.base import Completion, Engine, Request

if TYPE_CHECKING:
    import torch

    from areal_hpc.models.decoder_config import DecoderConfig

__all__ = ["Completion", "Engine", "Request", "create_engine"]


def create_engine(config: Config, decoder_config: DecoderConfig, stop_tokens: Collection[int], device: torch.device | str) -> Engine:
    """The engine that `config.generation.engine` names, without weights yet. On a CPU it computes in float32, whatever `model.dtype` says (faster there)."""
    import torch

    from areal_hpc.rollout.engines.embedded import EmbeddedEngine

    on_cpu = torch.device(device).type == "cpu"
    return EmbeddedEngine(
        decoder_config,
        max_num_running=config.generation.max_num_running,
        max_context_tokens=config.max_context_tokens,
        stop_tokens=stop_tokens,
        kv_on_update=config.generation.kv_on_update,
        device=device,
        dtype=torch.float32 if on_cpu else getattr(torch, config.model.dtype),
    )
