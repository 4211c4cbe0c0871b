# ruff: noqa: N818
"""Types of the C++ extension (csrc/cuda_bindings.cpp). Use areal_hpc.transport.cuda, which says what each does."""

MEMORY_HOST: int
MEMORY_DEVICE: int

class CudaUnavailable(RuntimeError):
    """No driver, no device, or not the one asked for: the message says which."""

class CudaError(RuntimeError):
    """A call of the driver failed."""

    call: str
    """Its function, "cuMemHostRegister"."""
    name: str
    """The driver's name of the error, "CUDA_ERROR_OUT_OF_MEMORY"."""
    text: str
    """The driver's description of it."""

class Copy:
    """Bytes on their way; threads may share it."""

    @property
    def num_bytes(self) -> int: ...
    def ended(self) -> bool:
        """The device is done with the bytes, well or badly."""
    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in that time."""
    def failed(self) -> bool:
        """Something went wrong so far; what was queued may still be under way."""
    def check(self) -> None:
        """CudaError of a copy that failed."""

class Device:
    """One device and the side stream of its copies. One thread at a time."""

    @property
    def stream(self) -> int:
        """Handle (CUstream) of the side stream; 0 when closed."""
    def register_host(self, address: int, num_bytes: int) -> None:
        """Make whole pages of host memory known to the driver, for all devices of this process. CudaError."""
    def unregister_host(self, address: int) -> None: ...
    def pointer(self, address: int) -> tuple[int, int]:
        """(MEMORY_HOST, MEMORY_DEVICE, or 0 for memory that the driver does not know; number of its device)."""
    def copy(self, to_host: bool, pieces: list[tuple[int, int, int]], streams: list[int]) -> Copy:
        """Queue copies of (host address, device address, bytes) in the order of `streams`: behind what is queued there, before what comes later."""
    def close(self) -> None:
        """Give back stream and registrations, after waiting for every copy."""

def open_device(ordinal: int) -> Device: ...
def status() -> str:
    """ "available: 1 device, driver 13.0", or "absent: " and why."""

def describe_dlpack(capsule: object) -> tuple[int, int, list[int], list[int] | None, bool]:
    """(address, bits per element, shape, strides in elements or None for C order, read only) of an unused DLPack capsule. ValueError."""
