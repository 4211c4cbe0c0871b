"""Which training rank computes which sequence, in which mini-batch and micro-batch (plain NumPy: the simulator imports it too).

    1. mini-batches   whole groups, in the order they come
    2. ranks          each mini-batch is balanced over the training ranks by estimated cost (linear layers + attention)
    3. micro-batches  each rank's share is packed by Algorithm 1 of arXiv 2505.24298, all ranks into the same number of micro-batches,
                      since sharded training meets in collectives once per micro-batch

A rank that has fewer sequences than the busiest rank has micro-batches is left with *idle* ones. The trainer computes a throw-away sequence there:
cheaper than moving work to where it does not fit, and no batch is impossible. They are counted (`BatchPlan.num_idle`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REFINEMENT_ROUNDS = 64
"""Most exchanges between the heaviest and the lightest rank after the greedy assignment."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Where each sequence of a global batch is computed."""

    rank_S: np.ndarray
    """int64: training rank."""
    minibatch_S: np.ndarray
    """int64: mini-batch (optimiser update)."""
    microbatch_S: np.ndarray
    """int64: micro-batch within the mini-batch and rank."""
    num_microbatches_M: np.ndarray
    """int64, per mini-batch: micro-batches on every rank."""
    num_idle: int
    """Micro-batches without a sequence, over all ranks and mini-batches."""


def pack_microbatches(lengths_S: Sequence[int] | np.ndarray, capacity: int, min_count: int) -> list[list[int]]:
    """Algorithm 1 of arXiv 2505.24298: positions of the sequences of each micro-batch.

    Longest first, a sequence opens a new micro-batch while there are fewer than `min_count` or none has room; otherwise it joins the one with room
    that holds the fewest sequences (the first of them on a tie). A sequence longer than `capacity` tokens therefore gets a micro-batch of its own.
    O(S log S).
    """
    members: list[list[int]] = []
    tokens: list[int] = []
    with_room: list[tuple[int, int]] = []  # heap of (sequences, micro-batch) that have room for the sequence at hand, and so for all later ones until they grow
    full: list[tuple[int, int]] = []  # heap of (tokens, micro-batch) of the others: a shorter sequence may fit again
    for s in np.argsort(-np.asarray(lengths_S, np.int64), kind="stable"):
        length = int(lengths_S[s])
        while full and full[0][0] + length <= capacity:
            m = heapq.heappop(full)[1]
            heapq.heappush(with_room, (len(members[m]), m))
        if len(members) < min_count or not with_room:
            m = len(members)
            members.append([int(s)])
            tokens.append(length)
        else:
            m = heapq.heappop(with_room)[1]
            members[m].append(int(s))
            tokens[m] += length
        heapq.heappush(full, (tokens[m], m))
    return members


def balance(costs_S: Sequence[float] | np.ndarray, num_ranks: int) -> np.ndarray:
    """Rank of each sequence (int64 [S]) such that the heaviest rank is nearly as light as possible.

    Costliest first to the lightest rank (Graham's LPT rule), then exchanges of one pair, or moves of one sequence, between the heaviest and the
    lightest rank while that lowers the heaviest. Costs are above zero, so every rank gets a sequence when there are enough.
    """
    costs_S = np.asarray(costs_S, np.float64)
    rank_S = np.zeros(len(costs_S), np.int64)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for s in np.argsort(-costs_S, kind="stable"):
        load, rank = loads[0]
        rank_S[s] = rank
        heapq.heapreplace(loads, (load + costs_S[s], rank))
    if num_ranks > 1:
        for _ in range(REFINEMENT_ROUNDS):
            if not _exchange(costs_S, rank_S, num_ranks):
                break
    return rank_S


def _exchange(costs_S: np.ndarray, rank_S: np.ndarray, num_ranks: int) -> bool:
    """Best exchange between the heaviest and the lightest rank, in place; False if none lowers the heaviest by a thousandth of the mean."""
    load_R = np.bincount(rank_S, costs_S, num_ranks)
    heavy, light = int(load_R.argmax()), int(load_R.argmin())
    half_gap = (load_R[heavy] - load_R[light]) / 2
    tolerance = 1e-3 * load_R.mean()
    from_heavy, from_light = np.flatnonzero(rank_S == heavy), np.flatnonzero(rank_S == light)
    if half_gap <= tolerance or len(from_heavy) < 2:
        return False
    given_back = np.append(costs_S[from_light], 0.0)  # the last column is a move: nothing comes back
    miss = np.abs(costs_S[from_heavy][:, None] - given_back[None, :] - half_gap)
    give, take = np.unravel_index(int(miss.argmin()), miss.shape)
    if miss[give, take] > half_gap - tolerance:
        return False
    rank_S[from_heavy[give]] = light
    if take < len(from_light):
        rank_S[from_light[take]] = heavy
    return True


