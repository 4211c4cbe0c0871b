"""`areal-hpc grade`: order, bad rows, malformed lines."""

import io
import json
import subprocess
import sys

import pytest

from areal_hpc import cli
from areal_hpc.config import ConfigError, Reward
from areal_hpc.reward.offline import grade_rows, read_rows

GOOD = [
    {"gold": "\\frac{1}{2}", "answer": "so \\boxed{0.5}"},
    {"gold": 5, "answer": "\\boxed{5}"},
    {"gold": 2.5, "answer": "\\boxed{5/2}"},
    {"gold": ["7", "8"], "answer": "\\boxed{8}"},
    {"gold": "5", "answer": "nothing"},
    {"gold": "5", "answer": "\\boxed{6}"},
    {"gold": "5", "answer": "\\boxed{10^{10^{10}}}"},
    {"gold": "", "answer": "\\boxed{6}"},
]
STATUSES = ["right", "right", "right", "right", "no_answer", "wrong", "hostile", "gold_bad"]


def write(tmp_path, lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_results_in_the_order_of_the_rows(tmp_path, capsys):
    assert cli.main(["grade", write(tmp_path, GOOD * 20), "--reward.num-graders", "2"]) == 0
    printed = capsys.readouterr()
    results = [json.loads(line) for line in printed.out.splitlines()]
    assert [result["status"] for result in results] == STATUSES * 20
    assert [result["reward"] for result in results[:8]] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    assert [result["line"] for result in results] == list(range(1, 161))
    assert results[0]["extracted"] == "0.5" and results[4]["extracted"] is None and all(result["seconds"] >= 0 for result in results)
    assert printed.err.startswith("160 rows: 80 right")


@pytest.mark.parametrize(
    ("row", "status", "reason"),
    [
        ({"answer": "\\boxed{1}"}, "gold_bad", "no 'gold'"),
        ({"gold": None, "answer": "\\boxed{1}"}, "gold_bad", "gold must be"),
        ({"gold": True, "answer": "\\boxed{1}"}, "gold_bad", "gold must be"),
        ({"gold": [], "answer": "\\boxed{1}"}, "gold_bad", "gold must be"),
        ({"gold": {"x": 1}, "answer": "\\boxed{1}"}, "gold_bad", "gold must be"),
        ('{"gold": NaN, "answer": "1"}', "gold_bad", "gold must be"),
        ({"gold": "1"}, "infra_error", "no 'answer'"),
        ({"gold": "1", "answer": 1}, "infra_error", "the answer must be text, found int"),
        ({"kind": "essay", "gold": "1", "answer": "1"}, "infra_error", "neither math nor code"),
        ({"kind": "code", "answer": "print(1)"}, "gold_bad", "no 'tests'"),
        ("[1, 2]", "infra_error", "expected an object"),
        ('"text"', "infra_error", "expected an object"),
    ],
)
def test_bad_rows_are_reported_in_their_place(tmp_path, row, status, reason):
    (result,) = grade_rows(read_rows(write(tmp_path, [row])), Reward())
    assert (result["reward"], result["status"]) == (None, status)
    assert reason in result["reason"] and result["reason"].startswith("line 1: ")


def test_malformed_lines(tmp_path, capsys, monkeypatch):
    path = write(tmp_path, ['{"gold": "1", "answer": "\\\\boxed{1}"}', "", '{"gold": "1"', '{"gold": "1", "answer": "\\\\boxed{1}"}'])
    assert cli.main(["grade", path]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {path}:3: not JSON: ") and said.err.count("\n") == 1
    assert cli.main(["grade", path, "--skip-invalid"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(result["line"], result["status"]) for result in results] == [(1, "right"), (3, "infra_error"), (4, "right")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    with pytest.raises(ConfigError, match="standard input:1: "):
        read_rows("-")


def test_standard_input_and_options(tmp_path):
    rows = "\n".join(json.dumps({"gold": "25", "answer": "\\boxed{25\\%}"}) for _ in range(2))
    command = [sys.executable, "-m", "areal_hpc", "grade", "-", "--reward.math-percent", "strict"]
    ran = subprocess.run(command, input=rows, capture_output=True, text=True, check=True)
    assert [json.loads(line)["status"] for line in ran.stdout.splitlines()] == ["wrong", "wrong"]


@pytest.mark.parametrize(("args", "message"), [([], "needs a file"), (["/absent.jsonl"], "/absent.jsonl: No such file"), (["-x"], "needs a file")])
def test_users_mistakes(args, message, capsys):
    assert cli.main(["grade", *args]) == 2
    assert message in capsys.readouterr().err
