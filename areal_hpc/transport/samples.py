"""Answers saved for reading: what a generation rank sends of them to training rank 0, in pieces that stay small control messages.

A saved answer is one held-out answer of an evaluation (the first `evaluation.save_samples` problems) or one answer of a few training groups (`is_saved`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_hpc.config import Config
from areal_hpc.transport.trajectory import Status

MAX_ANSWER_CHARS = 16384
"""Characters of an answer that are kept: half from its beginning, half from its end."""
MAX_EXTRACTED_CHARS = 2048
PIECE_BYTES = 1 << 16
"""A piece ends once its texts take this many bytes."""
ENVIRONMENT_MARK, MODEL_MARK = "⟪environment⟫", "⟪model⟫"
"""Lines around the text of an environment within a saved answer."""
SAVED_STEPS = 50
"""Batches of a run, evenly spread, from whose tickets groups are saved."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """One answer as text, with its verdict."""

    problem: int
    """Position in its split."""
    sample: int
    answer: str
    """At most MAX_ANSWER_CHARS characters, beside a note of how many were left out."""
    answer_chars: int
    """Characters of the whole answer."""
    extracted: str | None
    status: Status
    score: float | None
    tokens: int
    version_min: int
    version_max: int

    @classmethod
    def of(
        cls, problem: int, sample: int, text: str, extracted: str | None, status: Status, score: float | None, tokens: int, versions: tuple[int, int]
    ) -> AnswerText:
        short = None if extracted is None else shorten(extracted, MAX_EXTRACTED_CHARS)
        return cls(problem, sample, shorten(text, MAX_ANSWER_CHARS), len(text), short, status, score, tokens, *versions)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some answers of one evaluation (`number`: version) or of one training group (`number`: ticket)."""

    kind: Literal["evaluation", "training"]
    number: int
    answers: tuple[AnswerText, ...]


def joined_turns(turns: Sequence[str]) -> str:
    """Texts of the model and of its environment, in turn, as one: each of the environment's between lines that say so."""
    return "".join(f"\n{ENVIRONMENT_MARK}\n{text}\n{MODEL_MARK}\n" if number % 2 else text for number, text in enumerate(turns))


def shorten(text: str, most_chars: int) -> str:
    """`text`, or its beginning and end with a line between them that says how much is missing."""
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters left out ...]\n{text[len(text) - half :]}"


def pieces(kind: Literal["evaluation", "training"], number: int, answers: Iterable[AnswerText]) -> Iterator[Piece]:
    """All answers, in order, in pieces of about PIECE_BYTES (one long answer may take a little more)."""
    part: list[AnswerText] = []
    used = 0
    for answer in answers:
        size = len(answer.answer.encode("utf-8", "surrogatepass")) + len((answer.extracted or "").encode("utf-8", "surrogatepass"))
        if part and used + size > PIECE_BYTES:
            yield Piece(kind, number, tuple(part))
            part, used = [], 0
        part.append(answer)
        used += size
    if part:
        yield Piece(kind, number, tuple(part))


def is_saved(ticket: int, config: Config) -> bool:
    """Is the group of this ticket saved? A rule that every rank evaluates alike: the first `evaluation.save_training_groups` of every so-manieth batch's worth."""
    block, within = divmod(ticket, config.groups_per_batch)
    every = -(-config.train.num_steps // SAVED_STEPS)
    return block % every == 0 and within < config.evaluation.save_training_groups
