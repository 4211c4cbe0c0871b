"""One rank of the forwarder's tests: `mpiexec -n N python forward_worker.py MODE OUT SEED`. Rank 0 receives, the others send; `model` runs on one rank alone.

The payload of record k of a lane is determined by (seed, lane, k), so the receiver knows every byte that must come.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from mpi4py import MPI

from areal_hpc.guard import AbortGuard
from areal_hpc.transport.forward import BEAT_EVERY_S, ForwardReceiver, ForwardSender, Kind, RemoteLane
from areal_hpc.transport.ring import ProducerDead, Ring, RingConsumer, RingProducer

DEADLINE_S = 60.0


def both_ends(lane: int, capacity_bytes: int, side: str) -> tuple[RingProducer, RingConsumer]:
    ring = Ring(f"forward-{os.getpid()}-{lane}-{side}-{time.monotonic_ns()}", capacity_bytes, lane=lane, poison=True)
    consumer = ring.consumer()
    producer = ring.producer(timeout_s=0)
    consumer.unlink()
    return producer, consumer


def size_of(seed: int, lane: int, k: int, largest: int) -> int | None:
    """Payload bytes of record k; None: a marker."""
    rng = np.random.default_rng((seed, lane, k))
    kind = rng.integers(8)
    return None if kind == 0 else 0 if kind == 1 else largest if kind == 2 else int(rng.integers(1, largest))


def payload_of(seed: int, lane: int, k: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng((seed, lane, k, 1)).integers(0, 256, num_bytes, np.uint8)


def try_send(producer: RingProducer, seed: int, k: int) -> bool:
    """Commit record k of the lane; False while it is full."""
    num_bytes = size_of(seed, producer.lane, k, producer.max_record_bytes)
    if num_bytes is None:
        return producer.try_push_marker(k) is not None
    data = payload_of(seed, producer.lane, k, num_bytes)
    return producer.try_push(data, ticket=k, version_min=k - 1, version_max=k, num_tokens=3, num_samples=2) is not None


def expect(record: Any, seed: int, k: int, largest: int) -> None:
    """The record is number k of its lane, untouched."""
    num_bytes = size_of(seed, record.lane, k, largest)
    assert (record.kind, record.ticket, record.seq) == ("marker" if num_bytes is None else "data", k, k), record
    assert np.array_equal(record.buffer, payload_of(seed, record.lane, k, num_bytes or 0)), f"record {k} came damaged"
    if record.kind == "data":
        assert (record.version_min, record.version_max, record.num_tokens, record.num_samples) == (k - 1, k, 3, 2)


# -- the protocol on a network that does everything MPI allows ---------------------------------------------------------------------------


class Request:
    def __init__(self) -> None:
        self.done = False

    def Test(self) -> bool:  # noqa: N802 (mpi4py's name)
        return self.done

    def test(self) -> tuple[bool, None]:
        return self.done, None


@dataclass
class Parcel:
    """A message. Buffered: copied when posted, else read from the sender's memory when it is received."""

    view: np.ndarray | None
    body: Any
    sent: Request
    visible: bool = False
    target: np.ndarray | None = None
    received: Request = field(default_factory=Request)

    def transfer(self) -> None:
        assert self.target is not None and self.view is not None
        self.target.view(np.uint8)[:] = self.view.view(np.uint8)
        self.sent.done = self.received.done = True

    def Irecv(self, spec: list) -> Request:  # noqa: N802 (mpi4py's name)
        self.target = spec[0]
        return self.received

    def Recv(self, spec: list) -> None:  # noqa: N802 (mpi4py's name)
        self.Irecv(spec)
        self.transfer()

    def recv(self) -> Any:
        return self.body


class Wire:
    """One direction: per kind first in, first out; `step` lets the oldest message of a kind be seen, or its bytes pass."""

    def __init__(self) -> None:
        self.waiting: dict[int, deque[Parcel]] = {kind: deque() for kind in Kind}
        self.taken: deque[Parcel] = deque()

    @property
    def num_bytes(self) -> int:
        """Of records on their way."""
        waiting = sum(parcel.view.nbytes for parcel in self.waiting[Kind.RECORD])  # type: ignore[union-attr]
        return waiting + sum(p.view.nbytes for p in self.taken if not p.received.done)  # type: ignore[union-attr]

    def step(self, kind: int) -> None:
        if self.taken:
            self.taken.popleft().transfer()
        for parcel in self.waiting[kind]:
            if not parcel.visible:
                parcel.visible = True
                return


