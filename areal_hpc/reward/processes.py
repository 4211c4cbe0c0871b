"""Child processes of the reward service: started by exec (never a fork of a process with MPI, CUDA or threads), and never outliving their parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import areal_hpc
from areal_hpc.reward.channel import Channel

_PR_SET_PDEATHSIG = 1
_MPI_VARIABLES = ("PMI", "OMPI", "PRTE", "PRRTE", "SLURM", "MPI", "HYD", "PALS", "I_MPI", "MV2")
_FOR_THE_RANK: Collection[int] = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that Slurm sends to every process of a step. What the job makes of them is the rank's decision; its children end with it."""
_SET = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
"""One thread; and big-number arithmetic that a signal can interrupt (that of gmpy2 it cannot)."""
NICENESS = 5
"""Of graders beside a rank: enough to keep it ahead, and not so much that they starve on its cores."""
ADDRESS_SPACE_BYTES = 2 << 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def scrubbed_environment() -> dict[str, str]:
    """This process' environment without the variables by which an MPI library would take the child for a rank; one thread; this package importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
    paths = [str(Path(areal_hpc.__file__).parent.parent), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    return kept | _SET | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


def spawn(module: str, stderr: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], Channel]:
    """`python -m MODULE FD PARENT` in a session of its own; FD is its end of the socket. Standard output goes where standard error goes."""
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)  # inherited, and kept: no moment at which one could end the child
    with theirs, _restored(before):
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if stderr is None else stderr,
            stderr=stderr,
            env=scrubbed_environment(),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, Channel(ours)


@contextmanager
def _restored(mask: Collection[int]) -> Iterator[None]:
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def adopt_parent() -> Channel:
    """In the child, first thing: die when the parent dies, and take over the socket. Reads the arguments that `spawn` gave."""
    fd, parent = (int(argument) for argument in sys.argv[1:3])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above took effect
        sys.exit("the parent process is gone")
    return Channel.from_fd(fd)


def grader_cores(available: set[int]) -> set[int]:
    """The cores that graders may use: all but the first two of a rank that has four or more, which the rank itself keeps busy."""
    return set(sorted(available)[2:]) if len(available) >= 4 else available


def step_back(beside_a_rank: bool) -> None:
    """In a grader: be the one that dies when memory runs out; beside a rank also yield to it, and keep off its cores. What is not permitted here is left as it is."""
    if beside_a_rank:
        os.nice(NICENESS)
        with suppress(OSError):
            os.sched_setaffinity(0, grader_cores(os.sched_getaffinity(0)))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit_memory() -> None:
    """In a grader of mathematics: no more than ADDRESS_SPACE_BYTES, so that one answer cannot take the node's memory. Beyond it Python raises MemoryError."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = ADDRESS_SPACE_BYTES if hard == resource.RLIM_INFINITY else min(hard, ADDRESS_SPACE_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def cpu_s(pid: int) -> float:
    """Processor seconds that a living child has used, its reaped children included; 0.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Resident memory of a living child; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and whatever it started in its session, and reap it."""
    if process.returncode is None:  # not reaped, so the number still is that of its process group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
