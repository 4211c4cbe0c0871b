"""One job per run directory: RUN/owner.json, locked by whoever works there, says who that is.

The lock is flock(2) on that file: it goes with its last holder, however that ends, so no lock is ever left behind on one machine. It is inherited by the ranks that
the launcher starts, and held until the last of them is gone. Where flock does not reach other hosts (some network file systems), the file's content and its
modification time do: the owner renews it every `BEAT_S`, and a job on another host that finds it fresh refuses to start. One that finds it old watches it for
`STALE_S` at most, on its own clock, and takes over when it does not move. A process id that was given to another process since is told by its start time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_hpc.config import ConfigError

OWNER_FILE = "owner.json"
BEAT_S = 10.0
STALE_S = 60.0
"""A file that has not been renewed for this long has no living owner."""
LONG_AGO_S = 600.0
"""Age by the wall clock beyond which nobody watches any more (clocks of hosts differ by less)."""
LEASE_S = 120.0
"""Until a file server has given up the locks of a host that is gone (NFS: 90 s)."""
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who works in a run directory."""

    host: str
    pid: int
    pid_started: int
    """Clock ticks from boot to the start of the process (/proc/PID/stat): tells a reused process id."""
    since: str
    job_id: str = ""
    """Of Slurm; empty without."""
    restart: int = 0
    """How often Slurm has requeued that job."""

    @classmethod
    def myself(cls) -> Owner:
        pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        restart = os.environ.get("SLURM_RESTART_COUNT") or "0"
        return cls(socket.gethostname(), pid, process_start(pid) or 0, now, os.environ.get("SLURM_JOB_ID", ""), int(restart))

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """None when nobody has written, or not to the end."""
        try:
            return cls(**json.loads(os.pread(descriptor, 1 << 16, 0)))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        job = f", Slurm job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on host {self.host} since {self.since}{job}"

    @property
    def is_here(self) -> bool:
        """It is a process of this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Of an owner that `is_here`: the process runs, and is the same one."""
        return process_start(self.pid) == self.pid_started

    def was_before(self, other: Owner) -> bool:
        """An earlier life of the same Slurm job, which Slurm ended before it began this one."""
        return bool(self.job_id) and self.job_id == other.job_id and self.restart < other.restart


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or only what is left of one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(slots=True)
class Ownership:
    """A run directory that is ours. Lifecycle: `take`, `keep_alive`, `release`."""

    path: Path
    descriptor: int
    owner: Owner
    took_over: str = ""
    """From whom, if a job had died there; for people."""
    made_folder: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def take(cls, run_dir: Path) -> Ownership:
        """Make the run directory if need be, and own it. Raises ConfigError that names the job that does already."""
        made = not run_dir.exists()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = _open_locked(run_dir / OWNER_FILE)
        except OSError as error:
            raise ConfigError(f"run_dir={run_dir}: {error.strerror}") from None
        mine = Owner.myself()
        try:
            took_over = _check_predecessor(run_dir, descriptor, mine)
            _write(descriptor, mine)
        except ConfigError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"run_dir={run_dir}: {error.strerror}") from None
        return cls(run_dir / OWNER_FILE, descriptor, mine, took_over, made)

    def keep_alive(self) -> None:
        """Renew the file from a thread, until `release` or the end of the process."""
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)

    def release(self) -> None:
        """Let others in, and remove what `take` made if nothing else is there."""
        self._stop.set()
        with contextlib.suppress(OSError):  # a disk that refuses must not turn a good end into a bad one: the lock goes with this process anyway
            self.path.unlink(missing_ok=True)
            if self.made_folder and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
        os.close(self.descriptor)


def _open_locked(path: Path) -> int:
    """Open the file and lock it. Raises ConfigError when somebody else has; an earlier life of the same Slurm job, which is over, gets `LEASE_S` to lose its lock."""
    give_up_at = time.monotonic() + LEASE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return descriptor
            owner = Owner.read(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise
            if owner is not None and owner.was_before(Owner.myself()) and time.monotonic() < give_up_at:
                time.sleep(LEASE_S / 120)
                continue
            who = "another job, which has just begun" if owner is None else f"{owner}" + _afterlife(owner)
            raise _refusal(path.parent, who) from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:  # not one that its owner has just removed
                return descriptor
        os.close(descriptor)


def _afterlife(owner: Owner) -> str:
    return " (that process is gone, but ranks that it started still run)" if owner.is_here and not owner.is_alive else ""


def _refusal(run_dir: Path, who: str) -> ConfigError:
    return ConfigError(f"run_dir={run_dir} is in use by {who}; wait for it to end, or choose another folder with --run-dir")


def _check_predecessor(run_dir: Path, descriptor: int, mine: Owner) -> str:
    """From whom the directory is taken over, empty if it was free. Raises ConfigError when the owner lives."""
    owner = Owner.read(descriptor)
    if owner is None or (owner.host, owner.pid, owner.pid_started) == (mine.host, mine.pid, mine.pid_started):
        return ""
    if owner.was_before(mine):
        return str(owner)
    if owner.is_here:
        if owner.is_alive:
            raise _refusal(run_dir, str(owner))
        return str(owner)
    if time.time() - os.fstat(descriptor).st_mtime < LONG_AGO_S:
        print(f"run_dir={run_dir} was in use by {owner}; watching for up to {STALE_S:g} s whether that still lives", flush=True)
        before, stop_at = os.fstat(descriptor).st_mtime_ns, time.monotonic() + STALE_S
        while time.monotonic() < stop_at:
            time.sleep(min(1.0, STALE_S / 10))
            if os.fstat(descriptor).st_mtime_ns != before:
                raise _refusal(run_dir, str(owner))
    return str(owner)


def _write(descriptor: int, owner: Owner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(owner)) + "\n").encode(), 0)
    os.fsync(descriptor)
