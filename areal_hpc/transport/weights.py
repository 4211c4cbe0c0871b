"""The weight push, both ends: every training rank is the root for the rows it owns, generation ranks receive while they decode.

    training rank t                                   every generation rank
    pack own shards into a flat buffer (a copy)
    checksum, gathered over the training ranks
    T0: VERSION message ───────────────────────────▶  post receives into staging, go on decoding
    broadcast buckets as root of group t ══════════▶  all buckets in, checksums equal: CONFIRM
    (train on)                                        between two steps: interrupt, load, SWAPPED
    before the next push: every CONFIRM is here

The manifest (name, shape, type, in one fixed order) is hashed and compared on all ranks before the first push. Rows are cut as torch cuts dim 0 (`Tensor.chunk`):
uneven and empty shards are legal. Sending shards from their owners removes the gather to one rank, which costs more than the broadcast.
Trap: a collective's own "done" proves nothing about a receiver; only the CONFIRM message does, and it is waited for under a deadline.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_hpc.transport.ring import crc32c

if TYPE_CHECKING:
    from areal_hpc.groups import Connection
    from areal_hpc.topology import World


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model, tied ones once."""

    name: str
    shape: tuple[int, ...]

    @property
    def row_elements(self) -> int:
        """Elements of one row (dim 0)."""
        return int(torch.Size(self.shape[1:]).numel())


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
    dtype: torch.dtype
    num_roots: int
    num_replicas: int = 1

    @classmethod
    def of(cls, named_shapes: Iterable[tuple[str, Sequence[int]]], dtype: torch.dtype, num_roots: int, num_replicas: int = 1) -> Manifest:
        entries = sorted((Entry(name, tuple(shape)) for name, shape in named_shapes), key=lambda entry: _natural(entry.name))
        return cls(tuple(entries), dtype, num_roots, num_replicas)

    def digest(self) -> str:
        """SHA-256 over names, shapes, type, number of roots and of replicas."""
        return hashlib.sha256(repr((self.entries, str(self.dtype), self.num_roots, self.num_replicas)).encode()).hexdigest()

    def num_rows(self, entry: Entry, root: int) -> int:
        """Rows of a tensor that one root sends."""
        return shard_rows(entry.shape[0], self.num_roots, root, self.num_replicas)[1]

    def root_elements(self, root: int) -> int:
        """Elements that one root sends."""
        return sum(self.num_rows(entry, root) * entry.row_elements for entry in self.entries)

    @property
    def roots_by_row(self) -> list[int]:
        """The roots in the order of the rows that they send."""
        num_shards = self.num_roots // self.num_replicas
        return [replica * num_shards + shard for shard in range(num_shards) for replica in range(self.num_replicas)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model on the wire."""
        return sum(self.root_elements(root) for root in range(self.num_roots)) * self.dtype.itemsize

    def agree(self, comm) -> None:  # type: ignore[no-untyped-def]  # mpi4py communicator
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
            f"weight manifests differ: {first.dtype} from {first.num_roots} roots ({first.num_replicas} replicas) on rank 0, "
            f"{other.dtype} from {other.num_roots} roots ({other.num_replicas} replicas) on rank {other_rank}"
        )


def _buckets(flat: torch.Tensor, bucket_bytes: int) -> list[torch.Tensor]:
    return list(flat.split(max(1, bucket_bytes // flat.element_size()))) if flat.numel() else []


def checksum(flat: torch.Tensor) -> int:
    """CRC32C of a flat buffer's bytes (0 for an empty one)."""
    return crc32c(flat.view(torch.uint8).cpu().numpy().data) if flat.numel() else 0


class Network:
    """The process groups of the push. Gloo: one group per root, {root} + generation ranks, all in flight together. NCCL: one communicator of all ranks,
    one grouped launch of broadcasts with different roots, issued by one thread. Collective over the world."""

    def __init__(self, world: World, connection: Connection, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.is_cuda = connection.device.type == "cuda"
        generation = list(world.generation_ranks)
        self._groups: dict[int, Any] = {}
        if self.is_cuda:
            members = list(world.training_ranks) + generation
            self._all = connection.spanning_group("push", members, world.world_rank)
            return
        for root, world_rank in enumerate(world.training_ranks):
            if world.role == "generation" or world.world_rank == world_rank:
                self._groups[root] = connection.spanning_group(f"push{root}", [world_rank, *generation], world.world_rank)

    def broadcast(self, flat_of_root: dict[int, torch.Tensor]) -> list[dist.Work]:
        """Start the broadcasts; `flat_of_root[t]` is sent by training rank t and received by everybody else that holds the key. Returns at once."""
        options = dist.BroadcastOptions()
        if not self.is_cuda:
            works = []
            for root, flat in flat_of_root.items():
                works += [self._groups[root].broadcast([bucket], options) for bucket in _buckets(flat, self.bucket_bytes)]
            return works
        device = next(iter(flat_of_root.values())).device
        works = []
        self._all._start_coalescing(device)
        for root, flat in flat_of_root.items():
            options.rootRank = root
            for bucket in _buckets(flat, self.bucket_bytes):
                self._all.broadcast([bucket], options)
        works.append(self._all._end_coalescing(device))
        return works


def _done(works: list[dist.Work]) -> bool:
    """Are all broadcasts complete? Raises the error of one that failed."""
    for work in works:
        if not work.is_completed():
            return False
    for work in works:
        work.wait()  # completed: returns at once, or raises what went wrong
    return True


@dataclass(frozen=True, slots=True)
class Announcement:
    """Body of the VERSION message."""

    version: int
    ticket_limit: int
    checksums: tuple[int, ...]
    """CRC32C of each root's flat buffer."""
    evaluate: bool
    """Evaluate this version."""
    final: bool
    """No more training trajectories are wanted after this version."""


class Sender:
    """A training rank's end. `pack` copies the shards (the optimiser may go on afterwards), `send` starts the broadcast, `wait_sent` frees the buffer."""

    def __init__(self, manifest: Manifest, root: int, network: Network, device: torch.device) -> None:
        self.manifest, self.root, self.network = manifest, root, network
        self.flat = torch.empty(manifest.root_elements(root), dtype=manifest.dtype, device=device)
        self._works: list[dist.Work] = []

    def pack(self, shards: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy this rank's rows into the send buffer, cast to the wire type. Returns the checksum. The previous send must be complete."""
        assert not self._works, "pack while the previous version is still being sent"
        local_of, offset = dict(shards), 0
        assert len(local_of) == len(self.manifest.entries)
        for entry in self.manifest.entries:
            local, rows = local_of[entry.name], self.manifest.num_rows(entry, self.root)
            assert local.numel() == rows * entry.row_elements, f"{entry.name}: a shard of {local.numel()} elements is not {rows} rows of {entry}"
            self.flat[offset : offset + local.numel()].copy_(local.detach().reshape(-1))
            offset += local.numel()
        assert offset == self.flat.numel()
        return checksum(self.flat)

    def send(self) -> None:
        """Start the broadcasts of this rank's rows (on NCCL: of everybody's, in one launch)."""
        if not self.network.is_cuda:
            self._works = self.network.broadcast({self.root: self.flat})
            return
        # One communicator: this rank also takes part in the other roots' broadcasts, into a buffer it ignores.
        flats = {
            root: torch.empty(self.manifest.root_elements(root), dtype=self.flat.dtype, device=self.flat.device) for root in range(self.manifest.num_roots)
        }
        flats[self.root] = self.flat
        self._works = self.network.broadcast(flats)

    def wait_sent(self, deadline_s: float) -> None:
        """Wait until the send buffer may be overwritten. Raises TimeoutError."""
        stop_at = time.monotonic() + deadline_s
        while not _done(self._works):
            if time.monotonic() > stop_at:
                raise TimeoutError(f"the weight push was not taken by all generation ranks within {deadline_s:g} s")
            time.sleep(0.0005)
        self._works = []


@dataclass(slots=True)
class Receiver:
    """A generation rank's end: staging buffers that fill while the engine decodes.

    Lifecycle: `begin(announcement)` -> `poll()` until it returns True -> `staged` is complete and checked -> `named_tensors()` -> ... -> `begin(next)`.
    Trap: `begin` overwrites what is staged; a version that was skipped (this rank was evaluating another) is never loaded.
    """

    manifest: Manifest
    network: Network
    device: torch.device
    staged: Announcement | None = None
    """The version that is completely received, checked, and not yet superseded."""
    receive_s: float = 0.0
    """How long that took, from `begin` to the checked bytes."""
    _incoming: Announcement | None = None
    _began_at: float = 0.0
    _works: list[dist.Work] = field(default_factory=list)
    _flats: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for root in range(self.manifest.num_roots):
            self._flats[root] = torch.empty(self.manifest.root_elements(root), dtype=self.manifest.dtype, device=self.device)

    def begin(self, announcement: Announcement) -> None:
        """Post the receives of an announced version."""
        assert self._incoming is None, "two pushes at once"
        self.staged, self._incoming, self._began_at = None, announcement, time.monotonic()
        self._works = self.network.broadcast(self._flats)

    def poll(self) -> bool:
        """True once, when the announced version is complete and its checksums are right. Raises ValueError when they are not."""
        if self._incoming is None or not _done(self._works):
            return False
        for root, expected in enumerate(self._incoming.checksums):
            found = checksum(self._flats[root])
            if found != expected:
                raise ValueError(
                    f"weights of version {self._incoming.version} from training rank {root} arrived damaged: checksum {found:#010x}, sent {expected:#010x}"
                )
        self.staged, self._incoming, self._works = self._incoming, None, []
        self.receive_s = time.monotonic() - self._began_at
        return True

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The staged model: full tensors, views of the staging buffers where one root holds all rows. Valid until the next `begin`."""
        assert self.staged is not None
        offsets = [0] * self.manifest.num_roots
        for entry in self.manifest.entries:
            parts = []
            for root in self.manifest.roots_by_row:
                count = self.manifest.num_rows(entry, root) * entry.row_elements
                if count:
                    parts.append(self._flats[root][offsets[root] : offsets[root] + count])
                offsets[root] += count
            yield entry.name, (parts[0] if len(parts) == 1 else torch.cat(parts)).view(entry.shape)
