"""Start the ranks of a run on this machine with the local `mpiexec`, pass signals on, and say how it ended.

The status comes from exit.json, which training rank 0 writes last, or from failure.json, which the first failing rank writes; mpiexec's own status is only a fallback.
Signals: TERM, INT, USR1 and USR2 are all passed on as SIGUSR1, the only one that both MPICH and Open MPI hand to the ranks unharmed; a second one of the same kind
ends the job hard (signals.Insistence).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from areal_hpc import fence
from areal_hpc.config import Config, ConfigError
from areal_hpc.config_io import save_yaml
from areal_hpc.launch import deaths
from areal_hpc.launch.deaths import Deaths
from areal_hpc.launch.ownership import Ownership
from areal_hpc.launch.resume import DONE, LOG_INCOMPLETE, Attempt, attempts_of, keep_as_newest, next_attempt, steps_done
from areal_hpc.signals import Insistence

USER_ERROR = 2
REQUEUE = 75
OLD_S = 600.0
"""Age from which a file of MPICH's that nobody uses is swept, whoever left it."""
GRACE_S = 15.0
"""Seconds between asking an MPI launcher to end and killing it."""
PR_SET_PDEATHSIG = 1
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def is_rank() -> bool:
    """Was this process started as one rank of an MPI job (mpiexec, or a step of srun)?"""
    return any(name in os.environ for name in RANK_VARIABLES) or ("SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_STEP_ID", "").isdigit())


