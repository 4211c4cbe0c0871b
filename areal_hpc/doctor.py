"""`areal-hpc doctor [--json]`: what this machine has, one line per check with a verdict and a mend. Exit status 1 if anything is an error.

On a login node: packages, compiled extension, MPI, launcher, Slurm, GPU, /dev/shm, ring, HDF5, limits, folders; MPI is not started and no GPU is needed.
Under srun or mpiexec all ranks take part: the start-up checks of a run, and an all-reduce between them over NCCL or Gloo.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc import checks, cluster
from areal_hpc.checks import Facts, Finding
from areal_hpc.config import Config, ConfigError, Generation, Topology
from areal_hpc.launch.local import find_launcher, is_rank
from areal_hpc.walltime import clock

if TYPE_CHECKING:
    from areal_hpc.topology import World

ALL_REDUCE_BYTES = 16 << 20
ALL_REDUCE_ROUNDS = 5
DEADLINE_S = 120.0


def main(args: list[str]) -> int:
    """Print the findings; 0 if none is an error."""
    if unknown := [argument for argument in args if argument != "--json"]:
        raise ConfigError(f"areal-hpc doctor knows no '{unknown[0]}'; there is: --json")
    if is_rank():
        return _among_ranks("--json" in args)
    return show(examine(), as_json="--json" in args)


def show(findings: list[Finding], *, as_json: bool) -> int:
    """Print; 0 if none is an error."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(finding.line())
    return int(any(finding.verdict == "error" for finding in findings))


def examine() -> list[Finding]:
    """All checks of one machine. A check that fails in a way nobody foresaw is an error of its own and does not hide the others."""
    tests: dict[str, Callable[[], Finding]] = {
        "packages": packages,
        "extension": extension,
        "MPI": checks.offered_mpi,
        "launcher": launcher,
        "Slurm": slurm,
        "GPUs": gpus,
        "NCCL": nccl,
        "engines": engines,
        "/dev/shm": shared_memory,
        "ring": ring,
        "HDF5": hdf5,
    }
    findings = [_guarded(name, test) for name, test in tests.items()]
    facts = [_my_facts(Config(device="cpu"))]
    return [*findings, checks.judge_limits(facts), checks.judge_cores(facts, 1), *checks.judge_file_systems(facts)]


def _guarded(name: str, test: Callable[[], Finding]) -> Finding:
    try:
        return test()
    except Exception as error:  # noqa: BLE001
        return Finding(name, "error", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _my_facts(config: Config, world_rank: int = 0, local_rank: int = 0) -> Facts:
    return checks.collect(config, world_rank, local_rank, {"runs": Path("runs"), "cache": checks.cache_dir()})


def packages() -> Finding:
    """Everything that a run imports is installed."""
    found = checks.versions()
    missing = [name for name, version in found.items() if version == "missing"]
    if missing:
        return Finding("packages", "error", f"{', '.join(missing)} not installed in {sys.prefix}", "env/bootstrap run")
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def extension() -> Finding:
    """The C++ extension loads."""
    try:
        for name in ("areal_hpc._ring", "areal_hpc._cuda"):
            importlib.import_module(name)
    except ImportError as error:
        return Finding("extension", "error", " ".join(str(error).split()), "build it with the Python that runs: pip install -e . (no GPU is needed)")
    return Finding("extension", "ok", "loads")


def launcher() -> Finding:
    """An mpiexec for runs on this machine alone."""
    try:
        found = find_launcher()
    except ConfigError as error:
        return Finding("launcher", "warning", str(error), "only srun can start ranks")
    return Finding("launcher", "ok", f"{found.path} ({found.flavour})")


def slurm() -> Finding:
    """Its version and its partitions."""
    if shutil.which("sbatch") is None:
        return Finding("Slurm", "ok", "not on this machine")
    version = _said("sbatch", "--version")
    partitions = _said("sinfo", "--noheader", "--format=%P %l %D x %c cores %G").splitlines()
    if not partitions:
        return Finding("Slurm", "warning", f"{version}; sinfo does not answer", "is the controller up, and SLURM_CONF right?")
    return Finding("Slurm", "ok", f"{version}; {'; '.join(' '.join(line.split()) for line in partitions)}")


def gpus() -> Finding:
    """GPUs that the driver shows, without torch."""
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "ok", "no NVIDIA driver here (a login node, or a machine for CPU runs)")
    lines = _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode", "--format=csv,noheader").splitlines()
    if not lines:
        return Finding("GPUs", "error", "nvidia-smi does not answer", "ask the operators; nothing that needs a GPU can run here")
    return Finding("GPUs", "ok", f"{len(lines)}: {', '.join(sorted(set(lines)))}")


def nccl() -> Finding:
    """The NCCL that torch brings; in another process, since torch takes its time and its memory."""
    code = "import torch; print(*torch.cuda.nccl.version(), sep='.') if torch.cuda.is_available() else print('')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        return Finding("NCCL", "error", f"torch: {done.stderr.strip().splitlines()[-1]}", "env/bootstrap run")
    version = done.stdout.strip()
    return Finding("NCCL", "ok", f"NCCL {version}" if version else "torch sees no GPU: weights travel over Gloo")


def engines() -> Finding:
    """Generation engines that could run here."""
    choices = typing.get_args(typing.get_type_hints(Generation)["engine"])
    return Finding("engines", "ok", ", ".join(name for name in choices if name == "embedded" or importlib.util.find_spec(name)))


