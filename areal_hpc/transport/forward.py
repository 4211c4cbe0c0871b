"""Lanes between nodes: a forwarder carries the records of a generation rank's lane into a lane of the same size beside its training rank.

    generation rank g                                               training rank g mod T
    worker ─▶ RingProducer ▕ outgoing lane ▏ ─▶ ForwardSender       ForwardReceiver ─▶ ▕ lane ▏ RingConsumer ─▶ collector
                           ▕ (own memory)  ▏       │  ── RECORD (header and payload, slot to slot) ──▶  ▲  │
                                                   │  ◀── CREDIT (bytes given back) ────────────────────┼──┘
                                                   └──── BEAT (about once a second; the last one) ──────┘

Both ends are driven by `progress()`, which never blocks: a rank that computes holds up nobody, only a full outgoing lane holds back its own worker.

Credits: the two lanes have one capacity and see the same records in the same order, so their positions are equal. A record may leave once its end lies within a
capacity of the head that the receiver has last told, so a slot is always there when a frame arrives. Unread frames in MPI's own buffers are bounded by the
same number. The receiver tells its head whenever it has moved by an eighth of the capacity. That is often enough: with nothing unread, the next record, a quarter
of the capacity with as much padding before it at most, finds the other three eighths.

Signs of life: a generation rank of another node cannot be asked for by its process id. Its beats say what it works on; if nothing comes for
`silence_deadline_s` of *listening* (the time in which this rank itself computed or stood still does not count), `check` raises ProducerDead.

The end: `ForwardSender.close` posts no new record and says how many it sent; `ForwardReceiver.finish` waits for exactly those, says farewell, and both wait
until nothing of theirs is under way, as MPI.Finalize wants it. What is still in the outgoing lane was pushed and never arrived: the run's accounting counts
it as in the ring.
"""

from __future__ import annotations

import enum
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from areal_hpc.transport.ring import ProducerDead, Record, RecordTooLarge, RingConsumer, RingProducer, Slot

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_IN_FLIGHT = 8
"""Records that one lane has under way at a time."""
BEAT_EVERY_S = 1.0
NAP_S = 0.0005
FAREWELL = -1
"""In place of a credit: everything announced has arrived, no message follows."""


class Kind(enum.IntEnum):
    """Kinds of messages (MPI tags)."""

    RECORD = 1
    CREDIT = 2
    BEAT = 3


class SenderCounters(TypedDict):
    """Sums over the life of the sending end of a lane."""

    records: int
    """Records and markers handed to MPI."""
    bytes: int
    """Their bytes, headers included."""
    full_waits: int
    """Times the worker found the outgoing lane full."""
    full_wait_s: float
    """Seconds between finding it full and getting its slot."""
    credit_waits: int
    """Times a record had to wait for the receiver to give space back."""
    credit_wait_s: float
    """Seconds of those waits."""


class ReceiverCounters(TypedDict):
    """Sums over the life of the receiving end of a lane; those of the sender as of its last beat."""

    records: int
    """Records and markers that arrived."""
    bytes: int
    """Their bytes, headers included."""
    silent_s: float
    """Seconds listened since the last sign of life."""
    sent_records: int
    sent_bytes: int
    full_waits: int
    full_wait_s: float
    credit_waits: int
    credit_wait_s: float