def world_rank_hint() -> int:
    """This rank's number before MPI is initialised, as the launcher's environment tells it; 0 if it does not."""
    for name in (*RANK_VARIABLES, "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


@dataclass(frozen=True, slots=True)
class Launcher:
    """The mpiexec of the active environment."""

    path: str
    flavour: str
    """mpich or openmpi"""

    def command(self, num_ranks: int) -> list[str]:
        """mpiexec with the options that ranks on shared cores, or root, need."""
        if self.flavour == "mpich":
            return [self.path, "-n", str(num_ranks)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [self.path, *root, "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]

    def environment(self) -> dict[str, str]:
        """Open MPI spins while it waits unless told to yield, and warns about a component it cannot use."""
        if self.flavour == "mpich":
            return {}
        return {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_osc": "^ucx"}


def find_launcher() -> Launcher:
    """The mpiexec beside this Python, else the first on PATH. Raises ConfigError when there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise ConfigError("no mpiexec found beside this Python or on PATH; install one with: pip install mpich")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    return Launcher(path, "openmpi" if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said else "mpich")


def create_run_dir(config: Config) -> Path:
    """RUN/attempt-1, with the configuration beside it. Raises ConfigError when the run exists already."""
    run_dir = Path(config.run_dir)
    attempt_dir = run_dir / "attempt-1"
    try:
        if (run_dir / "config.yaml").exists():
            raise FileExistsError
        attempt_dir.mkdir(parents=True)
        save_yaml(config, attempt_dir / "config.yaml")
        save_yaml(config, run_dir / "config.yaml")
    except FileExistsError:
        raise ConfigError(f"run_dir={run_dir} holds a run already; go on with it by --resume, or choose another folder with --run-dir") from None
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {error.strerror}") from None
    return attempt_dir


def begin_attempt(config: Config, *, resume: bool, fingerprint: str) -> Attempt:
    """The folder of a new run, or of the next attempt of one, as the owner of the run directory. Raises ConfigError."""
    return next_attempt(config, fingerprint) if resume else Attempt(create_run_dir(config))


def is_done(config: Config, *, resume: bool) -> bool:
    """Nothing is left to resume; says so."""
    steps = steps_done(Path(config.run_dir)) if resume else 0
    done = 0 < config.train.num_steps <= steps
    if done and world_rank_hint() == 0:
        print(f"{config.run_dir} has {steps} steps already, and {config.train.num_steps} are asked for; more of them: --train.num-steps", flush=True)
    return done


def discard_run_dir(attempt_dir: Path) -> None:
    """Take back what `begin_attempt` made, and nothing else: the run folder may be one that holds earlier attempts, or other files of the user."""
    run_dir = attempt_dir.parent
    shutil.rmtree(attempt_dir)
    if earlier := [path / "config.yaml" for path in attempts_of(run_dir).values() if (path / "config.yaml").exists()]:
        keep_as_newest(run_dir, earlier[-1])
        return
    (run_dir / "config.yaml").unlink()
    if not any(run_dir.iterdir()):
        run_dir.rmdir()


def _end_with_parent() -> None:
    """In the child that becomes mpiexec: SIGTERM when the launcher dies (prctl(2)), so that a killed launcher leaves no job behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class LocalJob:
    """One mpiexec and the signals that reach it."""

    def __init__(self, command: list[str], environment: dict[str, str], inherited: tuple[int, ...] = ()) -> None:
        """`inherited`: file descriptors that mpiexec, and through it the ranks, hold too."""
        self.num_signals = 0
        """1: the ranks have been asked to stop; 2: somebody insisted."""
        self._insistence = Insistence()
        # A session of its own: Ctrl-C on the terminal reaches the launcher only, which passes it on once.
        # The launcher has no threads, so running a function between fork and exec is safe.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=inherited,
            preexec_fn=_end_with_parent,  # noqa: PLW1509
        )
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(name, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        insists = self._insistence.hear(number, time.monotonic())
        if self.num_signals == 0:
            self.num_signals = 1
            print(f"{signal.Signals(number).name}: asking the ranks to stop after this step; once more ends them now", file=sys.stderr, flush=True)
            self.process.send_signal(signal.SIGUSR1)
        elif insists:
            self.num_signals = 2
            self.process.terminate()

    def wait(self, died: Deaths) -> int:
        """Status of mpiexec; `died` learns of ranks that end meanwhile. After a second signal mpiexec gets GRACE_S, then its whole session is killed."""
        launcher = os.pidfd_open(self.process.pid)
        try:
            while self.num_signals <= 1:
                if died.wait(launcher):
                    return self.process.wait()
        finally:
            os.close(launcher)
            died.close()
        try:
            return self.process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def launch(config: Config, *, resume: bool = False, fingerprint: str = "") -> int:
    """Run the checked configuration; returns the exit status of the job. `resume`: go on with the run; `fingerprint`: of the data, which may not have changed then."""
    if is_done(config, resume=resume):
        return 0
    fence.claim(Path(config.run_dir))
    ownership = Ownership.take(Path(config.run_dir))
    try:
        return _launch_owned(config, begin_attempt(config, resume=resume, fingerprint=fingerprint), ownership)
    finally:
        ownership.release()


def _launch_owned(config: Config, attempt: Attempt, ownership: Ownership) -> int:
    launcher, attempt_dir = find_launcher(), attempt.folder
    for line in [f"took over from {ownership.took_over}, which is gone"] * bool(ownership.took_over) + attempt.notes:
        print(line, flush=True)
    print(f"{config.topology.num_ranks} ranks, {launcher.flavour}; run folder {config.run_dir}", flush=True)
    began_at = time.time()
    command = [
        *launcher.command(config.topology.num_ranks),
        sys.executable,
        "-m",
        "areal_hpc",
        "run",
        config.recipe,
        "--config",
        str(attempt_dir / "config.yaml"),
    ]
    try:
        died = Deaths(attempt_dir)
        job = LocalJob(command, os.environ | launcher.environment() | rank_environment(config, attempt) | died.environment(), (ownership.descriptor,))
        ownership.keep_alive()
        status = final_status(job.wait(died), attempt_dir, job.num_signals, died, goes_on_from=attempt.checkpoint)
    finally:
        remove_stale_files(began_at)
    if status == USER_ERROR:
        discard_run_dir(attempt_dir)  # so that the same command can be given again
    if status == LOG_INCOMPLETE:
        print(f"done, but rows are missing from {attempt_dir}/log.h5; {attempt_dir}/exit.json says where they are", file=sys.stderr, flush=True)
    if status in (DONE, LOG_INCOMPLETE):
        print(f"done; the model is in {config.run_dir}/model, tables and plots: areal-hpc report {config.run_dir}", flush=True)
    return status


def rank_environment(config: Config, attempt: Attempt) -> dict[str, str]:
    """Variables that every rank sees."""
    threads = str(config.topology.threads_per_rank)
    live = sys.stdout.isatty()
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        **attempt.environment(),
        "AREAL_HPC_PROGRESS": os.environ.get("AREAL_HPC_PROGRESS", "live" if live else "lines"),
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }


def final_status(mpiexec_status: int, attempt_dir: Path, num_signals: int, died: Deaths | None = None, goes_on_from: Path | None = None) -> int:
    """What the job's own files say; a missing exit.json is a failure whatever mpiexec returned. Where no rank could say anything: the first one that died.

    `goes_on_from`: the complete checkpoint that the attempt began with. A signal that came while the ranks were loading has lost nothing then.
    """
    failed = attempt_dir / "failure.json"
    if done := _read_report(attempt_dir / "exit.json"):
        return int(done["status"])
    if report := _read_report(failed):
        if report.get("died") and died is not None and (truer := deaths.report(died)) and truer["rank"] != report["rank"]:
            report |= truer | {"ranks": report["ranks"]}  # a watchdog saw one of those that the first death took along
            _write_failure(failed, report)
        if report["exit_status"] != USER_ERROR:  # a user's mistake has been said in one line already
            print(f"failed: {report['name']}: {report['error']}  ({'traceback above and' if 'traceback' in report else 'more'} in {failed})", file=sys.stderr)
        return int(report["exit_status"])
    if goes_on_from is not None and num_signals == 1 and mpiexec_status >= 0 and not (attempt_dir / "log.h5").exists():  # training makes the log
        print(f"stopped on request before training went on; the checkpoint that it would have gone on from, {goes_on_from.name}, is complete")
        return REQUEUE
    report = deaths.report(died) if died is not None and num_signals <= 1 and mpiexec_status >= 0 else None
    if report is None or (num_signals == 1 and "SIGUSR1" in report["error"]):
        report = {"status": "failed", "exit_status": 1, "name": "launcher", "error": _cause(mpiexec_status, num_signals), "time": time.time()}
        print(f"failed: {report['error']}", file=sys.stderr)
    else:
        print(f"failed: {report['name']}: {report['error']}  (more in {failed})", file=sys.stderr)
    (attempt_dir / "failure.json.tmp").unlink(missing_ok=True)  # what the ranks had reserved makes room for it
    _write_failure(failed, report)
    return 1


def _write_failure(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(f"could not write {path}: {error.strerror}", file=sys.stderr)


def _read_report(path: Path) -> dict | None:
    """A file that a rank wrote at its end; None when it is missing, or half-written because the disk was full."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _cause(mpiexec_status: int, num_signals: int) -> str:
    """What is known when no rank could say anything."""
    if num_signals > 1:
        return "ended by a second signal"
    if num_signals == 1:
        return f"ended by a signal before the ranks could act on it (status {mpiexec_status}); nothing had been trained that could be saved"
    if mpiexec_status < 0:
        return f"mpiexec was killed by {signal.Signals(-mpiexec_status).name}"
    killed_by = mpiexec_status - 128 if mpiexec_status > 128 else mpiexec_status
    if killed_by == signal.SIGKILL:
        return "a rank was killed by SIGKILL (out of memory?); mpiexec names its process above"
    return f"a rank or mpiexec ended with status {mpiexec_status} and no cause is on file: see what was printed above"


def remove_stale_files(since: float) -> None:
    """MPICH leaves files behind when a job is aborted: remove those of this user that are newer than the job, or old, and that nobody uses.

    Trap: another job may be starting beside this one. The files are listed before the processes are looked through, so that whoever made one is found: with the shared
    memory open, though perhaps not mapped yet, or as the proxy that tells its ranks the name of a topology file.
    """
    segments, topologies = list(Path("/dev/shm").glob("mpich_shm_*")), list(Path("/tmp").glob("hydra_hwloc_xmlfile_*"))
    if not segments and not topologies:
        return
    used, has_proxy = set[str](), False
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            has_proxy = has_proxy or (process / "comm").read_text().startswith("hydra_pmi_proxy")
            used |= _open_files(process)
            used |= {line.split()[-1] for line in (process / "maps").read_text().splitlines() if "/dev/shm/mpich_shm" in line}
    for leftover in [path for path in segments if str(path) not in used] + [path for path in topologies if not has_proxy]:
        with contextlib.suppress(FileNotFoundError):
            status = leftover.stat()
            if status.st_uid == os.getuid() and (status.st_mtime >= since or status.st_mtime < time.time() - OLD_S):
                leftover.unlink()


def _open_files(process: Path) -> set[str]:
    names = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.add(os.readlink(descriptor))
    return names