def shared_memory() -> Finding:
    """Room for the lanes of this machine's share of a large job."""
    free = checks.collect(Config(device="cpu"), 0, 0, {}).shm_free_bytes
    if free < 1 << 30:
        return Finding(
            "/dev/shm",
            "warning",
            f"{checks.mib(free)} free",
            "64 GPUs want 1 to 2 GiB on nodes that train: mount -o remount,size=8G /dev/shm, or --transport.lane-bytes",
        )
    return Finding("/dev/shm", "ok", f"{checks.mib(free)} free")


def ring() -> Finding:
    """A record goes through a lane and comes out as it went in."""
    import numpy as np

    from areal_hpc.transport.ring import Ring

    sent = os.urandom(4096)
    lane = Ring(f"areal_hpc.{secrets.token_hex(8)}.0", 1 << 20, lane=0, job_id=os.getpid())
    consumer = lane.consumer()
    try:
        producer = lane.producer(timeout_s=1)
    finally:
        consumer.unlink()
    with producer.reserve(len(sent), timeout_s=1) as slot:
        slot.buffer[:] = np.frombuffer(sent, np.uint8)
        slot.commit(ticket=0, version_min=0, version_max=0, num_tokens=0, num_samples=0)
    record = consumer.peek(timeout_s=1)
    assert record is not None, "a record that was committed does not arrive"
    with record:
        came = bytes(record.buffer)
    producer.close()
    consumer.close()
    if came != sent:
        return Finding("ring", "error", f"{len(sent)} bytes came out of a lane in /dev/shm changed", "rebuild the extension on this machine: pip install -e .")
    return Finding("ring", "ok", f"{len(sent)} bytes through a lane in /dev/shm, unchanged")


def hdf5() -> Finding:
    """A file that is being written can be read, which needs the locking of this file system not to be in the way."""
    import h5py
    import numpy as np

    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "probe.h5"
        with h5py.File(path, "x", libver=("v110", "v110"), locking=False) as file:
            data = file.create_dataset("rows", shape=(0,), maxshape=(None,), chunks=(16,), dtype="i8")
            file.swmr_mode = True
            data.resize((16,))
            data[:] = np.arange(16)
            data.flush()
            with h5py.File(path, "r", swmr=True, locking=False) as reader:
                read = int(reader["rows"][:].sum())
    if read != 120:
        return Finding("HDF5", "error", f"16 numbers with sum 120 came back with sum {read} from {Path.cwd()}", "put --run-dir on another file system")
    return Finding("HDF5", "ok", f"HDF5 {h5py.version.hdf5_version}, readable while written in {Path.cwd()}")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=cluster.CALL_TIMEOUT_S, stdin=subprocess.DEVNULL).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _among_ranks(as_json: bool) -> int:
    """The checks of a run's start, and an all-reduce, with all ranks that were started."""
    from areal_hpc import groups, topology

    end = cluster.end_time() if os.environ.get("SLURM_PROCID", "0") == "0" else None
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    topology.check_size(size)
    if size < 2:
        raise ConfigError("one rank alone has nobody to talk to; start two or more, or doctor without srun")
    config = Config(topology=Topology(num_ranks=size))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=max(64, 8 * size)))
    world = topology.join(config)
    facts: list[Facts] = world.comm.allgather(_my_facts(config, world.world_rank, world.local_rank))
    findings = checks.judge(facts, config, checks.lane_shm_bytes(config, world), world.comm.bcast(end, root=0))
    if not any(finding.verdict == "error" for finding in findings):
        findings.append(_all_reduce(config, world, groups.connect(world, config.device, DEADLINE_S)))
    status = show(findings, as_json=as_json) if world.world_rank == 0 else 0
    return world.comm.bcast(status, root=0)


def _all_reduce(config: Config, world: World, connection: object) -> Finding:
    """Sum over all ranks through the kind of group that carries weights: right, and how fast."""
    import torch

    from areal_hpc.groups import Connection

    assert isinstance(connection, Connection)
    group = connection.spanning_group("doctor", list(range(world.size)), world.world_rank)
    data = torch.ones(ALL_REDUCE_BYTES // 4, device=connection.device)
    began = time.monotonic()
    for round_number in range(1 + ALL_REDUCE_ROUNDS):
        if round_number == 1:  # the first one connects
            began = time.monotonic()
        work = group.allreduce([data])
        stop_at = time.monotonic() + DEADLINE_S
        while not work.is_completed():
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{world.name()} waited {clock(DEADLINE_S)} for an all-reduce of {world.size} ranks")
            time.sleep(0.001)
        work.wait()
        if connection.device.type == "cuda":
            torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / ALL_REDUCE_ROUNDS
    wanted = float(world.size) ** (1 + ALL_REDUCE_ROUNDS)
    found = float(data[-1])
    backend = "NCCL" if connection.device.type == "cuda" else "Gloo"
    bus = 2 * (world.size - 1) / world.size * ALL_REDUCE_BYTES / seconds / 1e9
    text = f"{backend}, {world.size} ranks on {world.num_nodes} nodes, {checks.mib(ALL_REDUCE_BYTES)}: {bus:.2f} GB/s (bus bandwidth, float32)"
    if abs(found / wanted - 1) > 1e-6:
        return Finding(
            "all-reduce",
            "error",
            f"{text}; sum is {found:g} instead of {wanted:g}",
            "the network library computes wrongly: try NCCL_PROTO=Simple, then another version",
        )
    if backend == "NCCL" and world.num_nodes > 1 and bus < 5:
        return Finding("all-reduce", "warning", text, "slow between nodes: NCCL may be on sockets; docs/clusters.md, section on networks")
    return Finding("all-reduce", "ok", text)
