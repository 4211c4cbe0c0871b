"""How a rank ends: with one agreed status, or, after any exception, by taking the whole job down within seconds.

Failure: the first rank that fails claims RUN/attempt-K/failure.json (exclusive creation), prints its traceback with its name, and calls MPI_Abort. Ranks that fail
afterwards, usually because a peer vanished, print one line that points there. Nothing is torn down gracefully on this path: destroying process groups
with a dead peer hangs. Ranks that cannot speak for themselves (killed, stopped, stuck) are found by the watchdogs of the others (observe/watchdog.py): these
claim the same file.
Success: files are closed, a last barrier, MPI_Finalize, and then every rank leaves by `os._exit` with the same status (Open MPI kills the others at the first
non-zero exit, MPICH ORs the statuses).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from areal_hpc.config import ConfigError

if TYPE_CHECKING:
    from areal_hpc.topology import World

DONE, FAILED, USER_ERROR, LOG_INCOMPLETE, REQUEUE = 0, 1, 2, 3, 75
"""Exit statuses. USER_ERROR: the configuration or data is wrong. LOG_INCOMPLETE: done, but rows are missing from log.h5.
REQUEUE: stopped on a signal with a complete checkpoint."""
END_DEADLINE_S = 60.0
"""Seconds within which all ranks must reach the end, their files closed."""
ABORT_S = 3.0
"""Seconds that MPI_Abort may take; a library that is stuck in another thread can block it."""
ECHO_S = 0.3
"""Seconds that an error waits for the news that another rank has died, which it may be a consequence of."""
STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write the stacks of its threads to stacks-rank-R.txt, whatever holds its interpreter."""
EXIT_BYTES, FAILURE_BYTES = 4096, 16384
"""Reserved on the disk."""


class Difference(Exception):  # noqa: N818 (not an error of the program)
    """A replay found something that is not as recorded. The job ends with this one line, without a traceback, and status 1."""


class AbortGuard:
    """Context manager around everything a rank does after MPI has started.

    Example: `with AbortGuard(attempt_dir) as guard: guard.name = world.name(); ...`
    Trap: an exception in a thread passes by every `with`; the guard therefore also takes over `threading.excepthook`.
    """

    def __init__(self, attempt_dir: Path) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.attempt_dir = attempt_dir
        self.name = f"rank {self.comm.rank}"
        self.table: Callable[[], list[dict[str, Any]]] = list
        """What all ranks are at, for failure.json."""
        self.watched = False
        """A watchdog runs: an error that is only the echo of another rank's death leaves the word to it."""

    def __enter__(self) -> AbortGuard:
        threading.excepthook = lambda args: self._abort(args.exc_value or args.exc_type())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._abort(error)

    def _abort(self, error: BaseException) -> NoReturn:
        user_error = isinstance(error, ConfigError)
        one_line = isinstance(error, (ConfigError, Difference))
        if self.watched and not one_line:
            self._let_the_watchdog_speak()
        text = str(error) if one_line else "".join(traceback.format_exception(error))
        report = {
            "status": "failed",
            "exit_status": USER_ERROR if user_error else FAILED,
            "rank": self.comm.rank,
            "name": self.name,
            "error": f"{type(error).__name__}: {error}",
            "traceback": text,
            "time": time.time(),
            "ranks": self.table(),
        }
        first = claim(self.attempt_dir / "failure.json", report)
        if one_line:
            line = f"{'error' if user_error else 'different'}: {error}" if first else ""
        elif first:
            line = f"{self.name} failed first, the job ends:\n{text}"
        else:
            line = f"{self.name} also failed ({type(error).__name__}); the first failure is in failure.json"
        with contextlib.suppress(OSError):  # a full disk behind them
            if line:
                print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()
        time.sleep(0.2)  # let the launcher forward what was printed before the abort closes the pipes
        abort(USER_ERROR if user_error else FAILED)

    def _let_the_watchdog_speak(self) -> None:
        stop_at = time.monotonic() + ECHO_S
        while time.monotonic() < stop_at and not (self.attempt_dir / "failure.json").exists():
            time.sleep(0.01)


def claim(path: Path, report: dict) -> bool:
    """True for the one process that creates the file. A disk that refuses must not hide the real failure: that is then said on stderr alone, and counts as claimed."""
    text = json.dumps(report, indent=1) + "\n"
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text)
            os.link(unfinished, path)  # whole at once, for the first only
        finally:
            unfinished.unlink(missing_ok=True)
        _reserve_of(path).unlink(missing_ok=True)
    except FileExistsError:
        return False
    except OSError:
        short = json.dumps({name: value for name, value in report.items() if name != "ranks"}, indent=1) + "\n"
        return _claim_in_need(path, text if len(text) <= FAILURE_BYTES else short)
    return True


