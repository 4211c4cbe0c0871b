"""The GPU check: `python tests/gpu/run.py` on a machine with one GPU, from source, in under two minutes; the last line is one JSON object.

Needs Python >= 3.11, torch with CUDA, numpy, nanobind, pytest, hypothesis, CMake and a C++ compiler; no network, no toolkit, nothing installed, nothing left
behind. It builds both extensions in a temporary folder, runs tests/transport/test_cuda.py and tests/gpu on the device, and measures copies between the device and
a registered lane beside an unregistered lane and a pinned buffer of torch. Exit status 0: all passed; 1: something failed; 2: the machine lacks something.

Not run on a GPU so far: what it does there, and how long it takes, is untested.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S, TEST_LIMIT_S, MEASURE_LIMIT_S = 150, 150, 90
SIZES = [64 << 10, 1 << 20, 16 << 20, 64 << 20]
REPEATS = 15


def missing() -> str:
    """What this machine lacks, in one line; empty if nothing."""
    absent = [name for name in ("torch", "numpy", "nanobind", "pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    absent += [] if shutil.which("cmake") else ["cmake"]
    absent += [] if any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))) else ["a C++ compiler"]
    if absent:
        return "this machine lacks " + ", ".join(absent)
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def build(folder: Path) -> None:
    """A copy of the sources in `folder`, with both extensions built beside them."""
    import nanobind

    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build")
    for name in ("areal_hpc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder)
    out = folder / "build"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}", "-DCMAKE_BUILD_TYPE=Release"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    deadline = time.monotonic() + BUILD_LIMIT_S
    for command in (["cmake", "-S", folder, "-B", out, *options], ["cmake", "--build", out, "--parallel", "--target", "_ring", "_cuda"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=deadline - time.monotonic())
    for library in out.glob("_*.so"):
        shutil.copy2(library, folder / "areal_hpc")


def run_tests(folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Whether all passed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/transport/test_cuda.py", "tests/gpu"]
    result = subprocess.run(command, cwd=folder, env=environment, timeout=TEST_LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(result.stdout, flush=True)
    summary = [line for line in result.stdout.splitlines() if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    return result.returncode == 0, summary[-1].strip("= ") if summary else "no summary"


def gb_per_s(num_bytes: int, copy: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return round(num_bytes / statistics.median(seconds[1:]) / 1e9, 2)


def measure() -> dict[str, Any]:
    """Seconds of a registration, and GB/s of copies, each with its wait: medians of some repeats after a first one."""
    import torch

    from areal_hpc.transport import cuda
    from areal_hpc.transport.ring import Ring

    def lane(what: str) -> Any:
        ring = Ring(f"gpu-check-{os.getpid()}-{what}", capacity_bytes)
        consumer = ring.consumer()
        producer = ring.producer(timeout_s=0)
        consumer.unlink()
        return consumer, producer

    def pinned_copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def speeds_of(num_bytes: int) -> dict[str, dict[str, float]]:
        on_device = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        with plain_producer.reserve(num_bytes, timeout_s=1) as plain_slot:
            plain = torch.from_numpy(plain_slot.buffer)
            slot = copier.write(producer.reserve(num_bytes, timeout_s=1))
            to_host = {
                "registered lane": gb_per_s(num_bytes, lambda: slot.copy_in([on_device], [0]).wait(60)),
                "unregistered lane": gb_per_s(num_bytes, lambda: plain.copy_(on_device)),
                "pinned buffer": gb_per_s(num_bytes, lambda: pinned_copy(pinned, on_device)),
            }
            slot.commit(ticket=0, version_min=0, version_max=0, num_tokens=0, num_samples=0)
            leased = consumer.peek(timeout_s=1)
            assert leased is not None
            with copier.read(leased) as record:
                to_device = {
                    "registered lane": gb_per_s(num_bytes, lambda: record.copy_out([on_device], [0]).wait(60)),
                    "unregistered lane": gb_per_s(num_bytes, lambda: on_device.copy_(plain)),
                    "pinned buffer": gb_per_s(num_bytes, lambda: pinned_copy(on_device, pinned)),
                }
        return {"device to host": to_host, "host to device": to_device}

    room_bytes = shutil.disk_usage("/dev/shm").free // 2 - (1 << 20)  # for two lanes
    sizes = [size for size in SIZES if size * 4 <= room_bytes]
    capacity_bytes = max(sizes) * 4
    (consumer, producer), (_plain_consumer, plain_producer) = lane("registered"), lane("plain")
    torch.empty(1, device="cuda")
    with cuda.DeviceCopier(timeout_s=60) as copier:
        start = time.perf_counter()
        copier.register(producer)
        register_s = time.perf_counter() - start
        copier.register(consumer)
        speeds = {f"{size >> 10} KiB": speeds_of(size) for size in sizes}
    return {"driver": cuda.status(), "lane_bytes": capacity_bytes, "register_s": round(register_s, 3), "gb_per_s": speeds}


def check(folder: Path, report: dict[str, Any]) -> bool:
    """Build, test, measure; what came of it goes into the report."""
    start = time.monotonic()
    build(folder)
    report["build_s"] = round(time.monotonic() - start, 1)
    environment = os.environ | {"AREAL_HPC_TEST_GPU": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    passed, report["tests"] = run_tests(folder, environment)
    command = [sys.executable, str(folder / "tests" / "gpu" / "run.py"), "--measure"]
    result = subprocess.run(command, cwd=folder, env=environment, timeout=MEASURE_LIMIT_S, stdout=subprocess.PIPE, text=True, check=True)
    report |= json.loads(result.stdout.splitlines()[-1])
    return passed


def main() -> int:
    start = time.monotonic()
    if lack := missing():
        print(f"tests/gpu/run.py: {lack}", file=sys.stderr)
        return 2
    import torch

    report: dict[str, Any] = {"ok": False, "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "python": sys.version.split()[0]}
    with tempfile.TemporaryDirectory(prefix="areal-gpu-") as folder:
        try:
            report["ok"] = check(Path(folder), report)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            report["error"] = str(error)
    print(json.dumps(report | {"seconds": round(time.monotonic() - start, 1)}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        sys.exit(main())
