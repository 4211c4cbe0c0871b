"""Advantage of each answer from its reward: no critic, gamma = lambda = 1, so all tokens of an answer share one advantage.

    group            (reward - mean of the group) / standard deviation of the group       GRPO, arXiv 2402.03300
    mean             reward - mean of the group                                           Dr. GRPO, arXiv 2503.20783
    leave-one-out    reward - mean of the group's other answers                           RLOO, arXiv 2402.14740
    batch            (reward - mean of the global batch) / standard deviation of the batch
    ...+batch        one of the first three, then divided by the standard deviation over the global batch; group+batch is the default: the paper
                     normalises over the global batch

Statistics are per *sample*: each valid answer counts once, whatever its length (token-weighted statistics would let long answers shift the others'
advantages). Groups may differ in size when answers failed. After the group's mean is taken off, the mean over the batch is zero already, so the second
normalisation only scales, and zero stays exactly zero. Standard deviations are those of the population (divided by the number of samples).

Before that, rewards may be lowered for answers that reached the length limit, or nearly did (`penalise`, `overlong_penalty`).
"""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6
"""Smallest standard deviation that is divided by, in units of reward."""


def advantages(reward_S: np.ndarray, group_S: np.ndarray, valid_S: np.ndarray, mode: str) -> np.ndarray:
    """Advantage of each sample (float64 [S]) of a global batch.

    `reward_S` float, `group_S` any label shared by the answers to one prompt, `valid_S` bool: samples that failed enter no statistic and get 0.
    In the group modes a group with one valid sample, or with equal rewards, gives exactly 0.
    """
    reward_S, valid_S = np.asarray(reward_S, np.float64), np.asarray(valid_S, bool)
    if mode == "batch":
        return _normalised(reward_S, np.zeros(len(reward_S), np.int64), valid_S, "group")
    base, _, then_batch = mode.partition("+")
    assert base in ("group", "mean", "leave-one-out") and then_batch in ("", "batch"), mode
    advantage_S = _normalised(reward_S, np.unique(np.asarray(group_S), return_inverse=True)[1], valid_S, base)
    if then_batch and valid_S.any():
        advantage_S /= max(float(np.sqrt(np.mean(advantage_S[valid_S] ** 2))), STD_FLOOR)
    return advantage_S


def _normalised(reward_S: np.ndarray, group_S: np.ndarray, valid_S: np.ndarray, base: str) -> np.ndarray:
    """(reward - baseline) / scale over the valid samples of each group (labels 0, 1, ...); exactly 0 where a group's rewards are all equal."""
    num_groups = int(group_S.max(initial=-1)) + 1
    group_V, reward_V = group_S[valid_S], reward_S[valid_S]
    count_G = np.maximum(np.bincount(group_V, minlength=num_groups), 1)
    centred_V = reward_V - (np.bincount(group_V, reward_V, num_groups) / count_G)[group_V]
    if base == "leave-one-out":  # reward - (sum - reward) / (n - 1) = (reward - mean) * n / (n - 1)
        centred_V *= (count_G / np.maximum(count_G - 1, 1))[group_V]
    elif base == "group":
        std_G = np.sqrt(np.bincount(group_V, centred_V**2, num_groups) / count_G)
        centred_V /= np.maximum(std_G, STD_FLOOR)[group_V]
    advantage_S = np.zeros(len(reward_S))
    advantage_S[valid_S] = np.where(has_contrast(reward_S, group_S, valid_S)[group_V], centred_V, 0.0)
    return advantage_S


def has_contrast(reward_S: np.ndarray, group_S: np.ndarray, valid_S: np.ndarray) -> np.ndarray:
    """bool [G], for groups labelled 0, 1, ...: whether the rewards of the valid samples differ (their mean may differ from equal numbers by a rounding error)."""
    num_groups = int(group_S.max(initial=-1)) + 1
    low_G, high_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low_G, group_S[valid_S], reward_S[valid_S])
    np.maximum.at(high_G, group_S[valid_S], reward_S[valid_S])
    return low_G < high_G


def overlong_penalty(answer_tokens_S: np.ndarray, max_new_tokens: int, buffer_tokens: int, factor: float) -> np.ndarray:
    """What each reward is lowered by (float64 [S], >= 0): soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13.

    0 up to `max_new_tokens - buffer_tokens`, from there linearly to `factor` (units of reward) at the limit. Without a buffer: 0.
    """
    if buffer_tokens == 0:
        return np.zeros(len(answer_tokens_S))
    over_S = np.asarray(answer_tokens_S, np.float64) - (max_new_tokens - buffer_tokens)
    return factor * np.clip(over_S / buffer_tokens, 0.0, 1.0)
