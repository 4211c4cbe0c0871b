"""Advantage of each answer from its reward: no critic, gamma = lambda = 1, so all tokens of an answer share one advantage.

    group         (reward - mean of the group) / standard deviation of the group          GRPO, arXiv 2402.03300
    batch         (reward - mean of the global batch) / standard deviation of the batch
    group+batch   group, then divided by the standard deviation over the global batch     the default; the paper normalises over the global batch

Statistics are per *sample*: each valid answer counts once, whatever its length (token-weighted statistics would let long answers shift the others'
advantages). After "group" the mean over the batch is zero already, so the second normalisation only scales, and zero stays exactly zero.
Standard deviations are those of the population (divided by the number of samples).
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
        return _normalised(reward_S, np.zeros(len(reward_S), np.int64), valid_S)
    assert mode in ("group", "group+batch"), mode
    advantage_S = _normalised(reward_S, np.unique(np.asarray(group_S), return_inverse=True)[1], valid_S)
    if mode == "group+batch" and valid_S.any():
        advantage_S /= max(float(np.sqrt(np.mean(advantage_S[valid_S] ** 2))), STD_FLOOR)
    return advantage_S


def _normalised(reward_S: np.ndarray, group_S: np.ndarray, valid_S: np.ndarray) -> np.ndarray:
    """(reward - mean) / std over the valid samples of each group (labels 0, 1, ...); exactly 0 where a group's rewards are all equal."""
    num_groups = int(group_S.max(initial=-1)) + 1
    group_V, reward_V = group_S[valid_S], reward_S[valid_S]
    count_G = np.maximum(np.bincount(group_V, minlength=num_groups), 1)
    centred_V = reward_V - (np.bincount(group_V, reward_V, num_groups) / count_G)[group_V]
    std_G = np.sqrt(np.bincount(group_V, centred_V**2, num_groups) / count_G)
    low_G, high_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low_G, group_V, reward_V)
    np.maximum.at(high_G, group_V, reward_V)
    differs_V = (low_G < high_G)[group_V]  # the mean of equal numbers may differ from them by a rounding error
    advantage_S = np.zeros(len(reward_S))
    advantage_S[valid_S] = np.where(differs_V, centred_V / np.maximum(std_G, STD_FLOOR)[group_V], 0.0)
    return advantage_S
