"""Files in, problems out: containers, folders, and an account of the rows that adds up."""

import gzip
import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import Config, ConfigError, Data, check
from areal_hpc.config_io import as_yaml, load_yaml, parse_options
from areal_hpc.data import files, reasoning_tasks
from areal_hpc.data.datasets import Problem, load_problems, score
from areal_hpc.recipes import RECIPES
from areal_hpc.reward.math import check_gold

ROWS = [{"question": f"What is {i} + 1?", "answer": f"It is\n#### {i + 1}"} for i in range(40)]


def everything(problems):
    return sorted([*problems.train, *problems.heldout], key=lambda problem: problem.index)


def write(path, rows, kind):
    """The same rows in each container."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    array = json.dumps(rows, indent=1).encode()
    content = {"lines": lines, "array": array, "lines.gz": gzip.compress(lines), "array.gz": gzip.compress(array)}
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(content[kind])
    return str(path)


CONTAINERS = ("lines", "array", "lines.gz", "array.gz", "parquet")


# ---- containers


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_container_is_found_by_content_and_changes_nothing(tmp_path, kind):
    expected = load_problems(Data(path=write(tmp_path / "plain.jsonl", ROWS, "lines")))
    found = load_problems(Data(path=write(tmp_path / "nameless", ROWS, kind)))
    assert (found.train, found.heldout, found.fingerprint) == (expected.train, expected.heldout, expected.fingerprint)
    assert found.report.files[0].format == "gsm8k" and found.report.files[0].num_rows == 40


VERL_ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {i}*7?"}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": str(7 * i)},
        "extra_info": {"index": f"{i:x}", "split": "train"},
        "unused": "x" * 1000,
    }
    for i in range(30)
]


def test_verl_parquet_with_repetitions(tmp_path):
    """As in DAPO-Math-17k: every prompt about a hundred times."""
    problems = load_problems(Data(path=write(tmp_path / "train.parquet", VERL_ROWS * 100, "parquet")))
    assert problems.report.num_read == 3000 and problems.report.num_kept == 30 and problems.num_duplicates == 2970
    assert problems.report.num_conflicting == 0
    for problem in everything(problems):
        assert problem.question == f"What is {problem.index}*7?" and problem.golds == (str(7 * problem.index),)
        assert problem.kind == "math" and problem.origin == "math_dapo" and problem.messages == ()


def test_parquet_with_structs_joined_across_rows(tmp_path):
    """Math and code in one file: the schema is the union of both, absent keys are null."""
    code = {**VERL_ROWS[0], "prompt": [{"role": "user", "content": "Square n."}], "ability": "code", "reward_model": {"inputs": ["3\n"], "outputs": ["9\n"]}}
    rows = [*VERL_ROWS[:3], {**code, "reward_model": {"ground_truth": json.dumps(code["reward_model"]), "style": "rule", "note": "x"}}]
    found = {problem.question: problem for problem in everything(load_problems(Data(path=write(tmp_path / "d", rows, "parquet"))))}
    assert found["Square n."].kind == "code" and json.loads(found["Square n."].tests)["outputs"] == ["9\n"]
    assert found["What is 2*7?"].golds == ("14",)
    with pytest.raises(ValueError, match="graded by its tests"):
        score(found["Square n."], "9")


def test_a_json_document_of_one_object(tmp_path):
    """As MATH comes: one object per file, over several lines, a folder for each subject."""
    for number in range(6):
        folder = tmp_path / "train" / ("algebra" if number % 2 else "geometry")
        folder.mkdir(parents=True, exist_ok=True)
        row = {"problem": f"Solve x={number}.", "level": "Level 1", "type": "Algebra", "solution": f"So $\\boxed{{{number}}}$."}
        (folder / f"{number}.json").write_text(json.dumps(row, indent=2))
    (tmp_path / "train" / "README.md").write_text("# about\n")
    problems = load_problems(Data(path=str(tmp_path / "train")))
    assert sorted(problem.answer for problem in everything(problems)) == list("012345")
    assert {file.format for file in problems.report.files} == {"math"}
    assert [path.rpartition("/")[2] for path in problems.report.ignored_files] == ["README.md"]
    assert any("README.md" in line for line in problems.report.lines())


def test_folders_and_globs_with_several_formats(tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:5], "lines")
    write(tmp_path / "b.parquet", VERL_ROWS[:5], "parquet")
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "c.jsonl", ROWS[5:9], "lines")
    write(tmp_path / "noname", ROWS[9:12], "array.gz")
    (tmp_path / "noname").rename(tmp_path / "d.gz")
    assert load_problems(Data(path=str(tmp_path))).report.num_kept == 13
    assert load_problems(Data(path=str(tmp_path / "*.[jp]*"))).report.num_kept == 10
    assert load_problems(Data(path=str(tmp_path / "**" / "a.jsonl"))).report.num_kept == 5
    reading = load_problems(Data(path=str(tmp_path / "a.jsonl"), heldout_path=str(tmp_path / "*.parquet")))
    assert len(reading.train) == len(reading.heldout) == 5 and {problem.origin for problem in reading.heldout} == {"math_dapo"}


def test_files_that_are_refused(tmp_path):
    import pickle

    cases = {
        "data.pkl": (pickle.dumps(ROWS), "unpickling can run code"),
        "data.arrow": (b"ARROW1\0\0", "to_parquet"),
        "cut.gz": (gzip.compress(b'{"question": "a?"}\n' * 99)[:-20], "damaged gzip"),
        "cut.json": (b'[{"question": "a?", "answer": "1"},\n {"question": ', "cut.json:2: not JSON"),
        "cut.parquet": (b"PAR1 and no more", "cut.parquet: "),
        "parquet.gz": (gzip.compress(b"PAR1"), "gunzip"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            load_problems(Data(path=str(tmp_path / name), skip_invalid=True))
        assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    for path, message in (("empty", "none of its 0 files"), ("*.nothing", "no file matches"), ("https://x/y.jsonl", "only local files")):
        with pytest.raises(ConfigError, match=message):
            load_problems(Data(path=str(tmp_path / path) if "://" not in path else path))


def test_parquet_without_pyarrow_is_one_line(tmp_path):
    path = write(tmp_path / "d.parquet", ROWS, "parquet")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from areal_hpc.config import Data; from areal_hpc.data.datasets import load_problems\n"
        f"load_problems(Data(path={path!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs the package pyarrow; pip install pyarrow" in run.stderr.splitlines()[-1]


def test_jsonlines_load_without_heavy_imports(tmp_path):
    path = write(tmp_path / "d.jsonl", ROWS, "lines")
    code = (
        "import sys; from areal_hpc.config import Data; from areal_hpc.data.datasets import load_problems\n"
        f"load_problems(Data(path={path!r}))\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'jinja2', 'tokenizers', 'mpi4py', 'pickle'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unicode_and_huge_rows(tmp_path):
    questions = ["¿Cuánto es 6×7?", "6 乘 7 等于多少？", "\u2028 separates no lines", "𝟞·𝟟 🧮", "x" * 5_000_000]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "42"}, ensure_ascii=False) + "\n" for q in questions), encoding="utf-8")
    problems = everything(load_problems(Data(path=str(path))))
    assert [problem.question for problem in problems] == questions
    assert score(problems[1], "42") == 1.0


# ---- rows that cannot be used


@pytest.mark.parametrize("kind", ["lines", "array", "parquet"])
def test_a_malformed_row_stops_with_file_row_and_reason(tmp_path, kind):
    rows = [*ROWS[:20], {"question": "bad?", "answer": None}, *ROWS[20:]]
    path = write(tmp_path / "d", rows, kind)
    where = f"{path}:21: " if kind == "lines" else f"{path}: row 20 .from 0.: "
    with pytest.raises(ConfigError, match=f"^{where}the answer must be text"):
        load_problems(Data(path=path))
    report = load_problems(Data(path=path, skip_invalid=True)).report
    assert report.num_read == 41 and report.num_kept == 40 and dict(report.invalid) == {"no answer": 1}
    assert "the answer must be text" in report.examples["no answer"]


def test_pickled_tests_stop_with_the_way_out(tmp_path):
    import base64
    import pickle
    import zlib

    tests = json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}])
    row = {"question_content": "Echo.", "public_test_cases": tests, "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(tests))).decode()}
    path = write(tmp_path / "d.jsonl", [row], "lines")
    with pytest.raises(ConfigError, match=r"d.jsonl:1: tests are packed with pickle .* convert it once"):
        load_problems(Data(path=path))
    path = write(tmp_path / "d.jsonl", [row | {"private_test_cases": tests, "question_content": f"Echo {i}."} for i in range(3)], "lines")
    assert load_problems(Data(path=path)).report.num_kept == 3


GOOD, BAD_JSON, NO_ANSWER, NO_QUESTION, NO_OBJECT = range(5)
KINDS = {BAD_JSON: "not JSON", NO_ANSWER: "no answer", NO_QUESTION: "no question", NO_OBJECT: "no object"}


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from([GOOD] * 4 + [*KINDS]), st.integers(0, 12)), min_size=4, max_size=60), limit=st.integers(3, 14))
def test_the_account_adds_up(tmp_path_factory, rows, limit):
    """read = kept + duplicates + over-long + invalid, and each number is what a plain count over the rows says."""
    texts = {
        BAD_JSON: lambda n: '{"question": ',
        NO_ANSWER: lambda n: json.dumps({"question": "x" * (n + 1)}),
        NO_QUESTION: lambda n: json.dumps({"answer": str(n)}),
        NO_OBJECT: str,
        GOOD: lambda n: json.dumps({"question": "x" * (n + 1), "answer": n}),
    }
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    path.write_text('{"question": "xxx", "answer": 2}\n' + "".join(texts[kind](n) + "\n" for kind, n in rows))
    distinct = {2} | {n for kind, n in rows if kind == GOOD}
    data = Data(path=str(path), skip_invalid=True, max_prompt_tokens=limit)
    try:
        problems = load_problems(data, lambda problem: len(problem.question) > limit)
    except ConfigError as error:
        assert len(distinct) < 2 or ("are longer" in str(error) and max(distinct) + 1 > limit)  # noqa: PT017
        return
    report = problems.report
    assert report.num_read == len(rows) + 1 == report.num_kept + report.num_duplicates + report.num_overlong + report.num_invalid
    assert dict(report.invalid) == {KINDS[kind]: count for kind in KINDS if (count := sum(kind == other for other, _ in rows))}
    assert report.num_kept == sum(n < limit for n in distinct) == len(problems.train) + len(problems.heldout)
    assert report.num_overlong == sum(n >= limit for n in distinct)
    full = load_problems(data)
    for side in ("train", "heldout"):  # what a grader finds, which knows no model
        for index, problem in enumerate(getattr(problems, side)):
            assert getattr(full, side)[problems.position(side, index)] == problem


def test_answers_that_contradict_each_other_are_counted(tmp_path):
    rows = [*ROWS, {"question": "what is 3 +  1?", "answer": "#### 5"}, {"question": "What is 4 + 1?", "answer": "again\n#### 5"}]
    report = load_problems(Data(path=write(tmp_path / "d", rows, "lines"))).report
    assert report.num_duplicates == 2 and report.num_conflicting == 1


def test_every_row_invalid_says_what_is_wrong(tmp_path):
    path = write(tmp_path / "d", [{"question": "a?"}, {"question": "b?"}], "lines")
    with pytest.raises(ConfigError, match="no problem in it; 2 x no answer"):
        load_problems(Data(path=path, skip_invalid=True))


def test_golds_that_the_grader_cannot_read_are_refused(tmp_path):
    rows = [{"prompt": f"{i}?", "solutions": ["\\boxed{?}", "\\boxed{7}"]} for i in range(3)]
    path = write(tmp_path / "d", rows, "lines")
    report = load_problems(Data(path=path)).report
    assert report.num_kept == 3 and sum(report.notes.values()) == 3
    path = write(tmp_path / "d", [*rows, {"prompt": "x", "solutions": ["\\boxed{?}"]}], "lines")
    with pytest.raises(ConfigError, match=r":4: the answer '\?' cannot be read: it has neither a digit nor a letter"):
        load_problems(Data(path=path))
    assert load_problems(Data(path=path, skip_invalid=True)).report.invalid == {"unreadable answer": 1}


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("\\frac{1}{2", "its braces do not match"),
        ("\\boxed{}", "neither our grammar nor math-verify can read it"),
        ("\\sum_{k=1}^{9^{9^9}} k", "its evaluation may not end"),
        ("42", None),
        ("\\int_0^1 x dx", None),
        ("A \\cap B", None),
        ("北京", None),
    ],
)
def test_what_a_reference_answer_may_be(gold, reason):
    assert check_gold(gold) == reason


def test_the_report_is_shown_and_stored(tmp_path):
    rows = [*ROWS, ROWS[0], {"question": "z?"}]
    report = load_problems(Data(path=write(tmp_path / "d", rows, "lines"), skip_invalid=True)).report
    first, *rest = report.lines()
    assert first == "42 problems read, 40 kept, 1 repeated, 1 invalid" and "1 x no answer; first: " in rest[0] and "gsm8k: 42 rows of " in rest[-1]
    stored = report.attributes()
    assert stored["num_read"] == 42 and json.loads(stored["invalid"]) == {"no answer": 1} and json.loads(stored["files"])[0][1:] == ["gsm8k", 42]


# ---- over-long prompts


def test_a_side_that_is_all_overlong_is_an_error(tmp_path):
    path, held = write(tmp_path / "d", ROWS, "lines"), write(tmp_path / "h", [{"question": "y" * 99, "answer": "1"}], "lines")
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens=50: the prompts of all 1 held-out problems are longer"):
        load_problems(Data(path=path, heldout_path=held, max_prompt_tokens=50), lambda problem: len(problem.question) > 50)


def test_sides_do_not_depend_on_what_is_overlong(tmp_path):
    data = Data(path=write(tmp_path / "d", ROWS, "lines"), heldout_fraction=0.4)
    full = load_problems(data)
    short = load_problems(data, lambda problem: problem.index % 3 == 0)
    assert short.train == tuple(problem for problem in full.train if problem.index % 3)
    assert short.heldout == tuple(problem for problem in full.heldout if problem.index % 3)
    assert short.fingerprint != full.fingerprint


# ---- several reference answers


def test_any_reference_answer_is_right():
    problem = Problem(0, "?", "B", "file", golds=("B", "7"))
    assert score(problem, "7.0") == score(problem, "B") == 1.0 and score(problem, "8") == score(problem, None) == 0.0


# ---- reasoning-gym: weights and options


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), size=st.integers(1, 400))
def test_every_prefix_has_the_tasks_in_their_shares(weights, size):
    turns = reasoning_tasks.turns(len(weights), weights, size)
    assert len(turns) == size
    for task, weight in enumerate(weights):
        assert abs(turns.count(task) - size * weight / sum(weights)) < len(weights)


def test_equal_weights_are_the_default():
    assert reasoning_tasks.turns(3, (1, 1, 1), 100) == reasoning_tasks.turns(3, (), 100)
    plain = load_problems(Data(tasks=("chain_sum", "gcd"), size=200))
    assert load_problems(Data(tasks=("chain_sum", "gcd"), size=200, task_weights=(2.0, 2.0))).fingerprint == plain.fingerprint


def test_weights_and_options_reach_the_problems():
    problems = everything(
        load_problems(Data(tasks=("gcd", "spell_backward"), size=400, task_weights=(3, 1), task_options=("gcd.min_value=50", "gcd.max_value=60")))
    )
    numbers = [int(word.strip(".,")) for p in problems if p.source == "gcd" for word in p.question.split() if word.strip(".,").isdigit()]
    assert numbers and min(numbers) >= 50 and max(numbers) <= 60
    assert sum(problem.source == "spell_backward" for problem in problems) == 100  # the words hardly repeat, the pairs of numbers do
    assert {problem.kind for problem in problems} == {"rg"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("gcd.max_valu=3",), "gcd has no option 'max_valu'; it has min_numbers, max_numbers, min_value, max_value"),
        (("gcd.max_value=many",), "expected int, such as 1000"),
        (("gcd.max_value=true",), "expected int"),
        (("gcd.max_value=0",), "gcd refuses gcd.max_value=0"),
        (("gcd.seed=3",), "use data.seed"),
        (("gcd.size=3",), "use data.size"),
    ],
)
def test_options_that_a_task_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        load_problems(Data(tasks=("gcd",), task_options=options))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(tasks=("gcd", "lcm"), task_weights=(1.0,)), "has 1 values for the 2 tasks"),
        (Data(tasks=("gcd", "lcm"), task_weights=(1.0, 0.0)), "must be finite and above zero"),
        (Data(tasks=("gcd",), task_options=("lcm.max_value=3",)), "not TASK.OPTION=VALUE with a task of data.tasks .gcd."),
        (Data(tasks=("gcd",), task_options=("gcd.max_value",)), "not TASK.OPTION=VALUE"),
        (Data(tasks=("gcd",), task_options=("gcd.=3",)), "not TASK.OPTION=VALUE"),
        (Data(tasks=("countdown",), task_weights=(1.0,)), "can be scored safely"),
    ],
)
def test_mistakes_that_need_no_data(data, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(data=data))


def test_the_tolerance_of_decimal_arithmetic_stays_its_scorers():
    with pytest.raises(ConfigError, match="tolerance"):
        load_problems(Data(tasks=("decimal_arithmetic",), task_options=("decimal_arithmetic.max_num_decimal_places=1",)))


def test_the_options_survive_yaml_and_command_line(tmp_path):
    options = ["--data.tasks", "gcd", "lcm", "--data.task-weights", "3", "1.5", "--data.task-options", "gcd.max_value=50", "--data.skip-invalid"]
    config = parse_options([*options, "--data.chat-template", "none", "--data.system-prompt", "Be brief."], Config(), "areal-hpc")
    assert config.data.task_weights == (3.0, 1.5) and config.data.task_options == ("gcd.max_value=50",)
    assert config.data.skip_invalid and config.data.chat_template == "none" and config.data.system_prompt == "Be brief."
    (tmp_path / "c.yaml").write_text(as_yaml(config))
    assert load_yaml(str(tmp_path / "c.yaml"), Config()) == config


def test_the_mixed_recipe_has_its_shares():
    config = RECIPES["mixed"]()
    check(config)
    problems = load_problems(Data(**{field: getattr(config.data, field) for field in ("tasks", "task_weights", "task_options", "max_digits")}, size=400))
    sources = [problem.source for problem in everything(problems)]
    assert set(sources) == set(config.data.tasks) and sources.count("chain_sum") > sources.count("gcd")


def test_folders_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", ROWS[:1], "lines")
    tables, ignored = files.find("data.path", str(tmp_path))
    assert [table.path.name for table in tables] == ["a.jsonl", "b.jsonl", "c.jsonl"] and not ignored