def _claim_in_need(path: Path, text: str) -> bool:
    """On a full disk, in the blocks that `reserve` took; or on a file system that knows no links."""
    try:
        if _reserve_of(path).exists():
            os.link(_reserve_of(path), path)
            _reserve_of(path).unlink(missing_ok=True)
            _overwrite(path, text)
        else:
            with open(path, "x") as file:
                file.write(text)
    except FileExistsError:
        return False
    except OSError as error:
        print(f"could not write {path}: {error}", file=sys.stderr)
    return True


def _reserve_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _overwrite(path: Path, text: str) -> None:
    """Into the blocks that the file has."""
    with open(path, "r+b", buffering=0) as file:
        file.write(text.encode())
        file.truncate()


def abort(status: int) -> NoReturn:
    """End the job from any thread: MPI_Abort, and if that is not to be had or gets stuck, the hard exit of this process, at which the others are ended."""
    from mpi4py import MPI

    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)  # its timer needs no interpreter lock, which MPI_Abort keeps
        if (
            MPI.Is_initialized()
            and not MPI.Is_finalized()
            and (threading.current_thread() is threading.main_thread() or MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        ):
            MPI.COMM_WORLD.Abort(status)
    os._exit(status)


@contextlib.contextmanager
def deadline_of_mpi_start(attempt_dir: Path | None, name: str, deadline_s: float) -> Iterator[None]:
    """The block starts MPI, which can wait for ever for a rank that does not come, with the interpreter lock held: a process beside this one keeps the time.

    After `deadline_s` it claims failure.json (where there is a folder for it), says who waits on which host, and kills this process.
    """
    if "mpi4py.MPI" in sys.modules:  # it has started, and forking would no longer be safe
        yield
        return
    parent, (alive, ours) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            _keep_time(alive, parent, attempt_dir, name, deadline_s)
        finally:
            os._exit(0)
    os.close(alive)
    try:
        yield
    finally:
        os.close(ours)
        os.waitpid(child, 0)


def _keep_time(alive: int, parent: int, attempt_dir: Path | None, name: str, deadline_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if select.select([alive], [], [], deadline_s)[0]:  # the end of the stream: MPI has started, or the parent is gone
        return
    error = f"MPI did not start within {deadline_s:g} s (transport.start_deadline_s): a rank is missing, or the network between the nodes does not work"
    report = {"status": "failed", "exit_status": FAILED, "name": name, "error": error, "phase": "mpi", "time": time.time()}
    if attempt_dir is None or claim(attempt_dir / "failure.json", report):
        print(f"areal-hpc: {name}: {error}", file=sys.stderr, flush=True)
    os.kill(parent, STACK_SIGNAL if attempt_dir is not None else signal.SIGKILL)
    time.sleep(0.5)
    os.kill(parent, signal.SIGKILL)


def finish(world: World, attempt_dir: Path, status: int, summary: dict, leave: Callable[[], None] = lambda: None) -> NoReturn:
    """The clean end. All files must be closed; `leave` is called when every rank has come so far. Collective."""
    if world.is_first_trainer:
        write_exit(attempt_dir, status, summary)
    world.barrier(END_DEADLINE_S, "leave")
    leave()
    from mpi4py import MPI

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk behind it
            stream.flush()
    MPI.Finalize()
    os._exit(status)


def reserve(attempt_dir: Path) -> None:
    """Take the disk blocks of exit.json and failure.json at the start, so that a run whose disk fills up can still say how it ended. Raises OSError."""
    for name, size in (("exit.json", EXIT_BYTES), ("failure.json", FAILURE_BYTES)):
        _reserve_of(attempt_dir / name).write_bytes(b" " * size)


def write_exit(attempt_dir: Path, status: int, summary: dict) -> None:
    """`exit.json`, atomically: the marker that this attempt ended as it says (an mpiexec can return 0 after a node died)."""
    temporary = _reserve_of(attempt_dir / "exit.json")
    text = json.dumps({"status": status, "time": time.time(), **summary}, indent=1) + "\n"
    temporary.touch()
    _overwrite(temporary, text)
    temporary.replace(attempt_dir / "exit.json")
    _reserve_of(attempt_dir / "failure.json").unlink(missing_ok=True)
