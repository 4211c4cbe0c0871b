# ruff: noqa: N818 (`except RingFull` says it all)
"""Types of the C++ extension (csrc/bindings.cpp). Use areal_hpc.transport.ring, which says what each does."""

from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from areal_hpc.transport.ring import LaneCounters

LAYOUT_VERSION: int
HEADER_BYTES: int
MAX_IN_FLIGHT: int
NAME_PREFIX: str

class RingError(RuntimeError): ...

class LaneClosed(RingError):
    """The other side closed the lane or died, or this handle is closed."""

class LaneBusy(RingError):
    """That end of the lane already belongs to a living process."""

class LaneMismatch(RingError):
    """The segment of that name is of another job, attempt, layout version or PID namespace."""

class ChecksumError(RingError):
    """A record was damaged. It is counted and skipped."""

class LaneCorrupt(ChecksumError):
    """A record's header was damaged: no record behind it can be found."""

class RecordTooLarge(ValueError):
    """A record is larger than a quarter of its lane."""

class Segment:
    """The shared memory of a lane, mapped."""

class Record:
    """A leased record: the fields of its header, and its bytes until release(). Lends them as a read-only buffer (`memoryview(record)`)."""

    @property
    def kind(self) -> Literal["data", "marker"]: ...
    @property
    def num_bytes(self) -> int:
        """Payload."""
    @property
    def lane(self) -> int: ...
    @property
    def incarnation(self) -> int:
        """Which producer of the lane wrote it: 1, 2, ..."""
    @property
    def seq(self) -> int:
        """0, 1, ... over data and markers of one incarnation."""
    @property
    def ticket(self) -> int:
        """Of the group; of a marker: its id."""
    @property
    def version_min(self) -> int: ...
    @property
    def version_max(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def commit_time_s(self) -> float:
        """CLOCK_MONOTONIC, as time.monotonic()."""
    @property
    def header(self) -> bytes:
        """The 64 bytes as they lie in the lane: ring.RECORD_HEADER."""
    @property
    def buffer(self) -> NDArray[np.uint8]:
        """Read-only view of the payload, 64-byte aligned; BufferError after release()."""
    @property
    def frame(self) -> NDArray[np.uint8]:
        """Read-only view of header and payload as they lie in the lane: what `Producer.try_reserve_frame` of another lane takes; RingError after release()."""
    @property
    def address(self) -> int:
        """Of the payload, for who copies by address; RingError after release()."""
    @property
    def end_position(self) -> int:
        """Bytes of the lane up to the end of this record, since the lane was made, headers and padding included."""
    @property
    def released(self) -> bool: ...
    def copy_to(self, target: Buffer) -> None:
        """Copy the payload into a writable buffer of exactly its size, else ValueError."""
    def release(self) -> None:
        """Give the space back (in lane order). Views must not be used any more. RingError the second time."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...

class Slot:
    """Space for one record inside the lane, lent as a writable buffer. Leaving the `with` without `commit` gives it back unused."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def buffer(self) -> NDArray[np.uint8]:
        """Writable uint8 [num_bytes], with whatever was there before; a payload's is 64-byte aligned. RingError after commit or abort."""
    @property
    def address(self) -> int:
        """Of the buffer, for who copies by address; RingError after commit or abort."""
    def commit(self, *, ticket: int, version_min: int, version_max: int, num_tokens: int, num_samples: int) -> int:
        """Publish the record; returns its sequence number (0, 1, ... of this producer). The ticket is no longer in flight. ValueError for a frame's slot."""
    def commit_frame(self) -> None:
        """Publish a record of another lane, verbatim. LaneCorrupt if its header is damaged or tells another size or lane; ValueError for a payload's slot."""
    def abort(self) -> None:
        """Give the space back; nothing if the slot was committed or aborted before."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...

class Consumer:
    def __init__(self, name: str, segment: Segment, poison: bool) -> None: ...
    @property
    def lane(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int:
        """Bytes committed and not given back, headers and padding included."""
    @property
    def head_position(self) -> int:
        """Bytes given back since the lane was made. Two lanes of one capacity that carry the same records have equal positions."""
    @property
    def tail_position(self) -> int:
        """Bytes committed since the lane was made."""
    @property
    def num_leased(self) -> int:
        """Records peeked at and not released."""
    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the producer last touched the lane; infinite before it attached."""
    @property
    def segment(self) -> tuple[int, int]:
        """Address and bytes of the whole mapping, whole pages: what a GPU driver registers."""
    def try_peek(self) -> Record | None:
        """`peek` without waiting and without a look at the producer."""
    def try_pop(self) -> tuple[int, bytes | None] | None:
        """Peek, copy and release in one call: (ticket, payload), of a marker (id, None); None if there is no record."""
    def wait_for_record(self, timeout_s: float) -> bool: ...
    def producer_state(self) -> Literal["unattached", "alive", "dead", "closed"]:
        """Dead: the process is gone (or another has its pid) and did not close the lane."""
    def dead_producer(self, now: bool = False) -> tuple[int, list[int], int] | None:
        """(pid, tickets in flight, number of unnamed ones) once the lane is drained; unless `now`, looks every 100 ms at most and says None between."""
    def counters(self) -> LaneCounters: ...
    def unlink(self) -> None:
        """Take the name out of /dev/shm, once both ends are attached: whatever happens then, the kernel frees the memory with its last user."""
    def close(self) -> None:
        """Unlink, and tell the producer, whose next reserve raises LaneClosed. Views of records still leased stay readable."""

class Producer:
    def __init__(self, segment: Segment) -> None: ...
    @property
    def lane(self) -> int: ...
    @property
    def incarnation(self) -> int:
        """Which producer of the lane this is: 1, 2, ..."""
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def max_record_bytes(self) -> int:
        """Largest payload: a quarter of the capacity, so that any record fits beside one of its size and the padding between them."""
    @property
    def used_bytes(self) -> int:
        """Bytes committed and not given back, headers and padding included."""
    @property
    def num_committed(self) -> int:
        """Records and markers committed through this handle, frames not counted."""
    @property
    def full_waits(self) -> int: ...
    @property
    def full_wait_s(self) -> float: ...
    @property
    def segment(self) -> tuple[int, int]:
        """As the consumer's, of this mapping."""
    def try_reserve(self, num_bytes: int) -> Slot | None:
        """A slot, or None while the lane is full. RecordTooLarge; LaneClosed if the consumer closed the lane or died; ValueError while a slot is open."""
    def try_reserve_frame(self, num_bytes: int) -> Slot | None:
        """A slot for header and payload together, to be filled with the `frame` of a record of another lane."""
    def try_push(self, data: Buffer, *, ticket: int, version_min: int = 0, version_max: int = 0, num_tokens: int = 0, num_samples: int = 0) -> int | None:
        """Reserve, copy and commit in one call: the sequence number, or None while the lane is full."""
    def try_push_marker(self, marker_id: int) -> int | None: ...
    def wait_for_room(self, timeout_s: float) -> bool: ...
    def begin(self, ticket: int) -> None:
        """The ticket is in flight here until it is committed or cancelled: what `ProducerDead` tells. ValueError if it is already, ValueError below 0."""
    def cancel(self, ticket: int) -> None:
        """The ticket is given up. ValueError if it is not in flight."""
    def in_flight(self) -> list[int]: ...
    def beat(self) -> None:
        """Renew the heartbeat in a long silence; commits do it too."""
    def check_consumer(self) -> None:
        """Raises LaneClosed if the consumer has closed the lane or died: for a producer that has nothing to write for long."""
    def close(self) -> None:
        """No record follows. What is committed is still delivered."""

def make_lane(name: str, capacity_bytes: int, *, lane: int, job_id: int, restart_id: int, checksum: bool) -> Segment: ...
def try_open(name: str, *, job_id: int, restart_id: int) -> tuple[Segment | None, str]: ...
def consumes_here() -> bool:
    """This thread was the last to peek at some open lane of this process."""

def sweep_stale() -> list[str]:
    """Remove from /dev/shm the lanes of this user whose consumer is dead; returns their names."""

def crc32c(buffer: Buffer, seed: int = 0) -> int:
    """CRC32C of a contiguous buffer that follows bytes of checksum `seed`. The GIL is released."""
