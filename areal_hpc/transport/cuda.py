"""CUDA tensors straight into and out of a lane: its shared memory is registered with the driver, and a side stream copies between slots and device memory.

    with DeviceCopier(device=0) as copier:                                # CudaUnavailable, with the reason, where there is no driver or no device
        copier.register(producer)                                         # once per lane and process: pins the lane's memory
        with copier.write(producer.reserve(num_bytes, timeout_s=60)) as slot:
            slot.copy_in([tokens, logprobs], [0, 4096])                   # queued: returns before a byte has moved
            slot.commit(ticket=k, version_min=3, version_max=4, num_tokens=812, num_samples=8)   # waits for the copies, then publishes

        copier.register(consumer)                                         # (in another process, as a rule)
        record = consumer.peek(timeout_s=1)
        with copier.read(record) as record:
            record.copy_out([tokens, logprobs], [0, 4096], stream=torch.cuda.current_stream().cuda_stream)
                                                                          # leaving the `with` waits for the copies, then gives the record back

`write` and `read` take the slot or record over: nothing can be published, given back or used again while the device may still touch its bytes, also when an
exception leaves the `with`. A copy that fails raises CudaError; its slot is aborted and nothing is published.

Tensors come by DLPack or, without it, by `__cuda_array_interface__`; they must be contiguous, on this copier's device, and are kept alive until their copy
ended. A copy starts after what the tensor's owner has queued so far: DLPack's producer sees to that on its current stream; version 3 of the array interface
names the stream (none: nothing to wait for); older versions mean the legacy default stream. A named stream, and `stream`, also go on only after the copy. To
reuse a DLPack tensor before `Copy.done()`, pass its `stream`.

The driver is opened at run time (AREAL_HPC_CUDA_DRIVER, else libcuda.so.1); `status()` says in one line what was found. How it works: csrc/cuda.hpp.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypedDict, cast

import numpy as np

from areal_hpc import _cuda
from areal_hpc._cuda import CudaError, CudaUnavailable
from areal_hpc.transport.ring import Record, RingConsumer, RingProducer, Slot

__all__ = ["CopierCounters", "Copy", "CudaError", "CudaUnavailable", "DeviceCopier", "DeviceRecord", "DeviceSlot", "status"]

LEGACY_DEFAULT_STREAM = 1
"""Its handle in the array interface; the driver takes 0 for the same."""

_DLPACK_CUDA, _DLPACK_CUDA_MANAGED, _DLPACK_HOST = 2, 13, (1, 3)
"""Device types of DLPack: device memory, managed memory, host memory (ordinary, pinned)."""

_SLICE_S = 0.05
"""Longest wait between two looks at signals, so that Ctrl-C works."""

_busy: set[DeviceCopier] = set()
"""Copiers with copies under way: what these copies use must not be freed, not even if the user drops everything."""


def status() -> str:
    """ "available: 1 device, driver 13.0", or "absent: " and the reason. Never raises."""
    return _cuda.status()


class CopierCounters(TypedDict):
    """Sums over the life of a copier."""

    copies_in: int
    """Copies from the device into slots that ended well."""
    copies_out: int
    """Copies from records to the device that ended well."""
    bytes_in: int
    bytes_out: int
    failures: int
    """Copies that failed, or could not be started."""
    pending: int
    """Copies not seen to end yet."""
    registered_bytes: int
    """Of lanes, now."""


class Copy:
    """One call's copies, under way on the side stream."""

    def __init__(self, copier: DeviceCopier, copy: _cuda.Copy, to_host: bool, keep: object) -> None:
        self._copier, self._copy, self._to_host = copier, copy, to_host
        self._keep: object = keep
        self._settled = self._told = False

    @property
    def num_bytes(self) -> int:
        return self._copy.num_bytes

    def done(self) -> bool:
        """Whether the bytes have arrived. Raises CudaError if the copy failed."""
        if not self._ended():
            return False
        self._check()
        return True

    def wait(self, timeout_s: float) -> None:
        """Return once the bytes have arrived. Raises TimeoutError (the copy goes on), CudaError if it failed."""
        self._copier._wait([self], timeout_s)
        self._check()

    def _ended(self) -> bool:
        """Whether the device is done with the bytes, well or badly."""
        if not self._settled and self._copy.ended():
            self._settled = True
            self._keep = None
            self._copier._settle(self)
        return self._settled

    def _check(self) -> None:
        if self._copy.failed():
            self._told = True
            self._copy.check()


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """What a copy needs to know of a tensor."""

    address: int
    num_bytes: int
    streams: tuple[int, ...]
    """In whose order the copy takes its place."""
    read_only: bool
    keep: object
    """Keeps the memory."""


