"""Worked solutions: every line is true, and the marked answer is right by the task's own scorer."""

import re

import pytest

from areal_hpc.config import ConfigError, Data
from areal_hpc.data.datasets import Problem, load_problems, score
from areal_hpc.data.worked import WORKED_TASKS, worked_solution
from areal_hpc.reward.answers import extract


def solved(task, **options):
    problems = load_problems(Data(tasks=(task,), size=700, **options))
    return [(problem, worked_solution(problem)) for problem in [*problems.train, *problems.heldout]]


@pytest.mark.parametrize("task", WORKED_TASKS)
def test_every_worked_solution_is_right(task):
    pairs = solved(task)
    assert len(pairs) >= 500
    for problem, solution in pairs:
        assert score(problem, extract(solution)) == 1.0, (problem, solution)


@pytest.mark.parametrize("task", [task for task in WORKED_TASKS if task != "gsm_symbolic"])
def test_every_line_is_a_true_equation(task):
    for problem, solution in solved(task, max_terms=4):
        *steps, marked = solution.split("\n")
        assert re.fullmatch(r"#### -?\d+", marked)
        for step in steps:
            left, right = step.split("=")
            assert re.fullmatch(r"-?\d+[-+*/%]-?\d+", left)
            assert eval(left.replace("/", "//")) == int(right), (problem, step)
        assert not steps or steps[-1].endswith(f"={marked[5:]}") or task in ("gcd", "lcm")


def test_examples():
    def solution(task, question):
        return worked_solution(Problem(0, question, "", task))

    assert solution("chain_sum", "State the final answer to the following arithmetic problem: 43 + 12 - 5 =") == "43+12=55\n55-5=50\n#### 50"
    assert solution("chain_sum", "State the final answer to the following arithmetic problem: 4 - 11 =") == "4-11=-7\n#### -7"
    assert solution("gcd", "Find the Greatest Common Divisor (GCD) of these numbers: 48, 36. Give only the GCD as your final answer.").startswith(
        "48%36=12\n36%12=0\n"
    )
    assert solution("products", "Solve the following multiplication: 12 * 34. Give ...") == "12*30=360\n12*4=48\n360+48=408\n#### 408"
    assert solution("products", "Solve the following multiplication: 12 * 0. Give ...") == "12*0=0\n#### 0"
    assert worked_solution(Problem(0, "?", "4", "file", "2+2=4\n#### 4")) == "2+2=4\n#### 4"


def test_a_task_without_worked_solutions_names_those_that_have_them():
    for source in ("count_bits", "file"):
        with pytest.raises(
            ConfigError, match=f"source '{source}' has no worked solution.*chain_sum, products, gcd, lcm, basic_arithmetic, gsm_symbolic"
        ) as caught:
            worked_solution(Problem(0, "?", "4", source))
        assert "\n" not in str(caught.value)