def estimated_cost(lengths_S: np.ndarray, crossover_tokens: float) -> np.ndarray:
    """Cost of training on each sequence, in tokens of linear-layer work: linear layers grow with the length, attention with its square.

    At `crossover_tokens` both cost the same. A decoder layer of width d does about 24 d^2 FLOPs per token in its matrices and 2 d L in causal
    attention over L tokens, which gives 12 d.
    """
    lengths_S = np.asarray(lengths_S, np.float64)
    return lengths_S * (1.0 + lengths_S / crossover_tokens)


def minibatches_of_groups(group_S: np.ndarray, num_minibatches: int) -> np.ndarray:
    """Mini-batch of each sequence (int64 [S]): groups in order of first appearance, cut into equal runs (one group of difference if they do not divide)."""
    _, first_G, inverse_S = np.unique(np.asarray(group_S), return_index=True, return_inverse=True)
    order_G = np.argsort(np.argsort(first_G))
    return (order_G * num_minibatches // len(first_G))[inverse_S].astype(np.int64)


def plan_batch(
    lengths_S: Sequence[int] | np.ndarray,
    group_S: Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    num_minibatches: int,
    capacity_tokens: int,
    min_microbatches: int,
    crossover_tokens: float = 12 * 1024,
) -> BatchPlan:
    """The plan of one global batch; the same arguments give the same plan on every rank.

    `lengths_S` are tokens (prompt and answer), `group_S` any label shared by the answers to one prompt; `crossover_tokens` see `estimated_cost`.
    Raises ValueError when a mini-batch has fewer sequences than there are training ranks.
    """
    lengths_S, minibatch_S = np.asarray(lengths_S, np.int64), minibatches_of_groups(np.asarray(group_S), num_minibatches)
    costs_S = estimated_cost(lengths_S, crossover_tokens)
    rank_S, microbatch_S = np.zeros_like(minibatch_S), np.zeros_like(minibatch_S)
    num_microbatches_M, num_idle = np.zeros(num_minibatches, np.int64), 0
    for minibatch in range(num_minibatches):
        members = np.flatnonzero(minibatch_S == minibatch)
        if len(members) < num_ranks:
            raise ValueError(f"mini-batch {minibatch} has {len(members)} sequences for {num_ranks} training ranks; each rank needs one: use fewer mini-batches")
        rank_S[members] = balance(costs_S[members], num_ranks)
        shares = [members[rank_S[members] == rank] for rank in range(num_ranks)]
        packed = _pack_equally([lengths_S[share] for share in shares], capacity_tokens, min_microbatches)
        for share, microbatches in zip(shares, packed, strict=True):
            for m, positions in enumerate(microbatches):
                microbatch_S[share[positions]] = m
        num_microbatches_M[minibatch] = max(map(len, packed))
        num_idle += sum(int(num_microbatches_M[minibatch]) - len(microbatches) for microbatches in packed)
    return BatchPlan(rank_S, minibatch_S, microbatch_S, num_microbatches_M, num_idle)


def _pack_equally(lengths_by_rank: list[np.ndarray], capacity: int, min_count: int) -> list[list[list[int]]]:
    """Algorithm 1 on every rank; ranks with fewer micro-batches than the busiest are repacked with a larger minimum until all agree (or have each sequence alone)."""
    packed = [pack_microbatches(lengths, capacity, min_count) for lengths in lengths_by_rank]
    while True:
        busiest = max(map(len, packed))
        fewer = [rank for rank, microbatches in enumerate(packed) if len(microbatches) < min(busiest, len(lengths_by_rank[rank]))]
        if not fewer:
            return packed
        for rank in fewer:  # a higher minimum can itself need one more than that: the fewest-sequences rule spreads long ones
            packed[rank] = pack_microbatches(lengths_by_rank[rank], capacity, busiest)
