"""Start-up checks: what every rank finds on its node is gathered and judged before a model is loaded, one line per check with a verdict and a mend.

    facts of each rank ──gather──▶ judge (no rank, no file: a pure function) ──▶ findings: RUN/attempt-K/checks.json, warnings in the log, an error ends the run

`areal-hpc doctor` prints the same for one machine, without MPI (doctor.py).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_hpc import __version__, cluster
from areal_hpc.config import Config, ConfigError
from areal_hpc.topology import World, lane_owner
from areal_hpc.validate import MPI_SHM_BYTES, PAGE_BYTES
from areal_hpc.walltime import clock

Verdict = Literal["ok", "warning", "error", "unknown"]
PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "tokenizers", "safetensors")
"""Whose versions must be equal on all ranks: they compute, or write what others read."""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "wekafs", "panfs", "afs", "pvfs2", "9p")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
FEW_FILES = 1024
"""Open files of a rank without those for its peers."""
FILES_PER_PEER = 4
"""Sockets of MPI, Gloo, NCCL and the store to each other rank."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""

    def line(self) -> str:
        """For people."""
        return f"{self.verdict:8} {self.name:12} {self.found}{'; ' + self.mend if self.mend else ''}"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where something of the run lies, as one node sees it."""

    purpose: str
    path: str
    kind: str
    """Type as in /proc/mounts (lustre, nfs4, tmpfs, ...)."""
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank finds where it runs."""

    world_rank: int
    host: str
    local_rank: int
    versions: Mapping[str, str]
    cuda_visible_devices: str | None
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that this rank sees."""
    gpu: str
    """UUID of the one that it will use; empty on a CPU, or when it has none of its own."""
    gpu_bytes: int
    """Memory of that GPU."""
    open_files: int
    """Soft limit."""
    locked_bytes: int
    """Soft limit of pinned memory; -1: none."""
    cores: tuple[int, ...]
    """Cores that this rank may run on."""
    shm_free_bytes: int
    memory_bytes: int
    """Memory of the node that is available now."""
    file_systems: tuple[FileSystem, ...] = ()


def cache_dir() -> Path:
    """AREAL_HPC_CACHE, or ~/.cache/areal_hpc."""
    return Path(os.environ.get("AREAL_HPC_CACHE") or Path.home() / ".cache" / "areal_hpc")


def collect(config: Config, world_rank: int, local_rank: int, places: Mapping[str, Path]) -> Facts:
    """Facts of this process. `places`: purpose -> folder, of which the nearest existing parent counts."""
    gpus, gpu, gpu_bytes = _gpus(config.device, local_rank)
    shared = os.statvfs("/dev/shm")
    return Facts(
        world_rank=world_rank,
        host=socket.gethostname(),
        local_rank=local_rank,
        versions=versions(),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=_unlimited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        shm_free_bytes=shared.f_bavail * shared.f_frsize,
        memory_bytes=available_memory_bytes(),
        file_systems=tuple(file_system(purpose, path) for purpose, path in places.items()),
    )


def versions() -> dict[str, str]:
    """This package, Python, and the packages in `PACKAGES` that are installed."""
    found = {"areal_hpc": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def available_memory_bytes() -> int:
    """MemAvailable of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def file_system(purpose: str, path: Path) -> FileSystem:
    """Type and free space at a path, or at its nearest parent that exists."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()).resolve()
    space = os.statvfs(existing)
    return FileSystem(purpose, str(path), file_system_type(existing, Path("/proc/self/mounts").read_text()), space.f_bavail * space.f_frsize)


def file_system_type(path: Path, mounts: str) -> str:
    """Type of the file system that holds an absolute path: that of the longest mount point above it, the last of equals. `mounts`: /proc/self/mounts."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        _, point, this_kind, *_ = line.split()
        point = point.encode().decode("unicode_escape")  # blanks are \040
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, this_kind
    return kind


def _unlimited(limit: int) -> int:
    return -1 if limit == resource.RLIM_INFINITY else limit


def _gpus(device: str, local_rank: int) -> tuple[tuple[str, ...], str, int]:
    """(UUIDs seen, UUID that `groups.pick_device` will choose, its bytes)."""
    if device == "cpu":
        return (), "", 0
    import torch

    if not torch.cuda.is_available():
        return (), "", 0
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    uuids = tuple(str(properties.uuid) for properties in seen)
    index = 0 if len(seen) == 1 else local_rank
    return (uuids, uuids[index], seen[index].total_memory) if index < len(seen) else (uuids, "", 0)


