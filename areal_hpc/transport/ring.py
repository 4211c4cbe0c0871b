"""One lane of the ring: finished groups travel from one generation rank to one training rank of the same node through shared memory.

Lifecycle, with one process (or thread) at each end:

    ring = Ring("run17-lane3", 64 << 20, lane=3, job_id=17)
    lane = ring.consumer()                                                        # training rank: makes the memory
    producer = ring.producer(timeout_s=60)                                        # generation rank: waits until it is there
    lane.wait_for_producer(timeout_s=60); lane.unlink()                           # the name is gone, the memory lives as long as its users

    with producer.reserve(num_bytes, timeout_s=600) as slot:                      # blocks while the lane is full: that is the back-pressure
        slot.buffer[:] = ...                                                      # straight into shared memory
        slot.commit(ticket=k, version_min=3, version_max=4, num_tokens=812, num_samples=8)

    record = lane.peek(timeout_s=1.0)                                             # leased: its bytes stay until release()
    if record is not None:
        with record:
            ... record.ticket, record.buffer ...                                  # read-only, no copy

Promises: records arrive whole, in order and once; what was committed is delivered even if the producer was killed a moment later; what was damaged is
counted and raised, never delivered; memory is bounded by the capacity; both handles are acquired once. A lane whose producer died is drained first, then
`peek` raises ProducerDead with the tickets that died with it (`producer.begin(ticket)` names them). To drain a closed lane: read `producer_state()` first;
once it says "closed", records come until `peek()` returns None, and none after.

The trap: `slot.buffer` and `record.buffer` are windows into the circle. A view kept after `commit` or `release` shows the bytes of other records later
(with `poison=True`, or AREAL_HPC_RING_POISON=1, released bytes turn into 0xDD at once). Copy what must stay.

How it works, and the memory orders: csrc/ring.hpp.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypedDict, TypeVar

import numpy as np
from typing_extensions import Buffer

from areal_hpc import _ring
from areal_hpc._ring import (
    ChecksumError,
    LaneBusy,
    LaneClosed,
    LaneCorrupt,
    LaneMismatch,
    Record,
    RecordTooLarge,
    RingError,
    Slot,
    crc32c,
    sweep_stale,
)

__all__ = [
    "MAX_IN_FLIGHT",
    "RECORD_HEADER",
    "ChecksumError",
    "LaneBusy",
    "LaneClosed",
    "LaneCorrupt",
    "LaneCounters",
    "LaneMismatch",
    "ProducerDead",
    "Record",
    "RecordTooLarge",
    "Ring",
    "RingConsumer",
    "RingError",
    "RingFull",
    "RingProducer",
    "Slot",
    "WouldDeadlock",
    "crc32c",
    "sweep_stale",
]

MAX_IN_FLIGHT = _ring.MAX_IN_FLIGHT
"""Tickets that a lane can name as in flight; more are only counted."""

RECORD_HEADER = np.dtype(
    [
        ("payload_bytes", "<u4"),
        ("payload_crc32c", "<u4"),
        ("kind", "<u2"),  # 1 data, 2 marker
        ("lane", "<u2"),
        ("incarnation", "<u4"),
        ("seq", "<u8"),
        ("ticket", "<i8"),
        ("version_min", "<i4"),
        ("version_max", "<i4"),
        ("num_tokens", "<u4"),
        ("num_samples", "<u4"),
        ("commit_time_s", "<f8"),
        ("reserved", "<u4"),
        ("header_crc32c", "<u4"),
    ]
)
"""Layout of `Record.header`: headers of many records, joined, are read at once with `np.frombuffer(joined, RECORD_HEADER)`."""

_SLICE_S = 0.05
"""Longest wait between two looks at signals (so that Ctrl-C works) and at the peer's life."""
_POLL_SLICE_S = 0.001
"""Longest wait between two calls of the caller's `poll`."""

T = TypeVar("T")


