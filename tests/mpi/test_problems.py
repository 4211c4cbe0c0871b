"""Over-long prompts are left out by the ranks, which know the model, but not by the graders, which do not: each answer must still be graded as its own problem's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jobs
import pytest

from areal_hpc.cli import main
from areal_hpc.config import Config, Data, Evaluation
from areal_hpc.observe import samples

pytestmark = pytest.mark.mpi
REWARD = """
def grade(problem, text):
    assert len(problem.question) < 60, "this prompt was left out"
    return float(int(problem.answer) % 2)
"""


def test_answers_meet_their_own_problems(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The reward depends on the problem alone, so that a status gives away which problem the grader looked up."""
    rows = [{"question": "1 + " * (40 if k % 3 == 0 else 1) + f"{k} =", "answer": k} for k in range(90)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[1], {"question": "?"}]))
    (tmp_path / "odd_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = Data(path=str(tmp_path / "data.jsonl"), heldout_fraction=0.3, max_prompt_tokens=48, skip_invalid=True)
    evaluation = Evaluation(num_problems=24, save_samples=24, save_training_groups=4)
    reward = replace(base.reward, custom="odd_reward:grade", max_failure_rate=1e-9)
    job = jobs.run(replace(base, data=data, evaluation=evaluation, reward=reward), tmp_path / "run")
    assert "92 problems read, 60 kept, 1 repeated, 30 over-long, 1 invalid" in job.stdout
    folder = job.attempt / "samples"
    for kind in ("evaluation", "training"):
        records = [record for path in folder.glob(f"{kind}-*.jsonl") for record in samples.read_records(path)]
        assert len({record["prompt"] for record in records}) >= 10
        for record in records:
            number = int(record["prompt"].removesuffix(" =").rpartition(" ")[2])
            assert record["gold"] == str(number) and number % 3
            assert record["score"] == number % 2 and (record["status"] == "right") == (number % 2 == 1)
    assert main(["eval", str(job.run_dir), "--out", str(tmp_path / "eval")]) == 0
    online, offline = (samples.read_records(path) for path in (folder / "evaluation-000003.jsonl", tmp_path / "eval" / "samples" / "evaluation-000000.jsonl"))
    assert [(r["prompt"], r["status"], r["answer"]) for r in online] == [(r["prompt"], r["status"], r["answer"]) for r in offline]
    capfd.readouterr()


def test_graders_of_a_plain_file_are_counted(base: Config, tmp_path: Path) -> None:
    """Questions with answers in a file go to the mathematical grader; the log says what each rank's graders did, and leaves none of them out."""
    rows = [{"question": f"Half of {k} is", "answer": f"\\frac{{{k}}}{{2}}"} for k in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(path=str(tmp_path / "data.jsonl"), heldout_fraction=0.3, max_prompt_tokens=48)
    job = jobs.run(replace(base, data=data), tmp_path / "run")
    last = {row["rank"]: row for row in job.table("graders")}  # sums only rise: the last row of a rank is its total
    steps, evaluations = job.table("trajectories"), job.table("evaluations")
    graded = sum(int(row[name]) for row in last.values() for name in ("right", "wrong", "no_answer", "truncated", "timeout", "hostile"))
    assert len(last) == 1 and graded >= len(steps) + evaluations["num_problems"].sum()
    assert sum(int(row["infra_error"] + row["gold_bad"] + row["died"] + row["killed"]) for row in last.values()) == 0