def judge(
    facts: Sequence[Facts], config: Config, shm: Mapping[str, int], end: float | None = None, now: float | None = None, written: Mapping[str, int] | None = None
) -> list[Finding]:
    """Findings from the facts of all ranks.

    `shm`: host -> bytes of /dev/shm that its lanes will take. `end`: of the job, in seconds since 1970. `written`: purpose of a folder -> bytes.
    """
    checks: list[Callable[[], Finding]] = [
        lambda: judge_versions(facts),
        lambda: judge_gpus(facts, config.device),
        lambda: judge_shm(facts, shm),
        lambda: judge_limits(facts),
        lambda: judge_cores(facts, config.topology.threads_per_rank),
        lambda: judge_walltime(end, time.time() if now is None else now),
    ]
    return [check() for check in checks] + judge_file_systems(facts, written)


def by_host(facts: Iterable[Facts]) -> dict[str, list[Facts]]:
    """Host -> facts of its ranks, in the order of the ranks."""
    hosts: defaultdict[str, list[Facts]] = defaultdict(list)
    for fact in facts:
        hosts[fact.host].append(fact)
    return dict(hosts)


def judge_versions(facts: Sequence[Facts]) -> Finding:
    """The same software everywhere."""
    first = facts[0].versions
    for fact in facts:
        for name, version in fact.versions.items():
            if version != first[name]:
                found = f"{name} is {version} on {fact.host} (rank {fact.world_rank}) but {first[name]} on {facts[0].host}"
                return Finding("versions", "error", found, "start all ranks from one environment, on a file system that all nodes share")
    return Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in first.items()) + f" on all {len(facts)} ranks")


def judge_gpus(facts: Sequence[Facts], device: str) -> Finding:
    """One GPU for each rank, its own, and in sight of its neighbours'."""
    if device == "cpu" or not any(fact.gpus for fact in facts):
        if device == "cuda":
            return Finding("GPUs", "error", "device=cuda but no rank sees a GPU", "ask for them: #SBATCH --gpus-per-node=8")
        return Finding("GPUs", "ok", f"all {len(facts)} ranks compute on the CPU")
    one_each = "start as many ranks per node as it has GPUs, all visible to each: --gpus-per-node=N, without --gpus-per-task"
    for host, ranks in by_host(facts).items():
        for fact in ranks:
            if not fact.gpu:
                visible = f"CUDA_VISIBLE_DEVICES={fact.cuda_visible_devices}" if fact.cuda_visible_devices is not None else "CUDA_VISIBLE_DEVICES is not set"
                return Finding(
                    "GPUs", "error", f"rank {fact.world_rank} on {host} has no GPU of its own among the {len(fact.gpus)} it sees ({visible})", one_each
                )
        users: defaultdict[str, list[int]] = defaultdict(list)
        for fact in ranks:
            users[fact.gpu].append(fact.world_rank)
        for gpu, sharing in users.items():
            if len(sharing) > 1:
                return Finding("GPUs", "error", f"ranks {', '.join(map(str, sharing))} on {host} share {gpu}", one_each)
    blind = [fact for ranks in by_host(facts).values() if len(ranks) > 1 for fact in ranks if len(fact.gpus) == 1]
    if blind:
        found = f"{len(blind)} ranks see only their own GPU: peer-to-peer copies inside a node may be off"
        return Finding("GPUs", "warning", found, "add --gpu-bind=none (Slurm >= 24.05: --tres-bind=gres/gpu:none)")
    return Finding("GPUs", "ok", f"{len(facts)} ranks, each with a GPU of its own")


