"""Problems: reading, splitting, grading; every mistake of a user's is one line."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import SAFE_TASKS, ConfigError, Data
from areal_hpc.data.datasets import Problem, load_problems, normalised_question, score
from areal_hpc.data.reasoning_tasks import TASK_MODULES


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count, key="question"):
    return [{key: f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]


def everything(problems):
    return [*problems.train, *problems.heldout]


# ---- reasoning-gym


def test_items_equal_those_of_the_package_itself():
    """Independent reference: `reasoning_gym.create_dataset`, imported as usual in another process, after our loader has been at work there."""
    code = (
        "import json; from areal_hpc.config import Data; from areal_hpc.data.datasets import load_problems\n"
        "load_problems(Data(size=10, tasks=('chain_sum', 'spell_backward')))\n"
        "import reasoning_gym as rg\n"
        "sizes = dict(chain_sum=dict(min_terms=2, max_terms=5, max_digits=2), gcd={}, spell_backward={})\n"
        "print(json.dumps([[rg.create_dataset(t, seed=7, size=50, **o)[j][k] for k in ('question', 'answer')] for j in range(50) for t, o in sizes.items()]))"
    )
    expected = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    problems = everything(load_problems(Data(tasks=("chain_sum", "gcd", "spell_backward"), size=150, seed=7)))
    assert len(problems) > 140
    for problem in problems:
        assert [problem.question, problem.answer] == expected[problem.index]
        assert problem.source == ("chain_sum", "gcd", "spell_backward")[problem.index % 3]


def test_every_safe_task_grades_its_own_answer_right_and_another_wrong():
    assert set(TASK_MODULES) == set(SAFE_TASKS)
    problems = everything(load_problems(Data(tasks=SAFE_TASKS, size=40 * len(SAFE_TASKS))))
    assert {problem.source for problem in problems} == set(SAFE_TASKS)
    for problem in problems:
        assert score(problem, problem.answer) == 1.0, problem
        assert score(problem, "no idea") < 1.0 and score(problem, "") < 1.0 and score(problem, None) == 0.0


def test_options_reach_the_tasks_that_have_them():
    problems = everything(load_problems(Data(tasks=("chain_sum",), size=400, min_terms=4, max_terms=4, max_digits=1)))
    for problem in problems:
        expression = problem.question.partition(": ")[2].rstrip(" =").split()
        assert len(expression) == 7 and all(len(term) == 1 for term in expression)
    with pytest.raises(ConfigError, match=r"chain_sum refuses data.min_terms=5, data.max_terms=3"):
        load_problems(Data(min_terms=5, max_terms=3))
    with pytest.raises(ConfigError, match=r"'countdown' is not one of the tasks .* chain_sum"):
        load_problems(Data(tasks=("countdown",)))


def test_twenty_thousand_problems_load_without_heavy_imports():
    code = (
        "import sys\n"
        "from areal_hpc.config import Data; from areal_hpc.data.datasets import load_problems\n"
        "problems = load_problems(Data())\n"
        "heavy = {'numpy', 'torch', 'sympy', 'matplotlib', 'mpi4py'} & set(sys.modules)\n"
        "assert not heavy and len(problems.train) > 10000, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the split


def test_split_is_disjoint_distinct_and_reproducible():
    first, again = load_problems(Data(size=5000)), load_problems(Data(size=5000))
    assert first == again
    questions = [normalised_question(problem.question) for problem in everything(first)]
    assert len(set(questions)) == len(questions) == 5000 - first.num_duplicates
    assert first.num_duplicates > 0
    assert 0.08 < len(first.heldout) / len(questions) < 0.12
    assert load_problems(Data(size=5000, seed=43)).fingerprint != first.fingerprint
    assert load_problems(Data(size=5000, heldout_fraction=0.2)).fingerprint != first.fingerprint


def test_a_question_keeps_its_side_when_the_file_grows(tmp_path):
    small = load_problems(Data(path=write(tmp_path / "small.jsonl", *rows(300))))
    large = load_problems(Data(path=write(tmp_path / "large.jsonl", *rows(900))))
    assert {p.question for p in small.heldout} <= {p.question for p in large.heldout}
    assert {p.question for p in small.train} <= {p.question for p in large.train}


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=60), fraction=st.floats(0.01, 0.99))
def test_any_file_splits_into_two_sides_or_says_why_not(tmp_path_factory, numbers, fraction):
    spellings = ["What is {}?", "what  is {}?", " WHAT is {}? "]
    path = write(tmp_path_factory.mktemp("data") / "d.jsonl", *({"question": spellings[i % 3].format(n), "answer": n} for i, n in enumerate(numbers)))
    if len(set(numbers)) < 2:
        with pytest.raises(ConfigError, match="only 1 distinct question"):
            load_problems(Data(path=path, heldout_fraction=fraction))
        return
    problems = load_problems(Data(path=path, heldout_fraction=fraction))
    assert problems.train and problems.heldout
    assert sorted(int(p.answer) for p in everything(problems)) == sorted(set(numbers))
    assert problems.num_duplicates == len(numbers) - len(set(numbers))


def test_heldout_file_takes_its_questions_from_training(tmp_path):
    train, heldout = write(tmp_path / "t.jsonl", *rows(20)), write(tmp_path / "h.jsonl", *rows(5))
    problems = load_problems(Data(path=train, heldout_path=heldout))
    assert [p.answer for p in problems.heldout] == ["1", "2", "3", "4", "5"]
    assert [p.answer for p in problems.train] == [str(i) for i in range(6, 21)]
    assert problems.num_duplicates == 5
    with pytest.raises(ConfigError, match="no training question is left"):
        load_problems(Data(path=train, heldout_path=train))


# ---- files


def test_jsonl_dialects(tmp_path):
    text = (
        "\ufeff"
        + '{"question": "a?", "answer": 7}\r\n\r\n{"prompt": "b?", "solution": "x\\n#### 1,234"}\n   \n'
        + '{"problem": "c?", "answer": "3*7=<<3*7=21>>21 pens.\\n#### $17\\n"}\n'
        + '{"question": "d?", "answer": " 2.50 ", "level": null}\n\n'
    )
    path = tmp_path / "d.jsonl"
    path.write_bytes(text.encode())
    found = {p.question: p for p in everything(load_problems(Data(path=str(path))))}
    assert {question: problem.answer for question, problem in found.items()} == {"a?": "7", "b?": "1234", "c?": "17", "d?": "2.50"}
    assert found["a?"].solution == "" and found["c?"].solution.startswith("3*7")
    assert {problem.source for problem in found.values()} == {"file"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "a?", "answer": }', "not JSON: Expecting value"),
        ('{"question": "a?", "answer": "1"', "not JSON"),
        ("[1, 2]", "expected an object with question and answer, found list"),
        ('{"answer": "1"}', "no 'question' .nor problem, prompt. among the keys 'answer'"),
        ('{"question": "a?"}', "no 'answer' .nor solution. among the keys 'question'"),
        ('{"question": "a?", "answer": null}', "the answer must be text or a number, found None"),
        ('{"question": "a?", "answer": true}', "found bool"),
        ('{"question": "a?", "answer": NaN}', "found float"),
        ('{"question": "a?", "answer": "  "}', "the answer is empty"),
        ('{"question": "a?", "answer": "so\\n#### "}', "the answer is empty"),
        ('{"question": " ", "answer": "1"}', "the question is empty"),
        ('{"question": [{"role": "user"}], "answer": "1"}', "the question must be text, found list"),
        ('{"question": "\\ud800", "answer": "1"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, reason):
    path = write(tmp_path / "d.jsonl", *rows(2), "", line, *rows(2))
    with pytest.raises(ConfigError, match=f"^{path}:4: .*{reason}") as caught:
        load_problems(Data(path=path))
    assert "\n" not in str(caught.value)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"data.path=.*absent.jsonl: no such file"):
        load_problems(Data(path=str(tmp_path / "absent.jsonl")))
    with pytest.raises(ConfigError, match="no problem in it"):
        load_problems(Data(path=write(tmp_path / "empty.jsonl", "", "")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9?", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"latin.jsonl:1: 'utf-8' codec"):
        load_problems(Data(path=str(tmp_path / "latin.jsonl")))


def test_twenty_thousand_rows_are_read(tmp_path):
    path = write(tmp_path / "d.jsonl", *rows(20_000))
    problems = load_problems(Data(path=path))
    assert len(everything(problems)) == 20_000


# ---- grading of file problems


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("17", "17", True),
        ("17", " 17. ", True),
        ("17", "17.00", True),
        ("17", "+17", True),
        ("17", "$17", True),
        ("-4", "-$4", True),
        ("1234", "1,234", True),
        ("1234567.5", "1,234,567.50", True),
        ("0.1", ".1", True),
        ("1/3", "1/3", True),
        ("red  fox", "red fox", True),
        ("17", "71", False),
        ("17", "17 apples", False),
        ("12", "1,2", False),
        ("123456", "1,23456", False),
        ("17", "1_7", False),
        ("17", "1e1", False),
        ("17", "", False),
        ("0.3333", "1/3", False),
        ("17", "nan", False),
        ("1" * 5000, "1" * 5000 + ".0", False),  # too long to be taken for a number; textually different
    ],
)
def test_file_answers(gold, answer, right):
    assert score(Problem(0, "?", gold, "file"), answer) == float(right)


@given(value=st.integers(-(10**12), 10**12))
def test_thousands_commas_never_change_a_number(value):
    problem = Problem(0, "?", str(value), "file")
    assert score(problem, f"{value:,}") == 1.0
    assert score(problem, f"{value + 1:,}") == 0.0