class FakeComm:
    """One end of the network: what forward.py uses of mpi4py's communicator."""

    def __init__(self, out: Wire, into: Wire, buffered: bool) -> None:
        self.out, self.into, self.buffered = out, into, buffered

    def Isend(self, spec: list, destination: int, tag: int) -> Request:  # noqa: N802 (mpi4py's name)
        parcel = Parcel(spec[0].copy() if self.buffered else spec[0], None, Request())
        parcel.sent.done = self.buffered
        self.out.waiting[tag].append(parcel)
        return parcel.sent

    def isend(self, body: Any, dest: int, tag: int) -> Request:
        parcel = Parcel(None, body, Request())
        parcel.sent.done = True
        self.out.waiting[tag].append(parcel)
        return parcel.sent

    def improbe(self, source: int, tag: int) -> Parcel | None:
        queue = self.into.waiting[tag]
        return queue.popleft() if queue and queue[0].visible else None

    def Improbe(self, source: int, tag: int, status: MPI.Status | None = None) -> Parcel | None:  # noqa: N802 (mpi4py's name)
        parcel = self.improbe(source, tag)
        if parcel is not None and status is not None:  # to be received later: the bytes are still on their way
            status.Set_elements(MPI.BYTE, parcel.view.nbytes)
            self.into.taken.append(parcel)
        return parcel


class ForwarderMachine(RuleBasedStateMachine):
    """Worker, sender, network, receiver and collector take turns in any order; sizes, buffering and delays are drawn."""

    capacity_bytes = 4096

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.seed = self.num_pushed = self.num_read = self.num_credits = 0
        self.ready = False

    @rule(seed=st.integers(0, 2**20), buffered=st.booleans())
    def begin(self, seed: int, buffered: bool) -> None:
        if self.ready:
            return
        self.ready, self.seed = True, seed
        there, back = Wire(), Wire()
        self.there, self.back = there, back
        self.producer, self.outgoing = both_ends(3, self.capacity_bytes, "out")
        producer, self.consumer = both_ends(3, self.capacity_bytes, "in")
        self.remote = RemoteLane(3, 5, "rank 5 (generation 3) on host there", producer, self.consumer)
        self.sender = ForwardSender(FakeComm(there, back, buffered), 0, "rank 0", self.producer, self.outgoing, lambda: self.now_s)
        self.receiver = ForwardReceiver(FakeComm(back, there, True), "rank 0", [self.remote], 10.0, lambda: self.now_s)

    @rule(count=st.integers(1, 8))
    def work(self, count: int) -> None:
        for _ in range(count if self.ready else 0):
            if not try_send(self.producer, self.seed, self.num_pushed):
                return
            self.num_pushed += 1

    @rule()
    def send(self) -> None:
        if self.ready:
            self.sender.progress()
            assert self.there.num_bytes <= self.capacity_bytes, "the network holds more than a lane"

    @rule(kinds=st.lists(st.sampled_from(Kind), min_size=1, max_size=8))
    def carry(self, kinds: list[Kind]) -> None:
        for kind in kinds if self.ready else ():
            (self.back if kind == Kind.CREDIT else self.there).step(kind)

    @rule()
    def receive(self) -> None:
        if self.ready:
            before = len(self.back.waiting[Kind.CREDIT])
            self.receiver.progress()
            self.num_credits += len(self.back.waiting[Kind.CREDIT]) - before
            self.receiver.check()  # nobody is silent for 10 s here

    @rule(turns=st.integers(1, 20))
    def carry_on(self, turns: int) -> None:
        """Everybody but the reader: lanes fill up."""
        for _ in range(turns):
            self.work(2)
            self.send()
            self.carry([Kind.RECORD, Kind.CREDIT])
            self.receive()

    @rule(count=st.integers(1, 8))
    def read(self, count: int) -> None:
        for _ in range(count if self.ready else 0):
            record = self.consumer.peek()
            if record is None:
                return
            with record:
                expect(record, self.seed, self.num_read, self.producer.max_record_bytes)
            self.num_read += 1

    @rule()
    def tick(self) -> None:
        self.now_s += BEAT_EVERY_S

    def teardown(self) -> None:
        if not self.ready:
            return
        turns = 0
        while self.num_read < self.num_pushed:
            turns += 1
            assert turns < 1000, "stuck: a record or a credit is lost"
            self.send()
            self.carry([*Kind] * 4)
            self.receive()
            self.read(8)
        self.send()
        assert self.consumer.peek() is None and self.outgoing.used_bytes == 0
        assert self.consumer.head_position == self.consumer.tail_position == self.outgoing.tail_position
        assert self.num_credits <= 8 * self.consumer.head_position / self.capacity_bytes, "more credits than eight per lane full"
        assert self.sender.counters()["records"] == self.remote.num_received == self.num_pushed


