r"""Expressions in the spelling of `math_normalise`, read into small trees: `read(text) -> Node`, which raises Unreadable where another grammar must try."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from areal_hpc.reward.math_normalise import words

MAX_DEPTH = 80


class Unreadable(ValueError):  # noqa: N818
    """Not in this grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    """number, constant, variable, a function's name, or one of + * / ^ neg."""
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""
    places: int = -1
    """Decimals of a number that was written with a point; -1 for others."""


_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>\d*\.\d*\\overline\{\d+\})|(?P<dots>\d*\.\d+(?:\\ldots|\.\.\.))|(?P<number>\d+\.?\d*|\.\d+)|(?P<command>\\[A-Za-z]+)|(?P<other>\\[{}%|]|\S))"
)
KNOWN_COMMANDS = frozenset(
    words(
        "frac binom sqrt pi cdot times bmod mod pmod circ infty lfloor rfloor lceil rceil text overline ldots le ge ne approx in cup setminus "
        "emptyset pm mp langle rangle mathbb"
    )
)
"""Commands of our grammars besides functions and Greek letters."""
_FUNCTIONS = frozenset(
    words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs floor ceil gcd lcm max min cbrt arccot arcsec arccsc")
)
_GREEK = frozenset(
    words(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda "
        "Sigma Phi Psi Omega ell"
    )
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sec": "arcsec", "csc": "arccsc"}
_CLOSERS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|"}
_ENDS = frozenset([")", "]", "}", "\\}", "\\rfloor", "\\rceil", ",", ";", "=", "<", ">", "&", ":"])


def number(value: Fraction | int, places: int = -1) -> Node:
    return Node("number", value=Fraction(value), places=places)


def _joined(op: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(op, tuple(parts))


def _quotient(above: list[Node], below: list[Node]) -> Node:
    top = _joined("*", above)
    return Node("/", (top, _joined("*", below))) if below else top


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise Unreadable
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise Unreadable
        self.at += 1
        return token

    def whole(self) -> Node:
        found = self.sum()
        if self.at != len(self.tokens):
            raise Unreadable
        return found

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        terms = [self.product()]
        while self.peek() in ("+", "-"):
            sign = self.take()
            term = self.product()
            terms.append(Node("neg", (term,)) if sign == "-" else term)
        found = _joined("+", terms)
        self.depth -= 1
        return found

    def product(self) -> Node:
        if self.peek() in ("+", "-"):
            sign = self.take()
            inner = self.product()
            return Node("neg", (inner,)) if sign == "-" else inner
        above, below = [self.power()], []
        while True:
            token = self.peek()
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                above.append(self.signed_power())
            elif token == "/":
                self.take()
                below.append(self.signed_power())
            elif token in ("\\bmod", "\\mod"):
                self.take()
                above, below = [Node("mod", (_quotient(above, below), self.power()))], []
            elif self.starts_factor():
                before = self.tokens[self.at - 1][0]
                if self.tokens[self.at][0] in ("number", "repeating", "dots") and before in ("number", "repeating", "dots"):
                    raise Unreadable  # two numbers side by side
                above.append(self.power())
            else:
                return _quotient(above, below)

    def signed_power(self) -> Node:
        if self.peek() in ("+", "-"):
            return Node("neg", (self.signed_power(),)) if self.take() == "-" else self.signed_power()
        return self.power()

    def starts_factor(self) -> bool:
        token = self.peek()
        if not token or token in _ENDS or token in ("+", "-", "*", "/", "^", "_", "!", "\\%", "%", "'"):
            return False
        return not (token == "|" and self.bars)

    def power(self) -> Node:
        base = self.atom()
        for _ in range(MAX_DEPTH):
            token = self.peek()
            if token == "!":
                self.take()
                base = Node("factorial", (base,))
            elif token in ("\\%", "%"):
                self.take()
                base = Node("/", (base, number(100)))
            elif token == "^" and self.peek(1) == "{" and self.peek(2) == "\\circ" and self.peek(3) == "}":
                self.at += 4
                base = Node("/", (Node("*", (base, Node("constant", name="pi"))), number(180)))
            elif token == "^":
                self.take()
                exponent = self.group() if self.peek() == "{" else self.atom()
                if self.peek() == "^":  # 2^3^4 as programmers write it
                    self.take()
                    exponent = Node("^", (exponent, self.group() if self.peek() == "{" else self.atom()))
                base = Node("^", (base, exponent))
            else:
                return base
        raise Unreadable

    def group(self) -> Node:
        """{...}"""
        self.take("{")
        found = self.sum()
        self.take("}")
        return found

    def atom(self) -> Node:
        if self.at >= len(self.tokens):
            raise Unreadable
        kind, token = self.tokens[self.at]
        if kind in ("number", "repeating", "dots"):
            self.at += 1
            return _read_number(kind, token)
        if kind == "command":
            return self.command(token)
        if token == "|":
            return self.absolute()
        if token in ("(", "[", "{"):
            self.take()
            bars, self.bars = self.bars, 0
            found = self.sum()
            self.bars = bars
            self.take(_CLOSERS[token])
            return found
        if len(token) == 1 and token.isascii() and token.isalpha():
            return self.letter()
        raise Unreadable

    def absolute(self) -> Node:
        self.take("|")
        self.bars += 1
        found = self.sum()
        self.bars -= 1
        self.take("|")
        return Node("abs", (found,))

    def letter(self) -> Node:
        name = self.take()
        if self.peek() not in ("_", "'") and name in ("e", "i"):
            return Node("constant", name=name)
        return Node("variable", name=name + self.subscript())

    def subscript(self) -> str:
        name = ""
        while self.peek() == "'":
            name += self.take()
        if self.peek() == "_":
            self.take()
            if self.peek() != "{":
                return name + "_" + self.take()
            self.take()
            inside = ""
            while self.peek() != "}":
                inside += self.take()
            self.take()
            return name + "_" + inside
        return name

    def command(self, token: str) -> Node:
        self.at += 1
        name = token[1:]
        if name == "pi":
            return Node("constant", name="pi")
        if name in ("frac", "binom"):
            top, bottom = self.group(), self.group()
            return Node("/" if name == "frac" else "binom", (top, bottom))
        if name == "sqrt":
            degree = number(2)
            if self.peek() == "[":
                self.take()
                degree = self.sum()
                self.take("]")
            return Node("root", (self.group() if self.peek() == "{" else self.atom(), degree))
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            self.take(_CLOSERS[token])
            return Node("floor" if name == "lfloor" else "ceil", (inner,))
        if name in _FUNCTIONS:
            return self.function(name)
        if name in _GREEK:
            return Node("variable", name=token + self.subscript())
        raise Unreadable

    def function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        for _ in range(2):
            if self.peek() == "_" and name == "log":
                self.take()
                base = self.group() if self.peek() == "{" else self.atom()
            elif self.peek() == "^":
                self.take()
                exponent = self.group() if self.peek() == "{" else self.atom()
        arguments = self.arguments()
        if exponent is not None and exponent == Node("neg", (number(1),)) and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        if base is not None:
            arguments = (*arguments, base)
        found = Node(name, arguments)
        return Node("^", (found, exponent)) if exponent is not None else found

    def arguments(self) -> tuple[Node, ...]:
        """In parentheses, or the product that follows: sin 2x, sin x cos y (the first argument is x)."""
        if self.peek() in ("(", "{"):
            opener = self.take()
            bars, self.bars = self.bars, 0
            found = [self.sum()]
            while self.peek() == ",":
                self.take()
                found.append(self.sum())
            self.bars = bars
            self.take(_CLOSERS[opener])
            return tuple(found)
        if self.peek() in ("+", "-"):
            return (Node("neg", (self.arguments()[0],)),) if self.take() == "-" else self.arguments()
        product = self.power()
        while (
            self.starts_factor() and self.peek() not in ("(", "[", "|") and self.peek().removeprefix("\\") not in _FUNCTIONS | {"cdot", "times", "bmod", "mod"}
        ):
            product = Node("*", (product, self.power()))
        if self.peek() == "/" and self.tokens[self.at + 1 : self.at + 2] and self.tokens[self.at + 1][0] == "number":  # \sin \pi/6
            self.take()
            product = Node("/", (product, self.power()))
        return (product,)


def _read_number(kind: str, token: str) -> Node:
    if kind == "number":
        if "." not in token:
            return number(int(token))
        return number(Fraction(token if token != "." else "0"), len(token.partition(".")[2]))
    if kind == "repeating":
        fixed, _, block = token[:-1].partition("\\overline{")
        whole, _, places = fixed.partition(".")
        start = Fraction(f"{whole or 0}.{places or 0}")
        return number(start + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(places)))
    digits = token.replace("\\ldots", "").rstrip(".")
    whole, _, places = digits.partition(".")
    for length in range(1, len(places) // 2 + 1):  # 0.333..., 0.1666..., 0.2727...: the shortest block that ends it twice
        block, rest = places[-length:], places[:-length]
        if rest.endswith(block) and (length > 1 or rest.endswith(block * 2) or len(places) >= 3):
            while rest.endswith(block):
                rest = rest[:-length]
            return number(Fraction(f"{whole or 0}.{rest or 0}") + Fraction(int(block), (10**length - 1) * 10 ** len(rest)))
    return number(Fraction(digits), len(places))


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Node:
    """The tree of an expression. Raises Unreadable."""
    try:
        return _Reader(text).whole()
    except RecursionError:
        raise Unreadable from None


def has_foreign_command(text: str) -> bool:
    """Whether it contains a command that no grammar of ours has."""
    return any(name not in KNOWN_COMMANDS and name not in _FUNCTIONS and name not in _GREEK for name in re.findall(r"\\([A-Za-z]+)", text))


def variables(node: Node) -> frozenset[str]:
    """Names of the variables in it."""
    if node.op == "variable":
        return frozenset([node.name])
    return frozenset().union(*(variables(part) for part in node.args))
