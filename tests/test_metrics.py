"""Metrics of k answers against brute force: every subset, every draw, resampled problems."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc import metrics


def subsets_with_a_right_answer(right: list[bool], k: int) -> float:
    """Of all choices of k among these answers, the share that holds a right one: the definition of pass@k."""
    choices = list(itertools.combinations(right, k))
    return sum(any(choice) for choice in choices) / len(choices)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets(num_samples: int) -> None:
    for k in range(1, num_samples + 1):
        expected = [subsets_with_a_right_answer([j < right for j in range(num_samples)], k) for right in range(num_samples + 1)]
        assert metrics.pass_at_k(np.arange(num_samples + 1), num_samples, k).tolist() == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased_and_exact_for_many_answers() -> None:
    """Expected over all outcomes of n draws it is 1 - (1 - p)^k; and 1 - C(n - c, k) / C(n, k) stays exact where products of floats would not."""
    n, k, p = 12, 5, 0.15
    chances = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    assert chances @ metrics.pass_at_k(np.arange(n + 1), n, k) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert metrics.pass_at_k(np.array([1]), 1000, 100)[0] == pytest.approx(0.1, abs=1e-15)
    for wrong in (0, 13):
        with pytest.raises(ValueError, match="use k from 1 to 12"):
            metrics.pass_at_k(np.array([1]), n, wrong)


def majority_by_draws(answers: list[str | None], right: list[bool]) -> float:
    """Count votes in a dictionary; walk over every winner that a fair draw could give, and over every one of its voters."""
    votes = {answer: answers.count(answer) for answer in answers if answer is not None}
    if not votes:
        return 0.0
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    of_winner = [[r for a, r in zip(answers, right, strict=True) if a == winner] for winner in winners]
    return sum(sum(voters) / len(voters) for voters in of_winner) / len(winners)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["1", "2", "x y", None]), st.booleans()), min_size=1, max_size=7))
def test_majority_is_the_expected_draw(votes: list[tuple[str | None, bool]]) -> None:
    answers, right = [answer for answer, _ in votes], [grade and answer is not None for answer, grade in votes]
    keys = np.array([[metrics.answer_key(answer) for answer in answers]])
    assert metrics.majority(keys, np.array([right]))[0] == pytest.approx(majority_by_draws(answers, right), abs=1e-12)


def test_majority_by_hand() -> None:
    def winner(*answers: str | None, gold: str = "7") -> float:
        keys = np.array([[metrics.answer_key(answer) for answer in answers]])
        return float(metrics.majority(keys, np.array([[answer is not None and answer.strip(" $.") == gold for answer in answers]]))[0])

    assert winner("7", "7 ", "8", "9") == 1.0
    assert winner("7", "8", "8", None) == 0.0
    assert winner("7", "8") == 0.5, "a tie counts with its share"
    assert winner("7", "8", "9", "$7$.", "8") == 0.5
    assert winner(None, None) == 0.0, "nobody voted"
    assert winner("7", None, None, None) == 1.0, "a missing answer has no vote"
    assert math.isnan(metrics.majority(np.array([[metrics.answer_key("def f(): ...", votes=False)]]), np.array([[True]]))[0])
    assert math.isnan(metrics.mean_or_nan(np.array([math.nan]))) and metrics.mean_or_nan(np.array([math.nan, 1.0, 0.0])) == 0.5
    assert metrics.answer_key("\ud800") > 0 and metrics.answer_key(" $ ") == metrics.NO_ANSWER


@pytest.mark.parametrize(("right", "total"), [(0, 10), (1, 10), (15, 20), (512, 512), (1, 1)])
def test_one_answer_each_gives_wilsons_interval(right: int, total: int) -> None:
    """Against its definition: the ends are the shares p with |share - p| = z sqrt(p (1 - p) / n), found by bisection."""
    share = right / total

    def distance(p: float) -> float:
        return abs(share - p) - metrics.Z95 * math.sqrt(p * (1 - p) / total)

    def root(outside: float, inside: float) -> float:
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if distance(middle) > 0 else (outside, middle)
        return inside

    low, high = metrics.interval(np.arange(total)[:, None] < right)
    assert low == (0.0 if share == 0 else pytest.approx(root(0.0, share), abs=1e-9))
    assert high == (1.0 if share == 1 else pytest.approx(root(1.0, share), abs=1e-9))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.randoms(use_true_random=False))
def test_interval_holds_the_mean_and_repeated_answers_add_nothing(num_problems: int, k: int, random) -> None:
    right_QK = np.array([[random.random() < 0.5 for _ in range(k)] for _ in range(num_problems)])
    low, high = metrics.interval(right_QK)
    assert 0 <= low <= right_QK.mean() + 1e-12 and right_QK.mean() - 1e-12 <= high <= 1 and low < high
    assert num_problems - 1e-9 <= metrics.effective_size(right_QK) <= num_problems * k + 1e-9
    copies = np.repeat(right_QK[:, :1], 5, axis=1)
    assert metrics.interval(copies) == pytest.approx(metrics.interval(right_QK[:, :1]))


def test_interval_covers_the_truth_where_one_that_counts_answers_does_not() -> None:
    """60 problems of very different difficulty, 8 answers each, 4000 times: close to 95 % cover the mean over all problems, as resampling problems would."""
    draws = np.random.default_rng(0)
    a, b, covered, covered_by_answers = 0.5, 1.0, 0, 0
    for _ in range(4000):
        chance_Q1 = draws.beta(a, b, (60, 1))
        right_QK = draws.random((60, 8)) < chance_Q1
        low, high = metrics.interval(right_QK)
        covered += low <= a / (a + b) <= high
        low, high = metrics.wilson(float(right_QK.mean()), right_QK.size)
        covered_by_answers += low <= a / (a + b) <= high
    assert 0.935 < covered / 4000 < 0.965
    assert covered_by_answers / 4000 < 0.75
