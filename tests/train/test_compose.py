"""What training rank 0 makes of finished groups: filters and their refill, truncated and overlong answers, denominators."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from areal_hpc.config import Config, Data, Generation, Reward, Staleness, Train, check
from areal_hpc.train.collect import Arrival
from areal_hpc.train.compose import Composer
from areal_hpc.transport.trajectory import SAMPLE_DTYPE, Status

N = 4
MAX_NEW_TOKENS = 20


def make_config(max_staleness=1, mode="count", num_minibatches=1, **train) -> Config:
    config = Config(
        data=Data(max_prompt_tokens=8),
        generation=Generation(max_new_tokens=MAX_NEW_TOKENS),
        staleness=Staleness(max_staleness=max_staleness, mode=mode),
        train=Train(**{"batch_size": 8, "group_size": N, "num_minibatches": num_minibatches} | train),
        reward=Reward(right=2.0, wrong=-1.0),
    )
    check(config)
    return config


def arrival(ticket, statuses, lengths=(5, 6, 7, 8), sampled=None, version=0) -> Arrival:
    table = np.zeros(N, SAMPLE_DTYPE)
    table["status"], table["num_tokens"], table["sample"] = [int(s) for s in statuses], lengths, range(N)
    table["num_sampled"] = lengths if sampled is None else sampled
    table["reward"] = [{Status.RIGHT: 2.0, Status.INFRA_ERROR: np.nan}.get(s, -1.0) for s in statuses]
    table["version_min"] = table["version_max"] = version
    return Arrival(ticket, 0, 0, version, 3, table)


R, W, T, F = Status.RIGHT, Status.WRONG, Status.TRUNCATED, Status.INFRA_ERROR


def outcome(config, *groups):
    """Reasons of the groups that were closed on arrival, by ticket."""
    composer = Composer(config, 1)
    for ticket, group in enumerate(groups):
        composer.arrive(arrival(ticket, *group))
    return {a.ticket: reason for a, reason in composer.take_rejected()}, composer


def test_groups_without_contrast_are_filtered_when_asked():
    groups = [([R, W, W, R],), ([R, R, R, R],), ([W, W, T, W],), ([R, R, F, R],), ([F, F, F, F],), ([R, F, F, W],)]
    equal = {1: "filtered", 2: "filtered", 3: "filtered"}
    assert outcome(make_config(max_staleness=3, objective="dapo"), *groups)[0] == equal | {4: "failed"}
    assert outcome(make_config(max_staleness=3, dynamic_sampling="refill"), *groups)[0] == equal | {4: "failed"}
    assert outcome(make_config(max_staleness=3, objective="dapo", dynamic_sampling="none"), *groups)[0] == {4: "failed"}
    assert outcome(make_config(max_staleness=3), *groups)[0] == {4: "failed"}


def test_minimum_group_size():
    groups = [([R, W, W, R],), ([R, F, F, W],), ([R, F, F, F],), ([F, F, F, F],)]
    assert outcome(make_config(min_group_size=2), *groups)[0] == {2: "filtered", 3: "failed"}
    assert outcome(make_config(min_group_size=4), *groups)[0] == {1: "filtered", 2: "filtered", 3: "failed"}
    cut = ([R, W, T, T], (5, 6, MAX_NEW_TOKENS, MAX_NEW_TOKENS))
    assert outcome(make_config(min_group_size=3), cut)[0] == {}
    assert outcome(make_config(min_group_size=3, truncated="mask"), cut)[0] == {0: "filtered"}


def plan_of(config, *groups):
    composer = Composer(config, 1)
    for ticket, group in enumerate(groups):
        composer.arrive(arrival(ticket, *group))
    composed = composer.compose()
    assert composed is not None
    return composed[0]


LONG = ([R, W, T, R], (5, 6, MAX_NEW_TOKENS, MAX_NEW_TOKENS))
SHORT = ([R, W, W, W], (5, 6, 7, 8))


def test_truncated_answers_train_as_graded_by_default():
    plan = plan_of(make_config(advantage="mean"), LONG, SHORT)
    assert (plan.weight_S == 1).all() and plan.num_penalised == 0
    np.testing.assert_allclose(plan.advantage_S[:4], np.array([2, -1, -1, 2]) - 0.5)
    assert plan.trained_tokens == [5 + 6 + 40 + 26]


def test_truncated_answers_can_be_masked():
    """Out of the loss, out of the denominators, out of the statistics of their group."""
    plan = plan_of(make_config(advantage="mean", truncated="mask", aggregation="sequence"), LONG, SHORT)
    assert plan.weight_S.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    np.testing.assert_allclose(plan.advantage_S[:4], [1.5, -1.5, 0, 0])
    assert plan.trained_tokens == [5 + 6 + 26] and plan.denominators == [6]


def test_truncated_answers_can_be_penalised():
    """reward.wrong also for one that was graded right before it was cut; counted."""
    plan = plan_of(make_config(advantage="mean", truncated="penalise"), LONG, SHORT)
    np.testing.assert_allclose(plan.advantage_S[:4], np.array([2, -1, -1, -1]) + 0.25)
    assert plan.num_penalised == 2 and (plan.weight_S == 1).all()


def test_overlong_buffer():
    """DAPO eq. 13 with L_max = 20, L_cache = 10, scaled by the penalty: nothing up to 10 tokens, half at 15, all at 20."""
    group = ([R, W, R, R], (10, 11, 15, 20))
    plan = plan_of(make_config(advantage="mean", overlong_buffer=10, overlong_penalty=4.0), group, SHORT)
    shaped = np.array([2, -1 - 0.4, 2 - 2.0, 2 - 4.0])
    np.testing.assert_allclose(plan.advantage_S[:4], shaped - shaped.mean())
    assert plan.num_overlong == 3
    dapo = plan_of(make_config(objective="dapo", advantage="mean"), group, SHORT)  # buffer 4 tokens, penalty 1.5: half of 2 - -1
    shaped = np.array([2, -1, 2, 2 - 1.5])
    np.testing.assert_allclose(dapo.advantage_S[:4], shaped - shaped.mean())
    assert dapo.num_overlong == 1


def test_denominators_count_what_trains():
    groups = [([R, W, F, W], (1, 2, 3, 4)), ([R, W, W, W], (5, 6, 7, 8))]
    for aggregation, expected in (("token", [7, 26]), ("sequence", [3, 4]), ("sequence-sum", [3, 4]), ("batch", [3 * MAX_NEW_TOKENS, 4 * MAX_NEW_TOKENS])):
        plan = plan_of(make_config(num_minibatches=2, aggregation=aggregation), *groups)
        assert plan.denominators == expected and plan.trained_tokens == [7, 26]


def test_tokens_of_an_environment_count_for_length_and_not_for_denominators():
    """The limit and the overlong buffer are about the whole answer; what trains is the model's own part."""
    group = ([R, W, T, R], (10, 11, MAX_NEW_TOKENS, 15), (3, 4, 5, 6))
    for aggregation, expected in (("token", 18 + 26), ("sequence", 8), ("batch", 8 * MAX_NEW_TOKENS)):
        plan = plan_of(make_config(aggregation=aggregation, truncated="penalise", overlong_buffer=10, overlong_penalty=4.0), group, SHORT)
        assert (plan.denominators, plan.trained_tokens) == ([expected], [18 + 26])
        assert (plan.num_penalised, plan.num_overlong) == (1, 3)


