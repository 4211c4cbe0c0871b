"""Grading of mathematics: given cases, rules against false rewards, properties against exact arithmetic."""

import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.reward import math as math_grader
from areal_hpc.reward import math_expression, math_fallback, math_values
from areal_hpc.reward.math import MathGrader
from areal_hpc.reward.math_compare import Policy
from areal_hpc.reward.math_normalise import normalise
from areal_hpc.reward.verdict import Outcome
from tests.reward.math_files import rows

GRADER = MathGrader()


def status(gold, answer, grader=GRADER):
    return grader.grade(gold, f"Thus \\boxed{{{answer}}}.").status


def is_right(gold, answer, **policy):
    return status(gold, answer, MathGrader(Policy(**policy)) if policy else GRADER) is Outcome.RIGHT


# ---- rules, with values that stand in no file of cases


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("8\\text{ g}", "8\\text{ mg}"),
        ("8\\text{ m}", "8\\text{ m}^2"),
        ("6", "6 \\text{ cats and } 3 \\text{ dogs}"),
        ("\\$14", "€14"),
        ("6", "4=5=6"),
        ("6", "6=7"),
        ("6", "x=5=6"),
        ("1/201!", "1/203!"),
        ("5^{-60}", "5^{-61}"),
        ("10^{-300}", "0"),
        ("e^{-300}", "0"),
        ("412_6", "412_7"),
        ("412_6", "214_6"),
        ("\\sqrt{3+\\sqrt{3+\\sqrt{3+\\sqrt{3}}}}", "\\sqrt{3+\\sqrt{3+\\sqrt{3+\\sqrt{3.0000000000000002}}}}"),
        ("\\sqrt{7}", "\\frac{26457513110645906}{10000000000000000}"),
        ("6", "5,6"),
        ("6", "6 \\text{ or } 7"),
        ("6", "\\{5,6,7\\}"),
        ("6", "[5,7]"),
        ("6", "5<x<7"),
        ("6", "6\\pm1"),
        ("6", "\\text{six or seven}"),
        ("5,6", "6"),
        ("(5,6)", "(6,5)"),
        ("\\{5,6\\}", "(5,6)"),
        ("[5,6]", "(5,6)"),
        ("x=9", "2x-3=15"),
        ("x=9", "y=9"),
        ("z", "z=z"),
        ("\\text{Yes}", "\\text{Yes and no}"),
        ("\\text{decreasing}", "\\text{not decreasing}"),
        ("D", "\\text{C or D}"),
        ("D", "CD"),
        ("2\\pi", "6.28"),
        ("0.0000001", "0.0000004"),
        ("\\frac{2}{3}", "0.666666"),
        ("3\\%", "30\\%"),
        ("0.5", "0.5001"),
        ("\\infty", "-\\infty"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
        ("x^2-y^2", "(x-y)^2"),
        ("\\frac{1}{4}", "\\int_0^1 x^2\\,dx"),
        ("n\\equiv 2\\pmod 9", "n\\equiv 3\\pmod 9"),
    ],
)
def test_no_reward_for(gold, answer):
    assert status(gold, answer) in (Outcome.WRONG, Outcome.HOSTILE)
    assert status(gold, gold) is Outcome.RIGHT, "the reference answer itself"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There are 6 of them, I think.", Outcome.NO_ANSWER),
        ("<think>So \\boxed{6}.</think> I cannot tell.", Outcome.NO_ANSWER),
        ("<think>So \\boxed{6}.", Outcome.NO_ANSWER),
        ("First \\boxed{6}, then \\boxed{8", Outcome.NO_ANSWER),
        ("\\boxed{6}, but no: \\boxed{8}", Outcome.WRONG),
        ("\\boxed{6} or \\boxed{8}", Outcome.WRONG),
        ("\\boxed{8}. No, that counts two twice, so \\boxed{6}.", Outcome.RIGHT),
        ("\\boxed{8}, and after removing doubles \\boxed{6}", Outcome.RIGHT),
        ("<think>\\boxed{8}</think>\\boxed{6}", Outcome.RIGHT),
        ("#### 6", Outcome.RIGHT),
        ("Answer: 6", Outcome.RIGHT),
    ],
)
def test_what_counts_as_the_answer(text, expected):
    assert GRADER.grade("6", text).status is expected


