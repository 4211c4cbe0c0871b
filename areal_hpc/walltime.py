"""The end of the job's time: how many steps fit before it, and when to stop so that the last checkpoint is complete.

The scheduler's own warning (`#SBATCH --signal=USR1@300`) comes a fixed time before the end, however long a step takes. Here the stop comes earlier when the steps are
long: `stop_before_s` plus the longest of the latest steps before the end, since a stop is only acted on between two steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_hpc.signals import StopFlag

LATEST = 20
"""Steps that predictions rest on."""


@dataclass(slots=True)
class Walltime:
    """Lifecycle: made by training rank 0, `step` after each step, `is_due` between steps."""

    end: float | None
    """Seconds since 1970; None: no limit is known."""
    stop_before_s: float
    """Kept free before `end`, for the last checkpoint, but no more than a tenth of the time that there is at the start. 0: stopping is left to the scheduler's signal."""
    now: Callable[[], float] = time.time
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    def __post_init__(self) -> None:
        if self.left_s is not None:
            self.stop_before_s = min(self.stop_before_s, 0.1 * max(0.0, self.left_s))

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the job."""
        return None if self.end is None else self.end - self.now()

    def step(self, wall_s: float) -> None:
        """A step took so long."""
        self._steps_s.append(wall_s)

    def is_due(self) -> bool:
        """The next step might not end in time."""
        left_s = self.left_s
        return left_s is not None and self.stop_before_s > 0 and left_s < self.stop_before_s + max(self._steps_s, default=0.0)

    def ask(self, stop: StopFlag) -> bool:
        """Between steps: ask for a stop if it is due. True once a stop is asked for, by whomever."""
        if self.is_due():
            stop.request(f"the job ends in {clock(self.left_s or 0.0)}")
        return stop.requested

    def steps_left(self) -> int | None:
        """Steps that will fit before the stop, at the mean pace of the latest ones; None when that cannot be said."""
        left_s, mean_s = self.left_s, sum(self._steps_s) / max(1, len(self._steps_s))
        return None if left_s is None or mean_s <= 0 else max(0, int((left_s - self.stop_before_s) / mean_s))

    def note(self, steps_wanted: int) -> str:
        """For the progress line: time left, and how many of the `steps_wanted` will be reached if not all."""
        left_s, fitting = self.left_s, self.steps_left()
        if left_s is None or fitting is None:
            return ""
        enough = "" if fitting >= steps_wanted else f", enough for about {fitting} of {steps_wanted} steps"
        return f"job ends in {clock(left_s)}{enough}"


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
