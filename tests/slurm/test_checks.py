"""Start-up checks, walltime and fence: what is judged from facts, on machines that need not exist."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_hpc import checks, fence
from areal_hpc.checks import Facts, FileSystem
from areal_hpc.cluster import Incarnation
from areal_hpc.config import Config, Generation, Model, Topology, Train, Transport
from areal_hpc.models.decoder import Decoder
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.recipes import areal_64gpu, areal_64gpu_sync
from areal_hpc.signals import StopFlag
from areal_hpc.topology import assign_roles
from areal_hpc.walltime import Walltime

GPUS = tuple(f"GPU-{number}" for number in range(8))


def rank(world_rank: int, host: str = "n1", local_rank: int | None = None, **changes: object) -> Facts:
    """A rank on a node with 8 GPUs where all is well."""
    local = world_rank if local_rank is None else local_rank
    facts = Facts(
        world_rank=world_rank,
        host=host,
        local_rank=local,
        versions={"torch": "2.13.0", "areal_hpc": "0.1.0"},
        cuda_visible_devices=None,
        gpus=tuple(f"{host}-{gpu}" for gpu in GPUS),
        gpu=f"{host}-{GPUS[local % 8]}",
        gpu_bytes=80 << 30,
        open_files=65536,
        locked_bytes=-1,
        cores=tuple(range(8 * local, 8 * local + 8)),
        shm_free_bytes=8 << 30,
        memory_bytes=1 << 40,
        file_systems=(FileSystem("run folder", "/scratch/run", "lustre", 1 << 40),),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def node(host: str = "n1", first: int = 0, **changes: object) -> list[Facts]:
    return [rank(first + local, host, local, **changes) for local in range(8)]


def test_two_good_nodes() -> None:
    findings = checks.judge(node("n1") + node("n2", 8), areal_64gpu(), {"n1": 1 << 30, "n2": 2 << 30}, end=1000.0 + 3600, now=1000.0)
    assert {finding.name: finding.verdict for finding in findings} == dict.fromkeys(
        ("versions", "GPUs", "/dev/shm", "limits", "cores", "time", "run folder"), "ok"
    )
    assert "the job ends in 1:00:00" in {finding.found for finding in findings}


@pytest.mark.parametrize(
    ("facts", "verdict", "said"),
    [
        ([rank(r, gpu="GPU-0") for r in range(2)], "error", "ranks 0, 1 on n1 share GPU-0"),
        ([rank(0), rank(1, gpu="")], "error", "rank 1 on n1 has no GPU of its own among the 8 it sees"),
        ([rank(0), rank(1, gpus=(), gpu="", cuda_visible_devices="")], "error", "among the 0 it sees (CUDA_VISIBLE_DEVICES=)"),
        ([rank(r, gpus=(f"GPU-{r}",), gpu=f"GPU-{r}") for r in range(2)], "warning", "see only their own GPU"),
        ([rank(0, "n1", 0, gpus=("A",), gpu="A"), rank(1, "n2", 0, gpus=("B",), gpu="B")], "ok", "each with a GPU of its own"),
        ([rank(r, gpus=(), gpu="") for r in range(2)], "error", "no rank sees a GPU"),
        ([rank(0, "n1", gpu="GPU-0"), rank(1, "n2", gpu="GPU-0")], "ok", "each with a GPU of its own"),  # names of GPUs are compared on one node only
    ],
)
def test_gpu_binding(facts: list[Facts], verdict: str, said: str) -> None:
    found = checks.judge_gpus(facts, "cuda")
    assert found.verdict == verdict and said in found.found, found
    assert found.mend or verdict == "ok"


def test_cpu_jobs_need_no_gpu() -> None:
    assert checks.judge_gpus([rank(r, gpus=(), gpu="") for r in range(2)], "auto").verdict == "ok"


def test_other_versions_are_named_with_host_and_rank() -> None:
    found = checks.judge_versions([rank(0), rank(1, "n2", versions={"torch": "2.12.0", "areal_hpc": "0.1.0"})])
    assert found.verdict == "error" and found.found == "torch is 2.12.0 on n2 (rank 1) but 2.13.0 on n1"


def test_limits_and_cores() -> None:
    assert "ulimit -n 1032" in checks.judge_limits([rank(0, open_files=1000), rank(1)]).mend
    assert checks.judge_limits([rank(0, locked_bytes=64 << 10)]).verdict == "warning"
    assert checks.judge_limits([rank(0, locked_bytes=64 << 10, gpus=())]).verdict == "ok", "nothing is pinned without a GPU"
    bound = checks.judge_cores([rank(r, cores=(0, 1)) for r in range(8)], 1)
    assert bound.verdict == "warning" and bound.found == "n1: 8 ranks x 1 threads on 2 cores"


def layout(num_nodes: int, per_node: int) -> SimpleNamespace:
    """The parts of a World that lanes depend on."""
    node_of_rank = tuple(r // per_node for r in range(num_nodes * per_node))
    roles = assign_roles(node_of_rank, 0.75)
    return SimpleNamespace(
        hosts=tuple(f"n{number}" for number in range(num_nodes)),
        node_of_rank=node_of_rank,
        generation_ranks=tuple(r for r, role in enumerate(roles) if role == "generation"),
        training_ranks=tuple(r for r, role in enumerate(roles) if role == "training"),
        num_training=roles.count("training"),
    )


def test_shm_is_counted_where_the_lanes_lie() -> None:
    """64 ranks: each of the 48 lanes leaves another node and ends on one of the two that train; one node: each lane once; forwarded: both ends here."""
    page, lane = 4096, 1 << 20
    config = Config(transport=Transport(lane_bytes=lane), topology=Topology(num_ranks=64))
    needs = checks.lane_shm_bytes(config, layout(8, 8))  # type: ignore[arg-type]
    lanes = {host: (num_bytes - checks.MPI_SHM_BYTES) / (lane + page) for host, num_bytes in needs.items()}
    assert lanes == {f"n{number}": 8 for number in range(6)} | {"n6": 24, "n7": 24}
    one = checks.lane_shm_bytes(config, layout(1, 4))  # type: ignore[arg-type]
    assert (one["n0"] - checks.MPI_SHM_BYTES) / (lane + page) == 3
    forwarded = checks.lane_shm_bytes(replace(config, transport=Transport(lane_bytes=lane, lanes="forwarded")), layout(1, 4))  # type: ignore[arg-type]
    assert (forwarded["n0"] - checks.MPI_SHM_BYTES) / (lane + page) == 6
    small = checks.judge_shm([rank(0, "n6", shm_free_bytes=16 << 20)], needs)
    assert small.verdict == "error" and "n6: the lanes of this job" in small.found


def test_too_little_room_for_checkpoints_is_said() -> None:
    (found,) = checks.judge_file_systems([rank(0)], {"run folder": 2 << 40})
    assert found.verdict == "warning" and "1.0 TiB free; 2.0 TiB will be written" in found.found


MOUNTS = (
    "/dev/vda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n10.0.0.1@o2ib:/s /scratch lustre rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nx /my\\040data gpfs rw 0 0\n"
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/home/a/b", "nfs4"), ("/homely", "ext4"), ("/scratch", "lustre"), ("/my data/run", "gpfs"), ("/dev/shm/x", "tmpfs"), ("/", "ext4")],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert checks.file_system_type(Path(path), MOUNTS) == kind


@pytest.mark.parametrize(("kind", "hosts", "verdict"), [("lustre", 2, "ok"), ("ext4", 2, "unknown"), ("ext4", 1, "ok"), ("tmpfs", 1, "warning")])
def test_file_systems(kind: str, hosts: int, verdict: str) -> None:
    places = (FileSystem("run folder", "/x", kind, 1 << 40),)
    (found,) = checks.judge_file_systems([rank(h, f"n{h}", 0, file_systems=places) for h in range(hosts)])
    assert found.verdict == verdict


def test_memory_ledger() -> None:
    """7.6 G parameters in bfloat16 on 48 + 16 GPUs of 80 GB: two copies and the KV cache there, 16 bytes a parameter over 16 ranks here."""
    config = Config(
        model=Model(dtype="bfloat16"),
        generation=Generation(max_new_tokens=1000, max_num_running=10),
        train=Train(batch_size=512),
        topology=Topology(num_ranks=64),
    )
    ledger = checks.memory_ledger(7_600_000_000, config, num_training=16, kv_bytes_per_token=57344)
    assert ledger["generation"] == {"weights": 15_200_000_000, "staging": 15_200_000_000, "KV cache": 10 * (1000 + config.data.max_prompt_tokens) * 57344}
    assert sum(ledger["training"].values()) == 7_600_000_000
    facts, roles = node("n1"), dict.fromkeys(range(6), "generation") | {6: "training", 7: "training"}
    assert [finding.verdict for finding in checks.judge_memory(ledger, facts, roles)] == ["ok", "ok"]
    small = [replace(fact, gpu_bytes=24 << 30) for fact in facts]
    assert [finding.verdict for finding in checks.judge_memory(ledger, small, roles)] == ["error", "ok"]


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_the_model_has_them(tied: bool) -> None:
    """Up to norms and biases, which are small."""
    shape = DecoderConfig(
        model_type="qwen2",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    real = sum(p.numel() for p in Decoder(shape).parameters())
    assert 0.98 * real < checks.num_parameters(shape) <= real


def test_walltime_stops_in_time() -> None:
    """An hour, five minutes kept free, steps of 100 s: the stop comes when less than 400 s are left."""
    now = [0.0]
    walltime, stop = Walltime(3600.0, 300.0, now=lambda: now[0]), StopFlag()
    for step in range(1, 33):
        now[0] = 100.0 * step
        walltime.step(100.0)
        assert walltime.ask(stop) == (now[0] > 3200.0), step
    assert walltime.note(50) == "job ends in 0:06:40, enough for about 1 of 50 steps"
    assert walltime.note(1) == "job ends in 0:06:40"
    now[0] = 3201.0
    assert walltime.ask(stop) and stop.signal_name == "the job ends in 0:06:39"


def test_walltime_without_a_limit_and_with_a_short_one() -> None:
    stop = StopFlag()
    unknown = Walltime(None, 300.0)
    unknown.step(1.0)
    assert not unknown.ask(stop) and unknown.note(5) == ""
    now = [0.0]
    short = Walltime(120.0, 300.0, now=lambda: now[0])
    assert not short.is_due(), "a job of two minutes must not stop before it has begun"
    now[0] = 109.0
    assert short.is_due()
    signal_only = Walltime(10.0, 0.0, now=lambda: 9.0)
    assert not signal_only.is_due()


def test_fence_is_taken_by_the_later_life(tmp_path: Path) -> None:
    first, second = Incarnation(7, 0), Incarnation(7, 1)
    run = tmp_path / "run"
    assert fence.take(run, first, settle_s=0) is None and fence.holder(run) == first
    assert not fence.is_superseded(run, first)
    began = time.monotonic()
    assert fence.take(run, second, settle_s=0.2) == first and time.monotonic() - began >= 0.2
    assert fence.is_superseded(run, first) and not fence.is_superseded(run, second)
    assert fence.take(run, Incarnation(8, 0), settle_s=60) is None, "another job is the lock's business, and nobody waits for it"
    assert not fence.is_superseded(run, second)
    assert fence.take(tmp_path / "none", None) is None and not (tmp_path / "none").exists()


def test_a_fenced_rank_leaves(tmp_path: Path) -> None:
    """A process of the first life, busy in its main thread, is gone within seconds of the second life's start."""
    fence.take(tmp_path, Incarnation(7, 0))
    code = f"""
from pathlib import Path
from areal_hpc import fence
from areal_hpc.cluster import Incarnation
fence.LOOK_S = 0.1
fence.watch(Path({str(tmp_path)!r}), Incarnation(7, 0), "rank 3")
print("up", flush=True)
while True: sum(range(1000))
"""
    old = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert old.stdout is not None and old.stdout.readline() == "up\n"
        time.sleep(0.3)
        assert old.poll() is None
        fence.take(tmp_path, Incarnation(7, 1), settle_s=0)
        _, said = old.communicate(timeout=20)
    finally:
        old.kill()
    assert old.returncode == fence.SUPERSEDED and said == "rank 3: Slurm has started this job again as 7.1; this life (7.0) leaves\n"


def test_doctor_on_this_machine() -> None:
    """Every check has a verdict, none fails here, and --json has the same."""
    command = [str(Path(sys.executable).with_name("areal-hpc")), "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {
        "packages",
        "extension",
        "MPI",
        "launcher",
        "Slurm",
        "GPUs",
        "NCCL",
        "engines",
        "/dev/shm",
        "ring",
        "HDF5",
        "limits",
        "cores",
        "runs",
        "cache",
    } <= set(findings)
    assert "MPICH" in findings["MPI"]["found"] and "unchanged" in findings["ring"]["found"]
    wrong = subprocess.run([*command, "--jsn"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: areal-hpc doctor knows no '--jsn'")


def test_64_gpu_recipes_differ_in_staleness_alone() -> None:
    a, b = areal_64gpu(), areal_64gpu_sync()
    assert replace(a, recipe=b.recipe, staleness=b.staleness) == b and b.staleness.eta == 0
