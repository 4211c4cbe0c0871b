"""The alarm for steps that teach nothing, against a count by hand."""

import numpy as np

from areal_hpc.train.flat import FlatSteps

SAME, DIFFERENT = np.array([5.0, 5.0]), np.array([5.0, -5.0])
ZERO, SOME = np.zeros(2), np.array([1.0, -1.0])


def test_said_once_per_run_of_flat_steps_and_when_it_is_over():
    flat, said = FlatSteps(3), []
    steps = (
        [(SAME, ZERO)] * 2
        + [(DIFFERENT, SOME)]
        + [(SAME, ZERO), (DIFFERENT, ZERO), (SAME, ZERO), (SAME, ZERO)]
        + [(DIFFERENT, SOME)] * 2
        + [(DIFFERENT, ZERO)] * 3
    )
    for step, (rewards, advantages) in enumerate(steps, start=1):
        said += [(step, kind) for kind, _ in flat.look(step, rewards, advantages)]
    assert said == [(6, "flat"), (8, "flat_over"), (12, "flat")]


def test_text_tells_the_two_kinds_apart():
    assert "every answer had reward 5" in FlatSteps(1).look(7, SAME, ZERO)[0][1]
    assert "never within a group" in FlatSteps(1).look(7, DIFFERENT, ZERO)[0][1]


def test_can_be_turned_off_and_needs_no_answers():
    off = FlatSteps(0)
    assert not [said for step in range(9) for said in off.look(step, SAME, ZERO)] and not off.look(9, DIFFERENT, SOME)
    nothing = np.empty(0)
    assert [bool(FlatSteps(2).look(step, nothing, nothing)) for step in (1, 2)] == [False, False], "each starts anew"
    flat = FlatSteps(2)
    assert [bool(flat.look(step, nothing, nothing)) for step in (1, 2, 3)] == [False, True, False]
