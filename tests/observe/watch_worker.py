"""A job of ranks that do nothing but live under the watchdog, and fail in the way that a file tells them to.

watch_worker.py ATTEMPT_DIR NUM_RANKS    starts the ranks as the local launcher does, and ends with the status that it would give
watch_worker.py ATTEMPT_DIR              (under mpiexec) is one rank: it loops until ATTEMPT_DIR/stop is there, or `fault-RANK` names what to do
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from pathlib import Path

from areal_hpc import guard, topology
from areal_hpc.config import Config, Topology, Transport, Watchdog
from areal_hpc.launch.deaths import Deaths
from areal_hpc.launch.local import LocalJob, final_status, find_launcher, remove_stale_files, world_rank_hint
from areal_hpc.observe.timeline import Phases
from areal_hpc.observe.watchdog import Watchdog as Watch
from areal_hpc.observe.watchdog import announce
from areal_hpc.signals import StopFlag


def launch(attempt_dir: Path, num_ranks: int) -> int:
    launcher, began_at = find_launcher(), time.time()
    died = Deaths(attempt_dir)
    environment = os.environ | launcher.environment() | died.environment() | {"AREAL_HPC_ATTEMPT_DIR": str(attempt_dir), "PYTHONUNBUFFERED": "1"}
    job = LocalJob([*launcher.command(num_ranks), sys.executable, __file__, str(attempt_dir)], environment)
    try:
        return final_status(job.wait(died), attempt_dir, job.num_signals, died)
    finally:
        remove_stale_files(began_at)


def fail(kind: str, phases: Phases) -> None:
    """The faults. Those that return are over."""
    if kind == "raise":
        raise RuntimeError("as told")
    if kind == "thread":
        threading.Thread(target=lambda: 1 / 0).start()
    elif kind == "stuck":
        phases.enter("evaluate", "a thing that never comes")
        phases.enter("evaluate", "a thing that never comes")  # not the first time there: no exemption
        time.sleep(1000)
    elif kind == "interpreter":
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock, as a C extension that forgot to release it does
    elif kind == "slow":
        time.sleep(3)  # below the deadline
    elif kind == "exit":
        os._exit(7)
    elif kind == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)


def be_rank(attempt_dir: Path) -> None:
    config = Config(
        topology=Topology(num_ranks=3),
        transport=Transport(start_deadline_s=20),
        watchdog=Watchdog(silence_s=2, phase_floor_s=4, phase_factor=1, stop_deadline_s=4),
    )
    stop = StopFlag()
    stop.install()
    place = announce(attempt_dir, world_rank_hint())
    with guard.deadline_of_mpi_start(attempt_dir, place.name, config.transport.start_deadline_s):
        abort = guard.AbortGuard(attempt_dir)
    with abort:
        world = topology.join(config)
        abort.name = world.name()
        phases = Phases(world.world_rank, world.role, clock=world.clock)
        watchdog = Watch.start(config, world, phases, stop, place, "127.0.0.1")
        abort.table, abort.watched = watchdog.table, True
        orders = attempt_dir / f"fault-{world.world_rank}"
        (attempt_dir / f"ready-{world.world_rank}").touch()
        while not (attempt_dir / "stop").exists():
            phases.enter("decode" if world.role == "generation" else "wait_data", "orders")
            if orders.exists() and (kind := orders.read_text()):
                orders.unlink()
                fail(kind, phases)
            time.sleep(0.01)
        phases.enter("stop")
        guard.finish(world, attempt_dir, guard.DONE, {}, watchdog.stop)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(launch(Path(sys.argv[1]), int(sys.argv[2])))
    be_rank(Path(sys.argv[1]))
