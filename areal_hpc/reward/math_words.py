"""Answers in words: equal but for case, punctuation, articles and plurals."""

from __future__ import annotations

import re

from areal_hpc.reward.math_normalise import words

_FILLERS = frozenset(
    words("the a an is are there it its that of has have in be answer so option choice exist exists thus therefore we get only they this will does real")
)
_SAME_WORDS = {
    "dne": "does not exist", "doesn't exist": "does not exist", "undefined": "does not exist", "no solutions": "no solution", "none": "no solution",
    "no real solutions": "no solution", "no real solution": "no solution", "infinite": "infinitely many", "infinitely many solutions": "infinitely many",
    "infinite solutions": "infinitely many", "infinite number of solutions": "infinitely many", "no such number exists": "no solution", "t": "true",
    "f": "false", "y": "yes", "n": "no", "correct": "true", "incorrect": "false",
}  # fmt: skip
_NEGATIONS = frozenset(words("not no never neither nor cannot non isn't aren't doesn't don't without none false incorrect"))


def plain_words(text: str) -> list[str]:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().replace("\\", " ")
    text = " ".join(re.findall(r"[^\W_]+(?:'[a-z]+)?|[+*/^=<>]", text.replace("-", " ")))
    text = _SAME_WORDS.get(text, text)
    words = [word for word in text.split() if word not in _FILLERS] or text.split()
    joined = " ".join(words)
    joined = _SAME_WORDS.get(joined, joined)
    return [word.removesuffix("s") if len(word) > 3 else word for word in joined.split()]


def same_words(gold: str, answer: str) -> bool:
    """Equal but for case, punctuation, articles and plurals; for yes and no, an explanation may follow."""
    expected, found = plain_words(gold), plain_words(answer)
    if not expected or not found:
        return False
    if expected == found or "".join(expected) == "".join(found):
        return True
    if len(expected) == 1 and expected[0] in ("yes", "no", "true", "false"):
        opposite = {"yes": "no", "no": "yes", "true": "false", "false": "true"}[expected[0]]
        return found[0] == expected[0] and opposite not in found and re.match(r"\W*(?:\\text\{)?\s*\w+\s*[,.;:]", answer) is not None
    return sorted(expected) == sorted(found) and len(expected) > 1 and not (_NEGATIONS & set(expected))
