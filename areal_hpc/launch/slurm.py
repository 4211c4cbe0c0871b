"""Slurm jobs through submitit: `areal_hpc.submit(...)` from Python, `areal-hpc submit RECIPE` from the shell.

    submitit's process of task r ──starts──▶ rank r (`areal-hpc run`, as under a plain srun) ──exit status──▶ result, requeue, or error

A rank is a process of its own because it ends by a hard exit (guard.py), which no result would survive; MPI is started in it only. On submitit's signal (USR2, before
the time limit or at preemption) each task passes USR1 to its rank: all ranks stop after the same step, write a checkpoint and exit with 75; then task 0 does what
submitit does for any Checkpointable: store `checkpoint()`, which only names finished state, and requeue; every life says `--resume`. Locally one task starts
`areal-hpc run` with mpiexec.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from areal_hpc import cluster
from areal_hpc.config import Config, ConfigError, check, check_layout
from areal_hpc.launch.local import USER_ERROR
from areal_hpc.launch.resume import DONE, LOG_INCOMPLETE

if TYPE_CHECKING:
    import submitit

REQUEUE = 75
CLUSTERS = ("slurm", "local", "debug")
POLL_S = 0.1
RANK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a job asks Slurm for."""

    nodes: int = 1
    """Nodes."""
    ranks_per_node: int = 8
    """MPI ranks on each: as many as it has GPUs."""
    gpus_per_node: int = 8
    """GPUs on each, all visible to all its ranks; 0: none."""
    cpus_per_rank: int = 8
    """Cores for each rank: its own threads, and the graders'."""
    time_min: int = 240
    """Minutes."""
    partition: str = ""
    """Partition; empty: the site's default."""
    account: str = ""
    """Account; empty: the user's default."""
    signal_s: int = 300
    """Seconds before the end of the time at which the run is asked to stop with a checkpoint."""
    mpi: str = ""
    """Value of `srun --mpi=`; empty: what this environment's MPI needs."""
    name: str = "areal-hpc"
    """Name of the job."""
    setup: tuple[str, ...] = ()
    """Shell lines before srun: `module load ...`, `source slurm/sites/alps.sh`."""
    max_restarts: int = 100
    """Lives of the job that may end at its time limit."""
    extra: tuple[str, ...] = ()
    """Other options of sbatch, as NAME=VALUE."""


