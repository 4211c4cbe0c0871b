r"""Grades an answer to a mathematical question. Run it in a grader process (areal_hpc.reward.worker): what is behind it can be slow.

1. Find the answer in the text (`extraction`), and normalise it and the reference (`math_normalise`).
2. Equal texts are right. A reference that nothing can read is GOLD_BAD, whatever the answer.
3. Letters of multiple choice, words, and formulas of sets or logic are compared as such.
4. Structures are compared part by part (`math_forms`, `math_compare`), expressions by value (`math_values`):
   no symbolic algebra, so most answers take less than a millisecond.
5. What these cannot read goes to math-verify (`math_fallback`), unless it looks as if it would not end: that is HOSTILE, and wrong.

    grader = MathGrader(Policy())
    grader.grade("\\frac{1}{2}", "... so \\boxed{0.5}.").status      # Outcome.RIGHT
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_hpc.reward import extraction, math_compare, math_fallback, math_forms
from areal_hpc.reward.math_compare import Policy
from areal_hpc.reward.math_expression import has_foreign_command
from areal_hpc.reward.math_normalise import normalise
from areal_hpc.reward.math_values import TooBig
from areal_hpc.reward.verdict import Graded, Outcome

VERSION = 1
"""Raised when a verdict may change."""
MAX_ANSWER_CHARS = 512
CACHE_SIZE = 20_000

_LETTER_GOLD = re.compile(r"\(?\\?(?:text\{\(?)?([A-J])[).:]?\}?\)?")
_LETTER_WITH_VALUE = re.compile(r"(?:\\text\{)?\(([A-J])\)\s*\}?(.*)|(?:\\text\{)?([A-J])[).:]\s*\}?(.+)", re.DOTALL)
_LETTER_ANSWER = re.compile(
    r"(?:\\text\{)?\s*(?:(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:?\s*)?\(?([A-Ja-j])(?![A-Za-z])(?! [a-z])\)?\}?(?:[).:,\s}-]|\\text\{)*(.*)",
    re.DOTALL | re.IGNORECASE,
)
_PLAIN = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?%?|-?\\[dt]?frac\{-?\d+\}\{\d+\}|-?\d+/\d+|[A-Za-z]")
"""Most reference answers: known to be readable without reading them, for data sets of 10^5 rows."""
_LOGIC = re.compile(
    r"(?=.*\\)(?:[A-Za-z](?:_\{\w+\})?|[()':,\s]"
    r"|\\(?:cap|cup|land|lor|neg|setminus|subset|subseteq|in|to|iff|forall|exists|emptyset|oplus)(?![A-Za-z]))+"
)
"""Formulas of sets and logic, which have no value to compare by: they are right when they are the same text."""
_ANOTHER_LETTER = re.compile(r"(?<![A-Za-z\\])\(?[B-J]\)?(?![A-Za-z(^_=])|(?<![A-Za-z\\])\(A\)|\b(?:or|and)\b\W*A\b")


@dataclass(slots=True)
class MathGrader:
    """Keeps the verdicts on the answers it has seen: the answers to one prompt repeat each other."""

    policy: Policy = field(default_factory=Policy)
    statement: bool = True
    """Whether "the answer is ..." counts where nothing is boxed."""
    counts: Counter[str] = field(default_factory=Counter)
    """graded, cache_hits, fast (decided without math-verify), fallback."""
    _cache: OrderedDict[tuple[int, str, str], tuple[Outcome, str]] = field(default_factory=OrderedDict)

    def grade(self, gold: str | Sequence[str], text: str, truncated: bool = False) -> Graded:
        """The verdict on a whole text. With several reference answers, any will do. `truncated`: the text was cut at the length limit."""
        golds = [gold] if isinstance(gold, str) else list(gold)
        answer = extraction.math_answer(text, self.statement)
        if answer is None:
            if all(check_gold(each) for each in golds):
                return Graded.of(Outcome.GOLD_BAD, None, "the reference answer cannot be read")
            return Graded.of(Outcome.TRUNCATED if truncated else Outcome.NO_ANSWER)
        verdicts = [self.grade_answer(each, answer) for each in golds]
        order = (Outcome.RIGHT, Outcome.HOSTILE, Outcome.WRONG, Outcome.GOLD_BAD)
        return min(verdicts, key=lambda verdict: order.index(verdict.status), default=Graded.of(Outcome.GOLD_BAD, answer, "no reference answer"))

    def grade_answer(self, gold: str, answer: str) -> Graded:
        """The verdict on an extracted answer."""
        self.counts["graded"] += 1
        shown = answer[:MAX_ANSWER_CHARS]
        expected = _normalised_gold(gold)
        if len(answer) > MAX_ANSWER_CHARS and len(answer) > 2 * len(expected):
            bad = _unreadable(expected) is not None
            return Graded.of(
                Outcome.GOLD_BAD if bad else Outcome.WRONG,
                shown,
                "the reference answer cannot be read" if bad else f"longer than {MAX_ANSWER_CHARS} characters",
            )
        found = normalise(answer)
        key = (VERSION, expected, found)
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            self.counts["cache_hits"] += 1
        else:
            known = self._cache[key] = self._judge(expected, found)
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return Graded.of(known[0], shown, known[1])

    def _judge(self, gold: str, answer: str) -> tuple[Outcome, str]:
        if _unreadable(gold):
            return Outcome.GOLD_BAD, "the reference answer cannot be read"
        if gold == answer:
            self.counts["fast"] += 1
            return Outcome.RIGHT, ""
        if _is_logic(gold):
            self.counts["fast"] += 1
            return (Outcome.RIGHT if _without_spaces(gold) == _without_spaces(answer) else Outcome.WRONG), ""
        letter = _letter_verdict(gold, answer)
        if letter is not None:
            self.counts["fast"] += 1
            return (Outcome.RIGHT if letter else Outcome.WRONG), ""
        try:
            verdict = math_compare.same(gold, answer, self.policy)
        except TooBig:
            return Outcome.HOSTILE, "a value too big to compute"
        except RecursionError:
            verdict = False
        if verdict is None and not (math_forms.is_balanced(answer) and (has_foreign_command(answer) or math_forms.form(gold).kind == "unknown")):
            verdict = False  # malformed: nothing that another grammar would read better
        if verdict is not None:
            self.counts["fast"] += 1
            return (Outcome.RIGHT if verdict else Outcome.WRONG), ""
        self.counts["fallback"] += 1
        if math_fallback.is_hostile(answer) or math_fallback.is_hostile(gold):
            return Outcome.HOSTILE, "an expression whose evaluation may not end"
        return (Outcome.RIGHT if math_fallback.equivalent(gold, answer) else Outcome.WRONG), ""


def check_gold(text: str) -> str | None:
    """Why this reference answer could never be compared with anything; None when it can. What our own grammar cannot read is tried with math-verify (a slow import)."""
    return None if _PLAIN.fullmatch(text) else _unreadable(_normalised_gold(text))


def _unreadable(gold: str) -> str | None:
    if not gold:
        return "it is empty"
    if not math_forms.is_balanced(gold):
        return "its braces do not match"
    if not re.search(r"[^\W_]|\\[a-z{]", gold):
        return "it has neither a digit nor a letter"
    if math_forms.form(gold).kind != "unknown" or _is_logic(gold):
        return None
    if math_fallback.is_hostile(gold):
        return "its evaluation may not end"
    return None if math_fallback.is_readable(gold) else "neither our grammar nor math-verify can read it"


_golds: dict[str, str] = {}


def _is_logic(gold: str) -> bool:
    return _LOGIC.fullmatch(gold) is not None and math_forms.form(gold).kind == "unknown"


def _without_spaces(text: str) -> str:
    return re.sub(r"(?<![A-Za-z])\s+|\s+(?![A-Za-z])", "", text)  # a command ends at its space


def _normalised_gold(gold: str) -> str:
    """Normalised once: a reference answer is compared with many."""
    found = _golds.get(gold)
    if found is None:
        if len(_golds) > CACHE_SIZE:
            _golds.clear()
        found = _golds[gold] = normalise(extraction.gold_answer(gold))
    return found


def _letter_verdict(gold: str, answer: str) -> bool | None:
    """For a reference that is a letter of multiple choice, with the value it stands for or without; None for others."""
    with_value = _LETTER_WITH_VALUE.fullmatch(gold)
    bare = _LETTER_GOLD.fullmatch(gold)
    if bare is None and (with_value is None or not (with_value[2] or with_value[4])):
        return None
    letter = bare[1] if bare else (with_value[1] or with_value[3] if with_value else "")
    found = _LETTER_ANSWER.fullmatch(answer)
    if found and found[1].upper() == letter and not (found[2] and answer[:1].isalpha() and answer[1:2] not in ".:) ,"):
        return not _ANOTHER_LETTER.search(found[2])
    return False if bare else None
