"""Sets of real numbers in one variable: intervals, unions and inequalities in one shape."""

from __future__ import annotations

import functools
import re

from areal_hpc.reward.math_forms import Form, form

_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:theta|alpha|beta|gamma|lambda|mu|phi|sigma|omega|Delta|angle))'*(?:_\{[^{}]*\})?(?:\^\{-1\})?(?:\((?:[A-Za-z](?:,[A-Za-z])*|\d+)\))?"
    r"|\\text\{[^{}]*\}|\([A-Za-z](?:,[A-Za-z])+\)|\|?[A-Z]{2,3}\|?|\\(?:angle|overline|triangle)[ {]?[A-Z]{1,3}\}?|[A-Za-z]{3,}(?: [A-Za-z]+)*"
)


def is_name(text: str) -> bool:
    """x, x_1, f(x), f(3), (x,y), AB, Area: something that is given a value."""
    return bool(_NAME.fullmatch(text)) and text not in ("e", "i")


def may_be_region(found: Form, text: str) -> bool:
    if found.kind == "union" or (found.kind == "tuple" and len(found.parts) == 2 and found.mark != "<>"):
        return True
    if found.kind == "relation":
        return bool(set(found.mark) & set("<>lgn"))
    return found.kind == "list" and any(operator in text for operator in ("<", ">", "\\le", "\\ge"))


Piece = tuple[str, str, str]


@functools.lru_cache(maxsize=2048)
def region(text: str) -> tuple[str, tuple[Piece, ...]] | None:
    """(variable or empty, pieces (low, high, brackets)) of an interval, a union, or inequalities of one variable; None for others."""
    found = form(text)
    if found.kind == "union":
        parts = [region(part) for part in found.parts]
    elif found.kind == "list":
        conjunction = bool(re.search(r"\\text\{and\}|(?<![A-Za-z])and(?![A-Za-z])|\\land", text))
        parts = [region(part) for part in found.parts]
        if conjunction and len(parts) == 2 and all(parts):
            return _intersection([part for part in parts if part])
    elif found.kind == "tuple" and len(found.parts) == 2 and found.mark != "<>":
        return "", ((_end(found.parts[0]), _end(found.parts[1]), found.mark),)
    elif found.kind == "relation":
        return _inequality(found)
    else:
        return None
    if not parts or not all(parts):
        return None
    names = {part[0] for part in parts if part}
    if len(names) > 1:
        return None
    return names.pop(), tuple(piece for part in parts if part for piece in part[1])


def _end(text: str) -> str:
    return "\\infty" if text == "+\\infty" else text


def _intersection(parts: list[tuple[str, tuple[Piece, ...]]]) -> tuple[str, tuple[Piece, ...]] | None:
    """Of two rays in opposite directions."""
    (name, first), (other, second) = parts
    if name != other or len(first) != 1 or len(second) != 1:
        return None
    a, b = first[0], second[0]
    if a[0] == "-\\infty":
        a, b = b, a
    if a[1] != "\\infty" or b[0] != "-\\infty":
        return None
    return name, ((a[0], b[1], a[2][0] + b[2][1]),)


def _inequality(found: Form) -> tuple[str, tuple[Piece, ...]] | None:
    sides, operators = list(found.parts), found.mark
    flip = {"<": ">", ">": "<", "l": "g", "g": "l"}
    if set(operators) <= set(">g"):
        sides, operators = sides[::-1], "".join(flip[operator] for operator in reversed(operators))
    if operators == "n" and is_name(sides[0]):
        return sides[0], (("-\\infty", sides[1], "()"), (sides[1], "\\infty", "()"))
    if not set(operators) <= set("<l"):
        return None
    if len(sides) == 3 and is_name(sides[1]):
        return sides[1], ((sides[0], sides[2], ("[" if operators[0] == "l" else "(") + ("]" if operators[1] == "l" else ")")),)
    if len(sides) != 2:
        return None
    if is_name(sides[0]) and not is_name(sides[1]):
        return sides[0], (("-\\infty", sides[1], "(" + ("]" if operators == "l" else ")")),)
    if is_name(sides[1]) and not is_name(sides[0]):
        return sides[1], ((sides[0], "\\infty", ("[" if operators == "l" else "(") + ")"),)
    return None
