"""Evaluations with several answers to each problem: in a real job, and offline on the same weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.cli import main
from areal_hpc.config import Config, Evaluation
from areal_hpc.data.datasets import load_problems
from areal_hpc.metrics import pass_at_k
from areal_hpc.observe import samples

pytestmark = pytest.mark.mpi
K = 4


def parity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward that a random model meets in about half of its answers."""
    (folder / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "parity_reward:grade"


def test_table_files_and_offline_evaluation_agree(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What the log says of the last evaluation is what its saved answers say, and what `areal-hpc eval` finds with the final model."""
    reward = replace(base.reward, custom=parity(tmp_path, monkeypatch))
    data = replace(base.data, tasks=("chain_sum", "products"), max_prompt_tokens=128)  # the tokenizer was made for chain_sum: long prompts for products
    evaluation = Evaluation(num_problems=11, num_samples=K, every=1, save_samples=11, save_training_groups=2)
    config = jobs.with_ranks(replace(base, reward=reward, data=data, evaluation=evaluation), 3)
    job = jobs.run(config, tmp_path / "run")
    table, sources, folder = job.table("evaluations"), job.table("evaluation_sources"), job.attempt / "samples"
    assert table["policy_version"].tolist() == [0, 1, 2, 3], "an evaluation of every version, each complete"
    heldout = load_problems(data).heldout[:11]
    for row in table:
        records = samples.read_records(folder / f"evaluation-{row['policy_version']:06d}.jsonl")
        assert [(r["problem"], r["sample"]) for r in records] == [(j, s) for j in range(11) for s in range(K)]
        assert {(r["version_min"], r["version_max"]) for r in records} == {(row["policy_version"], row["policy_version"])}, "one fixed version"
        assert all((r["prompt"], r["gold"]) == (heldout[r["problem"]].question, heldout[r["problem"]].answer) for r in records)
        right_QK = np.array([r["status"] == "right" for r in records]).reshape(11, K)
        assert (row["num_problems"], row["k"], row["correct"]) == (11, K, right_QK.sum())
        assert row["accuracy"] == right_QK.mean() and row["pass_k"] == pytest.approx(pass_at_k(right_QK.sum(axis=1), K, K).mean())
        assert row["ci_low"] < row["accuracy"] < row["ci_high"] and row["ci_high"] - row["ci_low"] == pytest.approx(2 * row["ci95"])
        assert row["answer_tokens_mean"] == pytest.approx(np.mean([r["tokens"] for r in records]))
        mine = sources[sources["policy_version"] == row["policy_version"]]
        assert [name.decode() for name in mine["source"]] == sorted({problem.source for problem in heldout})
        assert mine["correct"].sum() == row["correct"] and mine["num_problems"].sum() == 11
    assert 0 < table["correct"].sum() < 4 * 11 * K, "otherwise nothing was compared"
    check_training_samples(job, config)
    assert main(["eval", str(job.run_dir), "--out", str(tmp_path / "eval")]) == 0
    told, results, last = capfd.readouterr().out, json.loads((tmp_path / "eval" / "results.json").read_text()), table[-1]
    assert f"avg@{K}" in told and f"pass@{K}" in told and f"majority@{K}" in told
    for name in ("correct", "accuracy", "ci_low", "ci_high", "pass_4", "answer_tokens_mean"):
        assert results["total"][name] == pytest.approx(float(last["pass_k" if name == "pass_4" else name])), name
    online, offline = (samples.read_records(path) for path in (folder / "evaluation-000003.jsonl", tmp_path / "eval" / "samples" / "evaluation-000000.jsonl"))
    assert [r["answer"] for r in online] == [r["answer"] for r in offline]


def check_training_samples(job: jobs.Job, config: Config) -> None:
    """Saved training groups: those of the rule that were closed, each answer once, with what /trajectories says of it."""
    trajectories = job.table("trajectories")
    records = [r for path in (job.attempt / "samples").glob("training-*.jsonl") for r in samples.read_records(path)]
    wanted = {int(ticket) for ticket in trajectories["ticket"] if ticket % config.groups_per_batch < 2}
    assert Counter(r["ticket"] for r in records) == dict.fromkeys(wanted, config.train.group_size)
    rows = {(int(row["ticket"]), int(row["sample"])): row for row in trajectories}
    train = load_problems(config.data).train
    for r in records:
        row = rows[r["ticket"], r["sample"]]
        assert (r["step"], r["tokens"], r["version_min"], r["version_max"]) == tuple(
            int(row[name]) for name in ("batch", "answer_tokens", "version_min", "version_max")
        )
        assert r["reward"] == pytest.approx(float(row["reward"])) and r["advantage"] == pytest.approx(float(row["advantage"]))
        assert r["prompt"] == train[r["problem"]].question and r["outcome"] == "trained"
    events = job.table("events")
    assert any(event["kind"] == b"samples" and event["text"].startswith(b"%d answers saved" % (len(records) + 4 * 11 * K)) for event in events)


def test_eval_mistakes_leave_nothing(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    mistakes = {
        ("--num-samples", "2", "--temperature", "0"): "would give equal answers",
        ("--num-samples", "0"): "must be above zero",
        ("--data", "gsm8k"): "there are gsm8k-100",
        ("--data",): "--data needs a value",
        ("--out", "full"): "is not empty",
        ("--out", "new", "--data.max-prompt-tokens", "5"): "max_prompt_tokens",
        ("--out", "new", "--data.path", "no.jsonl"): "no.jsonl",
    }
    for options, said in mistakes.items():
        assert main(["eval", base.model.path, *options]) == 2, options
        told = capfd.readouterr().err
        assert told.count("\n") == 1 and said in told, (options, told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
