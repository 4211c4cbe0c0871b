"""`areal-hpc generate`: the same answers from one process and from three ranks; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.config import Config
from areal_hpc.launch.local import find_launcher

pytestmark = pytest.mark.mpi
COMMAND = [sys.executable, "-m", "areal_hpc", "generate"]


def test_ranks_share_the_prompts(base: Config, tmp_path: Path) -> None:
    prompts = [
        {"prompt": "1 + 2 = ?"},
        {"messages": [{"role": "user", "content": "2 + 2 = ?"}]},
        {"prompt": "9" * 400},
        *({"prompt": f"{k} + 3 = ?"} for k in range(5)),
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, prompts)))
    args = [
        base.model.path,
        str(file),
        "--num-samples",
        "3",
        "--generation.max-new-tokens",
        "9",
        "--generation.max-num-running",
        "4",
        "--data.max-prompt-tokens",
        "64",
    ]
    alone = subprocess.run([*COMMAND, *args], capture_output=True, text=True)
    assert alone.returncode == 0 and "21 answers" in alone.stdout and "3 of prompts that are too long" in alone.stdout, alone.stdout + alone.stderr
    found = [json.loads(line) for line in (tmp_path / "prompts.answers.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in found] == [(prompt, sample) for prompt in range(8) for sample in range(3)]
    assert all("exceeds data.max_prompt_tokens=64" in row["error"] for row in found if row["prompt"] == 2)
    assert all(0 < row["tokens"] <= 9 and row["logprob"] < 0 for row in found if row["prompt"] != 2)
    together = subprocess.run([*find_launcher().command(3), *COMMAND, *args, "--out", str(tmp_path / "three.jsonl")], capture_output=True, text=True)
    assert together.returncode == 0 and "on 3 ranks" in together.stdout, together.stdout + together.stderr
    again = [json.loads(line) for line in (tmp_path / "three.jsonl").read_text().splitlines()]
    assert [row | {"logprob": 0} for row in again] == [row | {"logprob": 0} for row in found], "answers do not depend on the number of ranks"


def test_mistakes(base: Config, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"messages": []}\n')
    for args, message in (
        ([base.model.path, str(tmp_path / "bad.jsonl")], 'bad.jsonl:2: expected an object with "prompt"'),
        ([base.model.path, str(tmp_path / "none.jsonl")], "No such file"),
        ([str(tmp_path), str(tmp_path / "bad.jsonl")], "holds neither a model"),
        ([base.model.path, str(tmp_path / "bad.jsonl"), "--num-samples", "0"], "--num-samples 0 must be a whole number above zero"),
        ([base.model.path], "needs a run or model folder and a file"),
    ):
        done = subprocess.run([*COMMAND, *args], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
