"""Jobs that span nodes, under a real Slurm: a cluster of virtual nodes on this machine, each with its own network, processes and /dev/shm (slurm-cluster).

Needs root and Debian's Slurm (`tests/slurm/slurm-cluster install --no-acct`, once); is skipped, visibly, without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.observe.telemetry import read_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: virtual nodes are network namespaces"),
    pytest.mark.skipif(
        shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="no Slurm: tests/slurm/slurm-cluster install --no-acct"
    ),
]
SCRIPT = Path(__file__).with_name("slurm-cluster")
COMMAND = Path(sys.executable).with_name("areal-hpc")
NUM_NODES = 4
TIMEOUT_S = 180


@dataclass(frozen=True)
class Cluster:
    environment: dict[str, str]

    def call(self, *arguments: str) -> str:
        done = subprocess.run([SCRIPT, *arguments], env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, nodes: int, per_node: int, run_dir: Path, *options: str, kill_on_bad_exit: int = 1) -> subprocess.Popen[str]:
        """`areal-hpc run smoke` on so many ranks."""
        srun = ["srun", f"-N{nodes}", f"--ntasks-per-node={per_node}", "--mpi=pmi2", f"--kill-on-bad-exit={kill_on_bad_exit}"]
        command = [*srun, str(COMMAND), "run", "smoke", "--run-dir", str(run_dir), *options]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def in_shm(self, node: str) -> list[str]:
        return self.call("exec", node, "ls", "-A", "/dev/shm").split()


def free_network() -> str:
    """The first three numbers of an IPv4 network that no interface of this machine is in."""
    in_use = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return next(net for k in range(250) if f" {(net := f'10.213.{(os.getpid() + k) % 250}')}." not in in_use)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants a folder that everybody may enter, which pytest's are not
    environment = os.environ | {
        "SLURM_CLUSTER_HOME": str(folder / "lab"),
        "SLURM_CLUSTER_ID": f"t{os.getpid() % 100_000}",
        "SLURM_CLUSTER_NET": free_network(),
        "SLURM_CONF": str(folder / "lab" / "etc" / "slurm.conf"),
        "AREAL_HPC_CACHE": str(folder / "cache"),
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "UCX_TLS": "tcp,self,sm",  # virtual networks have no bandwidth that others of its transports would believe in
    }
    (folder / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")  # some right, some wrong: gradients
    made = Cluster(environment)
    try:
        made.call("start", "--nodes", str(NUM_NODES), "--cpus", "4", "--gpus", "0", "--no-acct")
        yield made
    finally:
        made.call("stop", "--wipe")
        shutil.rmtree(folder)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Status of srun, and everything that was said."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, stdout + stderr


def rank_pid(run_dir: Path, world_rank: int) -> int:
    """Process of a rank, as this machine sees it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_text().split("\0")
            command = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(run_dir) in command and f"SLURM_PROCID={world_rank}" in environment:
            return int(process.name)
    raise LookupError(f"rank {world_rank} does not run")


def wait_for_step(run_dir: Path, process: subprocess.Popen[str]) -> None:
    stop_at = time.monotonic() + TIMEOUT_S
    log = run_dir / "attempt-1" / "log.h5"
    while not (log.exists() and len(read_table(log, "steps"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < stop_at, "no step came"
        time.sleep(0.2)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1)])
def test_job_over_nodes(cluster: Cluster, tmp_path: Path, nodes: int, per_node: int) -> None:
    """Status 0, every group accounted for, work from every generation rank, one clock in the log, nothing left on any node."""
    run_dir = tmp_path / "run"
    status, said = finish(cluster.start(nodes, per_node, run_dir))
    assert status == 0, said
    done = json.loads((run_dir / "attempt-1" / "exit.json").read_text())
    groups = done["groups"]
    assert done["status"] == 0 and done["steps"] == 4 and groups["trained"] == 16, done
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted"), groups
    trajectories = read_table(run_dir / "attempt-1" / "log.h5", "trajectories")
    assert set(trajectories["generation_rank"]) == {0, 1, 2}
    timeline = read_table(run_dir / "attempt-1" / "log.h5", "timeline")
    starts = [timeline["start_s"][timeline["rank"] == rank].min() for rank in range(nodes * per_node)]
    assert np.ptp(starts) < 60
    for node in range(1, nodes + 1):
        assert cluster.in_shm(f"n{node}") == []