def model(seed: int) -> None:
    run_state_machine_as_test(
        ForwarderMachine,
        settings=settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None),
    )
    silence()
    refusals()


def machine(buffered: bool = False) -> ForwarderMachine:
    made = ForwarderMachine()
    made.begin(seed=1, buffered=buffered)
    return made


def silence() -> None:
    """Dead only after ten seconds of listening: the time in which the receiver itself computed does not count. The last beat's tickets are named."""
    m = machine()
    for ticket in (7, 9, 11):
        m.producer.begin(ticket)
    m.producer.cancel(9)
    m.send()
    m.carry([Kind.BEAT])
    m.receive()
    m.now_s += 1000.0  # a long training step
    m.receive()
    for _ in range(9):
        m.tick()
        m.receive()
    m.tick()
    m.receiver.progress()
    with pytest.raises(ProducerDead, match=r"rank 5 \(generation 3\) on host there has been silent for 11 s; tickets in flight: 7, 11") as caught:
        m.receiver.check()
    assert caught.value.tickets == [7, 11] and caught.value.pid == os.getpid() and caught.value.lane == 3
    m.send()
    m.carry([Kind.BEAT])
    m.receive()  # a beat, however late, is a sign of life


def refusals() -> None:
    """A record without credit and a credit that cannot be are errors that name the other rank."""
    m = machine()
    frame = np.zeros(2048, np.uint8)
    m.sender._comm.Isend([frame, MPI.BYTE], 0, Kind.RECORD)
    m.carry([Kind.RECORD])
    with pytest.raises(RuntimeError, match=r"rank 5 \(generation 3\) on host there does not fit into lane 3 of rank 0"):
        m.receiver.progress()
    m = machine()
    m.receiver._comm.Isend([np.array([64]), MPI.INT64_T], 0, Kind.CREDIT)
    m.carry([Kind.CREDIT])
    with pytest.raises(RuntimeError, match="rank 0 gave credit up to 64"):
        m.sender.progress()


# -- on real ranks -------------------------------------------------------------------------------------------------------------------------


