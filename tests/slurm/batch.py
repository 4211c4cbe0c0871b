"""Submit jobs to the tests' Slurm, and follow them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "slurm"
CLUSTER = Path(__file__).with_name("slurm-cluster")
PATIENCE_S = 300.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
"""States that a job stays in. NODE_FAIL and PREEMPTED are none: these jobs are started again; others pass, such as SIGNALING."""


@dataclass
class Slurm:
    """The cluster, and the environment that its commands need."""

    folder: Path
    environment: dict[str, str]
    jobs: list[int] = field(default_factory=list)

    def call(self, *arguments: str) -> str:
        """A verb of slurm-cluster."""
        return self.run([str(CLUSTER), *arguments])

    def run(self, command: list[str], **environment: str) -> str:
        done = subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sbatch(self, script: Path, *arguments: str, options: tuple[str, ...] = (), cwd: Path, **environment: str) -> BatchJob:
        """`sbatch OPTIONS script ARGUMENTS` in a folder."""
        cwd.mkdir(parents=True, exist_ok=True)
        command = ["sbatch", *options, str(script), *arguments]
        done = subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, cwd=cwd, timeout=60)
        match = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert match, done.stdout + done.stderr
        self.jobs.append(int(match[1]))
        return BatchJob(self, int(match[1]), cwd)


@dataclass(frozen=True)
class BatchJob:
    slurm: Slurm
    job_id: int
    cwd: Path

    def show(self) -> dict[str, str]:
        """What scontrol says, name -> value."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm.run(["scontrol", "show", "job", str(self.job_id)])))

    def output(self) -> str:
        """What the job has said so far."""
        return "".join(path.read_text(errors="replace") for path in self.cwd.glob(f"slurm-*-{self.job_id}*.out"))

    def finish(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the end; exit status of the batch script."""
        stop_at = time.monotonic() + patience_s
        while (shown := self.show())["JobState"] not in ENDED:
            assert time.monotonic() < stop_at, f"{shown['JobState']} {shown.get('Reason')}\n{self.output()}"
            time.sleep(0.3)
        return int(shown["ExitCode"].partition(":")[0])

    def wait_for(self, text: str, patience_s: float = PATIENCE_S) -> None:
        """Until the job has said so."""
        stop_at = time.monotonic() + patience_s
        while text not in self.output():
            state = self.show()["JobState"]
            assert text in self.output() or not (state in ENDED or time.monotonic() > stop_at), f"{state}\n{self.output()}"
            time.sleep(0.2)

    def cancel(self) -> None:
        self.slurm.run(["scancel", str(self.job_id)])


def free_network() -> str:
    """The first three numbers of an IPv4 network that no interface of this machine is in."""
    in_use = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return next(net for k in range(250) if f" {(net := f'10.214.{(os.getpid() + k) % 250}')}." not in in_use)


def exit_of(run_dir: Path, attempt: int = 1) -> dict:
    """exit.json of an attempt."""
    return json.loads((run_dir / f"attempt-{attempt}" / "exit.json").read_text())


def accounted(groups: dict[str, int]) -> bool:
    """Every group that was admitted is somewhere."""
    return groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