def test_statements_can_be_left_out():
    assert MathGrader(statement=False).grade("6", "Answer: 6").status is Outcome.NO_ANSWER
    assert MathGrader(statement=False).grade("6", "#### 6").status is Outcome.RIGHT


def test_a_text_that_was_cut_has_no_answer():
    assert GRADER.grade("6", "so we get", truncated=True).status is Outcome.TRUNCATED
    assert GRADER.grade("6", "so \\boxed{6}", truncated=True).status is Outcome.RIGHT


@pytest.mark.parametrize("gold", ["", "  ", "\\frac{1}{", "}{", "???", "\\boxed{}", "=", "\\int"])
@pytest.mark.parametrize("answer", ["1", "", "???", "\\frac{1}{"])
def test_a_reference_that_cannot_be_read_is_never_rewarded(gold, answer):
    graded = GRADER.grade(gold, f"\\boxed{{{answer}}}")
    assert (graded.status, graded.reward) == (Outcome.GOLD_BAD, None)


def test_one_of_several_references_will_do():
    assert status(["7", "\\text{seven}"], "7") is Outcome.RIGHT
    assert status(["\\frac{", "7"], "7") is Outcome.RIGHT
    assert status(["\\frac{", "8"], "7") is Outcome.WRONG
    assert status(["\\frac{", ""], "7") is Outcome.GOLD_BAD
    assert status([], "7") is Outcome.GOLD_BAD


@pytest.mark.parametrize("gold", ["Ann has 3*4=<<3*4=12>>12 pens.\n#### 12", "It follows that $x=\\boxed{12}$.", "$12$", "12", "1{,}2 so \\boxed{12}"])
def test_references_as_data_sets_write_them(gold):
    assert status(gold, "12") is Outcome.RIGHT
    assert status(gold, "3") is Outcome.WRONG


@pytest.mark.parametrize(
    ("option", "gold", "answer"),
    [
        ("percent", "30", "30\\%"),
        ("units", "30", "30\\text{ cm}"),
        ("vectors", "(1,2,3)", "\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}"),
        ("intervals", "[1,2)", "1\\le x<2"),
        ("bases", "34_7", "34"),
    ],
)
def test_policies(option, gold, answer):
    assert is_right(gold, answer)
    assert not is_right(gold, answer, **{option: "strict"})
    assert is_right(gold, gold, **{option: "strict"})


@pytest.mark.parametrize(
    "answer",
    [
        "8^{8^{8^{8}}}",
        "((9!)!)!",
        "\\sum_{n=1}^{10^{12}} n^n",
        "2^{3000000000}",
        "\\gcd(10^{10^{10}},4)",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{123456}",
        "e^{e^{e^{9}}}",
        "4" * 400 + "!",
    ],
)
def test_hostile_answers_are_wrong_and_refused(answer):
    graded = GRADER.grade("5", f"\\boxed{{{answer}}}")
    assert (graded.status, graded.reward) == (Outcome.HOSTILE, 0.0)
    assert graded.reason


def test_a_hostile_looking_answer_may_still_be_right():
    assert status("9^{9^{9^{9}}}", "9^{9^{9^{9}}}") is Outcome.RIGHT


def test_long_answers_are_wrong():
    assert status("5", "1+" * 300 + "5") is Outcome.WRONG
    assert len(GRADER.grade("5", "\\boxed{" + "1" * 2000 + "}").extracted) == 512


def test_every_verdict_is_made_once():
    grader = MathGrader()
    for text in ("\\boxed{\\frac{6}{8}}", "so \\boxed{6/8}", "\\boxed{\\dfrac68}", "\\boxed{$\\frac{6}{8}$}"):
        assert grader.grade("\\frac34", text).status is Outcome.RIGHT
    assert (grader.counts["graded"], grader.counts["cache_hits"]) == (4, 2)


def test_most_answers_never_reach_math_verify():
    grader = MathGrader()
    for case in rows("math_more.jsonl"):
        if case["category"] != "hostile":
            grader.grade(case["gold"], case["answer"])
    assert grader.counts["fallback"] < 0.05 * grader.counts["graded"]