def test_same_bits_as_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    """eta = 0: two nodes with two ranks each give the parameters of four ranks on one."""
    options = ("--staleness.max-staleness", "0", "--reward.custom", "parity_reward:grade", "--topology.num-ranks", "4")
    for name, nodes, per_node in (("two", 2, 2), ("one", 1, 4)):
        status, said = finish(cluster.start(nodes, per_node, tmp_path / name, *options))
        assert status == 0, said
    two, one = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("two", "one"))
    assert two == one
    assert (read_table(tmp_path / "two" / "attempt-1" / "log.h5", "steps")["grad_norm"] > 0).all(), "without gradients equality would prove nothing"


@pytest.mark.parametrize("kill_on_bad_exit", [1, 0], ids=["slurm-ends-it", "slurm-does-not"])
@pytest.mark.parametrize(("victim", "name"), [(0, "rank 0 (generation 0)"), (1, "rank 1 (generation 1)"), (3, "rank 3 (training 0)")])
def test_killed_rank_on_another_node_is_named(cluster: Cluster, tmp_path: Path, victim: int, name: str, kill_on_bad_exit: int) -> None:
    """kill -9 of the rank of a node: the others, elsewhere, see its connection break, name it with its host and end the job; no lane is left on any node."""
    run_dir = tmp_path / "run"
    process = cluster.start(4, 1, run_dir, "--train.num-steps", "100000", kill_on_bad_exit=kill_on_bad_exit)
    wait_for_step(run_dir, process)
    os.kill(rank_pid(run_dir, victim), signal.SIGKILL)
    killed_at = time.monotonic()
    status, said = finish(process)
    assert time.monotonic() - killed_at < 20
    assert status != 0 and f"n{victim + 1}: task {victim}: Killed" in said, said
    failure = json.loads((run_dir / "attempt-1" / "failure.json").read_text())
    assert failure["name"] == f"{name} on host n{victim + 1}" and "died (its connection broke) in phase" in failure["error"], failure
    assert failure["found_by"] != failure["name"] and len(failure["ranks"]) == 4
    assert not (run_dir / "attempt-1" / "exit.json").exists()
    for node in range(1, 5):
        assert not [name for name in cluster.in_shm(f"n{node}") if name.startswith("areal_")]


def test_stopped_rank_on_another_node_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """SIGSTOP of a training rank that is alone on its node: silence on its connection."""
    run_dir = tmp_path / "run"
    process = cluster.start(4, 1, run_dir, "--train.num-steps", "100000", "--watchdog.silence-s", "4")
    wait_for_step(run_dir, process)
    pid = rank_pid(run_dir, 3)
    os.kill(pid, signal.SIGSTOP)
    try:
        status, said = finish(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert status != 0, said
    failure = json.loads((run_dir / "attempt-1" / "failure.json").read_text())
    assert failure["name"] == "rank 3 (training 0) on host n4" and "silent for" in failure["error"], failure


def test_rank_that_dies_unnoticed_is_found_by_its_silence(cluster: Cluster, tmp_path: Path) -> None:
    """Without watchdog, and where the launcher does not end the job: training does, with the name and the host of the rank."""
    run_dir = tmp_path / "run"
    options = ("--train.num-steps", "100000", "--transport.silence-deadline-s", "4", "--watchdog.no-enabled")
    process = cluster.start(4, 1, run_dir, *options, kill_on_bad_exit=0)
    wait_for_step(run_dir, process)
    os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
    status, said = finish(process)
    assert status != 0, said
    failure = json.loads((run_dir / "attempt-1" / "failure.json").read_text())
    assert failure["name"].startswith("rank 3 (training 0) on host n4"), failure["name"]
    assert "rank 1 (generation 1) on host n2 has been silent for" in failure["error"], failure["error"]
