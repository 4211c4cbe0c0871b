"""Values that cross the border of the sandbox: None, bool, int, float, str, and lists, tuples, sets and dicts of them, as JSON in which each type has its own form.

    None, bool, str   as in JSON              list   ["l", item, ...]       set    ["s", item, ...]
    int    ["i", "-ff"]  (hexadecimal)        tuple  ["t", item, ...]       dict   ["d", key, value, key, value, ...]
    float  ["f", "0x1.8p+1"]  (float.hex)

A program's values are never made into Python objects here: two values are equal when their canonical texts are. So no `__eq__`, no hash collisions, no digits limit,
and True is not 1. The program's side writes the same form (`program_host.encode`).
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 61
"""Deeper than what a program may send, so that the reference answer of a test can be as deep."""
_INT = re.compile(r"-?[1-9a-f][0-9a-f]*|0")
_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-][0-9]+|-?inf|nan")
_TAGS: dict[type, str] = {list: "l", tuple: "t", set: "s"}


class NotPlainError(ValueError):
    """Not a plain value, or not a text of this form."""


def tagged(value: Any, depth: int = 0) -> Any:
    """The JSON form of a value of our own. Raises NotPlainError."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return ["i", f"{value:x}"]
    if kind is float:
        return ["f", value.hex()]
    if depth > MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    if kind in _TAGS:
        return [_TAGS[kind], *(tagged(item, depth + 1) for item in value)]
    if kind is dict:
        return ["d", *(tagged(item, depth + 1) for pair in value.items() for item in pair)]
    raise NotPlainError(f"{kind.__name__} is not plain data")


def canonical(text: bytes | str, *, tuples_as_lists: bool = False) -> str:
    """The one text for a value: sets and dicts sorted, zeros without a sign. `tuples_as_lists`: for comparing with JSON, which has no tuples. Raises NotPlainError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotPlainError("not JSON") from error
    return _canonical(value, tuples_as_lists, 0)


def canonical_of(value: Any, *, tuples_as_lists: bool = False) -> str:
    """`canonical` of a value of our own."""
    return _canonical(tagged(value), tuples_as_lists, 0)


def _canonical(value: Any, tuples_as_lists: bool, depth: int) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value)
    if not isinstance(value, list) or not value or depth > MAX_DEPTH:
        raise NotPlainError("not a plain value")
    tag, items = value[0], value[1:]
    if tag in ("i", "f"):
        return _number(tag, items)
    texts = [_canonical(item, tuples_as_lists, depth + 1) for item in items]
    if tag == "s":
        texts.sort()
    elif tag == "d" and len(texts) % 2 == 0:
        texts = [part for pair in sorted(zip(texts[::2], texts[1::2], strict=True)) for part in pair]
    elif tag == "t" and tuples_as_lists:
        tag = "l"
    elif tag not in ("l", "t"):
        raise NotPlainError("not a plain value")
    return f'["{tag}"{"".join("," + text for text in texts)}]'


def _number(tag: str, items: list[Any]) -> str:
    if len(items) != 1 or not isinstance(items[0], str) or not (_INT if tag == "i" else _FLOAT).fullmatch(items[0]):
        raise NotPlainError("not a number")
    digits = items[0]
    if digits in ("-0", "-0x0.0p+0"):
        digits = digits[1:]
    return f'["{tag}","{digits}"]'
