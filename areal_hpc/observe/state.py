"""The state of a rank's process for /ranks: memory, seconds by kind of phase, and of its GPU what NVML tells.

NVML is read through the package `nvidia-ml-py` (extra `gpu`) where it is installed and this process uses a GPU; otherwise those columns are not a number, or 0 bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from areal_hpc.observe.memory import resident_bytes
from areal_hpc.observe.schema import BUSY, PAUSED, TABLES
from areal_hpc.observe.timeline import Phases

RANK_STATE = tuple(name for name in TABLES["ranks"].column_names if name not in ("rank", "role", "time_s"))
"""Columns of /ranks that the rank itself tells."""


def process_state(phases: Phases) -> dict[str, Any]:
    """Columns of /ranks that every rank has alike."""
    return {**seconds_by_kind(phases), "rss_bytes": resident_bytes(), **gpu_state()}


def seconds_by_kind(phases: Phases) -> dict[str, float]:
    """Seconds since the rank began: busy (it works), pause (decoding stood still for new weights), wait (all else); they sum to its wall time."""
    seconds = phases.seconds_now()
    pause_s = sum(seconds.get(name, 0.0) for name in PAUSED)
    busy_s = sum(seconds.get(name, 0.0) for name in BUSY[phases.role]) - pause_s
    return {"busy_s": busy_s, "pause_s": pause_s, "wait_s": sum(seconds.values()) - busy_s - pause_s}


def gpu_state() -> dict[str, Any]:
    """Memory in use on this process's GPU (of all processes), its utilisation (0 to 1) over NVML's last sample period, its power."""
    nothing = {"gpu_memory_bytes": 0, "gpu_utilisation": math.nan, "gpu_power_w": math.nan}
    device = _device()
    if device is None:
        return nothing
    nvml, handle = device
    questions: dict[str, Callable[[], Any]] = {
        "gpu_memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    }
    found = dict(nothing)
    for name, ask in questions.items():
        with contextlib.suppress(nvml.NVMLError):  # a driver may tell one and not another (MIG slices have no power); a number for people is not worth the run
            found[name] = ask()
    return found


def _device() -> tuple[Any, Any] | None:
    """(NVML, handle of this process's GPU); None as long as the process uses none. Asked anew until there is one: CUDA starts late."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return _handle(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


@functools.cache
def _handle(uuid: str) -> tuple[Any, Any] | None:
    """By the device's UUID: NVML numbers devices otherwise than CUDA does under CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except pynvml.NVMLError:
        return None
