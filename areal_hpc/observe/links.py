"""Signs of life between nodes: every rank that is not on the node of world rank 0 holds one TCP connection to it.

    rank r of another node                          world rank 0
    Spoke ── hello(token, rank), beat(status) ──▶   Hub
          ◀── beat, end(what happened) ─────────

A process that dies closes its connections, whatever killed it: the other end reads that within milliseconds, long before any silence would tell. Both ends belong to
the watchdogs' threads alone: no MPI, no file system, and nothing that the main threads do can block them. The port is a free one, as that of the process groups' store;
its number and a token go round by MPI, and whoever does not know the token is hung up on. Jobs on one node open no port.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_BUFFER = 1 << 20
"""Bytes of an unfinished line, beyond which it is none of ours."""

FAREWELL_S = 2.0


@dataclass(slots=True)
class Events:
    """What the links told since the last look."""

    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    """world rank -> the latest of its rows."""
    lost: list[int] = field(default_factory=list)
    """World ranks whose connection broke before they said that they leave."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    """Failures that another rank has found."""


class _Connection:
    """Lines of JSON both ways, without ever blocking."""

    def __init__(self, connected: socket.socket, world_rank: int | None) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.world_rank = world_rank
        """Of the other end; None until it has said it."""
        self.left = self.broken = False
        self._incoming = self._outgoing = b""

    def send(self, message: dict[str, Any], *, may_be_skipped: bool = False) -> None:
        if may_be_skipped and self._outgoing:  # the other end does not read: one more would only queue up
            return
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing and not self.broken:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def close(self, last: dict[str, Any]) -> None:
        """Send what is left and a last message, for FAREWELL_S at most, and hang up."""
        self.send(last)
        self.socket.settimeout(FAREWELL_S)
        with contextlib.suppress(OSError):
            self.socket.sendall(self._outgoing)
        self.socket.close()

    def receive(self) -> list[dict[str, Any]]:
        """Whole messages that are here. Sets `broken` at the end of the stream."""
        while not self.broken and len(self._incoming) < MAX_BUFFER:
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.broken = not data
            self._incoming += data
        *lines, self._incoming = self._incoming.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            self.broken = True
            return []


class Links:
    """Common to both ends: `beat`, `receive`, `tell_end`, `leave`, from one thread."""

    def __init__(self) -> None:
        self._connections: list[_Connection] = []

    def filenos(self) -> list[int]:
        """Descriptors to wait for."""
        return [connection.socket.fileno() for connection in self._connections]

    def beat(self, row: dict[str, Any]) -> None:
        """Say what this rank is at."""
        for connection in self._connections:
            connection.send({"beat": row}, may_be_skipped=True)

    def tell_end(self, what: dict[str, Any]) -> None:
        """Let the others know of a failure."""
        for connection in self._connections:
            connection.send({"end": what})

    def leave(self) -> None:
        """This rank ends well."""
        for connection in self._connections:
            connection.close({"left": True})
        self._connections.clear()

    def receive(self) -> Events:
        """What has come in since the last call."""
        events = Events()
        for connection in list(self._connections):
            connection.flush()
            self._read(connection, events)
            if connection.broken:
                if connection.world_rank is not None and not connection.left:
                    events.lost.append(connection.world_rank)
                connection.socket.close()
                self._connections.remove(connection)
        return events

    def _read(self, connection: _Connection, events: Events) -> None:
        for message in connection.receive():
            if connection.world_rank is None:
                self._welcome(connection, message)
            elif "beat" in message:
                events.beats[connection.world_rank] = message["beat"]
            elif "end" in message:
                events.ends.append(message["end"])
            elif "left" in message:
                connection.left = True

    def _welcome(self, connection: _Connection, message: dict[str, Any]) -> None:
        """A spoke knows whom it has called."""
        raise AssertionError("only the hub is called")


class Hub(Links):
    """The end at world rank 0. `members`: the ranks that will call."""

    def __init__(self, address: str, members: Iterable[int]) -> None:
        super().__init__()
        self.token = secrets.token_hex(16)
        self._members = set(members)
        self._listener = socket.create_server((address, 0), backlog=max(16, len(self._members)))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def filenos(self) -> list[int]:
        return [self._listener.fileno(), *super().filenos()]

    def receive(self) -> Events:
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = self._listener.accept()
                self._connections.append(_Connection(accepted, None))
        return super().receive()

    def tell_end(self, what: dict[str, Any]) -> None:
        for connection in self._connections:
            if connection.world_rank is not None:
                connection.send({"end": what})

    def beat(self, row: dict[str, Any]) -> None:
        for connection in self._connections:
            if connection.world_rank is not None:
                connection.send({"beat": row}, may_be_skipped=True)

    def leave(self) -> None:
        super().leave()
        self._listener.close()

    def _welcome(self, connection: _Connection, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        if not hmac.compare_digest(str(message.get("token")), self.token) or rank not in self._members:
            connection.broken = True
            return
        self._members.discard(rank)
        connection.world_rank = rank


class Spoke(Links):
    """The end at a rank of another node. Raises OSError when the hub cannot be reached within `timeout_s`."""

    def __init__(self, address: str, port: int, token: str, world_rank: int, timeout_s: float) -> None:
        super().__init__()
        connection = _Connection(socket.create_connection((address, port), timeout_s), 0)
        connection.send({"token": token, "rank": world_rank})
        self._connections.append(connection)