# ---- properties

integers = st.integers(-(10**9), 10**9)
fractions = st.fractions(max_denominator=10**4).filter(lambda value: abs(value) < 10**6)


def spellings(value):
    """Ways to write a fraction."""
    top, bottom = value.numerator, value.denominator
    found = [
        f"{top}/{bottom}",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"\\dfrac{{{3 * top}}}{{{3 * bottom}}}",
        f"-\\frac{{{-top}}}{{{bottom}}}",
        f"\\left(\\frac{{{top}}}{{{bottom}}}\\right)",
    ]
    if bottom == 1:
        found += [str(top), f"{top:,}", f"{top}.00", f"${top}$", f"{top:,}".replace(",", "{,}"), f"x={top}"]
    whole, rest = divmod(abs(value), 1)
    if whole and rest:
        found.append(f"{'-' if value < 0 else ''}{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}")
    if bottom in (2, 4, 5, 8, 10):
        found.append(str(float(value)))
    return found


@given(fractions | integers.map(Fraction), st.data())
def test_equal_numbers_are_right_however_they_are_written(value, data):
    gold, answer = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(value)))
    assert is_right(gold, answer)


@given(fractions | integers.map(Fraction), fractions | integers.map(Fraction), st.data())
def test_numbers_are_right_exactly_when_fractions_are_equal(one, other, data):
    assert is_right(data.draw(st.sampled_from(spellings(one))), data.draw(st.sampled_from(spellings(other)))) == (one == other)


@given(integers, st.sampled_from([-10, -1, 1, 10]) | st.integers(1, 10**6))
def test_no_reward_for_a_perturbed_number(value, change):
    assert not is_right(str(value), str(value + change))
    assert not is_right(f"\\frac{{{value}}}{{7}}", f"\\frac{{{value + change}}}{{7}}")
    assert not is_right(f"({value},1)", f"({value + change},1)")
    assert not is_right(f"{value}\\sqrt{{2}}", f"{value + change}\\sqrt{{2}}")


@given(st.integers(1, 10**6), st.integers(6, 12))
def test_a_decimal_stands_for_a_root_when_it_is_its_rounding(radicand, places):
    scaled = math.isqrt(4 * radicand * 100**places)  # floor of twice the root in units of the last place
    nearest = (scaled + 1) // 2
    whole, rest = divmod(nearest, 10**places)
    assert is_right(f"\\sqrt{{{radicand}}}", f"{whole}.{rest:0{places}d}")
    whole, rest = divmod(nearest + 2, 10**places)
    assert not is_right(f"\\sqrt{{{radicand}}}", f"{whole}.{rest:0{places}d}")


GOLDS = sorted({case["gold"] for case in rows("math_more.jsonl") if case["category"] not in ("gold", "hostile")})
golds = st.sampled_from(GOLDS)


@given(st.from_regex(math_grader._PLAIN, fullmatch=True, alphabet="0123456789-$,.%\\dtfrac{}/xB"))
def test_references_passed_without_reading_can_be_read(gold):
    assert math_grader._unreadable(math_grader._normalised_gold(gold)) is None


@pytest.mark.parametrize("gold", GOLDS)
def test_every_readable_reference_is_its_own_right_answer(gold):
    assert status(gold, gold) is Outcome.RIGHT


@given(golds | st.text(alphabet="0123456789x+-*/^_=(){}[]\\,.%$ aeπ²½−", max_size=40) | st.text(max_size=30))
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once


@given(st.text(alphabet="0123456789xy+-*/^_=<>(){}[]|!\\,.:;%$ ", max_size=60))
def test_no_text_upsets_the_grader(text):
    assert status("5", text) in set(Outcome)


