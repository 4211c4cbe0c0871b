"""What a rank does with its time: one phase at any moment, intervals without gap or overlap, on one clock.

`enter` ends the running phase and begins the next at the same instant, so the intervals of a rank sum to its wall time.
Consecutive equal phases merge: entering "decode" before every decode step costs one string comparison and makes one interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

import numpy as np

from areal_hpc.observe.schema import PHASES, PHASES_OF_ROLE, ROLES, TABLES

NUMBER = {name: number for number, name in enumerate(PHASES)}


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
        self._finished: list[tuple[int, int, int, float, float]] = []

    def enter(self, phase: str) -> None:
        """Switch to `phase`; nothing happens when it is the current one. Raises KeyError when the role has no such phase."""
        if phase != self.current:
            if phase not in self.seconds:
                raise KeyError(f"a {self.role} rank has no phase '{phase}'; phases: {', '.join(self.seconds)}")
            self._cut(self._clock())
            self.current = phase

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
