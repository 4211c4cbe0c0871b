"""The weight push, both ends: every training rank is the root for the rows it owns, generation ranks receive while they decode.

    training rank t                                   every generation rank
    pack own rows into a buffer of its own (a copy)
    a checksum per bucket, gathered over the ranks
    T0: VERSION message ───────────────────────────▶  post the first receives, go on decoding
    broadcast buckets as root of group t ══════════▶  a bucket in, its checksum right: rows go to the sink's spare memory
    (train on)                                        a bucket damaged: DAMAGED, and its root sends it once more (BUCKET)
                                                      all rows there: CONFIRM
    before the buffer is used again, two versions     between two steps: swap, SWAPPED
    later, every CONFIRM is here

On the training ranks' own node (no GPU) nothing is sent: training ranks write their rows into an image that the generation ranks map (`images.SharedImages`), these
compare its checksums, and the swap is a pointer. Which ranks take which way: `paths.py`. What is in a bucket: `manifest.py`.
Trap: a collective's own "done" proves nothing about a receiver; only the CONFIRM message does, and it is waited for under a deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.transport.images import ImageLayout, SharedImages
from areal_hpc.transport.manifest import Entry, Manifest, Piece, shard_rows
from areal_hpc.transport.ring import crc32c

if TYPE_CHECKING:
    from areal_hpc.groups import Connection

__all__ = ["Announcement", "Damage", "Manifest", "Network", "NetworkReceiver", "Receiver", "Sender", "SharedReceiver", "WeightSink", "checksum", "shard_rows"]

BUFFERS = 2
"""Versions that a sender can have on the way: version v lies in buffer v mod 2."""
ROUNDS_IN_FLIGHT = 4
"""Receives posted ahead: one bucket of every root each. More would only take memory."""
SLICE_BYTES = 1 << 20
"""What a receiver unpacks or checks between two looks at the clock."""
BUSY_SHARE = 0.3
"""Part of the time since its last turn that a receiver may take while its rank decodes."""


# -- checksums ---------------------------------------------------------------------------------------------------------


def checksum(data: Tensor) -> int:
    """Checksum of a flat uint8 buffer: CRC32C in host memory; on a GPU, where that would drag every byte over the bus, `folded`. 0 for an empty one."""
    if not data.numel():
        return 0
    return folded(data) if data.is_cuda else crc32c(data.numpy().data)


def folded(data: Tensor) -> int:
    """Sum over the buffer's 32-bit words, each times an odd number of its own, modulo 2^64: any change of one word changes it, and so does an exchange of two.

    Integer arithmetic alone, so every device and every order of summation gives the same number.
    """
    words, total = data[: data.numel() // 4 * 4].view(torch.int32), 0
    for start in range(0, words.numel(), 1 << 24):  # 64 MiB at a time: the products take eight bytes a word
        part = words[start : start + (1 << 24)].long()
        weights = torch.arange(start, start + part.numel(), device=data.device).mul_(2 * 0x1E3779B97F4A7C15).add_(1)
        total += int((part * weights).sum())
    rest = int.from_bytes(bytes(data[words.numel() * 4 :].tolist()), "little")
    return (total + rest * 0x9E3779B1) & (2**64 - 1)


# -- the way over the network ------------------------------------------------------------------------------------------


class Network:
    """The process groups of the push, and one broadcast at a time through them. Collective over their members.

    Gloo: one group per root, {root} + receivers, all in flight together. NCCL: one communicator of all, where round r is one grouped launch of the r-th bucket of
    every root, in the same order on every rank, issued by one thread.
    """

    def __init__(self, connection: Connection, senders: Sequence[int], receivers: Sequence[int], world_rank: int, bucket_bytes: int) -> None:
        """`senders`, `receivers`: world ranks; sender k is root k."""
        self.bucket_bytes = bucket_bytes
        self.is_grouped = connection.device.type == "cuda"
        self.num_roots = len(senders)
        self._groups: dict[int, Any] = {}
        if self.is_grouped:
            self._all = connection.spanning_group("push", [*senders, *receivers], world_rank)
            return
        for root, sender in enumerate(senders):
            if world_rank == sender or world_rank in receivers:
                self._groups[root] = connection.spanning_group(f"push{root}", [sender, *receivers], world_rank)

    def round(self, bucket_of_root: dict[int, Tensor]) -> dict[int, dist.Work]:
        """Start the broadcast of a bucket (uint8) of each of these roots: sent by the root, received by the others. Returns at once."""
        if not self.is_grouped:
            return {root: self._groups[root].broadcast([bucket], dist.BroadcastOptions()) for root, bucket in bucket_of_root.items()}
        device = next(iter(bucket_of_root.values())).device
        self._all._start_coalescing(device)
        for root, bucket in sorted(bucket_of_root.items()):
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._all.broadcast([bucket], options)
        work = self._all._end_coalescing(device)
        return dict.fromkeys(bucket_of_root, work)


def is_done(work: dist.Work, what: str) -> bool:
    """Is a broadcast complete? Never blocks. Raises ConnectionError when it broke off: a rank at its other end is dead."""
    try:
        if not work.is_completed():
            return False
        work.wait()  # completed: returns at once, or raises what went wrong
    except RuntimeError as error:
        raise ConnectionError(f"{what} broke off, a rank that takes part in it is gone: {error}") from error
    return True


@dataclass(frozen=True, slots=True)
class Announcement:
    """Body of the VERSION message."""

    version: int
    ticket_limit: int
    checksums: tuple[tuple[int, ...], ...]
    """Of each root's buckets, for those who receive over the network."""
    evaluate: bool
    """Evaluate this version."""
    final: bool
    """No more training trajectories are wanted after this version."""
    image: int = 0
    """Which shared image holds it, for those who map them."""
    image_checksums: tuple[int, ...] = ()
    """Of the image's parts (`part_of`)."""


