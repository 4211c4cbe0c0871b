"""Lanes under fire for a minute (AREAL_HPC_SOAK_S seconds): producers are killed, stopped and replaced at random moments.

Nothing torn, nothing lost, nothing twice; the tickets of each death are those that the ring named; memory stays flat. Each producer keeps a diary in a file that
both sides map: it notes what it is about to do before it does it, so of a killed one everything is known but whether it came to do the last entry.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.transport.ring import ProducerDead, Ring

SOAK_S = float(os.environ.get("AREAL_HPC_SOAK_S", "60"))
CAPACITIES_BYTES = (1 << 14, 1 << 16, 1 << 20)
"""One lane each. The producer of the last is stopped, but never killed."""
PATIENCE_S = 120.0
GROWTH_BYTES = 24 << 20
"""Of resident memory, over the last three quarters of the time: a leak of a byte a record is more."""

# The diary. Begun and cancelled tickets are counted by the one store that also says what is being done, so that neither can be without the other.
STOP, BEGUN, CANCELLED, COMMITTED, OPEN, NUM_OPEN = 0, 1, 2, 3, 8, 32
DIARY_SHAPE = 64
NOBODY = -1
SHIFT = 32
"""BEGUN and CANCELLED: a number in the high half, and in the low half, while the next is being done, its ticket plus one."""

# Ticket t ends by being cancelled if t % 7 == 3, else committed. The successor of a killed producer cancels what it inherits.
PRODUCER = f"""
import random, sys
import numpy as np
from areal_hpc.transport.ring import Ring
STOP, BEGUN, CANCELLED, COMMITTED, OPEN, NUM_OPEN = {STOP, BEGUN, CANCELLED, COMMITTED, OPEN, NUM_OPEN}
name, diary, rng, named = sys.argv[1], np.memmap(sys.argv[2], np.int64, "r+"), random.Random(int(sys.argv[3])), sys.argv[4]
producer = Ring(name, 1).producer(timeout_s=60)
inherited = producer.in_flight()
assert repr(inherited) == named, (named, inherited)
for ticket in inherited:
    producer.cancel(ticket)
noise = np.random.default_rng(0).integers(0, 256, producer.max_record_bytes + 256, np.uint8)

def count(what, ticket, action):
    number = int(diary[what]) >> {SHIFT}
    diary[what] = number << {SHIFT} | ticket + 1
    action(ticket)
    diary[what] = number + 1 << {SHIFT}

def begin(place):
    ticket = diary[OPEN + place] = int(diary[BEGUN]) >> {SHIFT}
    count(BEGUN, ticket, producer.begin)

def end(place):
    ticket = int(diary[OPEN + place])
    if ticket % 7 == 3:
        count(CANCELLED, ticket, producer.cancel)
    else:
        num_bytes = rng.randrange(producer.max_record_bytes + 1) >> rng.randrange(8)
        with producer.reserve(num_bytes, timeout_s=600) as slot:
            slot.buffer[:] = noise[ticket % 256 :][:num_bytes]
            slot.commit(ticket=ticket, version_min=0, version_max=0, num_tokens=0, num_samples=0)
        diary[COMMITTED] += 1
    diary[OPEN + place] = {NOBODY}

for place in range(NUM_OPEN):
    begin(place)
while not diary[STOP]:
    place = rng.randrange(NUM_OPEN)
    end(place)
    begin(place)
