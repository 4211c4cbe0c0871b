"""Who is who: COMM_WORLD is split into generation and training ranks, node by node, and gets a communicator of its own for control messages.

`mpi4py.MPI` is imported inside functions only: importing it initialises MPI, and child processes that re-import this module must not do that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal_hpc import cluster
from areal_hpc.config import Config, ConfigError, check_layout, num_training_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

Role = Literal["generation", "training"]


def assign_roles(node_of_rank: Sequence[int], generation_fraction: float) -> list[Role]:
    """Role of each world rank. Training ranks are packed on as few nodes as possible, the last ones, so that their all-gathers stay inside.

    `node_of_rank[r]` is the node index of world rank r. Raises ConfigError for an impossible split.
    """
    wanted = num_training_ranks(len(node_of_rank), generation_fraction)
    ranks_of_node: dict[int, list[int]] = {}
    for world_rank, node in enumerate(node_of_rank):
        ranks_of_node.setdefault(node, []).append(world_rank)
    training: list[int] = []
    while len(training) < wanted:
        missing = wanted - len(training)
        enough = [node for node in ranks_of_node if len(ranks_of_node[node]) >= missing]
        # The smallest node that holds all that is missing, else the largest; among equals the last.
        best = min(enough, key=lambda n: (len(ranks_of_node[n]), -n)) if enough else max(ranks_of_node, key=lambda n: (len(ranks_of_node[n]), n))
        training += ranks_of_node.pop(best)[-missing:]
    return ["training" if world_rank in training else "generation" for world_rank in range(len(node_of_rank))]


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place in the job, and the communicators. `control` carries all control messages between roles."""

    world_rank: int
    role: Role
    role_rank: int
    local_rank: int
    generation_ranks: tuple[int, ...]
    """World ranks that generate, in order: generation rank g is `generation_ranks[g]`."""
    training_ranks: tuple[int, ...]
    node_of_rank: tuple[int, ...]
    """Node index (0, 1, ... in the order of their lowest ranks) of each world rank."""
    hosts: tuple[str, ...]
    """Host name of each node."""
    clock_offset_s: float
    """What training rank 0's `time.monotonic()` was ahead of this rank's at `joined_s`; 0 on its own node."""
    comm: MPI.Comm
    role_comm: MPI.Comm
    node_comm: MPI.Comm
    control: MPI.Comm
    forward: MPI.Comm
    """Carries ring records, credits and signs of life between nodes (transport/forward.py)."""
    joined_s: float = 0.0
    """When the clocks were compared, on the run's clock."""

    @property
    def size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_generation(self) -> int:
        """G."""
        return len(self.generation_ranks)

    @property
    def num_training(self) -> int:
        """T."""
        return len(self.training_ranks)

    @property
    def is_colocated(self) -> bool:
        """Every rank generates and trains, in turn. Its role is then training."""
        return self.generation_ranks == self.training_ranks

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> str:
        """Name of this rank's node."""
        return self.hosts[self.node_of_rank[self.world_rank]]

    @property
    def is_first_trainer(self) -> bool:
        """Training rank 0 composes batches, writes the log and speaks for the job."""
        return self.role == "training" and self.role_rank == 0

    def barrier(self, deadline_s: float, what: str) -> None:
        """Until all ranks are here, asleep between looks. Collective. Raises TimeoutError: a rank that hangs must not hold the others for ever."""
        request = self.comm.Ibarrier()
        stop_at = time.monotonic() + deadline_s
        while not request.Test():
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{self.name()} waited {deadline_s:g} s for all ranks to {what}")
            time.sleep(0.001)

    def clock(self) -> float:
        """Seconds on the run's clock: `time.monotonic()` of training rank 0's node (those of two nodes may lie days apart)."""
        return time.monotonic() + self.clock_offset_s

    def name(self) -> str:
        """For messages: `rank 3 (generation 2) on host n1`."""
        return self.full_name_of(self.world_rank)

    def full_name_of(self, world_rank: int) -> str:
        """The same for any rank."""
        return f"{self.name_of(world_rank)} on host {self.hosts[self.node_of_rank[world_rank]]}"

    def name_of(self, world_rank: int) -> str:
        """Without the host: `rank 3 (generation 2)`."""
        if self.is_colocated:
            return f"rank {world_rank} (colocated)"
        if world_rank in self.generation_ranks:
            return f"rank {world_rank} (generation {self.generation_ranks.index(world_rank)})"
        return f"rank {world_rank} (training {self.training_ranks.index(world_rank)})"


def lane_owner(generation_rank: int, num_training: int) -> int:
    """Training rank that consumes the ring lane of a generation rank: g mod T."""
    return generation_rank % num_training


