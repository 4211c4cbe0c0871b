"""What a rank is doing, in a small mapped file that outlives it: attempt-K/ranks/rank-00003.status.

Its watchdog thread writes it twice a second; the other ranks of its node map it and see whether its heart beats; the launcher, and whoever looks for the cause of a
failure, reads what it did last. After `kill -9` the file says what the rank was at, at most one beat earlier.
Light on purpose: the launcher imports it, and a rank makes its file before anything heavy is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "ranks"
LIFELINE = "AREAL_HPC_LIFELINE"
"""Variable with the name of the socket (abstract, unix(7)) at which a launcher on this node waits for its ranks."""
_LAYOUT = struct.Struct("<8sIIqQQQddd128s64s24s512s")
_MAGIC = b"arealst1"
_BYTES = 4096
assert _LAYOUT.size <= _BYTES
_lifeline: list[socket.socket] = []
"""Open as long as the process lives."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One look at a rank. Times are seconds since the epoch on its node's clock."""

    world_rank: int
    left: bool
    """It has reached the end of the run: its death means nothing."""
    pid: int
    start_ticks: int
    """When the process started (clock ticks since its node's boot): with `pid` its identity, since numbers are used again."""
    num_reports: int
    """Signs of life of its main loop."""
    num_beats: int
    """Signs of life of its watchdog thread."""
    phase_since: float
    reported_at: float
    """Last sign of life of the main loop."""
    written_at: float
    name: str
    """As in messages: rank 3 (generation 2) on host n1."""
    host: str
    phase: str
    waits_for: str
    """What it waits for, where it says so."""

    def line(self, now: float) -> str:
        """For people: name, phase, since when, what it waits for."""
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        old_s = now - self.written_at
        seen = f" (as of {old_s:.0f} s before)" if old_s > 2 else ""
        return f"{self.name}: in phase {self.phase} for {max(0.0, self.written_at - self.phase_since):.1f} s{waits}{seen}"

    def row(self, now: float) -> dict[str, Any]:
        """For failure.json."""
        return {
            "rank": self.world_rank,
            "name": self.name,
            "host": self.host,
            "pid": self.pid,
            "phase": self.phase,
            "phase_s": round(max(0.0, self.written_at - self.phase_since), 3),
            "waits_for": self.waits_for,
            "reports": self.num_reports,
            "silent_s": round(max(0.0, now - self.written_at), 3),
            "left": self.left,
        }


def status_path(attempt_dir: Path, world_rank: int) -> Path:
    return attempt_dir / FOLDER / f"rank-{world_rank:05d}.status"


def this_process(world_rank: int, name: str = "", phase: str = "start") -> RankStatus:
    """The first status of this process. Without a name: its number and host."""
    now, host, pid = time.time(), socket.gethostname(), os.getpid()
    return RankStatus(world_rank, False, pid, start_ticks(pid), 0, 0, now, now, now, name or f"rank {world_rank} on host {host}", host, phase, "")


class StatusFile:
    """The writing end. Lifecycle: construct -> `write`* -> `leave` (or be killed).

    A file that is there already, this process' own from an earlier moment of its start, is written anew. Raises OSError when the disk has no room for 4 KiB.
    """

    def __init__(self, attempt_dir: Path, first: RankStatus) -> None:
        self.path = status_path(attempt_dir, first.world_rank)
        self.latest = first
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "wb+", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)  # a store into a mapping without a block behind it would be a bus error
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.write(first)

    def write(self, now: RankStatus) -> None:
        """Say what the rank is at."""
        self.latest = now
        numbers = (now.pid, now.start_ticks, now.num_reports, now.num_beats, now.phase_since, now.reported_at, now.written_at)
        texts = (_bytes(now.name, 128), _bytes(now.host, 64), _bytes(now.phase, 24), _bytes(now.waits_for, 512))
        _LAYOUT.pack_into(self._map, 0, _MAGIC, now.world_rank, int(now.left), *numbers, *texts)

    def leave(self) -> None:
        """The end, a good one: what happens to the process from now on is no failure. The file goes, and the folder with the last of them."""
        self.write(dataclasses.replace(self.latest, left=True))
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not the last one, or a folder that others use too
            self.path.parent.rmdir()


class StatusView:
    """The reading end, a mapping that stays valid when the file's name is gone. Raises OSError when there is no such file."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)

    def read(self) -> RankStatus | None:
        """None while the file is being made."""
        return _parse(self._map)


def read_statuses(attempt_dir: Path) -> list[RankStatus]:
    """What all ranks said last, in their order."""
    found = []
    for path in sorted((attempt_dir / FOLDER).glob("rank-*.status")):
        with contextlib.suppress(OSError, ValueError):  # removed, or still empty
            status = _parse(path.read_bytes())
            if status is not None:
                found.append(status)
    return found


def hold_lifeline(world_rank: int) -> None:
    """Connect to the launcher, which sees by the end of the connection that this process has died (launch/deaths.py).

    Nothing where no launcher asks for it, or it has gone.
    """
    name = os.environ.get(LIFELINE)
    if not name or _lifeline:
        return
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        connection.sendall(str(world_rank).encode())
    except OSError:
        connection.close()
    else:
        _lifeline.append(connection)


def table(statuses: Iterable[RankStatus], now: float) -> list[dict[str, Any]]:
    """Rows of failure.json: who was at what, who waited for whom."""
    return [status.row(now) for status in sorted(statuses, key=lambda s: s.world_rank)]


def _bytes(text: str, width: int) -> bytes:
    return text.encode("utf-8", "replace")[:width]


def _parse(data: bytes | mmap.mmap) -> RankStatus | None:
    if len(data) < _LAYOUT.size:
        return None
    magic, world_rank, left, pid, ticks, reports, beats, since, reported, written, *texts = _LAYOUT.unpack_from(data)
    if magic != _MAGIC:
        return None
    name, host, phase, waits_for = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    return RankStatus(world_rank, bool(left), pid, ticks, reports, beats, since, reported, written, name, host, phase, waits_for)


def _stat(pid: int) -> Sequence[str]:
    """Fields of /proc/PID/stat from the third on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when there is none of that number."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


def how_it_ended(pid: int) -> str:
    """What killed a process that nobody has reaped yet; empty when that is not to be seen any more."""
    fields = _stat(pid)
    if not fields or fields[0] not in "ZX" or len(fields) < 50:
        return ""
    code = int(fields[49])
    if code & 0x7F:
        name = signal.Signals(code & 0x7F).name
        return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    return f"ended with status {code >> 8}"


def open_process(pid: int, ticks: int) -> int | None:
    """A descriptor that becomes readable when this very process ends (pidfd_open(2)); None when it has ended, or is not to be seen from here."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise
        return None
    if start_ticks(pid) != ticks:  # the number belongs to another process, or to one of another container
        os.close(descriptor)
        return None
    return descriptor
