"""When two mathematical answers are the same: structures part by part, expressions by value.

Rules that follow from taste rather than from mathematics are options (`Policy`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal_hpc.reward import math_values
from areal_hpc.reward.math_expression import Node, Unreadable, number, read, variables
from areal_hpc.reward.math_forms import Form, cut, form
from areal_hpc.reward.math_regions import is_name, may_be_region, region
from areal_hpc.reward.math_words import plain_words, same_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices on which reasonable graders differ."""

    percent: Literal["lenient", "strict"] = "lenient"
    """lenient: 25% is right for 25 and for 0.25 (and the reverse, as long as one side has the sign); strict: 25% is 0.25 and nothing else."""
    units: Literal["lenient", "strict"] = "lenient"
    """lenient: a unit may be missing on one side, two different ones are wrong; strict: both sides have the same one or none."""
    vectors: Literal["lenient", "strict"] = "lenient"
    """lenient: a column, a row, (1, 2) and <1, 2> are one vector; strict: the notation counts."""
    intervals: Literal["lenient", "strict"] = "lenient"
    """lenient: an interval may be written as an inequality and the reverse; strict: the notation counts."""
    bases: Literal["lenient", "strict"] = "lenient"
    """lenient: the base may be missing in the answer; strict: it may not."""


def same(gold: str, answer: str, policy: Policy, depth: int = 0) -> bool | None:
    """Whether two normalised texts say the same; None when one of them cannot be read here. Raises math_expression.TooBig."""
    if gold == answer:
        return True
    if depth > 6:
        return False
    return _Comparison(policy, depth).forms(form(gold), form(answer), gold, answer)


