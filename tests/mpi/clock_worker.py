"""One rank of the clock test: `mpiexec -n 3 python clock_worker.py OUT`.

Ranks 0 and 1 claim a node whose clock is far behind and runs 1 % slow; rank 2 trains on another.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from mpi4py import MPI

from areal_hpc import topology

NODE_OF_RANK = (0, 0, 1)
BETWEEN_S = 2.0


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    slow, began_s = NODE_OF_RANK[comm.rank] == 0, time.monotonic()

    def clock() -> float:
        now_s = time.monotonic()
        return began_s - 5000.0 + 0.99 * (now_s - began_s) if slow else now_s

    topology.time = SimpleNamespace(monotonic=clock, sleep=time.sleep)
    node_comm = comm.Split(NODE_OF_RANK[comm.rank], comm.rank)
    offset_s = topology._clock_offset(comm, node_comm, NODE_OF_RANK, reference=2)
    world = topology.World(
        world_rank=comm.rank,
        role="training" if comm.rank == 2 else "generation",
        role_rank=0 if comm.rank == 2 else comm.rank,
        local_rank=node_comm.rank,
        generation_ranks=(0, 1),
        training_ranks=(2,),
        node_of_rank=NODE_OF_RANK,
        hosts=("a", "b"),
        clock_offset_s=offset_s,
        comm=comm,
        role_comm=comm,
        node_comm=node_comm,
        control=comm,
        forward=comm,
        joined_s=clock() + offset_s,
    )
    time.sleep(BETWEEN_S)
    rows = topology.clock_drifts(world, 30.0)
    found = comm.gather((offset_s, rows))
    if found is not None:
        Path(sys.argv[1]).write_text(json.dumps(found))


main()