@pytest.mark.parametrize("mode", ["count", "drop", "mask", "dropless"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_filtered_groups_are_replaced_and_never_block_the_gate(max_staleness, mode):
    """Tickets start whenever the limit allows; 70 % of the groups have no contrast. Every batch is full of groups with contrast, nothing is lost or trained twice."""
    config, rng = make_config(max_staleness, mode, objective="dapo"), np.random.default_rng(max_staleness)
    composer, running, trained, closed, next_ticket = Composer(config, 1), {}, [], Counter(), 0
    for _ in range(4000):
        ledger = composer.ledger
        ledger.oldest_active_version = ledger.policy_version
        while next_ticket < ledger.limit and len(running) < 6:
            running[next_ticket] = ledger.policy_version
            ledger.start(next_ticket, ledger.policy_version)
            next_ticket += 1
        if running and rng.random() < 0.7:
            ticket = int(rng.choice(list(running)))
            statuses = [R, R, R, R] if rng.random() < 0.7 else [R, W, W, R]
            composer.arrive(arrival(ticket, statuses, version=running.pop(ticket)))
        if (composed := composer.compose()) is not None:
            groups = composed[1]
            assert len(groups) == config.groups_per_batch
            assert all(len(set(group.table["reward"])) > 1 for group in groups)
            trained += [group.ticket for group in groups]
            closed.update(reason for _, reason in composer.take_rejected())
            dropped = {a.ticket for a in composer.rejected}
            assert not dropped & set(trained)
            composer.ledger.advance()
    assert len(trained) == len(set(trained)) > 500
    assert closed["filtered"] > len(trained)
    assert composer.num_arrived == len(composer.ledger.closed) + len(composer.ledger.waiting)


def test_every_rejected_group_is_announced_and_logged_once():
    """Also one that is filtered while the batch trains: announced with the next plan, so that the rank which holds it can forget it."""
    composer = Composer(make_config(max_staleness=4, objective="dapo"), 1)
    announced, logged = [], []
    ticket = 0
    for _ in range(5):
        for statuses in ([R, R, R, R], [R, W, W, W], [R, W, W, W]):
            composer.arrive(arrival(ticket, statuses))
            ticket += 1
        assert composer.compose() is not None
        announced += [a.ticket for a in composer.rejected]  # the loop reads it here
        composer.arrive(arrival(ticket, [W, W, W, W]))  # while the batch trains
        ticket += 1
        logged += [a.ticket for a, _ in composer.take_rejected()]
        composer.ledger.advance()
        assert composer.compose() is None
    assert announced == sorted(set(announced)) and logged == sorted(set(logged))
    assert announced == [t for t in range(ticket - 1) if t % 4 in (0, 3)]
    assert logged == [t for t in range(ticket) if t % 4 in (0, 3)]


def test_a_run_in_which_nearly_everything_is_filtered_ends():
    config = make_config(max_staleness=4, objective="dapo", max_filtered=3)
    composer = Composer(config, 1)
    for ticket in range(3 * config.groups_per_batch):
        composer.arrive(arrival(ticket, [W] * 4))
    with pytest.raises(RuntimeError, match=r"7 groups in a row were filtered .* more than train.max_filtered=3 batches of 2"):
        composer.arrive(arrival(6, [W] * 4))
    composer = Composer(replace(config), 1)
    for ticket in range(40):  # a batch now and then forgives
        composer.arrive(arrival(ticket, [R, W, W, W] if ticket % 3 == 0 else [W] * 4))
        if composer.compose() is not None:
            composer.ledger.advance()
    assert composer.ledger.num_closed["filtered"] == 26
