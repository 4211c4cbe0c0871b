"""The weight push in one process: manifests and buckets, checksums, images, damage, grouped launches, who may overwrite what."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_hpc.transport import images as images_module
from areal_hpc.transport.images import NUM_IMAGES, ImageLayout, Place, SharedImages, free_image
from areal_hpc.transport.manifest import ALIGNMENT, Entry, Manifest
from areal_hpc.transport.ring import crc32c, sweep_stale
from areal_hpc.transport.weights import Announcement, Network, NetworkReceiver, Sender, SharedReceiver, checksum, folded, is_done, part_of

from .loopback import Fabric, FakeConnection, Loopback, Work

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
SHAPES: list[tuple[str, tuple[int, ...]]] = [("b.10.w", (5, 3)), ("b.2.w", (7, 4)), ("a.bias", (9,)), ("scale", ()), ("empty", (0, 3)), ("cube", (3, 2, 5))]


class Held:
    """A sink that keeps whole tensors."""

    def __init__(self, manifest: Manifest, *, is_staged: bool = True) -> None:
        self.is_staged, self.version = is_staged, -1
        self.tensors = {entry.name: torch.full((entry.num_rows, entry.row_elements), 99).to(entry.dtype) for entry in manifest.entries}
        self.num_written = 0

    def write(self, entry: Entry, first_row: int, rows: Tensor) -> None:
        self.tensors[entry.name][first_row : first_row + len(rows)] = rows
        self.num_written += len(rows)

    def swap(self, version: int, image: Tensor | None = None) -> None:
        self.version = version


def mixed_manifest(num_roots: int, num_replicas: int = 1) -> Manifest:
    dtypes = {name: DTYPES[k % len(DTYPES)] for k, (name, _) in enumerate(SHAPES)}
    return Manifest.of(SHAPES, dtypes, num_roots, num_replicas)


def values(manifest: Manifest, version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {e.name: (torch.randn(e.num_rows, e.row_elements, generator=generator) * 50).abs().to(torch.float32) for e in manifest.entries}


def rows_of(manifest: Manifest, root: int, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(e.name, tensors[e.name][slice(first, first + count)]) for e in manifest.entries for first, count in [manifest.rows(e, root)]]


def announce(version: int, checksums: Sequence[tuple[int, ...]], **options: Any) -> Announcement:
    return Announcement(version, 0, tuple(checksums), False, False, **options)


def push(manifest: Manifest, senders: Sequence[Sender], receiver: NetworkReceiver, version: int) -> None:
    tensors = values(manifest, version)
    receiver.begin(announce(version, [s.pack(rows_of(manifest, root, tensors), version) for root, s in enumerate(senders)]))
    for sender in senders:
        sender.send(version)


def check(manifest: Manifest, sink: Held, version: int) -> None:
    for name, tensor in values(manifest, version).items():
        expected = tensor.to(sink.tensors[name].dtype)
        assert torch.equal(sink.tensors[name].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), name


# -- manifest and buckets ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.sampled_from(DTYPES)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 600),
)
def test_buckets_hold_every_row_once(tensors: list[tuple[int, int, torch.dtype]], num_shards: int, num_replicas: int, bucket_bytes: int) -> None:
    shapes = [(f"t{k}", (rows, columns)) for k, (rows, columns, _) in enumerate(tensors)]
    manifest = Manifest.of(shapes, {f"t{k}": dtype for k, (_, _, dtype) in enumerate(tensors)}, num_shards * num_replicas, num_replicas)
    seen = {entry.name: np.zeros(entry.num_rows, int) for entry in manifest.entries}
    for root in range(manifest.num_roots):
        for bucket in manifest.buckets(root, bucket_bytes):
            end = 0
            for piece in bucket.pieces:
                assert piece.offset % ALIGNMENT == 0 and piece.offset >= end and piece.num_rows > 0
                end = piece.offset + piece.num_rows * piece.entry.row_bytes
                seen[piece.entry.name][piece.first_row : piece.first_row + piece.num_rows] += 1
                first, count = manifest.rows(piece.entry, root)
                assert first <= piece.first_row and piece.first_row + piece.num_rows <= first + count
            assert end <= bucket.num_bytes < end + ALIGNMENT
            assert end <= bucket_bytes or (len(bucket.pieces) == 1 and bucket.pieces[0].num_rows == 1)
    assert all((count == 1).all() for count in seen.values())


def test_a_manifest_that_differs_names_the_first_tensor() -> None:
    class TwoRanks:
        """Communicator of two ranks that hold `first` and `other`."""

        def __init__(self, first: Manifest, other: Manifest) -> None:
            self.held = [first, other]

        def allgather(self, digest: str) -> list[str]:
            return [manifest.digest() for manifest in self.held]

        def bcast(self, manifest: Manifest, root: int) -> Manifest:
            return self.held[root]

    ours = Manifest.of(SHAPES, torch.float32, 2)
    for other, message in [
        (Manifest.of(SHAPES, {name: torch.bfloat16 if name == "b.2.w" else torch.float32 for name, _ in SHAPES}, 2), "b.2.w.*bfloat16"),
        (Manifest.of([*SHAPES[:-1], ("cube", (3, 2, 4))], torch.float32, 2), r"cube.*\(3, 2, 5\).*\(3, 2, 4\)"),
        (Manifest.of([("a.bia", (9,)), *SHAPES[3:]], torch.float32, 2), "a.bias.*a.bia"),
        (Manifest.of(SHAPES, torch.float32, 3), "2 roots.*3 roots"),
    ]:
        with pytest.raises(ValueError, match=message):
            ours.agree(TwoRanks(ours, other))  # type: ignore[arg-type]
    ours.agree(TwoRanks(ours, Manifest.of(SHAPES[::-1], torch.float32, 2)))  # type: ignore[arg-type]  # the order in which they are listed does not matter


# -- checksums ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_folded_is_its_formula(data: bytes) -> None:
    words = np.frombuffer(data[: len(data) // 4 * 4], "<i4")
    expected = sum(int(w) * (k * 2 * 0x1E3779B97F4A7C15 + 1) for k, w in enumerate(words)) + int.from_bytes(data[len(words) * 4 :], "little") * 0x9E3779B1
    assert folded(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)) == expected % 2**64


def test_checksum_sees_every_bit() -> None:
    data = torch.randint(0, 256, (101,), dtype=torch.uint8)
    for function in (checksum, folded):
        clean, seen = function(data), set()
        for place in range(data.numel()):
            for bit in range(8):
                data[place] ^= 1 << bit
                seen.add(function(data))
                data[place] ^= 1 << bit
        assert clean not in seen and len(seen) == 8 * data.numel()
    assert checksum(data) == crc32c(data.numpy().tobytes())


# -- sender and receiver -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize(("num_roots", "num_replicas"), [(1, 1), (3, 1), (6, 1), (6, 3)])
@pytest.mark.parametrize("bucket_bytes", [16, 64, 10_000])
def test_versions_arrive_bit_equal_two_on_the_way(num_roots: int, num_replicas: int, bucket_bytes: int, is_staged: bool) -> None:
    """Types and shapes mixed (a number, an empty tensor); with `busy` a poll takes one slice, and decoding is held only in place."""
    manifest = mixed_manifest(num_roots, num_replicas)
    net, sink = Loopback(num_roots, bucket_bytes), Held(manifest, is_staged=is_staged)
    senders = [Sender(manifest, root, CPU, network=net) for root in range(num_roots)]  # type: ignore[arg-type]
    receiver = NetworkReceiver(manifest, net.receiver(), sink, CPU)
    for version in (0, 1):
        push(manifest, senders, receiver, version)
    for version in range(4):
        while not receiver.poll(busy=True):
            assert receiver.holds_decoding is not is_staged
        assert receiver.staged is not None and receiver.staged.version == version
        check(manifest, sink, version)
        receiver.swap()
        assert sink.version == version and not receiver.holds_decoding
        if version < 2:
            for sender in senders:
                sender.wait_sent(version, 1)
            push(manifest, senders, receiver, version + 2)


def test_in_place_waits_for_an_evaluation() -> None:
    """Without staging a push would overwrite the weights that the evaluation needs."""
    manifest = mixed_manifest(1)
    for is_staged in (False, True):
        net, sink = Loopback(1, 64), Held(manifest, is_staged=is_staged)
        receiver = NetworkReceiver(manifest, net.receiver(), sink, CPU)
        push(manifest, [Sender(manifest, 0, CPU, network=net)], receiver, 0)  # type: ignore[arg-type]
        polled = [receiver.poll(busy=False, hold=True) for _ in range(20)]
        assert any(polled) is is_staged and not receiver.holds_decoding
        assert (sink.num_written > 0) is is_staged


def test_a_damaged_bucket_reaches_no_sink_and_is_sent_once_more() -> None:
    manifest = mixed_manifest(2)

    def flip(root: int, index: int, bucket: Tensor) -> None:
        if (root, index) == (1, 1):
            bucket[3] ^= 16

    net, sink = Loopback(2, 64, flip), Held(manifest)
    senders = [Sender(manifest, root, CPU, network=net) for root in range(2)]  # type: ignore[arg-type]
    receiver = NetworkReceiver(manifest, net.receiver(), sink, CPU)
    push(manifest, senders, receiver, 0)
    for _ in range(20):
        assert not receiver.poll(busy=False)
    (damage,) = receiver.damaged
    assert (damage.version, damage.root, damage.bucket) == (0, 1, 1)
    lost = sum(piece.num_rows for piece in manifest.buckets(1, 64)[1].pieces)
    assert sink.num_written == sum(entry.num_rows for entry in manifest.entries) - lost
    payload = senders[1].payload(0, 1)
    with pytest.raises(ValueError, match="version 0 from training rank 1 arrived damaged, also when sent once more: bucket 1 has checksum"):
        receiver.accept(damage, payload[:-1] + bytes([payload[-1] ^ 1]))
    receiver.accept(damage, payload)
    assert receiver.poll(busy=False)
    check(manifest, sink, 0)


def test_a_broken_broadcast_says_so() -> None:
    with pytest.raises(ConnectionError, match=r"push from training rank 3 broke off.*Connection reset"):
        is_done(Work(lambda: False, RuntimeError("Connection reset by peer")), "push from training rank 3")  # type: ignore[arg-type]
    assert not is_done(Work(lambda: False), "")  # type: ignore[arg-type]


def test_packing_over_what_is_being_sent_is_an_error() -> None:
    manifest = mixed_manifest(1)
    sender = Sender(manifest, 0, CPU, network=Loopback(1, 64))  # type: ignore[arg-type]
    for version in (0, 1):
        sender.pack(rows_of(manifest, 0, values(manifest, version)), version)
        sender.send(version)
    with pytest.raises(AssertionError, match="still being sent"):
        sender.pack(rows_of(manifest, 0, values(manifest, 2)), 2)
    with pytest.raises(TimeoutError, match=r"not taken by all generation ranks within 0\.01 s"):
        sender.wait_sent(2, 0.01)


@pytest.mark.parametrize(("num_roots", "num_receivers"), [(1, 1), (3, 2), (6, 1)])
def test_grouped_launches_match_on_all_ranks(num_roots: int, num_receivers: int) -> None:
    """The NCCL path on a fake communicator that refuses launches which differ between ranks; 6 roots: some own nothing."""
    manifest, fabric = mixed_manifest(num_roots), Fabric(num_roots + num_receivers)
    senders_at, receivers_at = list(range(num_roots)), list(range(num_roots, num_roots + num_receivers))

    def network(rank: int) -> Network:
        return Network(FakeConnection(fabric), senders_at, receivers_at, rank, 64)  # type: ignore[arg-type]

    senders = [Sender(manifest, root, CPU, network=network(root)) for root in senders_at]
    sinks = [Held(manifest) for _ in receivers_at]
    receivers = [NetworkReceiver(manifest, network(rank), sink, CPU) for rank, sink in zip(receivers_at, sinks, strict=True)]
    for version in range(3):
        tensors = values(manifest, version)
        announcement = announce(version, [s.pack(rows_of(manifest, root, tensors), version) for root, s in enumerate(senders)])
        for sender in senders:
            sender.send(version)
        for receiver in receivers:
            receiver.begin(announcement)
        complete = [False] * num_receivers
        while not all(complete):  # a receiver that is ahead must wait for the others, whose launches it needs
            complete = [done or receiver.poll(busy=True) for done, receiver in zip(complete, receivers, strict=True)]
        for sender in senders:
            sender.wait_sent(version, 1)
        for sink in sinks:
            check(manifest, sink, version)
    rounds = max(len(manifest.buckets(root, 64)) for root in senders_at)
    assert fabric.num_done == 3 * rounds


# -- images ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.sampled_from([2, 4, 6]), st.integers(1, 3), st.lists(st.integers(0, 30), max_size=4), st.sampled_from(DTYPES[:2]))
def test_interleaved_rows_in_any_cut(num_blocks: int, size: int, columns: int, cuts: list[int], dtype: torch.dtype) -> None:
    rows = torch.randn(num_blocks * size, columns)
    image = torch.zeros(32 + rows.numel() * dtype.itemsize, dtype=torch.uint8)
    place = Place(32, len(rows), columns, dtype, size)
    edges = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        place.put(image, start, rows[start:stop])
    order = [block * size + half * size // 2 + k for block in range(num_blocks) for k in range(size // 2) for half in (0, 1)]
    assert torch.equal(place.block(image), rows[order].to(dtype))
    assert not image[:32].any()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_image_in_use_is_overwritten_and_none_is_waited_for_in_vain(data: st.DataObject) -> None:
    """Ranks confirm and swap in any order, some hold back for an evaluation of one version; the trainer's view lags behind."""
    num_ranks = data.draw(st.integers(1, 4))
    image_of: dict[int, int] = {}
    content: dict[int, int] = {}
    active, staged, known = [-1] * num_ranks, [-1] * num_ranks, [-1] * num_ranks
    holding = [False] * num_ranks
    for version in range(12):
        confirmed = min(staged)
        for attempt in range(2):
            image = free_image(image_of, known, [confirmed, *range(confirmed + 1, version)])
            if image is not None:
                break
            assert attempt == 0, "three images did not suffice though every rank that may has swapped"
            for rank in range(num_ranks):
                staged[rank] = version - 1
                if not holding[rank]:
                    active[rank] = staged[rank]
            known, confirmed = list(active), min(staged)
        assert image is not None
        for rank in range(num_ranks):
            assert active[rank] < 0 or image != image_of.get(active[rank]), f"version {active[rank]} is in use"
        content[image] = version
        image_of = {v: i for v, i in image_of.items() if i != image} | {version: image}
        if data.draw(st.booleans()) and all(active[r] == active[0] for r in range(num_ranks)):
            holding = [data.draw(st.booleans()) for _ in range(num_ranks)]  # an evaluation of one version, by some ranks longer than by others
        elif data.draw(st.booleans()):
            holding = [False] * num_ranks
        for rank in range(num_ranks):
            confirms = max(staged[rank], data.draw(st.sampled_from([version - 1, version])))
            if confirms > staged[rank]:  # messages of one rank keep their order: whoever knows of this confirmation knows of the swap before it
                staged[rank], known[rank] = confirms, active[rank]
            if not holding[rank] and data.draw(st.booleans()):
                active[rank] = staged[rank]
                if data.draw(st.booleans()):
                    known[rank] = active[rank]


