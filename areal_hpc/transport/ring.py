"""One lane of the ring: finished groups travel from one generation rank to one training rank of the same node through shared memory.

Lifecycle, with one process (or thread) at each end:

    lane = RingConsumer.create("run17-lane3", 64 << 20, lane=3, job_id=17)        # training rank: makes the memory
    producer = RingProducer.open("run17-lane3", job_id=17, timeout_s=60)          # generation rank: waits until it is there
    lane.wait_for_producer(timeout_s=60); lane.unlink()                           # the name is gone, the memory lives as long as its users

    with producer.reserve(num_bytes, timeout_s=600) as slot:                      # blocks while the lane is full: that is the back-pressure
        slot.buffer[:] = ...                                                      # straight into shared memory
        slot.commit(ticket=k, version_min=3, version_max=4, num_tokens=812, num_samples=8)

    record = lane.peek(timeout_s=1.0)                                             # leased: its bytes stay until release()
    if record is not None:
        with record:
            ... record.ticket, record.buffer ...                                  # read-only, no copy

Promises: records arrive whole, in order and once; what was committed is delivered even if the producer was killed a moment later; what was damaged is
counted and raised, never delivered; memory is bounded by the capacity; both handles are acquired once. To drain an ended lane: read `producer_state()`
first; once it says "dead" or "closed", records come until `peek()` returns None, and none after.

The trap: `slot.buffer` and `record.buffer` are windows into the circle. A view kept after `commit` or `release` shows the bytes of other records later
(with `poison=True`, or AREAL_HPC_RING_POISON=1, released bytes turn into 0xDD at once). Copy what must stay.

How it works, and the memory orders: csrc/ring.hpp.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self, TypedDict, cast

import numpy as np

from areal_hpc import _ring
from areal_hpc._ring import ChecksumError, LaneBusy, LaneClosed, LaneCorrupt, LaneMismatch, Record, RecordTooLarge, RingError, crc32c, sweep_stale

__all__ = [
    "RECORD_HEADER",
    "ChecksumError",
    "LaneBusy",
    "LaneClosed",
    "LaneCorrupt",
    "LaneCounters",
    "LaneMismatch",
    "Record",
    "RecordTooLarge",
    "RingConsumer",
    "RingError",
    "RingFull",
    "RingProducer",
    "Slot",
    "WouldDeadlock",
    "crc32c",
    "sweep_stale",
]

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

ProducerState = Literal["unattached", "alive", "dead", "closed"]


class RingFull(TimeoutError):  # noqa: N818 (like queue.Full)
    """The consumer gave back too little space in time. Nothing is lost: the record can be reserved again."""


class WouldDeadlock(RingFull):
    """A reserve without `poll` on the thread that consumes this lane: it would wait for itself."""


class LaneCounters(TypedDict):
    """Sums over the life of a lane. `records`, `bytes`, `markers`, `checksum_errors`: seen by the consumer; the rest: by the producer."""

    records: int
    """Data records delivered."""
    bytes: int
    """Payload bytes delivered."""
    markers: int
    """Marker records delivered."""
    checksum_errors: int
    """Damaged records, not delivered."""
    full_waits: int
    """Times the producer found the lane full."""
    full_wait_s: float
    """Seconds between finding it full and getting its slot."""
    high_water_bytes: int
    """Most bytes in use at a commit, headers and padding included."""


class Slot:
    """Space for one record inside the lane. Leaving the `with` without `commit` gives it back unused."""

    __slots__ = ("_buffer", "_producer")

    def __init__(self, producer: _ring.Producer, buffer: np.ndarray) -> None:
        self._producer = producer
        self._buffer: np.ndarray | None = buffer

    @property
    def buffer(self) -> np.ndarray:
        """Writable uint8 [num_bytes], 64-byte aligned, with whatever was there before."""
        if self._buffer is None:
            raise RingError("the slot has been committed or aborted: its bytes are no longer the producer's")
        return self._buffer

    def commit(self, *, ticket: int, version_min: int, version_max: int, num_tokens: int, num_samples: int) -> int:
        """Publish the record; returns its sequence number (0, 1, ... of this producer)."""
        _ = self.buffer
        seq = self._producer.commit(ticket, version_min, version_max, num_tokens, num_samples)
        self._buffer = None
        return seq

    def abort(self) -> None:
        """Give the space back; nothing if the slot was committed or aborted before."""
        if self._buffer is not None:
            self._buffer = None
            self._producer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.abort()


class RingProducer:
    """The writing end of a lane: one per lane, one thread at a time."""

    def __init__(self, producer: _ring.Producer) -> None:
        self._producer = producer

    @classmethod
    def open(cls, name: str, *, job_id: int, timeout_s: float, restart_id: int = 0) -> Self:
        """Attach to the lane that the consumer makes under `name`, and wait for it if need be.

        Raises TimeoutError, saying what was missing; LaneBusy if it has a living producer; LaneMismatch if it is of another job, attempt or version.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            producer, reason = _ring.try_open(name, job_id, restart_id)
            if producer is not None:
                return cls(producer)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for lane '{name}' of job {job_id}: {reason}")
            time.sleep(0.002)

    def try_reserve(self, num_bytes: int) -> Slot | None:
        """A slot of `num_bytes`, or None while the lane is full. Same errors as `reserve`, apart from waiting."""
        buffer = self._producer.try_reserve(num_bytes)
        return None if buffer is None else Slot(self._producer, buffer)

    def reserve(self, num_bytes: int, *, timeout_s: float, poll: Callable[[], object] | None = None) -> Slot:
        """A slot of `num_bytes`, waiting while the lane is full; `poll` is called at least every millisecond of the wait, and may raise.

        Raises RingFull after `timeout_s`, RecordTooLarge beyond `max_record_bytes`, LaneClosed if the consumer closed the lane or died.
        """
        deadline = time.monotonic() + timeout_s
        while (slot := self.try_reserve(num_bytes)) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise RingFull(f"waited {timeout_s:g} s for {num_bytes} bytes in {self._describe()}: its consumer gave back too little")
            if poll is not None:
                poll()
            elif self._producer.consumed_by_this_thread:
                raise WouldDeadlock(f"{self._describe()} is full, and this thread, which would wait for room, is the one that consumes it: pass `poll`")
            self._producer.wait_for_room(min(remaining_s, _SLICE_S if poll is None else _POLL_SLICE_S))
        return slot

    def push_marker(self, marker_id: int, *, timeout_s: float, poll: Callable[[], object] | None = None) -> None:
        """Send a marker: everything before it in the lane was committed before this call. Waits and raises like `reserve`."""
        self.reserve(0, timeout_s=timeout_s, poll=poll)
        self._producer.commit_marker(marker_id)

    def beat(self) -> None:
        """Renew the heartbeat in a long silence; reserving does it too."""
        self._producer.beat()

    def close(self) -> None:
        """No record follows. What is committed is still delivered."""
        self._producer.close()

    @property
    def lane(self) -> int:
        return self._producer.lane

    @property
    def capacity_bytes(self) -> int:
        return self._producer.capacity_bytes

    @property
    def max_record_bytes(self) -> int:
        """Largest payload: a quarter of the capacity, so that any record fits beside one of its size and the padding between them."""
        return self._producer.max_record_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes committed and not given back, headers and padding included."""
        return self._producer.used_bytes

    @property
    def num_committed(self) -> int:
        """Records and markers committed through this handle."""
        return self._producer.num_committed

    @property
    def full_waits(self) -> int:
        return self._producer.full_waits

    @property
    def full_wait_s(self) -> float:
        return self._producer.full_wait_s

    def _describe(self) -> str:
        return f"lane {self.lane} ({self.used_bytes} of {self.capacity_bytes} bytes in use)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class RingConsumer:
    """The reading end of a lane, and the owner of its memory: one per lane."""

    def __init__(self, consumer: _ring.Consumer) -> None:
        self._consumer = consumer

    @classmethod
    def create(cls, name: str, capacity_bytes: int, *, lane: int, job_id: int, restart_id: int = 0, checksum: bool = True, poison: bool | None = None) -> Self:
        """Make the lane; all its memory (`capacity_bytes`, rounded up to whole pages, and a page) is taken now.

        A segment of that name left by a dead consumer is replaced. Raises LaneBusy if its consumer lives, OSError (ENOSPC) if /dev/shm is too small.
        """
        if poison is None:
            poison = os.environ.get("AREAL_HPC_RING_POISON", "0") == "1"
        return cls(_ring.make_consumer(name, capacity_bytes, lane=lane, job_id=job_id, restart_id=restart_id, checksum=checksum, poison=poison))

    def wait_for_producer(self, *, timeout_s: float) -> None:
        """Return once a producer is attached; TimeoutError if none comes."""
        deadline = time.monotonic() + timeout_s
        while self.producer_state() == "unattached":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for a producer to attach to lane {self.lane}")
            time.sleep(0.002)

    def unlink(self) -> None:
        """Take the name out of /dev/shm, once both ends are attached: whatever happens then, the kernel frees the memory with its last user."""
        self._consumer.unlink()

    def peek(self, timeout_s: float = 0.0) -> Record | None:
        """The oldest record not seen yet, leased until its `release()`; None if none comes in `timeout_s`, or at once if the lane is drained and closed.

        Raises ChecksumError for a damaged record, which is skipped (the next call goes on behind it), and LaneCorrupt, for good, for a damaged header.
        """
        record = _ring.try_peek(self._consumer)
        if record is not None or timeout_s <= 0:
            return record
        deadline = time.monotonic() + timeout_s
        while True:
            if self._consumer.wait_for_record(min(max(deadline - time.monotonic(), 0.0), _SLICE_S)) or time.monotonic() >= deadline:
                return _ring.try_peek(self._consumer)

    def producer_state(self) -> ProducerState:
        """Dead: the process is gone (or another has its pid) and did not close the lane."""
        return cast(ProducerState, self._consumer.producer_state())

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the producer last touched the lane; infinite before it attached."""
        return self._consumer.heartbeat_age_s

    def counters(self) -> LaneCounters:
        return cast(LaneCounters, self._consumer.counters())

    @property
    def lane(self) -> int:
        return self._consumer.lane

    @property
    def capacity_bytes(self) -> int:
        return self._consumer.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes committed and not given back, headers and padding included."""
        return self._consumer.used_bytes

    @property
    def num_leased(self) -> int:
        """Records peeked at and not released."""
        return self._consumer.num_leased

    def close(self) -> None:
        """Unlink, and tell the producer, whose next reserve raises LaneClosed. Views of records still leased stay readable."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