class LaneCounters(TypedDict):
    """Sums over the life of a lane. The `full_` ones and the high-water mark are the producer's, the others are what this consumer saw."""

    records: int
    """Data records delivered."""
    bytes: int
    """Payload bytes delivered."""
    markers: int
    """Marker records delivered."""
    checksum_errors: int
    """Damaged records, not delivered."""
    empty_waits: int
    """Waits of the consumer for a record."""
    empty_wait_s: float
    """Seconds in them."""
    full_waits: int
    """Times the producer found the lane full."""
    full_wait_s: float
    """Seconds between finding it full and getting its slot, the wait under way included."""
    high_water_bytes: int
    """Most bytes in use at a commit, headers and padding included."""


class RingFull(TimeoutError):  # noqa: N818 (like queue.Full)
    """The consumer gave back too little space in time. Nothing is lost: the record can be reserved again."""


class WouldDeadlock(RingFull):
    """A blocking reserve without `poll` on a thread that consumes: the room may be its own to make, in this lane or round a circle of lanes."""


class ProducerDead(RingError):  # noqa: N818 (an event rather than a fault of the caller)
    """The producer's process died, or it closed the lane with tickets in flight (as an exception does). All that it committed has been delivered.

    Raised again until another producer attaches.
    """

    def __init__(self, lane: int, pid: int, tickets: list[int], num_untracked: int = 0, where: str = "") -> None:
        """`tickets`: begun, and neither delivered nor cancelled; `num_untracked`: more of them that the lane could not name."""
        self.lane, self.pid, self.tickets, self.num_untracked = lane, pid, tickets, num_untracked
        named = ", ".join(map(str, tickets)) if tickets else "none"
        more = f" and {num_untracked} more" if num_untracked else ""
        super().__init__(f"the producer of lane {lane} is gone: {where or f'process {pid}'}; tickets in flight: {named}{more}")


