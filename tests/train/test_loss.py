"""Objectives against the formulas of the paper in float64 NumPy, gradients against finite differences of those."""

import numpy as np
import pytest
import torch

from areal_hpc.train import loss

EPS = 0.2


def paper_loss(theta, prox, behav, advantage):
    """Eq. 5, minus sign added: what the reader of the paper would write."""
    weight = np.exp(prox - behav)
    u = np.exp(theta - prox)
    unclipped = u * advantage
    clipped = np.clip(u, 1 - EPS, 1 + EPS) * advantage
    return -weight * np.minimum(unclipped, clipped)


@pytest.fixture
def case():
    rng = np.random.default_rng(3)
    theta = rng.normal(-1.5, 0.7, 400)
    prox = theta + rng.normal(0, 0.3, 400)
    behav = prox + rng.normal(0, 0.5, 400)
    return theta, prox, behav, rng.normal(0, 1, 400)


def tensors(case):
    return [torch.tensor(x) for x in case]


def test_decoupled_is_equation_5(case):
    np.testing.assert_allclose(loss.decoupled_ppo(*tensors(case), EPS).numpy(), paper_loss(*case), rtol=1e-12)
    float32 = [torch.tensor(x, dtype=torch.float32) for x in case]
    np.testing.assert_allclose(loss.decoupled_ppo(*float32, EPS).numpy(), paper_loss(*case), rtol=1e-5, atol=1e-6)


def test_reduces_to_ppo_when_prox_is_behav(case):
    theta, _, behav, advantage = tensors(case)
    np.testing.assert_array_equal(loss.decoupled_ppo(theta, behav, behav, advantage, EPS), loss.ppo(theta, behav, advantage, EPS))
    np.testing.assert_allclose(loss.ppo(theta, behav, advantage, EPS), paper_loss(case[0], case[2], case[2], case[3]), rtol=1e-12)


def test_weight_is_never_skipped(case):
    """Shifting pi_behav by log 2 must halve every token's loss, also in the first mini-batch where pi_theta = pi_prox."""
    theta, _, behav, advantage = tensors(case)
    once = loss.decoupled_ppo(theta, theta.detach(), behav, advantage, EPS)
    np.testing.assert_allclose(once, -torch.exp(theta - behav) * advantage, rtol=1e-12)
    np.testing.assert_allclose(loss.decoupled_ppo(theta, theta, behav + np.log(2), advantage, EPS), once / 2, rtol=1e-12)


def test_gradient_is_that_of_the_formula_with_constant_weight(case):
    theta, prox, behav, advantage = tensors(case)
    inputs = [theta.requires_grad_(), prox.requires_grad_(), behav.requires_grad_()]
    loss.decoupled_ppo(*inputs, advantage, EPS).sum().backward()
    step = 1e-6
    differences = (paper_loss(case[0] + step, *case[1:]) - paper_loss(case[0] - step, *case[1:])) / (2 * step)
    np.testing.assert_allclose(theta.grad.numpy(), differences, rtol=1e-6, atol=1e-8)
    assert prox.grad is None and behav.grad is None  # pi_prox / pi_behav is a constant


def test_diagnostics(case):
    theta, prox, behav, advantage = case
    entropy, current = np.linspace(0, 1, 400), np.arange(400) % 3 == 0
    per_token = paper_loss(*case)
    args = [torch.tensor(x) for x in (per_token, entropy, theta, prox, behav, advantage, current)]
    sums, maxima = loss.diagnostics(*args, EPS)
    u, r = np.exp(theta - prox), np.exp(theta - behav)
    theta_t = torch.tensor(theta, requires_grad=True)
    loss.ppo(theta_t, torch.tensor(prox), torch.tensor(advantage), EPS).sum().backward()
    expected = {
        "tokens": 400,
        "loss": per_token.sum(),
        "entropy": entropy.sum(),
        "ratio": u.sum(),
        "clipped": (theta_t.grad.numpy() == 0).sum(),
        "prox_behav": np.exp(prox - behav).sum(),
        "kl_behav": (r - 1 - np.log(r)).sum(),
        "gap_tokens": current.sum(),
        "gap": np.abs(theta - behav)[current].sum(),
    }
    assert list(expected) == list(loss.SUMS)
    np.testing.assert_allclose(sums, list(expected.values()), rtol=1e-9)
    np.testing.assert_allclose(maxima, [u.max(), np.exp(prox - behav).max()], rtol=1e-9)
