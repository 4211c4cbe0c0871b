"""How much of the hardware training uses: peak FLOP/s of a device, and peak memory of a process.

Model FLOP utilisation of a step (column `mfu` of /steps) = model FLOPs of forward and backward over the trained answers and their prompts (`models/flops.py`)
/ seconds of the phases `prox` and `train` on training rank 0 / (peak FLOP/s of one device * training ranks). Recomputation, the reference model, pi_prox and
idle micro-batches are no model FLOPs: they lower it.
"""

from __future__ import annotations

import functools
import resource
import time

import torch

DENSE_BF16_FLOPS = {  # vendors' data sheets, dense bf16 tensor cores, FLOP/s
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
MATMUL_SIZE = 384
"""Rows of the square float32 matrices that a CPU's peak is measured with."""
MATMUL_REPEATS = 7


@functools.cache
def peak_flops(device: torch.device) -> float:
    """FLOP/s that this rank's device could do: on a GPU the data sheet's dense bf16 rate, nan for one that is not in the table; on a CPU the fastest of a few
    float32 matrix products with this process's threads, measured once."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((flops for key, flops in DENSE_BF16_FLOPS.items() if all(word in name for word in key.split())), float("nan"))
    a, b = torch.ones(MATMUL_SIZE, MATMUL_SIZE), torch.ones(MATMUL_SIZE, MATMUL_SIZE)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        started_s = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started_s)
    return 2 * MATMUL_SIZE**3 / min(seconds)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held so far: allocated on its GPU, or resident (getrusage(2), in KiB on Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
