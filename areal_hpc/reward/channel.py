"""Messages over a local stream socket: a length (4 bytes, little endian), then JSON. Never pickle: what a grader sends back is data, not code.

`send` and `receive` never block; bytes that the peer has no room for wait in a buffer that `flush` (or the next `send`) empties.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 18


class ChannelClosedError(ConnectionError):
    """The peer closed its end or is gone."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outgoing = bytearray()
        self._incoming = bytearray()

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def send(self, *messages: dict[str, Any]) -> None:
        """Queue the messages and write what the socket takes now. Raises ChannelClosedError."""
        for message in messages:
            payload = json.dumps(message).encode()
            self._outgoing += _LENGTH.pack(len(payload))
            self._outgoing += payload
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now. Raises ChannelClosedError."""
        while self._outgoing:
            try:
                num_bytes = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            del self._outgoing[:num_bytes]

    def receive(self) -> list[dict[str, Any]]:
        """The complete messages that have arrived. Raises ChannelClosedError at the end of the stream, once every message before it has been returned."""
        closed = self._fill()
        messages, start = [], 0
        while len(self._incoming) - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(self._incoming, start)[0]
            if len(self._incoming) < stop:
                break
            messages.append(json.loads(self._incoming[start + _LENGTH.size : stop]))
            start = stop
        del self._incoming[:start]
        if closed and not messages:
            raise ChannelClosedError("end of stream")
        return messages

    def _fill(self) -> bool:
        """Read what is there; True at the end of the stream."""
        while True:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            self._incoming += chunk
            if not chunk:
                return True
            if len(chunk) < _CHUNK_BYTES:
                return False

    def wait(self, timeout_s: float | None) -> bool:
        """Until something arrives (True) or the time is up (False), writing what is queued meanwhile."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        ready = poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)
        if any(event & select.POLLOUT for _, event in ready):
            self.flush()
        return any(event & ~select.POLLOUT for _, event in ready)

    def close(self) -> None:
        self._socket.close()
