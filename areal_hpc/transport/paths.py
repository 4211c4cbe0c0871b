"""Which way the weights take to each generation rank, and the set-up of it.

Where all training ranks live on one node and compute on its CPU, generation ranks of that node map what the training ranks write; all others take part in broadcasts.
Both may happen in one job. `transport.push_path = network`, or a /dev/shm without room for the images, sends everything over the network; which way was taken is
in the log.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass

from areal_hpc.config import Config
from areal_hpc.groups import Connection
from areal_hpc.topology import World
from areal_hpc.transport.images import NUM_IMAGES, ImageLayout, SharedImages
from areal_hpc.transport.weights import Network


@dataclass(frozen=True, slots=True)
class Paths:
    """What this rank has of the push."""

    senders: tuple[int, ...]
    """World ranks that send: sender k is root k."""
    shared: tuple[int, ...]
    """World ranks of the generation ranks that map images."""
    network: Network | None
    """None on ranks that need none."""
    images: SharedImages | None
    layout: ImageLayout | None
    """Of the shared images."""

    def described(self, num_generation: int) -> str:
        """For the log."""
        roots = "one root" if len(self.senders) == 1 else f"{len(self.senders)} roots"
        ways = [f"{len(self.shared)} by shared memory"] * bool(self.shared)
        ways += [f"{num_generation - len(self.shared)} over the network"] * (len(self.shared) < num_generation)
        return f"weights from {roots} to {num_generation} generation ranks: {', '.join(ways)}"


def ranks_that_map(config: Config, world: World, *, on_cpu: bool) -> tuple[int, ...]:
    """World ranks of the generation ranks that share a node with all training ranks, in their order; none where the push is to go over the network."""
    nodes = {world.node_of_rank[rank] for rank in world.training_ranks}
    if config.transport.push_path == "network" or not on_cpu or len(nodes) > 1:
        return ()
    return tuple(rank for rank in world.generation_ranks if world.node_of_rank[rank] in nodes)


def open_paths(config: Config, world: World, connection: Connection, layout: ImageLayout | None) -> Paths:
    """Memory and process groups of the push. Collective over the world. `layout`: of a generation rank's engine, None on training ranks."""
    senders = world.training_ranks if config.transport.push == "all-roots" else world.training_ranks[:1]
    shared = ranks_that_map(config, world, on_cpu=connection.device.type == "cpu")
    images, agreed = None, None
    if shared:
        agreed = world.comm.bcast(layout, root=shared[0])
        images, shared = _open_images(world, agreed, shared) if agreed is not None else (None, ())
    receivers = tuple(rank for rank in world.generation_ranks if rank not in shared)
    takes_part = receivers and (world.world_rank in senders or world.world_rank in receivers)
    network = Network(connection, senders, receivers, world.world_rank, config.transport.bucket_bytes) if takes_part else None
    return Paths(senders, shared, network, images, agreed if images is not None else None)


def _open_images(world: World, layout: ImageLayout, shared: tuple[int, ...]) -> tuple[SharedImages | None, tuple[int, ...]]:
    """This rank's mapping of the shared images, and who has one: nobody, where there is no room. Collective over the world."""
    creator = world.training_ranks[0]
    created: SharedImages | None = None
    name = ""
    if world.world_rank == creator:
        job, restart = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
        name = f"areal_hpc.{secrets.token_hex(8)}.weights-{job}-{restart}"
        try:
            created = SharedImages.create(name, layout.num_bytes, NUM_IMAGES)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            print(f"host {world.host}: {error.strerror}; weights go over the network instead", flush=True)
            name = ""
    name = world.comm.bcast(name, root=creator)
    if not name:
        return None, ()
    try:
        images = created
        if images is None and (world.role == "training" or world.world_rank in shared):
            images = SharedImages.attach(name, layout.num_bytes, NUM_IMAGES, writable=world.role == "training")
        world.comm.Barrier()
    finally:
        if created is not None:
            created.unlink()
    return images, shared
