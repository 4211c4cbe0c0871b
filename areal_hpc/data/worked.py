r"""Worked solutions for the supervised warm start: one line per operation, the answer behind "#### ".

    43 + 12 - 5   ->  43+12=55\n55-5=50\n#### 50

The lines are as short as a small character model can learn from: no words, no spaces, and a product is split into the partial products of its second factor's digits.
With data.worked=python, arithmetic is left to the python environment: a turn that calls it, what it shows (read, never learned), and a turn with the answer.

    43 + 12 - 5   ->  <python>print(43 + 12 - 5)</python>   \n<output>\n50\n</output>\n   #### 50
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from areal_hpc.config import ConfigError
from areal_hpc.data.datasets import GOLD_MARKER, Problem
from areal_hpc.reward.environments import as_output

PYTHON_CHARACTERS = "print"
PYTHON_PHRASES = ("<python>", "</python>", "<output>", "</output>")
"""What a tokenizer must know, beside the problems' own characters, for solutions by the python environment; the tags are one token each."""


def worked_turns(problem: Problem, style: str) -> tuple[str, ...]:
    """The solution as texts of the model and of its environment, in turn. `style`: data.worked. Raises ConfigError as `worked_solution`, or for another task."""
    if style == "steps":
        return (worked_solution(problem),)
    if problem.source not in PYTHON_TASKS:
        raise ConfigError(
            f"data.worked=python: a problem of source '{problem.source}' is no expression that Python evaluates; use tasks among {', '.join(PYTHON_TASKS)}"
        )
    expression = problem.question.rpartition(":")[2].rstrip("= ").strip()
    return f"<python>print({expression})</python>", as_output(problem.answer), f"{GOLD_MARKER}{problem.answer}"


def worked_solution(problem: Problem) -> str:
    """Steps and answer. Raises ConfigError for a problem that nobody can work out step by step here."""
    if problem.solution:
        return problem.solution
    if problem.source not in _WORKERS:
        raise ConfigError(
            f"model.warmstart_steps: a problem of source '{problem.source}' has no worked solution; use tasks among {', '.join(WORKED_TASKS)}, "
            f"or a file whose answers end in '{GOLD_MARKER}ANSWER', or --model.path with --model.warmstart-steps 0"
        )
    steps, result = _WORKERS[problem.source](problem.question)
    return "\n".join([*steps, f"{GOLD_MARKER}{result}"])


def _signed(value: int) -> str:
    return f"+{value}" if value >= 0 else str(value)


def _chain_sum(question: str) -> tuple[list[str], int]:
    expression = question.rpartition(":")[2].rstrip("= ")
    first, *rest = expression.split()
    total = int(first)
    steps: list[str] = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before = total
        total = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{before}{sign}{term}={total}")
    return steps, total


def _products(question: str) -> tuple[list[str], int]:
    factors = [int(factor) for factor in question.partition(":")[2].partition(".")[0].split("*")]
    total = factors[0]
    steps: list[str] = []
    for factor in factors[1:]:
        total = _multiply(total, factor, steps)
    return steps, total


def _multiply(left: int, right: int, steps: list[str]) -> int:
    """left * right by the decimal places of `right`: 12*34 is 12*30, then 12*4, then their sum."""
    digits = str(abs(right))
    places = [int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"] or [0]
    total = 0
    for number, place in enumerate(places):
        part = -place if right < 0 else place
        steps.append(f"{left}*{part}={left * part}")
        if number:
            steps.append(f"{total}{_signed(left * part)}={total + left * part}")
        total += left * part
    return total


def _numbers(question: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", question.rpartition(":")[2])]


def _euclid(left: int, right: int, steps: list[str]) -> int:
    """Greatest common divisor by remainders, the larger number first."""
    left, right = max(left, right), min(left, right)
    while right:
        steps.append(f"{left}%{right}={left % right}")
        left, right = right, left % right
    return left


def _gcd(question: str) -> tuple[list[str], int]:
    first, *rest = _numbers(question)
    steps: list[str] = []
    for number in rest:
        first = _euclid(first, number, steps)
    return steps, first


def _lcm(question: str) -> tuple[list[str], int]:
    first, *rest = _numbers(question)
    steps: list[str] = []
    for number in rest:
        divisor = _euclid(first, number, steps)
        steps.append(f"{number}/{divisor}={number // divisor}")
        first = _multiply(first, number // divisor, steps)
    return steps, first


def _basic_arithmetic(question: str) -> tuple[list[str], int]:
    """Operations in the order in which Python evaluates them; "/" rounds down, as in the task."""
    expression = question.removeprefix("Calculate ").removesuffix(".").replace("/", "//")
    steps: list[str] = []
    return steps, _evaluate(ast.parse(expression, mode="eval").body, steps)


_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.FloorDiv: ("/", operator.floordiv),
}


def _evaluate(node: ast.expr, steps: list[str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(operand, steps)
            if not isinstance(operand, ast.Constant):  # the sign before a bracket is a step of its own
                steps.append(f"0-{value}={-value}")
            return -value
        case ast.BinOp(left=left_node, op=operation, right=right_node):
            left, right = _evaluate(left_node, steps), _evaluate(right_node, steps)
            symbol, compute = _OPERATIONS[type(operation)]
            result = compute(left, right)
            steps.append(f"{left}{symbol}{right}={result}")
            return result
    raise AssertionError(f"basic_arithmetic has no such expression: {ast.dump(node)}")


_WORKERS: dict[str, Callable[[str], tuple[list[str], int]]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "gcd": _gcd,
    "lcm": _lcm,
    "basic_arithmetic": _basic_arithmetic,
}

WORKED_TASKS = (*_WORKERS, "gsm_symbolic")
"""Tasks with worked solutions; gsm_symbolic brings its own."""
PYTHON_TASKS = ("chain_sum",)
"""Tasks whose question ends in an expression that Python reads as the task means it."""
