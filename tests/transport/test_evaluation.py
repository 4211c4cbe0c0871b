"""Shares of an evaluation joined, against counting in plain Python; saved answers in pieces."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from areal_hpc.config import Config, Evaluation, Train
from areal_hpc.metrics import NO_VOTE, answer_key
from areal_hpc.transport.evaluation import Share, summarise
from areal_hpc.transport.samples import MAX_ANSWER_CHARS, PIECE_BYTES, AnswerText, is_saved, pieces, shorten
from areal_hpc.transport.trajectory import GRADED, Status

K = 3
SOURCES = ["sums" if j % 3 else "products" for j in range(11)]


def shares_of(ranks: int, seed: int = 0) -> tuple[list[Share], dict[int, list[tuple[Status, int, str | None]]]]:
    draws = random.Random(seed)
    answers = {j: [(draws.choice(list(Status)), draws.randint(1, 9), draws.choice(["1", "2", None])) for _ in range(K)] for j in range(len(SOURCES))}
    found = []
    for rank in range(ranks):
        mine = list(range(rank, len(SOURCES), ranks))
        columns = ([[answers[j][s][column] for s in range(K)] for j in mine] for column in range(3))
        status, tokens, texts = (list(column) for column in columns)
        keys = np.array([[answer_key(text) for text in row] for row in texts], np.int64).reshape(len(mine), K)
        shape = (len(mine), K)
        found.append(Share(5, np.array(mine, np.int32), np.array(status, np.int32).reshape(shape), np.array(tokens).reshape(shape), keys, 1.0 + rank))
    return found, answers


@pytest.mark.parametrize("ranks", [1, 4, 13])
def test_summary_is_what_counting_gives(ranks: int) -> None:
    """Also with ranks that had no problem, and shares in any order."""
    shares, answers = shares_of(ranks)
    found = summarise(shares[::-1], SOURCES)
    assert found.version == 5 and found.seconds == ranks
    assert [result.source for result in found.sources] == ["products", "sums"]
    for result in (found.total, *found.sources):
        mine = [answers[j] for j in answers if result.source in ("", SOURCES[j])]
        flat = [answer for row in mine for answer in row]
        count = Counter(status for status, _, _ in flat)
        assert (result.num_problems, result.k, result.correct) == (len(mine), K, count[Status.RIGHT])
        assert result.accuracy == pytest.approx(count[Status.RIGHT] / len(flat))
        assert result.pass_k == pytest.approx(sum(any(status == Status.RIGHT for status, _, _ in row) for row in mine) / len(mine))
        assert set(result.passes) == {1, 2, 3} and result.passes[1] == pytest.approx(result.accuracy)
        assert result.answer_tokens_mean == pytest.approx(sum(tokens for _, tokens, _ in flat) / len(flat))
        assert (result.truncated, result.no_answer) == (count[Status.TRUNCATED], count[Status.NO_ANSWER])
        assert result.ungraded == sum(number for status, number in count.items() if status not in GRADED)
        assert result.ci_low <= result.accuracy <= result.ci_high
    assert replace(found, seconds=0) == replace(summarise(shares_of(1)[0], SOURCES), seconds=0), "the number of ranks changes nothing"


def test_programs_have_no_majority() -> None:
    share = Share(0, np.array([0]), np.array([[0, 1]]), np.array([[3, 4]]), np.full((1, 2), NO_VOTE), 1.0)
    assert math.isnan(summarise([share], ["code"]).total.majority_k)


def test_pieces_are_small_and_lose_nothing() -> None:
    texts = ["a" * n for n in (0, 10, 40_000, 60_000, MAX_ANSWER_CHARS)] + ["\u20ac" * MAX_ANSWER_CHARS] * 3
    answers = [AnswerText.of(j, 0, text, None, Status.WRONG, 0.0, 1, (0, 0)) for j, text in enumerate(texts)]
    found = list(pieces("evaluation", 7, answers))
    assert [answer for piece in found for answer in piece.answers] == answers
    assert len(found) > 1 and all(sum(len(a.answer.encode()) for a in piece.answers) <= PIECE_BYTES or len(piece.answers) == 1 for piece in found)
    assert list(pieces("evaluation", 7, [])) == []
    long = AnswerText.of(0, 0, "b" + "x" * 40_000 + "e", None, Status.WRONG, 0.0, 1, (0, 0))
    assert long.answer_chars == 40_002 and long.answer.startswith("bxx") and long.answer.endswith("xxe") and "23618 of 40002 characters left out" in long.answer
    assert shorten("short", 5) == "short"


@pytest.mark.parametrize(("num_steps", "blocks"), [(3, 3), (100, 50), (1000, 50)])
def test_saved_groups_are_spread_over_the_run(num_steps: int, blocks: int) -> None:
    config = Config(train=Train(num_steps=num_steps, batch_size=40, group_size=4), evaluation=Evaluation(save_training_groups=2))
    saved = [ticket for ticket in range(10 * num_steps) if is_saved(ticket, config)]
    assert len(saved) == 2 * blocks and max(saved) >= 10 * num_steps * (1 - 1 / blocks)
    assert not any(is_saved(ticket, replace(config, evaluation=Evaluation(save_training_groups=0))) for ticket in range(50))
