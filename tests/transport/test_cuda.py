"""Copies between lanes and a device, on the fake driver; with AREAL_HPC_TEST_GPU=1 (tests/gpu/run.py) on a real one.

What must wait is tested with a gate: work that holds a stream until the test opens it, so no test depends on how fast anything is.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_hpc.transport import cuda
from areal_hpc.transport.cuda import CudaError, CudaUnavailable, DeviceCopier
from areal_hpc.transport.ring import Ring, RingConsumer, RingError, RingProducer
from tests.transport.devices import NO_STREAM, ON_GPU, ROOT, Devices, FakeDevices, FakeDlpack, Interface, build_fake_driver, open_devices, record_of

CAPACITY = 1 << 16
FIELDS = {"version_min": 0, "version_max": 0, "num_tokens": 1, "num_samples": 1}
ALIVE = ("live_streams", "live_events", "live_allocations", "registered_ranges", "retained_contexts")
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700


@pytest.fixture(scope="module", autouse=True)
def driver() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("AREAL_HPC_CUDA_DRIVER", str(build_fake_driver()))
            patch.setenv("AREAL_HPC_FAKE_CUDA", str(build_fake_driver()))
        yield


@pytest.fixture
def gpu() -> Iterator[Devices]:
    """The device; on the fake one, whatever a test leaves behind fails it."""
    devices = open_devices()
    yield devices
    gc.collect()  # tracebacks that pytest.raises keeps
    devices.close()
    if isinstance(devices, FakeDevices):
        assert {name: devices.count(name) for name in ALIVE} == dict.fromkeys(ALIVE, 0)


@pytest.fixture
def fake(gpu: Devices) -> FakeDevices:
    if not isinstance(gpu, FakeDevices):
        pytest.skip("needs a driver that fails on demand")
    return gpu


Lane = tuple[RingConsumer, RingProducer]


@pytest.fixture
def lane() -> Iterator[Lane]:
    ring = Ring(f"test-cuda-{os.getpid()}-{uuid.uuid4().hex[:12]}", CAPACITY)
    consumer = ring.consumer()
    producer = ring.producer(timeout_s=0)
    consumer.unlink()
    with consumer, producer:
        yield consumer, producer


@pytest.fixture
def copier(gpu: Devices, lane: Lane) -> Iterator[DeviceCopier]:
    copier = DeviceCopier(timeout_s=60)
    for end in lane:
        copier.register(end)
    yield copier
    for gate in gpu.gates:
        gate.open()
    if isinstance(gpu, FakeDevices):
        gpu.library.fake_cuda_reset()
    copier.timeout_s = 60
    copier.close()


def values(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def received(consumer: RingConsumer) -> bytes:
    record = consumer.peek()
    assert record is not None
    with record:
        return bytes(record.buffer)


def test_status_is_one_line(gpu: Devices) -> None:
    text = cuda.status()
    assert text.startswith("available: ") and "\n" not in text
    if gpu.is_fake:
        assert text == "available: 1 device, driver 13.0"


def test_bytes_arrive_through_two_processes(gpu: Devices) -> None:
    """Device -> lane in one process, lane -> device in the other; more records than the lane holds."""
    count, seed = 40, 7
    ring = Ring(f"test-cuda-{os.getpid()}-{uuid.uuid4().hex[:12]}", 1 << 17)
    with ring.consumer() as consumer, DeviceCopier(timeout_s=60) as copier:
        copier.register(consumer)
        command = [sys.executable, "-m", "tests.transport.devices", "produce", ring.name, str(count), str(seed)]
        child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            consumer.wait_for_producer(timeout_s=60)
            consumer.unlink()
            for ticket in range(count):
                leased = consumer.peek(timeout_s=60)
                assert leased is not None and leased.ticket == ticket
                columns = record_of(seed, ticket)
                assert leased.num_bytes == sum(column.nbytes for column in columns)
                targets = [gpu.tensor(np.zeros_like(column)) for column in columns]
                with copier.read(leased) as record:
                    record.copy_out(targets, [0, columns[0].nbytes])
                assert leased.released
                for target, column in zip(targets, columns, strict=True):
                    np.testing.assert_array_equal(gpu.read(target), column.view(np.uint8))
            _, errors = child.communicate(timeout=60)
            assert child.returncode == 0, errors
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        assert copier.counters()["copies_out"] == count and copier.counters()["failures"] == 0


def test_nothing_is_published_before_the_copy_ended(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    data = values(5000)
    tensor = gpu.tensor(data)
    gate = gpu.gate(copier.stream)
    with copier.write(producer.reserve(5000, timeout_s=0)) as slot:
        copy = slot.copy_in([tensor], [0])
        assert not copy.done() and copier.poll() == 1
        with pytest.raises(TimeoutError, match="a copy of 5000 bytes from device 0"):
            copy.wait(0)
        with pytest.raises(TimeoutError):
            slot.commit(ticket=1, timeout_s=0, **FIELDS)
        assert consumer.peek() is None
        gate.open()
        assert slot.commit(ticket=1, **FIELDS) == 0
    assert copy.done() and copier.poll() == 0
    assert received(consumer) == data.tobytes()


def test_half_a_copy_is_no_copy(fake: FakeDevices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    data = values(4096) | 1
    tensor = fake.tensor(data)
    fake.library.fake_cuda_hold(1)
    slot = copier.write(producer.reserve(4096, timeout_s=0))
    slot.buffer[:] = 0
    copy = slot.copy_in([tensor], [0])
    while not slot.buffer[2047]:  # the device is at work in the slot
        os.sched_yield()
    assert not slot.buffer[2048:].any() and not copy.done()
    with pytest.raises(TimeoutError):
        slot.commit(ticket=1, timeout_s=0, **FIELDS)
    assert consumer.peek() is None
    fake.library.fake_cuda_hold(0)
    slot.commit(ticket=1, **FIELDS)
    assert received(consumer) == data.tobytes()


def test_the_slot_stays_taken_while_the_device_may_write(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    """Neither leaving the `with` nor dropping everything gives its bytes to the next record."""
    _, producer = lane
    tensor = gpu.tensor(values(1000))
    gate = gpu.gate(copier.stream)
    copier.timeout_s = 0
    with pytest.raises(TimeoutError), copier.write(producer.reserve(1000, timeout_s=0)) as slot:
        slot.copy_in([tensor], [0])
    del slot, tensor
    gc.collect()
    with pytest.raises((RuntimeError, ValueError), match="neither committed nor aborted"):
        producer.try_reserve(10)
    gate.open()
    while copier.poll():
        os.sched_yield()
    gc.collect()
    with producer.reserve(10, timeout_s=0):
        pass


def test_a_dropped_copier_keeps_what_its_copies_use(gpu: Devices, lane: Lane) -> None:
    _, producer = lane
    copier = DeviceCopier()
    copier.register(producer)
    tensor = gpu.tensor(values(1000))
    gate = gpu.gate(copier.stream)
    copier.write(producer.reserve(1000, timeout_s=0)).copy_in([tensor], [0])
    del copier, tensor
    gc.collect()
    with pytest.raises((RuntimeError, ValueError), match="neither committed nor aborted"):
        producer.try_reserve(10)
    gate.open()
    (left,) = cuda._busy
    left.close()
    del left
    gc.collect()
    with producer.reserve(10, timeout_s=0):
        pass


def test_leaving_without_commit_publishes_nothing(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    with copier.write(producer.reserve(100, timeout_s=0)) as slot:
        slot.copy_in([gpu.tensor(values(100))], [0])
    assert consumer.peek() is None and copier.poll() == 0
    producer.push(b"next", ticket=1, timeout_s=0)
    assert received(consumer) == b"next"


def test_a_record_stays_leased_while_the_device_reads(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    data = values(3000)
    producer.push(data, ticket=1, timeout_s=0)
    target = gpu.tensor(np.zeros(3000, np.uint8))
    gate = gpu.gate(copier.stream)
    leased = consumer.peek()
    assert leased is not None
    with copier.read(leased) as record:
        copy = record.copy_out([target], [0])
        with pytest.raises(TimeoutError, match="keeps its record"):
            record.release(timeout_s=0)
        assert not leased.released and consumer.num_leased == 1 and not copy.done()
        gate.open()
    assert leased.released and copy.done()
    np.testing.assert_array_equal(gpu.read(target), data)


def test_release_later(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    data = values(2000)
    targets = [gpu.tensor(np.zeros(2000, np.uint8)) for _ in range(3)]
    gate = gpu.gate(copier.stream)
    for ticket, target in enumerate(targets):
        producer.push(data + ticket, ticket=ticket, timeout_s=0)
        leased = consumer.peek()
        assert leased is not None
        with copier.read(leased) as record:
            record.copy_out([target], [0])
            record.release_later()
        del leased, record
    gc.collect()
    assert consumer.num_leased == 3 and copier.poll() == 3
    gate.open()
    while copier.poll():
        os.sched_yield()
    assert consumer.num_leased == 0
    for ticket, target in enumerate(targets):
        np.testing.assert_array_equal(gpu.read(target), data + ticket)


@pytest.mark.parametrize("how", ["interface", "argument", "dlpack", "interface of version 2"])
def test_a_copy_waits_for_the_streams_work(gpu: Devices, lane: Lane, copier: DeviceCopier, how: str) -> None:
    """The tensor is being filled on its owner's stream when copy_in is called."""
    consumer, producer = lane
    tensor = gpu.tensor(np.zeros(1000, np.uint8))
    stream = 0 if how.endswith("2") else gpu.stream()
    gate = gpu.gate(stream)
    gpu.fill(tensor, 7, stream)
    address = gpu.address(tensor)
    slot = copier.write(producer.reserve(1000, timeout_s=0))
    if how == "interface":
        slot.copy_in([Interface(address, (1000,), stream=stream, keep=tensor)], [0])
    elif how == "argument":
        slot.copy_in([Interface(address, (1000,), stream=NO_STREAM, keep=tensor)], [0], stream=stream)
    elif how == "dlpack":
        slot.copy_in([gpu.dlpack(tensor, stream)], [0])
    else:
        slot.copy_in([Interface(address, (1000,), stream=NO_STREAM, version=2, keep=tensor)], [0])
    with pytest.raises(TimeoutError):
        slot.commit(ticket=1, timeout_s=0, **FIELDS)
    gate.open()
    slot.commit(ticket=1, **FIELDS)
    assert received(consumer) == b"\7" * 1000


