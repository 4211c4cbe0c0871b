r"""What our own grammar cannot read goes to math-verify: integrals, sums, limits, determinants, exotic notation. Imported only when needed, and only in a grader.

Traps, measured with math-verify 0.9.0: a parsed object must never become text (printing a tower of powers hangs), its timeouts must be whole numbers (others give an
empty parse without a word) and use SIGALRM (main thread only). With gmpy2 they never fire, so sympy must not use it. They are a last resort: the server bounds a
grader by its processor time.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

WALL_S = 60
"""Whole seconds after which math-verify gives up by itself: above what the server allows."""
_DIGITS = 40

HOSTILE = re.compile(
    r"\d\)?\^\{[^{}]*\d\)?\^"  # a tower of numbers
    r"|\^\{[^{}]*\^\{[^{}]*\^"  # a tower of anything
    r"|\^\{?-?\d{5,}|\d{400,}|\)!\s*\)?!|!!|(?:\d{5,}|\})!"
    r"|\\(?:sum|prod|bigcup|bigoplus)[^=]{0,40}=\s*-?\d+\s*\}?\s*\^\s*\{?\d{5,}|\\(?:sum|prod)[^=]{0,40}=[^{}]*\}\^\{\d+\^"
    r"|matrix\}\^\{?\d{3,}"
)
"""Expressions whose evaluation may not end."""


@functools.cache
def _library() -> tuple[Any, Any, Any]:
    """(parse, verify, extraction configuration)."""
    os.environ.setdefault("SYMPY_GROUND_TYPES", "python")
    os.environ.setdefault("MPMATH_NOGMPY", "1")
    import logging

    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False)
    return parse, verify, [LatexExtractionConfig(boxed_match_priority=0, normalization_config=config)]


def warm_up() -> None:
    """Pay for the imports and the first parse and comparison now (two seconds)."""
    equivalent("\\frac{1}{3}", "\\int_{0}^{1}x^{2}dx")
    equivalent("\\{1,x\\}", "\\{x,2\\}")


def is_hostile(text: str) -> bool:
    return HOSTILE.search(text) is not None


def _parse(text: str) -> list[Any]:
    parse, _, config = _library()
    found: list[Any] = parse("\\boxed{" + text + "}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=WALL_S)
    return found


@functools.lru_cache(maxsize=512)
def _parse_gold(text: str) -> list[Any]:
    return _parse(text)


def is_readable(gold: str) -> bool:
    """Whether math-verify can parse the reference answer."""
    return bool(_parse_gold(gold))


def equivalent(gold: str, answer: str) -> bool:
    """Its opinion on two normalised texts, with numbers checked again to more digits than it looks at."""
    _, verify, _ = _library()
    expected, found = _parse_gold(gold), _parse(answer)
    if not expected or not found:
        return False
    return bool(verify(expected, found, timeout_seconds=WALL_S)) and _same_numbers(expected[0], found[0])


def _same_numbers(gold: Any, answer: Any) -> bool:
    """It takes numbers for equal that agree to 15 digits, and tiny ones for zero: once more, with _DIGITS. True where one is no number."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols or answer.free_symbols:
        return True
    gold, answer = gold.doit(), answer.doit()  # an integral by its value: numerical integration to so many digits takes seconds
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    if gold.is_Float or answer.is_Float:  # rounded to six decimals
        return bool(abs(gold.evalf(_DIGITS) - answer.evalf(_DIGITS)) <= 1e-6 * abs(gold.evalf(_DIGITS)))
    difference = (gold - answer).evalf(_DIGITS, maxn=4 * _DIGITS)
    size = abs(gold.evalf(_DIGITS))
    return bool(difference == 0 or (size != 0 and abs(difference) < size * 10 ** -(_DIGITS - 10)))
