"""A model as one flat piece of memory, in the order in which an engine computes from it; and such memory shared by the ranks of a node.

An engine describes its image once (`ImageLayout`). Whoever has rows of a tensor can then put them where the engine wants them: the receiver of a bucket, in the
rank's own memory; or, on the training ranks' node, the training ranks themselves, in memory that all ranks of the node map. A swap is then a change of pointers.

    images = SharedImages.create(name, layout.num_bytes, NUM_IMAGES)     # one training rank: takes all the memory now
    images = SharedImages.attach(name, layout.num_bytes, NUM_IMAGES)     # the others, while the creator holds the file; then it calls `unlink`

Three images are enough (`free_image`): at any time the ranks use at most two versions for longer than a decode step, the newest and one that is being evaluated.
The name is gone once all have attached: a killed run leaves nothing. Until then the creator holds flock(2) on the file, and `ring.sweep_stale` takes away what
nobody holds. Receivers map the images read-only: a stray write is a fault in the rank that did it, not in the model of the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_hpc.transport.manifest import aligned

NUM_IMAGES = 3
FOLDER = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of one tensor lie in an image."""

    offset: int
    """Bytes, a multiple of `manifest.ALIGNMENT`."""
    num_rows: int
    row_elements: int
    dtype: torch.dtype
    interleave: int = 0
    """Above 0: rows come in blocks of so many, and the two halves of a block take turns in the image (pairs of a rotation side by side)."""

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_elements * self.dtype.itemsize

    def block(self, image: Tensor) -> Tensor:
        """View [num_rows, row_elements] of an image's bytes, rows in the image's order."""
        return image[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.num_rows, self.row_elements)

    def put(self, image: Tensor, first_row: int, rows: Tensor) -> None:
        """Write rows [n, row_elements], from row `first_row` of the tensor on, cast to the image's type."""
        block, count = self.block(image), len(rows)
        if not self.interleave:
            block[first_row : first_row + count].copy_(rows)
            return
        size, half, stop = self.interleave, self.interleave // 2, first_row + count
        row = first_row
        while row < stop:  # whole blocks at once; at the ends, the half-block that is there
            start = row - first_row
            if row % size == 0 and stop - row >= size:
                num = (stop - row) // size
                halves = rows[start : start + num * size].view(num, 2, half, self.row_elements)
                block[row : row + num * size].view(num, half, 2, self.row_elements).transpose(1, 2).copy_(halves)
                row += num * size
            else:
                into, side = row % half, row % size // half
                taken = min(half - into, stop - row)
                target = row // size * size + side + 2 * into
                block[target : target + 2 * taken : 2].copy_(rows[start : start + taken])
                row += taken


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Places of all tensors of a model, by name."""

    places: Mapping[str, Place]
    num_bytes: int

    @classmethod
    def of(cls, places: Mapping[str, Place]) -> ImageLayout:
        return cls(dict(places), aligned(max((place.offset + place.num_bytes for place in places.values()), default=0)))


def free_image(image_of: Mapping[int, int], in_use: Iterable[int], unconfirmed: Iterable[int]) -> int | None:
    """An image that may be overwritten, or None while there is none.

    `image_of`: version -> image that holds it, newest contents only; `in_use`: versions that some rank computes with; `unconfirmed`: versions that some rank may
    still have to check or swap to (with the newest confirmed one, which ranks may not have swapped to yet).
    """
    kept = {image_of[version] for version in (*in_use, *unconfirmed) if version in image_of}
    return next((image for image in range(NUM_IMAGES) if image not in kept), None)


class SharedImages:
    """Some images of one size in the node's shared memory.

    Lifecycle: one rank creates, the others attach, the creator unlinks; the memory lives as long as its users. Raises OSError (ENOSPC) when there is no room:
    all of it is taken at once, so that a full /dev/shm is an error here and never a SIGBUS later.
    """

    def __init__(self, file: int, path: str, image_bytes: int, num_images: int, *, writable: bool) -> None:
        self._file, self._path = file, path
        self.image_bytes = image_bytes
        size = -(-image_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(file, size * num_images, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        with contextlib.suppress(OSError, AttributeError):  # speed only
            self._map.madvise(mmap.MADV_HUGEPAGE)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.images: tuple[Tensor, ...] = tuple(whole[k * size : k * size + image_bytes] for k in range(num_images))
        """uint8 [image_bytes] each."""

    @staticmethod
    def bytes_needed(image_bytes: int, num_images: int) -> int:
        """Bytes of shared memory that so many images take."""
        return -(-image_bytes // mmap.PAGESIZE) * mmap.PAGESIZE * num_images

    @classmethod
    def create(cls, name: str, image_bytes: int, num_images: int) -> SharedImages:
        path = f"{FOLDER}/{name}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            needed, room = cls.bytes_needed(image_bytes, num_images), os.fstatvfs(file)
            if room.f_blocks and needed > room.f_bavail * room.f_frsize:  # asked first: the kernel would fill the node's memory before it says no
                raise OSError(errno.ENOSPC, f"{needed} bytes of {FOLDER} are needed for {num_images} images, {room.f_bavail * room.f_frsize} are free")
            os.posix_fallocate(file, 0, needed)
            return cls(file, path, image_bytes, num_images, writable=True)
        except BaseException:
            os.unlink(path)
            os.close(file)
            raise

    @classmethod
    def attach(cls, name: str, image_bytes: int, num_images: int, *, writable: bool) -> SharedImages:
        path = f"{FOLDER}/{name}"
        file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        images = cls(file, path, image_bytes, num_images, writable=writable)
        images.close_file()
        return images

    def close_file(self) -> None:
        """The mapping stays."""
        os.close(self._file)
        self._file = -1

    def unlink(self) -> None:
        """Take the name away (the creator, once all have attached)."""
        os.unlink(self._path)
        self.close_file()