def expressions(depth):
    """(text, function of x and y) of random polynomials, quotients and roots."""
    leaf = st.integers(1, 9).map(lambda k: (str(k), lambda x, y: Fraction(k))) | st.sampled_from([("x", lambda x, y: x), ("y", lambda x, y: y)])
    if depth == 0:
        return leaf
    inner = expressions(depth - 1)

    def combine(parts):
        operator, (a, f), (b, g) = parts
        if operator == "+":
            return f"{a}+{b}", lambda x, y: f(x, y) + g(x, y)
        if operator == "-":
            return f"{a}-({b})", lambda x, y: f(x, y) - g(x, y)
        if operator == "*":
            return f"({a})({b})", lambda x, y: f(x, y) * g(x, y)
        if operator == "/":
            return f"\\frac{{{a}}}{{({b})^2+1}}", lambda x, y: f(x, y) / (g(x, y) ** 2 + 1)
        return f"({a})^2", lambda x, y: f(x, y) ** 2

    return leaf | st.tuples(st.sampled_from("+-*/^"), inner, inner).map(combine)


@given(expressions(3), expressions(2))
def test_expressions_are_equal_exactly_when_their_values_are(one, other):
    """Against exact rational arithmetic at 40 points: two such expressions that agree there are the same."""
    (a, f), (b, g) = one, other
    points = [(Fraction(3 * k + 1, 7), Fraction(5 - 2 * k, 11)) for k in range(40)]
    same = all(f(x, y) == g(x, y) for x, y in points)
    assert is_right(a, b) == same
    assert is_right(a, f"{a}+{b}-({b})")


# ---- the reader of expressions, and what is behind it


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{10}-1", 1023),
        ("-2^{2}", -4),
        ("2^3^2", 512),
        ("\\frac{1}{2}+\\frac{1}{3}", Fraction(5, 6)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("\\binom{6}{2}", 15),
        ("6/2\\cdot3", 9),
        ("4!/(2!2!)", 6),
        ("17\\bmod5", 2),
        ("|3-8|", 5),
        ("\\lfloor-1.5\\rfloor", -2),
        ("\\sqrt[3]{27}", 3),
        ("8^{2/3}", 4),
        ("\\gcd(12,18)", 6),
        ("50\\%", Fraction(1, 2)),
        ("--3", 3),
    ],
)
def test_exact_values(text, value):
    assert math_values.exact(math_expression.read(normalise(text))) == value


@pytest.mark.parametrize("text", ["", "1 2", "(1", "1)", "+", "x^", "\\frac{1}", "\\foo", "2**", "|1", "1,2", "a=b"])
def test_unreadable(text):
    with pytest.raises(math_expression.Unreadable):
        math_expression.read(text)


@pytest.mark.parametrize("text", ["2^{100000}", "3000!", "\\binom{10000}{5000}", "10^{10^{10}}", "7^{7^{7^{7}}}"])
def test_too_big(text):
    with pytest.raises(math_values.TooBig):
        math_values.exact(math_expression.read(text))


def test_math_verify_is_asked_last_and_checked_again():
    math_fallback.warm_up()
    assert math_fallback.equivalent("\\frac{1}{3}", "\\int_{0}^{1}x^{2}dx")
    assert not math_fallback.equivalent("2^{-90}", "2^{-91}")  # it says these are equal
    assert not math_fallback.is_readable("\\int")
    assert not math_fallback.is_hostile("\\int_{0}^{\\infty}e^{-x^{2}}dx")


@pytest.mark.slow
def test_with_gmpy2_present(tmp_path):
    """gmpy2 keeps alarms from firing, so sympy must not use it even where it is installed."""
    found = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "gmpy2"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"gmpy2 cannot be installed here: {found.stderr.strip()[-200:]}")
    code = (
        "import gmpy2\n"
        "from areal_hpc.reward.offline import Row, grade_rows\nfrom areal_hpc.config import Reward\n"
        "answers = ['5', '\\\\binom{10^9}{5\\\\cdot10^8}', '(10^{9})!', '\\\\sum_{n=1}^{9999} n^{n}', '\\\\int_0^1 15x^2dx']\n"
        "rows = [Row(k, 'math', ['5'], f'\\\\boxed{{{answer}}}') for k, answer in enumerate(answers)]\n"
        "print([result['status'] for result in grade_rows(rows, Reward(num_graders=1, math_cpu_s=1.0))])"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert ran.stdout.strip() == "['right', 'hostile', 'hostile', 'timeout', 'right']", ran.stderr
