"""A request to stop: SIGUSR1 (the scheduler's warning, and what the launcher forwards) or SIGTERM sets a flag that the training loop reads between steps."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopFlag:
    """Set from a signal handler, read by training rank 0; nothing else happens in the handler."""

    requested: bool = False
    signal_name: str = ""

    def install(self) -> None:
        """Take over SIGUSR1 and SIGTERM of this process. SIGINT is ignored: the launcher turns it into SIGUSR1."""
        signal.signal(signal.SIGUSR1, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def request(self, why: str) -> None:
        """The same without a signal; the first reason stands."""
        if not self.requested:
            self.requested, self.signal_name = True, why

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.signal_name = signal.Signals(number).name