class DeviceSlot:
    """A slot of a lane for bytes from the device; leaving the `with` without `commit` waits for its copies and gives the slot back unused."""

    def __init__(self, copier: DeviceCopier, slot: Slot) -> None:
        self._copier, self._slot = copier, slot
        self._copies: list[Copy] = []

    @property
    def buffer(self) -> np.ndarray:
        """Writable uint8 [num_bytes], for the bytes that the host has (a header, say); those under `copy_in` change until it is done."""
        return self._slot.buffer

    @property
    def num_bytes(self) -> int:
        return self._slot.num_bytes

    def copy_in(self, tensors: Sequence[object], offsets: Sequence[int], *, stream: int | None = None) -> Copy:
        """Queue copies of device tensors to these offsets [bytes] of the slot, in the order of `stream` if given (handle; 0: the default stream).

        Raises ValueError for a tensor that is not contiguous, in host memory, on another device, or does not fit (nothing is queued); CudaError if
        the driver refuses: the slot is aborted then. RingError after commit or abort.
        """
        try:
            copy = self._copier._start(True, self._slot.address, self.num_bytes, tensors, offsets, stream, self._slot)
            self._copies.append(copy)
            if copy._copy.failed():
                copy.wait(self._copier.timeout_s)
        except CudaError:
            self.abort()
            raise
        return copy

    def commit(self, *, ticket: int, version_min: int, version_max: int, num_tokens: int, num_samples: int, timeout_s: float | None = None) -> int:
        """Wait for the copies, then publish the record; returns its sequence number.

        Raises CudaError if a copy failed (the slot is aborted), TimeoutError if one did not end within `timeout_s` (None: the copier's); commit again.
        """
        try:
            self._copier._wait(self._copies, timeout_s)
            for copy in self._copies:
                copy._check()
        except CudaError:
            self.abort()
            raise
        return self._slot.commit(ticket=ticket, version_min=version_min, version_max=version_max, num_tokens=num_tokens, num_samples=num_samples)

    def abort(self, timeout_s: float | None = None) -> None:
        """Wait for the copies, then give the space back; TimeoutError, and the slot is kept, if one does not end."""
        self._copier._wait(self._copies, timeout_s)
        self._slot.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.abort()


class DeviceRecord:
    """A leased record with bytes for the device; leaving the `with` waits for its copies and gives the record back."""

    def __init__(self, copier: DeviceCopier, record: Record) -> None:
        self._copier, self._record = copier, record
        self._copies: list[Copy] = []
        self._given_back = self._later = False

    @property
    def buffer(self) -> np.ndarray:
        """Read-only uint8 [num_bytes]."""
        return self._record.buffer

    @property
    def num_bytes(self) -> int:
        return self._record.num_bytes

    @property
    def ticket(self) -> int:
        return self._record.ticket

    @property
    def header(self) -> bytes:
        """The other fields: `ring.RECORD_HEADER`."""
        return self._record.header

    def copy_out(self, tensors: Sequence[object], offsets: Sequence[int], *, stream: int | None = None) -> Copy:
        """Queue copies from these offsets [bytes] of the payload to device tensors, each filled whole; the stream that reads them next is `stream`.

        Raises ValueError as `DeviceSlot.copy_in` does, and for a read-only tensor; CudaError if the driver refuses (the record stays leased, the tensors
        may be half-written); RingError after release.
        """
        copy = self._copier._start(False, self._record.address, self.num_bytes, tensors, offsets, stream, self._record)
        self._copies.append(copy)
        if copy._copy.failed():
            copy.wait(self._copier.timeout_s)
        return copy

    def release(self, timeout_s: float | None = None) -> None:
        """Wait for the copies, then give the record back; nothing if it was before.

        Raises TimeoutError, and keeps the record, if a copy does not end; CudaError, after giving it back, if one failed and nothing has said so yet.
        """
        self._copier._wait(self._copies, timeout_s)
        self._give_back()
        for copy in self._copies:
            if not copy._told:
                copy._check()

    def release_later(self) -> None:
        """Give the record back when its copies have ended: at the next call of the copier that sees it (`poll`, another copy, `close`)."""
        self._later = True
        self._copier._later.append(self)
        self._copier._reap()

    def _give_back(self) -> None:
        if not self._given_back:
            self._given_back = True
            self._record.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self._later:
            self.release()


@dataclass(slots=True)
class _Lane:
    lane: RingProducer | RingConsumer
    """Held, so that its memory stays mapped."""
    address: int
    num_bytes: int


@dataclass(slots=True)
class _Sums:
    copies: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by `to_host`
    bytes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    failures: int = 0


