"""The watchdog of a rank: a thread that shows that this rank lives, sees whether the others do, and ends the job with the name of the one that does not.

consumes        reports of its own main loop (timeline.Phases), status files and processes of the ranks of its node, links to those of other nodes, signals
produces        this rank's status file; failure.json, stacks-rank-R.txt and one line on stderr when the job has to end
waits for       descriptors: a dead process, a message, a signal; at most BEAT_EVERY_S
unblocked by    any of them

What it finds, and how:
    dead        the process has ended (its pidfd, on this node; the end of its connection, elsewhere): within milliseconds
    silent      its watchdog thread has shown no life for `silence_s`: stopped, or something holds its interpreter lock. It cannot act itself, so others do
    overdue     its own main loop has reported nothing for the deadline of its phase: `phase_floor_s`, or `phase_factor` times the longest wait that this run has
                seen in that phase; the first time in a phase (compilation, cold caches, loading) `start_deadline_s`. Waits that are legal (for data, at the gate,
                for a push) are loops, and report; in phase "stop" every wait has a deadline of its own
    a second signal, or the end of the time that a first one leaves

Time is counted as time *listened*: a job that the scheduler suspends as a whole, or a laptop that sleeps, wakes up without an alarm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_hpc import guard
from areal_hpc.config import Config
from areal_hpc.observe import status
from areal_hpc.observe.links import Events, Hub, Links, Spoke
from areal_hpc.observe.status import RankStatus, StatusFile, StatusView
from areal_hpc.observe.timeline import Phases
from areal_hpc.signals import StopFlag
from areal_hpc.topology import World

BEAT_EVERY_S = 0.5
STACKS_S = 1.0
"""Seconds that ranks get to write their stacks."""
FOLLOW_S = 4.0
"""Seconds after which a rank that has heard of a failure ends itself, if nobody has done it."""
START_GRACE_S = 10.0
"""Added to start_deadline_s: loops that have it as their own deadline know better what they were waiting for."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the job has to end."""

    world_rank: int
    name: str
    error: str
    phase: str
    kill: bool = False
    """The rank still exists and will not end by itself."""
    died: bool = False
    """Seen by its end, which the launcher may have seen in a truer order."""


@dataclass(slots=True)
class Peer:
    """Another rank, as seen from this one."""

    world_rank: int
    name: str
    pid: int = 0
    process: int | None = None
    """pidfd; None for a rank of another node."""
    view: StatusView | None = None
    row: Mapping[str, Any] | None = None
    """Latest row of a rank of another node."""
    num_beats: int = 0
    silent_s: float = 0.0
    """Listened without a sign of life."""
    left: bool = False

    @property
    def status(self) -> RankStatus | None:
        return None if self.view is None else self.view.read()

    @property
    def phase(self) -> str:
        """As far as known."""
        if self.view is not None:
            found = self.view.read()
            return "start" if found is None else found.phase
        return "start" if self.row is None else str(self.row["phase"])