@pytest.mark.parametrize("how", ["interface", "argument"])
def test_the_stream_waits_for_the_copy(gpu: Devices, lane: Lane, copier: DeviceCopier, how: str) -> None:
    """The owner overwrites the tensor right after copy_in; the reader overwrites it right after copy_out."""
    consumer, producer = lane
    data = values(1000) | 1
    tensor, target = gpu.tensor(data), gpu.tensor(np.zeros(1000, np.uint8))
    stream = gpu.stream()

    def lent(what: Any) -> Interface:
        return Interface(gpu.address(what), (1000,), stream=stream if how == "interface" else None, keep=what)

    argument = stream if how == "argument" else None
    gate = gpu.gate(copier.stream)
    slot = copier.write(producer.reserve(1000, timeout_s=0))
    slot.copy_in([lent(tensor)], [0], stream=argument)
    gpu.fill(tensor, 0, stream)
    gate.open()
    slot.commit(ticket=1, **FIELDS)
    record = consumer.peek()
    assert record is not None
    assert bytes(record.buffer) == data.tobytes()
    assert not gpu.read(tensor).any()

    gate = gpu.gate(copier.stream)
    with copier.read(record) as leased:
        leased.copy_out([lent(target)], [0], stream=argument)
        gpu.fill(target, 9, stream)
        gate.open()
    assert (gpu.read(target) == 9).all()


