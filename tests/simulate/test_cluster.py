"""Closed forms, conservation, monotonicity, failures, determinism of the simulated job; the engine's closed forms against sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.simulate.cluster import Cluster, Job, simulate
from areal_hpc.simulate.costs import DecodeCost, FailureCost, PushCost, TrainCost
from areal_hpc.simulate.lengths import ConstantLengths, LoggedLengths, LogNormalLengths, capped_mean

DECODE = DecodeCost(host_s=0.004, base_s=0.003, per_sequence_s=0.0005, per_context_token_s=1e-5, prefill_token_s=1e-4, max_num_running=16)
TRAIN = TrainCost(token_s=1e-3, step_s=0.2, capacity_tokens=256)
LENGTHS = LogNormalLengths(median=40, sigma=0.8, cap=150, prompt=10, num_problems=50)
JOB = Job(
    num_generation=4,
    num_training=2,
    batch_size=32,
    group_size=4,
    eta=2,
    num_steps=12,
    decode=DECODE,
    train=TRAIN,
    lengths=LENGTHS,
    push=PushCost(pack_s=0.01, transfer_s=0.05, swap_s=0.01),
    reward_s=0.05,
)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 1), st.floats(1e-4, 1), st.floats(0, 0.1), st.floats(0, 0.01), st.integers(1, 50), st.integers(0, 5000), st.integers(0, 400), st.floats(0, 30)
)
def test_decode_closed_forms(host_s: float, base_s: float, a: float, c: float, num: int, context: int, steps: int, seconds: float) -> None:
    """The sum over the steps, and the fewest steps that take a given time."""
    cost = DecodeCost(host_s=host_s, base_s=base_s, per_sequence_s=a, per_context_token_s=c, max_num_running=99)
    assert cost.decode_seconds(num, context, steps) == pytest.approx(math.fsum(cost.step_s(num, context + j * num) for j in range(steps)), rel=1e-9, abs=1e-12)
    found = cost.decode_steps(num, context, seconds)
    assert cost.decode_seconds(num, context, found) >= seconds
    assert found == 0 or cost.decode_seconds(num, context, found - 1) < seconds


def test_constant_lengths_synchronous_exactly() -> None:
    """eta = 0, equal answers: a step is prefill + decoding + grading + training + packing + transfer + swap, one after the other."""
    job = replace(JOB, eta=0, lengths=ConstantLengths(prompt=10, answer=100), num_steps=3)
    num, groups = job.batch_size // job.num_generation, job.groups_per_batch // job.num_generation
    decode_s = math.fsum(DECODE.step_s(num, 10 * num + j * num) for j in range(100))
    generate_s = 10 * groups * DECODE.prefill_token_s + decode_s + job.reward_s
    train_s = TRAIN.step_s + TRAIN.token_s * 110 * job.batch_size / job.num_training
    result = simulate(job)
    first = generate_s + train_s + job.push.pack_s
    later = job.push.transfer_s + job.push.swap_s + generate_s + train_s + job.push.pack_s
    assert [step.end_s for step in result.steps] == pytest.approx([first, first + later, first + 2 * later], rel=1e-12)
    assert all(step.staleness_max == 0 for step in result.steps)


def test_colocated_is_one_after_the_other_exactly() -> None:
    job = replace(JOB, eta=0, colocated=True, num_generation=4, num_training=4, lengths=ConstantLengths(prompt=10, answer=100), num_steps=2)
    decode_s = DECODE.decode_seconds(8, 80, 100) + 20 * DECODE.prefill_token_s + job.reward_s
    step_s = decode_s + TRAIN.step_s + TRAIN.token_s * 110 * 8 + job.push.pack_s + job.push.transfer_s
    assert [step.end_s for step in simulate(job).steps] == pytest.approx([step_s, 2 * step_s + job.push.swap_s], rel=1e-12)


def test_training_bound_exactly() -> None:
    """Generation far ahead: a step takes what training takes, whatever the lengths; the buffer is as old as the gate lets it be."""
    job = replace(JOB, eta=4, num_steps=20, train=replace(TRAIN, step_s=30.0), lengths=ConstantLengths(prompt=10, answer=30))
    train_s = 30.0 + TRAIN.token_s * 40 * job.batch_size / job.num_training
    steps = simulate(job).steps[8:]
    assert np.diff([step.end_s for step in steps]) == pytest.approx(train_s + job.push.pack_s, rel=1e-9)
    assert all((step.staleness_mean, step.wait_s) == (4, 0) for step in steps)


def test_generation_bound_exactly() -> None:
    """eta = inf, equal answers, training in no time: tokens/s = engines * running / step time, prompts included in the tokens."""
    decode = DecodeCost(base_s=0.01, per_sequence_s=0.001, max_num_running=16)
    job = replace(JOB, eta=math.inf, decode=decode, train=TrainCost(token_s=0, step_s=1e-9), lengths=ConstantLengths(prompt=10, answer=50), num_steps=41)
    steps = simulate(replace(job, push=PushCost(), reward_s=0.0)).steps
    expected = job.num_generation * 16 / (0.01 + 0.001 * 16) * 60 / 50
    tokens, seconds = sum(step.tokens for step in steps[1:]), steps[-1].end_s - steps[0].end_s
    assert tokens / seconds == pytest.approx(expected, rel=0.03)  # the last batch may end within a wave of answers


@settings(max_examples=40, deadline=None)
@given(
    eta=st.sampled_from([0, 1, 2, 5, math.inf]),
    mode=st.sampled_from(["count", "dropless", "drop", "mask"]),
    kv_tokens=st.sampled_from([400, 900, math.inf]),
    num_generation=st.integers(1, 6),
    interruptible=st.booleans(),
    staged=st.booleans(),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_and_time_adds_up(eta: float, mode: str, kv_tokens: float, num_generation: int, interruptible: bool, staged: bool, seed: int) -> None:
    """Tickets: admitted = trained + in training + stale + waiting + unfinished. Tokens: each decoded once. Time: an engine's phases fill its clock.

    Ages: bounded where the mode promises it.
    """
    mode = "count" if math.isinf(eta) else mode
    lengths = Recorded(replace(LENGTHS, seed=seed))
    decode, push = replace(DECODE, kv_tokens=kv_tokens), replace(JOB.push, staged=staged)
    job = replace(JOB, eta=eta, mode=mode, num_generation=num_generation, decode=decode, push=push, interruptible=interruptible, lengths=lengths, num_steps=6)
    cluster = Cluster(job)
    result = cluster.run()
    groups = result.num_groups
    assert groups["admitted"] == len(lengths.answers) == sum(groups.values()) - groups["admitted"]
    assert groups["trained"] == 6 * JOB.groups_per_batch
    left = sum(sequence.remaining for engine in cluster.engines for sequence in engine.waiting)
    left += sum(finish - engine.step for engine in cluster.engines for finish, _, _ in engine._finish)
    assert result.num_tokens_decoded == sum(map(sum, lengths.answers.values())) - left
    assert sum(step.answer_tokens for step in result.steps) <= result.num_tokens_decoded
    for engine in cluster.engines:
        spent = engine.seconds
        assert spent.decode + spent.prefill + spent.recompute + spent.swap + spent.idle == pytest.approx(engine.clock_s, rel=1e-9)
        running = [sequence.context + engine.step - sequence.admitted_step for _, _, sequence in engine._finish]
        assert (engine.num_running, engine.context, engine.squares) == (len(running), sum(running), sum(length**2 for length in running))
    if mode in ("dropless", "drop"):
        assert max(step.staleness_max for step in result.steps) <= eta


class Recorded:
    """Lengths that remember which tickets were asked for."""

    def __init__(self, lengths: LogNormalLengths) -> None:
        self.lengths = lengths
        self.answers: dict[int, list[int]] = {}

    def group(self, ticket: int, size: int) -> tuple[int, list[int]]:
        assert ticket not in self.answers, "started twice"
        prompt, self.answers[ticket] = self.lengths.group(ticket, size)
        return prompt, self.answers[ticket]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 60), st.integers(1, 12))
def test_more_engines_are_never_slower(num_generation: int, answer: int, max_num_running: int) -> None:
    """eta = inf, equal answers, no new weights to stop for: every engine is always full, so after any time more engines have finished more."""
    decode = replace(DECODE, max_num_running=max_num_running)
    job = replace(
        JOB, eta=math.inf, decode=decode, push=PushCost(), kv_on_update="keep", lengths=ConstantLengths(prompt=5, answer=answer), num_steps=4, reward_s=0.0
    )
    ends = [[step.end_s for step in simulate(replace(job, num_generation=g)).steps] for g in (num_generation, num_generation + 1)]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in zip(*ends, strict=True))


def test_same_arguments_same_result() -> None:
    job = replace(JOB, failures=FailureCost(rank_mtbf_s=300.0, restart_s=20.0, checkpoint_every=2, checkpoint_s=0.5))
    assert simulate(job) == simulate(job)


@pytest.mark.parametrize("eta", [0, 2])
def test_failures_cost_what_they_undo(eta: float) -> None:
    """A failure puts the job back to its last checkpoint: without KV to compute anew, time is that of the undisturbed job plus what was lost; batches are the same."""
    decode = replace(DECODE, prefill_token_s=0.0)
    failures = FailureCost(checkpoint_every=3, checkpoint_s=0.5)
    calm = simulate(replace(JOB, eta=eta, decode=decode, failures=failures))
    rough = simulate(replace(JOB, eta=eta, decode=decode, failures=replace(failures, rank_mtbf_s=150.0, restart_s=10.0)))
    assert rough.num_failures > 0 and rough.lost_s > 10.0 * rough.num_failures
    assert rough.wall_s == pytest.approx(calm.wall_s + rough.lost_s, rel=1e-9)
    assert [(step.tokens, step.staleness_mean) for step in rough.steps] == [(step.tokens, step.staleness_mean) for step in calm.steps]


def test_checkpoints_that_wait_cost_their_time() -> None:
    """eta = 0 and eta = inf bound it from both sides: training stands still for it, generation does not."""
    plain = simulate(replace(JOB, eta=0)).wall_s
    saved = simulate(replace(JOB, eta=0, failures=FailureCost(checkpoint_every=4, checkpoint_s=0.02))).wall_s
    assert plain < saved <= plain + 3 * 0.02 * (1 + 1e-9)


def test_preempted_sequences_finish_with_all_their_tokens() -> None:
    job = replace(JOB, decode=replace(DECODE, kv_tokens=500), eta=math.inf, lengths=ConstantLengths(prompt=10, answer=120))
    result = simulate(job)
    assert result.num_preempted > 0
    assert all(step.answer_tokens == job.batch_size * 120 for step in result.steps)


def test_interruption_costs_a_recompute_and_saves_a_drain() -> None:
    """Longer answers than steps: who drains before each swap idles, who interrupts pays the cache of what runs."""
    job = replace(JOB, lengths=LogNormalLengths(median=60, sigma=1.0, cap=400, prompt=10), eta=1, num_steps=10)
    interrupted, drained = simulate(job), simulate(replace(job, interruptible=False))
    assert interrupted.num_tokens_recomputed > 0 == drained.num_tokens_recomputed
    assert interrupted.wall_s < drained.wall_s
    kept = simulate(replace(job, kv_on_update="keep"))
    assert kept.num_tokens_recomputed == 0


def test_staged_push_hides_the_transfer() -> None:
    push = PushCost(transfer_s=1.0)
    job = replace(JOB, eta=4, push=push)
    pausing = simulate(replace(job, push=replace(push, staged=False)))
    assert simulate(job).wall_s < pausing.wall_s
    assert sum(seconds.swap for seconds in pausing.seconds) >= 0.9 * job.num_generation * (job.num_steps - 1)


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        simulate(replace(JOB, batch_size=30))
    with pytest.raises(ValueError, match="colocated"):
        simulate(replace(JOB, colocated=True))


def test_fixed_microbatches_by_hand() -> None:
    """Six sequences dealt to two ranks, two micro-batches each, against a sum by hand; ranks that meet only at the end wait less."""
    cost = TrainCost(token_s=1.0, microbatch_s=10.0, fixed_microbatches=2)
    lengths, groups = np.array([1, 2, 3, 4, 5, 60]), np.arange(6)
    # rank 0: 1, 3 | 5; rank 1: 2, 4 | 60
    assert cost.seconds(lengths, groups, 2) == (20.0 + max(1 + 3, 2 + 4) + max(5, 60), 2)
    assert replace(cost, meet_per_microbatch=False).seconds(lengths, groups, 2) == (20.0 + max(9, 66), 2)


def test_packed_microbatches_by_hand() -> None:
    """Algorithm 1 at 10 tokens on one rank: [9] [6, 3] [5, 4], attention squares on top; serial work counts every token once."""
    cost = TrainCost(token_s=1.0, pair_s=0.5, microbatch_s=2.0, step_s=7.0, serial_token_s=0.1, capacity_tokens=10)
    lengths = np.array([3, 9, 4, 6, 5])
    assert cost.seconds(lengths, np.arange(5), 1) == (pytest.approx(7 + 2.7 + 3 * 2 + 27 + 0.5 * np.square(lengths).sum()), 3)


def test_log_normal_lengths() -> None:
    """Mean after the cap, spread, cap, and the share of variance between problems, from a large sample; a ticket's lengths do not depend on what was asked before."""
    lengths = LogNormalLengths.with_mean(1000, 0.7, 4000, 20, group_correlation=0.6)
    table = np.array([lengths.group(ticket, 8)[1] for ticket in range(2000)], float)
    assert table.mean() == pytest.approx(1000, rel=0.05)
    assert table.max() == 4000
    uncut = LogNormalLengths(median=1000, sigma=0.7, cap=10**9, prompt=1, group_correlation=0.6)
    free = np.log([uncut.group(ticket, 8)[1] for ticket in range(2000)])
    assert free.std() == pytest.approx(0.7, rel=0.05)
    assert 1 - free.var(1, ddof=1).mean() / free.var() == pytest.approx(0.6, abs=0.05)
    assert LogNormalLengths.with_mean(1000, 0.7, 4000, 20, group_correlation=0.6).group(3999, 8) == lengths.group(3999, 8)
    assert capped_mean(1000, 0.0, 700) == 700
    with pytest.raises(ValueError, match="below the cap"):
        LogNormalLengths.with_mean(5000, 0.7, 4000, 20)


def test_logged_lengths_are_whole_groups() -> None:
    logged = LoggedLengths(((5, (1, 2)), (6, (30, 40))), seed=1)
    drawn = [logged.group(ticket, 2) for ticket in range(50)]
    assert {prompt for prompt, _ in drawn} == {5, 6}
    assert all(answers == ([1, 2] if prompt == 5 else [30, 40]) for prompt, answers in drawn)
    assert all(set(logged.group(ticket, 7)[1]) <= {1, 2, 30, 40} for ticket in range(5))
