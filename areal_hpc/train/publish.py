"""The training side of a weight push: pack, announce, broadcast; and, on training rank 0, the book of who has confirmed and swapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.transport.messages import Mailbox, Message, Tag
from areal_hpc.transport.weights import Announcement, Sender


@dataclass(slots=True)
class Push:
    """One version on its way (training rank 0)."""

    version: int
    num_bytes: int
    pack_s: float
    checksum: int
    started_at: float
    receive_s: dict[int, float] = field(default_factory=dict)
    """world rank -> seconds from its announcement to the checked bytes, as that rank measured them (this one trains meanwhile)."""
    settled_at: float | None = None
    """When the last confirmation was read."""
    pause_s: dict[int, float] = field(default_factory=dict)
    """world rank -> seconds it stood still for the swap."""

    @property
    def transfer_s(self) -> float:
        """The slowest receiver's time."""
        return max(self.receive_s.values())

    def row(self) -> dict:
        """Row of /pushes."""
        assert self.settled_at is not None
        return {
            "version": self.version,
            "bytes": self.num_bytes,
            "pack_s": self.pack_s,
            "transfer_s": self.transfer_s,
            "confirm_s": max(0.0, self.settled_at - self.started_at - self.transfer_s),
            "pause_max_s": max(self.pause_s.values(), default=0.0),
            "checksum": self.checksum,
        }


@dataclass(slots=True)
class Publisher:
    """Publishes versions one after the other: the next pack waits until every generation rank has confirmed the one before."""

    world: World
    mailbox: Mailbox
    sender: Sender
    phases: Phases
    deadline_s: float
    push: Push | None = None
    """The latest push (training rank 0)."""
    active_version: dict[int, int] = field(default_factory=dict)
    """world rank of a generation rank -> version it generates with (training rank 0)."""

    def publish(self, shards: Iterable[tuple[str, torch.Tensor]], version: int, ticket_limit: int, *, evaluate: bool, final: bool) -> None:
        """Pack and start sending. Collective over the training ranks; the previous push must have settled. Returns while the bytes are on their way."""
        with self.phases("pack"):
            self.sender.wait_sent(self.deadline_s)
            began_at = time.monotonic()
            checksum = self.sender.pack(shards)
            checksums = tuple(self.world.role_comm.allgather(checksum))
            packed_at = time.monotonic()
            if self.world.is_first_trainer:
                announcement = Announcement(version, ticket_limit, checksums, evaluate, final)
                for rank in self.world.generation_ranks:
                    self.mailbox.post(rank, Tag.VERSION, announcement)
                combined = 0
                for value in checksums:
                    combined = (combined * 1_000_003 + value) & (2**64 - 1)
                self.push = Push(version, self.sender.manifest.num_bytes, packed_at - began_at, combined, packed_at)
            self.sender.send()

    def receive(self, message: Message) -> bool:
        """Book a CONFIRM or SWAPPED message; False for any other."""
        if message.tag == Tag.CONFIRM:
            version, receive_s = message.body
            assert self.push is not None and version == self.push.version, f"confirmation of version {version} out of turn"
            self.push.receive_s[message.source] = receive_s
            if self.settled:
                self.push.settled_at = time.monotonic()
        elif message.tag == Tag.SWAPPED:
            version, pause_s = message.body
            self.active_version[message.source] = version
            if self.push is not None and version == self.push.version:
                self.push.pause_s[message.source] = pause_s
        else:
            return False
        return True

    @property
    def oldest_active_version(self) -> int:
        """Lowest version that some generation rank still samples with; -1 before all have their first weights."""
        return min((self.active_version.get(rank, -1) for rank in self.world.generation_ranks), default=-1)

    @property
    def settled(self) -> bool:
        """Every generation rank has confirmed the latest push."""
        return self.push is None or len(self.push.receive_s) == self.world.num_generation

    @property
    def waits_for(self) -> str:
        """For people."""
        if self.push is None:
            return ""
        late = [self.world.name_of(rank) for rank in self.world.generation_ranks if rank not in self.push.receive_s]
        return f"confirmation of version {self.push.version} by {', '.join(late[:8])}{f' and {len(late) - 8} more' if len(late) > 8 else ''}"

    def wait_settled(self, pump: Callable[[], None]) -> None:
        """Until every rank has confirmed (training rank 0). Raises TimeoutError that names the ranks that have not."""
        with self.phases("push_wait"):
            while not self.settled:
                pump()
                assert self.push is not None
                if time.monotonic() > self.push.started_at + self.deadline_s:
                    late = [self.world.full_name_of(rank) for rank in self.world.generation_ranks if rank not in self.push.receive_s]
                    raise TimeoutError(f"version {self.push.version} was not confirmed within {self.deadline_s:g} s by {', '.join(late)}")
                time.sleep(0.0005)
