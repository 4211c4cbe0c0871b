"""Objectives as pure functions of per-token log-probabilities.

Shapes: M = scored tokens (those that the model sampled) of a micro-batch, answer after answer; S = its answers. sg: no gradient flows through it.

1. A *surrogate* (`SURROGATES`) gives the loss of each token, to be minimised, from log pi_theta, log pi_old and the advantage.
2. Where pi_old is pi_prox, each token's loss is multiplied by the constant pi_prox / pi_behav (`behaviour_weight`), which corrects for the policy that sampled.
3. `kl_penalty` of the reference model is added, times its coefficient.
4. *Aggregation* (objectives.py): the trainer adds up the tokens of a mini-batch on *all* ranks, each token divided by its answer's length for `sequence`, and
   divides by one number that is known beforehand. Answers are never cut, so the result does not depend on packing, micro-batches or rank count.
   Numbers of tokens and answers count all that have a weight above zero: those that the clip or `masked` silences stay in the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from areal_hpc.objectives import Settings


class Answers:
    """Which tokens of a micro-batch form an answer."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.num = len(lengths)
        self.lengths_S = torch.tensor(lengths, device=device)
        self.answer_M = torch.repeat_interleave(self.lengths_S, output_size=sum(lengths))

    def sum(self, values_M: Tensor) -> Tensor:
        """Sum over the answer that each token belongs to, at each of its tokens [M]."""
        return values_M.new_zeros(self.num).index_add(0, self.answer_M, values_M)[self.answer_M]

    def mean(self, values_M: Tensor) -> Tensor:
        """Mean over the answer that each token belongs to, at each of its tokens [M]."""
        return self.sum(values_M) / self.lengths_S[self.answer_M]


class Clip(NamedTuple):
    """The ratio is clipped to [1 - low, 1 + high]; with A < 0 it stops counting above `dual` (inf: never)."""

    low: float
    high: float
    dual: float = math.inf


class Terms(NamedTuple):
    """What a surrogate gives for each token."""

    loss_M: Tensor
    ratio_M: Tensor
    """pi_theta / pi_old as the objective uses it (of the whole answer for gspo); no gradient."""
    clipped_M: Tensor
    """bool: the clip changed this token's gradient."""


def ppo(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip: Clip, answers: Answers) -> Terms:
    """Clipped PPO, arXiv 1707.06347 (eq. 2 of 2505.24298).

        - min(u A, clip(u, 1 - low, 1 + high) A),   u = pi_theta / pi_old;      where A < 0 at most -dual A      (dual clip, arXiv 1912.09729)

    GRPO (arXiv 2402.03300, eq. 3), Dr. GRPO (2503.20783) and DAPO (2503.14476, eq. 8: high > low) are this function with other advantages and aggregations.
    pi_old = pi_behav is naive when trajectories are stale: the clip then holds the policy near an old one. pi_old = pi_prox, times `behaviour_weight`, is decoupled PPO
    (2505.24298, eq. 5, after 2110.00641).
    """
    ratio_M = torch.exp(logprobs_M - old_logprobs_M.detach())
    return _clipped(ratio_M, advantages_M, clip)


def gspo(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip: Clip, answers: Answers) -> Terms:
    """GSPO, arXiv 2507.18071, eq. 5 to 7: PPO's clip on one ratio per answer, s = (prod_t pi_theta / pi_old)^(1 / length), the same at all its tokens."""
    ratio_M = torch.exp(answers.mean(logprobs_M - old_logprobs_M.detach()))
    return _clipped(ratio_M, advantages_M, clip)


def cispo(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip: Clip, answers: Answers) -> Terms:
    """CISPO, arXiv 2506.13585, eq. 4 and 5: -sg(clip(u, 1 - low, 1 + high)) A log pi_theta. The clip bounds the weight of a token and silences none."""
    ratio_M = torch.exp(logprobs_M - old_logprobs_M).detach()
    weight_M = ratio_M.clamp(1 - clip.low, 1 + clip.high)
    return Terms(-weight_M * advantages_M * logprobs_M, ratio_M, (weight_M != ratio_M) & (advantages_M != 0))


def rloo(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, clip: Clip, answers: Answers) -> Terms:
    """REINFORCE leave-one-out, arXiv 2402.14740, eq. 8: -A log pi_theta, A the reward minus the mean of the group's others. No clip."""
    ratio_M = torch.exp(logprobs_M - old_logprobs_M).detach()
    return Terms(-advantages_M * logprobs_M, ratio_M, torch.zeros_like(ratio_M, dtype=torch.bool))


def _clipped(ratio_M: Tensor, advantages_M: Tensor, clip: Clip) -> Terms:
    loss_M = -torch.minimum(ratio_M * advantages_M, ratio_M.clamp(1 - clip.low, 1 + clip.high) * advantages_M)
    seen_M = ratio_M.detach()
    clipped_M = torch.where(advantages_M > 0, seen_M > 1 + clip.high, (seen_M < 1 - clip.low) & (advantages_M < 0))
    if clip.dual < math.inf:
        loss_M = torch.where(advantages_M < 0, torch.minimum(loss_M, -clip.dual * advantages_M), loss_M)
        clipped_M |= (advantages_M < 0) & (seen_M > clip.dual)
    return Terms(loss_M, seen_M, clipped_M)


Surrogate = Callable[[Tensor, Tensor, Tensor, Clip, Answers], Terms]
SURROGATES: dict[str, Surrogate] = {
    "decoupled": ppo,
    "ppo": ppo,
    "grpo": ppo,
    "dr-grpo": ppo,
    "rloo": rloo,
    "dapo": ppo,
    "gspo": gspo,
    "cispo": cispo,
}
"""Same names as `objectives.OBJECTIVES`, which says what else makes up an objective."""


