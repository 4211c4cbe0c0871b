"""What a rank tells of its process: seconds by kind that sum to its wall time; GPU columns through NVML, here a fake one, and none without a GPU."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from areal_hpc.observe import state
from areal_hpc.observe.schema import TABLES
from areal_hpc.observe.timeline import Phases


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("role", "spent", "busy_s", "pause_s", "wait_s"),
    [
        ("generation", {"decode": 5, "gated": 3, "swap": 1, "evaluate": 2, "ring_full": 4}, 7, 1, 7),
        ("training", {"wait_data": 3, "collect": 1, "train": 8, "push_wait": 2, "log": 1}, 9, 0, 6),
    ],
)
def test_seconds_by_kind(role: str, spent: dict[str, int], busy_s: float, pause_s: float, wait_s: float) -> None:
    clock = Clock()
    phases = Phases(0, role, clock)
    for phase, seconds in spent.items():
        phases.enter(phase)
        clock.now_s += seconds  # the last phase goes on while it is asked
    found = state.seconds_by_kind(phases)
    assert found == {"busy_s": busy_s, "pause_s": pause_s, "wait_s": wait_s}
    assert sum(found.values()) == clock.now_s - 10.0


def test_every_column_of_ranks_is_told() -> None:
    told = state.process_state(Phases(0, "generation", Clock()))
    assert told.keys() < set(state.RANK_STATE) and {"rank", "role", "time_s"} | set(state.RANK_STATE) == set(TABLES["ranks"].column_names)
    assert told["rss_bytes"] > 1_000_000 and told["gpu_memory_bytes"] == 0 and math.isnan(told["gpu_power_w"])


def fake_nvml(refuses: str = "") -> ModuleType:
    """Two devices; this process uses the one with UUID GPU-b."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def power(handle: str) -> int:
        if refuses == "power":
            raise NVMLError("not supported")
        return {"GPU-a": 1, "GPU-b": 350_500}[handle]

    def handle_by_uuid(uuid: str) -> str:
        if refuses == "device":
            raise NVMLError("not found")
        return uuid

    module.NVMLError, module.nvmlInit = NVMLError, lambda: None
    module.nvmlDeviceGetHandleByUUID = handle_by_uuid
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used={"GPU-a": 1, "GPU-b": 2**36}[handle])
    module.nvmlDeviceGetPowerUsage = power
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu={"GPU-a": 1, "GPU-b": 87}[handle])
    return module


@pytest.mark.parametrize(
    ("refuses", "memory", "power_w", "utilisation"), [("", 2**36, 350.5, 0.87), ("power", 2**36, math.nan, 0.87), ("device", 0, math.nan, math.nan)]
)
def test_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch, refuses: str, memory: int, power_w: float, utilisation: float) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: SimpleNamespace(uuid="b")
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(refuses))
    state._handle.cache_clear()
    try:
        assert state.gpu_state() == pytest.approx({"gpu_memory_bytes": memory, "gpu_power_w": power_w, "gpu_utilisation": utilisation}, nan_ok=True)
    finally:
        state._handle.cache_clear()


def test_without_the_package_or_before_cuda_starts_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = [False]
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: started[0], current_device=lambda: 0, get_device_properties=lambda _: SimpleNamespace(uuid="b")
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    state._handle.cache_clear()
    try:
        for now in (False, True):
            started[0] = now
            assert state.gpu_state()["gpu_memory_bytes"] == 0
    finally:
        state._handle.cache_clear()
