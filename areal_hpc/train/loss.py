"""Objectives as pure functions of per-token log-probabilities, and what is watched while they are optimised.

Shapes: M = scored tokens (answer tokens) of a micro-batch. All objectives return the loss of each token, to be minimised. The trainer adds them up over
the tokens of a mini-batch on *all* ranks and divides by the number of trained tokens of the mini-batch on all ranks (token-level mean), so the result
does not depend on packing, micro-batches or rank count.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decoupled_ppo(logprobs_M: Tensor, prox_logprobs_M: Tensor, behav_logprobs_M: Tensor, advantages_M: Tensor, clip_eps: float) -> Tensor:
    """Decoupled PPO, eq. 5 of arXiv 2505.24298 (after arXiv 2110.00641): loss of each token, float [M].

        - pi_prox / pi_behav * min(u A, clip(u, 1 - eps, 1 + eps) A),   u = pi_theta / pi_prox

    pi_prox are the parameters just before this update step. The factor pi_prox / pi_behav corrects for sampling with an older policy: a constant (no
    gradient flows through it) and always applied, unclipped. With pi_prox = pi_behav this is PPO.
    """
    weight_M = torch.exp(prox_logprobs_M - behav_logprobs_M).detach()
    return weight_M * ppo(logprobs_M, prox_logprobs_M, advantages_M, clip_eps)


def ppo(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip_eps: float) -> Tensor:
    """Clipped PPO, eq. 2 of arXiv 2505.24298 (arXiv 1707.06347): loss of each token, float [M].

        - min(u A, clip(u, 1 - eps, 1 + eps) A),   u = pi_theta / pi_old

    The recipe "ppo" takes the behaviour policy as pi_old, which is naive when trajectories are stale: the clip then holds the policy near an old one.
    """
    ratio_M = torch.exp(logprobs_M - old_logprobs_M.detach())
    return -torch.minimum(ratio_M * advantages_M, ratio_M.clamp(1 - clip_eps, 1 + clip_eps) * advantages_M)


SUMS = ("tokens", "loss", "entropy", "ratio", "clipped", "prox_behav", "kl_behav", "gap_tokens", "gap")
"""Entries of the first vector that `diagnostics` returns: sums over tokens, to be added over micro-batches and ranks."""

MAXIMA = ("ratio_max", "prox_behav_max")
"""Entries of the second vector: maxima over tokens."""


@torch.no_grad()
def diagnostics(
    loss_M: Tensor,
    entropy_M: Tensor,
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    behav_logprobs_M: Tensor,
    advantages_M: Tensor,
    current_M: Tensor,
    clip_eps: float,
) -> tuple[Tensor, Tensor]:
    """(sums float64 [len(SUMS)], maxima float64 [len(MAXIMA)]) over the tokens.

    ratio = pi_theta / pi_old, where pi_old is what the objective clips against (pi_prox, or pi_behav under "ppo"); clipped = tokens whose gradient the clip
    removes; prox_behav = pi_old / pi_behav; kl_behav = KL(pi_behav || pi_theta) by the low-variance estimate r - 1 - log r with r = pi_theta / pi_behav
    (k3 of joschu.net/blog/kl-approx.html); gap = |log pi_theta - log pi_behav| over the tokens marked in `current_M` (bool): those that the very parameters in
    use sampled, where any difference is the engine's.
    """
    ratio_M, prox_behav_M = torch.exp(logprobs_M - old_logprobs_M), torch.exp(old_logprobs_M - behav_logprobs_M)
    log_ratio_M = logprobs_M - behav_logprobs_M
    clipped_M = torch.where(advantages_M > 0, ratio_M > 1 + clip_eps, (ratio_M < 1 - clip_eps) & (advantages_M < 0))
    kl_M = torch.expm1(log_ratio_M) - log_ratio_M
    rows = [torch.ones_like(loss_M), loss_M, entropy_M, ratio_M, clipped_M, prox_behav_M, kl_M, current_M, log_ratio_M.abs() * current_M]
    return torch.stack([row.double().sum() for row in rows]), torch.stack([ratio_M.max(), prox_behav_M.max()]).double()
