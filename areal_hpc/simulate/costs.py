"""What things cost, in seconds: decoding, prefill, training, weight pushes. Plain numbers; where they come from is `hardware.py` (data sheets) or `fit.py` (a log).

One decode step of n sequences with C context tokens together takes

    max(host_s,  base_s + per_sequence_s * n + per_context_token_s * C)

since an engine's host prepares step k + 1 while the device computes step k. C grows by n each step, so k undisturbed steps have a closed form (`decode_seconds`)
and an inverse (`decode_steps`): the simulator never goes token by token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from areal_hpc.train.batching import plan_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCost:
    """One generation rank: an engine on one device, or on the devices of one tensor-parallel group."""

    host_s: float = 0.0
    """Least time of a step: what the host needs for one."""
    base_s: float
    """Device time of a step whatever it decodes: weights read once, kernel launches, all-reduces."""
    per_sequence_s: float = 0.0
    """Device time of each running sequence."""
    per_context_token_s: float = 0.0
    """Device time of each token in the KV cache of a running sequence."""
    prefill_token_s: float = 0.0
    """Prefill: time per token in the matrices."""
    prefill_pair_s: float = 0.0
    """Prefill: time per squared token in causal attention (a sequence of L tokens costs this times L^2)."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds; the sequence admitted last gives way when it is full, and is computed anew later."""
    max_num_running: int
    """Sequences decoded together at most (`generation.max_num_running`)."""

    def step_s(self, num: int, context: float) -> float:
        """Seconds of one step of `num` sequences with `context` tokens together."""
        return max(self.host_s, self.base_s + self.per_sequence_s * num + self.per_context_token_s * context)

    def decode_seconds(self, num: int, context: float, steps: int) -> float:
        """Seconds of `steps` steps: the sum of step_s(num, context + j num) for j < steps."""
        first = self.base_s + self.per_sequence_s * num + self.per_context_token_s * context
        growth = self.per_context_token_s * num
        at_floor = self._steps_at_floor(first, growth, steps)
        rest = steps - at_floor
        return at_floor * self.host_s + rest * (first + at_floor * growth) + growth * rest * (rest - 1) / 2

    def decode_steps(self, num: int, context: float, seconds: float) -> int:
        """The fewest steps that take `seconds` or more."""
        if seconds <= 0:
            return 0
        first = self.base_s + self.per_sequence_s * num + self.per_context_token_s * context
        growth = self.per_context_token_s * num
        at_floor = self._steps_at_floor(first, growth, 2**62)
        if at_floor and seconds <= at_floor * self.host_s:
            found = math.ceil(seconds / self.host_s)
        else:
            left, start = seconds - at_floor * self.host_s, first + at_floor * growth
            b = start - growth / 2  # solve growth / 2 k^2 + b k = left
            root = math.sqrt(b * b + 2 * growth * left)
            found = at_floor + math.ceil(2 * left / (b + root) if b > 0 else (root - b) / growth)
        while found > 0 and self.decode_seconds(num, context, found - 1) >= seconds:  # rounding of the root
            found -= 1
        while self.decode_seconds(num, context, found) < seconds:
            found += 1
        return found

    def _steps_at_floor(self, first: float, growth: float, most: int) -> int:
        """Of `most` steps, the first ones that the host bounds."""
        if first >= self.host_s:
            return 0
        return most if growth * most <= self.host_s - first else min(most, math.ceil((self.host_s - first) / growth))

    def prefill_seconds(self, tokens: float, squares: float) -> float:
        """Seconds to compute the KV of sequences with `tokens` tokens together, whose squared lengths sum to `squares`."""
        return self.prefill_token_s * tokens + self.prefill_pair_s * squares


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCost:
    """One training step on a global batch. The training ranks meet in collectives: the slowest of them sets the pace."""

    token_s: float
    """Seconds per token of one rank in the matrices: pi_prox, forward and backward together."""
    pair_s: float = 0.0
    """Seconds per squared token in attention (a sequence of L tokens costs this times L^2)."""
    microbatch_s: float = 0.0
    """Seconds of a micro-batch whatever it holds: gathering the shards of the parameters, launches."""
    step_s: float = 0.0
    """Seconds of a step whatever its batch: collecting, the optimiser, the log."""
    serial_token_s: float = 0.0
    """Seconds per token of the whole batch that no further rank shortens: one process collects and hands out all of it."""
    meet_per_microbatch: bool = True
    """The ranks wait for each other at every micro-batch (parameters sharded, FSDP), or only at the end of a mini-batch (each holds all parameters)."""
    capacity_tokens: int = 32768
    """C of Algorithm 1."""
    min_microbatches: int = 1
    """k_min of Algorithm 1."""
    num_minibatches: int = 1
    """PPO mini-batches of a step."""
    fixed_microbatches: int = 0
    """Instead of Algorithm 1: this many micro-batches per mini-batch and rank, of equal numbers of sequences, dealt to the ranks one by one
    (as torch's DistributedSampler deals); 0: Algorithm 1."""

    @property
    def crossover_tokens(self) -> float:
        """Length at which attention costs as much as the matrices."""
        return self.token_s / self.pair_s if self.pair_s > 0 else math.inf

    def seconds(self, lengths_S: np.ndarray, group_S: np.ndarray, num_ranks: int) -> tuple[float, int]:
        """(seconds of the step, micro-batches of all its mini-batches on one rank) of sequences with these lengths (tokens) and group labels.

        Raises ValueError when a mini-batch has fewer sequences than there are ranks.
        """
        cost_S = self.token_s * lengths_S + self.pair_s * np.square(lengths_S, dtype=np.float64)
        if self.fixed_microbatches:
            return self._total(self._in_order(cost_S, num_ranks), self.num_minibatches * self.fixed_microbatches, float(lengths_S.sum()))
        plan = plan_batch(
            lengths_S,
            group_S,
            num_ranks=num_ranks,
            num_minibatches=self.num_minibatches,
            capacity_tokens=self.capacity_tokens,
            min_microbatches=self.min_microbatches,
            crossover_tokens=self.crossover_tokens,
        )
        width = int(plan.num_microbatches_M.max())
        place_S = (plan.minibatch_S * width + plan.microbatch_S) * num_ranks + plan.rank_S
        cost_MPR = np.bincount(place_S, cost_S, self.num_minibatches * width * num_ranks).reshape(self.num_minibatches, width, num_ranks)
        return self._total(cost_MPR, int(plan.num_microbatches_M.sum()), float(lengths_S.sum()))

    def _total(self, cost_MPR: np.ndarray, num_microbatches: int, tokens: float) -> tuple[float, int]:
        """`cost_MPR`: seconds of each mini-batch, micro-batch and rank."""
        work_s = cost_MPR.max(2).sum() if self.meet_per_microbatch else cost_MPR.sum(1).max(1).sum()
        return self.step_s + self.serial_token_s * tokens + num_microbatches * self.microbatch_s + float(work_s), num_microbatches

    def _in_order(self, cost_S: np.ndarray, num_ranks: int) -> np.ndarray:
        """The usual way: sequences dealt to the ranks one by one, cut into micro-batches of equal numbers of them, whatever their lengths."""
        order_S = np.arange(len(cost_S))
        minibatch_S = order_S * self.num_minibatches // len(order_S)
        share = -(-len(order_S) // (self.num_minibatches * num_ranks))
        turn_S = (order_S - np.searchsorted(minibatch_S, minibatch_S)) // num_ranks
        microbatch_S = turn_S * self.fixed_microbatches // share
        place_S = (minibatch_S * self.fixed_microbatches + microbatch_S) * num_ranks + order_S % num_ranks
        return np.bincount(place_S, cost_S, self.num_minibatches * self.fixed_microbatches * num_ranks).reshape(-1, self.fixed_microbatches, num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushCost:
    """One new version on its way to the generation ranks."""

    pack_s: float = 0.0
    """Training ranks are busy: shards copied into the send buffers."""
    transfer_s: float = 0.0
    """From then until the bytes are everywhere."""
    swap_s: float = 0.0
    """A generation rank stands still to load them, KV cache not counted."""
    staged: bool = True
    """Generation goes on during the transfer (staging copy). False: generation and training both stand still for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCost:
    """Ranks that die, and what saves the job from it. A dead rank ends the job; it starts again from the last checkpoint, which is a consistent cut:
    tickets, waiting groups and half-finished sequences go on from there, their KV caches computed anew."""

    rank_mtbf_s: float = math.inf
    """Mean time between failures of one rank (exponential)."""
    restart_s: float = 600.0
    """From a failure until the job runs again: requeue, start, loading."""
    checkpoint_every: int = 10
    """Steps between checkpoints; one is there at the start."""
    checkpoint_s: float = 0.0
    """Training stands still for a checkpoint."""
