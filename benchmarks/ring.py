"""How fast records cross the ring from Python, beside memcpy of the same bytes and multiprocessing.Queue.

    python benchmarks/ring.py [--seconds 0.4] [--no-pin]

Two processes, pinned to two cores where there are two. For each record size: GB/s (10^9 bytes of payload a second, filled by the producer and read by the
consumer, both by copying to or from a private buffer: one pass each) with and without checksum, and the half round trip of one record (ping-pong over two
lanes, median and 99th percentile, microseconds). memcpy is one core copying between two buffers larger than its caches. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import numpy as np

from areal_hpc.transport.ring import RingConsumer, RingProducer

SIZES_BYTES = (1 << 10, 16 << 10, 256 << 10, 4 << 20)
CAPACITY_BYTES = 32 << 20
END = -1
FIELDS = {"version_min": 0, "version_max": 0, "num_tokens": 0, "num_samples": 0}


def pin(core: int, enabled: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if enabled and len(cores) > 1:
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def push(lane: RingProducer, ticket: int, source: np.ndarray) -> None:
    with lane.reserve(source.nbytes, timeout_s=60) as slot:
        slot.buffer[:] = source
        slot.commit(ticket=ticket, **FIELDS)


def ring_producer(name: str, num_bytes: int, seconds: float, pinned: bool) -> None:
    pin(1, pinned)
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    with RingProducer.open(name, job_id=1, timeout_s=30) as lane:
        stop_s = time.monotonic() + seconds
        while time.monotonic() < stop_s:
            push(lane, 0, source)
        push(lane, END, source)


def ring_gb_per_s(num_bytes: int, seconds: float, pinned: bool, *, checksum: bool) -> float:
    name = f"bench-{os.getpid()}"
    target = np.empty(num_bytes, np.uint8)
    with RingConsumer.create(name, CAPACITY_BYTES, lane=0, job_id=1, checksum=checksum) as lane:
        child = multiprocessing.Process(target=ring_producer, args=(name, num_bytes, seconds, pinned))
        child.start()
        lane.wait_for_producer(timeout_s=30)
        lane.unlink()
        started_s, ticket = time.monotonic(), 0
        while ticket != END:
            record = lane.peek(timeout_s=60)
            assert record is not None, "the producer is silent"
            with record:
                np.copyto(target, record.buffer)
                ticket = record.ticket
        elapsed_s = time.monotonic() - started_s
        child.join()
        return lane.counters()["bytes"] / elapsed_s / 1e9


def queue_producer(queue: Queue[bytes | None], num_bytes: int, seconds: float, pinned: bool) -> None:
    pin(1, pinned)
    source = np.random.default_rng(0).bytes(num_bytes)
    stop_s = time.monotonic() + seconds
    while time.monotonic() < stop_s:
        queue.put(source)
    queue.put(None)


def queue_gb_per_s(num_bytes: int, seconds: float, pinned: bool) -> float:
    queue: Queue[bytes | None] = multiprocessing.Queue(maxsize=max(1, CAPACITY_BYTES // num_bytes // 8))
    child = multiprocessing.Process(target=queue_producer, args=(queue, num_bytes, seconds, pinned))
    child.start()
    total_bytes, started_s = len(queue.get() or b""), time.monotonic()
    while (message := queue.get()) is not None:
        total_bytes += len(message)
    elapsed_s = time.monotonic() - started_s
    child.join()
    return total_bytes / elapsed_s / 1e9


def memcpy_gb_per_s(num_bytes: int, seconds: float) -> float:
    """Over a window of CAPACITY_BYTES, as the ring does."""
    window, source = np.ones(CAPACITY_BYTES, np.uint8), np.ones(num_bytes, np.uint8)
    num_copies, offset, started_s = 0, 0, time.monotonic()
    while time.monotonic() < started_s + seconds:
        for _ in range(8):
            window[offset : offset + num_bytes] = source
            offset = (offset + num_bytes) % CAPACITY_BYTES
        num_copies += 8
    return num_copies * num_bytes / (time.monotonic() - started_s) / 1e9


def echo(there: str, back: str, num_rounds: int, pinned: bool) -> None:
    pin(1, pinned)
    with RingProducer.open(back, job_id=1, timeout_s=30) as answers, RingConsumer.create(there, 1 << 20, lane=0, job_id=1) as questions:
        for _ in range(num_rounds):
            record = questions.peek(timeout_s=60)
            assert record is not None
            with record:
                push(answers, record.ticket, record.buffer)


def latency_us(num_bytes: int, num_rounds: int, pinned: bool) -> tuple[float, float]:
    """Median and 99th percentile of half a round trip."""
    there, back = f"bench-there-{os.getpid()}", f"bench-back-{os.getpid()}"
    payload = np.ones(num_bytes, np.uint8)
    with RingConsumer.create(back, 1 << 20, lane=1, job_id=1) as answers:
        child = multiprocessing.Process(target=echo, args=(there, back, num_rounds, pinned))
        child.start()
        halves_us = np.empty(num_rounds)
        with RingProducer.open(there, job_id=1, timeout_s=30) as questions:
            for i in range(num_rounds):
                started_s = time.perf_counter()
                push(questions, i, payload)
                record = answers.peek(timeout_s=60)
                assert record is not None
                record.release()
                halves_us[i] = (time.perf_counter() - started_s) / 2 * 1e6
        child.join()
    return float(np.median(halves_us)), float(np.percentile(halves_us, 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each throughput measurement")
    parser.add_argument("--no-pin", dest="pinned", action="store_false", help="leave the processes where the kernel puts them")
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")
    pin(0, options.pinned)
    seconds, pinned = options.seconds, options.pinned
    columns: dict[str, Callable[[int], float]] = {
        "memcpy": lambda size: memcpy_gb_per_s(size, seconds),
        "ring, no checksum": lambda size: ring_gb_per_s(size, seconds, pinned, checksum=False),
        "ring": lambda size: ring_gb_per_s(size, seconds, pinned, checksum=True),
        "multiprocessing.Queue": lambda size: queue_gb_per_s(size, seconds, pinned),
    }
    print(f"{'GB/s':>10}" + "".join(f"{column:>24}" for column in columns))
    rows = []
    for size in SIZES_BYTES:
        row = {column: measure(size) for column, measure in columns.items()}
        rows.append({"record_bytes": size, **{column: round(value, 3) for column, value in row.items()}})
        print(f"{size >> 10:>6} KiB" + "".join(f"{value:>24.2f}" for value in row.values()))
    p50_us, p99_us = latency_us(1024, 3000, pinned)
    print(f"half a round trip of 1 KiB: median {p50_us:.1f} us, 99 % {p99_us:.1f} us")
    result = {"benchmark": "ring", "unit": "GB/s", "cores": len(os.sched_getaffinity(0)) if not pinned else os.cpu_count(), "pinned": pinned}
    print(json.dumps({**result, "throughput": rows, "latency_1KiB_us": {"p50": round(p50_us, 2), "p99": round(p99_us, 2)}}))


if __name__ == "__main__":
    main()
