import pytest

from areal_hpc.reward.extraction import after_thinking, boxed, gold_answer, marked, math_answer, stated


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{7}", "7"),
        ("\\boxed 7", "7"),
        ("\\fbox{$7$}", "$7$"),
        ("\\boxed{\\frac{1}{2}} and more", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{a} then \\boxed{b}", "b"),
        ("\\boxed{a}, \\boxed{b}", "a, b"),
        ("\\boxed{a} and \\boxed{b}.", "a, b"),
        ("$\\boxed{a}$, $\\boxed{b}$, and $\\boxed{c}$", "a, b, c"),
        ("x=\\boxed{2}, y=\\boxed{3}", "x=2, y=3"),
        ("x=\\boxed{2}\\text{ or }x=\\boxed{3}", "x=2, x=3"),
        ("\\boxed{a}, \\boxed{b} are both fine", "b"),
        ("\\boxed{a}, no, \\boxed{b}", "b"),
        ("\\boxed{a}. \\boxed{b}", "b"),
        ("\\boxed{a}, \\boxed{a}", "a"),
        ("\\boxed{1 \\boxed{2}}", "1 \\boxed{2}"),
        ("\\boxed{1 \\boxed{2}", "2"),
        ("\\boxed{1}, \\boxed{2", ""),
        ("\\boxed{}", ""),
        ("\\boxed{" + "1" * 5000 + "}", ""),
        ("no box", None),
        ("\\boxedword{1}", None),
    ],
)
def test_boxed(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 12.", "12"),
        ("The final answer is: $12$", "$12$"),
        ("**Answer:** 12\nBecause", "12"),
        ("Answer: (A)", "(A)"),
        ("the answer is 3.5.", "3.5"),
        ("The answer is 4, because 2+2=4.", "4"),
        ("The answer is 4. No, the answer is 5.", "5"),
        ("The correct option is **C**.", "C"),
        ("I have no answer", None),
        ("answer is", None),
        ("We answer islanders 5", None),
    ],
)
def test_stated(text, answer):
    assert stated(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a", ""),
        ("a", "a"),
        ("x" * 30_000 + "y", "x" * 19_999 + "y"),
    ],
)
def test_after_thinking(text, answer):
    assert after_thinking(text) == answer


def test_order_of_marks():
    assert math_answer("#### 1\nThe answer is 2. \\boxed{3}") == "3"
    assert math_answer("The answer is 2.\n#### 1") == "1"
    assert math_answer("The answer is 2.") == "2"
    assert math_answer("The answer is 2.", statement=False) is None
    assert math_answer("\\boxed{}, so the answer is 2.") is None  # an empty box is a box
    assert math_answer("\\boxed{\\boxed{4}}") == "4"
    assert math_answer("\\boxed{" * 3000) is None


def test_gold_answer():
    assert gold_answer("so \\boxed{4}") == "4"
    assert gold_answer("1+1=2\n#### 2") == "2"
    assert gold_answer(" \\frac{1}{2} ") == "\\frac{1}{2}"
    assert marked("#### 5\n#### 6") == "6"