def test_a_copy_goes_on_without_the_gil(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    _, producer = lane
    tensor = gpu.tensor(values(100))
    gate = gpu.gate(copier.stream)
    slot = copier.write(producer.reserve(100, timeout_s=0))
    copy = slot.copy_in([tensor], [0])
    waiting = threading.Event()

    def open_gate() -> None:
        waiting.wait()
        gate.open()

    opener = threading.Thread(target=open_gate)
    opener.start()
    waiting.set()
    assert copy._copy.wait(30)  # one call into the extension: the gate opens only if the other thread can run
    opener.join()
    slot.abort()


TYPES = ["uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
Case = tuple[int, list[tuple[np.ndarray, int]], list[tuple[int, int]]]


@st.composite
def copies(draw: st.DrawFn) -> Case:
    """Bytes of a record, (array, offset) of each copy in, (bytes, offset) of each copy out."""
    num_bytes = draw(st.integers(1, 8000))
    inward: list[tuple[np.ndarray, int]] = []
    for index in range(draw(st.integers(0, 4))):
        dtype = np.dtype(draw(st.sampled_from(TYPES)))
        length = draw(st.integers(0, num_bytes // dtype.itemsize))
        array = values(length * dtype.itemsize, seed=index)
        array = ((array & 1).view(dtype) if dtype.kind == "b" else array.view(dtype)).reshape((length // 2, 2) if length % 2 == 0 else (length, 1))
        inward.append((array, draw(st.integers(0, num_bytes - array.nbytes))))
    sizes = draw(st.lists(st.integers(0, num_bytes), max_size=3))
    return num_bytes, inward, [(size, draw(st.integers(0, num_bytes - size))) for size in sizes]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=copies())
def test_any_sizes_and_offsets(gpu: Devices, lane: Lane, copier: DeviceCopier, case: Case) -> None:
    """Tensors land in the slot as slices assigned in order; parts of a record land in tensors."""
    consumer, producer = lane
    num_bytes, inward, outward = case
    expected = values(num_bytes, seed=num_bytes)
    with copier.write(producer.reserve(num_bytes, timeout_s=0)) as slot:
        slot.buffer[:] = expected
        slot.copy_in([gpu.tensor(array) for array, _ in inward], [offset for _, offset in inward])
        slot.commit(ticket=1, **FIELDS)
    for array, offset in inward:
        expected[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    record = consumer.peek()
    assert record is not None
    targets = [gpu.tensor(np.zeros(size, np.uint8)) for size, _ in outward]
    with copier.read(record) as leased:
        np.testing.assert_array_equal(leased.buffer, expected)
        leased.copy_out(targets, [offset for _, offset in outward]).wait(60)
    for target, (size, offset) in zip(targets, outward, strict=True):
        np.testing.assert_array_equal(gpu.read(target), expected[offset : offset + size])


def test_counters(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    tensor = gpu.tensor(values(300))
    with copier.write(producer.reserve(600, timeout_s=0)) as slot:
        slot.copy_in([tensor, tensor], [0, 300])
        slot.commit(ticket=1, **FIELDS)
    leased = consumer.peek()
    assert leased is not None
    with copier.read(leased) as record:
        record.copy_out([tensor], [200])
    assert copier.counters() == {
        "copies_in": 1,
        "copies_out": 1,
        "bytes_in": 600,
        "bytes_out": 300,
        "failures": 0,
        "pending": 0,
        "registered_bytes": sum(end.segment[1] for end in lane),
    }


# What a user can do wrong. Nothing is queued, nothing published.


@pytest.mark.parametrize(
    ("tensor", "offset", "error", "message"),
    [
        (lambda gpu, t: Interface(gpu.address(t), (50, 10), strides=(20, 1), keep=t), 0, ValueError, r"tensor 0 of shape \(50, 10\) is not contiguous"),
        (lambda gpu, t: Interface(gpu.address(t), (10, 10), strides=(1, 10), keep=t), 0, ValueError, "is not contiguous: make it so first"),
        (lambda gpu, t: t, 25, ValueError, "tensor 0 of 1000 bytes does not fit at offset 25 of a slot of 1024 bytes"),
        (lambda gpu, t: t, -1, ValueError, "does not fit at offset -1"),
        (lambda gpu, t: np.zeros(10, np.uint8), 0, ValueError, "tensor 0 is in host memory: write it into `buffer`"),
        (lambda gpu, t: Interface(np.zeros(10, np.uint8).ctypes.data, (10,)), 0, ValueError, "not in device memory.*unknown address"),
        (lambda gpu, t: b"bytes", 0, TypeError, "is a bytes, which offers neither"),
        (lambda gpu, t: Interface(gpu.address(t), (10,), stream=0, keep=t), 0, ValueError, "names stream 0, which"),
        (lambda gpu, t: Interface(gpu.address(t), (10,), mask=t, keep=t), 0, ValueError, "has a mask"),
    ],
)
def test_tensors_refused(
    gpu: Devices, lane: Lane, copier: DeviceCopier, tensor: Callable[[Devices, Any], object], offset: int, error: type[Exception], message: str
) -> None:
    consumer, producer = lane
    bad = tensor(gpu, gpu.tensor(values(1000)))
    with pytest.raises(error, match=message), copier.write(producer.reserve(1024, timeout_s=0)) as slot:
        slot.copy_in([bad], [offset])
    assert copier.counters()["pending"] == 0 and copier.counters()["failures"] == 0
    assert consumer.peek() is None
    producer.push(b"next", ticket=1, timeout_s=0)


def test_offsets_and_tensors_must_pair_up(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    _, producer = lane
    with pytest.raises(ValueError, match="1 tensors but 2 offsets"), copier.write(producer.reserve(100, timeout_s=0)) as slot:
        slot.copy_in([gpu.tensor(values(10))], [0, 10])


def test_pinned_host_memory_is_refused(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    _, producer = lane
    with pytest.raises(ValueError, match="pinned host memory"), copier.write(producer.reserve(100, timeout_s=0)) as slot:
        slot.copy_in([Interface(producer.segment[0], (10,))], [0])


def test_a_read_only_tensor_takes_no_record(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    producer.push(values(100), ticket=1, timeout_s=0)
    tensor = gpu.tensor(values(100))
    leased = consumer.peek()
    assert leased is not None
    with pytest.raises(ValueError, match="tensor 0 is read-only"), copier.read(leased) as record:
        record.copy_out([Interface(gpu.address(tensor), (100,), read_only=True)], [0])
    assert leased.released


def test_dlpack_of_every_shape(fake: FakeDevices, lane: Lane, copier: DeviceCopier) -> None:
    """bfloat16 by its bits, strides of length-1 dimensions ignored, other devices and other strides refused, host memory told apart."""
    consumer, producer = lane
    data = values(24)
    tensor, stream = fake.tensor(data), fake.stream()

    def lent(shape: tuple[int, ...], **more: Any) -> FakeDlpack:
        return FakeDlpack(fake, tensor.address, shape, stream=stream, **more)

    with copier.write(producer.reserve(24 + 12 + 24, timeout_s=0)) as slot:
        slot.copy_in([lent((3, 1, 4), bits=16, code=4, strides=(4, 99, 1)), lent((12,)), lent((24,), strides=(1,)), lent((0,))], [0, 24, 36, 5])
        slot.commit(ticket=1, **FIELDS)
    assert received(consumer) == data.tobytes() + data[:12].tobytes() + data.tobytes()

    slot = copier.write(producer.reserve(100, timeout_s=0))
    with pytest.raises(ValueError, match="not contiguous"):
        slot.copy_in([lent((2, 3), strides=(1, 2))], [0])
    for device, message in [((1, 0), "in host memory"), ((3, 0), "in host memory"), ((10, 0), "DLPack type 10"), ((2, 1), r"use a DeviceCopier\(1\)")]:
        other = lent((12,))
        other.device = device
        with pytest.raises(ValueError, match=message):
            slot.copy_in([other], [0])
    scalar = lent(())
    slot.copy_in([scalar], [99])
    slot.abort()


def test_a_tensor_of_another_device(fake: FakeDevices, lane: Lane, copier: DeviceCopier) -> None:
    _, producer = lane
    fake.library.fake_cuda_set_devices(2)
    context = ctypes.c_void_p()
    fake.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1)
    fake.call("cuCtxPushCurrent_v2", context)
    tensor = fake.tensor(values(10))
    fake.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    slot = copier.write(producer.reserve(100, timeout_s=0))
    with pytest.raises(ValueError, match=r"tensor 0 is on device 1, this copier on device 0: use a DeviceCopier\(1\)"):
        slot.copy_in([tensor], [0])
    slot.abort()
    with DeviceCopier(1) as other:
        other.register(producer)
        with other.write(producer.reserve(10, timeout_s=0)) as slot:
            slot.copy_in([tensor], [0])
            slot.commit(ticket=1, **FIELDS)
    assert received(lane[0]) == values(10).tobytes()
    fake.call("cuDevicePrimaryCtxRelease_v2", 1)


def test_a_lane_must_be_registered(gpu: Devices, lane: Lane) -> None:
    consumer, producer = lane
    with DeviceCopier() as copier:
        copier.register(consumer)
        with pytest.raises(ValueError, match=r"call register\(lane\)"):
            copier.write(producer.reserve(100, timeout_s=0))
        producer.push(values(100), ticket=1, timeout_s=0)
        leased = consumer.peek()
        assert leased is not None
        copier.unregister(consumer)
        with pytest.raises(ValueError, match=r"call register\(lane\)"):
            copier.read(leased)
        leased.release()


def test_committed_slots_and_released_records_are_refused(gpu: Devices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    tensor = gpu.tensor(values(10))
    with copier.write(producer.reserve(100, timeout_s=0)) as slot:
        slot.commit(ticket=1, **FIELDS)
    with pytest.raises(RingError, match="committed or aborted"):
        slot.copy_in([tensor], [0])
    with pytest.raises(RingError, match="committed or aborted"):
        slot.commit(ticket=1, **FIELDS)
    leased = consumer.peek()
    assert leased is not None
    with copier.read(leased) as record:
        pass
    with pytest.raises(RingError, match="released"):
        record.copy_out([tensor], [0])
    with pytest.raises(RingError, match="released"):
        copier.read(leased)
    assert copier.counters()["pending"] == 0


def test_a_closed_copier_copies_nothing(gpu: Devices, lane: Lane) -> None:
    _, producer = lane
    copier = DeviceCopier()
    copier.register(producer)
    slot = copier.write(producer.reserve(100, timeout_s=0))
    copier.close()
    copier.close()
    with pytest.raises(ValueError, match="the copier is closed"):
        slot.copy_in([gpu.tensor(values(10))], [0])
    slot.abort()


def test_closing_waits(gpu: Devices, lane: Lane) -> None:
    _, producer = lane
    tensor = gpu.tensor(values(100))
    copier = DeviceCopier(timeout_s=0)
    copier.register(producer)
    gate = gpu.gate(copier.stream)
    slot = copier.write(producer.reserve(100, timeout_s=0))
    copy = slot.copy_in([tensor], [0])
    with pytest.raises(TimeoutError):
        copier.close()
    assert copier.counters()["registered_bytes"] > 0
    gate.open()
    copier.timeout_s = 60
    copier.close()
    assert copy.done() and copier.counters()["registered_bytes"] == 0
    slot.abort()


# What the driver can do wrong.


@pytest.mark.parametrize(
    ("call", "codes"), [("cuMemcpyDtoHAsync", (2,)), ("cuMemcpyDtoHAsync", (0, 0, 2)), ("cuEventCreate", (2,)), ("cuEventRecord", (2,)), ("cuEventQuery", (2,))]
)
def test_a_failing_copy_publishes_nothing(fake: FakeDevices, lane: Lane, copier: DeviceCopier, call: str, codes: tuple[int, ...]) -> None:
    consumer, producer = lane
    tensors = [fake.tensor(values(100)) for _ in range(3)]
    with copier.write(producer.reserve(300, timeout_s=0)) as slot:
        fake.fail_next(call, *codes)
        with pytest.raises(CudaError, match=rf"^{call}: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)$") as caught:  # noqa: PT012 (one of the two)
            slot.copy_in(tensors, [0, 100, 200])
            slot.commit(ticket=1, **FIELDS)
        assert (caught.value.call, caught.value.name, caught.value.text) == (call, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        with pytest.raises((CudaError, RingError)):
            slot.commit(ticket=1, **FIELDS)
    assert consumer.peek() is None
    counters = copier.counters()
    assert (counters["failures"], counters["copies_in"], counters["pending"]) == (1, 0, 0)
    with copier.write(producer.reserve(100, timeout_s=0)) as slot:  # the next one goes well
        slot.copy_in(tensors[:1], [0])
        slot.commit(ticket=2, **FIELDS)
    assert received(consumer) == values(100).tobytes()


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_what_was_queued_before_a_failure_still_holds_the_slot(fake: FakeDevices, lane: Lane, copier: DeviceCopier, call: str) -> None:
    """The first of two copies is under way when the driver refuses the rest: the slot is given back only after it."""
    consumer, producer = lane
    tensors = [fake.tensor(values(100)) for _ in range(2)]
    stream = fake.stream()
    gate = fake.gate(copier.stream)
    # Before the copies, one event is recorded on `stream` and waited for.
    fake.fail_next(call, *{"cuMemcpyDtoHAsync": (0, 2), "cuEventRecord": (0, 2), "cuStreamWaitEvent": (0, 2)}[call])
    copier.timeout_s = 0
    slot = copier.write(producer.reserve(300, timeout_s=0))
    with pytest.raises(TimeoutError):
        slot.copy_in(tensors, [0, 100], stream=stream)
    with pytest.raises((RuntimeError, ValueError), match="neither committed nor aborted"):
        producer.try_reserve(10)
    gate.open()
    copier.timeout_s = 60
    with pytest.raises(CudaError, match=call):
        slot.commit(ticket=1, **FIELDS)
    assert consumer.peek() is None and copier.counters()["failures"] == 1
    producer.push(b"next", ticket=1, timeout_s=0)


def test_an_error_while_the_device_copies_is_told_at_commit(fake: FakeDevices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    tensor = fake.tensor(values(100))
    gate = fake.gate(copier.stream)
    with copier.write(producer.reserve(100, timeout_s=0)) as slot:
        fake.fail_next("async", ILLEGAL_ADDRESS)
        slot.copy_in([tensor], [0])
        gate.open()
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            slot.commit(ticket=1, **FIELDS)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"), copier.write(producer.reserve(100, timeout_s=0)) as slot:
        slot.copy_in([tensor], [0])  # it sticks to the context
    assert consumer.peek() is None and copier.counters()["failures"] == 2
    fake.library.fake_cuda_reset()


def test_a_failing_copy_out_is_told_and_the_record_given_back(fake: FakeDevices, lane: Lane, copier: DeviceCopier) -> None:
    consumer, producer = lane
    target = fake.tensor(np.zeros(100, np.uint8))
    for ticket in range(4):
        producer.push(values(100), ticket=ticket, timeout_s=0)

    def lease() -> Any:
        record = consumer.peek()
        assert record is not None
        return record

    fake.fail_next("cuMemcpyHtoDAsync", INVALID_VALUE)
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync"), copier.read(lease()) as record:
        record.copy_out([target], [0])
    fake.fail_next("cuEventQuery", INVALID_VALUE)
    with pytest.raises(CudaError, match="cuEventQuery"), copier.read(lease()) as record:  # nobody asks the copy: leaving tells
        record.copy_out([target], [0])
    fake.fail_next("cuEventQuery", INVALID_VALUE)
    with copier.read(lease()) as record:
        copy = record.copy_out([target], [0])
        with pytest.raises(CudaError, match="cuEventQuery"):
            copy.wait(60)
    fake.fail_next("cuEventQuery", INVALID_VALUE)
    with copier.read(lease()) as record:
        record.copy_out([target], [0])
        record.release_later()
    with pytest.raises(CudaError, match="cuEventQuery"):
        copier.poll()
    assert copier.poll() == 0
    assert consumer.num_leased == 0 and copier.counters()["failures"] == 4


def test_a_failing_registration(fake: FakeDevices, lane: Lane) -> None:
    _, producer = lane
    with DeviceCopier() as copier:
        fake.fail_next("cuMemHostRegister", OUT_OF_MEMORY)
        with pytest.raises(CudaError, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
            copier.register(producer)
        assert copier.counters()["registered_bytes"] == 0
        copier.register(producer)
        copier.register(producer)
        assert fake.count("registered_ranges") == 1 and fake.count("registered_bytes") == producer.segment[1]


def test_copiers_share_a_registration(fake: FakeDevices, lane: Lane) -> None:
    _, producer = lane
    with DeviceCopier() as outer:
        outer.register(producer)
        with DeviceCopier() as inner:
            inner.register(producer)
            assert fake.count("registered_ranges") == 1
        assert fake.count("registered_ranges") == 1
        outer.unregister(producer)
        assert fake.count("registered_ranges") == 0


def test_memory_that_others_registered_is_theirs_to_unregister(fake: FakeDevices, lane: Lane) -> None:
    consumer, producer = lane
    address, num_bytes = producer.segment
    fake.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), 0)
    with DeviceCopier() as copier:
        copier.register(producer)
        with copier.write(producer.reserve(10, timeout_s=0)) as slot:
            slot.copy_in([fake.tensor(values(10))], [0])
            slot.commit(ticket=1, **FIELDS)
    assert received(consumer) == values(10).tobytes()
    assert fake.count("registered_ranges") == 1
    fake.call("cuMemHostUnregister", ctypes.c_void_p(address))


def test_without_a_current_context_the_primary_one_is_held(fake: FakeDevices, lane: Lane) -> None:
    _, producer = lane
    popped, current = ctypes.c_void_p(), ctypes.c_void_p()
    fake.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
    with DeviceCopier() as copier:
        assert fake.count("retained_contexts") == 2
        copier.register(producer)
        fake.call("cuCtxGetCurrent", ctypes.byref(current))
        assert current.value is None  # the thread is left as it was
    del copier
    gc.collect()
    assert fake.count("retained_contexts") == 1
    fake.call("cuCtxPushCurrent_v2", popped)
    with DeviceCopier():
        assert fake.count("retained_contexts") == 1


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuDevicePrimaryCtxRetain"])
def test_a_copier_that_cannot_be_made_leaves_nothing(fake: FakeDevices, call: str) -> None:
    popped = ctypes.c_void_p()
    fake.call("cuCtxPopCurrent_v2", ctypes.byref(popped))
    fake.fail_next(call, OUT_OF_MEMORY)
    with pytest.raises(CudaError, match=call):
        DeviceCopier()
    fake.call("cuCtxPushCurrent_v2", popped)


@pytest.mark.parametrize(
    ("library", "reason"),
    [("/nowhere/libcuda.so", "/nowhere/libcuda.so: cannot open shared object file"), ("libc.so.6", "libc.so.6 has no function cuInit")],
)
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, library: str, reason: str) -> None:
    monkeypatch.setenv("AREAL_HPC_CUDA_DRIVER", library)
    assert cuda.status().startswith(f"absent: {reason}") and "\n" not in cuda.status()
    with pytest.raises(CudaUnavailable, match=reason):
        DeviceCopier()


def test_a_driver_without_devices(fake: FakeDevices) -> None:
    fake.library.fake_cuda_set_devices(0)
    assert cuda.status() == "absent: cuInit: CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)"
    with pytest.raises(CudaUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        DeviceCopier()


def test_a_device_that_does_not_exist(gpu: Devices) -> None:
    with pytest.raises(CudaUnavailable, match="device 99 does not exist"):
        DeviceCopier(99)


def test_the_fake_devices_memory_is_not_the_hosts(fake: FakeDevices) -> None:
    """A read of a fake device address on the CPU kills the process: code under test that does it would not pass unnoticed."""
    code = (
        "import ctypes, numpy as np; from tests.transport.devices import open_devices; d = open_devices(); t = d.tensor(np.ones(8, np.uint8)); "
        "assert d.read(t).all(); print('alive', flush=True); ctypes.string_at(t.address, 1)"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.stdout == "alive\n" and child.returncode == -signal.SIGSEGV
