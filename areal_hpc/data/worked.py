r"""Worked solutions for the supervised warm start: one line per operation, the answer behind "#### ".

    43 + 12 - 5   ->  43+12=55\n55-5=50\n#### 50

The lines are as short as a small character model can learn from: no words, no spaces, and a product is split into the partial products of its second factor's digits.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from areal_hpc.config import ConfigError
from areal_hpc.data.datasets import GOLD_MARKER, Problem


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
