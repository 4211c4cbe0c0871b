"""Two lives of one Slurm job never write the same files.

When a node is cut off, Slurm takes the job for dead and starts it again elsewhere while ranks of the old life still run behind the cut, on a file system that may
still reach them. Logs and attempts have names of their own in each life; checkpoints and the model have not. So each life writes its name (`JOB.RESTART`) into
RUN/fence before it touches anything else, and every rank looks there every `LOOK_S`: one that finds a later life of its job leaves at once, without a clean-up that
could write. The later life waits `SETTLE_S` before it goes on, long enough for the others to have looked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from areal_hpc.cluster import Incarnation
from areal_hpc.config import ConfigError

FENCE_FILE = "fence"
LOOK_S = 2.0
SETTLE_S = 3 * LOOK_S
SUPERSEDED = 1
"""Exit status of a rank whose job lives again elsewhere."""


def take(run_dir: Path, mine: Incarnation | None, settle_s: float = SETTLE_S) -> Incarnation | None:
    """Say that the run folder is this life's now; returns the earlier life that was fenced off, after a wait for its ranks to leave. Raises OSError."""
    if mine is None:
        return None
    before = holder(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f"{FENCE_FILE}.{mine}.tmp"
    temporary.write_text(f"{mine}\n")
    temporary.replace(run_dir / FENCE_FILE)
    if mine.restart > 0:  # whoever was last in the file: another job that was refused here may have written over the earlier life's name
        time.sleep(settle_s)
    return before if before is not None and mine.ends(before) else None


def claim(run_dir: Path) -> None:
    """`take` for this process, before the run folder is touched; says whom it found. Raises ConfigError when the folder cannot be written."""
    try:
        before = take(run_dir, Incarnation.mine())
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {error.strerror}") from None
    if before is not None:
        print(f"Slurm job {before} lived here before; its ranks, if any are left, have been fenced off", flush=True)


def holder(run_dir: Path) -> Incarnation | None:
    """Whose the run folder is; None when nobody has said, or the file cannot be read now."""
    try:
        return Incarnation.parse((run_dir / FENCE_FILE).read_text())
    except OSError:
        return None


def is_superseded(run_dir: Path, mine: Incarnation) -> bool:
    """A later life of this job has taken the folder over."""
    now = holder(run_dir)
    return now is not None and now.ends(mine)


def watch(run_dir: Path, mine: Incarnation | None, name: str) -> None:
    """From a thread, until the process ends: leave as soon as a later life has taken over. `name`: of this rank, for the message."""
    if mine is None:
        return

    def look() -> None:
        while not is_superseded(run_dir, mine):
            time.sleep(LOOK_S)
        print(f"{name}: Slurm has started this job again as {holder(run_dir)}; this life ({mine}) leaves", file=sys.stderr, flush=True)
        os._exit(SUPERSEDED)  # no abort of MPI, no clean-up: both could still write

    threading.Thread(target=look, name="fence", daemon=True).start()