for place in range(NUM_OPEN // 2):
    end(place)
print(producer.in_flight(), flush=True)
producer.close()
"""


class Lane:
    """One lane, its present producer, and what is known of all of them."""

    def __init__(self, index: int, folder: Path, rng: random.Random) -> None:
        self.ring = Ring(f"soak-{os.getpid()}-{uuid.uuid4().hex[:8]}", CAPACITIES_BYTES[index], lane=index)
        self.consumer = self.ring.consumer()
        self.noise = np.random.default_rng(0).integers(0, 256, self.consumer.capacity_bytes // 4 + 256, np.uint8)
        self.rng = rng
        self.path = folder / f"diary-{index}"
        self.path.write_bytes(np.zeros(DIARY_SHAPE, np.int64).tobytes())
        self.diary = np.memmap(self.path, np.int64, "r+")
        self.diary[OPEN : OPEN + NUM_OPEN] = NOBODY
        self.delivered: set[int] = set()  # above `low`
        self.died: set[int] = set()
        self.low = self.num_delivered = self.num_kills = self.num_stops = 0
        self.continue_at = float("inf")
        self.is_killed = False
        self.child = self.start([])

    def start(self, inherited: list[int]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PRODUCER, self.ring.name, str(self.path), str(self.rng.randrange(1 << 30)), repr(inherited)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def take(self) -> bool:
        """One record, checked, if there is one. Replaces a producer that was killed once its lane is drained."""
        try:
            record = self.consumer.peek()
        except ProducerDead as death:
            if self.is_killed:
                self.bury(death.tickets)
            return False
        if record is None:
            if self.is_killed and self.consumer.producer_state() == "unattached":
                self.bury([])
            return False
        with record:
            ticket = record.ticket
            assert (record.buffer == self.noise[ticket % 256 :][: record.num_bytes]).all(), f"torn: {record}"
            assert ticket % 7 != 3, f"cancelled: {record}"
            assert ticket >= self.low and ticket not in self.delivered and ticket not in self.died, f"delivered twice, or dead: {record}"
            assert ticket <= self.diary[BEGUN] >> SHIFT, f"invented: {record}"
        self.delivered.add(ticket)
        self.num_delivered += 1
        while self.low in self.delivered or self.low in self.died or self.low % 7 == 3:
            self.delivered.discard(self.low)
            self.low += 1
        return True

    def kill(self, now_s: float) -> None:
        if not self.is_killed:
            self.child.kill()
            self.child.communicate(timeout=PATIENCE_S)
            assert self.child.returncode == -signal.SIGKILL
            self.is_killed, self.continue_at = True, float("inf")
            self.num_kills += 1

    def bury(self, named: list[int]) -> None:
        """Compare the tickets that the ring names with the diary, and start a successor."""
        opened = set(self.diary[OPEN : OPEN + NUM_OPEN].tolist()) - {NOBODY}
        new = set(named) - self.died
        assert new <= opened, f"the ring names tickets that were not open: {new - opened}"
        ended = opened - new
        assert len(ended) <= 1, f"the ring does not name {ended}, of which at most one can have ended, or not begun, at the last moment"
        for what in (BEGUN, CANCELLED):
            number, ticket = int(self.diary[what]) >> SHIFT, int(self.diary[what]) % (1 << SHIFT) - 1
            if ticket != NOBODY:
                self.diary[what] = number + (ticket in new if what == BEGUN else ticket not in new) << SHIFT
        for ticket in ended:
            is_committed = ticket < self.low or ticket in self.delivered
            assert is_committed or ticket % 7 == 3 or ticket == self.diary[BEGUN] >> SHIFT, f"lost: ticket {ticket}"
        self.died |= new
        self.diary[OPEN : OPEN + NUM_OPEN] = NOBODY
        self.is_killed = False
        self.child = self.start(named)

    def stop(self, now_s: float) -> None:
        if not self.is_killed and self.continue_at == float("inf"):
            self.child.send_signal(signal.SIGSTOP)
            self.continue_at = now_s + self.rng.uniform(0.02, 0.5)
            self.num_stops += 1

    def go_on(self, now_s: float) -> None:
        if now_s >= self.continue_at:
            self.child.send_signal(signal.SIGCONT)
            self.continue_at = float("inf")

    def finish(self) -> dict[str, int]:
        """Let the producer end, take the rest, and settle the account."""
        self.diary[STOP] = 1
        give_up_at = time.monotonic() + PATIENCE_S
        self.go_on(float("inf"))
        while True:
            is_closed = self.consumer.producer_state() == "closed"
            if not self.take():
                if is_closed:
                    break
                time.sleep(0.001)
            assert self.is_killed or self.child.poll() in (None, 0), f"a producer ended with status {self.child.returncode}"
            assert time.monotonic() < give_up_at, f"waited {PATIENCE_S} s for the last producer of lane {self.ring.lane}"
        printed, _ = self.child.communicate(timeout=PATIENCE_S)
        in_flight = set(map(int, printed.strip("[]\n").split(",")))
        num_begun = int(self.diary[BEGUN]) >> SHIFT
        for ticket in range(self.low, num_begun):
            assert ticket % 7 == 3 or ticket in self.delivered or ticket in self.died or ticket in in_flight, f"lost: ticket {ticket}"
        account = {
            "begun": num_begun,
            "delivered": self.num_delivered,
            "died": len(self.died),
            "cancelled": int(self.diary[CANCELLED]) >> SHIFT,
            "in_flight": len(in_flight),
        }
        assert account["begun"] == sum(count for name, count in account.items() if name != "begun"), account
        counters = self.consumer.counters()
        assert (counters["records"], counters["checksum_errors"], self.consumer.used_bytes) == (self.num_delivered, 0, 0)
        assert self.num_delivered - int(self.diary[COMMITTED]) in range(self.num_kills + 1)
        self.consumer.close()
        return account | {"kills": self.num_kills, "stops": self.num_stops}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    rng = random.Random(5)
    lanes = [Lane(index, tmp_path, rng) for index in range(len(CAPACITIES_BYTES))]
    steady = lanes[-1]
    resident: list[tuple[int, int]] = []  # of this process and of the steady producer, after a quarter of the time and at its end
    try:
        for lane in lanes:
            lane.consumer.wait_for_producer(timeout_s=PATIENCE_S)
        start_s = event_at = time.monotonic()
        while (now_s := time.monotonic()) < start_s + SOAK_S:
            if len(resident) == 0 and now_s >= start_s + SOAK_S / 4:
                resident.append((resident_bytes(os.getpid()), resident_bytes(steady.child.pid)))
            num_taken = sum(lane.take() for lane in lanes for _ in range(8))
            for lane in lanes:
                lane.go_on(now_s)
            if now_s >= event_at:
                event_at = now_s + rng.expovariate(2.0)
                lane = rng.choice(lanes)
                assert lane.is_killed or lane.child.poll() is None, f"a producer ended with status {lane.child.returncode}"
                event = rng.choice([lane.stop if lane is steady else lane.kill, lane.stop, None])
                if event is None:
                    time.sleep(rng.uniform(0.0, 0.2))  # all lanes run full
                else:
                    event(now_s)
            elif num_taken == 0:
                time.sleep(0.0005)
        resident.append((resident_bytes(os.getpid()), resident_bytes(steady.child.pid)))
        accounts = [lane.finish() for lane in lanes]
    finally:
        for lane in lanes:
            lane.child.kill()
            lane.child.communicate()
            lane.consumer.close()
    for lane, account in zip(lanes, accounts, strict=True):
        print(f"lane of {lane.consumer.capacity_bytes} bytes: {account}")
    print(f"resident bytes of reader and steady producer: {resident}")
    assert sum(account["kills"] for account in accounts) > 0
    for early, late in zip(*resident, strict=True):
        assert late - early < GROWTH_BYTES, f"resident memory grew from {early} to {late} bytes"
