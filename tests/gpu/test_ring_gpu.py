"""Lanes and torch tensors on a real GPU. tests/gpu/run.py runs these beside tests/transport/test_cuda.py, which it runs on the device too.

Not run on a GPU so far.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import torch

from areal_hpc.transport import cuda
from areal_hpc.transport.cuda import DeviceCopier
from areal_hpc.transport.ring import Ring, RingConsumer, RingProducer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that torch can use")

Lane = tuple[RingConsumer, RingProducer]
FIELDS = {"version_min": 0, "version_max": 0, "num_tokens": 1, "num_samples": 1}


@pytest.fixture
def lane() -> Iterator[Lane]:
    ring = Ring(f"test-gpu-{os.getpid()}-{uuid.uuid4().hex[:12]}", 16 << 20)
    consumer = ring.consumer()
    producer = ring.producer(timeout_s=0)
    consumer.unlink()
    with consumer, producer:
        yield consumer, producer


def test_the_driver_is_found() -> None:
    assert cuda.status().startswith(f"available: {torch.cuda.device_count()} device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.int64, torch.bool])
def test_round_trip_of_torch_types(lane: Lane, dtype: torch.dtype) -> None:
    """As they come from a computation on torch's current stream, with no synchronisation by the caller."""
    consumer, producer = lane
    with DeviceCopier() as copier:
        copier.register(producer)
        copier.register(consumer)
        source = (torch.randn(1000, 333, device="cuda") * 10).to(dtype)
        num_bytes = source.numel() * source.element_size()
        with copier.write(producer.reserve(num_bytes, timeout_s=0)) as slot:
            slot.copy_in([source], [0])
            slot.commit(ticket=1, **FIELDS)
        record = consumer.peek()
        assert record is not None
        target = torch.zeros_like(source)
        with copier.read(record) as leased:
            leased.copy_out([target], [0], stream=torch.cuda.current_stream().cuda_stream)
            equal = torch.equal(source.view(torch.uint8), target.view(torch.uint8))
        assert equal


def test_work_of_a_side_stream_is_waited_for(lane: Lane) -> None:
    """The tensor is computed on another stream by work that takes some milliseconds; whoever forgot to wait would read zeros."""
    consumer, producer = lane
    with DeviceCopier() as copier:
        copier.register(producer)
        stream = torch.cuda.Stream()
        result = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles
            result.fill_(7)
            with copier.write(producer.reserve(1 << 20, timeout_s=0)) as slot:
                slot.copy_in([result], [0])
                slot.commit(ticket=1, **FIELDS)
        record = consumer.peek()
        assert record is not None
        with record:
            assert (record.buffer == 7).all()


def test_tensors_that_torch_does_not_lend(lane: Lane) -> None:
    _, producer = lane
    with DeviceCopier() as copier:
        copier.register(producer)
        slot = copier.write(producer.reserve(4096, timeout_s=0))
        with pytest.raises(ValueError, match=r"tensor 0 cannot be lent: .*detach"):
            slot.copy_in([torch.zeros(10, device="cuda", requires_grad=True)], [0])
        with pytest.raises(ValueError, match="not contiguous"):
            slot.copy_in([torch.zeros(10, 10, device="cuda").T], [0])
        with pytest.raises(ValueError, match="in host memory"):
            slot.copy_in([torch.zeros(10)], [0])
        with pytest.raises(ValueError, match="in host memory"):
            slot.copy_in([torch.zeros(10).pin_memory()], [0])
        slot.abort()
