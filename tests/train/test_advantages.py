"""Advantages against per-sample loops written from the definition."""

import numpy as np
import pytest

from areal_hpc.train.advantages import advantages, has_contrast, overlong_penalty

MODES = ["group", "group+batch", "mean", "mean+batch", "leave-one-out", "leave-one-out+batch", "batch"]


def reference(reward_S, group_S, valid_S, mode):
    result = np.zeros(len(reward_S))
    labels = [0] * len(reward_S) if mode == "batch" else list(group_S)
    base = mode.removesuffix("+batch")
    for s in range(len(reward_S)):
        mine = [reward_S[k] for k in range(len(reward_S)) if labels[k] == labels[s] and valid_S[k]]
        others = [reward_S[k] for k in range(len(reward_S)) if labels[k] == labels[s] and valid_S[k] and k != s]
        if valid_S[s] and len(set(mine)) > 1:
            baseline = np.mean(others) if base == "leave-one-out" else np.mean(mine)
            result[s] = (reward_S[s] - baseline) / (np.std(mine) if base in ("group", "batch") else 1.0)
    if mode.endswith("+batch"):
        trained = [result[s] for s in range(len(reward_S)) if valid_S[s]]
        result = (result - np.mean(trained)) / np.std(trained) * (result != 0)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_against_definition(mode):
    """Groups of one to nine valid answers."""
    rng = np.random.default_rng(1)
    group_S = rng.permutation(np.repeat(np.arange(100, 112), 9))
    reward_S = rng.choice([-5.0, 5.0, 0.3], len(group_S))
    valid_S = rng.random(len(group_S)) < np.linspace(0.15, 1, 12)[group_S - 100]
    assert len(set(np.bincount(group_S[valid_S] - 100))) > 4, "sizes must vary"
    reward_S[~valid_S] = np.nan  # a failed sample has no reward
    np.testing.assert_allclose(advantages(reward_S, group_S, valid_S, mode), reference(reward_S, group_S, valid_S, mode), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES[:-1])
def test_groups_without_contrast_are_exactly_zero(mode):
    reward_S = np.array([0.1, 0.1, 0.1, 5.0, -5.0, 5.0, 7.0, 3.0, -1.0])
    group_S = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    valid_S = np.array([1, 1, 1, 1, 1, 1, 1, 0, 0], bool)  # group 2: one valid sample
    advantage_S = advantages(reward_S, group_S, valid_S, mode)
    assert (advantage_S[group_S != 1] == 0).all()
    assert (advantage_S[group_S == 1] != 0).all()
    assert has_contrast(reward_S, group_S, valid_S).tolist() == [False, True, False]


@pytest.mark.parametrize("mode", MODES)
def test_advantages_of_valid_samples_average_to_zero(mode):
    rng = np.random.default_rng(2)
    group_S, valid_S = np.repeat(np.arange(8), 5), rng.random(40) < 0.7
    advantage_S = advantages(rng.normal(size=40), group_S, valid_S, mode)
    assert advantage_S[valid_S].mean() == pytest.approx(0, abs=1e-12)
    assert (advantage_S[~valid_S] == 0).all()


def test_batch_mode_normalises_valid_samples():
    reward_S = np.array([5.0, -5.0, 5.0, 100.0])
    advantage_S = advantages(reward_S, np.arange(4), np.array([1, 1, 1, 0], bool), "batch")
    assert advantage_S[3] == 0
    assert advantage_S[:3].mean() == pytest.approx(0)
    assert advantage_S[:3].std() == pytest.approx(1)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_valid(mode):
    assert (advantages(np.ones(4), np.array([0, 0, 1, 1]), np.zeros(4, bool), mode) == 0).all()


def test_overlong_penalty_is_linear_in_the_buffer():
    np.testing.assert_allclose(overlong_penalty(np.array([1, 80, 90, 100]), 100, 20, 3.0), [0, 0, 1.5, 3.0])
    assert (overlong_penalty(np.array([1, 100]), 100, 0, 3.0) == 0).all()
