"""Builds areal_hpc._ring and areal_hpc._cuda with CMake in build/ext, which is kept: a rebuild after an edit takes seconds. Metadata is in pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "ext"


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()  # beside the sources for editable and --inplace builds
        cache = BUILD / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(BUILD)  # the checkout was moved
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}", "-DCMAKE_BUILD_TYPE=Release"]
        if ninja := shutil.which("ninja"):
            options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, *options], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", BUILD, "--target", ext.name.rpartition(".")[2]], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")
        shutil.copy2(BUILD / target.name, fresh)
        fresh.replace(target)  # never written in place: a running process may have it mapped


setup(ext_modules=[Extension(f"areal_hpc.{name}", sources=[]) for name in ("_ring", "_cuda")], cmdclass={"build_ext": CMakeBuild})
