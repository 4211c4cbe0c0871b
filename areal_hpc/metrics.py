"""Metrics of k answers to each of Q problems: pure functions on arrays, no torch.

Q problems, K answers to each (the same number), shapes [Q, K].

1. avg@k: the mean of `right_QK`, the accuracy of one answer.
2. pass@k: the chance that at least one of k answers is right, estimated without bias from K >= k answers (Chen et al. 2021, arXiv 2107.03374, eq. 1).
3. majority@k: the accuracy of the answer that most of the K answers agree on.
4. The interval of avg@k: answers to one problem are not independent (two problems answered a hundred times each are not two hundred problems), so the
   problem is the unit that is drawn (arXiv 2411.00640, section 2.2), and Wilson's interval is taken at the effective number of answers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

NO_ANSWER = 0
"""Key of an answer that is missing: it casts no vote."""
NO_VOTE = -1
"""Key of an answer of a kind that cannot be voted on (programs: two right ones are hardly ever equal)."""
Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


def answer_key(text: str | None, *, votes: bool = True) -> int:
    """Two answers get the same key (1 .. 2^63 - 1) when their texts agree but for case, white space, dollar signs and a final full stop."""
    if not votes:
        return NO_VOTE
    plain = "" if text is None else " ".join(text.replace("$", "").split()).removesuffix(".").casefold()
    if not plain:
        return NO_ANSWER
    digest = hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**63 - 1) + 1


def pass_at_k(num_right_Q: np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """float64 [Q]: 1 - C(n - c, k) / C(n, k) for c right ones among n = `num_samples` answers, in exact integers. Raises ValueError unless 1 <= k <= n."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} answers; use k from 1 to {num_samples}")
    every = math.comb(num_samples, k)
    of_count = np.array([(every - math.comb(num_samples - right, k)) / every for right in range(num_samples + 1)])
    estimates: np.ndarray = of_count[np.asarray(num_right_Q, np.int64)]
    return estimates


def majority(answer_QK: np.ndarray, right_QK: np.ndarray) -> np.ndarray:
    """float64 [Q]: is the answer with most votes right? `answer_QK`: keys of `answer_key`.

    A missing answer casts no vote; without any vote the problem counts as wrong. Among answers with equally many votes one is drawn, so a tie counts with the
    share of right ones among them. Equal texts graded differently (a grader may look at more than the marked answer) count with their share of right ones.
    Not a number: the answers cannot be voted on.
    """
    return np.array([_winner(answers, right) for answers, right in zip(answer_QK, right_QK, strict=True)], np.float64)


def _winner(answer_K: np.ndarray, right_K: np.ndarray) -> float:
    if (answer_K == NO_VOTE).any():
        return math.nan
    keys, votes = np.unique(answer_K[answer_K != NO_ANSWER], return_counts=True)
    if not len(keys):
        return 0.0
    return float(np.mean([right_K[answer_K == key].mean() for key in keys[votes == votes.max()]]))


def mean_or_nan(values_Q: np.ndarray) -> float:
    """Mean of those that are numbers; not a number when none is."""
    numbers = values_Q[~np.isnan(values_Q)]
    return float(numbers.mean()) if len(numbers) else math.nan


def wilson(share: float, size: float) -> tuple[float, float]:
    """95 % interval of a proportion `share` seen among `size` independent draws (Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    z2 = Z95**2
    center = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = Z95 / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size**2))
    return (0.0 if share == 0 else max(0.0, center - half)), (1.0 if share == 1 else min(1.0, center + half))  # exactly, whatever the rounding


def interval(right_QK: np.ndarray) -> tuple[float, float]:
    """95 % interval of avg@k over problems drawn like these: Wilson's at the effective size; for K = 1 exactly Wilson's of Q answers."""
    return wilson(float(np.mean(right_QK)), effective_size(right_QK))


def effective_size(right_QK: np.ndarray) -> float:
    """Independent answers that would give the mean the variance it has: between Q (answers to a problem always agree) and Q K (they are independent).

    p (1 - p) / n_eff = variance of the problems' means / Q. Where everything is right, or wrong, nothing tells how far answers agree: Q.
    """
    num_problems, num_samples = right_QK.shape
    share = float(np.mean(right_QK))
    variance = float(np.var(right_QK.mean(axis=1)))
    if share in (0.0, 1.0):
        return float(num_problems)
    most = float(num_problems * num_samples)
    return most if variance == 0 else min(most, num_problems * share * (1 - share) / variance)


def powers_of_two(most: int) -> Sequence[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    return sorted({1 << bit for bit in range(most.bit_length()) if 1 << bit < most} | {most})