def lane_shm_bytes(config: Config, world: World) -> dict[str, int]:
    """Host -> bytes of /dev/shm that the lanes at this rank count will take there, and MPI itself. A forwarded lane lies at both of its ends."""
    pages = -(-config.transport.lane_bytes // PAGE_BYTES) + 1  # and a page for the header
    lane_bytes = pages * PAGE_BYTES
    needs = dict.fromkeys(world.hosts, MPI_SHM_BYTES)
    for lane, source in enumerate(() if config.topology.mode == "colocated" else world.generation_ranks):
        ends = [world.node_of_rank[source], world.node_of_rank[world.training_ranks[lane_owner(lane, world.num_training)]]]
        if ends[0] == ends[1] and config.transport.lanes != "forwarded":
            ends.pop()
        for node in ends:
            needs[world.hosts[node]] += lane_bytes
    return needs


def judge_shm(facts: Sequence[Facts], needs: Mapping[str, int]) -> Finding:
    """Room for the lanes, counted by the ranks that really run."""
    for host, ranks in by_host(facts).items():
        free = min(fact.shm_free_bytes for fact in ranks)
        if needs.get(host, 0) > free:
            found = f"{host}: the lanes of this job, and MPI itself, need {needs[host]} bytes of /dev/shm, which has {free} free"
            return Finding("/dev/shm", "error", found, "use smaller lanes (--transport.lane-bytes), fewer ranks on that node, or enlarge /dev/shm")
    most = max(needs, key=needs.__getitem__)
    return Finding("/dev/shm", "ok", f"at most {mib(needs[most])} needed ({most}), at least {mib(min(fact.shm_free_bytes for fact in facts))} free")


def judge_limits(facts: Sequence[Facts]) -> Finding:
    """Open files for all sockets; pinned memory for copies between GPU and ring."""
    needed, least = FEW_FILES + FILES_PER_PEER * len(facts), min(facts, key=lambda fact: fact.open_files)
    if least.open_files < needed:
        found = f"{least.open_files} open files may be too few for {len(facts)} ranks on {least.host}"
        return Finding("limits", "warning", found, f"ulimit -n {needed} before srun, with srun --propagate=NOFILE")
    pinned = [fact for fact in facts if fact.gpus and 0 <= fact.locked_bytes < 1 << 30]
    if pinned:
        found = f"{pinned[0].host}: only {mib(pinned[0].locked_bytes)} of memory may be locked"
        return Finding(
            "limits", "warning", found, "ulimit -l unlimited before srun, with srun --propagate=MEMLOCK; copies between GPU and ring are slower without"
        )
    return Finding(
        "limits", "ok", f"{least.open_files} open files, locked memory {'without limit' if facts[0].locked_bytes < 0 else mib(facts[0].locked_bytes)}"
    )


def judge_cores(facts: Sequence[Facts], threads_per_rank: int) -> Finding:
    """Threads against the cores that the ranks of a node may use together."""
    for host, ranks in by_host(facts).items():
        cores, threads = {core for fact in ranks for core in fact.cores}, len(ranks) * threads_per_rank
        if threads > len(cores):
            found = f"{host}: {len(ranks)} ranks x {threads_per_rank} threads on {len(cores)} cores"
            mend = "give srun --cpus-per-task, or --cpu-bind=none if all ranks were bound to the same cores" if "SLURM_JOB_ID" in os.environ else ""
            return Finding("cores", "warning", found, mend)
    return Finding("cores", "ok", f"{len({core for fact in facts for core in fact.cores})} cores a node at the most, {threads_per_rank} threads a rank")


def judge_walltime(end: float | None, now: float) -> Finding:
    """Whether the end of the job is known."""
    if end is None:
        return Finding("time", "unknown", "no time limit is known", "under a scheduler other than Slurm set AREAL_HPC_END_TIME (seconds since 1970)")
    return Finding("time", "ok", f"the job ends in {clock(end - now)}")


def judge_file_systems(facts: Sequence[Facts], needs: Mapping[str, int] | None = None) -> list[Finding]:
    """Folders of the run on file systems that survive the job, that all nodes see, and that have room. `needs`: purpose -> bytes that will be written there."""
    findings = []
    num_nodes = len(by_host(facts))
    for seen in zip(*(fact.file_systems for fact in facts), strict=True):
        here = min(seen, key=lambda each: each.free_bytes)
        text = f"{here.path}: {here.kind}, {mib(here.free_bytes)} free"
        shared = here.kind.startswith(NETWORK_FILE_SYSTEMS)
        needed = (needs or {}).get(here.purpose, 0)
        if needed > here.free_bytes:
            findings.append(Finding(here.purpose, "warning", f"{text}; {mib(needed)} will be written", "make room, or choose another place with --run-dir"))
        elif here.kind in MEMORY_FILE_SYSTEMS:
            findings.append(Finding(here.purpose, "warning", text, "this is memory of the node and is lost with it; use a disk"))
        elif num_nodes > 1 and not shared:
            findings.append(Finding(here.purpose, "unknown", text, "not a network file system by its type; all nodes must see it"))
        else:
            findings.append(Finding(here.purpose, "ok", text))
    return findings


def mib(num_bytes: int) -> str:
    """12345678 -> 11.8 MiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def memory_ledger(num_parameters: int, config: Config, num_training: int, kv_bytes_per_token: int) -> dict[str, dict[str, int]]:
    """Role -> item -> bytes on one rank, as far as they follow from shapes; activations, and what libraries take, come on top.

    Generation: weights and their staging copy in the wire type, KV cache of all slots at full length. Training: float32 weights, gradients and two moments of AdamW,
    cut over the ranks of a replica; with a reference model one more copy, in the wire type.
    """
    wire = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    ranks_of_replica = num_training // config.train.replicas
    training = {"weights": 4, "gradients": 4, "AdamW": 8} | ({"reference": wire} if config.train.kl_coef > 0 else {})
    return {
        "generation": {
            "weights": wire * num_parameters,
            "staging": wire * num_parameters,
            "KV cache": config.generation.max_num_running * config.max_context_tokens * kv_bytes_per_token,
        },
        "training": {name: size * num_parameters // ranks_of_replica for name, size in training.items()},
    }


def judge_memory(ledger: Mapping[str, Mapping[str, int]], facts: Sequence[Facts], roles: Mapping[int, str]) -> list[Finding]:
    """The ledger against the memory of each rank's GPU, or of its node divided among its ranks. `roles`: world rank -> generation or training."""
    findings = []
    hosts = by_host(facts)
    for role, items in ledger.items():
        mine = [fact for fact in facts if roles[fact.world_rank] == role]
        room = min(fact.gpu_bytes or fact.memory_bytes // len(hosts[fact.host]) for fact in mine)
        total = sum(items.values())
        text = f"{role} rank: {' + '.join(f'{name} {mib(size)}' for name, size in items.items())} = {mib(total)} of {mib(room)}"
        if total > room:
            mend = "fewer or shorter --generation.max-num-running" if role == "generation" else "more training ranks, or --train.cpu-offload"
            findings.append(Finding("memory", "error", text, f"use {mend}"))
        else:
            findings.append(Finding("memory", "ok" if total < 0.9 * room else "warning", text))
    return findings


def check_start(config: Config, world: World, attempt_dir: Path, cache: Path, end: float | None) -> None:
    """Gather, judge, write RUN/attempt-K/checks.json, print what is not in order. Collective. Raises ConfigError on every rank alike at the first error."""
    from areal_hpc.models import hf
    from areal_hpc.validate import model_folder

    places = {"run folder": attempt_dir} | ({} if config.model_source else {"cache": cache})
    facts: list[Facts] = world.comm.allgather(collect(config, world.world_rank, world.local_rank, places))
    written: dict[str, int] = {}
    memory: list[Finding] = []
    if config.model_source:
        shape = hf.load_config(model_folder(Path(config.model_source)))
        size, roles = num_parameters(shape), dict.fromkeys(world.generation_ranks, "generation") | dict.fromkeys(world.training_ranks, "training")
        ledger = memory_ledger(size, config, world.num_training, kv_bytes_per_token(shape, config))
        if world.is_colocated:  # one rank holds both
            ledger = {"training": {f"{name} (generating)": size for name, size in ledger["generation"].items()} | ledger["training"]}
        memory = judge_memory(ledger, facts, roles)
        written = {"run folder": num_checkpoints(config) * 12 * size + 4 * size}  # float32 parameters and two moments each; and the model
    findings = judge(facts, config, lane_shm_bytes(config, world), end, written=written) + memory
    if world.is_first_trainer:
        (attempt_dir / "checks.json").write_text(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1) + "\n")
        for finding in findings:
            if finding.verdict == "warning" and (world.num_nodes > 1 or "SLURM_JOB_ID" in os.environ):
                print(f"{finding.name}: {finding.found}; {finding.mend}", flush=True)
    for finding in findings:
        if finding.verdict == "error":
            raise ConfigError(f"{finding.found}; {finding.mend}")


def num_checkpoints(config: Config) -> int:
    """That lie on the disk at the most: those that stay, and the next one while it is written."""
    for_ever = config.train.num_steps // config.checkpoint.keep_every if config.checkpoint.keep_every else 0
    return config.checkpoint.keep + for_ever + 1


def num_parameters(shape: Any) -> int:
    """Parameters of a DecoderConfig, tied ones once."""
    from areal_hpc.models.flops import matrix_parameters

    embedding = shape.vocab_size * shape.hidden_size
    return matrix_parameters(shape) + (0 if shape.tie_word_embeddings else embedding)


def kv_bytes_per_token(shape: Any, config: Config) -> int:
    """Keys and values of all layers in the wire type."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * {"float32": 4, "bfloat16": 2}[config.model.dtype]


def offered_mpi() -> Finding:
    """The MPI of this environment, and what Slurm starts it with. Does not start MPI."""
    library = cluster.mpi_of_environment()
    offered = cluster.mpi_types_offered()
    if not offered:
        return Finding("MPI", "ok", f"{library}; no Slurm here")
    needed = cluster.mpi_type_for(library, offered)
    if needed not in offered:
        return Finding(
            "MPI", "error", f"{library} needs srun --mpi={needed}, this Slurm offers {', '.join(offered)}", "install the MPI that fits, or start with mpirun"
        )
    return Finding("MPI", "ok", f"{library}: srun --mpi={needed}")
