r"""The answer in a text: what its author marked as final, never what merely stands in it.

1. Only what follows the last `</think>` counts; thinking that never ends has no answer.
2. `marked`: the rest of the line behind the last "####" (GSM8K; how the small model of this package writes). The built-in tasks use this alone.
3. `boxed`: the last balanced \boxed{...} or \fbox{...}. Boxes make a list only where they stand at the very end, joined by commas, "and" or "or" alone.
4. `stated`: the last sentence "the answer is ..." or line "Answer: ...".

All of it is linear in the text, of which only the last MAX_TEXT_CHARS are looked at.
"""

from __future__ import annotations

import re

from areal_hpc.reward import answers

MAX_TEXT_CHARS = 20_000
MAX_BOX_CHARS = 4096
MAX_NESTED = 8

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\b\s*")
_SHORT = re.compile(r"[^\s{}$\\.,;]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINED = re.compile(r"(?:[\s$,;*]|\\[,;:!\]\[()]|\\ |\\quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
_JOINT = re.compile(r"[,;]|\b(?:and|or)\b")
_NAMED = re.compile(r"([A-Za-z](?:_\{?\w\}?)?)\s*=\s*$")
_CLOSING = re.compile(r"(?:[\s$.*!]|\\[\])])*")
_STATEMENT = re.compile(
    r"\b(?:answer|result|solution|(?:option|choice)(?=\s+is\b|\s*:))\b[*_\s]*(?:(?:is|are|equals)\b\s*:?|:|=)[*_\s]*(?:option\b|choice\b)?[*_\s]*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?=\s|$|\*)|,\s+(?:so|but|because|since|and so|which|not|although)\b", re.IGNORECASE)


def after_thinking(text: str) -> str:
    """The part of the text that is meant for the reader."""
    _, closed, rest = text.rpartition("</think>")
    return rest[-MAX_TEXT_CHARS:] if closed or "<think>" not in rest else ""


def marked(text: str) -> str | None:
    """The rest of the line behind the last "####"; None without a marker or with nothing behind it."""
    return answers.extract(text)


def boxed(text: str) -> str | None:
    """Content of the last box, or of the last boxes joined to a list. Empty text: the last box is empty, or its braces do not balance. None: no box."""
    spans = _boxes(text)
    if not spans:
        return None
    start, stop, content = spans[-1]
    if content is None:
        return ""
    if not _CLOSING.fullmatch(text, stop):
        return content.strip()
    items, name = [content.strip()], _NAMED.search(text, max(0, start - 20), start)
    names = [name[1] if name else ""]
    for previous in reversed(spans[:-1]):
        between = text[previous[1] : start]
        name = _NAMED.search(between)
        joint = between[: name.start()] if name else between
        if previous[2] is None or not _JOINED.fullmatch(joint) or not _JOINT.search(joint):
            break
        start = previous[0]
        name = _NAMED.search(text, max(0, start - 20), start)
        items.append(previous[2].strip())
        names.append(name[1] if name else "")
    if len(set(items)) == 1:
        return items[0]
    if all(names):
        items = [f"{name}={item}" for name, item in zip(names, items, strict=True)]
    return ", ".join(reversed(items))


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, stop, content) of the boxes that stand in no other box; content None where the braces do not balance."""
    found: list[tuple[int, int, str | None]] = []
    closing: dict[int, int] | None = None
    position = 0
    while match := _BOX.search(text, position):
        start, position = match.span()
        if text[position : position + 1] != "{":  # \boxed 7
            short = _SHORT.match(text, position)
            found.append((start, short.end() if short else position, short[0] if short else None))
            continue
        closing = _matching_braces(text) if closing is None else closing
        stop = closing.get(position, len(text))
        balanced = position in closing and stop - position <= MAX_BOX_CHARS
        found.append((start, stop + 1 if balanced else position, text[position + 1 : stop] if balanced else None))
        position = stop + 1 if balanced else position + 1
    return found


def _matching_braces(text: str) -> dict[int, int]:
    """Position of each opening brace that is closed -> that of its closing brace; escaped braces are none. One pass."""
    found, opened = {}, []
    for token in _BRACE.finditer(text):
        if token[0] == "{":
            opened.append(token.start())
        elif token[0] == "}" and opened:
            found[opened.pop()] = token.start()
    return found


def stated(text: str) -> str | None:
    """What the last "answer is ..." or "Answer: ..." says, up to the end of its sentence or line; None without one."""
    found = list(_STATEMENT.finditer(text))
    if not found:
        return None
    last = found[-1]
    rest = text[last.end() : last.end() + MAX_BOX_CHARS]
    end = _SENTENCE_END.search(rest)
    return (rest[: end.start()] if end else rest).strip().strip("*_").strip() or None


def math_answer(text: str, statement: bool = True) -> str | None:
    """The answer to a mathematical question: boxed, else marked by "####", else (if `statement`) stated. None without one."""
    text = after_thinking(text)
    content = boxed(text)
    if content is not None:
        return _innermost(content) or None
    return marked(text) or (stated(text) if statement else None)


def _innermost(content: str) -> str:
    """A box that holds nothing but a box is that box."""
    for _ in range(MAX_NESTED):
        spans = _boxes(content)
        if len(spans) != 1 or spans[0][:2] != (0, len(content)) or spans[0][2] is None:
            break
        content = spans[0][2].strip()
    return content


def gold_answer(gold: str) -> str:
    """The reference answer in what a data set calls one: a worked solution (its last box, or what follows "####") or the answer itself."""
    content = boxed(gold)
    if content:
        return _innermost(content)
    return marked(gold) or gold.strip()
