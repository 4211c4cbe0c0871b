"""The training side of a weight push: pack, announce, send; and, on training rank 0, the book of who has confirmed and swapped.

Two versions may be on the way at a time. `publish` waits for room (the version before the last confirmed everywhere, and, where images are shared, one that nobody
uses), copies the rows, and returns: forward and backward of the next batch overlap the sending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.transport.images import free_image
from areal_hpc.transport.messages import Mailbox, Message, Tag
from areal_hpc.transport.weights import BUFFERS, Announcement, Damage, Sender, checksum, part_of

POLL_S = 0.0005


@dataclass(slots=True)
class Push:
    """One version on its way (training rank 0)."""

    version: int
    num_bytes: int
    pack_s: float
    checksum: int
    started_at: float
    image: int = 0
    """Shared image that holds it."""
    num_resent: int = 0
    """Buckets that were sent once more."""
    receive_s: dict[int, float] = field(default_factory=dict)
    """world rank -> seconds from its turn to the checked bytes, as that rank measured them (this one trains meanwhile)."""
    stage_s: dict[int, float] = field(default_factory=dict)
    """world rank -> of which its own work on them."""
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
            "stage_max_s": max(self.stage_s.values()),
            "confirm_s": max(0.0, self.settled_at - self.started_at - self.transfer_s),
            "pause_max_s": max(self.pause_s.values(), default=0.0),
            "resent": self.num_resent,
            "checksum": self.checksum,
        }


@dataclass(slots=True)
class Publisher:
    """Publishes versions one after the other.

    Trap: on training ranks other than 0, messages about the push come through the same mailbox as everything else: give each to `receive` first.
    """

    world: World
    mailbox: Mailbox
    sender: Sender
    phases: Phases
    deadline_s: float
    shared_ranks: tuple[int, ...] = ()
    """World ranks of the generation ranks that map images."""
    pushes: list[Push] = field(default_factory=list)
    """Those not yet taken for the log, ascending (training rank 0)."""
    active_version: dict[int, int] = field(default_factory=dict)
    """world rank of a generation rank -> version it generates with (training rank 0)."""
    _image_of: dict[int, int] = field(default_factory=dict)
    """version -> shared image that holds it."""
    excused_s: float = 0.0
    """Seconds more that ranks without staging have: an evaluation needs the weights that the push would overwrite."""
    head_deadline_s: float = 900.0
    """Seconds that the other training ranks wait for training rank 0, which has deadlines of its own."""
    _confirmed: int = -1
    """Newest version that every rank has confirmed."""
    _settled_at: float = 0.0
    _unstaged: set[int] = field(default_factory=set)
    """World ranks that load over the weights in use."""

    def publish(
        self,
        named_rows: Iterable[tuple[str, torch.Tensor]],
        version: int,
        ticket_limit: int,
        *,
        evaluate: bool,
        final: bool,
        pump: Callable[[], None] = lambda: None,
    ) -> None:
        """Pack and start sending. Collective over the training ranks. Returns while the bytes are on their way; the rows may change then.

        `pump`: what training rank 0 does while it waits. Raises TimeoutError that names the ranks that have not confirmed, ConnectionError for one that is gone.
        """
        image = self._wait_room(version, pump)
        with self.phases("pack"):
            began_at = time.monotonic()
            checksums: list[tuple[int, ...]] = self.world.role_comm.allgather(self.sender.pack(named_rows, version, image))
            image_checksums: tuple[int, ...] = ()
            if self.sender.images is not None:  # the gathering above is also the moment when all rows of the image are there
                part = part_of(self.sender.images.images[image], self.world.role_rank, self.world.num_training)
                image_checksums = tuple(self.world.role_comm.allgather(checksum(part)))
            if self.world.is_first_trainer:
                sent = tuple(checksums[: self.sender.manifest.num_roots])
                announcement = Announcement(version, ticket_limit, sent, evaluate, final, image, image_checksums)
                for rank in self.world.generation_ranks:
                    self.mailbox.post(rank, Tag.VERSION, announcement)
                self._book(announcement, began_at)
            self.sender.send(version)

    def _book(self, announcement: Announcement, began_at: float) -> None:
        combined, now = 0, time.monotonic()
        for value in [value for values in (*announcement.checksums, announcement.image_checksums) for value in values]:
            combined = (combined * 1_000_003 + value) & (2**64 - 1)
        self.pushes.append(Push(announcement.version, self.sender.manifest.num_bytes, now - began_at, combined, now, announcement.image))
        if self.sender.images is not None:
            self._image_of = {v: image for v, image in self._image_of.items() if image != announcement.image} | {announcement.version: announcement.image}

    def _wait_room(self, version: int, pump: Callable[[], None]) -> int:
        """Until the buffer of this version and a shared image are free; returns the image. Collective: the others wait for training rank 0, and answer meanwhile."""
        image: int | None = 0
        with self.phases("push_wait"):
            if self.world.is_first_trainer:

                def room() -> bool:
                    nonlocal image
                    if self.sender.images is not None:
                        image = free_image(self._image_of, self.versions_mapped, [self._confirmed, *(push.version for push in self.unsettled)])
                    return len(self.unsettled) < BUFFERS and image is not None

                self._wait(room, pump)
            whom = f"{'the other training ranks' if self.world.is_first_trainer else 'training rank 0'}, before the push of version {version}"
            ready = self.world.role_comm.Ibarrier()
            stop_at = time.monotonic() + self.head_deadline_s
            while not ready.Test():
                self.phases.alive(whom)
                if not self.world.is_first_trainer:
                    for message in self.mailbox.poll():
                        assert self.receive(message), f"unexpected {message.tag.name} message before version {version}"
                    self._check_sender()
                if time.monotonic() > stop_at:
                    raise TimeoutError(f"waited {self.head_deadline_s:g} s for {whom}")
                time.sleep(POLL_S)
            image = self.world.role_comm.bcast(image)
            self.sender.wait_sent(version, self.deadline_s, lambda: self.phases.alive(f"the broadcasts of version {version - BUFFERS}"))
        assert image is not None
        return image

    @property
    def versions_mapped(self) -> list[int]:
        """Versions whose images ranks compute from."""
        return [self.active_version[rank] for rank in self.shared_ranks if rank in self.active_version]

    def receive(self, message: Message) -> bool:
        """Book what a rank says about a push; False for any other message."""
        if message.tag == Tag.CONFIRM:
            version, receive_s, stage_s, is_staged = message.body
            push = self._push(version)
            assert push is not None, f"confirmation of version {version} out of turn"
            push.receive_s[message.source], push.stage_s[message.source] = receive_s, stage_s
            if not is_staged:
                self._unstaged.add(message.source)
            if len(push.receive_s) == self.world.num_generation:
                push.settled_at, self._confirmed = time.monotonic(), version
                self._settled_at = push.settled_at
        elif message.tag == Tag.SWAPPED:
            version, pause_s = message.body
            self.active_version[message.source] = version
            if (push := self._push(version)) is not None:
                push.pause_s[message.source] = pause_s
        elif message.tag == Tag.DAMAGED:
            damage: Damage = message.body
            if (push := self._push(damage.version)) is not None:
                push.num_resent += 1
            self._send_again(damage, message.source)
        elif message.tag == Tag.RESEND:
            self._send_again(*message.body)
        else:
            return False
        return True

    def _send_again(self, damage: Damage, receiver: int) -> None:
        """Send a bucket once more, or ask the rank that has it to."""
        if damage.root == self.sender.root:
            self.mailbox.post(receiver, Tag.BUCKET, (damage, self.sender.payload(damage.version, damage.bucket)))
        else:
            self.mailbox.post(self.world.training_ranks[damage.root], Tag.RESEND, (damage, receiver))

    def _push(self, version: int) -> Push | None:
        return next((push for push in self.pushes if push.version == version), None)

    @property
    def oldest_active_version(self) -> int:
        """Lowest version that some generation rank still samples with; -1 before all have their first weights."""
        return min((self.active_version.get(rank, -1) for rank in self.world.generation_ranks), default=-1)

    @property
    def unsettled(self) -> list[Push]:
        """Versions that some generation rank has not confirmed."""
        return [push for push in self.pushes if push.settled_at is None]

    @property
    def settled(self) -> bool:
        """Every generation rank has confirmed every push."""
        return not self.unsettled

    def take_finished(self, *, final: bool = False) -> list[Push]:
        """Pushes that are ready for the log: confirmed, and every rank has told its pause (or will not, as a newer version is confirmed or the run ends)."""
        taken = []
        while self.pushes and self.pushes[0].settled_at is not None:
            push = self.pushes[0]
            if not (final or len(push.pause_s) == self.world.num_generation or push.version < self._confirmed):
                break
            taken.append(self.pushes.pop(0))
        return taken

    def _late(self, push: Push) -> list[int]:
        """World ranks that have not confirmed it."""
        return [rank for rank in self.world.generation_ranks if rank not in push.receive_s]

    @property
    def _behind(self) -> list[int]:
        """World ranks that keep a shared image: they map an older version than the newest that is confirmed everywhere."""
        return [rank for rank in self.shared_ranks if self.active_version.get(rank, -1) < self._confirmed]

    @property
    def waits_for(self) -> str:
        """For people."""
        if self.unsettled:
            what, ranks = f"confirmation of version {self.unsettled[0].version}", self._late(self.unsettled[0])
        else:
            what, ranks = f"the swap to version {self._confirmed}", self._behind
        names = [self.world.name_of(rank) for rank in ranks]
        return f"{what} by {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" if names else ""

    def wait_settled(self, pump: Callable[[], None]) -> None:
        """Until every rank has confirmed every push (training rank 0). Raises TimeoutError that names the ranks that have not."""
        with self.phases("push_wait"):
            self._wait(lambda: self.settled, pump)

    def _check_sender(self) -> None:
        """Raises ConnectionError that names whom the push that broke off was for."""
        try:
            self.sender.check()
        except ConnectionError as error:
            late = self._late(self.unsettled[0]) if self.unsettled else []
            named = ", ".join(map(self.world.full_name_of, late)) or "unknown to this rank"
            raise ConnectionError(f"{error}; not confirmed by {named}") from error

    def _wait(self, done: Callable[[], bool], pump: Callable[[], None]) -> None:
        waiting_since = time.monotonic()
        while not done():
            pump()
            self.phases.alive(self.waits_for)
            self._check_sender()
            for push in self.unsettled[:1]:  # ranks take one version after the other: the second one's time has not begun
                late = self._late(push)
                deadline_s = self.deadline_s + (self.excused_s if self._unstaged.intersection(late) else 0.0)
                if time.monotonic() > max(push.started_at, self._settled_at) + deadline_s:
                    named = ", ".join(map(self.world.full_name_of, late))
                    raise TimeoutError(f"version {push.version} was not confirmed within {deadline_s:g} s by {named}")
            if self.settled and time.monotonic() > waiting_since + self.deadline_s:
                named = ", ".join(map(self.world.full_name_of, self._behind))
                raise TimeoutError(f"version {self._confirmed} was confirmed, but within {self.deadline_s:g} s not swapped to by {named}")
            time.sleep(POLL_S)