class _Comparison:
    def __init__(self, policy: Policy, depth: int) -> None:
        self.policy = policy
        self.depth = depth

    def texts(self, gold: str, answer: str) -> bool | None:
        return same(gold, answer, self.policy, self.depth + 1)

    def forms(self, gold: Form, answer: Form, gold_text: str, answer_text: str) -> bool | None:
        kinds = (gold.kind, answer.kind)
        if "words" in kinds:
            return self.words(gold_text, answer_text)
        if "unknown" in kinds:
            return None
        regions = self.regions(gold_text, answer_text, gold, answer)
        if regions is not None:
            return regions
        if "relation" in kinds:
            return self.relations(gold, answer, gold_text, answer_text)
        if kinds[0] in ("base", "clock") or kinds[1] in ("base", "clock"):
            return self.notations(gold, answer)
        if kinds[0] == kinds[1] == "infinity":
            return gold.mark == answer.mark
        if {"matrix", "tuple"} & set(kinds) and set(kinds) <= {"matrix", "tuple", "list", "set"}:
            return self.vectors(gold, answer)
        if set(kinds) <= {"list", "set"}:
            if any(form(part).kind == "dots" for part in gold.parts):  # a sequence
                return self.ordered(gold.parts, answer.parts)
            return self.unordered(gold.parts, answer.parts)
        if kinds == ("congruence", "congruence"):
            return self.congruences(gold, answer)
        if kinds == ("cases", "cases"):
            return self.unordered(gold.parts, answer.parts, rows=True)
        if set(kinds) <= {"quantity", "expression"}:
            return self.quantities(gold, answer)
        return False

    def words(self, gold: str, answer: str) -> bool:
        if same_words(gold, answer):
            return True
        empty, none = form("\\emptyset"), ["no", "solution"]
        return (form(gold) == empty and plain_words(answer) == none) or (form(answer) == empty and plain_words(gold) == none)

    # -- values

    def quantities(self, gold: Form, answer: Form) -> bool:
        assert gold.node is not None and answer.node is not None
        a, b = gold.node, answer.node
        if "%" in (gold.mark, answer.mark):
            return self.percents(gold, answer)
        if gold.mark == answer.mark:
            return math_values.equal(a, b)
        if gold.mark and answer.mark:
            return False
        if self.policy.units == "strict":
            return False
        if "degree" in (gold.mark, answer.mark):
            plain, degrees = (b, a) if gold.mark == "degree" else (a, b)
            radians = Node("/", (Node("*", (degrees, Node("constant", name="pi"))), number(180)))
            if math_values.equal(radians, plain):
                return True
        return math_values.equal(a, b)

    def percents(self, gold: Form, answer: Form) -> bool:
        assert gold.node is not None and answer.node is not None
        hundredth = [Node("/", (side.node, number(100))) if side.mark == "%" and side.node else side.node for side in (gold, answer)]
        if gold.mark == answer.mark:
            return math_values.equal(gold.node, answer.node)
        if gold.mark not in ("", "%") or answer.mark not in ("", "%"):
            return False
        assert hundredth[0] is not None and hundredth[1] is not None
        if math_values.equal(hundredth[0], hundredth[1]):
            return True
        return self.policy.percent == "lenient" and math_values.equal(gold.node, answer.node)

    def notations(self, gold: Form, answer: Form) -> bool:
        """Numbers in a base; clock times and ratios."""
        if gold.kind == answer.kind == "base":
            return gold.parts == answer.parts and gold.mark == answer.mark
        if gold.kind == "base":
            return self.policy.bases == "lenient" and answer.kind == "expression" and answer.parts[0].lower() == gold.parts[0]
        if gold.kind == answer.kind == "clock":
            if gold.parts == answer.parts:
                return not (gold.mark and answer.mark) or gold.mark == answer.mark
            is_time = (len(gold.parts) == 2 and gold.width == 2) or gold.mark or answer.mark or len(gold.parts) != 2 or len(answer.parts) != 2
            return not is_time and int(gold.parts[0]) * int(answer.parts[1]) == int(gold.parts[1]) * int(answer.parts[0])
        ratio, other = (gold, answer) if gold.kind == "clock" else (answer, gold)
        if ratio.kind != "clock" or len(ratio.parts) != 2 or ratio.width == 2 or ratio.mark or other.kind != "expression" or ratio.parts[1] == "0":
            return False
        return bool(other.node and math_values.equal(read(f"\\frac{{{ratio.parts[0]}}}{{{ratio.parts[1]}}}"), other.node))

    def congruences(self, gold: Form, answer: Form) -> bool | None:
        names_differ = gold.parts[0] and answer.parts[0] and gold.parts[0] != answer.parts[0]
        if names_differ or gold.mark != answer.mark:
            return False
        if gold.mark.isdigit() and int(gold.mark):
            try:
                difference = math_values.exact(read(f"({gold.parts[1]})-({answer.parts[1]})"))
            except (ArithmeticError, Unreadable):
                return False
            return difference % int(gold.mark) == 0
        return self.texts(gold.parts[1], answer.parts[1])

    # -- collections

    def unordered(self, gold: Sequence[str], answer: Sequence[str], rows: bool = False) -> bool | None:
        """A matching of all elements."""
        if len(gold) != len(answer) or len(gold) > 64:
            return False
        left = list(answer)
        unsure = False
        for expected in gold:
            for position, found in enumerate(left):
                verdict = self.rows(expected, found) if rows else self.texts(expected, found)
                unsure |= verdict is None
                if verdict:
                    del left[position]
                    break
            else:
                return None if unsure else False
        return True

    def ordered(self, gold: Sequence[str], answer: Sequence[str]) -> bool | None:
        if len(gold) != len(answer):
            return False
        verdicts = [self.texts(expected, found) for expected, found in zip(gold, answer, strict=True)]
        return None if None in verdicts and False not in verdicts else all(verdicts)

    def rows(self, gold: str, answer: str) -> bool | None:
        """Of a case distinction: value & condition."""
        return self.ordered(gold.split("&"), answer.split("&"))

    def vectors(self, gold: Form, answer: Form) -> bool | None:
        kinds = (gold.kind, answer.kind)
        if kinds == ("matrix", "matrix") and gold.width == answer.width:
            return self.ordered(gold.parts, answer.parts)
        if kinds == ("tuple", "tuple"):
            round_marks = ("()", "<>") if len(gold.parts) == 2 or self.policy.vectors == "strict" else ("()", "<>", "[]")
            alike = gold.mark == answer.mark or (self.policy.vectors == "lenient" and {gold.mark, answer.mark} <= set(round_marks))
            return self.ordered(gold.parts, answer.parts) if alike else False
        if "set" in kinds:
            return False
        if kinds == ("tuple", "list"):
            return self.ordered(gold.parts, self.assigned_values(answer.parts))
        if kinds == ("list", "tuple"):
            return self.ordered(self.assigned_values(gold.parts), answer.parts) if answer.mark in ("()", "<>") else False
        if self.policy.vectors == "strict" or "list" in kinds:
            return False
        flat = all(form_.kind != "matrix" or form_.width == 1 or form_.width == len(form_.parts) for form_ in (gold, answer))
        return self.ordered(gold.parts, answer.parts) if flat and "[)" not in (gold.mark, answer.mark) else False

    @staticmethod
    def assigned_values(parts: Sequence[str]) -> Sequence[str]:
        """x=4, y=-3 as 4, -3, in the order of the names."""
        sides = [cut(part, ("=",))[0] for part in parts]
        if all(len(side) == 2 for side in sides) and len({side[0] for side in sides}) == len(sides):
            return [value for _, value in sorted(sides)]
        return parts

    # -- relations

    def relations(self, gold: Form, answer: Form, gold_text: str, answer_text: str) -> bool | None:
        if gold.kind != "relation":
            value = self.last_value(answer)
            if value is None:
                return False
            verdict = self.texts(gold_text, value)
            return verdict if verdict or answer.mark[-1] != "a" else self.texts(gold_text, answer.parts[-1])  # pi = 3.14, roughly
        if answer.kind != "relation":
            value = self.last_value(gold)
            return False if value is None else self.texts(value, answer_text)
        if len(gold.mark) == len(answer.mark) == 1 and gold.mark not in "a" and answer.mark not in "a":
            return self.single_relations(gold, answer)
        if gold.mark.strip("=a") or answer.mark.strip("=a"):
            return self.ordered(gold.parts, answer.parts) if gold.mark == answer.mark else False
        names = [side.parts[0] if is_name(side.parts[0]) else "" for side in (gold, answer)]
        values = [self.last_value(side) for side in (gold, answer)]
        if None in values or (all(names) and names[0] != names[1]):
            return False
        return self.texts(values[0] or "", values[1] or "")

    def last_value(self, relation: Form) -> str | None:
        """What x = ... = v says x is: v. None if it is no such chain, or its sides differ from each other."""
        if relation.kind != "relation" or relation.mark.strip("=a"):
            return None
        sides = list(relation.parts)
        if is_name(sides[0]):
            if any(sides[0] in variables(read_or_zero(side)) for side in sides[1:]):
                return None  # x = x says nothing
            sides = sides[1:]
        elif len(sides) == 2 and is_name(sides[1]) and relation.mark == "=":
            sides = sides[:1]
        operators = relation.mark[len(relation.parts) - len(sides) :] if len(sides) < len(relation.parts) else relation.mark
        for operator, (left, right) in zip(operators, itertools.pairwise(sides), strict=False):
            if operator == "=" and not self.texts(left, right):
                return None
            if operator == "a" and not _is_near(left, right):
                return None
        exact = [side for position, side in enumerate(sides) if position == 0 or operators[position - 1 : position] != "a"]
        return exact[-1] if exact else sides[-1]

    def single_relations(self, gold: Form, answer: Form) -> bool | None:
        """Two equations or two inequalities."""
        if gold.mark == answer.mark and self.ordered(gold.parts, answer.parts):
            return True
        flipped = {"<": ">", ">": "<", "l": "g", "g": "l"}
        both_named = [next((k for k in (0, 1) if is_name(side.parts[k])), None) for side in (gold, answer)]
        k, m = both_named
        if gold.mark == answer.mark == "=" and k is not None and m is not None:
            if gold.parts[k] != answer.parts[m]:
                names_other = [variables(node) if (node := form(side.parts[1 - j]).node) else frozenset() for side, j in ((gold, k), (answer, m))]
                if not names_other[0] or not names_other[1]:
                    return False
            else:
                return self.texts(gold.parts[1 - k], answer.parts[1 - m])
        try:
            a, b = (read(f"{_grouped(side.parts[0])}-{_grouped(side.parts[1])}") for side in (gold, answer))
        except Unreadable:
            return None
        if gold.mark == "=" and k is not None and not variables(read_or_zero(gold.parts[1 - k])):
            return False  # the value of a variable is asked for, and the answer is an equation for it
        if not variables(a) or variables(a) != variables(b):
            return False
        sign = math_values.proportional(a, b)
        if gold.mark in "=n" or answer.mark in "=n":
            return gold.mark == answer.mark and sign != 0
        return sign != 0 and answer.mark == (gold.mark if sign > 0 else flipped[gold.mark])

    # -- sets of real numbers

    def regions(self, gold_text: str, answer_text: str, gold: Form, answer: Form) -> bool | None:
        """Compares intervals, unions and inequalities of one variable; None when these are none."""
        if not (may_be_region(gold, gold_text) and may_be_region(answer, answer_text)):
            return None
        if gold.kind == answer.kind == "tuple" and gold.mark == answer.mark:
            return None  # pair or open interval: element by element
        if self.policy.intervals == "strict" and (("relation" in (gold.kind, answer.kind)) and gold.kind != answer.kind):
            return False
        a, b = region(gold_text), region(answer_text)
        if a is None or b is None:
            return None
        if a[0] and b[0] and a[0] != b[0]:
            return False
        pieces = list(b[1])
        for low, high, brackets in a[1]:
            match = next((p for p in pieces if p[2] == brackets and self.texts(low, p[0]) and self.texts(high, p[1])), None)
            if match is None:
                return False
            pieces.remove(match)
        return not pieces


def read_or_zero(text: str) -> Node:
    try:
        return read(text)
    except Unreadable:
        return number(0)


def _grouped(text: str) -> str:
    return f"({text})"


def _is_near(left: str, right: str) -> bool:
    """Equal to 1 %: what an "approximately" must at least be."""
    try:
        a, b = read(left), read(right)
    except Unreadable:
        return False
    if variables(a) | variables(b):
        return False
    low = math_values.approximate(a)
    high = math_values.approximate(b)
    return low is not None and high is not None and abs(low - high) <= 0.01 * max(abs(low), abs(high))