@dataclass(slots=True)
class Run:
    """The function of a submitit job: one rank under Slurm, the whole run locally. Returns what exit.json says."""

    recipe: str
    options: tuple[str, ...]
    run_dir: str
    _rank: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _asked: bool = field(default=False, repr=False)

    def command(self) -> list[str]:
        """What the task starts: `-m mpi4py` ends the job at an exception before our own guard stands."""
        command = [sys.executable, "-m", "mpi4py", "-m", "areal_hpc", "run", self.recipe]
        return [*command, "--run-dir", self.run_dir, "--resume", *self.options]  # where there is nothing yet, the run begins

    def __call__(self) -> dict[str, Any]:
        """Be this task. Raises RuntimeError with the cause when the run fails."""
        before = self._attempt()
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        signal.signal(signal.SIGUSR2, self._stop)
        # Slurm signals every process of a step: the rank ignores USR2 and waits for ours. PMI-2 talks over an inherited descriptor.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            self._rank = subprocess.Popen(self.command(), close_fds=False, preexec_fn=_ignore_usr2)  # noqa: PLW1509
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        status = self._wait(self._rank, before)
        self._rank = None
        if status == REQUEUE and callable(requeue):
            self._leave(requeue)
        if status not in (DONE, LOG_INCOMPLETE):
            raise RuntimeError(self._cause(status))
        if status == LOG_INCOMPLETE:
            print(f"WARNING: {self.run_dir} is done, but rows are missing from its log; exit.json says where they are", flush=True)
        return self._report()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What goes on after a requeue: the same run, from its newest complete checkpoint. Reads nothing, talks to no rank: they have finished or died."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, _rank=None, _asked=False))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._rank is not None and not self._asked:  # once: a rank that is asked again ends without a checkpoint
            self._asked = True
            self._rank.send_signal(RANK_SIGNAL)

    def _wait(self, rank: subprocess.Popen[bytes], before: Path) -> int:
        """Status of the rank. In a job step: raises RuntimeError as soon as the first failure is on file, because a moment later Slurm kills this process too."""
        while True:
            try:
                return rank.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                newest = self._attempt()
                if "SLURM_STEP_ID" in os.environ and newest != before and (newest / "failure.json").exists():
                    raise RuntimeError(self._cause(1)) from None

    def _leave(self, requeue: Callable[..., object]) -> None:
        """All ranks have stopped with a checkpoint: task 0 requeues the job, the others wait for Slurm to end them. A job that somebody cancelled stays where it is."""
        if not self._asked and os.environ.get("SLURM_PROCID", "0") == "0" and cluster.is_ending():
            raise RuntimeError(f"{self.run_dir}: the job was cancelled; the run stopped with a complete checkpoint, and goes on when it is submitted again")
        requeue(signal.SIGUSR2, None)
        time.sleep(60)
        raise RuntimeError("the run stopped with a checkpoint, and Slurm has not started it again")

    def _attempt(self) -> Path:
        attempts = [path for path in Path(self.run_dir).glob("attempt-*") if path.name.removeprefix("attempt-").isdigit()]
        return max(attempts, key=lambda path: int(path.name.removeprefix("attempt-")), default=Path(self.run_dir))

    def _report(self) -> dict[str, Any]:
        """exit.json of the newest attempt; raises RuntimeError when it is not there: srun can say 0 after a node died."""
        try:
            return {"run_dir": self.run_dir, **json.loads((self._attempt() / "exit.json").read_text())}
        except FileNotFoundError:
            raise RuntimeError(f"{self.run_dir}: every process ended well, but no rank wrote that the run is done") from None

    def _cause(self, status: int) -> str:
        try:
            failure = json.loads((self._attempt() / "failure.json").read_text())
            return f"{failure['name']}: {failure['error']}"
        except (OSError, ValueError, KeyError):
            what = "its configuration or data is wrong" if status == USER_ERROR else f"it ended with status {status}"
            return f"{self.run_dir}: {what}; the log of the job says more"


def _ignore_usr2() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def prepared(recipe: str, options: Sequence[str] = (), run_dir: str | Path = "") -> Run:
    """The function of a job for this recipe, checked as far as a login node can. Raises ConfigError.

    `run_dir`: on a file system that all nodes share; empty: runs/RECIPE-TIME. Jobs of one array or batch need one each.
    """
    check(configured(recipe, options))
    folder = Path(run_dir) if str(run_dir) else Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Run(recipe, tuple(options), str(folder.absolute()))


def configured(recipe: str, options: Sequence[str]) -> Config:
    """The recipe with these options, `--config FILE` among them. Raises ConfigError."""
    from areal_hpc.config_io import load_yaml, parse_options, split_files
    from areal_hpc.recipes import recipe as base_of

    config = base_of(recipe)
    files, others = split_files(options)
    for file in files:
        config = load_yaml(file, config)
    return parse_options(others, config, f"areal-hpc submit {recipe}")


