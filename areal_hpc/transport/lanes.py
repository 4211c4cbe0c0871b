"""Which way each generation rank's lane takes, and the set-up of both ends.

Lane g joins generation rank g and training rank g mod T. Both on one node: shared memory. On two nodes, or everywhere with `transport.lanes = forwarded`:
a lane on each side and a forwarder between them (forward.py). The loops at both ends see a RingProducer and RingConsumers either way.

A lane has a name in /dev/shm only until both ends are attached: a killed run leaves nothing behind but what dies in these few seconds, and that is swept
by the first rank of each node at the next start.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from areal_hpc.config import Config, ConfigError
from areal_hpc.topology import World, lane_owner
from areal_hpc.transport.forward import ForwardReceiver, ForwardSender, RemoteLane
from areal_hpc.transport.ring import Ring, RingConsumer, RingProducer, sweep_stale

LOGGED_COUNTERS: tuple[Literal["records", "bytes", "markers", "checksum_errors", "high_water_bytes", "full_waits", "full_wait_s"], ...] = (
    "records",
    "bytes",
    "markers",
    "checksum_errors",
    "high_water_bytes",
    "full_waits",
    "full_wait_s",
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The generation rank's end."""

    producer: RingProducer
    sender: ForwardSender | None
    """Carries the records on, where the lane is forwarded."""

    def progress(self) -> None:
        """Once per turn of the worker's loop. Never blocks."""
        if self.sender is not None:
            self.sender.progress()

    def check(self) -> None:
        """About once a second: raises LaneClosed when the training rank behind the lane is dead, though there is nothing to send (on this node; see forward.py)."""
        self.producer.check_consumer()

    def close(self, deadline_s: float) -> None:
        """No record follows. Raises TimeoutError when the other end does not take what was sent."""
        if self.sender is not None:
            self.sender.close(deadline_s)
        self.producer.close()


@dataclass(frozen=True, slots=True)
class Incoming:
    """The training rank's end: generation rank -> lane."""

    consumers: dict[int, RingConsumer]
    receiver: ForwardReceiver
    """Fills those that are forwarded."""
    names: dict[int, str]
    """generation rank -> its name in messages."""

    def rows(self, time_s: float, world_rank: int) -> list[dict[str, Any]]:
        """State of each lane: rows of the log's table /ring."""
        return [self._row(lane, consumer) | {"time_s": time_s, "rank": world_rank} for lane, consumer in self.consumers.items()]

    def _row(self, lane: int, consumer: RingConsumer) -> dict[str, Any]:
        counters = consumer.counters()
        row: dict[str, Any] = {
            "lane": lane,
            "way": 0,
            "used_bytes": consumer.used_bytes,
            "silent_s": consumer.heartbeat_age_s,
            "credit_waits": 0,
            "credit_wait_s": 0.0,
            **{name: counters[name] for name in LOGGED_COUNTERS},
        }
        if (remote := self.receiver.lanes.get(lane)) is not None:  # what happened at the other end, as of its last sign of life
            told = remote.counters()
            row |= {"way": 1, "silent_s": told["silent_s"], "full_waits": told["full_waits"], "full_wait_s": told["full_wait_s"]}
            row |= {"credit_waits": told["credit_waits"], "credit_wait_s": told["credit_wait_s"]}
        return row

    def close(self, deadline_s: float) -> None:
        """Take what is under way, which nobody will read, and close. Raises TimeoutError that names the ranks that keep it waiting."""
        self.receiver.finish(deadline_s)
        for consumer in self.consumers.values():
            consumer.close()


def is_forwarded(config: Config, world: World, generation_rank: int) -> bool:
    """Does this lane go by messages?"""
    source, owner = world.generation_ranks[generation_rank], world.training_ranks[lane_owner(generation_rank, world.num_training)]
    return config.transport.lanes == "forwarded" or world.node_of_rank[source] != world.node_of_rank[owner]


