"""A device for the tests of transport/cuda.py: the fake driver's (tests/cpp/fake_cuda.cpp), or, with AREAL_HPC_TEST_GPU=1, a real one through torch.

python -m tests.transport.devices produce NAME COUNT SEED     the writing process of test_cuda.py
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
ON_GPU = os.environ.get("AREAL_HPC_TEST_GPU") == "1"
NO_STREAM = object()
"""For `Interface`: leave the entry out."""


@functools.cache
def build_fake_driver() -> Path:
    """The fake driver, built in a kept folder; AREAL_HPC_FAKE_CUDA names one that is built already (by the process that started this one)."""
    if built := os.environ.get("AREAL_HPC_FAKE_CUDA"):
        return Path(built)
    cmake = shutil.which("cmake")
    assert cmake, "the fake driver is built with CMake, which is not on PATH (pip install cmake ninja)"
    build = ROOT / "build" / "cpp-cuda"
    options = ["-DAREAL_HPC_EXTENSION=OFF", "-DAREAL_HPC_TESTS=ON"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    for command in ([cmake, "-S", str(ROOT), "-B", str(build), *options], [cmake, "--build", str(build), "--target", "fake_cuda"]):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    return build / "libfake_cuda.so"


class Interface:
    """An array with `__cuda_array_interface__` and nothing else."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        *,
        typestr: str = "|u1",
        strides: tuple[int, ...] | None = None,
        stream: object = None,
        version: int = 3,
        read_only: bool = False,
        keep: object = None,
        **more: object,
    ) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (address, read_only), "strides": strides, "version": version, **more}
        if stream is not NO_STREAM:
            self.__cuda_array_interface__["stream"] = stream


class Gate(ABC):
    """Holds what is queued behind it in a stream."""

    @abstractmethod
    def open(self) -> None: ...


class Devices(ABC):
    """What the tests need of a device. Tensors are made before a gate is closed: making one may wait for the device."""

    is_fake: bool

    def __init__(self) -> None:
        self.gates: list[Gate] = []

    @abstractmethod
    def tensor(self, values: np.ndarray) -> Any:
        """On device 0, with these values (any dtype that torch knows), complete."""

    @abstractmethod
    def address(self, tensor: Any) -> int: ...

    @abstractmethod
    def read(self, tensor: Any) -> np.ndarray:
        """Its bytes, once all work on the device has ended."""

    @abstractmethod
    def stream(self) -> int:
        """Handle of a new stream that does not wait for the default one."""

    @abstractmethod
    def gate(self, stream: int) -> Gate: ...

    @abstractmethod
    def fill(self, tensor: Any, value: int, stream: int) -> None:
        """Queue: every byte becomes `value`. 0: the default stream."""

    @abstractmethod
    def dlpack(self, tensor: Any, stream: int) -> object:
        """The same tensor for a library whose current stream is `stream`, by DLPack."""

    def close(self) -> None:
        for gate in self.gates:
            gate.open()


class FakeTensor(Interface):
    """Without a stream: complete, nothing to wait for."""

    def __init__(self, driver: FakeDevices, address: int, values: np.ndarray) -> None:
        super().__init__(address, values.shape, typestr=values.dtype.str)
        self.driver, self.address, self.num_bytes = driver, address, values.nbytes

    def __del__(self) -> None:
        if self.address and not self.driver.closed:  # what lives longer is counted as left behind
            self.driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))


class FakeGate(Gate):
    def __init__(self, driver: FakeDevices, stream: int) -> None:
        self.driver, self.flag = driver, driver.tensor(np.zeros(1, np.uint32))
        driver.call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(self.flag.address), ctypes.c_uint32(1), ctypes.c_uint(0))

    def open(self) -> None:
        self.driver.write(self.flag, np.ones(1, np.uint32))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),  # of DLManagedTensor, which starts with the tensor
        ("deleter", ctypes.c_void_p),
    )


class FakeDlpack:
    """Exports a fake tensor by DLPack; its library's current stream is `stream`."""

    def __init__(
        self, driver: FakeDevices, address: int, shape: tuple[int, ...], *, stream: int, bits: int = 8, code: int = 1, strides: tuple[int, ...] | None = None
    ) -> None:
        self.driver, self.stream, self.device = driver, stream, (2, 0)
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.strides = (ctypes.c_int64 * max(len(shape), 1))(*strides) if strides is not None else None
        # The offset is part of the address, as it is for views in some libraries.
        self.managed = _DlTensor(
            address - 64,
            2,
            0,
            len(shape),
            code,
            bits,
            1,
            ctypes.addressof(self.shape),
            ctypes.addressof(self.strides) if self.strides else None,
            64,
            None,
            None,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None) -> object:
        self.driver.order(self.stream, stream or 1)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