def phase_deadline_s(phase: str, longest_s: float | None, config: Config) -> float:
    """Seconds that a main loop may be without a report in `phase`, in which it has been silent for `longest_s` at most so far (None: first time there)."""
    watchdog = config.watchdog
    if phase == "stop":
        return float("inf")
    if longest_s is None or phase == "start":
        return max(watchdog.phase_floor_s, config.transport.start_deadline_s + START_GRACE_S)
    return max(watchdog.phase_floor_s, watchdog.phase_factor * longest_s)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank leaves its traces."""

    attempt_dir: Path
    name: str
    file: StatusFile | None
    """None where the disk has no room for it: this rank is then watched less closely."""
    stacks: IO[bytes]


def announce(attempt_dir: Path, world_rank: int) -> Place:
    """Before MPI starts: take hold of the lifeline, make the status file, and make guard.STACK_SIGNAL write the stacks of this process.

    It writes them in C, so also while something holds the interpreter lock.
    """
    first = status.this_process(world_rank, phase="mpi")
    status.hold_lifeline(world_rank)
    file: StatusFile | None = None
    stacks: IO[bytes] = open(os.devnull, "wb", buffering=0)  # noqa: SIM115 (open as long as the process lives)
    try:
        file = StatusFile(attempt_dir, first)
        stacks = open(attempt_dir / f"stacks-rank-{world_rank:05d}.txt", "wb", buffering=0)  # noqa: SIM115
    except OSError as error:
        print(
            f"areal-hpc: WARNING: {first.name} cannot write into {attempt_dir} ({error.strerror}): the others can see its death, but not its silence",
            file=sys.stderr,
        )
    faulthandler.register(guard.STACK_SIGNAL, stacks, all_threads=True, chain=False)
    return Place(attempt_dir, first.name, file, stacks)


class Watchdog:
    """Lifecycle: `start` (collective) -> ... -> `stop` at a good end; at a bad one the process ends from within.

    Trap: the thread of a rank whose interpreter is held up does not run: such a rank is found by the others. A job has two ranks at the least.
    """

    def __init__(self, config: Config, world: World, phases: Phases, stop: StopFlag, place: Place, links: Links | None) -> None:
        self._config, self._world, self._phases, self._stop_flag = config, world, phases, stop
        self._attempt_dir, self._file, self._stacks, self._links = place.attempt_dir, place.file, place.stacks, links
        self._own = status.this_process(world.world_rank, world.name())
        self._peers: dict[int, Peer] = {}
        self._listened_at = time.monotonic()
        self._own_number, self._own_silent_s = -1, 0.0
        self._stopping, self._wake = threading.Event(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @classmethod
    def start(cls, config: Config, world: World, phases: Phases, stop: StopFlag, place: Place, address: str) -> Watchdog:
        """Watch, unless the configuration says not to. `address`: where other nodes reach this rank. Collective."""
        links = _connect(config, world, address) if config.watchdog.enabled else None
        made = cls(config, world, phases, stop, place, links)
        made._write()
        mine = (made._own.pid, made._own.start_ticks, place.file is not None)
        for world_rank, (pid, ticks, has_file) in enumerate(world.comm.allgather(mine)):
            if world_rank != world.world_rank:
                made._add_peer(world_rank, pid, ticks, has_file)
        if config.watchdog.enabled:
            made._thread.start()
        return made

    def _add_peer(self, world_rank: int, pid: int, ticks: int, has_file: bool) -> None:
        world = self._world
        peer = Peer(world_rank, world.full_name_of(world_rank), pid)
        if world.node_of_rank[world_rank] == world.node_of_rank[world.world_rank]:
            if has_file:  # else nobody could tell its end from a death
                peer.view = StatusView(status.status_path(self._attempt_dir, world_rank))
                peer.process = status.open_process(pid, ticks)
        elif not isinstance(self._links, Hub) and world_rank != 0:
            return  # seen by the hub, and by its neighbours
        self._peers[world_rank] = peer

    def stop(self) -> None:
        """This rank has come to a good end, as all have: whatever happens to processes from now on is no failure. A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        if self._links is not None:
            self._links.leave()
        if self._file is not None:
            self._file.leave()
        if self._stacks.name != os.devnull and os.fstat(self._stacks.fileno()).st_size == 0:
            Path(self._stacks.name).unlink(missing_ok=True)

    def table(self) -> list[dict[str, Any]]:
        """What all ranks are at, for failure.json: those of this node and those that have told it; of others what their files say."""
        self._write()
        now = time.time()
        rows = {row["rank"]: row for row in status.table(status.read_statuses(self._attempt_dir), now)}
        for peer in self._peers.values():
            if peer.row is not None:
                rows[peer.world_rank] = dict(peer.row) | {"silent_s": round(peer.silent_s, 3)}
        return [rows[rank] for rank in sorted(rows)]

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            events = self._wait()
            now = time.monotonic()
            listened_s, self._listened_at = min(now - self._listened_at, 2 * BEAT_EVERY_S), now
            self._beat()
            cause = self._find(events, listened_s)
            if cause is not None and not self._stopping.is_set():
                self._end(cause)

    def _wait(self) -> Events:
        """Until something happens, or for a beat."""
        poll = select.poll()
        descriptors = [peer.process for peer in self._peers.values() if peer.process is not None and not peer.left]
        descriptors += [] if self._links is None else self._links.filenos()
        for descriptor in [*descriptors, self._stop_flag.wakeup_fd, self._wake]:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * BEAT_EVERY_S)
        if self._stop_flag.wakeup_fd >= 0:
            self._stop_flag.read_signals()
        return Events() if self._links is None else self._links.receive()

    def _beat(self) -> None:
        """Show what this rank is at."""
        self._write()
        if self._links is not None:
            self._links.beat(self._own.row(self._own.written_at))

    def _write(self) -> None:
        report, now_s, now = self._phases.report, self._phases.now_s(), time.time()
        self._own = dataclasses.replace(
            self._own,
            num_reports=report.number,
            num_beats=self._own.num_beats + 1,
            phase_since=now - (now_s - report.phase_since_s),
            reported_at=now - (now_s - report.at_s),
            written_at=now,
            phase=report.phase,
            waits_for=report.waits_for,
        )
        if self._file is not None:
            self._file.write(self._own)

    def _find(self, events: Events, listened_s: float) -> Cause | None:
        """The first reason to end the job, surest first."""
        return self._told(events) or self._dead(events) or self._signalled() or self._silent(events, listened_s) or self._overdue(listened_s)

    def _told(self, events: Events) -> Cause | None:
        return Cause(**events.ends[0]) if events.ends else None

    def _dead(self, events: Events) -> Cause | None:
        for peer in self._peers.values():
            if peer.process is None or peer.left or not select.select([peer.process], [], [], 0)[0]:
                continue
            found = peer.status
            peer.left = found is not None and found.left
            if not peer.left:
                how = status.how_it_ended(peer.pid) or "its process ended"
                return Cause(peer.world_rank, peer.name, f"died ({how}) in phase {peer.phase}", peer.phase, died=True)
        for world_rank in events.lost:
            peer = self._peers[world_rank]
            return Cause(world_rank, peer.name, f"died (its connection broke) in phase {peer.phase}", peer.phase, died=True)
        return None

    def _signalled(self) -> Cause | None:
        flag, world = self._stop_flag, self._world
        phase = self._phases.report.phase
        if flag.again:
            return Cause(world.world_rank, world.name(), f"ended by a second signal ({flag.again} after {flag.signal_name}) in phase {phase}", phase)
        deadline_s = self._config.watchdog.stop_deadline_s
        if flag.requested and time.monotonic() - flag.requested_at > deadline_s:
            error = f"the run had not ended {deadline_s:g} s after {flag.signal_name} (watchdog.stop_deadline_s); in phase {phase}"
            return Cause(world.world_rank, world.name(), error, phase)
        return None

    def _silent(self, events: Events, listened_s: float) -> Cause | None:
        """The one that has been silent longest, if it is beyond its deadline."""
        for world_rank, row in events.beats.items():
            self._peers[world_rank].row, self._peers[world_rank].silent_s = row, 0.0
        late: list[Peer] = []
        for peer in self._peers.values():
            if peer.view is not None:
                found = peer.status
                num_beats = -1 if found is None else found.num_beats
                if num_beats != peer.num_beats or (found is not None and found.left):
                    peer.num_beats, peer.silent_s = num_beats, 0.0
                    continue
            elif peer.world_rank not in events.beats and self._links is None:
                continue  # no file, and no link: nothing to hear
            if peer.world_rank not in events.beats:
                peer.silent_s += listened_s
            limit_s = self._config.watchdog.silence_s
            if peer.phase == "start":
                limit_s = max(limit_s, self._config.transport.start_deadline_s)
            if peer.silent_s > limit_s:
                late.append(peer)
        if not late:
            return None
        peer = max(late, key=lambda p: p.silent_s)
        stopped = "its process is stopped" if peer.view is not None and status.is_stopped(peer.pid) else "stopped, or its interpreter is held up"
        error = f"silent for {peer.silent_s:.0f} s ({stopped}) in phase {peer.phase}; watchdog.silence_s={self._config.watchdog.silence_s:g}"
        return Cause(peer.world_rank, peer.name, error, peer.phase, kill=True)

    def _overdue(self, listened_s: float) -> Cause | None:
        report = self._phases.report
        if report.number != self._own_number:
            self._own_number, self._own_silent_s = report.number, 0.0
            return None
        self._own_silent_s += listened_s
        longest_s = self._phases.longest_s.get(report.phase)
        deadline_s = phase_deadline_s(report.phase, longest_s, self._config)
        if self._own_silent_s <= deadline_s:
            return None
        seen = "first time there" if longest_s is None else f"longest before {longest_s:.1f} s"
        waits = f", waiting for {report.waits_for}" if report.waits_for else ""
        error = f"stuck in phase {report.phase} for {self._own_silent_s:.0f} s{waits} (deadline {deadline_s:.0f} s, {seen})"
        return Cause(self._world.world_rank, self._world.name(), error, report.phase)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self, cause: Cause) -> None:
        """Write down who, what and who waits for whom; collect stacks; end the job. Does not return."""
        report = {
            "status": "failed",
            "exit_status": guard.FAILED,
            "rank": cause.world_rank,
            "name": cause.name,
            "error": cause.error,
            "died": cause.died,
            "phase": cause.phase,
            "found_by": self._world.name(),
            "time": time.time(),
            "ranks": self.table(),
        }
        path = self._attempt_dir / "failure.json"
        first = guard.claim(path, report)
        if self._links is not None:
            self._links.tell_end(dataclasses.asdict(cause))
        if first:
            with contextlib.suppress(OSError):
                print(f"areal-hpc: {cause.name} {cause.error}; found by {self._world.name()}; see {path}", file=sys.stderr, flush=True)
            self._signal_node(guard.STACK_SIGNAL)
        os.kill(os.getpid(), guard.STACK_SIGNAL)
        time.sleep(STACKS_S if first else FOLLOW_S)
        victim = self._peers.get(cause.world_rank)
        if cause.kill and victim is not None and victim.process is not None:
            _signal(victim.process, signal.SIGKILL)  # a stopped process outlives launchers that ask politely
        guard.abort(guard.FAILED)

    def _signal_node(self, number: int) -> None:
        for peer in self._peers.values():
            if peer.process is not None:
                _signal(peer.process, number)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def _connect(config: Config, world: World, address: str) -> Links | None:
    """The links of this rank; None where it needs none. Collective."""
    if world.num_nodes == 1:
        return None
    hub: Hub | None = None
    if world.world_rank == 0:
        hub = Hub(address, [rank for rank in range(world.size) if world.node_of_rank[rank] != world.node_of_rank[0]])
    host, port, token = world.comm.bcast(None if hub is None else (address, hub.port, hub.token), root=0)
    if world.node_of_rank[world.world_rank] != world.node_of_rank[0]:
        return Spoke(host, port, token, world.world_rank, config.transport.start_deadline_s)
    return hub