class Ends:
    """This rank's end of the lanes: rank r sends lane r - 1 to rank 0."""

    def __init__(self, world: MPI.Comm, capacity_bytes: int, out: Path) -> None:
        self.world, self.out = world, out
        comm = world.Dup()
        if world.rank:
            self.producer, self.outgoing = both_ends(world.rank - 1, capacity_bytes, "out")
            self.sender = ForwardSender(comm, 0, "rank 0", self.producer, self.outgoing)
        else:
            self.remotes = []
            for rank in range(1, world.size):
                producer, consumer = both_ends(rank - 1, capacity_bytes, "in")
                self.remotes.append(RemoteLane(rank - 1, rank, f"rank {rank}", producer, consumer))
            self.receiver = ForwardReceiver(comm, "rank 0", self.remotes, silence_deadline_s=DEADLINE_S)
            self.num_read = dict.fromkeys(range(world.size - 1), 0)

    def say(self, what: str) -> None:
        (self.out / f"{what}-{self.world.rank}").touch()

    def send_all(self, seed: int, first: int, stop: int) -> None:
        """Records first..stop-1, as fast as the lane takes them."""
        stop_at = time.monotonic() + DEADLINE_S
        k = first
        while k < stop or self.sender.num_unsent_bytes:
            assert time.monotonic() < stop_at, f"stuck at record {k}: {self.sender.counters()}"
            if k < stop and try_send(self.producer, seed, k):
                k += 1
            self.sender.progress()

    def read(self, seed: int, most: int = 1 << 30) -> None:
        """Whatever is there, checked."""
        self.receiver.progress()
        for remote in self.remotes:
            lane = remote.generation_rank
            for _ in range(most):
                record = remote.consumer.peek()
                if record is None:
                    break
                with record:
                    expect(record, seed, self.num_read[lane], remote.producer.max_record_bytes)
                self.num_read[lane] += 1

    def read_until_closed(self, seed: int, most: int = 1 << 30) -> None:
        stop_at = time.monotonic() + DEADLINE_S
        while not all(remote.complete for remote in self.remotes):
            assert time.monotonic() < stop_at, f"stuck: {[remote.state for remote in self.remotes]}"
            self.receiver.check()
            self.read(seed, most)
        self.receiver.finish(DEADLINE_S)
        self.read(seed)
        assert all(remote.consumer.producer_state() == "closed" for remote in self.remotes)


def stress(world: MPI.Comm, out: Path, seed: int) -> None:
    """Every record whole, once, in order; sizes from nothing to a quarter of the lane; the reader pauses at random."""
    ends, num_records = Ends(world, 1 << 16, out), 1500
    if world.rank:
        ends.send_all(seed, 0, num_records)
        ends.sender.close(DEADLINE_S)
        assert ends.sender.counters()["records"] == num_records
        return
    rng, stop_at = np.random.default_rng(seed), time.monotonic() + DEADLINE_S
    while sum(ends.num_read.values()) < num_records * len(ends.remotes) // 2:
        assert time.monotonic() < stop_at, ends.num_read
        ends.read(seed, most=int(rng.integers(1, 20)))
        if rng.integers(10) == 0:
            time.sleep(0.003)
    ends.read_until_closed(seed)
    assert set(ends.num_read.values()) == {num_records}
    for counters in ends.receiver.counters().values():
        assert counters["records"] == counters["sent_records"] == num_records and counters["bytes"] == counters["sent_bytes"]


def asleep(world: MPI.Comm, out: Path, seed: int) -> None:
    """While the training rank computes for 3 s, the generation rank goes on: thousands of turns, none of them long, and more pushed than one lane holds."""
    ends = Ends(world, 1 << 22, out)
    if not world.rank:
        while not all(ends.num_read.values()):
            ends.read(seed)
        for rank in range(1, world.size):
            world.send("asleep", dest=rank)
        time.sleep(3.0)
        for rank in range(1, world.size):
            world.isend("awake", dest=rank).wait()
        ends.read_until_closed(seed)
        return
    told, k, num_turns, longest_s = "", 0, 0, 0.0
    k_asleep = 0
    while told != "awake":
        began_at = time.monotonic()
        k += try_send(ends.producer, seed, k)
        ends.sender.progress()
        if told == "asleep":
            num_turns += 1
            longest_s = max(longest_s, time.monotonic() - began_at)
        if world.iprobe(source=0):
            told, k_asleep = world.recv(source=0), k
        time.sleep(0.0005)
    assert num_turns > 300 and longest_s < 1.5, f"{num_turns} turns while training slept for 3 s, the longest of {longest_s:.3f} s"
    assert ends.producer.full_waits > 0, f"the lane never filled: {k} records, {k_asleep} before the sleep"
    ends.send_all(seed, k, k)
    ends.sender.close(DEADLINE_S)