def executor(resources: Resources, folder: str | Path = "runs/submitit", target: str = "slurm") -> submitit.AutoExecutor:
    """An executor for runs (`prepared`): `.submit(run)`, and for a job array `with ex.batch(): ...`, as submitit documents them.

    `folder`: scripts, logs and results of submitit, on a file system that all nodes share. `target`: slurm, local (one task, mpiexec) or debug (in this process).
    Raises ConfigError when Slurm is asked for and not there.
    """
    import submitit

    if target not in CLUSTERS:
        raise ConfigError(f"cluster={target}; there are: {', '.join(CLUSTERS)}")
    if target == "slurm" and shutil.which("srun") is None:
        raise ConfigError("no srun on PATH: this machine is no login node of a Slurm cluster; use --cluster local, or --dry-run to see the script")
    made = submitit.AutoExecutor(folder=folder, cluster=target, slurm_max_num_timeout=resources.max_restarts)
    if target == "slurm":
        made.update_parameters(**{f"slurm_{name}": value for name, value in parameters(resources).items()})
    else:
        made.update_parameters(timeout_min=resources.time_min)
    return made


def parameters(resources: Resources) -> dict[str, Any]:
    """Of submitit's Slurm executor. `srun_args`: what MPI needs, and one end for all ranks."""
    mpi = resources.mpi or cluster.mpi_type_for(cluster.mpi_of_environment(), cluster.mpi_types_offered())
    wanted: dict[str, Any] = {
        "job_name": resources.name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.ranks_per_node,
        "cpus_per_task": resources.cpus_per_rank,
        "time": resources.time_min,
        "signal_delay_s": resources.signal_s,
        "srun_args": [f"--mpi={mpi}", "--kill-on-bad-exit=1", f"--cpus-per-task={resources.cpus_per_rank}"],
        "setup": ["export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1", "ulimit -c 0", *resources.setup],
        "additional_parameters": {"requeue": True, **dict(_pair(text) for text in resources.extra)},
        "stderr_to_stdout": True,
    }
    if resources.gpus_per_node:
        wanted["gpus_per_node"] = resources.gpus_per_node
    for name in ("partition", "account"):
        if value := getattr(resources, name):
            wanted[name] = value
    return wanted


def _pair(text: str) -> tuple[str, str | bool]:
    name, equals, value = text.removeprefix("--").partition("=")
    return name, value if equals else True


def submit(recipe: str, *options: str, run_dir: str | Path = "", folder: str | Path = "runs/submitit", target: str = "slurm", **resources: Any) -> submitit.Job:
    """Submit one run: `areal_hpc.submit("areal-64gpu", "--model.path", "/models/7b", nodes=8, partition="gpu")`. Returns submitit's job.

    `job.results()` has one dictionary (that of exit.json) for each rank. Keywords: `run_dir`, `folder`, `target` (see `executor`), fields of `Resources`.
    Raises ConfigError for a mistake that can be found here.
    """
    asked = resources_of(resources)
    run = prepared(recipe, options, run_dir)
    if target == "slurm":
        check_layout(configured(recipe, options), asked.nodes * asked.ranks_per_node)
    return executor(asked, folder, target).submit(run)


def resources_of(given: dict[str, Any]) -> Resources:
    """Raises ConfigError that names the fields there are."""
    names = [item.name for item in fields(Resources)]
    for name in given:
        if name not in names:
            raise ConfigError(f"'{name}' is no resource of a job; there are: {', '.join(names)}")
    return Resources(**given)


def script(resources: Resources, folder: str | Path = "runs/submitit") -> str:
    """The text that submitit gives to sbatch for these resources, on machines without Slurm too."""
    from submitit.slurm.slurm import _make_sbatch_string

    where = Path(folder).expanduser().absolute()
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(where))}"
    return _make_sbatch_string(command=command, folder=where, **parameters(resources))


HELP = """usage: areal-hpc submit RECIPE [--section.option value ...] [options of the job]

  --run-dir DIR        folder of the run, on a file system that all nodes share (default: runs/RECIPE-TIME)
  --dry-run            print the batch script, and what each task starts; submit nothing
  --test-only          ask Slurm whether, and when, it would start the job; submit nothing
  --cluster WHERE      slurm, local (mpiexec on this machine, in the background) or debug (in this process)
  --folder DIR         scripts, logs and results of submitit (default: runs/submitit)
"""


