r"""What a mathematical answer can be besides one expression: `form(text)` says whether the normalised text is a list, a tuple, a matrix, a quantity, a relation, ..."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from areal_hpc.reward import math_values
from areal_hpc.reward.math_expression import Node, Unreadable, read
from areal_hpc.reward.math_normalise import words
from areal_hpc.reward.math_units import split_quantity


@dataclass(frozen=True, slots=True)
class Form:
    kind: str
    """expression, list, set, tuple, matrix, cases, relation, union, quantity, base, clock, infinity, words or unknown."""
    parts: tuple[str, ...] = ()
    """Texts of the parts."""
    mark: str = ""
    """Brackets of a tuple, operators of a relation (one character each), unit of a quantity, the base, ..."""
    node: Node | None = None
    width: int = 0
    """Columns of a matrix."""


# ---- cutting texts at the outermost level

_DEPTH = {
    "(": 1,
    "[": 1,
    "{": 1,
    ")": -1,
    "]": -1,
    "}": -1,
    "\\{": 1,
    "\\}": -1,
    "\\langle": 1,
    "\\rangle": -1,
    "\\lfloor": 1,
    "\\rfloor": -1,
    "\\lceil": 1,
    "\\rceil": -1,
}
_ATOM = re.compile(r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "l", "\\ge": "g", "\\ne": "n", "\\approx": "a", "\\in": "i", "\\simeq": "a", "\\sim": "a", "\\cong": "a"}


@functools.lru_cache(maxsize=4096)
def _atoms(text: str) -> tuple[tuple[int, str, int], ...]:
    """(position, token, depth in brackets before it)."""
    found, depth = [], 0
    for match in _ATOM.finditer(text):
        token = match[0]
        found.append((match.start(), token, depth))
        depth += _DEPTH.get(token, 1 if token.startswith("\\begin") else -1 if token.startswith("\\end") else 0)
    return tuple(found)


def cut(text: str, separators: Sequence[str]) -> tuple[list[str], list[str]]:
    """(parts, the separators between them), outside of all brackets."""
    parts, between, start = [], [], 0
    for position, token, depth in _atoms(text):
        if token in separators and depth == 0:
            parts.append(text[start:position].strip())
            between.append(token)
            start = position + len(token)
    parts.append(text[start:].strip())
    return parts, between


def is_balanced(text: str) -> bool:
    depth = 0
    for _, token, _ in _atoms(text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0 and text.count("\\begin{") == text.count("\\end{")


def _encloses(text: str, opener: str, closers: Sequence[str]) -> str:
    """The closer, if the bracket at the start is closed by the end of the text and not before; else empty."""
    if not text.startswith(opener):
        return ""
    closer = next((end for end in closers if text.endswith(end)), "")
    if not closer or len(text) < len(opener) + len(closer):
        return ""
    last = len(text) - len(closer)
    inner = [depth for position, _, depth in _atoms(text) if position > 0]
    ends_there = any(position == last for position, _, _ in _atoms(text))
    return closer if ends_there and all(depth > 0 for depth in inner) else ""


# ---- reading

_ORDINAL = re.compile(r"(\d+)\s*(?:\^\{)?(?:\\text\{)?\s*(?:st|nd|rd|th)\}?\}?$")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}(\^\{(?:T|\\top|\\text\{T\}|\\intercal)\})?", re.DOTALL)
_CASES = re.compile(r"(?:[A-Za-z](?:\([a-z]\))?=)?\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?_\{(?:\()?(\d+|\\text\{[^{}]*\})(?:\))?\}")
_BASE_WORDS = re.compile(r"([0-9A-Za-z]+)\s*\(?(?:\\text\{)?\s*\(?(?:in )?base[ -](\w+)\)?\}?\)?")
_CLOCK = re.compile(r"(\d+(?::\d+)+)\s*(?:\\text\{|\s)?\s*([ap])?\.?\s*(m)?\.?\}?", re.IGNORECASE)
_RATIO_WORDS = re.compile(r"(\d+)\s*(?:\\text\{to\}|to)\s*(\d+)")
_JOINED = re.compile(r",?\s*(?:\\text\{,?\s*(?:and|or)\}|\\lor|\\land|(?<![A-Za-z])(?:and|or)(?![A-Za-z])),?")
_LEAD = re.compile(
    r"(?:\\text\{[^{}]*\b(?:is|are|equals?|be|therefore|thus|hence|so)\s*:?\}|(?:[A-Za-z]{2,}[ ,]+)*(?:is|are|equals)\b\s*:?"
    r"|\\(?:therefore|implies|Rightarrow|to)(?![A-Za-z]))\s*"
)
_ISO = re.compile(r"([\[\]])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\]])")
_CONGRUENCE = re.compile(r"(?:(.+)\\equiv)?(.+?)(?:\\pmod\{(\w+)\}|\(\\(?:bmod|mod|text\{mod\})\s*(\w+)\))")
_NUMBER_WORDS = {word: str(value) for value, word in enumerate(
    words("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"))}  # fmt: skip
_TENS = dict(
    zip(
        words("thirty forty fifty sixty seventy eighty ninety hundred thousand"),
        ["30", "40", "50", "60", "70", "80", "90", "100", "1000"],
        strict=True,
    )
)


@functools.lru_cache(maxsize=8192)
def form(text: str) -> Form:
    """What the normalised text is."""
    return _read_form(text) if is_balanced(text) and text else Form("unknown", (text,))


def _read_form(text: str) -> Form:
    lead = _LEAD.match(text)
    if lead and lead.end() < len(text) and re.search(r"\d|\\|[=+^]", text[lead.end() :]):
        text = text[lead.end() :]
    if ordinal := _ORDINAL.fullmatch(text):
        text = ordinal[1]
    for reader in (_read_special, _read_list, _read_block, _read_brackets, _read_relation, _read_union, _read_signs):
        found = reader(text)
        if found is not None:
            return found
    return _read_value(text)


def _read_special(text: str) -> Form | None:
    if text in ("\\emptyset", "\\{\\}", "\\phi") or (text.startswith("\\{") and not text[2:-2].strip() and text.endswith("\\}")):
        return Form("set")
    if match := _BASE.fullmatch(text) or _BASE_WORDS.fullmatch(text):
        digits, base = match[1], re.sub(r"\\text|[{}]|base|\s", "", match[2]).lower()
        base = _NUMBER_WORDS.get(base, base)
        if (digits[0].isdigit() and base.isdigit()) or base in ("16",):
            return Form("base", (digits.lower().lstrip("0") or "0",), base)
    if (match := _CLOCK.fullmatch(text)) and (match[2] or not match[3]):
        return Form("clock", tuple(part.lstrip("0") or "0" for part in match[1].split(":")), (match[2] or "").lower(), width=len(match[1].rpartition(":")[2]))
    if match := _RATIO_WORDS.fullmatch(text):
        return Form("clock", (match[1], match[2]), width=1)
    if match := _CONGRUENCE.fullmatch(text):
        return Form("congruence", (match[1] or "", match[2]), match[3] or match[4])
    if text in ("\\ldots", "..."):
        return Form("dots")
    if text.lstrip("+-") == "\\infty":
        return Form("infinity", mark="-" if text.startswith("-") else "+")
    return None


def _read_list(text: str) -> Form | None:
    if not re.search(r"[<>=]|\\[lgn]e(?![A-Za-z])", text):
        text = re.sub(r"\\(land|lor)(?![A-Za-z])", r"\\logical\1", text)  # of statements, not between the items of a list
    text = _JOINED.sub(",", text)
    items = [item for item in cut(text, (",", ";"))[0] if item]
    if len(items) < 2:
        return None
    sides = [cut(item, ("=",))[0] for item in items]
    if len(sides[0]) == 2 and all(len(side) == 1 for side in sides[1:]) and re.fullmatch(r"[A-Za-z](?:_\{\w+\})?", sides[0][0]):
        items[0] = sides[0][1]  # n = 3, 4, 5
    elif all(len(side) == 2 for side in sides) and len({side[0] for side in sides}) == 1:
        items = [side[1] for side in sides]  # x = 1 or x = 2
    expanded = list(itertools.chain.from_iterable(signs(item) for item in items))
    return Form("list", tuple(expanded))


def _read_block(text: str) -> Form | None:
    if text.startswith(("[\\begin{array}", "(\\begin{array}")) and text.endswith(("\\end{array}]", "\\end{array})")):
        text = text[1:-1]
    if match := _CASES.fullmatch(text):
        rows = [
            [re.sub(r"^(?:\\text\{)?(?:if|for|when)\}?\s*|[,;.]$", "", cell.strip()) for cell in row.split("&")]
            for row in match[1].split("\\\\")
            if row.strip()
        ]
        return Form("cases", tuple("&".join(cell for cell in row if cell) for row in rows))
    match = _MATRIX.fullmatch(text)
    if match is None or match[1] == "vmatrix" or match[2].count("\\begin"):
        return None
    rows = [[cell.strip() for cell in row.split("&")] for row in match[2].split("\\\\") if row.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    if match[3]:
        rows = [list(column) for column in zip(*rows, strict=True)]
    return Form("matrix", tuple(itertools.chain.from_iterable(rows)), width=len(rows[0]))


def _read_brackets(text: str) -> Form | None:
    if match := _ISO.fullmatch(text):
        opener, closer = "[" if match[1] == "[" else "(", "]" if match[4] == "]" else ")"
        return Form("tuple", (match[2], match[3]), opener + closer)
    if text.endswith(("^{T}", "^{\\top}")) and text.startswith(("(", "[")):
        text = text.rpartition("^")[0]
    for opener, closers, kind in (("\\{", ("\\}",), "set"), ("(", (")", "]"), "tuple"), ("[", ("]", ")"), "tuple"), ("\\langle", ("\\rangle",), "tuple")):
        closer = _encloses(text, opener, closers)
        if not closer:
            continue
        inner = text[len(opener) : -len(closer)]
        if kind == "set" and (bar := re.match(r"[A-Za-z](?:\\in\\mathbb\{R\})?[|:](?!.*[|:])", inner)):
            return _read_relation(inner[bar.end() :])
        items = cut(inner, (",", ";"))[0]
        if kind == "set":
            return Form("set", tuple(itertools.chain.from_iterable(signs(item) for item in items if item)))
        if len(items) >= 2 and all(items):
            return Form("tuple", tuple(items), "<>" if opener == "\\langle" else opener + closer)
    return None


def _read_relation(text: str) -> Form | None:
    sides, operators = cut(text, tuple(_RELATIONS))
    if not operators or (operators[0] in ("=", "\\approx") and not sides[0]):  # "= 5", "\approx 5"
        return form(sides[1]) if operators and len(sides) == 2 and sides[1] else None
    if not all(sides):
        return None
    if operators == ["="] and len(expanded := signs(sides[1])) > 1:
        return Form("list", tuple(expanded))
    if operators == ["\\in"]:
        return form(sides[1])
    return Form("relation", tuple(sides), "".join(_RELATIONS[operator] for operator in operators))


def _read_union(text: str) -> Form | None:
    if text in ("\\mathbb{R}", "\\text{all real numbers}", "\\text{all reals}", "\\text{all real}"):
        return Form("union", ("(-\\infty,\\infty)",))
    pieces, operators = cut(text, ("\\cup", "\\setminus"))
    if set(operators) == {"\\cup"}:
        return Form("union", tuple(pieces))
    if operators == ["\\setminus"] and pieces[0] in ("\\mathbb{R}", "(-\\infty,\\infty)") and form(pieces[1]).kind == "set":
        bounds = sorted(form(pieces[1]).parts, key=_sort_value)
        ends = ["-\\infty", *bounds, "\\infty"]
        return Form("union", tuple(f"({low},{high})" for low, high in itertools.pairwise(ends)))
    return None


def _sort_value(text: str) -> float:
    try:
        return float(math_values.exact(read(text)))
    except (ArithmeticError, ValueError):
        return 0.0


def signs(text: str) -> list[str]:
    r"""Both readings of a text with \pm; the text itself without one."""
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return [upper, lower]


def _read_signs(text: str) -> Form | None:
    both = signs(text)
    return Form("list", tuple(both)) if len(both) > 1 else None


def _read_value(text: str) -> Form:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip().lower()
    if plain in _NUMBER_WORDS or plain in _TENS:
        return _read_value(_NUMBER_WORDS.get(plain) or _TENS[plain])
    quantity = split_quantity(text)
    if quantity and quantity[1]:
        try:
            return Form("quantity", (quantity[0],), quantity[1], read(quantity[0]))
        except Unreadable:
            pass
    try:
        return Form("expression", (text,), node=read(text))
    except Unreadable:
        pass
    has_text = "\\text{" in text or re.search(r"(?<![A-Za-z\\])[A-Za-z]{3,}", re.sub(r"\\(?:begin|end|mathbb|operatorname)\{\w+\}", "", text))
    if re.fullmatch(r"(?=.*[^\W\d_a-zA-Z])[^\W\d_]+(?:[ \-'][^\W\d_]+)*", plain):  # words of another script, or with accents
        return Form("words", (text,))
    if has_text and (re.search(r"[A-Za-z]{2,}", plain) or re.fullmatch(r"\W*[a-z]\W*", plain)):
        return Form("words", (text,))
    return Form("unknown", (text,))
