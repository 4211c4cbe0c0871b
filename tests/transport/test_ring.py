"""The ring from Python: against a list model, between two processes, under kill -9, and with everything that a user can do wrong."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from areal_hpc import _ring
from areal_hpc.transport import ring
from areal_hpc.transport.ring import Ring, RingConsumer, RingProducer

SHM = Path("/dev/shm")
CAPACITY = 4096
FIELDS = {"version_min": 0, "version_max": 0, "num_tokens": 1, "num_samples": 1}


def unique_name() -> str:
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def in_shm(name: str) -> bool:
    return (SHM / (_ring.NAME_PREFIX + name)).exists()


def open_pair(capacity_bytes: int = CAPACITY, **options: bool) -> tuple[RingConsumer, RingProducer]:
    lane = Ring(unique_name(), capacity_bytes, lane=5, job_id=17, **options)
    consumer = lane.consumer()
    producer = lane.producer(timeout_s=0)
    consumer.unlink()
    return consumer, producer


@pytest.fixture
def pair() -> Iterator[tuple[RingConsumer, RingProducer]]:
    consumer, producer = open_pair()
    with consumer, producer:
        yield consumer, producer


def push(producer: RingProducer, ticket: int, payload: bytes) -> bool:
    """False if the lane is full."""
    slot = producer.try_reserve(len(payload))
    if slot is None:
        return False
    with slot:
        slot.buffer[:] = np.frombuffer(payload, np.uint8)
        slot.commit(ticket=ticket, version_min=ticket - 1, version_max=ticket, num_tokens=7, num_samples=3)
    return True


def payload_of(ticket: int, num_bytes: int) -> bytes:
    return np.random.default_rng(ticket).bytes(num_bytes)


SIZES = st.one_of(st.integers(0, CAPACITY // 4), st.sampled_from([0, 1, 63, 64, 65, 960, 1023, 1024]))


class ModelledLane:
    """A lane of 4 KiB beside a list of what was committed, and a model of its space in a few lines. Released bytes are poisoned."""

    def __init__(self) -> None:
        self.consumer, self.producer = open_pair(poison=True)
        self.waiting: list[tuple[str, int, bytes, int]] = []  # kind, ticket, payload, position behind it
        self.leased: list[tuple[ring.Record, bytes, int]] = []  # record, payload, index into spans
        self.spans: list[list[int]] = []  # of the lane, as the reader passed it: position behind, 1 if nobody needs it any more
        self.begun: list[int] = []
        self.head = self.tail = 0

    def end_of(self, num_bytes: int) -> int | None:
        """Position behind a record of that size, or None where it does not fit."""
        total = 64 + -(-num_bytes // 64) * 64
        room_to_end = CAPACITY - self.tail % CAPACITY
        end = self.tail + total + (room_to_end if total > room_to_end else 0)
        return end if end - self.head <= CAPACITY else None

    def write(self, kind: str, ticket: int, payload: bytes, *, abort: bool = False, copy: bool = False) -> bool:
        """Write a record if there is room."""
        end = self.end_of(len(payload))
        if end is None:
            assert self.producer.try_reserve(len(payload)) is None
            with pytest.raises(ring.RingFull):
                self.producer.reserve(len(payload), timeout_s=0)
        elif abort:
            with self.producer.reserve(len(payload), timeout_s=0) as slot:
                slot.buffer[:] = 255
        else:
            if kind == "marker":
                self.producer.push_marker(ticket, timeout_s=0)
            elif copy:
                self.producer.push(payload, ticket=ticket, timeout_s=0)
            else:
                assert push(self.producer, ticket, payload)
            self.committed(kind, ticket, payload, end)
            return True
        return False

    def committed(self, kind: str, ticket: int, payload: bytes, end: int) -> None:
        self.waiting.append((kind, ticket, payload, end))
        self.tail = end
        if kind == "data" and ticket in self.begun:
            self.begun.remove(ticket)

    def peek(self) -> ring.Record | None:
        """The next record, if there is one, as it must be."""
        record = self.consumer.peek()
        if not self.waiting:
            assert record is None
            return None
        kind, ticket, payload, end = self.waiting.pop(0)
        assert record is not None
        assert (record.kind, record.ticket, record.num_bytes, record.end_position) == (kind, ticket, len(payload), end)
        assert record.buffer.tobytes() == payload
        start = end - 64 - -(-len(payload) // 64) * 64
        if start != (self.spans[-1][0] if self.spans else 0):
            self.spans.append([start, 1])  # padding
        self.leased.append((record, payload, len(self.spans)))
        self.spans.append([end, 0])
        self.give_back()
        return record

    def release(self, index: int) -> None:
        record, _, span = self.leased.pop(index)
        view = record.buffer
        record.release()
        assert (view == 0xDD).all()
        self.spans[span][1] = 1
        self.give_back()

    def give_back(self) -> None:
        """Space returns in the order of the lane, up to the first span that somebody needs."""
        for end, free in self.spans:
            if not free:
                break
            self.head = end

    def check(self) -> None:
        for record, payload, _ in self.leased:
            assert record.buffer.tobytes() == payload
        assert (self.consumer.head_position, self.consumer.tail_position) == (self.head, self.tail)
        assert self.consumer.used_bytes == self.producer.used_bytes == self.tail - self.head
        assert self.consumer.num_leased == len(self.leased)
        assert self.producer.in_flight() == sorted(self.begun)

    def close(self) -> None:
        assert self.consumer.counters()["high_water_bytes"] <= CAPACITY
        assert self.consumer.dead_producer(now=True) is None
        self.producer.close()
        self.consumer.close()


class LaneMachine(RuleBasedStateMachine):
    """One lane."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = ModelledLane()
        self.next_ticket = 0

    @rule(num_bytes=SIZES, marker=st.booleans(), abort=st.booleans())
    def write(self, num_bytes: int, marker: bool, abort: bool) -> None:
        payload = b"" if marker else payload_of(self.next_ticket, num_bytes)
        self.next_ticket += self.lane.write("marker" if marker else "data", self.next_ticket, payload, abort=abort)

    @rule()
    def peek(self) -> None:
        self.lane.peek()

    @precondition(lambda self: self.lane.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.lane.release(data.draw(st.integers(0, len(self.lane.leased) - 1)))

    @invariant()
    def is_the_model(self) -> None:
        self.lane.check()

    def teardown(self) -> None:
        self.lane.close()


class LanesMachine(RuleBasedStateMachine):
    """Three lanes into one consumer that takes from each in turn; the third comes by way of another lane, whose records are forwarded as frames."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = [ModelledLane() for _ in range(3)]
        self.outgoing = ModelledLane()
        self.sources = [*self.lanes[:2], self.outgoing]
        self.next_ticket = self.turn = 0

    @initialize(sizes=st.lists(SIZES, min_size=4, max_size=20))
    def run_in(self, sizes: list[int]) -> None:
        """Start somewhere in the circles rather than at their beginning."""
        for num_bytes in sizes:
            for index in range(3):
                self.write(index, [num_bytes], "slot")
            self.forward(1, None)
            for lane in self.lanes:
                lane.peek()
                lane.release(0)

    @rule(lane=st.integers(0, 2), sizes=st.lists(SIZES, min_size=1, max_size=4), how=st.sampled_from(["slot", "copy", "abort", "marker", "ticket"]))
    def write(self, lane: int, sizes: list[int], how: str) -> None:
        source = self.sources[lane]
        for num_bytes in sizes:
            ticket = source.begun[num_bytes % len(source.begun)] if how == "ticket" and source.begun else self.next_ticket
            payload = b"" if how == "marker" else payload_of(ticket, num_bytes)
            source.write("marker" if how == "marker" else "data", ticket, payload, abort=how == "abort", copy=how == "copy")
            self.next_ticket += 1

    @rule(lane=st.integers(0, 2))
    def begin(self, lane: int) -> None:
        self.sources[lane].producer.begin(self.next_ticket)
        self.sources[lane].begun.append(self.next_ticket)
        self.next_ticket += 1

    @rule(lane=st.integers(0, 2), data=st.data())
    def cancel(self, lane: int, data: st.DataObject) -> None:
        source = self.sources[lane]
        if source.begun:
            ticket = data.draw(st.sampled_from(source.begun))
            source.producer.cancel(ticket)
            source.begun.remove(ticket)

    @rule(num_turns=st.integers(1, 9))
    def take_turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.lanes[self.turn].peek()
            self.turn = (self.turn + 1) % 3

    @rule(lane=st.integers(0, 2), order=st.randoms(use_true_random=False), keep=st.integers(0, 2))
    def release(self, lane: int, order: random.Random, keep: int) -> None:
        while len(self.lanes[lane].leased) > keep:
            self.lanes[lane].release(order.randrange(len(self.lanes[lane].leased)))

    @rule(num_records=st.integers(1, 4), damage=st.one_of(st.none(), st.integers(0, 8 * 64 - 1)))
    def forward(self, num_records: int, damage: int | None) -> None:
        """One record on its way at a time, which waits for room, and arrives after one that was damaged on the way."""
        target = self.lanes[2]
        for _ in range(num_records):
            if not self.outgoing.leased and self.outgoing.peek() is None:
                return
            record, payload, _ = self.outgoing.leased[0]
            slot = target.producer.try_reserve_frame(64 + len(payload))
            end = target.end_of(len(payload))
            assert (slot is None) == (end is None)
            if slot is None or end is None:
                return
            slot.buffer[:] = record.frame
            if damage is not None:
                slot.buffer[damage // 8] ^= 1 << damage % 8
                with pytest.raises(ring.LaneCorrupt):
                    slot.commit_frame()
                slot.buffer[damage // 8] ^= 1 << damage % 8
            slot.commit_frame()
            assert end == record.end_position
            target.committed(record.kind, record.ticket, payload, end)
            self.outgoing.release(0)

    @invariant()
    def are_the_models(self) -> None:
        for lane in (*self.lanes, self.outgoing):
            lane.check()
        assert self.lanes[2].consumer.tail_position == self.outgoing.consumer.head_position or self.outgoing.leased

    def teardown(self) -> None:
        for lane in (*self.lanes, self.outgoing):
            lane.close()


@pytest.mark.parametrize(("machine", "num_steps"), [(LaneMachine, 60), (LanesMachine, 100)])
def test_lanes_are_lists_with_bounded_space(machine: type[RuleBasedStateMachine], num_steps: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=80, stateful_step_count=num_steps, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    )


def test_header_fields_survive(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    before_s = time.monotonic()
    with producer.reserve(100, timeout_s=0) as slot:
        assert slot.buffer.ctypes.data % 64 == 0
        assert slot.commit(ticket=-(2**62), version_min=-1, version_max=2**31 - 1, num_tokens=2**32 - 1, num_samples=64) == 0
    record = consumer.peek()
    assert record is not None
    (row,) = np.frombuffer(record.header, ring.RECORD_HEADER)
    assert ring.RECORD_HEADER.itemsize == _ring.HEADER_BYTES == len(record.header) == 64
    for name in ("lane", "incarnation", "seq", "ticket", "version_min", "version_max", "num_tokens", "num_samples", "commit_time_s"):
        assert getattr(record, name) == row[name]
    assert (record.lane, record.incarnation, record.ticket, record.version_min, record.version_max) == (5, 1, -(2**62), -1, 2**31 - 1)
    assert (record.num_tokens, record.num_samples, record.num_bytes, row["payload_bytes"], row["kind"]) == (2**32 - 1, 64, 100, 100, 1)
    assert before_s <= record.commit_time_s <= time.monotonic()
    assert row["payload_crc32c"] == ring.crc32c(record.buffer)


def test_crc32c() -> None:
    assert ring.crc32c(b"123456789") == 0xE3069283
    assert ring.crc32c(b"") == 0
    data = np.random.default_rng(0).integers(0, 256, 30_001, dtype=np.uint8)
    table = np.arange(256, dtype=np.uint32)  # byte-wise textbook version
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    crc = 0xFFFFFFFF
    for byte in data.tobytes():
        crc = (crc >> 8) ^ int(table[(crc ^ byte) & 0xFF])
    assert ring.crc32c(data) == crc ^ 0xFFFFFFFF
    assert ring.crc32c(data[5000:], ring.crc32c(data[:5000])) == ring.crc32c(data)
    assert ring.crc32c(data[:8].view(np.float32).reshape(1, 2)) == ring.crc32c(data[:8])
    with pytest.raises(ValueError, match="contiguous"):
        ring.crc32c(data[::2])


def test_views_belong_to_their_slots(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    with producer.reserve(8, timeout_s=0) as slot:
        slot.commit(ticket=1, **FIELDS)
        with pytest.raises(ring.RingError, match="committed or aborted"):
            _ = slot.buffer
        with pytest.raises(ring.RingError, match="committed or aborted"):
            slot.commit(ticket=1, **FIELDS)
        with pytest.raises(BufferError, match="committed or aborted"):
            memoryview(slot)
        slot.abort()  # too late, and harmless
    record = consumer.peek()
    assert record is not None
    with pytest.raises(ValueError, match="read-only"):
        record.buffer[0] = 1
    with record:
        view = record.buffer
    assert record.released
    with pytest.raises(BufferError, match="has been released"):
        _ = record.buffer
    for attribute in ("frame", "address"):
        with pytest.raises(ring.RingError, match="has been released"):
            getattr(record, attribute)
    with pytest.raises(ring.RingError, match="released before"):
        record.release()
    consumer.close()
    producer.close()
    del consumer, producer, record
    assert view.sum() >= 0  # the mapping lives as long as the view


def test_dropped_record_is_released_with_its_last_view(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    assert push(producer, 1, b"abc")
    record = consumer.peek()
    assert record is not None
    view = record.buffer
    del record
    assert (consumer.num_leased, consumer.used_bytes, view.tobytes()) == (1, 128, b"abc")
    del view
    assert (consumer.num_leased, consumer.used_bytes) == (0, 0)


def test_full_lane_waits_and_says_so(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    while push(producer, 0, bytes(1000)):
        pass
    polls: list[float] = []
    started_s = time.monotonic()
    with pytest.raises(ring.RingFull, match=r"waited 0.1 s for 1000 bytes in lane 5 \(\d+ of 4096 bytes in use\)"):
        producer.reserve(1000, timeout_s=0.1, poll=lambda: polls.append(time.monotonic()))
    assert time.monotonic() - started_s >= 0.1
    assert len(polls) >= 2
    assert consumer.peek() is not None  # delivered, and released at once by being dropped
    assert producer.try_reserve(1000) is not None
    assert producer.full_waits == 1  # one time full, however often it was asked
    assert 0.1 <= producer.full_wait_s == consumer.counters()["full_wait_s"]


def test_waiting_for_oneself_is_refused(pair: tuple[RingConsumer, RingProducer]) -> None:
    """A thread that consumes any lane may be what the reader of this one waits for, round a circle of lanes."""
    consumer, producer = pair
    other, unused = open_pair()
    while push(producer, 0, bytes(1000)):
        pass
    with pytest.raises(ring.RingFull) as error:  # nobody has peeked on this thread
        producer.reserve(1000, timeout_s=0.01)
    assert not isinstance(error.value, ring.WouldDeadlock)
    with other, unused:
        assert other.peek() is None
        with pytest.raises(ring.WouldDeadlock, match="this thread, which would wait for room, also consumes"):
            producer.reserve(1000, timeout_s=60)
        with pytest.raises(ring.WouldDeadlock):
            producer.push(bytes(1000), ticket=1, timeout_s=60)
        with pytest.raises(ring.WouldDeadlock):
            fill_with_markers(producer)
    with pytest.raises(ring.RingFull) as error:  # it consumes no more
        producer.reserve(1000, timeout_s=0.01)
    assert not isinstance(error.value, ring.WouldDeadlock)
    assert consumer.peek() is not None
    while push(producer, 0, bytes(1000)):
        pass
    with producer.reserve(1000, timeout_s=60, poll=consumer.peek) as slot:
        slot.commit(ticket=9, **FIELDS)
    with ThreadPoolExecutor(1) as pool:  # another thread may wait for us
        waiting = pool.submit(producer.push, bytes(1000), ticket=10, timeout_s=60)
        while not waiting.done():
            consumer.peek()
        assert waiting.result() == producer.num_committed - 1


def fill_with_markers(producer: RingProducer) -> None:
    for marker_id in range(CAPACITY // 64 + 1):
        producer.push_marker(marker_id, timeout_s=60)


@pytest.mark.parametrize("sleep_s", [0.0, 0.2])
def test_waits_wake_and_leave_the_gil(pair: tuple[RingConsumer, RingProducer], sleep_s: float) -> None:
    """Both sides of one process wait for each other in turn: without the GIL's release neither would move."""
    consumer, producer = pair

    def produce() -> None:
        for ticket in range(8):
            time.sleep(sleep_s if ticket == 0 else 0)
            with producer.reserve(1024, timeout_s=30) as slot:
                slot.commit(ticket=ticket, **FIELDS)

    thread = threading.Thread(target=produce)
    thread.start()
    for ticket in range(8):
        record = consumer.peek(timeout_s=30)
        assert record is not None
        assert record.ticket == ticket
        assert record.commit_time_s <= time.monotonic()
        time.sleep(sleep_s if ticket == 1 else 0)
        record.release()
    thread.join()
    before = consumer.counters()
    started_s = time.monotonic()
    assert consumer.peek(timeout_s=0.15) is None
    assert time.monotonic() - started_s >= 0.15
    after = consumer.counters()
    assert after["empty_waits"] > before["empty_waits"]
    assert 0.1 <= after["empty_wait_s"] - before["empty_wait_s"] <= time.monotonic() - started_s


def test_markers_keep_their_place(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    for ticket in range(3):
        assert push(producer, ticket, bytes([ticket]))
        producer.push_marker(100 + ticket, timeout_s=0)
    records = [consumer.peek() for _ in range(6)]
    assert [(r.kind, r.ticket) for r in records if r] == [("data", 0), ("marker", 100), ("data", 1), ("marker", 101), ("data", 2), ("marker", 102)]
    assert [r.seq for r in records if r] == list(range(6))
    counters = consumer.counters()
    assert (counters["records"], counters["markers"], counters["bytes"]) == (3, 3, 3)


def test_damage_is_counted_and_not_delivered() -> None:
    lane = Ring(unique_name(), CAPACITY)
    with lane.consumer() as consumer, lane.producer(timeout_s=0) as producer:
        for ticket in range(3):
            assert push(producer, ticket, bytes(100))
        memory = np.memmap(SHM / (_ring.NAME_PREFIX + lane.name), np.uint8, "r+")
        memory[4096 + 192 + 64 + 50] ^= 4  # header page, first record, header of the second
        assert consumer.peek() is not None
        with pytest.raises(ring.ChecksumError, match=r"record 1 \(ticket 1, 100 bytes\)"):
            consumer.peek()
        record = consumer.peek()
        assert record is not None
        assert record.ticket == 2
        assert (consumer.counters()["checksum_errors"], consumer.counters()["records"]) == (1, 2)
        assert push(producer, 3, bytes(100))
        memory[4096 + 3 * 192] ^= 1  # the length: no way on
        for _ in range(2):
            with pytest.raises(ring.LaneCorrupt, match="header at byte 576"):
                consumer.peek()


def test_without_checksum() -> None:
    consumer, producer = open_pair(checksum=False)
    with consumer, producer:
        assert push(producer, 1, b"abc")
        record = consumer.peek()
        assert record is not None
        assert record.buffer.tobytes() == b"abc"
        assert np.frombuffer(record.header, ring.RECORD_HEADER)["payload_crc32c"] == 0


def test_what_does_not_fit_together_is_refused() -> None:
    lane = Ring(unique_name(), CAPACITY, job_id=1, restart_id=2)
    with pytest.raises(TimeoutError, match=f"waited 0.02 s for lane '{lane.name}': no consumer has made it"):
        lane.producer(timeout_s=0.02)
    with lane.consumer() as consumer:
        with pytest.raises(ring.LaneBusy, match=f"process {os.getpid()}"):
            lane.consumer()
        with pytest.raises(ring.LaneMismatch, match="has job id 1, not 2"):
            replace(lane, job_id=2).producer(timeout_s=0)
        with pytest.raises(ring.LaneMismatch, match="has restart id 2, not 0"):
            replace(lane, restart_id=0).producer(timeout_s=0)
        memory = np.memmap(SHM / (_ring.NAME_PREFIX + lane.name), np.uint32, "r+")
        memory[2] += 1
        with pytest.raises(ring.LaneMismatch, match=f"has layout version {_ring.LAYOUT_VERSION + 1}, not {_ring.LAYOUT_VERSION}"):
            lane.producer(timeout_s=0)
        memory[2] -= 1
        with pytest.raises(TimeoutError, match="producer to attach"):
            consumer.wait_for_producer(timeout_s=0.01)
        with lane.producer(timeout_s=0) as producer:
            consumer.wait_for_producer(timeout_s=0)
            with pytest.raises(ring.LaneBusy, match=f"process {os.getpid()}"):
                lane.producer(timeout_s=0)
            with pytest.raises(ring.RecordTooLarge, match="1025 bytes is larger than a quarter"):
                producer.reserve(1025, timeout_s=0)
            with producer.reserve(1024, timeout_s=0), pytest.raises(ValueError, match="neither committed nor aborted"):
                producer.try_reserve(1)
    assert not in_shm(lane.name)


@pytest.mark.parametrize(("name", "capacity_bytes"), [("", 1), ("a/b", 1), ("x" * 245, 1), ("zero", 0), ("nul\0", 1)])
def test_bad_arguments(name: str, capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match="a lane's"):
        Ring(name, capacity_bytes).consumer()


def test_full_dev_shm_is_an_oserror() -> None:
    space = os.statvfs(SHM)
    if space.f_blocks == 0:
        pytest.skip("/dev/shm has no limit here")
    lane = Ring(unique_name(), 2 * space.f_blocks * space.f_frsize)
    with pytest.raises(OSError, match=r"needs \d+ bytes of /dev/shm") as error:
        lane.consumer()
    assert error.value.errno == errno.ENOSPC
    assert not in_shm(lane.name)


def test_a_lane_is_described_once_and_travels_pickled() -> None:
    lane = Ring(unique_name(), 5000, lane=3, job_id=4, restart_id=5, checksum=False, poison=True)
    assert pickle.loads(pickle.dumps(lane)) == lane
    with lane.consumer() as consumer, pickle.loads(pickle.dumps(lane)).producer(timeout_s=0) as producer:
        assert (consumer.lane, producer.lane, consumer.capacity_bytes, producer.capacity_bytes) == (3, 3, 8192, 8192)
        for end in (consumer, producer):
            address, num_bytes = end.segment
            assert (address % 4096, num_bytes) == (0, 4096 + 8192)
        assert push(producer, 1, b"abc")
        record = consumer.peek()
        assert record is not None
        assert record.address == record.buffer.ctypes.data == consumer.segment[0] + 4096 + 64
        with producer.reserve(10, timeout_s=0) as slot:
            assert slot.address == slot.buffer.ctypes.data == producer.segment[0] + 4096 + 128 + 64


def test_push_copies_and_records_lend_buffers(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    assert producer.push(values, ticket=4, version_min=1, version_max=2, num_tokens=3, num_samples=5, timeout_s=0) == 0
    assert producer.push(b"", ticket=5, timeout_s=0) == 1
    assert producer.try_push(memoryview(b"xyz"), ticket=6, **FIELDS) == 2
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        producer.push(values[:, ::2], ticket=7, timeout_s=0)
    record = consumer.peek()
    assert record is not None
    assert (record.ticket, record.version_min, record.version_max, record.num_tokens, record.num_samples, record.num_bytes) == (4, 1, 2, 3, 5, 96)
    target = np.zeros((3, 4))
    record.copy_to(target)
    assert (target == values).all()
    assert (np.frombuffer(record, np.float64) == values.ravel()).all()
    with memoryview(record) as view:
        assert (view.readonly, view.nbytes, bytes(view)) == (True, 96, values.tobytes())
    for buffer, message in ((np.zeros(11), "96 bytes does not fill a buffer of 88"), (np.zeros(13), "does not fill a buffer of 104")):
        with pytest.raises(ValueError, match=message):
            record.copy_to(buffer)
    with pytest.raises(BufferError):
        record.copy_to(bytes(96))
    record.release()
    with pytest.raises(ring.RingError, match="has been released"):
        record.copy_to(target)
    with pytest.raises(BufferError, match="has been released"):
        memoryview(record)
    for payload in (b"", b"xyz"):
        record = consumer.peek()
        assert record is not None
        assert bytes(record) == record.buffer.tobytes() == payload
    with producer.reserve(5, timeout_s=0) as slot, memoryview(slot) as view:
        assert (view.readonly, view.nbytes, slot.num_bytes) == (False, 5, 5)
        view[:] = b"whole"
        slot.commit(ticket=8, **FIELDS)
    record = consumer.peek()
    assert record is not None
    assert bytes(record) == b"whole"
    while producer.try_push(bytes(1000), ticket=9, **FIELDS) is not None:
        pass
    with pytest.raises(ring.RingFull, match="1000 bytes"):
        producer.push(bytes(1000), ticket=9, timeout_s=0.01, poll=lambda: None)


def test_frames_travel_from_lane_to_lane() -> None:
    """Two lanes of one capacity that carry the same records keep equal positions, which is what credits across nodes count with."""
    source, writer = open_pair()
    target, forwarder = open_pair()
    rng = np.random.default_rng(11)
    with source, writer, target, forwarder:
        for ticket in range(300):
            if ticket % 10 == 9:
                writer.push_marker(ticket, timeout_s=0)
            else:
                assert push(writer, ticket, payload_of(ticket, int(rng.integers(0, CAPACITY // 4 + 1))))
            record = source.peek()
            assert record is not None
            frame = record.frame
            assert (frame.flags.writeable, frame.nbytes) == (False, 64 + record.num_bytes)
            assert frame.tobytes() == record.header + record.buffer.tobytes()
            slot = forwarder.try_reserve_frame(frame.nbytes)
            assert slot is not None
            slot.buffer[:] = frame
            if ticket % 4 == 0:  # damaged on the way: refused, and nothing published
                byte = rng.integers(0, 64)
                slot.buffer[byte] ^= 1
                with pytest.raises(ring.LaneCorrupt, match="came damaged"):
                    slot.commit_frame()
                assert target.peek() is None
                slot.buffer[byte] ^= 1
            slot.commit_frame()
            with pytest.raises(ring.RingError, match="committed or aborted"):
                slot.commit_frame()
            arrived = target.peek()
            assert arrived is not None
            assert arrived.frame.tobytes() == frame.tobytes()
            assert (arrived.kind, arrived.seq, arrived.incarnation, arrived.end_position) == (record.kind, record.seq, 1, record.end_position)
            assert source.tail_position == target.tail_position == record.end_position
            record.release()
            arrived.release()
            assert source.head_position == target.head_position == source.tail_position
        assert target.counters()["checksum_errors"] == 0
        assert forwarder.num_committed == 0  # frames bear the numbers of the lane they came from


def test_frames_that_do_not_fit_are_refused() -> None:
    source, writer = open_pair()
    target, forwarder = open_pair()
    other = Ring(unique_name(), CAPACITY, lane=6)
    with source, writer, target, forwarder, other.consumer() as other_consumer, other.producer(timeout_s=0) as other_forwarder:
        with pytest.raises(ValueError, match="a header of 64 bytes and a payload, not 63 bytes"):
            forwarder.try_reserve_frame(63)
        with pytest.raises(ring.RecordTooLarge, match="1025 bytes is larger than a quarter"):
            forwarder.try_reserve_frame(64 + 1025)
        assert push(writer, 1, bytes(100))
        record = source.peek()
        assert record is not None
        slot = forwarder.try_reserve_frame(64 + 101)  # another size
        assert slot is not None
        slot.buffer[:164] = record.frame
        with pytest.raises(ring.LaneCorrupt, match="a frame of 165 bytes came damaged"):
            slot.commit_frame()
        slot.abort()
        slot = other_forwarder.try_reserve_frame(64 + 100)  # another lane
        assert slot is not None
        slot.buffer[:] = record.frame
        with pytest.raises(ring.LaneCorrupt, match="lane 6"):
            slot.commit_frame()
        slot.abort()
        with forwarder.reserve(164, timeout_s=0) as slot:  # a slot for a payload: it has no place for a header
            slot.buffer[:] = record.frame
            with pytest.raises(ValueError, match="try_reserve_frame"):
                slot.commit_frame()
        slot = forwarder.try_reserve_frame(64 + 100)  # and the other way round
        assert slot is not None
        with pytest.raises(ValueError, match="try_reserve_frame"):
            slot.commit(ticket=1, **FIELDS)
        slot.abort()
        assert target.peek() is other_consumer.peek() is None
        assert target.tail_position == other_consumer.tail_position == 0


def test_tickets_in_flight(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    for ticket in (5, 3, 9):
        producer.begin(ticket)
    with pytest.raises(ValueError, match="ticket 3 is in flight already"):
        producer.begin(3)
    with pytest.raises(ValueError, match="not -1"):
        producer.begin(-1)
    with pytest.raises(ValueError, match="ticket 4 is not in flight"):
        producer.cancel(4)
    producer.cancel(9)
    assert producer.in_flight() == [3, 5]
    assert push(producer, 3, b"done")
    producer.push_marker(5, timeout_s=0)  # a marker's id is no ticket
    assert push(producer, 77, b"never begun")
    assert producer.in_flight() == [5]
    assert consumer.dead_producer(now=True) is None
    for ticket in range(100, 100 + ring.MAX_IN_FLIGHT + 20):
        producer.begin(ticket)
    assert len(producer.in_flight()) == ring.MAX_IN_FLIGHT + 21
    for ticket in producer.in_flight():
        producer.cancel(ticket)
    assert producer.in_flight() == []


def test_either_end_may_close_first() -> None:
    consumer, producer = open_pair()
    assert consumer.producer_state() == "alive"
    assert consumer.heartbeat_age_s >= 0
    assert push(producer, 1, b"last words")
    producer.close()
    assert consumer.producer_state() == "closed"
    record = consumer.peek(timeout_s=60)
    assert record is not None
    assert record.buffer.tobytes() == b"last words"
    assert consumer.peek(timeout_s=60) is None  # at once
    with pytest.raises(ring.LaneClosed):
        producer.try_reserve(1)
    consumer.close()
    consumer, producer = open_pair()
    while push(producer, 0, bytes(1000)):
        pass
    threading.Timer(0.1, consumer.close).start()
    with pytest.raises(ring.LaneClosed, match="its consumer has closed it"):
        producer.reserve(1000, timeout_s=60)
    with pytest.raises(ring.LaneClosed):
        consumer.peek()


PRODUCER_PROGRAM = """
import sys, time
import numpy as np
from areal_hpc.transport.ring import Ring
name, num_records = sys.argv[1], int(sys.argv[2])
producer = Ring(name, 1).producer(timeout_s=30)
for ticket in range(num_records):
    num_bytes = ticket * 7919 % (producer.max_record_bytes + 1)
    with producer.reserve(num_bytes, timeout_s=60) as slot:
        slot.buffer[:] = ticket % 251
        slot.commit(ticket=ticket, version_min=0, version_max=0, num_tokens=0, num_samples=0)
        print(ticket, flush=True)
producer.close()
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def drain(consumer: RingConsumer, each: Callable[[int], None] = lambda ticket: None) -> tuple[int, ring.ProducerDead | None]:
    """Take records until the lane has ended, check each, return their number and the death that ended it."""
    num_records = 0
    while True:
        ended = consumer.producer_state() == "closed"
        try:
            record = consumer.peek(timeout_s=0.02)
        except ring.ProducerDead as death:
            return num_records, death
        if record is None:
            if ended:
                return num_records, None
            continue
        with record:
            assert record.ticket == record.seq == num_records
            assert record.num_bytes == num_records * 7919 % (consumer.capacity_bytes // 4 + 1)
            assert (record.buffer == num_records % 251).all()
        each(num_records)
        num_records += 1


def test_two_processes() -> None:
    lane = Ring(unique_name(), 1 << 16)
    with lane.consumer() as consumer:
        assert consumer.producer_state() == "unattached"
        assert consumer.heartbeat_age_s == float("inf")
        child = start(PRODUCER_PROGRAM, lane.name, "3000")
        consumer.wait_for_producer(timeout_s=30)
        consumer.unlink()
        assert not in_shm(lane.name)
        assert drain(consumer) == (3000, None)
        assert consumer.producer_state() == "closed"
        assert consumer.used_bytes == 0
        child.communicate(timeout=30)
        assert child.returncode == 0


def test_killed_producers_lose_only_what_they_had_not_committed() -> None:
    """Killed after a random number of deliveries (the C++ tests kill at every store)."""
    for kill_at in np.random.default_rng(3).integers(1, 400, 3):
        lane = Ring(unique_name(), 1 << 14, lane=2)
        with lane.consumer() as consumer:
            child = start(PRODUCER_PROGRAM, lane.name, "1000000")
            consumer.wait_for_producer(timeout_s=30)
            consumer.unlink()

            def kill(ticket: int, child: subprocess.Popen[str] = child, kill_at: int = int(kill_at)) -> None:
                if ticket == kill_at:
                    child.send_signal(signal.SIGKILL)

            num_delivered, death = drain(consumer, kill)
            printed, _ = child.communicate(timeout=30)
            num_printed = len(printed.split("\n")) - 1
            assert consumer.producer_state() == "dead"
            assert death is not None
            assert (death.lane, death.pid, death.tickets, death.num_untracked) == (2, child.pid, [], 0)
            assert str(death) == f"the producer of lane 2 is gone: process {child.pid}; tickets in flight: none"
            for _ in range(2):  # it stays dead
                with pytest.raises(ring.ProducerDead):
                    consumer.peek()
            assert num_delivered - num_printed in (0, 1)  # killed between commit and print
            assert num_delivered > kill_at
            assert consumer.counters()["checksum_errors"] == 0


TICKETS_PROGRAM = """
import os, sys, time
from areal_hpc.transport.ring import Ring
name, first, inherited, num_extra = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
producer = Ring(name, 1).producer(timeout_s=30)
assert producer.in_flight() == eval(inherited), producer.in_flight()
for ticket in producer.in_flight()[:-1]:
    producer.cancel(ticket)
for ticket in range(first, first + 10):
    producer.begin(ticket)
producer.cancel(first + 1)
for ticket in (first, first + 5):
    producer.push(bytes(100), ticket=ticket, timeout_s=30)
for ticket in range(10_000, 10_000 + num_extra):
    producer.begin(ticket)
print("ready", flush=True)
time.sleep(600)
"""


def test_tickets_of_the_dead_are_named() -> None:
    """For the consumer exactly those begun and neither delivered nor cancelled; a successor inherits them. The lane is drained first."""
    lane = Ring(unique_name(), CAPACITY)
    with lane.consumer() as consumer:

        def live_and_die(first: int, inherited: list[int], num_extra: int) -> ring.ProducerDead:
            child = start(TICKETS_PROGRAM, lane.name, str(first), repr(inherited), str(num_extra))
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.kill()
            child.communicate(timeout=30)
            for ticket in (first, first + 5):
                record = consumer.peek()
                assert record is not None
                assert record.ticket == ticket
            with pytest.raises(ring.ProducerDead) as error:
                consumer.peek(timeout_s=30)
            assert error.value.pid == child.pid
            return error.value

        left = [2, 3, 4, 6, 7, 8, 9]
        death = live_and_die(0, [], 0)
        assert (death.tickets, death.num_untracked) == (left, 0)
        assert str(death).endswith("tickets in flight: 2, 3, 4, 6, 7, 8, 9")
        left = [9] + [100 + ticket for ticket in left]  # 9 is inherited and neither finished nor cancelled
        death = live_and_die(100, [2, 3, 4, 6, 7, 8, 9], ring.MAX_IN_FLIGHT)
        assert (death.tickets, death.num_untracked) == ([*left, *range(10_000, 10_000 + ring.MAX_IN_FLIGHT - len(left))], len(left))
        assert str(death).endswith(f" and {len(left)} more")
        assert consumer.counters()["records"] == 4
        with lane.producer(timeout_s=0) as successor:  # the living end the mourning
            assert successor.in_flight() == death.tickets
            assert consumer.peek() is None


CONSUMER_PROGRAM = """
import sys, time
from areal_hpc.transport.ring import Ring
consumer = Ring(sys.argv[1], 4096).consumer()
print("made", flush=True)
time.sleep(600)
"""


def test_killed_consumer_is_noticed_replaced_and_swept() -> None:
    names = [unique_name(), unique_name()]
    children = [start(CONSUMER_PROGRAM, name) for name in names]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "made\n"
    producer = Ring(names[0], CAPACITY).producer(timeout_s=0)
    for child in children:
        child.kill()
        child.communicate(timeout=30)
    assert all(in_shm(name) for name in names)
    for _ in range(3):
        producer.reserve(1000, timeout_s=30).commit(ticket=0, **FIELDS)
    with pytest.raises(ring.LaneClosed, match=f"its consumer, process {children[0].pid}, is dead"):
        producer.reserve(CAPACITY // 4, timeout_s=30)
    lane = Ring(names[0], 8192)
    with pytest.raises(TimeoutError, match="left from a consumer that died"):
        lane.producer(timeout_s=0.01)
    with lane.consumer() as consumer:
        assert lane.producer(timeout_s=0).capacity_bytes == consumer.capacity_bytes == 8192
        assert names[1] in ring.sweep_stale()
        assert [in_shm(name) for name in names] == [True, False]
    assert not in_shm(names[0])


READER_PROGRAM = """
import sys
from areal_hpc.transport.ring import Ring
consumer = Ring(sys.argv[1], 1 << 14).consumer()
print("made", flush=True)
while (record := consumer.peek(timeout_s=60)) is not None:
    with record:
        assert (record.buffer == record.ticket % 251).all()
        print(record.ticket, flush=True)
"""


def test_a_stopped_consumer_holds_the_producer_and_loses_nothing() -> None:
    name = unique_name()
    child = start(READER_PROGRAM, name)
    assert child.stdout is not None
    assert child.stdout.readline() == "made\n"
    tickets = iter(range(10_000))
    with Ring(name, 1 << 14).producer(timeout_s=0) as producer:
        taken: list[int] = []
        reader = threading.Thread(target=lambda: taken.extend(int(line) for line in child.stdout or ()))
        reader.start()

        def push_next(ticket: int, timeout_s: float, poll: Callable[[], object] | None = None) -> None:
            producer.push(bytes([ticket % 251]) * 1000, ticket=ticket, timeout_s=timeout_s, poll=poll)

        def push_until_full(polls: list[float]) -> int:
            """The ticket that found no room."""
            while True:
                ticket = next(tickets)
                try:
                    push_next(ticket, timeout_s=0.3, poll=lambda: polls.append(time.monotonic()))
                except ring.RingFull:
                    return ticket

        for _ in range(100):
            push_next(next(tickets), timeout_s=60)
        for _ in range(3):
            child.send_signal(signal.SIGSTOP)
            polls: list[float] = []
            held = push_until_full(polls)
            assert len(polls) >= 2
            child.send_signal(signal.SIGCONT)
            push_next(held, timeout_s=60)
            for _ in range(100):
                push_next(next(tickets), timeout_s=60)
    child.wait(timeout=60)
    reader.join()
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert taken == list(range(next(tickets)))


def test_a_forked_child_closes_nothing(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    child = os.fork()
    if child == 0:
        producer.close()
        consumer.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert consumer.producer_state() == "alive"
    assert push(producer, 1, b"still here")
    assert consumer.peek() is not None


def test_a_forked_child_may_not_use_the_handles(pair: tuple[RingConsumer, RingProducer]) -> None:
    """Parent and child would move the same positions, each unaware of the other."""
    consumer, producer = pair
    assert push(producer, 1, b"of the parent")
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: push(producer, 2, b"of the child"), lambda: producer.begin(2), consumer.peek):
            try:
                use()
            except ring.LaneBusy as error:
                refused += f"belongs to process {os.getppid()}" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert push(producer, 2, b"of the parent")
    assert [record.ticket for record in (consumer.peek(), consumer.peek()) if record] == [1, 2]


def test_who_closes_with_tickets_in_flight_is_not_simply_done() -> None:
    consumer, producer = open_pair()
    assert push(producer, 1, b"whole")
    producer.begin(9)
    with pytest.raises(ZeroDivisionError), producer:
        _ = 1 / 0
    record = consumer.peek()
    assert record is not None and record.ticket == 1
    time.sleep(0.11)  # the consumer looks every 0.1 s
    with pytest.raises(ring.ProducerDead, match="tickets in flight: 9") as error:
        consumer.peek()
    assert error.value.tickets == [9]
    consumer.close()


def test_a_wait_under_way_counts(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    while push(producer, 0, bytes(1000)):
        pass
    time.sleep(0.02)
    assert consumer.counters()["full_waits"] == 1
    assert consumer.counters()["full_wait_s"] >= 0.02


def test_silent_producer_can_ask_after_its_consumer(pair: tuple[RingConsumer, RingProducer]) -> None:
    consumer, producer = pair
    producer.check_consumer()
    consumer.close()
    with pytest.raises(ring.LaneClosed, match="its consumer has closed it"):
        producer.check_consumer()
