"""How fast records cross the ring, beside memcpy of the same bytes and what other systems use: ZeroMQ (ipc), MPI, multiprocessing.Queue.

    python benchmarks/ring.py [--seconds 0.3] [--repeats 5] [--no-pin] [--no-cpp]

Two processes, pinned to two cores where there are two. For each record size, GB/s (10^9 bytes of payload a second) from a private buffer of the producer into
one of the consumer: every rival copies in at one end, and out at the other (`recv` and `get` return private bytes). `in place`: the producer writes into the
slot, the consumer reads the record where it lies (a sum over all of it), which only the ring can. Half a round trip of one record (ping-pong, spinning):
median and 99th percentile in microseconds. memcpy: one core copying a private buffer of one record into a window as large as the lane (which the caches hold);
memcpy, memory: between two buffers that no cache holds. The goals take the second; the ratio to the first is printed beside it. All of them are
measured in turn, `--repeats` times over; what is printed and recorded is the median of each, and ratios are medians of the ratios within a turn.
At the end: resident memory of both ends over 10^6 records. Last line: one JSON object.

The C++ rows (benchmarks/ring.cpp, built on the spot) are the same lane without Python. On a machine where others run, `nice -n -20 python
benchmarks/ring.py` as root keeps most of them out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np

from areal_hpc.observe.memory import resident_bytes
from areal_hpc.transport.ring import Ring, RingConsumer, RingProducer

ROOT = Path(__file__).resolve().parents[1]
SIZES_BYTES = (1 << 10, 16 << 10, 256 << 10, 4 << 20)
RECORDS_IN_LANE = 8
FAR_BYTES = 128 << 20
"""More than any cache holds."""
END = -1
FIELDS = {"version_min": 0, "version_max": 0, "num_tokens": 0, "num_samples": 0}
CORES = sorted(os.sched_getaffinity(0))
"""Before anybody is pinned."""

GOALS = {  # of the ring from Python: (rival, record bytes) -> least ratio; `in place` and 60 % are with checksum
    ("memcpy, memory", "in place, no checksum", 256 << 10): 0.85,
    ("memcpy, memory", "in place, no checksum", 4 << 20): 0.85,
    ("memcpy, memory", "in place", 256 << 10): 0.6,
    ("memcpy, memory", "in place", 4 << 20): 0.6,
    ("ZeroMQ", "ring", 1 << 10): 4.0,
    ("ZeroMQ", "ring", 256 << 10): 1.6,
    ("ZeroMQ", "ring", 4 << 20): 1.6,
    ("multiprocessing.Queue", "ring", 1 << 10): 10.0,
    ("multiprocessing.Queue", "ring", 256 << 10): 10.0,
    ("multiprocessing.Queue", "ring", 4 << 20): 10.0,
}


def unpin() -> None:
    """In a child that pins its processes itself."""
    os.sched_setaffinity(0, CORES)


class Bench:
    """What all measurements share."""

    def __init__(self, seconds: float, pinned: bool) -> None:
        self.seconds = seconds
        self.pinned = pinned and len(CORES) > 1

    def pin(self, k: int) -> None:
        if self.pinned:
            os.sched_setaffinity(0, {CORES[k]})

    def start(self, target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
        child = multiprocessing.Process(target=target, args=(self, *arguments))
        child.start()
        return child

    def until(self) -> float:
        return time.monotonic() + self.seconds


def capacity_bytes(record_bytes: int) -> int:
    """Room for a few records, and for some hundred small ones: what stays in the cache is not what limits."""
    return max(1 << 20, RECORDS_IN_LANE * record_bytes)


def source_of(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


def finished(child: multiprocessing.Process) -> None:
    child.join(60)
    assert child.exitcode == 0, f"the other process ended with {child.exitcode}"


# -- the ring --------------------------------------------------------------------------------------------------------


def lane_of(what: str, record_bytes: int, *, checksum: bool = True) -> Ring:
    return Ring(f"bench-{what}-{os.getpid()}", capacity_bytes(record_bytes), checksum=checksum)


def push_copies(bench: Bench, ring: Ring, num_bytes: int, num_records: int = 0) -> None:
    bench.pin(1)
    source, sent, stop_s = source_of(num_bytes), 0, bench.until()
    with ring.producer(timeout_s=30) as lane:
        push = lane.try_push
        while sent < num_records if num_records else time.monotonic() < stop_s:
            for _ in range(16):
                if push(source, ticket=0) is None:
                    lane.wait_for_room(1.0)
                else:
                    sent += 1
        lane.push(source, ticket=END, timeout_s=60)


def write_in_place(bench: Bench, ring: Ring, num_bytes: int) -> None:
    bench.pin(1)
    source, stop_s = source_of(num_bytes), bench.until()
    with ring.producer(timeout_s=30) as lane:
        while True:
            ticket = 0 if time.monotonic() < stop_s else END
            for _ in range(4):
                with lane.reserve(num_bytes, timeout_s=60) as slot:
                    slot.buffer[:] = source
                    slot.commit(ticket=ticket, **FIELDS)
                if ticket == END:
                    return


def take_copies(lane: RingConsumer) -> None:
    ticket, pop = 0, lane.try_pop
    while ticket != END:
        popped = pop()
        if popped is None:
            lane.wait_for_record(1.0)
        else:
            ticket = popped[0]


def read_in_place(lane: RingConsumer) -> None:
    ticket = 0
    while ticket != END:
        record = lane.peek(timeout_s=60)
        assert record is not None, "the producer is silent"
        with record:
            record.buffer.view(np.uint64).sum()
            ticket = record.ticket


def ring_gb_per_s(bench: Bench, num_bytes: int, *, in_place: bool, checksum: bool) -> float:
    ring = lane_of("lane", num_bytes, checksum=checksum)
    with ring.consumer() as lane:
        child = bench.start(write_in_place if in_place else push_copies, ring, num_bytes)
        lane.wait_for_producer(timeout_s=30)
        lane.unlink()
        started_s = time.monotonic()
        if in_place:
            read_in_place(lane)
        else:
            take_copies(lane)
        elapsed_s = time.monotonic() - started_s
        finished(child)
        return lane.counters()["bytes"] / elapsed_s / 1e9


def answer(lane: RingProducer, source: np.ndarray, ticket: int) -> None:
    assert lane.try_push(source, ticket=ticket) is not None


def wait_spinning(lane: RingConsumer) -> None:
    while (record := lane.try_peek()) is None:
        pass
    record.release()


def ring_echo(bench: Bench, there: Ring, back: Ring, num_bytes: int, num_rounds: int) -> None:
    bench.pin(1)
    source = source_of(num_bytes)
    with there.consumer() as questions, back.producer(timeout_s=30) as answers:
        for i in range(num_rounds):
            wait_spinning(questions)
            answer(answers, source, i)


def ring_latency_us(bench: Bench, num_bytes: int, num_rounds: int) -> tuple[float, float]:
    there, back = lane_of("there", num_bytes), lane_of("back", num_bytes)
    source, halves_us = source_of(num_bytes), np.empty(num_rounds)
    with back.consumer() as answers:
        child = bench.start(ring_echo, there, back, num_bytes, num_rounds)
        with there.producer(timeout_s=30) as questions:
            answers.wait_for_producer(timeout_s=30)
            for i in range(num_rounds):
                started_s = time.perf_counter()
                answer(questions, source, i)
                wait_spinning(answers)
                halves_us[i] = (time.perf_counter() - started_s) / 2 * 1e6
        finished(child)
    return percentiles(halves_us)


def percentiles(us: np.ndarray) -> tuple[float, float]:
    return float(np.percentile(us, 50)), float(np.percentile(us, 99))


# -- the rivals ------------------------------------------------------------------------------------------------------


def memcpy_gb_per_s(bench: Bench, num_bytes: int) -> float:
    window, source = np.ones(capacity_bytes(num_bytes), np.uint8), source_of(num_bytes)
    places = [window[k * num_bytes : (k + 1) * num_bytes] for k in range(len(window) // num_bytes)]
    num_copies, started_s, stop_s = 0, time.monotonic(), bench.until()
    while time.monotonic() < stop_s:
        for place in places:
            np.copyto(place, source)
        num_copies += len(places)
    return num_copies * num_bytes / (time.monotonic() - started_s) / 1e9


def memcpy_memory_gb_per_s(bench: Bench, num_bytes: int) -> float:
    far = FAR_BYTES // num_bytes * num_bytes
    window, source = np.ones(far, np.uint8), np.ones(far, np.uint8)
    pairs = [(window[k : k + num_bytes], source[k : k + num_bytes]) for k in range(0, far, max(num_bytes, 1 << 14))]  # of small records every 16th
    num_copies, started_s, stop_s = 0, time.monotonic(), bench.until()
    while time.monotonic() < stop_s:
        for target, origin in pairs:
            np.copyto(target, origin)
        num_copies += len(pairs)
    return num_copies * num_bytes / (time.monotonic() - started_s) / 1e9


def zeromq_producer(bench: Bench, address: str, num_bytes: int, num_rounds: int) -> None:
    import zmq

    bench.pin(1)
    source, stop_s = source_of(num_bytes), bench.until()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.sndhwm = socket.rcvhwm = capacity_bytes(num_bytes) // num_bytes
        socket.connect(address)
        for _ in range(num_rounds):
            socket.recv()
            socket.send(source)
        if num_rounds:
            return
        while time.monotonic() < stop_s:
            for _ in range(16):
                socket.send(source)
        socket.send(b"")


def zeromq(bench: Bench, num_bytes: int, num_rounds: int) -> tuple[float, tuple[float, float]]:
    """(GB/s, ()) or, with `num_rounds`, (0, latencies)."""
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        address = f"ipc://{folder}/socket"
        socket.sndhwm = socket.rcvhwm = capacity_bytes(num_bytes) // num_bytes
        socket.bind(address)
        source, halves_us = source_of(num_bytes), np.empty(num_rounds)
        child = bench.start(zeromq_producer, address, num_bytes, num_rounds)
        for i in range(num_rounds):
            started_s = time.perf_counter()
            socket.send(source)
            socket.recv()
            halves_us[i] = (time.perf_counter() - started_s) / 2 * 1e6
        if num_rounds:
            finished(child)
            return 0.0, percentiles(halves_us)
        socket.recv()
        total_bytes, started_s = 0, time.monotonic()
        while message := socket.recv():
            total_bytes += len(message)
        elapsed_s = time.monotonic() - started_s
        finished(child)
        return total_bytes / elapsed_s / 1e9, (0.0, 0.0)


def queue_producer(bench: Bench, queue: Queue[bytes | None], num_bytes: int) -> None:
    bench.pin(1)
    source, stop_s = source_of(num_bytes).tobytes(), bench.until()
    while time.monotonic() < stop_s:
        queue.put(source)
    queue.put(None)


def queue_gb_per_s(bench: Bench, num_bytes: int) -> float:
    queue: Queue[bytes | None] = multiprocessing.Queue(maxsize=max(1, capacity_bytes(num_bytes) // num_bytes))
    child = bench.start(queue_producer, queue, num_bytes)
    total_bytes, started_s = len(queue.get() or b""), time.monotonic()
    while (message := queue.get()) is not None:
        total_bytes += len(message)
    elapsed_s = time.monotonic() - started_s
    finished(child)
    return total_bytes / elapsed_s / 1e9


def mpi_main(num_bytes: int, seconds: float, num_rounds: int, pinned: bool) -> None:
    """One of two MPI ranks: Isend/Irecv of bytes, a few in flight. Rank 0 prints [GB/s, p50, p99]."""
    from mpi4py import MPI

    bench, comm = Bench(seconds, pinned), MPI.COMM_WORLD
    bench.pin(comm.rank)
    depth, source = RECORDS_IN_LANE, source_of(num_bytes)
    comm.Barrier()
    if comm.rank == 1:
        stop_s, requests = bench.until(), []
        while time.monotonic() < stop_s:
            requests = [comm.Isend([source, MPI.BYTE], dest=0, tag=0) for _ in range(depth)]
            MPI.Request.Waitall(requests)
        comm.Send([source, MPI.BYTE], dest=0, tag=1)
        for _ in range(num_rounds):
            comm.Recv([source, MPI.BYTE], source=0)
            comm.Send([source, MPI.BYTE], dest=0)
        return
    targets, status = [np.empty(num_bytes, np.uint8) for _ in range(depth)], MPI.Status()
    pending = [comm.Irecv([target, MPI.BYTE], source=1) for target in targets]
    num_received, k, started_s = 0, 0, time.monotonic()
    while True:
        pending[k].Wait(status)
        num_received += 1
        if status.tag == 1:
            break
        pending[k] = comm.Irecv([targets[k], MPI.BYTE], source=1)
        k = (k + 1) % depth
    elapsed_s = time.monotonic() - started_s
    for request in pending:
        if request:
            request.Cancel()
            request.Wait()
    halves_us = np.empty(max(1, num_rounds))
    for i in range(num_rounds):
        began_s = time.perf_counter()
        comm.Send([source, MPI.BYTE], dest=1)
        comm.Recv([targets[0], MPI.BYTE], source=1)
        halves_us[i] = (time.perf_counter() - began_s) / 2 * 1e6
    print(json.dumps([num_received * num_bytes / elapsed_s / 1e9, *percentiles(halves_us)]))


def mpi(bench: Bench, num_bytes: int, num_rounds: int) -> tuple[float, tuple[float, float]]:
    from areal_hpc.launch.local import find_launcher

    launcher = find_launcher()
    rank = [sys.executable, __file__, "--mpi-rank", str(num_bytes), str(bench.seconds), str(num_rounds), str(int(bench.pinned))]
    environment = os.environ | launcher.environment()
    done = subprocess.run([*launcher.command(2), *rank], env=environment, preexec_fn=unpin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    gb_per_s, p50, p99 = json.loads(done.stdout.strip().splitlines()[-1])
    return gb_per_s, (p50, p99)


# -- C++ and memory --------------------------------------------------------------------------------------------------


def build_cpp() -> Path | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    program = ROOT / "build" / "bench-ring"
    program.parent.mkdir(exist_ok=True)
    sources = [ROOT / "benchmarks" / "ring.cpp", *(ROOT / "areal_hpc" / "csrc").glob("*.hpp")]
    if not program.exists() or program.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        subprocess.run([compiler, "-O3", "-std=c++20", f"-I{ROOT / 'areal_hpc' / 'csrc'}", str(sources[0]), "-o", str(program)], check=True)
    return program


def cpp(program: Path, bench: Bench, num_bytes: int, *, checksum: bool) -> dict[str, float]:
    arguments = [str(num_bytes), str(capacity_bytes(num_bytes)), str(bench.seconds), str(int(checksum)), str(int(bench.pinned))]
    return json.loads(subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=120, preexec_fn=unpin).stdout)


def report_memory(bench: Bench, ring: Ring, num_records: int, result: Connection) -> None:
    """The producing end of the memory measurement: resident bytes after a tenth of the records, and after all."""
    bench.pin(1)
    payload = source_of(1024)
    with ring.producer(timeout_s=30) as lane:
        for k in range(num_records):
            lane.push(payload[: 64 + k % 960], ticket=k if k + 1 < num_records else END, timeout_s=60)
            if k + 1 in (num_records // 10, num_records):
                result.send(resident_bytes())


def memory_growth(bench: Bench, num_records: int) -> dict[str, int]:
    """Bytes that either end grew by between a tenth of the records and all of them."""
    ring = lane_of("memory", 1024)
    ours: list[int] = []
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with ring.consumer() as lane:
        child = bench.start(report_memory, ring, num_records, sender)
        count, ticket = 0, 0
        while ticket != END:
            record = lane.peek(timeout_s=60)
            assert record is not None
            with record:
                ticket = record.ticket
            count += 1
            if count in (num_records // 10, num_records):
                ours.append(resident_bytes())
        theirs = [receiver.recv() for _ in range(2)]
        finished(child)
    return {"records": num_records, "consumer_growth_bytes": ours[1] - ours[0], "producer_growth_bytes": theirs[1] - theirs[0]}


# -- the table -------------------------------------------------------------------------------------------------------


def measure(bench: Bench, size: int, program: Path | None) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """One turn: GB/s of everything, and the latencies, at this record size."""
    num_rounds = 2000 if size <= 1 << 18 else 200
    rates: dict[str, float] = {
        "memcpy": memcpy_gb_per_s(bench, size),
        "memcpy, memory": memcpy_memory_gb_per_s(bench, size),
        "ring": ring_gb_per_s(bench, size, in_place=False, checksum=True),
        "ring, no checksum": ring_gb_per_s(bench, size, in_place=False, checksum=False),
        "in place": ring_gb_per_s(bench, size, in_place=True, checksum=True),
        "in place, no checksum": ring_gb_per_s(bench, size, in_place=True, checksum=False),
        "ZeroMQ": zeromq(bench, size, 0)[0],
        "multiprocessing.Queue": queue_gb_per_s(bench, size),
    }
    latencies = {"ring": ring_latency_us(bench, size, num_rounds), "ZeroMQ": zeromq(bench, size, num_rounds)[1]}
    rates["MPI"], latencies["MPI"] = mpi(bench, size, num_rounds)
    if program is not None:
        for checksum, name in ((True, "C++"), (False, "C++, no checksum")):
            found = cpp(program, bench, size, checksum=checksum)
            rates[name] = found["gb_per_s"]
            latencies[name] = (found["latency_p50_us"], found["latency_p99_us"])
    return rates, latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each throughput measurement")
    parser.add_argument("--repeats", type=int, default=5, help="turns; medians are reported")
    parser.add_argument("--no-pin", dest="pinned", action="store_false", help="leave the processes where the kernel puts them")
    parser.add_argument("--no-cpp", dest="cpp", action="store_false", help="leave out the C++ rows, which need a compiler")
    parser.add_argument("--mpi-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        num_bytes, seconds, num_rounds, pinned = options.mpi_rank
        return mpi_main(int(num_bytes), float(seconds), int(num_rounds), pinned == "1")
    multiprocessing.set_start_method("fork")
    bench = Bench(options.seconds, options.pinned)
    program = build_cpp() if options.cpp else None
    bench.pin(0)
    rows = []
    for size in SIZES_BYTES:
        turns = [measure(bench, size, program) for _ in range(options.repeats)]
        rates = {name: statistics.median(turn[0][name] for turn in turns) for name in turns[0][0]}
        latencies = {name: [statistics.median(turn[1][name][k] for turn in turns) for k in (0, 1)] for name in turns[0][1]}
        ratios = {f"{ours} / {rival}": statistics.median(turn[0][ours] / turn[0][rival] for turn in turns) for (rival, ours, at) in GOALS if at == size}
        if size >= 1 << 18:
            ratios |= {
                f"{ours} / memcpy": statistics.median(turn[0][ours] / turn[0]["memcpy"] for turn in turns) for ours in ("in place, no checksum", "in place")
            }
        goals = {f"{ours} / {rival}": goal for (rival, ours, at), goal in GOALS.items() if at == size}
        rows.append(
            {
                "record_bytes": size,
                "gb_per_s": {name: round(value, 3) for name, value in rates.items()},
                "latency_us": {name: {"p50": round(p50, 2), "p99": round(p99, 2)} for name, (p50, p99) in latencies.items()},
                "ratios": {
                    name: {"median": round(value, 2), "goal": goals.get(name), "met": name in goals and value >= goals[name]} for name, value in ratios.items()
                },
            }
        )
        print(f"\n{size >> 10} KiB" + "".join(f"\n  {name:<24}{value:8.2f} GB/s" for name, value in rates.items()))
        print("\n".join(f"  {name:<24}{p50:8.2f} us, 99 %: {p99:.2f} us" for name, (p50, p99) in latencies.items()))
        print("\n".join(f"  {name:<40}{value:6.2f}  (goal {goals.get(name, 'none')})" for name, value in ratios.items()))
    memory = memory_growth(bench, 1_000_000)
    print(
        f"\nresident memory over {memory['records']} records: consumer {memory['consumer_growth_bytes']:+}, producer {memory['producer_growth_bytes']:+} bytes"
    )
    print(json.dumps({"benchmark": "ring", "cores": len(CORES), "pinned": bench.pinned, "repeats": options.repeats, "sizes": rows, "memory": memory}))


if __name__ == "__main__":
    main()
