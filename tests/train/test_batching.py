"""The plan of a batch: Algorithm 1 against a transcription of the paper, balance, and the properties that keep sharded training in step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.train import batching

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


def algorithm_1(lengths, capacity, k_min):
    """The paper's pseudo-code, line by line, over a list of micro-batches of (index, length)."""
    microbatches = []
    for index, length in sorted(enumerate(lengths), key=lambda pair: -pair[1]):
        having_room = [m for m in microbatches if sum(size for _, size in m) + length <= capacity]
        if len(microbatches) < k_min or len(having_room) == 0:
            microbatches.append([(index, length)])
        else:
            fewest = min(len(m) for m in having_room)
            next(m for m in having_room if len(m) == fewest).append((index, length))
    return [[index for index, _ in m] for m in microbatches]


@given(LENGTHS, st.integers(50, 1000), st.integers(1, 8))
def test_algorithm_1_is_the_papers(lengths, capacity, k_min):
    packed = batching.pack_microbatches(lengths, capacity, k_min)
    assert packed == algorithm_1(lengths, capacity, k_min)
    assert sorted(s for m in packed for s in m) == list(range(len(lengths)))
    assert all(len(m) == 1 or sum(lengths[s] for s in m) <= capacity for m in packed)
    assert len(packed) >= min(k_min, len(lengths))


def test_fill_of_the_papers_workload():
    """paper.md: 256 log-normal sequences, mean 9.28k tokens, C = 32,768: 72.65 micro-batches against a bound of 72.05."""
    rng = np.random.default_rng(0)
    counts, bounds = [], []
    for _ in range(20):
        lengths = np.minimum(rng.lognormal(np.log(9280) - 0.85**2 / 2, 0.85, 256), 28672).astype(int)
        counts.append(len(batching.pack_microbatches(lengths, 32768, 1)))
        bounds.append(lengths.sum() / 32768)
    assert np.mean(counts) / np.mean(bounds) < 1.03


@pytest.mark.parametrize("num_ranks", [2, 3, 16, 128])
def test_ranks_are_balanced_on_log_normal_lengths(num_ranks):
    rng = np.random.default_rng(num_ranks)
    for _ in range(5):
        lengths = np.minimum(rng.lognormal(9, 0.85, 128 * num_ranks), 28672).astype(int)
        costs = batching.estimated_cost(lengths, 12 * 1536)
        loads = np.bincount(batching.balance(costs, num_ranks), costs, num_ranks)
        assert loads.max() / loads.mean() <= 1.02


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.integers(2, 3))
def test_balance_is_near_the_best_of_all_assignments(costs, num_ranks):
    """Graham's bound for the greedy rule, 4/3 - 1/(3 R), against the optimum by enumeration; exchanges never make it worse."""
    grid = np.stack(np.meshgrid(*[np.arange(num_ranks)] * len(costs), indexing="ij"), -1).reshape(-1, len(costs))
    optimum = min(max(np.bincount(row, costs, num_ranks)) for row in grid) if len(grid) <= 3**7 else None
    rank_S = batching.balance(costs, num_ranks)
    if optimum is not None:
        assert np.bincount(rank_S, costs, num_ranks).max() <= (4 / 3 - 1 / (3 * num_ranks)) * optimum + 1e-9
    if len(costs) >= num_ranks:
        assert set(rank_S) == set(range(num_ranks))


@settings(max_examples=200)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(50, 1000), st.integers(1, 4))
def test_plan_keeps_all_ranks_in_step(data, num_ranks, num_minibatches, capacity, min_microbatches):
    n = data.draw(st.integers(1, 4))
    num_groups = num_minibatches * data.draw(st.integers(-(-num_ranks // n), 5 + num_ranks))
    lengths = np.array(data.draw(st.lists(st.integers(1, 400), min_size=n * num_groups, max_size=n * num_groups)))
    group_S = np.repeat(data.draw(st.permutations(range(num_groups))), n)
    plan = batching.plan_batch(
        lengths, group_S, num_ranks=num_ranks, num_minibatches=num_minibatches, capacity_tokens=capacity, min_microbatches=min_microbatches
    )
    assert (plan.minibatch_S == np.repeat(np.arange(num_groups) // (num_groups // num_minibatches), n)).all()  # whole groups, in order
    idle = 0
    for m in range(num_minibatches):
        for rank in range(num_ranks):
            mine = (plan.minibatch_S == m) & (plan.rank_S == rank)
            used = np.unique(plan.microbatch_S[mine])
            assert mine.any()
            assert (used == np.arange(len(used))).all()
            assert len(used) == min(plan.num_microbatches_M[m], mine.sum())
            idle += plan.num_microbatches_M[m] - len(used)
            for micro in used:
                members = mine & (plan.microbatch_S == micro)
                assert members.sum() == 1 or lengths[members].sum() <= capacity
        assert plan.num_microbatches_M[m] >= min(min_microbatches, (plan.minibatch_S == m).sum() // num_ranks)
    assert plan.num_idle == idle


def test_ranks_that_pack_differently_get_equal_counts():
    lengths = [1000, *[100] * 10]  # one rank gets the long sequence alone, the other ten short ones in two micro-batches
    plan = batching.plan_batch(lengths, np.arange(11), num_ranks=2, num_minibatches=1, capacity_tokens=500, min_microbatches=1)
    long_rank = plan.rank_S[0]
    assert plan.num_microbatches_M[0] == 2
    assert set(plan.microbatch_S[plan.rank_S != long_rank]) == {0, 1}
    assert plan.num_idle == 2 - len(set(plan.microbatch_S[plan.rank_S == long_rank]))


def test_too_few_sequences_is_an_error():
    with pytest.raises(ValueError, match="mini-batch 0 has 2 sequences for 3 training ranks"):
        batching.plan_batch([5, 5], [0, 0], num_ranks=3, num_minibatches=1, capacity_tokens=64, min_microbatches=1)