NOTHING_SENT: SenderCounters = {"records": 0, "bytes": 0, "full_waits": 0, "full_wait_s": 0.0, "credit_waits": 0, "credit_wait_s": 0.0}


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, and what training should know if it is the last."""

    pid: int
    capacity_bytes: int
    tickets: tuple[int, ...]
    """Begun by this generation rank and not yet in its lane."""
    counters: SenderCounters
    closed: bool
    """No record follows those of `counters`."""


class ForwardSender:
    """The sending end, on a generation rank. `outgoing` is the consumer of the lane that the worker's `producer` writes to.

    Lifecycle: `progress()` in every turn of the worker's loop, then `close()`. One thread.
    """

    def __init__(
        self, comm: MPI.Comm, destination: int, name: str, producer: RingProducer, outgoing: RingConsumer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`destination`: rank of the receiver in `comm`; `name`: what messages call it."""
        self._comm, self._destination, self._name = comm, destination, name
        self._producer, self._outgoing = producer, outgoing
        self._clock = clock
        self._next: Record | None = None
        """Peeked at, and not sent for want of credit."""
        self._posted: deque[tuple[MPI.Request, Record]] = deque()
        self._beats: list[MPI.Request] = []
        self._credited_head = 0
        self._posted_end = 0
        self._num_posted = self._num_posted_bytes = 0
        self._credit_waits, self._credit_wait_s = 0, 0.0
        self._waiting_since: float | None = None
        self._beat_at = -float("inf")
        self._closed = self._farewell = False

    def progress(self) -> None:
        """Take credits, release what has left, send what may leave. Never blocks."""
        self._receive()
        self._reap()
        self._post()
        if self._clock() >= self._beat_at + BEAT_EVERY_S:
            self._tell()

    def close(self, deadline_s: float) -> None:
        """Send no new record; wait until all that were sent have arrived. Raises TimeoutError that says what is missing."""
        self._closed = True
        self._stop_waiting()
        self._tell()
        stop_at = time.monotonic() + deadline_s
        while self._posted or self._beats or not self._farewell:
            if time.monotonic() > stop_at:
                raise TimeoutError(
                    f"waited {deadline_s:g} s for {self._name} to confirm {self._num_posted} forwarded records of lane {self._producer.lane}; "
                    f"{len(self._posted)} have not left"
                )
            self._receive()
            self._reap()
            time.sleep(NAP_S)
        self._outgoing.close()

    def counters(self) -> SenderCounters:
        """Sums so far."""
        waiting_s = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
        return {
            "records": self._num_posted,
            "bytes": self._num_posted_bytes,
            "full_waits": self._producer.full_waits,
            "full_wait_s": self._producer.full_wait_s,
            "credit_waits": self._credit_waits,
            "credit_wait_s": self._credit_wait_s + waiting_s,
        }

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes in the outgoing lane, those under way included."""
        return self._outgoing.used_bytes

    def _receive(self) -> None:
        from mpi4py import MPI

        head = np.empty(1, np.int64)
        while (message := self._comm.Improbe(source=self._destination, tag=Kind.CREDIT)) is not None:
            message.Recv([head, MPI.INT64_T])
            if head[0] == FAREWELL:
                self._farewell = True
                continue
            if not self._credited_head <= head[0] <= self._posted_end:
                raise RuntimeError(f"{self._name} gave credit up to {head[0]}, after {self._credited_head}, for records sent up to {self._posted_end}")
            self._credited_head = int(head[0])

    def _reap(self) -> None:
        """Give back the space of records that have left; they may do so in any order."""
        under_way = deque[tuple["MPI.Request", Record]]()
        for request, record in self._posted:
            if request.Test():
                record.release()
            else:
                under_way.append((request, record))
        self._posted = under_way
        self._beats = [request for request in self._beats if not request.test()[0]]

    def _post(self) -> None:
        from mpi4py import MPI

        while len(self._posted) < MAX_IN_FLIGHT:
            if self._next is None:
                self._next = self._outgoing.peek()
            if self._next is None:
                return
            if self._next.end_position - self._credited_head > self._outgoing.capacity_bytes:
                if self._waiting_since is None:
                    self._waiting_since = self._clock()
                    self._credit_waits += 1
                return
            self._stop_waiting()
            record, self._next = self._next, None
            frame = record.frame
            self._posted.append((self._comm.Isend([frame, MPI.BYTE], self._destination, Kind.RECORD), record))
            self._posted_end = record.end_position
            self._num_posted += 1
            self._num_posted_bytes += frame.nbytes

    def _stop_waiting(self) -> None:
        if self._waiting_since is not None:
            self._credit_wait_s += self._clock() - self._waiting_since
            self._waiting_since = None

    def _tell(self) -> None:
        self._beat_at = self._clock()
        if self._beats and not self._closed:  # the last one has not left: another would only queue up behind it
            return
        beat = Beat(os.getpid(), self._outgoing.capacity_bytes, tuple(self._producer.in_flight()), self.counters(), self._closed)
        self._beats.append(self._comm.isend(beat, dest=self._destination, tag=Kind.BEAT))


@dataclass(slots=True)
class RemoteLane:
    """The receiving end of one lane: this rank writes into it what arrives, and reads from it as from any other."""

    generation_rank: int
    source: int
    """Rank of the sender in the communicator."""
    name: str
    """What messages call it."""
    producer: RingProducer
    consumer: RingConsumer
    num_received: int = 0
    num_received_bytes: int = 0
    beat: Beat | None = None
    """The latest."""
    silent_s: float = 0.0
    """Seconds listened without a sign of life."""
    _credited_head: int = 0
    _slot: Slot | None = None
    _arriving: MPI.Request | None = None
    _credit: MPI.Request | None = None
    _head: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """Buffer of `_credit`."""

    @property
    def complete(self) -> bool:
        """The sender has announced its end, and all its records have arrived."""
        return self.beat is not None and self.beat.closed and self._arriving is None and self.num_received == self.beat.counters["records"]

    def counters(self) -> ReceiverCounters:
        """Sums so far."""
        sent = NOTHING_SENT if self.beat is None else self.beat.counters
        return {
            "records": self.num_received,
            "bytes": self.num_received_bytes,
            "silent_s": self.silent_s,
            "sent_records": sent["records"],
            "sent_bytes": sent["bytes"],
            "full_waits": sent["full_waits"],
            "full_wait_s": sent["full_wait_s"],
            "credit_waits": sent["credit_waits"],
            "credit_wait_s": sent["credit_wait_s"],
        }

    @property
    def state(self) -> str:
        """For messages."""
        if self.beat is None or not self.beat.closed:
            return f"{self.name} has not said how many records it sent ({self.num_received} arrived)"
        return f"{self.name} sent {self.beat.counters['records']} records, of which {self.num_received} arrived"


class ForwardReceiver:
    """The receiving end of all lanes of a training rank whose generation ranks are elsewhere.

    Lifecycle: `progress()` whenever the lanes are looked at, `check()` while data is waited for, `finish()`. One thread, the one that consumes.
    """

    def __init__(self, comm: MPI.Comm, name: str, lanes: Sequence[RemoteLane], silence_deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: what messages call this rank."""
        self._comm, self._name = comm, name
        self.lanes = {lane.generation_rank: lane for lane in lanes}
        self._silence_deadline_s = silence_deadline_s
        self._clock = clock
        self._listened_at: float | None = None

    def progress(self) -> None:
        """Take what has arrived, give credit. Never blocks. Raises LaneCorrupt for a damaged frame."""
        now = self._clock()
        listened_s = 0.0 if self._listened_at is None else min(now - self._listened_at, BEAT_EVERY_S)
        self._listened_at = now
        for lane in self.lanes.values():
            lane.silent_s += listened_s
            self._hear(lane)
            while self._receive_one(lane):
                pass
            if lane.complete:
                lane.producer.close()
            self._give_credit(lane)

    def check(self) -> None:
        """Raises ProducerDead for a lane whose sender has been silent beyond the deadline."""
        for lane in self.lanes.values():
            if lane.silent_s > self._silence_deadline_s and not lane.complete:
                beat = lane.beat
                where = f"{lane.name} has been silent for {lane.silent_s:.0f} s"
                raise ProducerDead(lane.generation_rank, beat.pid if beat else 0, list(beat.tickets) if beat else [], where=where)

    def finish(self, deadline_s: float) -> None:
        """Wait for all records that were sent, then let the senders go. Raises TimeoutError that names those that are waited for."""
        stop_at = time.monotonic() + deadline_s
        while missing := [lane for lane in self.lanes.values() if not lane.complete]:
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{self._name} waited {deadline_s:g} s for forwarded records: {'; '.join(lane.state for lane in missing)}")
            self.progress()
            time.sleep(NAP_S)
        for lane in self.lanes.values():
            self._wait_credit(lane, stop_at)
            self._send_credit(lane, FAREWELL)
            self._wait_credit(lane, stop_at)

    def counters(self) -> dict[int, ReceiverCounters]:
        """By generation rank."""
        return {g: lane.counters() for g, lane in self.lanes.items()}

    def _hear(self, lane: RemoteLane) -> None:
        while (message := self._comm.improbe(source=lane.source, tag=Kind.BEAT)) is not None:
            beat: Beat = message.recv()
            if beat.capacity_bytes != lane.consumer.capacity_bytes:
                raise RuntimeError(
                    f"lane {lane.generation_rank} has {beat.capacity_bytes} bytes on {lane.name} and {lane.consumer.capacity_bytes} on {self._name}: "
                    "their pages differ in size; set transport.lane_bytes to a multiple of both"
                )
            lane.beat, lane.silent_s = beat, 0.0

    def _receive_one(self, lane: RemoteLane) -> bool:
        """True if a record has arrived whole."""
        if lane._arriving is None:
            self._begin_receive(lane)
        if lane._arriving is None or not lane._arriving.Test():
            return False
        assert lane._slot is not None
        lane.num_received += 1
        lane.num_received_bytes += lane._slot.num_bytes
        lane._slot.commit_frame()
        lane._arriving, lane._slot, lane.silent_s = None, None, 0.0
        return True

    def _begin_receive(self, lane: RemoteLane) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        message = self._comm.Improbe(source=lane.source, tag=Kind.RECORD, status=status)
        if message is None:
            return
        num_bytes = status.Get_count(MPI.BYTE)
        try:
            lane._slot = lane.producer.try_reserve_frame(num_bytes)
        except RecordTooLarge:
            lane._slot = None
        if lane._slot is None:
            raise RuntimeError(
                f"a record of {num_bytes} bytes from {lane.name} does not fit into lane {lane.generation_rank} of {self._name} "
                f"({lane.consumer.used_bytes} of {lane.consumer.capacity_bytes} bytes in use): it was sent without credit"
            )
        lane._arriving = message.Irecv([lane._slot.buffer, MPI.BYTE])

    def _give_credit(self, lane: RemoteLane) -> None:
        if lane._credit is not None and not lane._credit.Test():
            return  # one under way at a time: the next one says it all
        lane._credit = None
        head = lane.consumer.head_position
        if head - lane._credited_head >= lane.consumer.capacity_bytes // 8:
            self._send_credit(lane, head)
            lane._credited_head = head

    def _send_credit(self, lane: RemoteLane, head: int) -> None:
        from mpi4py import MPI

        lane._head[0] = head
        lane._credit = self._comm.Isend([lane._head, MPI.INT64_T], lane.source, Kind.CREDIT)

    def _wait_credit(self, lane: RemoteLane, stop_at: float) -> None:
        while lane._credit is not None and not lane._credit.Test():
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{self._name} waited for {lane.name} to take its last credit")
            time.sleep(NAP_S)
        lane._credit = None