def open_outgoing(config: Config, world: World, attempt: int = 1) -> Outgoing:
    """A generation rank's end in attempt `attempt` of the run. Collective with `open_incoming`.

    Raises TimeoutError that says which ranks are missing, ConfigError if /dev/shm is too small.
    """
    name = _agree_on_name(config, world)
    lane, deadline_s = world.role_rank, config.transport.start_deadline_s
    if is_forwarded(config, world, lane):
        producer, consumer = _open_both(_ring(config, f"{name}.{lane}.out", lane, name, attempt), world)
        owner = world.training_ranks[lane_owner(lane, world.num_training)]
        outgoing = Outgoing(producer, ForwardSender(world.forward, owner, world.full_name_of(owner), producer, consumer))
        world.barrier(deadline_s, "create their lanes")
    else:
        world.barrier(deadline_s, "create their lanes")
        outgoing = Outgoing(_ring(config, f"{name}.{lane}", lane, name, attempt).producer(timeout_s=deadline_s), None)
    world.barrier(deadline_s, "attach to their lanes")
    return outgoing


def open_incoming(config: Config, world: World, attempt: int = 1) -> Incoming:
    """A training rank's end. Collective with `open_outgoing`. Raises as that."""
    name = _agree_on_name(config, world)
    deadline_s = config.transport.start_deadline_s
    mine = [g for g in range(world.num_generation) if lane_owner(g, world.num_training) == world.role_rank]
    names = {g: world.full_name_of(world.generation_ranks[g]) for g in mine}
    consumers: dict[int, RingConsumer] = {}
    remote: list[RemoteLane] = []
    try:
        for g in mine:
            if is_forwarded(config, world, g):
                producer, consumers[g] = _open_both(_ring(config, f"{name}.{g}.in", g, name, attempt), world)
                remote.append(RemoteLane(g, world.generation_ranks[g], names[g], producer, consumers[g]))
            else:
                consumers[g] = _make(_ring(config, f"{name}.{g}", g, name, attempt), world)
        world.barrier(deadline_s, "create their lanes")
        world.barrier(deadline_s, "attach to their lanes")
    finally:  # also when there is no room for one of them
        for consumer in consumers.values():
            consumer.unlink()
    return Incoming(consumers, ForwardReceiver(world.forward, world.name(), remote, config.transport.silence_deadline_s), names)


def no_lanes(config: Config, world: World) -> Incoming:
    """The end of a rank that trains what it has generated itself."""
    return Incoming({}, ForwardReceiver(world.forward, world.name(), [], config.transport.silence_deadline_s), {})


def _agree_on_name(config: Config, world: World) -> str:
    """What the names of this run's lanes begin with, once every node is rid of what killed runs left there. Collective."""
    if world.local_rank == 0:  # the local launcher has done it before it looked for room; under srun nobody has
        for left in sweep_stale():
            print(f"removed /dev/shm/{left} on host {world.host}, left by a killed run", flush=True)
    world.barrier(config.transport.start_deadline_s, "have their model or engine")
    name: str = world.comm.bcast(secrets.token_hex(8), root=world.training_ranks[0])
    return name


def _ring(config: Config, name: str, lane: int, run_name: str, attempt: int) -> Ring:
    job_id = int(run_name, 16) >> 2  # 62 bits
    return Ring(name, config.transport.lane_bytes, lane=lane, job_id=job_id, restart_id=attempt)


def _make(ring: Ring, world: World) -> RingConsumer:
    try:
        return ring.consumer()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        shared = os.statvfs("/dev/shm")
        free = shared.f_bavail * shared.f_frsize
        raise ConfigError(
            f"host {world.host}: no room in /dev/shm for one more lane of transport.lane_bytes={ring.capacity_bytes} ({free} bytes are free); "
            "use smaller lanes, fewer ranks per node, or enlarge /dev/shm"
        ) from error


def _open_both(ring: Ring, world: World) -> tuple[RingProducer, RingConsumer]:
    """Both ends of a lane in this process, without a name from the start."""
    consumer = _make(ring, world)
    producer = ring.producer(timeout_s=0)
    consumer.unlink()
    return producer, consumer