def behaviour_weight(prox_logprobs_M: Tensor, behav_logprobs_M: Tensor, kind: str, level: str, cap: float | None, answers: Answers) -> tuple[Tensor, Tensor]:
    """(w, cut), float and bool [M]: the constant factor of each token's loss, and whether the cap changed it. No gradient flows through either.

        full        w = pi_prox / pi_behav                        eq. 5 of arXiv 2505.24298: always applied, unbounded
        truncated   w = min(pi_prox / pi_behav, cap)              truncated importance sampling, Ionides 2008 (doi 10.1198/106186008X320456)
        masked      w = pi_prox / pi_behav, 0 where that > cap    masked importance sampling

    `level` sequence: pi_prox / pi_behav is the product over the tokens of the answer, the same at each of them. A cut token still counts in the denominator.
    """
    log_weight_M = (prox_logprobs_M - behav_logprobs_M).detach()
    if level == "sequence":
        log_weight_M = answers.sum(log_weight_M)
    if kind == "full":
        return torch.exp(log_weight_M), torch.zeros_like(log_weight_M, dtype=torch.bool)
    assert cap is not None and kind in ("truncated", "masked"), (kind, cap)
    cut_M = log_weight_M > math.log(cap)
    weight_M = torch.exp(log_weight_M.clamp(max=math.log(cap)))  # clamped before exp: a product over an answer may overflow
    return (weight_M if kind == "truncated" else weight_M * ~cut_M), cut_M


def loglinear_prox(logprobs_M: Tensor, behav_logprobs_M: Tensor, staleness_M: Tensor) -> Tensor:
    """log pi_prox without a forward pass (A-3PO, arXiv 2512.06547): float [M], no gradient.

        log pi_prox = (log pi_behav + s log pi_theta) / (s + 1),   s = version trained - version that sampled the token

    By versions, pi_prox (version i) lies s of s + 1 steps on the way from pi_behav (i - s) to pi_theta (i + 1): a fresh token's pi_prox is pi_behav,
    an old one's is nearly pi_theta.
    """
    return (behav_logprobs_M + staleness_M * logprobs_M.detach()) / (staleness_M + 1)


def kl_penalty(logprobs_M: Tensor, reference_logprobs_M: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(pi_theta || reference) at each token in nats, float [M]; joschu.net/blog/kl-approx.html, d = log pi_theta - log reference.

        k1   d                      k2   d^2 / 2                      k3   exp(-d) - 1 + d   (GRPO, arXiv 2402.03300, eq. 4)

    The gradient of k1 itself is zero on average over pi_theta's own samples, so here it has that of the expectation it estimates: d times that of log pi_theta
    (the same as k2's). Not weighted by pi_prox / pi_behav.
    """
    difference_M = logprobs_M - reference_logprobs_M.detach()
    if estimator == "k1":
        constant_M = difference_M.detach()
        return constant_M + constant_M * (logprobs_M - logprobs_M.detach())
    if estimator == "k2":
        return difference_M.square() / 2
    assert estimator == "k3", estimator
    return torch.expm1(-difference_M) + difference_M


class TokenLosses(NamedTuple):
    """The loss of each token of a micro-batch, and what is watched of it."""

    loss_M: Tensor
    ratio_M: Tensor
    clipped_M: Tensor
    old_logprobs_M: Tensor
    cut_M: Tensor
    """bool: the cap changed this token's pi_prox / pi_behav."""


def token_losses(
    chosen: Settings,
    kl_coef: float,
    *,
    logprobs_M: Tensor,
    behav_logprobs_M: Tensor,
    advantages_M: Tensor,
    answers: Answers,
    prox_logprobs_M: Tensor | None = None,
    reference_logprobs_M: Tensor | None = None,
    staleness_M: Tensor | None = None,
) -> TokenLosses:
    """Surrogate, weight and penalty as `chosen`: the one path of the trainer through all objectives.

    `prox_logprobs_M` None: the parameters are still those before the step, so that log pi_prox is `logprobs_M` itself. `staleness_M` (versions) is needed
    for prox=loglinear, `reference_logprobs_M` for a `kl_coef` above zero.
    """
    if chosen.old_policy == "behav":
        old_M = behav_logprobs_M
    elif chosen.prox == "loglinear":
        assert staleness_M is not None
        old_M = loglinear_prox(logprobs_M, behav_logprobs_M, staleness_M)
    else:
        old_M = logprobs_M.detach() if prox_logprobs_M is None else prox_logprobs_M
    loss_M, ratio_M, clipped_M = SURROGATES[chosen.objective](logprobs_M, old_M, advantages_M, _clip(chosen), answers)
    cut_M = torch.zeros_like(clipped_M)
    if chosen.behav_weight is not None:
        assert chosen.behav_level is not None
        weight_M, cut_M = behaviour_weight(old_M, behav_logprobs_M, chosen.behav_weight, chosen.behav_level, chosen.behav_cap, answers)
        loss_M = weight_M * loss_M
    if kl_coef > 0:
        assert reference_logprobs_M is not None and chosen.kl_estimator is not None
        loss_M = loss_M + kl_coef * kl_penalty(logprobs_M, reference_logprobs_M, chosen.kl_estimator)
    return TokenLosses(loss_M, ratio_M, clipped_M, old_M, cut_M)


def _clip(chosen: Settings) -> Clip:
    if chosen.clip_low is None or chosen.clip_high is None:
        return Clip(math.inf, math.inf)
    return Clip(chosen.clip_low, chosen.clip_high, math.inf if chosen.dual_clip is None else chosen.dual_clip)