def layout_for(manifest: Manifest) -> ImageLayout:
    places, offset = {}, 0
    for entry in manifest.entries:
        places[entry.name] = Place(offset, entry.num_rows, entry.row_elements, torch.float32)
        offset += -(-entry.num_rows * entry.row_elements * 4 // ALIGNMENT) * ALIGNMENT
    return ImageLayout.of(places)


def test_shared_images_carry_versions_and_their_damage_is_seen(tmp_path: Path) -> None:
    manifest, num_roots = mixed_manifest(3), 3
    layout = layout_for(manifest)
    name = f"areal_hpc.{os.getpid():016x}.weights-test"
    made = SharedImages.create(name, layout.num_bytes, NUM_IMAGES)
    mapped = SharedImages.attach(name, layout.num_bytes, NUM_IMAGES, writable=False)
    made.unlink()
    assert not Path("/dev/shm", name).exists()
    sink = Held(manifest)
    senders = [Sender(manifest, root, CPU, network=None, images=made, layout=layout) for root in range(num_roots)]
    receiver = SharedReceiver(mapped, sink, num_roots)
    for version in range(4):
        image = version % NUM_IMAGES
        for root, sender in enumerate(senders):
            assert sender.pack(rows_of(manifest, root, values(manifest, version)), version, image) == ()
        sums = tuple(checksum(part_of(made.images[image], part, num_roots)) for part in range(num_roots))
        receiver.begin(announce(version, [()] * num_roots, image=image, image_checksums=sums))
        if version == 3:
            made.images[image][5] ^= 1
            with pytest.raises(ValueError, match="version 3 in shared memory changed after they were written: part 0"):
                receiver.poll(busy=False)
            break
        while not receiver.poll(busy=True):
            pass
        receiver.swap()
        for entry in manifest.entries:
            expected = values(manifest, version)[entry.name].to(entry.dtype).float()
            assert torch.equal(layout.places[entry.name].block(mapped.images[image]), expected), entry.name


def test_mapped_images_are_read_only() -> None:
    """A rank that writes into an image dies by itself; the memory that the others compute from stays as it is."""
    name = f"areal_hpc.{os.getpid():016x}.weights-readonly"
    made = SharedImages.create(name, 64, 1)
    made.images[0].fill_(7)
    code = f"from areal_hpc.transport.images import SharedImages; SharedImages.attach({name!r}, 64, 1, writable=False).images[0].fill_(9)"
    try:
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGSEGV
    finally:
        made.unlink()
    assert (made.images[0] == 7).all()


def test_no_room_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    with pytest.raises(OSError, match=r"bytes of /dev/shm are needed for 3 images, \d+ are free"):
        SharedImages.create("areal_hpc.0000000000000000.weights-huge", free // 2, 3)
    assert not Path("/dev/shm/areal_hpc.0000000000000000.weights-huge").exists()
    assert SharedImages.bytes_needed(1, 3) == 3 * mmap.PAGESIZE
    assert images_module.FOLDER == "/dev/shm"


def test_what_a_killed_creator_leaves_is_swept() -> None:
    name = f"areal_hpc.{os.getpid():016x}.weights-killed"
    code = f"from areal_hpc.transport.images import SharedImages; made = SharedImages.create({name!r}, 1 << 20, 3); print('made', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    assert name.removeprefix("areal_hpc.") not in sweep_stale(), "its creator lives and holds the lock"
    process.kill()
    process.communicate()
    assert Path("/dev/shm", name).exists()
    assert name.removeprefix("areal_hpc.") in sweep_stale()
    assert not Path("/dev/shm", name).exists()