class DeviceCopier:
    """Copies between lanes and one CUDA device on a side stream of its own. One thread at a time."""

    def __init__(self, device: int = 0, *, timeout_s: float = 60.0) -> None:
        """`device`: number among those that this process sees; `timeout_s`: longest wait for a copy where a call names none.

        Raises CudaUnavailable: no driver, no device, or not that one. Uses the thread's current CUDA context if it is of that device, else the primary one.
        """
        self._device = _cuda.open_device(device)
        self.device, self.timeout_s = device, timeout_s
        self._lanes: dict[int, _Lane] = {}
        self._pending: list[Copy] = []
        self._later: list[DeviceRecord] = []
        self._untold: list[Copy] = []
        self._sums = _Sums()
        self._closed = False

    @property
    def stream(self) -> int:
        """Handle of the side stream (CUstream)."""
        return self._device.stream

    def register(self, lane: RingProducer | RingConsumer) -> None:
        """Register the lane's memory with the driver (nothing if it is already): page-locks all of it.

        The memory stays mapped and pinned until `unregister` or `close`, also if the lane is closed before. Raises CudaError if the driver refuses.
        """
        address, num_bytes = lane.segment
        if address not in self._lanes:
            self._device.register_host(address, num_bytes)
            self._lanes[address] = _Lane(lane, address, num_bytes)

    def unregister(self, lane: RingProducer | RingConsumer) -> None:
        """Undo `register`, after waiting for all copies; nothing if it is not registered. Raises TimeoutError, CudaError."""
        address, _ = lane.segment
        if address in self._lanes:
            self._wait(self._pending, None)
            self._device.unregister_host(address)
            del self._lanes[address]

    def write(self, slot: Slot) -> DeviceSlot:
        """Take over a slot just reserved: from now on commit and abort it through what is returned. ValueError if its lane is not registered."""
        try:
            self._check_registered(slot.address, slot.num_bytes)
        except ValueError:
            slot.abort()
            raise
        return DeviceSlot(self, slot)

    def read(self, record: Record) -> DeviceRecord:
        """Take over a leased record: from now on release it through what is returned. ValueError if its lane is not registered."""
        self._check_registered(record.address, record.num_bytes)
        return DeviceRecord(self, record)

    def poll(self) -> int:
        """Note what has ended and give back the records of `release_later`; returns how many copies are under way.

        Raises the CudaError of a failed copy to a record released later, if nothing has told it yet.
        """
        self._reap()
        untold, self._untold = [copy for copy in self._untold if not copy._told], []
        for copy in untold:
            copy._check()
        return len(self._pending)

    def _reap(self) -> None:
        for copy in list(self._pending):
            copy._ended()
        finished = [record for record in self._later if all(copy._ended() for copy in record._copies)]
        self._later = [record for record in self._later if record not in finished]
        for record in finished:
            record._give_back()
            self._untold += [copy for copy in record._copies if copy._copy.failed()]

    def counters(self) -> CopierCounters:
        sums = self._sums
        return {
            "copies_in": sums.copies[True],
            "copies_out": sums.copies[False],
            "bytes_in": sums.bytes[True],
            "bytes_out": sums.bytes[False],
            "failures": sums.failures,
            "pending": len(self._pending),
            "registered_bytes": sum(lane.num_bytes for lane in self._lanes.values()),
        }

    def close(self) -> None:
        """Wait for all copies, then give back stream and registrations. Raises TimeoutError, and stays open, if a copy does not end."""
        if self._closed:
            return
        self._wait(self._pending, None)
        try:
            self.poll()
        finally:
            self._closed = True
            self._device.close()
            self._lanes.clear()

    def _check_registered(self, address: int, num_bytes: int) -> None:
        for lane in self._lanes.values():
            if lane.address <= address and address + num_bytes <= lane.address + lane.num_bytes:
                return
        raise ValueError("the lane of these bytes is not registered with this copier: call register(lane) once, before the first copy")

    def _start(
        self, to_host: bool, address: int, limit_bytes: int, tensors: Sequence[object], offsets: Sequence[int], stream: int | None, owner: object
    ) -> Copy:
        """Check everything, then queue. `owner`: slot or record of the bytes at `address`, kept while they are in use."""
        if self._closed:
            raise ValueError("the copier is closed")
        self._reap()
        self._check_registered(address, limit_bytes)
        if len(tensors) != len(offsets):
            raise ValueError(f"{len(tensors)} tensors but {len(offsets)} offsets: give one offset per tensor")
        try:
            memories = [self._memory(tensor, f"tensor {index}") for index, tensor in enumerate(tensors)]
            placed = list(zip(memories, offsets, strict=True))
            for index, (memory, offset) in enumerate(placed):
                if offset < 0 or offset + memory.num_bytes > limit_bytes:
                    what = "slot" if to_host else "record"
                    raise ValueError(f"tensor {index} of {memory.num_bytes} bytes does not fit at offset {offset} of a {what} of {limit_bytes} bytes")
                if memory.read_only and not to_host:
                    raise ValueError(f"tensor {index} is read-only: give copy_out one that may be written")
            streams = {handle for memory in memories for handle in memory.streams}
            if stream is not None:
                streams.add(stream or LEGACY_DEFAULT_STREAM)
            pieces = [(address + offset, memory.address, memory.num_bytes) for memory, offset in placed if memory.num_bytes > 0]
            copy = Copy(self, self._device.copy(to_host, pieces, sorted(streams)), to_host, (owner, memories))
        except CudaError:
            self._sums.failures += 1
            raise
        self._pending.append(copy)
        _busy.add(self)
        return copy

    def _memory(self, tensor: object, name: str) -> _DeviceMemory:
        """Where the tensor's bytes lie. ValueError for what cannot be copied, TypeError for what is no tensor."""
        if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
            memory = self._dlpack_memory(tensor, name)
        elif (interface := getattr(tensor, "__cuda_array_interface__", None)) is not None:
            memory = _interface_memory(tensor, cast("dict[str, Any]", interface), name)
        else:
            raise TypeError(f"{name} is a {type(tensor).__name__}, which offers neither __dlpack__ nor __cuda_array_interface__")
        if memory.num_bytes > 0:
            kind, ordinal = self._device.pointer(memory.address)
            if kind != _cuda.MEMORY_DEVICE:
                raise ValueError(f"{name} is not in device memory that this process's driver knows: {'pinned host memory' if kind else 'unknown address'}")
            self._check_device(ordinal, name)
        return memory

    def _dlpack_memory(self, tensor: Any, name: str) -> _DeviceMemory:
        kind, ordinal = tensor.__dlpack_device__()
        if int(kind) in _DLPACK_HOST:
            raise ValueError(f"{name} is in host memory: write it into `buffer`, no device is needed")
        if int(kind) not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            raise ValueError(f"{name} is on a device of DLPack type {int(kind)}, not on a CUDA device (type {_DLPACK_CUDA})")
        if int(kind) == _DLPACK_CUDA:
            self._check_device(int(ordinal), name)
        try:
            capsule = tensor.__dlpack__(stream=self.stream)  # makes our stream wait for what is queued on the tensor's
        except BufferError as error:
            raise ValueError(f"{name} cannot be lent: {error}") from error
        address, bits, shape, strides, read_only = _cuda.describe_dlpack(capsule)
        _check_contiguous(shape, strides, 1, name)
        return _DeviceMemory(address, (math.prod(shape) * bits + 7) // 8, (), read_only, (tensor, capsule))

    def _check_device(self, ordinal: int, name: str) -> None:
        if ordinal != self.device:
            raise ValueError(f"{name} is on device {ordinal}, this copier on device {self.device}: use a DeviceCopier({ordinal}) for it")

    def _wait(self, copies: Iterable[Copy], timeout_s: float | None) -> None:
        """Until each has ended, well or badly; TimeoutError after `timeout_s` (None: the copier's)."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        for copy in list(copies):
            while not copy._ended():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError(
                        f"waited {limit_s:g} s for a copy of {copy.num_bytes} bytes {'from' if copy._to_host else 'to'} device {self.device}: "
                        f"it goes on, and keeps its {'slot' if copy._to_host else 'record'}"
                    )
                copy._copy.wait(min(remaining_s, _SLICE_S))

    def _settle(self, copy: Copy) -> None:
        """The copy has ended."""
        self._pending.remove(copy)
        if not self._pending:
            _busy.discard(self)
        if copy._copy.failed():
            self._sums.failures += 1
        else:
            self._sums.copies[copy._to_host] += 1
            self._sums.bytes[copy._to_host] += copy.num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _interface_memory(tensor: object, interface: dict[str, Any], name: str) -> _DeviceMemory:
    """Of a `__cuda_array_interface__`, versions 0 to 3."""
    if interface.get("mask") is not None:
        raise ValueError(f"{name} has a mask: copy values and mask as two tensors")
    shape = [int(length) for length in interface["shape"]]
    item_bytes = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    _check_contiguous(shape, strides, item_bytes, name)
    address, read_only = interface["data"]
    streams: tuple[int, ...] = (LEGACY_DEFAULT_STREAM,)
    if interface["version"] >= 3:
        stream = interface.get("stream")
        if stream == 0:
            raise ValueError(f"{name} names stream 0, which __cuda_array_interface__ forbids: 1 is the legacy default stream, 2 the one per thread")
        streams = () if stream is None else (int(stream),)
    return _DeviceMemory(int(address), math.prod(shape) * item_bytes, streams, bool(read_only), tensor)


def _check_contiguous(shape: Sequence[int], strides: Sequence[int] | None, unit: int, name: str) -> None:
    """C order without gaps; strides in `unit` per element."""
    if strides is None or 0 in shape:
        return
    expected = unit
    for length, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if length != 1:
            if stride != expected:
                raise ValueError(f"{name} of shape {tuple(shape)} is not contiguous: make it so first (tensor.contiguous())")
            expected *= length