def main(args: list[str], configure: Callable[[list[str], str], tuple[Config, list[str]]]) -> int:
    """`areal-hpc submit`. `configure`: the command line's own reader of recipes and options."""
    if not args or args[0] in ("-h", "--help") or "--help" in args:
        print(HELP + _resource_help(), end="")
        return 0 if args else USER_ERROR
    from submitit.core.utils import FailedJobError

    ours, rest = _split(args)
    config, _ = configure(rest, "submit")
    check(config)
    options = _without_run_dir(rest[1:])
    resources = resources_of({name: value for name, value in ours.items() if name in {item.name for item in fields(Resources)}})
    target, folder = str(ours.get("cluster", "slurm")), str(ours.get("folder", "runs/submitit"))
    run = prepared(rest[0], options, config.run_dir)
    if target == "slurm":
        check_layout(config, resources.nodes * resources.ranks_per_node)
    if "dry_run" in ours:
        print(script(resources, folder), end="")
        print(f"# each task starts: {shlex.join(run.command())}")
        return 0
    if "test_only" in ours:
        return _test_only(script(resources, folder))
    try:
        job = executor(resources, folder, target).submit(run)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"sbatch ended with status {error.returncode} and submitted nothing: {_last_line(error.stderr or error.output)}") from None
    except FailedJobError as error:
        raise ConfigError(f"sbatch submitted nothing: {_last_line(str(error))}") from None
    print(f"job {job.job_id}; run folder {run.run_dir}; log {job.paths.stdout}")
    if target == "debug":
        job.result()
    return 0


def _last_line(said: str | bytes | None) -> str:
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said or "").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _resource_help() -> str:
    lines = []
    source = Path(__file__).read_text().partition("class Resources:")[2]
    for item in fields(Resources):
        doc = source.partition(f"    {item.name}: ")[2].partition('"""')[2].partition('"""')[0]
        default = "" if item.default in ("", ()) else f" (default: {item.default})"
        lines.append(f"  --{item.name.replace('_', '-'):18} {doc}{default}\n")
    return "".join(lines)


def _split(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(options of the job, the rest). Raises ConfigError for a value that is missing or no number."""
    kinds: dict[str, str] = {item.name: str(item.type) for item in fields(Resources)} | {
        "cluster": "str",
        "folder": "str",
        "dry_run": "bool",
        "test_only": "bool",
    }
    ours: dict[str, Any] = {}
    others: list[str] = []
    rest = iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if key not in kinds:
            others.append(argument)
            continue
        if kinds[key] == "bool":
            ours[key] = True
            continue
        if not equals:
            value = next(rest, "")
        if kinds[key] == "int":
            if not value.isdigit():
                raise ConfigError(f"{name} needs a whole number, not '{value}'")
            ours[key] = int(value)
        elif kinds[key].startswith("tuple"):
            ours[key] = (*ours.get(key, ()), value)
        else:
            ours[key] = value
        if value == "":
            raise ConfigError(f"{name} needs a value")
    return ours, others


def _without_run_dir(options: Iterable[str]) -> list[str]:
    kept, rest = [], iter(options)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name in ("--run-dir", "--run_dir"):
            if not equals:
                next(rest, None)
        elif name != "--resume":  # each task says it anyway
            kept.append(argument)
    return kept


def _test_only(text: str) -> int:
    """`sbatch --test-only`, which answers on standard error."""
    if shutil.which("sbatch") is None:
        raise ConfigError("no sbatch on PATH: this machine is no login node of a Slurm cluster; --dry-run shows the script")
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(text)
        file.flush()
        done = subprocess.run(["sbatch", "--test-only", file.name], capture_output=True, text=True, timeout=cluster.CALL_TIMEOUT_S, env=os.environ)
    print((done.stderr or done.stdout).strip())
    return 0 if done.returncode == 0 else USER_ERROR