def part_of(image: Tensor, part: int, num_parts: int) -> Tensor:
    """One of the equal parts of an image that the training ranks checksum: part t by training rank t."""
    size = -(-image.numel() // num_parts)
    return image[part * size : (part + 1) * size]


# -- the training ranks' end -------------------------------------------------------------------------------------------


class Sender:
    """A training rank's end. `pack` copies the rows (the optimiser may go on afterwards), `send` starts the broadcasts, `payload` is for sending a bucket again.

    `root` is None on a training rank that sends nothing itself (`transport.push = single-root`). Version v may be packed once v - 2 is confirmed everywhere.
    """

    def __init__(
        self,
        manifest: Manifest,
        root: int | None,
        device: torch.device,
        *,
        network: Network | None,
        images: SharedImages | None = None,
        layout: ImageLayout | None = None,
    ) -> None:
        self.manifest, self.root, self.network, self.images = manifest, root, network, images
        self._layout, self._device = layout, device
        all_roots = [manifest.buckets(k, network.bucket_bytes) for k in range(manifest.num_roots)] if network is not None else []
        self._sizes = [[bucket.num_bytes for bucket in buckets] for buckets in all_roots]
        self._mine = all_roots[root] if network is not None and root is not None else ()
        self._buffers = [[torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device) for bucket in self._mine] for _ in range(BUFFERS)]
        self._works: list[list[dist.Work]] = [[] for _ in range(BUFFERS)]
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}
        for k, bucket in enumerate(self._mine):
            for piece in bucket.pieces:
                self._pieces.setdefault(piece.entry.name, []).append((k, piece))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's send buffers."""
        return sum(buffer.numel() for buffers in self._buffers for buffer in buffers)

    @torch.no_grad()
    def pack(self, named_rows: Iterable[tuple[str, Tensor]], version: int, image: int = 0) -> tuple[int, ...]:
        """Copy this rank's rows, cast to the wire type, into buffer and shared image. Returns the checksums of the buckets. Whole tensors with a single root."""
        entries = {entry.name: entry for entry in self.manifest.entries}
        buffers, num_packed = self._buffers[version % BUFFERS], 0
        assert not self._works[version % BUFFERS], "pack into a buffer that is still being sent"
        for name, local in named_rows:
            if self.root is None:
                continue  # the iteration itself is collective
            entry = entries[name]
            first, count = self.manifest.rows(entry, self.root)
            assert local.numel() == count * entry.row_elements, f"{name}: a shard of {local.numel()} elements is not {count} rows of {entry}"
            rows = local.detach().reshape(count, entry.row_elements)
            for k, piece in self._pieces.get(name, ()):
                piece.rows(buffers[k]).copy_(rows[piece.first_row - first : piece.first_row - first + piece.num_rows])
            if self.images is not None and self._layout is not None and count:
                self._layout.places[name].put(self.images.images[image], first, rows.to(entry.dtype))
            num_packed += 1
        assert self.root is None or num_packed == len(entries), f"{num_packed} of {len(entries)} tensors were packed"
        return tuple(map(checksum, buffers))

    def send(self, version: int) -> None:
        """Start the broadcasts of this rank's buckets (on NCCL: take part in everybody's)."""
        if self.network is None:
            return
        buffers = self._buffers[version % BUFFERS]
        if not self.network.is_grouped:
            if self.root is not None:
                self._works[version % BUFFERS] = [self.network.round({self.root: buffer})[self.root] for buffer in buffers]
            return
        if self.root is None:
            return
        for r in range(max(map(len, self._sizes))):
            with_one = [k for k in range(self.manifest.num_roots) if r < len(self._sizes[k])]
            scratch = torch.empty(max(self._sizes[k][r] for k in with_one), dtype=torch.uint8, device=self._device)
            buckets = {k: buffers[r] if k == self.root else scratch[: self._sizes[k][r]] for k in with_one}  # nobody reads what other roots send here
            self._works[version % BUFFERS].append(self.network.round(buckets)[with_one[0]])

    def payload(self, version: int, bucket: int) -> bytes:
        """A bucket's bytes, to be sent once more."""
        return self._buffers[version % BUFFERS][bucket].cpu().numpy().tobytes()

    def check(self) -> None:
        """Raises ConnectionError when a broadcast broke off."""
        for works in self._works:
            for work in works:
                is_done(work, f"the weight push from training rank {self.root}")

    def wait_sent(self, version: int, deadline_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Until the buffer of this version may be overwritten; calls `alive` meanwhile. Raises TimeoutError."""
        stop_at = time.monotonic() + deadline_s
        works = self._works[version % BUFFERS]
        while not all(is_done(work, f"the weight push from training rank {self.root}") for work in works):
            if time.monotonic() > stop_at:
                raise TimeoutError(f"the weight push was not taken by all generation ranks within {deadline_s:g} s")
            alive()
            time.sleep(0.0005)
        works.clear()


# -- the generation ranks' end -----------------------------------------------------------------------------------------


class WeightSink(Protocol):
    """Where rows go at a generation rank: an engine's spare memory, its weights in use, or nowhere (they are mapped).

    Lifecycle for each version: (`write` | ...)* -> `swap`. A version may be given up half-written; the next one writes everything again.
    """

    is_staged: bool
    """Rows go to spare memory, so the engine may decode until `swap`. Otherwise the first `write` begins a pause that `swap` ends."""

    def write(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        """Take rows [n, row elements] of the version that is coming."""
        ...

    def swap(self, version: int, image: Tensor | None = None) -> None:
        """Between two steps: the engine goes on with the version that was written, or with the mapped image."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """A bucket whose checksum was wrong; body of the DAMAGED message."""

    version: int
    root: int
    bucket: int


class Receiver(Protocol):
    """A generation rank's end: `begin` an announced version, `poll` until it is complete, `swap` when the engine is between two steps.

    Versions are taken one after the other. The next one overwrites what is staged; a version that was skipped (this rank was evaluating another) is never loaded.
    """

    staged: Announcement | None
    """The version that is completely received, checked, and not yet superseded."""
    receive_s: float
    """How long that took, from its turn to the checked bytes; decoding went on meanwhile."""
    stage_s: float
    """Of which this rank's own work: checksums and copies."""
    damaged: list[Damage]
    """Buckets to ask for once more; the caller takes them."""

    @property
    def is_staged(self) -> bool:
        """The engine may decode while a version arrives."""
        ...

    @property
    def holds_decoding(self) -> bool:
        """Weights in use are being overwritten: no step until `swap`."""
        ...

    def begin(self, announcement: Announcement) -> None:
        """A version was announced."""
        ...

    def poll(self, *, busy: bool, hold: bool = False) -> bool:
        """Go on receiving; True once, when a version is complete.

        `busy`: the rank decodes, take a part of its time only. `hold`: the weights in use are needed for a while. Raises ValueError for bytes that arrive damaged
        twice, ConnectionError when a sender is gone.
        """
        ...

    def accept(self, damage: Damage, payload: bytes) -> None:
        """A bucket came once more (the BUCKET message)."""
        ...

    def swap(self) -> float:
        """Make the staged version the engine's. Returns the seconds that decoding stood still for it."""
        ...


@dataclass(slots=True)
class _Turn:
    """Shares time between decoding and the receiver's own work."""

    ended_at: float = field(default_factory=time.monotonic)

    def work(self, step: Callable[[], bool], *, busy: bool) -> float:
        """Call `step` until it says that nothing is left or the time is used up, once at least. Returns the seconds taken."""
        began_at = time.monotonic()
        stop_at = began_at + BUSY_SHARE * (began_at - self.ended_at) if busy else float("inf")
        while step() and time.monotonic() < stop_at:
            pass
        self.ended_at = time.monotonic()
        return self.ended_at - began_at


class _Arriving:
    """A bucket on its way."""

    __slots__ = ("pieces", "root", "index", "data", "work", "checked", "next_row")

    def __init__(self, root: int, index: int, pieces: Sequence[Piece], data: Tensor, work: dist.Work) -> None:
        self.root, self.index, self.data, self.work = root, index, data, work
        self.pieces = deque(pieces)
        self.checked, self.next_row = False, 0


class NetworkReceiver:
    """`Receiver` that takes part in the broadcasts. Unpacks in slices between decode steps; a bucket's rows reach the sink only once its checksum is right."""

    def __init__(self, manifest: Manifest, network: Network, sink: WeightSink, device: torch.device) -> None:
        self.manifest, self.network, self.sink = manifest, network, sink
        self.staged: Announcement | None = None
        self.receive_s = self.stage_s = 0.0
        self.damaged: list[Damage] = []
        self._buckets = [manifest.buckets(root, network.bucket_bytes) for root in range(manifest.num_roots)]
        self._num_rounds = max(map(len, self._buckets))
        num_slots = min(ROUNDS_IN_FLIGHT, self._num_rounds)
        self._memory = [
            {root: torch.empty(max(b.num_bytes for b in buckets[k::num_slots]), dtype=torch.uint8, device=device) for root, buckets in self._with(k)}
            for k in range(num_slots)
        ]
        self._queue: deque[Announcement] = deque()
        self._incoming: Announcement | None = None
        self._rounds: deque[list[_Arriving]] = deque()
        self._asked: dict[tuple[int, int], _Arriving] = {}
        self._next_round = 0
        self._turn = _Turn()
        self._began_at = 0.0
        self._paused_at: float | None = None

    def _with(self, round_index: int) -> list[tuple[int, tuple[Any, ...]]]:
        """(root, its buckets) of the roots that take part in a round."""
        return [(root, buckets) for root, buckets in enumerate(self._buckets) if round_index < len(buckets)]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the receive buffers."""
        return sum(data.numel() for slot in self._memory for data in slot.values())

    @property
    def is_staged(self) -> bool:
        return self.sink.is_staged

    @property
    def holds_decoding(self) -> bool:
        return self._paused_at is not None

    def begin(self, announcement: Announcement) -> None:
        self._queue.append(announcement)
        if self._incoming is None and self.sink.is_staged:
            self._start()

    def _start(self) -> None:
        self.staged, self._incoming, self._began_at = None, self._queue.popleft(), time.monotonic()
        self._next_round, self.stage_s = 0, 0.0
        self._turn.ended_at = self._began_at
        if not self.sink.is_staged:
            self._paused_at = self._began_at
        for _ in range(len(self._memory)):
            self._post()

    def _post(self) -> None:
        if self._next_round < self._num_rounds:
            r, memory = self._next_round, self._memory[self._next_round % len(self._memory)]
            data = {root: memory[root][: buckets[r].num_bytes] for root, buckets in self._with(r)}
            works = self.network.round(data)
            self._rounds.append([_Arriving(root, r, buckets[r].pieces, data[root], works[root]) for root, buckets in self._with(r)])
            self._next_round += 1

    def poll(self, *, busy: bool, hold: bool = False) -> bool:
        if self._incoming is None and self._queue and (self.sink.is_staged or not hold):
            self._start()
        if self._incoming is None:
            return False
        self.stage_s += self._turn.work(self._step, busy=busy and self.sink.is_staged)
        if self._rounds or self._asked or self._next_round < self._num_rounds:
            return False
        self.staged, self._incoming = self._incoming, None
        self.receive_s = time.monotonic() - self._began_at
        return True

    def _step(self) -> bool:
        """One slice of work on the oldest round; False when there is nothing to do now."""
        if not self._rounds:
            return False
        arriving = next((a for a in self._rounds[0] if is_done(a.work, f"the weight push from training rank {a.root}")), None)
        if arriving is None:
            return False
        assert self._incoming is not None
        if not arriving.checked:
            if checksum(arriving.data) != self._incoming.checksums[arriving.root][arriving.index]:
                self._ask_again(arriving)
                return True
            arriving.checked = True
        elif self._unpack_slice(arriving):
            self._leave(arriving)
        return True

    def _unpack_slice(self, arriving: _Arriving) -> bool:
        """Write at most a slice's rows; True when the bucket is empty."""
        if arriving.pieces:
            piece = arriving.pieces[0]
            count = min(piece.num_rows - arriving.next_row, max(1, SLICE_BYTES // piece.entry.row_bytes))
            rows = piece.rows(arriving.data)[arriving.next_row : arriving.next_row + count]
            self.sink.write(piece.entry, piece.first_row + arriving.next_row, rows)
            arriving.next_row += count
            if arriving.next_row == piece.num_rows:
                arriving.pieces.popleft()
                arriving.next_row = 0
        return not arriving.pieces

    def _leave(self, arriving: _Arriving) -> None:
        self._rounds[0].remove(arriving)
        while self._rounds and not self._rounds[0]:
            self._rounds.popleft()
            self._post()  # into the memory of the round that left: rounds use the slots in turn

    def _ask_again(self, arriving: _Arriving) -> None:
        assert self._incoming is not None
        self._leave(arriving)
        self._asked[arriving.root, arriving.index] = arriving
        self.damaged.append(Damage(self._incoming.version, arriving.root, arriving.index))

    def accept(self, damage: Damage, payload: bytes) -> None:
        arriving = self._asked[damage.root, damage.bucket]
        assert self._incoming is not None and damage.version == self._incoming.version
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(arriving.data.device)
        found, expected = checksum(data), self._incoming.checksums[damage.root][damage.bucket]
        if found != expected:
            raise ValueError(
                f"weights of version {damage.version} from training rank {damage.root} arrived damaged, also when sent once more: "
                f"bucket {damage.bucket} has checksum {found:#x}, sent was {expected:#x}"
            )
        arriving.data = data
        while not self._unpack_slice(arriving):
            pass
        del self._asked[damage.root, damage.bucket]

    def swap(self) -> float:
        assert self.staged is not None
        began_at = time.monotonic() if self._paused_at is None else self._paused_at
        self.sink.swap(self.staged.version)
        self._paused_at = None
        return time.monotonic() - began_at


class SharedReceiver:
    """`Receiver` that maps what the training ranks wrote: it compares checksums while the engine decodes, and the swap is a pointer."""

    is_staged = True
    holds_decoding = False

    def __init__(self, images: SharedImages, sink: WeightSink, num_parts: int) -> None:
        self.images, self.sink, self.num_parts = images, sink, num_parts
        self.staged: Announcement | None = None
        self.receive_s = self.stage_s = 0.0
        self.damaged: list[Damage] = []
        self._queue: deque[Announcement] = deque()
        self._incoming: Announcement | None = None
        self._part, self._offset, self._crc = 0, 0, 0
        self._turn = _Turn()
        self._began_at = 0.0

    def begin(self, announcement: Announcement) -> None:
        self._queue.append(announcement)

    def poll(self, *, busy: bool, hold: bool = False) -> bool:
        if self._incoming is None and self._queue:
            self.staged, self._incoming, self._began_at = None, self._queue.popleft(), time.monotonic()
            self._part, self._offset, self._crc, self.stage_s = 0, 0, 0, 0.0
            self._turn.ended_at = self._began_at
        if self._incoming is None:
            return False
        self.stage_s += self._turn.work(self._step, busy=busy)
        if self._part < self.num_parts:
            return False
        self.staged, self._incoming = self._incoming, None
        self.receive_s = time.monotonic() - self._began_at
        return True

    def _step(self) -> bool:
        """Check a slice; False at the end."""
        assert self._incoming is not None
        part = part_of(self.images.images[self._incoming.image], self._part, self.num_parts)
        piece = part[self._offset : self._offset + 4 * SLICE_BYTES]
        if piece.numel():
            self._crc = crc32c(piece.numpy().data, self._crc)
            self._offset += piece.numel()
            return True
        expected = self._incoming.image_checksums[self._part]
        if self._crc != expected:
            raise ValueError(
                f"weights of version {self._incoming.version} in shared memory changed after they were written: "
                f"part {self._part} has checksum {self._crc:#x}, written was {expected:#x}"
            )
        self._part, self._offset, self._crc = self._part + 1, 0, 0
        return self._part < self.num_parts

    def accept(self, damage: Damage, payload: bytes) -> None:
        raise AssertionError(f"{damage} was not asked for: nothing is sent to this rank")

    def swap(self) -> float:
        assert self.staged is not None
        began_at = time.monotonic()
        self.sink.swap(self.staged.version, self.images.images[self.staged.image])
        return time.monotonic() - began_at
