"""HumanEval-style tests, `def check(candidate): assert candidate(2, 3) == 5 ...`, taken apart so that expected values stay outside of the program's process.

A test that is nothing but calls with literals and literal results becomes a list of calls (`split`). Any other runs as it is, in a process of its own in which
`candidate` is a call into the program's process (`program_host.check`). There Python's `==` compares the results, so that True passes for 1: lower trust, and said so.
"""

from __future__ import annotations

import ast
from typing import Any

Case = tuple[tuple[Any, ...], Any]
"""Arguments and the expected value."""


def split(test: str) -> tuple[Case, ...] | None:
    """The calls of a `check(candidate)` and what each must return; None where it is more than that. Raises ValueError when it is no such function."""
    check = _check_function(test)
    cases = []
    for statement in check.body:
        if _says_nothing(statement):
            continue
        case = _case(statement, check.args.args[0].arg)
        if case is None:
            return None
        cases.append(case)
    if not cases:
        raise ValueError("check(candidate) asserts nothing")
    return tuple(cases)


def _check_function(test: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(test)
    except SyntaxError as error:
        raise ValueError(f"the test is not Python: {error.msg}") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1]
    if not found:
        raise ValueError("the test defines no check(candidate)")
    return found[-1]


def _says_nothing(statement: ast.stmt) -> bool:
    """A docstring, `pass`, or an assertion of a literal (`assert True, "..."`)."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _case(statement: ast.stmt, candidate: str) -> Case | None:
    """`assert candidate(...) == value`, or the other way round, or `is`. `assert candidate(...)` alone says too little about the value."""
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare) or len(statement.test.ops) != 1:
        return None
    left, right, operator = statement.test.left, statement.test.comparators[0], statement.test.ops[0]
    if not isinstance(operator, (ast.Eq, ast.Is)):
        return None
    call, value = (left, right) if _is_call(left, candidate) else (right, left)
    if not isinstance(call, ast.Call) or not _is_call(call, candidate) or call.keywords:
        return None
    try:
        return tuple(_literal(argument) for argument in call.args), _literal(value)
    except ValueError:
        return None


def _is_call(node: ast.expr, candidate: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == candidate


def _literal(node: ast.expr) -> Any:
    """Raises ValueError for anything but a literal."""
    try:
        return ast.literal_eval(node)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error
