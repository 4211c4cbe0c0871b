"""Which rank died first: the launcher watches the processes of all ranks, so that one that is killed is named even if its death takes all others along.

`mpiexec` kills the rest of a job within milliseconds of the first death; the other ranks' watchdogs may not live to tell. The launcher does.
"""

from __future__ import annotations

import json
import os
import select
import time
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.observe import status
from areal_hpc.observe.status import RankStatus

LOOK_EVERY_S = 0.02
"""Between two looks for ranks that have not been seen yet: one that dies in between cannot be told from those that its death takes along."""
CALM_EVERY_S = 1.0
"""Once all are known."""


@dataclass(slots=True)
class Deaths:
    """Lifecycle: `wait` until the job's launcher has ended, then `report`."""

    attempt_dir: Path
    num_ranks: int
    found: list[tuple[int, str]] = field(default_factory=list)
    """(world rank, how it ended, if that was to be seen), in the order of their deaths."""
    ties: int = 0
    """How many died at the same moment as the first, as far as can be told."""
    _processes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """pidfd -> (world rank, pid)."""
    _known: set[int] = field(default_factory=set)

    def wait(self, launcher: int) -> bool:
        """For something to happen, or a moment. `launcher`: pidfd of mpiexec. True when it has ended."""
        self._look_for_ranks()
        poll = select.poll()
        for descriptor in (launcher, *self._processes):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(1000 * (CALM_EVERY_S if len(self._known) == self.num_ranks else LOOK_EVERY_S))]
        ended = [self._processes[descriptor] for descriptor in ready if descriptor in self._processes]
        is_first = not self.found
        if ended:
            self._look_for_ranks()  # one that came and died since the last look may be the cause
        self.found += [(world_rank, status.how_it_ended(pid)) for world_rank, pid in ended]
        if is_first:
            self.ties = len(self.found)
        for descriptor in ready:
            if descriptor in self._processes:
                os.close(descriptor)
                del self._processes[descriptor]
        return launcher in ready

    def _look_for_ranks(self) -> None:
        if len(self._known) == self.num_ranks:
            return
        for rank in status.read_statuses(self.attempt_dir):
            if rank.world_rank in self._known or rank.left:
                continue
            self._known.add(rank.world_rank)
            process = status.open_process(rank.pid, rank.start_ticks)
            if process is None:
                self.found.append((rank.world_rank, status.how_it_ended(rank.pid)))
            else:
                self._processes[process] = (rank.world_rank, rank.pid)

    def close(self) -> None:
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes.clear()


def report(deaths: Deaths) -> dict | None:
    """What failure.json says of the rank that died first; None when none was seen to die."""
    last: dict[int, RankStatus] = {rank.world_rank: rank for rank in status.read_statuses(deaths.attempt_dir)}
    first = [(last[world_rank], how) for world_rank, how in deaths.found[: max(1, deaths.ties)] if world_rank in last]
    if not first:
        return None
    now = time.time()
    names = " or ".join(rank.name for rank, _ in first)
    died = first[0][0]
    error = "; ".join(
        f"died{f' ({how})' if how else ''} in phase {rank.phase}{f', waiting for {rank.waits_for}' if rank.waits_for else ''}" for rank, how in first
    )
    return {
        "status": "failed",
        "exit_status": 1,
        "rank": died.world_rank,
        "name": names,
        "error": error,
        "phase": died.phase,
        "found_by": "launcher",
        "time": now,
        "ranks": status.table(last.values(), now),
    }


def write(path: Path, found: dict) -> None:
    """Raises OSError when the disk refuses."""
    path.write_text(json.dumps(found, indent=1) + "\n")
