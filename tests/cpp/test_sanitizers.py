"""Builds the C++ tests of the ring (option AREAL_HPC_TESTS) under each pair of sanitizers, in kept folders, and runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_ring_under_sanitizers(sanitizers: str) -> None:
    cmake = shutil.which("cmake")
    assert cmake, "the C++ tests are built with CMake, which is not on PATH (pip install cmake ninja)"
    build = ROOT / "build" / f"cpp-{sanitizers.split(',')[0]}"
    options = ["-DAREAL_HPC_EXTENSION=OFF", "-DAREAL_HPC_TESTS=ON", f"-DAREAL_HPC_SANITIZE={sanitizers}"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    for command in ([cmake, "-S", str(ROOT), "-B", str(build), *options], [cmake, "--build", str(build), "--target", "test_ring"]):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run([build / "test_ring"], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "ring: all passed\n"
