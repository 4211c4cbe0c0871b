"""csrc/cuda.hpp declares the driver's functions itself; where the toolkit is, they are compared with its cuda.h (option AREAL_HPC_CUDA_HEADERS)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "areal_hpc" / "csrc"


@pytest.fixture(scope="module")
def toolkit() -> Path:
    """The folder of cuda.h."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda.h").exists():
            return Path(home) / "include"
    pytest.skip("needs the CUDA toolkit's cuda.h (CUDA_HOME, CUDA_PATH, /usr/local/cuda)")


def test_declarations_match_the_toolkit(toolkit: Path) -> None:
    cmake = shutil.which("cmake")
    assert cmake, "the check is built with CMake, which is not on PATH (pip install cmake ninja)"
    build = ROOT / "build" / "cpp-cuda-headers"
    options = ["-DAREAL_HPC_EXTENSION=OFF", "-DAREAL_HPC_TESTS=ON", "-DAREAL_HPC_CUDA_HEADERS=ON", f"-DCUDA_H_DIR={toolkit}"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    for command in ([cmake, "-S", str(ROOT), "-B", str(build), *options], [cmake, "--build", str(build), "--target", "cuda_headers"]):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ("cuMemHostRegister_v2, void*, size_t, unsigned int)", "cuMemHostRegister_v2, void*, unsigned int, unsigned int)"),
        ("cuEventDestroy, cuEventDestroy_v2,", "cuEventDestroy, cuEventDestroy,"),
        ("kNotReady = 600", "kNotReady = 601"),
    ],
    ids=["parameters", "version of a symbol", "number of an error"],
)
def test_a_wrong_declaration_does_not_compile(toolkit: Path, tmp_path: Path, ours: str, wrong: str) -> None:
    source = (CSRC / "cuda.hpp").read_text()
    assert source.count(ours) == 1
    (tmp_path / "cuda.hpp").write_text(source.replace(ours, wrong))
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))))
    command = [compiler, "-std=c++20", "-fsyntax-only", "-DAREAL_HPC_CUDA_HEADERS", "-I", str(tmp_path), "-isystem", str(toolkit)]
    result = subprocess.run([*command, str(ROOT / "tests" / "cpp" / "cuda_headers.cpp")], capture_output=True, text=True)
    assert result.returncode != 0 and "static assertion failed" in result.stderr, result.stderr