def full(world: MPI.Comm, out: Path, seed: int) -> None:
    """Nobody reads: two lanes full are all that may be pushed. Then everything is read."""
    ends, capacity_bytes = Ends(world, 1 << 16, out), 1 << 16
    if world.rank:
        k, num_bytes, idle = 0, 0, 0
        while idle < 2000 or ends.sender.counters()["credit_waits"] == 0:  # turns in which nothing could be pushed any more
            if try_send(ends.producer, seed, k):
                num_bytes += size_of(seed, ends.producer.lane, k, ends.producer.max_record_bytes) or 0
                k, idle = k + 1, 0
            else:
                idle += 1
            ends.sender.progress()
        counters = ends.sender.counters()
        assert num_bytes <= 2 * capacity_bytes and counters["bytes"] <= capacity_bytes, (num_bytes, counters)
        assert num_bytes > capacity_bytes and counters["full_waits"] > 0, (num_bytes, counters)
        world.send(k, dest=0, tag=1)
        ends.send_all(seed, k, k + 100)
        ends.sender.close(DEADLINE_S)
        return
    told: dict[int, int] = {}
    while len(told) < len(ends.remotes):
        ends.receiver.progress()
        for remote in ends.remotes:
            if world.iprobe(source=remote.source, tag=1):
                told[remote.generation_rank] = world.recv(source=remote.source, tag=1)
                assert remote.consumer.used_bytes <= capacity_bytes
    ends.read_until_closed(seed)
    assert ends.num_read == {lane: k + 100 for lane, k in told.items()}


def leftover(world: MPI.Comm, out: Path, seed: int) -> None:
    """A sender that ends while a record waits for credit: what it sent arrives, what it did not send stays, and both are counted."""
    ends = Ends(world, 1 << 16, out)
    if world.rank:
        k = 0
        while ends.sender.counters()["credit_waits"] == 0:
            k += try_send(ends.producer, seed, k)
            ends.sender.progress()
        ends.sender.close(DEADLINE_S)
        assert 0 < ends.sender.counters()["records"] < k
        world.send((k, ends.sender.counters()["records"]), dest=0, tag=1)
        return
    ends.receiver.finish(DEADLINE_S)  # nothing was read meanwhile
    ends.read(seed)
    for remote in ends.remotes:
        num_pushed, num_sent = world.recv(source=remote.source, tag=1)
        assert ends.num_read[remote.generation_rank] == remote.num_received == num_sent < num_pushed


def stopped(world: MPI.Comm, out: Path, seed: int) -> None:
    """The test stops rank 0 (SIGSTOP) once `ready-0` is there, makes `stopped`, and continues it once all senders have said `full`."""
    ends = Ends(world, 1 << 16, out)
    if not world.rank:
        (out / "pid").write_text(str(os.getpid()))
        while not all(ends.num_read.values()):
            ends.read(seed)
        ends.say("ready")
        ends.read_until_closed(seed)
        (out / "read").write_text(" ".join(map(str, ends.num_read.values())))
        return
    k, num_refused, stop_at = 0, 0, time.monotonic() + DEADLINE_S
    while num_refused < 500:
        assert time.monotonic() < stop_at, f"the lane never stayed full: {k} records"
        accepted = try_send(ends.producer, seed, k)
        k += accepted
        num_refused = num_refused + 1 if (out / "stopped").exists() and not accepted else 0
        ends.sender.progress()
        time.sleep(0.0005)
    ends.say("full")
    ends.send_all(seed, k, k + 200)
    ends.sender.close(DEADLINE_S)
    (out / f"sent-{world.rank}").write_text(str(k + 200))


def never_closed(world: MPI.Comm, out: Path, seed: int) -> None:
    """A sender that never announces its end is named when the deadline passes."""
    ends = Ends(world, 1 << 16, out)
    if world.rank:
        ends.send_all(seed, 0, 5)
        time.sleep(DEADLINE_S)  # the other rank aborts the job
        return
    ends.receiver.finish(1.0)


if __name__ == "__main__":
    mode, folder, chosen = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if mode == "model":
        model(chosen)
    else:
        with AbortGuard(folder):
            {"stress": stress, "asleep": asleep, "full": full, "leftover": leftover, "stopped": stopped, "never_closed": never_closed}[mode](
                MPI.COMM_WORLD, folder, chosen
            )
            MPI.COMM_WORLD.Barrier()
    print("well")
