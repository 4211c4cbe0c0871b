"""A request to stop: SIGUSR1 (the scheduler's warning, and what the launcher forwards) or SIGTERM sets a flag that the training loop reads between steps.

Any rank may be the one that is signalled: the others tell training rank 0, which decides the step. Signals are also written into a pipe, by the interpreter's own
handler and so even while the main thread is stuck inside a library: the watchdog's thread reads it, and ends the run hard when somebody insists (`Insistence`).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SECOND_AFTER_S = 1.0
"""A signal this soon after the first of its kind is the same request on a second way (scheduler and launcher), not a second request."""


@dataclass(slots=True)
class Insistence:
    """Tells who asks a second time, and wants the end now, from a scheduler that goes through its sequence. Both ranks and launcher ask here.

    Only a signal of the same kind insists. SIGTERM after SIGUSR1 does not: first comes the warning, then the end of the grace time or of the job. In a Slurm job no
    SIGTERM does: a preempted job gets one at the start of its grace time and one at its end, and srun passes on what slurmd has delivered already. SIGKILL follows
    anyway, and the checkpoint may be complete before it comes. A terminal delivers Ctrl-C (SIGINT) once, so the second counts at once.
    """

    in_slurm: bool = field(default_factory=lambda: "SLURM_JOB_ID" in os.environ)
    _first_at: dict[int, float] = field(default_factory=dict)

    def hear(self, number: int, now: float) -> bool:
        """A signal came at `now` (time.monotonic()): does it insist?"""
        grace_s = 0.0 if number == signal.SIGINT else SECOND_AFTER_S
        if number not in self._first_at:
            self._first_at[number] = now
            return False
        return now >= self._first_at[number] + grace_s and not (number == signal.SIGTERM and self.in_slurm)


@dataclass(slots=True)
class StopFlag:
    """Set from a signal handler, read by the main loop; nothing else happens in the handler."""

    requested: bool = False
    signal_name: str = ""
    requested_at: float = 0.0
    """time.monotonic() of the first request."""
    again: str = ""
    """Name of a signal that insists: end now."""
    _pipe: tuple[int, int] = (-1, -1)
    _insistence: Insistence = field(default_factory=Insistence)

    def install(self) -> None:
        """Take over SIGUSR1 and SIGTERM of this process. SIGINT is ignored: the launcher turns it into SIGUSR1. Call it from the main thread."""
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when a signal has come; -1 before `install`."""
        return self._pipe[0]

    def read_signals(self) -> None:
        """Take what the interpreter wrote into the pipe (watchdog's thread)."""
        try:
            numbers = os.read(self._pipe[0], 4096)
        except BlockingIOError:
            return
        now = time.monotonic()
        for number in numbers:
            if number in STOP_SIGNALS:
                name = signal.Signals(number).name
                self.request(name)
                if self._insistence.hear(number, now):
                    self.again = name

    def request(self, why: str) -> None:
        """Ask for a stop, also without a signal (walltime.py); the first reason stands. `why`: name of the signal, or words."""
        if not self.requested:
            self.requested_at, self.signal_name, self.requested = time.monotonic(), why, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
