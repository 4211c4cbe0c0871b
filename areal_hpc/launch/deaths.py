"""Which rank died first: every rank of a local job holds a connection to the launcher, its lifeline, and the launcher keeps the order in which these break.

`mpiexec` kills the rest of a job within milliseconds of the first death; the other ranks' watchdogs may not live to tell. The launcher does. The end of a process is
seen too late for that: mpiexec learns of a death when the kernel closes the dying rank's connection to it, and the ranks that it kills then can be gone before the first
one is. The kernel closes the newest descriptors first, so a lifeline, opened after the connection to mpiexec was inherited, breaks before mpiexec knows of anything; and
epoll reports events in their order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.observe import status
from areal_hpc.observe.status import LIFELINE, RankStatus

TURN_S = 1.0
"""The most that one wait takes."""
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid of the other end (unix(7), SO_PEERCRED)."""


@dataclass(slots=True)
class Lifeline:
    """One rank's connection."""

    connection: socket.socket
    pid: int
    process: int | None
    """pidfd; None when the process was gone already."""
    world_rank: int = -1
    """Its first and only message."""
    how: str = ""
    """How the process ended, if that was to be seen."""

    def read(self) -> bool:
        """False when it has broken."""
        try:
            message = self.connection.recv(64)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if message:
            self.world_rank = int(message)
        return bool(message)


@dataclass(slots=True)
class Deaths:
    """Lifecycle: `environment` for the ranks -> `wait` until the job's launcher has ended -> `close`; then `report`."""

    attempt_dir: Path
    ended: list[Lifeline] = field(default_factory=list)
    """In the order of their ends."""
    _name: str = field(default_factory=lambda: f"areal-hpc-{secrets.token_hex(16)}")
    _listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
    _events: select.epoll = field(default_factory=select.epoll)
    _alive: dict[int, Lifeline] = field(default_factory=dict)
    """By each descriptor that is still listened to."""

    def __post_init__(self) -> None:
        self._listener.bind(f"\0{self._name}")  # abstract: no file that could be left behind
        self._listener.listen(socket.SOMAXCONN)
        self._events.register(self._listener, select.EPOLLIN)

    def environment(self) -> dict[str, str]:
        """What ranks need in order to connect."""
        return {LIFELINE: self._name}

    @property
    def num_known(self) -> int:
        """Ranks that have connected and said which they are."""
        return len({line.world_rank for line in (*self._alive.values(), *self.ended)} - {-1})

    def wait(self, launcher: int) -> bool:
        """For something to happen, or a moment. `launcher`: pidfd of mpiexec. True when it has ended."""
        self._events.register(launcher, select.EPOLLIN)
        ready = [descriptor for descriptor, _ in self._events.poll(TURN_S)]
        self._events.unregister(launcher)
        for descriptor in ready:
            if descriptor == self._listener.fileno():
                self._accept()
            elif line := self._alive.get(descriptor):
                self._hear(line, descriptor)
        return launcher in ready

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
                if user != os.getuid():  # an abstract name is open to everybody
                    connection.close()
                    continue
                line = Lifeline(connection, pid, status.open_process(pid, status.start_ticks(pid)))
                for descriptor in (connection.fileno(), line.process):
                    if descriptor is not None:
                        self._alive[descriptor] = line
                        self._events.register(descriptor, select.EPOLLIN | select.EPOLLET)  # level-triggered ones keep their place in the queue

    def _hear(self, line: Lifeline, descriptor: int) -> None:
        """Its number; or that it has broken; or that its process has ended, which a child that holds the connection too can make the first sign."""
        if descriptor == line.process:
            line.how = status.how_it_ended(line.pid)
            line.read()
        elif line.read():
            return
        if line not in self.ended:
            self.ended.append(line)
        self._events.unregister(descriptor)
        del self._alive[descriptor]

    def close(self) -> None:
        """The descriptors; what is known stays."""
        lines = {id(line): line for line in (*self._alive.values(), *self.ended)}
        for line in lines.values():
            line.connection.close()
            if line.process is not None:
                os.close(line.process)
        self._listener.close()
        self._events.close()


def report(deaths: Deaths) -> dict[str, Any] | None:
    """What failure.json says of the rank that died first; None when none was seen to die. Ranks that reached the end of the run are not meant."""
    last: dict[int, RankStatus] = {rank.world_rank: rank for rank in status.read_statuses(deaths.attempt_dir) if not rank.left}
    line = next((line for line in deaths.ended if line.world_rank in last), None)
    if line is None:
        return None
    died, now = last[line.world_rank], time.time()
    how, waits = f" ({line.how})" if line.how else "", f", waiting for {died.waits_for}" if died.waits_for else ""
    return {
        "status": "failed",
        "exit_status": 1,
        "rank": died.world_rank,
        "name": died.name,
        "error": f"died{how} in phase {died.phase}{waits}",
        "died": True,
        "phase": died.phase,
        "found_by": "launcher",
        "time": now,
        "ranks": status.table(last.values(), now),
    }