class FakeDevices(Devices):
    is_fake = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.closed = False
        self.library = ctypes.CDLL(str(path))
        self.library.fake_cuda_count.restype = ctypes.c_int64
        self.library.fake_cuda_reset()
        self.call("cuInit", 0)
        self.streams: list[int] = []
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxPushCurrent_v2", self.context)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def count(self, name: str) -> int:
        value = self.library.fake_cuda_count(name.encode())
        assert value >= 0, name
        return value

    def fail_next(self, what: str, *codes: int) -> None:
        for code in codes:
            self.library.fake_cuda_fail_next(what.encode(), code)

    def tensor(self, values: np.ndarray) -> FakeTensor:
        address = ctypes.c_uint64()
        if values.nbytes > 0:  # an empty tensor has the address 0
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(values.nbytes))
        tensor = FakeTensor(self, address.value, values)
        self.write(tensor, values)
        return tensor

    def write(self, tensor: FakeTensor, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        if tensor.address:
            self.call("fake_cuda_write", ctypes.c_uint64(tensor.address), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(values.nbytes))

    def address(self, tensor: FakeTensor) -> int:
        return tensor.address

    def read(self, tensor: FakeTensor) -> np.ndarray:
        while self.count("unfinished"):
            os.sched_yield()
        values = np.empty(tensor.num_bytes, np.uint8)
        if tensor.address:
            self.call("fake_cuda_read", ctypes.c_uint64(tensor.address), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(tensor.num_bytes))
        return values

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), 1)
        assert handle.value
        self.streams.append(handle.value)
        return handle.value

    def gate(self, stream: int) -> Gate:
        self.gates.append(FakeGate(self, stream))
        return self.gates[-1]

    def fill(self, tensor: FakeTensor, value: int, stream: int) -> None:
        self.call("cuMemsetD8Async", ctypes.c_uint64(tensor.address), ctypes.c_ubyte(value), ctypes.c_size_t(tensor.num_bytes), ctypes.c_void_p(stream))

    def order(self, first: int, then: int) -> None:
        """What is queued on `then` from now on waits for what is queued on `first`."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, ctypes.c_void_p(first))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(then), event, 0)
        self.call("cuEventDestroy_v2", event)

    def dlpack(self, tensor: FakeTensor, stream: int) -> FakeDlpack:
        return FakeDlpack(self, tensor.address, (tensor.num_bytes,), stream=stream)

    def close(self) -> None:
        super().close()
        self.library.fake_cuda_reset()
        while self.count("unfinished"):
            os.sched_yield()
        for handle in self.streams:
            self.call("cuStreamDestroy_v2", ctypes.c_void_p(handle))
        self.gates.clear()
        self.closed = True
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


class TorchGate(Gate):
    """A number in pinned memory that the host sets: opening it needs nothing from the device."""

    def __init__(self, devices: TorchDevices, stream: int) -> None:
        self.flag = devices.flags.pop()
        result = devices.driver.cuStreamWaitValue32_v2(ctypes.c_void_p(stream), ctypes.c_uint64(self.flag.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(0))
        assert result == 0, f"cuStreamWaitValue32: {result}"

    def open(self) -> None:
        self.flag.numpy()[0] = 1


class TorchDlpack:
    def __init__(self, devices: TorchDevices, tensor: Any, stream: int) -> None:
        self.torch, self.tensor, self.stream = devices.torch, tensor, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> object:
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(self.stream)):
            return self.tensor.__dlpack__(stream=stream)


class TorchDevices(Devices):
    """A real GPU. Nothing may allocate, load a kernel or synchronise while a gate is closed: kernels and flags are there from the start."""

    is_fake = False

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.flags = [torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(4)]
        torch.empty(16, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        self.streams: list[Any] = []

    def tensor(self, values: np.ndarray) -> Any:
        tensor = self.torch.from_numpy(np.array(values)).cuda()
        self.torch.cuda.synchronize()
        return tensor

    def address(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def read(self, tensor: Any) -> np.ndarray:
        self.torch.cuda.synchronize()
        return tensor.cpu().reshape(-1).numpy().view(np.uint8)

    def stream(self) -> int:
        self.streams.append(self.torch.cuda.Stream())
        return self.streams[-1].cuda_stream

    def gate(self, stream: int) -> Gate:
        self.gates.append(TorchGate(self, stream))
        return self.gates[-1]

    def fill(self, tensor: Any, value: int, stream: int) -> None:
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream) if stream else self.torch.cuda.default_stream()):
            tensor.view(self.torch.uint8).fill_(value)

    def dlpack(self, tensor: Any, stream: int) -> TorchDlpack:
        return TorchDlpack(self, tensor, stream)

    def close(self) -> None:
        super().close()
        self.torch.cuda.synchronize()


def open_devices() -> Devices:
    return TorchDevices() if ON_GPU else FakeDevices(build_fake_driver())


def record_of(seed: int, ticket: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of a made-up group."""
    random = np.random.default_rng((seed, ticket))
    num_tokens = int(random.integers(1, 3000))
    return random.integers(0, 50_000, num_tokens, dtype=np.int32), random.standard_normal(num_tokens, dtype=np.float32)


def produce(name: str, count: int, seed: int) -> None:
    """Write `count` records of two device tensors each into the lane `name`."""
    from areal_hpc.transport.cuda import DeviceCopier
    from areal_hpc.transport.ring import Ring

    devices = open_devices()
    with Ring(name, 1 << 17).producer(timeout_s=30) as producer, DeviceCopier() as copier:
        copier.register(producer)
        for ticket in range(count):
            columns = record_of(seed, ticket)
            tensors = [devices.tensor(column) for column in columns]
            offsets = [0, columns[0].nbytes]
            with copier.write(producer.reserve(sum(column.nbytes for column in columns), timeout_s=30)) as slot:
                slot.copy_in(tensors, offsets)
                slot.commit(ticket=ticket, version_min=0, version_max=0, num_tokens=len(columns[0]), num_samples=1)
        del tensors
    devices.close()


if __name__ == "__main__":
    assert sys.argv[1] == "produce"
    produce(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
