"""Tickets and the set of closed ones, against plain sets."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.data.tickets import Tickets
from areal_hpc.intervals import IntervalSet


@given(num_problems=st.integers(1, 40), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
def test_each_epoch_asks_every_problem_once(num_problems, seed, epoch):
    tickets = Tickets(num_problems, seed)
    first = epoch * num_problems
    order = [tickets.problem_index(k) for k in range(first, first + num_problems)]
    assert sorted(order) == list(range(num_problems))
    assert [Tickets(num_problems, seed).problem_index(k) for k in reversed(range(first, first + num_problems))] == order[::-1]


def test_epochs_and_seeds_differ_and_old_epochs_can_be_asked_again():
    tickets = Tickets(1000, 5)
    epochs = [[tickets.problem_index(e * 1000 + j) for j in range(1000)] for e in range(4)]
    assert len({tuple(order) for order in epochs}) == 4
    assert [tickets.problem_index(j) for j in range(1000)] == epochs[0]
    assert [Tickets(1000, 6).problem_index(j) for j in range(1000)] != epochs[0]


@given(st.lists(st.integers(0, 40)))
def test_interval_set_is_a_set(members):
    intervals, expected = IntervalSet(), set()
    for member in members:
        assert intervals.add(member) == (member not in expected)
        expected.add(member)
        assert len(intervals) == len(expected)
    assert [member in intervals for member in range(-1, 43)] == [member in expected for member in range(-1, 43)]
    listed = intervals.to_list()
    assert sorted(expected) == [member for start, stop in listed for member in range(start, stop)]
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(listed))  # merged: a gap between any two
    assert IntervalSet.from_list(json.loads(json.dumps(listed))) == intervals
    for start in range(43):
        assert intervals.first_missing(start) == next(k for k in range(start, 90) if k not in expected)


@pytest.mark.parametrize("intervals", [[[3, 3]], [[4, 3]], [[0, 2], [1, 4]], [[0, 2], [2, 4]], [[5, 6], [0, 1]]])
def test_what_no_interval_set_wrote_is_refused(intervals):
    with pytest.raises(ValueError, match="is empty or does not lie beyond"):
        IntervalSet.from_list(intervals)