@dataclass(frozen=True, slots=True)
class Ring:
    """One lane, described: equal descriptions at both ends (it can be pickled). Each end is acquired once."""

    name: str
    """1 to 244 characters without '/'; unique on the node until `unlink`."""
    capacity_bytes: int
    """Rounded up to whole pages; a record may take a quarter."""
    lane: int = 0
    """Number of the lane, in every header."""
    job_id: int = 0
    restart_id: int = 0
    """Attempt of the job."""
    checksum: bool = True
    """Payloads carry a CRC32C; headers always do."""
    poison: bool | None = None
    """Released bytes turn into 0xDD at once; None: if AREAL_HPC_RING_POISON=1."""

    def __post_init__(self) -> None:
        for field, limit in (("lane", 1 << 16), ("job_id", 1 << 64), ("restart_id", 1 << 64)):
            if not 0 <= getattr(self, field) < limit:
                raise ValueError(f"a lane's {field} is 0 to {limit - 1}, not {getattr(self, field)}")
        if not 0 < self.capacity_bytes <= 1 << 46:
            raise ValueError(f"a lane's capacity is 1 byte to 64 TiB, not {self.capacity_bytes}")

    def consumer(self) -> RingConsumer:
        """Make the lane: all its memory, and a page more, is taken now.

        A segment of that name left by a dead consumer is replaced. Raises LaneBusy if its consumer lives, OSError (ENOSPC) if /dev/shm is too small.
        """
        poison = os.environ.get("AREAL_HPC_RING_POISON", "0") == "1" if self.poison is None else self.poison
        segment = _ring.make_lane(self.name, self.capacity_bytes, lane=self.lane, job_id=self.job_id, restart_id=self.restart_id, checksum=self.checksum)
        return RingConsumer(self.name, segment, poison)

    def producer(self, *, timeout_s: float) -> RingProducer:
        """Attach once the consumer has made the lane.

        Raises TimeoutError that says what is missing, LaneMismatch for a living lane of another job, attempt or layout, LaneBusy if a living producer has it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            segment, reason = _ring.try_open(self.name, job_id=self.job_id, restart_id=self.restart_id)
            if segment is not None:
                return RingProducer(segment)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for lane '{self.name}': {reason}")
            time.sleep(0.002)


class RingProducer(_ring.Producer):
    """The writing end of a lane: one per lane, one thread. Base class: what never waits."""

    def reserve(self, num_bytes: int, *, timeout_s: float, poll: Callable[[], object] | None = None) -> Slot:
        """Space for a record of `num_bytes`, waiting for room up to `timeout_s`, and calling `poll` about every millisecond of that.

        Raises RingFull at the deadline, WouldDeadlock on a thread that consumes (unless `poll` does that), and what `try_reserve` raises.
        """
        return self._wait_for(lambda: self.try_reserve(num_bytes), f"{num_bytes} bytes", timeout_s, poll)

    def push(
        self,
        data: Buffer,
        *,
        ticket: int,
        version_min: int = 0,
        version_max: int = 0,
        num_tokens: int = 0,
        num_samples: int = 0,
        timeout_s: float,
        poll: Callable[[], object] | None = None,
    ) -> int:
        """Copy a contiguous buffer into a record and commit it; returns its sequence number. Waits and raises like `reserve`."""

        def attempt() -> int | None:
            return self.try_push(data, ticket=ticket, version_min=version_min, version_max=version_max, num_tokens=num_tokens, num_samples=num_samples)

        return self._wait_for(attempt, f"{memoryview(data).nbytes} bytes", timeout_s, poll)

    def push_marker(self, marker_id: int, *, timeout_s: float, poll: Callable[[], object] | None = None) -> None:
        """Send a marker: everything before it in the lane was committed before this call. Waits and raises like `reserve`."""
        self._wait_for(lambda: self.try_push_marker(marker_id), "a marker", timeout_s, poll)

    def _wait_for(self, attempt: Callable[[], T | None], what: str, timeout_s: float, poll: Callable[[], object] | None) -> T:
        result = attempt()
        if result is not None:
            return result
        deadline = time.monotonic() + timeout_s
        while (result := attempt()) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise RingFull(f"waited {timeout_s:g} s for {what} in {self._describe()}: its consumer gave back too little")
            if poll is not None:
                poll()
            elif _ring.consumes_here():
                raise WouldDeadlock(f"{self._describe()} is full, and this thread, which would wait for room, also consumes: pass `poll`")
            self.wait_for_room(min(remaining_s, _SLICE_S if poll is None else _POLL_SLICE_S))
        return result

    def _describe(self) -> str:
        return f"lane {self.lane} ({self.used_bytes} of {self.capacity_bytes} bytes in use)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class RingConsumer(_ring.Consumer):
    """The reading end of a lane, and the owner of its memory: one per lane."""

    def wait_for_producer(self, *, timeout_s: float) -> None:
        """Return once a producer is attached; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout_s
        while self.producer_state() == "unattached":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for a producer to attach to lane {self.lane}")
            time.sleep(0.002)

    def peek(self, timeout_s: float = 0.0) -> Record | None:
        """The oldest record not seen yet, leased until its `release()`; None if none comes in `timeout_s`, or at once if the lane is drained and closed.

        Raises ChecksumError for a damaged record, which is skipped (the next call goes on behind it); LaneCorrupt, for good, for a damaged header;
        ProducerDead when nothing is left and nothing will come (noticed within 0.1 s).
        """
        record = self.try_peek()
        if record is not None:
            return record
        self._check_producer()
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self.wait_for_record(min(remaining_s, _SLICE_S)):
                return self.try_peek()
            self._check_producer()
        return self.try_peek() if timeout_s > 0 else None  # raises LaneClosed if another thread closed this end meanwhile

    def _check_producer(self) -> None:
        dead = self.dead_producer()
        if dead is not None:
            raise ProducerDead(self.lane, *dead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
