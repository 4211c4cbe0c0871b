"""Phases: intervals without gap or overlap, whatever is entered in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.observe.schema import PHASES, PHASES_OF_ROLE
from areal_hpc.observe.timeline import Phases

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "nested", "drain", "wait"]), st.sampled_from(PHASES_OF_ROLE["training"]), st.integers(0, 7)), max_size=60
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(operations=OPERATIONS)
def test_intervals_cover_the_wall_time_exactly(operations: list[tuple[str, str, int]]) -> None:
    """Reference: the phase of every single tick, written down as we go."""
    clock = Clock()
    phases, ticks, drained, current = Phases(5, "training", clock), [], [], "start"

    def wait(phase: str, num: int) -> None:
        clock.now_s += num
        ticks.extend([phase] * num)

    for operation, phase, num in operations:
        if operation == "enter":
            phases.enter(phase)
            current = phase
        elif operation == "nested":
            with phases(phase):
                wait(phase, num)
        elif operation == "drain":
            drained.append(phases.drain())
        else:
            wait(current, num)
    rows = np.concatenate([*drained, phases.drain()])
    painted = np.repeat(rows["phase"], (rows["stop_s"] - rows["start_s"]).astype(int))
    assert [PHASES[number] for number in painted] == ticks
    assert (rows["start_s"][1:] == rows["stop_s"][:-1]).all() and (rows["stop_s"] > rows["start_s"]).all()
    assert phases.seconds == {name: ticks.count(name) for name in PHASES_OF_ROLE["training"]}
    assert set(rows["rank"]) <= {5} and set(rows["role"]) <= {1}


def test_equal_phases_merge_and_a_nested_block_survives_an_exception() -> None:
    clock = Clock()
    phases = Phases(0, 0, clock)
    phases.enter("decode")
    for _ in range(5):
        clock.now_s += 1
        phases.enter("decode")

    def failing_swap() -> None:
        with phases("swap"):
            clock.now_s += 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_swap()
    assert phases.current == "decode"
    clock.now_s += 3
    rows = phases.drain(clock.now_s)
    assert [(PHASES[r["phase"]], r["start_s"], r["stop_s"]) for r in rows] == [("decode", 0, 5), ("swap", 5, 7), ("decode", 7, 10)]
    assert len(phases.drain()) == 0


def test_phases_of_the_other_role_are_refused() -> None:
    phases = Phases(0, "generation")
    with pytest.raises(KeyError, match="a generation rank has no phase 'train'"):
        phases.enter("train")
    assert phases.current == "start"


def test_every_enter_is_a_sign_of_life_and_the_longest_silence_of_each_phase_is_kept() -> None:
    clock = Clock()
    phases = Phases(0, "generation", clock)
    for phase, num, waits_for in (
        ("decode", 2, ""),
        ("decode", 5, ""),
        ("decode", 1, ""),
        ("gated", 3, "a ticket"),
        ("gated", 4, "a ticket"),
        ("decode", 0, ""),
    ):
        phases.enter(phase, waits_for)
        clock.now_s += num
    assert phases.report == ("decode", 15.0, 15.0, 6, "")
    assert phases.longest_s == {"start": 0.0, "decode": 5.0, "gated": 4.0}
    phases.alive("more")
    assert phases.report == ("decode", 15.0, 15.0, 7, "more")
    with phases("swap"):
        clock.now_s += 2
    assert phases.report == ("decode", 17.0, 17.0, 9, "") and phases.longest_s["swap"] == 2.0


def test_real_clock_sums_to_wall_time() -> None:
    phases = Phases(0, "generation")
    for k in range(1000):
        phases.enter(("decode", "gated", "swap")[k % 3])
    rows = phases.drain()
    assert np.isclose(sum(phases.seconds.values()), rows["stop_s"][-1] - rows["start_s"][0], rtol=0, atol=1e-9)
