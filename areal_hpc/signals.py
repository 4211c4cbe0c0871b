"""A request to stop: SIGUSR1 (the scheduler's warning, and what the launcher forwards) or SIGTERM sets a flag that the training loop reads between steps.

Any rank may be the one that is signalled: the others tell training rank 0, which decides the step. Signals are also written into a pipe, by the interpreter's own
handler and so even while the main thread is stuck inside a library: the watchdog's thread reads it, and ends the run hard at a second signal.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SECOND_AFTER_S = 1.0
"""A signal this soon after the first is the same request on a second way (scheduler and launcher), not a second request."""


@dataclass(slots=True)
class StopFlag:
    """Set from a signal handler, read by the main loop; nothing else happens in the handler."""

    requested: bool = False
    signal_name: str = ""
    requested_at: float = 0.0
    """time.monotonic() of the first signal."""
    again: str = ""
    """Name of a second signal: end now."""
    _pipe: tuple[int, int] = (-1, -1)
    _first_read_at: float | None = None

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
        found = [signal.Signals(number).name for number in numbers if number in STOP_SIGNALS]
        if not found:
            return
        now = time.monotonic()
        self._note(found[0])
        if self._first_read_at is None:
            self._first_read_at = now
        elif now - self._first_read_at > SECOND_AFTER_S:
            self.again = found[-1]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(signal.Signals(number).name)

    def _note(self, name: str) -> None:
        if not self.requested:
            self.requested_at, self.signal_name, self.requested = time.monotonic(), name, True
