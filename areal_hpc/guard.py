"""How a rank ends: with one agreed status, or, after any exception, by taking the whole job down within seconds.

Failure: the first rank that fails claims RUN/attempt-K/failure.json (exclusive creation), prints its traceback with its name, and calls MPI_Abort. Ranks that fail
afterwards, usually because a peer vanished, print one line that points there. Nothing is torn down gracefully on this path: destroying process groups
with a dead peer hangs.
Success: files are closed, a last barrier, MPI_Finalize, and then every rank leaves by `os._exit` with the same status (Open MPI kills the others at the first
non-zero exit, MPICH ORs the statuses).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from areal_hpc.config import ConfigError

if TYPE_CHECKING:
    from areal_hpc.topology import World

DONE, FAILED, USER_ERROR, REQUEUE = 0, 1, 2, 75
"""Exit statuses. USER_ERROR: the configuration or data is wrong. REQUEUE: stopped on a signal with a complete checkpoint."""
END_DEADLINE_S = 60.0
"""Seconds within which all ranks must reach the end, their files closed."""


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

    def __enter__(self) -> AbortGuard:
        threading.excepthook = lambda args: self._abort(args.exc_value or args.exc_type())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._abort(error)

    def _abort(self, error: BaseException) -> NoReturn:
        user_error = isinstance(error, ConfigError)
        one_line = isinstance(error, (ConfigError, Difference))
        text = str(error) if one_line else "".join(traceback.format_exception(error))
        report = {
            "status": "failed",
            "exit_status": USER_ERROR if user_error else FAILED,
            "rank": self.comm.rank,
            "name": self.name,
            "error": f"{type(error).__name__}: {error}",
            "traceback": text,
            "time": time.time(),
        }
        first = _claim(self.attempt_dir / "failure.json", report)
        if one_line:
            line = f"{'error' if user_error else 'different'}: {error}" if first else ""
        elif first:
            line = f"{self.name} failed first, the job ends:\n{text}"
        else:
            line = f"{self.name} also failed ({type(error).__name__}); the first failure is in failure.json"
        if line:
            print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(0.2)  # let the launcher forward what was printed before the abort closes the pipes
        self.comm.Abort(USER_ERROR if user_error else FAILED)
        os._exit(FAILED)


def _claim(path: Path, report: dict) -> bool:
    """True for the one rank that creates the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:  # a full or missing disk must not hide the real failure
        print(f"could not write {path}: {error}", file=sys.stderr)
    return True


def finish(world: World, attempt_dir: Path, status: int, summary: dict) -> NoReturn:
    """The clean end. All files must be closed. Collective."""
    if world.is_first_trainer:
        write_exit(attempt_dir, status, summary)
    world.barrier(END_DEADLINE_S, "leave")
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.Finalize()
    os._exit(status)


def write_exit(attempt_dir: Path, status: int, summary: dict) -> None:
    """`exit.json`, atomically: the marker that this attempt ended as it says (an mpiexec can return 0 after a node died)."""
    temporary = attempt_dir / "exit.json.tmp"
    temporary.write_text(json.dumps({"status": status, "time": time.time(), **summary}, indent=1) + "\n")
    temporary.replace(attempt_dir / "exit.json")
