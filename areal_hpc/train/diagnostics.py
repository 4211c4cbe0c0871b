"""What is watched while an objective is optimised: sums over the tokens of micro-batches, reduced over the ranks once per step.

Shapes: M = scored tokens of a micro-batch. docs/file_format.md (columns of /steps) defines the numbers for readers of the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.train.loss import TokenLosses

if TYPE_CHECKING:
    from areal_hpc.train.sharding import ShardedDecoder

SUMS = ("tokens", "loss", "entropy", "ratio", "clipped", "prox_behav", "cut", "kl_behav", "kl_ref", "weight", "weight_squared", "gap_tokens", "gap")
"""Entries of the first vector that `token_sums` returns: sums over tokens, to be added over micro-batches and ranks."""

MAXIMA = ("ratio_max", "prox_behav_max")
"""Entries of the second vector: maxima over tokens."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What one step did, the same numbers on every training rank. Means are over trained tokens of the global batch; nan where there is nothing to take one of."""

    train_tokens: int
    loss: float
    """Sum of the mini-batches' losses before division, over the sum of what they were divided by."""
    entropy: float
    """nats"""
    grad_norm: float
    """Before clipping, mean over the updates."""
    lr: float
    """Of the last update."""
    ratio_mean: float
    """pi_theta / pi_old as the objective uses it; pi_old is pi_prox, or pi_behav (`train.old_policy`)."""
    ratio_max: float
    clipped_share: float
    """Tokens whose gradient the clip changed."""
    prox_behav_mean: float
    """pi_old / pi_behav of each token (1 where pi_old is pi_behav)."""
    prox_behav_max: float
    cut_share: float
    """Tokens whose pi_prox / pi_behav the cap truncated or masked."""
    kl_behav: float
    """Estimate of KL(pi_behav || pi_theta), nats."""
    kl_ref: float
    """Estimate of KL(pi_theta || reference), nats; nan without a reference model."""
    effective_share: float
    """Effective sample size of the trained tokens over their number: (sum w)^2 / (N sum w^2), w = pi_theta / pi_behav."""
    logprob_gap: float
    """Mean |log pi_theta - log pi_behav| over the tokens that this very policy version sampled, where any difference is the engine's; nan without such tokens."""
    num_gap_tokens: int
    num_updates: int
    num_skipped: int
    """Updates left out because the loss or a gradient was not finite."""
    num_empty: int
    """Mini-batches without a trained token, left out."""
    num_idle: int
    """Micro-batches, over all ranks, computed only to stay in step with other ranks."""
    model_flops: float
    """Of forward and backward over the trained trajectories, all ranks (`models/flops.py`)."""
    peak_flops: float
    """FLOP/s that the devices of all training ranks could do together (`utilisation.py`)."""
    peak_memory_bytes: int
    """Largest over the training ranks, since the start."""


@torch.no_grad()
def token_sums(
    losses: TokenLosses,
    scaled_loss_M: Tensor,
    entropy_M: Tensor,
    logprobs_M: Tensor,
    behav_logprobs_M: Tensor,
    reference_logprobs_M: Tensor | None,
    current_M: Tensor,
) -> tuple[Tensor, Tensor]:
    """(sums float64 [len(SUMS)], maxima float64 [len(MAXIMA)]) over the tokens.

    `scaled_loss_M` is what the trainer adds up; prox_behav = pi_old / pi_behav; kl_behav = KL(pi_behav || pi_theta) by the low-variance estimate r - 1 - log r
    with r = pi_theta / pi_behav (k3 of joschu.net/blog/kl-approx.html), kl_ref = KL(pi_theta || reference) likewise with r = reference / pi_theta; weight = r of
    kl_behav; gap = |log pi_theta - log pi_behav| over the tokens marked in `current_M` (bool): those that the very parameters in use sampled.
    """
    prox_behav_M = torch.exp(losses.old_logprobs_M - behav_logprobs_M)
    log_weight_M = logprobs_M - behav_logprobs_M
    weight_M = torch.exp(log_weight_M)
    log_ref_M = torch.zeros_like(logprobs_M) if reference_logprobs_M is None else reference_logprobs_M - logprobs_M
    rows = {
        "tokens": torch.ones_like(logprobs_M),
        "loss": scaled_loss_M,
        "entropy": entropy_M,
        "ratio": losses.ratio_M,
        "clipped": losses.clipped_M,
        "prox_behav": prox_behav_M,
        "cut": losses.cut_M,
        "kl_behav": torch.expm1(log_weight_M) - log_weight_M,
        "kl_ref": torch.expm1(log_ref_M) - log_ref_M,
        "weight": weight_M,
        "weight_squared": weight_M.double().square(),
        "gap_tokens": current_M,
        "gap": log_weight_M.abs() * current_M,
    }
    return torch.stack([rows[name].double().sum() for name in SUMS]), torch.stack([losses.ratio_M.max(), prox_behav_M.max()]).double()


