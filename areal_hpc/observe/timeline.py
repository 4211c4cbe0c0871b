"""What a rank does with its time: one phase at any moment, intervals without gap or overlap, on one clock. Every `enter` is also a sign of life of the main loop.

`enter` ends the running phase and begins the next at the same instant, so the intervals of a rank sum to its wall time.
Consecutive equal phases merge: entering "decode" before every decode step costs one string comparison and makes one interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from areal_hpc.observe.schema import PHASES, PHASES_OF_ROLE, ROLES, TABLES

NUMBER = {name: number for number, name in enumerate(PHASES)}


class Report(NamedTuple):
    """The last sign of life of a main loop, whole: the watchdog's thread reads it at any moment."""

    phase: str
    phase_since_s: float
    at_s: float
    """Both on the clock of `Phases`."""
    number: int
    waits_for: str = ""
    """For people: what the loop waits for, where it says so."""


class _Within:
    """One `with phases(name):` block; goes back to the phase that it interrupted."""

    __slots__ = ("_phases", "_name", "_outer")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name, self._outer = phases, name, ""

    def __enter__(self) -> None:
        self._outer = self._phases.current
        self._phases.enter(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phases.enter(self._outer)


class Phases:
    """Clockwork of one rank, in phase "start" from its construction.

    Example: `phases.enter("decode")` ... `with phases("swap"): engine.update_weights(...)` ... `rows = phases.drain()`.
    Trap: `seconds` is brought up to date by `enter` into another phase and by `drain`, not in between.
    """

    def __init__(self, rank: int, role: Literal["generation", "training"] | int, clock: Callable[[], float] = time.monotonic) -> None:
        """`rank`: world rank; `role`: its name or number (0 generation, 1 training)."""
        self.rank = rank
        self.role = ROLES[role] if isinstance(role, int) else role
        self.current = "start"
        self.seconds = dict.fromkeys(PHASES_OF_ROLE[self.role], 0.0)
        """Seconds spent in each phase so far."""
        self._clock = clock
        self._start_s = clock()
        self.report = Report("start", self._start_s, self._start_s, 0)
        self.longest_s: dict[str, float] = {}
        """Phase -> longest time between two signs of life in it so far: what the watchdog's deadlines are measured by."""
        self._finished: list[tuple[int, int, int, float, float]] = []

    def enter(self, phase: str, waits_for: str = "") -> None:
        """Switch to `phase`; when it is the current one it goes on, and this was a sign of life. Raises KeyError when the role has no such phase."""
        now_s, last = self._clock(), self.report
        if now_s - last.at_s > self.longest_s.get(last.phase, -1.0):
            self.longest_s[last.phase] = now_s - last.at_s
        since_s = last.phase_since_s
        if phase != self.current:
            if phase not in self.seconds:
                raise KeyError(f"a {self.role} rank has no phase '{phase}'; phases: {', '.join(self.seconds)}")
            self._cut(now_s)
            self.current = phase
            since_s = now_s
        self.report = Report(phase, since_s, now_s, last.number + 1, waits_for)

    def alive(self, waits_for: str = "") -> None:
        """A sign of life from within a loop that waits, in the current phase."""
        self.enter(self.current, waits_for)

    def seconds_now(self) -> dict[str, float]:
        """`seconds` with the running phase up to this moment: they sum to the wall time since construction."""
        running = {self.current: self.seconds[self.current] + self._clock() - self._start_s}
        return {**self.seconds, **running}

    def now_s(self) -> float:
        """On the clock that the phases are measured by."""
        return self._clock()

    def __call__(self, phase: str) -> _Within:
        """`with phases("push_wait"):` the block is in that phase, then the previous one goes on."""
        return _Within(self, phase)

    def drain(self, now_s: float | None = None) -> np.ndarray:
        """Rows of /timeline since the last drain; the current phase is cut at `now_s` (default: now) and goes on behind it."""
        self._cut(self._clock() if now_s is None else now_s)
        rows = np.array(self._finished, TABLES["timeline"].dtype)
        self._finished.clear()
        return rows

    def _cut(self, now_s: float) -> None:
        assert now_s >= self._start_s, f"clock of rank {self.rank} went back from {self._start_s} to {now_s}"
        if now_s > self._start_s:
            self.seconds[self.current] += now_s - self._start_s
            self._finished.append((self.rank, ROLES.index(self.role), NUMBER[self.current], self._start_s, now_s))
            self._start_s = now_s
