"""Expressions compared by value. No symbolic algebra, so nothing here can run away.

    exact(node) -> Fraction         raises Inexact (roots, pi, variables); TooBig
    equal(gold, answer) -> bool     raises TooBig when a value would not fit in MAX_BITS

Equality is decided on rationals where both sides are rational. Otherwise both sides are evaluated at fixed points that stand for the variables, first to 60 digits and,
if they agree, to 180: two different closed forms of at most a few hundred characters do not agree that far. A function that is complex at a real point (a logarithm of a
negative number) is only compared where the reference is real.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from fractions import Fraction
from typing import Any

from areal_hpc.reward.math_expression import Node, Unreadable, variables

MAX_BITS = 1 << 16
"""Size of a number that is still computed."""
MAX_FACTORIAL = 2500
MIN_ROUNDED_PLACES = 6
"""Decimals that a rounded answer must have to stand for an irrational or long value."""
MIN_ROUNDED_DIGITS = 4
"""... and significant digits: 0.000001 stands for nothing."""


class Inexact(ArithmeticError):  # noqa: N818
    """No rational value."""


class TooBig(OverflowError):  # noqa: N818
    """A value that nobody should compute."""


# ---- rational values


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooBig
    return value


def _integer(value: Fraction) -> int:
    if value.denominator != 1:
        raise Inexact
    return value.numerator


def exact(node: Node) -> Fraction:
    """The rational value. Raises Inexact without one, TooBig, ZeroDivisionError."""
    if node.op == "number":
        return node.value
    if node.op in ("constant", "variable"):
        raise Inexact
    return _checked(_apply_exact(node.op, [exact(part) for part in node.args]))


def _apply_exact(op: str, values: list[Fraction]) -> Fraction:
    first = values[0]
    match op:
        case "+":
            return sum(values, Fraction(0))
        case "*":
            return functools.reduce(lambda a, b: _checked(a * b), values)
        case "/":
            return first / values[1]
        case "neg":
            return -first
        case "^":
            return _exact_power(first, values[1])
        case "root":
            return _exact_root(first, _integer(values[1]))
        case "factorial":
            count = _integer(first)
            if count > MAX_FACTORIAL:
                raise TooBig
            if count < 0:
                raise Inexact
            return Fraction(math.factorial(count))
        case "binom":
            top, bottom = _integer(first), _integer(values[1])
            if top > MAX_FACTORIAL:
                raise TooBig
            if min(top, bottom) < 0:
                raise Inexact
            return Fraction(math.comb(top, bottom))
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
        case "mod":
            return first % values[1]
        case "gcd":
            return Fraction(math.gcd(*map(_integer, values)))
        case "lcm":
            return Fraction(math.lcm(*map(_integer, values)))
        case "max":
            return max(values)
        case "min":
            return min(values)
        case _:
            raise Inexact


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator > 64 or abs(exponent.numerator) > 64:
            raise Inexact
        base, exponent = _exact_root(base, exponent.denominator), Fraction(exponent.numerator)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base in (0, 1, -1):
        if abs(exponent.numerator) > MAX_BITS:
            exponent = Fraction(exponent.numerator % 2 + 2)
    elif bits * abs(exponent.numerator) > MAX_BITS:
        raise TooBig
    return Fraction(base ** int(exponent))


def _exact_root(value: Fraction, degree: int) -> Fraction:
    if value < 0 or not 0 < degree <= 64:
        raise Inexact
    parts = [_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int:
    if degree == 2:
        root = math.isqrt(value)
    else:
        root = round(value ** (1 / degree)) if value.bit_length() < 1000 else 0
    if root**degree != value:
        raise Inexact
    return root


# ---- real and complex values

_POINTS = (("0.8", "1.9"), ("1.7", "3.3"), ("2.9", "0.6"), ("-1.3", "0.7"), ("-2.6", "-0.4"))
"""Ranges that the variables take their values from, in each trial: all positive, then negative ones too."""
_NUM_POSITIVE = 3


@functools.cache
def _contexts() -> Any:
    """mpmath contexts of the two precisions. Imported here: most answers are rational."""
    import mpmath

    low, high = mpmath.MPContext(), mpmath.MPContext()
    low.dps, high.dps = 60, 180
    return low, high


def _point(name: str, trial: int) -> Fraction:
    """A fixed number for a variable; whole for none of them, so that nothing holds by chance."""
    low, high = (Fraction(bound) for bound in _POINTS[trial])
    return low + (high - low) * Fraction(zlib.crc32(f"{name} {trial}".encode()) + 1, 2**32 + 3)


def _evaluate(node: Node, context: Any, trial: int, log_base: int) -> Any:
    op = node.op
    if op == "number":
        return context.mpf(node.value.numerator) / node.value.denominator
    if op == "constant":
        return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[node.name]
    if op == "variable":
        point = _point(node.name, trial)
        return context.mpf(point.numerator) / point.denominator
    values = [_evaluate(part, context, trial, log_base) for part in node.args]
    first = values[0]
    if context.isinf(first) or context.isnan(first):
        raise ZeroDivisionError
    if op == "+":
        return functools.reduce(operator.add, values)
    if op == "*":
        return functools.reduce(operator.mul, values)
    if op == "/":
        return first / values[1]
    if op == "neg":
        return -first
    if op == "^":
        return _power(context, first, values[1])
    if op == "root":
        return _root(context, first, values[1])
    if op == "log":
        return context.log(first, values[1]) if len(values) > 1 else context.log(first, log_base) if log_base else context.log(first)
    return _function(context, op, values)


def _magnitude(context: Any, value: Any) -> float:
    """log2 of its size, roughly."""
    return float(context.mag(value)) if value != 0 else 0.0


def _power(context: Any, base: Any, exponent: Any) -> Any:
    if base == 0:
        if context.re(exponent) <= 0:
            raise ZeroDivisionError
        return base
    if _magnitude(context, exponent) > 40 or abs(exponent) * max(1.0, abs(_magnitude(context, base))) > MAX_BITS:
        raise TooBig
    return context.power(base, exponent)


def _root(context: Any, value: Any, degree: Any) -> Any:
    """The real root where there is one (odd roots of negative numbers are negative in schools), else the principal one."""
    if context.im(degree) != 0 or degree != int(context.re(degree)) or not 0 < degree <= 1000:
        return context.power(value, 1 / degree)
    if context.im(value) == 0 and context.re(value) < 0 and int(degree) % 2:
        return -context.root(-context.re(value), int(degree))
    return context.root(value, int(degree))


def _function(context: Any, op: str, values: list[Any]) -> Any:
    first = values[0]
    if op in ("exp", "sinh", "cosh", "tanh") and abs(first) > MAX_BITS:
        raise TooBig
    if _magnitude(context, first) > 100 and op in ("sin", "cos", "tan", "cot", "sec", "csc", "floor", "ceil", "mod"):
        raise TooBig
    match op:
        case "arcsin" | "arccos" | "arctan" | "arccot" | "arcsec" | "arccsc":
            return getattr(context, "a" + op.removeprefix("arc"))(first)
        case "ln":
            return context.log(first)
        case "lg":
            return context.log(first, 10)
        case "abs":
            return abs(first)
        case "cbrt":
            return _root(context, first, context.mpf(3))
        case "floor" | "ceil":
            return getattr(context, op)(first)
        case "max" | "min":
            return max(values) if op == "max" else min(values)
        case "factorial":
            if abs(first) > MAX_FACTORIAL:
                raise TooBig
            return context.factorial(first)
        case "binom":
            if max(abs(value) for value in values) > MAX_FACTORIAL:
                raise TooBig
            return context.binomial(*values)
        case "sin" | "cos" | "tan" | "cot" | "sec" | "csc" | "exp" | "sinh" | "cosh" | "tanh":
            return getattr(context, op)(first)
        case _:
            raise Unreadable


def _is_real(context: Any, value: Any) -> bool:
    return bool(abs(context.im(value)) <= abs(value) * context.mpf(10) ** (-context.dps + 15))


def _close(context: Any, a: Any, b: Any) -> bool:
    """Equal to all but a few of the digits that were computed; near zero, absolutely."""
    return bool(abs(a - b) <= max(abs(a), abs(b), context.mpf(10) ** (-context.dps // 3)) * context.mpf(10) ** (-context.dps + 20 + context.dps // 6))


def _agree(gold: Node, answer: Node, log_base: int, scale: bool = False) -> bool:
    """Whether both have one value at every point where the reference has a (real) one; with `scale`, whether their ratio is one constant other than 0."""
    names = variables(gold) | variables(answer)
    num_compared = 0
    ratios: list[Any] = []
    for trial in range(len(_POINTS) if names else 1):
        for context in _contexts():
            try:
                expected = _evaluate(gold, context, trial, log_base)
            except (ZeroDivisionError, ValueError):
                break
            if names and not _is_real(context, expected) and "i" not in _constants(gold):
                break
            try:
                found = _evaluate(answer, context, trial, log_base)
            except (ZeroDivisionError, ValueError):
                return False
            if scale:
                if expected == 0 or found == 0:
                    return False
                ratios.append(found / expected)
                if not _close(context, ratios[0], ratios[-1]):
                    return False
                break
            if not _close(context, expected, found):
                return False
        else:
            num_compared += 1
    return len(ratios) >= 3 if scale else num_compared >= (2 if names else 1)


@functools.lru_cache(maxsize=4096)
def _constants(node: Node) -> frozenset[str]:
    if node.op == "constant":
        return frozenset([node.name])
    return frozenset().union(*(_constants(part) for part in node.args))


def _has(node: Node, op: str) -> bool:
    return node.op == op or any(_has(part, op) for part in node.args)


def equal(gold: Node, answer: Node) -> bool:
    """Whether both always have the same value. A logarithm without a base may be natural or decimal, the same on both sides. Raises TooBig."""
    try:
        a, b = exact(gold), exact(answer)
    except ZeroDivisionError:
        return False
    except Inexact:
        pass
    else:
        return a == b or _is_rounded(gold, answer)
    if _agree(gold, answer, 0) or ((_has(gold, "log") or _has(answer, "log")) and _agree(gold, answer, 10)):
        return True
    return _is_rounded(gold, answer)


def proportional(gold: Node, answer: Node) -> float:
    """The sign of the constant ratio of both (+1 or -1); 0 when they are not proportional."""
    if not _agree(gold, answer, 0, scale=True):
        return 0
    context = _contexts()[0]
    try:
        ratio = _evaluate(answer, context, 0, 0) / _evaluate(gold, context, 0, 0)
    except ZeroDivisionError:
        return 0
    return 1 if context.re(ratio) > 0 else -1


def approximate(node: Node) -> float | None:
    """The real value of an expression without variables; None without one."""
    context = _contexts()[0]
    try:
        value = _evaluate(node, context, 0, 0)
    except (ZeroDivisionError, ValueError):
        return None
    return float(context.re(value)) if _is_real(context, value) and _magnitude(context, value) < 900 else None


def _literal(node: Node) -> tuple[Fraction, int] | None:
    """(value, decimals) of a number written with a point, signed or not."""
    if node.op == "neg":
        inner = _literal(node.args[0])
        return (-inner[0], inner[1]) if inner else None
    return (node.value, node.places) if node.op == "number" and node.places >= 0 else None


def _is_rounded(gold: Node, answer: Node) -> bool:
    """One is the other, rounded to at least MIN_ROUNDED_PLACES decimals: within half a unit of the last one."""
    literals = sorted(((found[1], found[0], side) for side, node in enumerate((gold, answer)) if (found := _literal(node))), key=lambda item: item[0])
    if not literals or literals[0][0] < MIN_ROUNDED_PLACES:
        return False
    places, value, side = literals[0]
    if len(str(abs(value.numerator * 10**places // value.denominator))) < MIN_ROUNDED_DIGITS:
        return False
    other = answer if side == 0 else gold
    context = _contexts()[1]
    if variables(other):
        return False
    try:
        exact_value = _evaluate(other, context, 0, 0)
    except (ZeroDivisionError, ValueError):
        return False
    half_unit = context.mpf(10) ** -places / 2
    return bool(abs(exact_value - context.mpf(value.numerator) / value.denominator) <= half_unit * (1 + context.mpf(10) ** -20))