class Tally:
    """Sums over the micro-batches of a step, reduced over ranks once at its end."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64, device=device)
        self.lr = self.grad_norm_sum = self.denominator = self.model_flops = 0.0
        self.num_updates = self.num_skipped = self.num_empty = self.num_idle = 0
        self.loss_not_finite = torch.zeros((), dtype=torch.bool, device=device)
        """Of a micro-batch of this rank since the last update."""

    def take_loss_not_finite(self, model: ShardedDecoder) -> bool:
        """On any rank since the last update (collective)? Starts anew."""
        found = model.all_reduce(self.loss_not_finite.to(torch.int32), dist.ReduceOp.MAX)
        self.loss_not_finite.fill_(False)
        return bool(found)

    def add(self, sums: Tensor, maxima: Tensor) -> None:
        self.sums += sums
        self.maxima = torch.maximum(self.maxima, maxima)

    def stats(self, model: ShardedDecoder, *, has_reference: bool, peak_flops: float, peak_memory_bytes: int) -> BatchStats:
        """The numbers of the step, over all ranks (collective)."""
        mine = self.sums.new_tensor([self.num_idle, self.model_flops, peak_flops])
        sums = model.all_reduce(torch.cat([self.sums, mine]), dist.ReduceOp.SUM).tolist()
        maxima = model.all_reduce(torch.cat([self.maxima, self.maxima.new_tensor([peak_memory_bytes])]), dist.ReduceOp.MAX).tolist()
        total = dict(zip((*SUMS, "idle", "model_flops", "peak_flops"), sums, strict=True))
        peak = dict(zip((*MAXIMA, "memory"), maxima, strict=True))
        tokens = total["tokens"] or math.nan
        return BatchStats(
            train_tokens=int(total["tokens"]),
            loss=total["loss"] / (self.denominator or math.nan),
            entropy=total["entropy"] / tokens,
            grad_norm=self.grad_norm_sum / (self.num_updates or math.nan),
            lr=self.lr,
            ratio_mean=total["ratio"] / tokens,
            ratio_max=peak["ratio_max"] if total["tokens"] else math.nan,
            clipped_share=total["clipped"] / tokens,
            prox_behav_mean=total["prox_behav"] / tokens,
            prox_behav_max=peak["prox_behav_max"] if total["tokens"] else math.nan,
            cut_share=total["cut"] / tokens,
            kl_behav=total["kl_behav"] / tokens,
            kl_ref=total["kl_ref"] / tokens if has_reference else math.nan,
            effective_share=total["weight"] ** 2 / (tokens * (total["weight_squared"] or math.nan)),
            logprob_gap=total["gap"] / (total["gap_tokens"] or math.nan),
            num_gap_tokens=int(total["gap_tokens"]),
            num_updates=self.num_updates,
            num_skipped=self.num_skipped,
            num_empty=self.num_empty,
            num_idle=int(total["idle"]),
            model_flops=total["model_flops"],
            peak_flops=total["peak_flops"],
            peak_memory_bytes=int(peak["memory"]),
        )
