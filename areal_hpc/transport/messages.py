"""Small control messages between ranks: non-blocking both ways, so that neither a decoding nor a computing rank holds up another.

Who sends what to whom (payload in brackets; G0 and T0 are generation and training rank 0):

    WANT       generation -> G0          tickets wanted [count]
    LEASE      G0 -> generation          tickets granted [list of tickets, version they may start under]
    VERSION    T0 -> every generation    a push begins [Announcement]
    LIMIT      T0 -> every generation    rejected tickets raised the limit [version, ticket limit]
    STARTED    generation -> T0          first tokens [list of (ticket, start version)]
    CONFIRM    generation -> T0          a version is received and its checksums are right [version, seconds to receive, of which own work, staged or not]
    SWAPPED    generation -> T0          a version is in use [version, pause in seconds]
    DAMAGED    generation -> T0          the checksum of a bucket is wrong [Damage]
    RESEND     T0 -> training            send that bucket once more [Damage, world rank of the receiver]
    BUCKET     training -> generation    it, once more [Damage, bytes]
    EVALUATED  generation -> T0          its share of an evaluation [Share]
    SAMPLES    generation -> T0          answers saved for reading; those of an evaluation before its share [Piece]
    OBSERVED   any -> T0                 phases and counters [dict of arrays]
    ARRIVED    training -> T0            sample tables of groups taken from the ring [list of Arrival]
    PLAN       T0 -> training            the next batch [plan and rejected tickets; None: still being composed]
    SNAPSHOT   T0 -> every generation    a checkpoint begins: copy what is on its way, then a marker into the lane [step, folder]
    SAVED      any -> T0                 its files of a checkpoint are on the disk, or could not be written [cut.Saved]
    STOP       T0 -> all                 the run ends
    SIGNALLED  any -> T0                 a signal came that asks the run to stop [its name]
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


class Tag(enum.IntEnum):
    """Kinds of control messages (MPI tags)."""

    WANT = 1
    LEASE = 2
    VERSION = 3
    LIMIT = 4
    STARTED = 5
    CONFIRM = 6
    SWAPPED = 7
    EVALUATED = 8
    OBSERVED = 9
    ARRIVED = 10
    PLAN = 11
    STOP = 12
    SAMPLES = 13
    SNAPSHOT = 14
    SAVED = 15
    SIGNALLED = 16
    DAMAGED = 20
    RESEND = 21
    BUCKET = 22


@dataclass(frozen=True, slots=True)
class Message:
    """One received message."""

    source: int
    tag: Tag
    body: Any


@dataclass(slots=True)
class Mailbox:
    """Sends and receives pickled control messages on one communicator, from one thread.

    Trap: a message is on its way only while its request is tested now and then; `poll` does that.
    """

    comm: MPI.Comm
    _in_flight: list[MPI.Request] = field(default_factory=list)

    def post(self, destination: int, tag: Tag, body: Any = None) -> None:
        """Send without waiting."""
        self._in_flight.append(self.comm.isend(body, dest=destination, tag=int(tag)))

    def poll(self) -> list[Message]:
        """All messages that are here. Never blocks."""
        from mpi4py import MPI

        self._in_flight = [request for request in self._in_flight if not request.test()[0]]
        received, status = [], MPI.Status()
        while (message := self.comm.improbe(status=status)) is not None:
            received.append(Message(status.Get_source(), Tag(status.Get_tag()), message.recv()))
        return received

    def drain(self, deadline_s: float) -> None:
        """Wait until everything sent has left. Raises TimeoutError."""
        stop_at = time.monotonic() + deadline_s
        while self._in_flight:
            self._in_flight = [request for request in self._in_flight if not request.test()[0]]
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{len(self._in_flight)} control messages were not taken within {deadline_s:g} s")
            time.sleep(0.001)
