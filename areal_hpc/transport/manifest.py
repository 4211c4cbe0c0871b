"""What a weight push moves, in which order, and who sends which rows: the same on every rank, from names, shapes and types alone.

Rows are cut as torch cuts dim 0 (`Tensor.chunk`), so uneven and empty shards are legal. Each root's rows are packed into buckets: a bucket holds whole rows, every
piece of it starts at a multiple of 16 bytes, and nothing but their bytes is on the wire. Tied tensors are listed once, under the name that `models.hf` gives them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

ALIGNMENT = 16
"""Bytes at whose multiples a tensor's rows start, in buckets and in images: any type can be read in place."""


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model, tied ones once. A number without dimensions is one row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """On the wire."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row (dim 0)."""
        return int(torch.Size(self.shape[1:]).numel())

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor within a bucket."""

    entry: Entry
    first_row: int
    num_rows: int
    offset: int
    """Bytes from the start of the bucket."""

    def rows(self, bucket: torch.Tensor) -> torch.Tensor:
        """View [num_rows, row elements] of the rows in a bucket's bytes."""
        part = bucket[self.offset : self.offset + self.num_rows * self.entry.row_bytes]
        return part.view(self.entry.dtype).view(self.num_rows, self.entry.row_elements)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one broadcast moves."""

    num_bytes: int
    pieces: tuple[Piece, ...]


def shard_rows(num_rows: int, num_roots: int, root: int, num_replicas: int = 1) -> tuple[int, int]:
    """(first row, number of rows) that training rank `root` sends: torch's dim-0 chunking, as FSDP2 shards.

    With replicas, rank = replica * shards + shard: each replica of a shard sends a part of its rows, cut the same way once more, so every row has one sender.
    """
    num_shards = num_roots // num_replicas
    replica, shard = divmod(root, num_shards)
    start, stop = _chunk(0, num_rows, num_shards, shard)
    start, stop = _chunk(start, stop, num_replicas, replica)
    return start, stop - start


def _chunk(start: int, stop: int, num: int, k: int) -> tuple[int, int]:
    """Chunk k of `torch.arange(start, stop).chunk(num)`, empty behind the last."""
    size = -(-(stop - start) // num)
    return min(start + k * size, stop), min(start + (k + 1) * size, stop)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a push moves, in an order that depends on the names alone: layer by layer, whoever lists them."""

    entries: tuple[Entry, ...]
    num_roots: int
    num_replicas: int = 1

    @classmethod
    def of(
        cls,
        named_shapes: Iterable[tuple[str, Sequence[int]]],
        dtype: torch.dtype | Mapping[str, torch.dtype],
        num_roots: int,
        num_replicas: int = 1,
    ) -> Manifest:
        """`dtype`: one wire type for all, or one for each name."""
        entries = [Entry(name, tuple(shape), dtype if isinstance(dtype, torch.dtype) else dtype[name]) for name, shape in named_shapes]
        return cls(tuple(sorted(entries, key=lambda entry: _natural(entry.name))), num_roots, num_replicas)

    def digest(self) -> str:
        """SHA-256 over names, shapes, types, number of roots and of replicas."""
        return hashlib.sha256(repr((self.entries, self.num_roots, self.num_replicas)).encode()).hexdigest()

    def rows(self, entry: Entry, root: int) -> tuple[int, int]:
        """(first row, number of rows) of a tensor that one root sends."""
        return shard_rows(entry.num_rows, self.num_roots, root, self.num_replicas)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model on the wire."""
        return sum(entry.num_bytes for entry in self.entries)

    def buckets(self, root: int, bucket_bytes: int) -> tuple[Bucket, ...]:
        """The rows of one root, cut into buckets of at most `bucket_bytes` (one row, where a row is larger)."""
        buckets: list[Bucket] = []
        pieces: list[Piece] = []
        used = 0
        for entry in self.entries:
            first, left = self.rows(entry, root)
            left = 0 if entry.row_bytes == 0 else left
            while left:
                fits = (bucket_bytes - used) // entry.row_bytes
                if fits < 1 and pieces:
                    buckets.append(Bucket(used, tuple(pieces)))
                    pieces, used = [], 0
                    continue
                count = min(left, max(1, fits))
                pieces.append(Piece(entry, first, count, used))
                used = aligned(used + count * entry.row_bytes)
                first, left = first + count, left - count
        if pieces:
            buckets.append(Bucket(used, tuple(pieces)))
        return tuple(buckets)

    def agree(self, comm: MPI.Comm) -> None:
        """All ranks must hold the same manifest. Collective. Raises ValueError that names the first tensor that differs."""
        digests = comm.allgather(self.digest())
        other_rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other_rank is None:
            return
        first, other = comm.bcast(self, root=0), comm.bcast(self, root=other_rank)
        for index, (expected, found) in enumerate(itertools.zip_longest(first.entries, other.entries)):
            if expected != found:
                raise ValueError(f"weight manifests differ at tensor {index}: {expected} on rank 0, {found} on rank {other_rank}")
        raise ValueError(
            f"weight manifests differ: {first.num_roots} roots ({first.num_replicas} replicas) on rank 0, "
            f"{other.num_roots} roots ({other.num_replicas} replicas) on rank {other_rank}"
        )