def join(config: Config, *, training_only: bool = False) -> World:
    """Initialise MPI and split the world. Collective. Raises ConfigError for an impossible layout, on every rank alike. `training_only`: nobody generates."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    check_size(comm.size)
    if not training_only:
        check_layout(config, comm.size)
    node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader: int = node_comm.bcast(comm.rank)  # a node is named by its lowest world rank
    places: list[tuple[int, str]] = comm.allgather((leader, socket.gethostname()))
    node_of_rank, hosts = number_nodes(places)
    colocated = config.topology.mode == "colocated"
    roles: list[Role] = ["training"] * comm.size if training_only or colocated else assign_roles(node_of_rank, config.topology.generation_fraction)
    role = roles[comm.rank]
    role_comm = comm.Split(0 if role == "generation" else 1, comm.rank)
    forward = comm.Dup()
    offset_s = _clock_offset(forward, node_comm, node_of_rank, reference=roles.index("training"))
    return World(
        world_rank=comm.rank,
        role=role,
        role_rank=role_comm.rank,
        local_rank=node_comm.rank,
        generation_ranks=tuple(r for r, x in enumerate(roles) if x == "generation" or (colocated and not training_only)),
        training_ranks=tuple(r for r, x in enumerate(roles) if x == "training"),
        node_of_rank=node_of_rank,
        hosts=hosts,
        clock_offset_s=offset_s,
        comm=comm,
        role_comm=role_comm,
        node_comm=node_comm,
        control=comm.Dup(),
        forward=forward,
        joined_s=time.monotonic() + offset_s,
    )


def number_nodes(places: Sequence[tuple[int, str]]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(node index of each rank, host name of each node) from every rank's (lowest rank of its node, host name)."""
    leaders = sorted({leader for leader, _ in places})
    return tuple(leaders.index(leader) for leader, _ in places), tuple(places[leader][1] for leader in leaders)


CLOCK_ROUNDS = 10
"""Questions to the reference clock; the one that was answered fastest counts."""


def _clock_offset(comm: MPI.Comm, node_comm: MPI.Comm, node_of_rank: Sequence[int], reference: int) -> float:
    """Seconds that the monotonic clock of rank `reference` is ahead of this node's, to half a round trip. Collective."""
    offset_s = 0.0
    for node in sorted(set(node_of_rank) - {node_of_rank[reference]}):
        leader = node_of_rank.index(node)
        if comm.rank == reference:
            _answer_clock(comm, leader)
        elif comm.rank == leader:
            offset_s = min(_ask_clock(comm, reference))[1]
    shared: float = node_comm.bcast(offset_s)
    return shared


def _answer_clock(comm: MPI.Comm, asker: int) -> None:
    for _ in range(CLOCK_ROUNDS):
        comm.recv(source=asker)
        comm.send(time.monotonic(), dest=asker)


def _ask_clock(comm: MPI.Comm, reference: int) -> list[tuple[float, float]]:
    """(round trip, seconds that the reference's monotonic clock is ahead) of each question."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        asked_at = time.monotonic()
        comm.send(None, dest=reference)
        answer: float = comm.recv(source=reference)
        told_at = time.monotonic()
        rounds.append((told_at - asked_at, answer - (asked_at + told_at) / 2))
    return rounds


def clock_drifts(world: World, deadline_s: float) -> list[dict[str, float]]:
    """Every node's clock against the run's once more, at the end of a run: on training rank 0 rows of /clocks, elsewhere nothing. Collective over the world.

    Only the lowest rank of each node takes part, and nobody where there is one node. Raises TimeoutError that names a node which does not come within `deadline_s`.
    """
    reference, rows = world.training_ranks[0], []
    for node in sorted(set(world.node_of_rank) - {world.node_of_rank[reference]}):
        leader = world.node_of_rank.index(node)
        if world.world_rank == reference:
            stop_at = time.monotonic() + deadline_s
            while not world.comm.iprobe(source=leader):
                if time.monotonic() > stop_at:
                    raise TimeoutError(f"waited {deadline_s:g} s for {world.full_name_of(leader)} to measure its clock")
                time.sleep(0.001)
            _answer_clock(world.comm, leader)
            round_trip_s, offset_s, began_s = world.comm.recv(source=leader)
            rows += [{"node": node, "time_s": began_s, "offset_s": 0.0, "error_s": 0.0}]
            rows += [{"node": node, "time_s": time.monotonic(), "offset_s": offset_s, "error_s": round_trip_s / 2}]
        elif world.world_rank == leader:
            round_trip_s, total_s = min(_ask_clock(world.comm, reference))
            world.comm.send((round_trip_s, total_s - world.clock_offset_s, world.joined_s), dest=reference)
    return rows


def check_size(size: int) -> None:
    """A wrong `srun --mpi` starts N worlds of size 1 without a warning: refuse. Raises ConfigError that says what this Slurm offers and this MPI needs.

    Other differences are none of our business: an mpirun inside a job has a step of its own, with one task for each node.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or size) if "SLURM_STEP_ID" in os.environ else size
    if size > 1 or tasks == 1:
        return
    from mpi4py import MPI

    raise ConfigError(f"{tasks} tasks became {tasks} MPI worlds of size 1: {cluster.mpi_mend(MPI.Get_library_version(), os.environ.get('SLURM_MPI_TYPE'))}")
