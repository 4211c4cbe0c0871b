"""Start real jobs for tests: the command line as a user types it, on a small random model that is made once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from areal_hpc.config import Config, Data, Evaluation, Generation, Model, Staleness, Topology, Train
from areal_hpc.config_io import save_yaml
from areal_hpc.data.datasets import load_problems
from areal_hpc.models import hf, tokenizer
from areal_hpc.observe.telemetry import read_table
from areal_hpc.train.warmstart import decoder_config

TIMEOUT_S = 240
STARTED: list[subprocess.Popen[str]] = []
"""Launchers of this session; those that a failed test left running are killed after it (their ranks go with them)."""
BASE = Config(
    recipe="smoke",
    model=Model(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=64),
    data=Data(size=400, max_terms=3, max_digits=1, max_prompt_tokens=48),
    generation=Generation(max_new_tokens=12, max_num_running=16),
    staleness=Staleness(max_staleness=2),
    train=Train(num_steps=3, batch_size=16, group_size=4, lr=1e-2, microbatch_tokens=256),
    evaluation=Evaluation(num_problems=24),
    topology=Topology(num_ranks=2),
)


def make_model(folder: Path, seed: int = 0, model: Model = BASE.model) -> Path:
    """A tiny random Qwen2 with a character tokenizer, in Hugging Face format."""
    files = folder.with_name(folder.name + "-tokenizer")
    words = tokenizer.build(load_problems(BASE.data))
    words.save(files)
    config = decoder_config(model, words)
    decoder = hf.build_random(config, seed)
    hf.save(folder, config.to_hf(), decoder.named_parameters(), hf.tokenizer_files(files))
    return folder


def with_ranks(config: Config, num_ranks: int, fraction: float = 0.75) -> Config:
    return replace(config, topology=Topology(num_ranks=num_ranks, generation_fraction=fraction))


@dataclass(frozen=True)
class Job:
    """A finished job."""

    run_dir: Path
    status: int
    stdout: str
    stderr: str
    number: int = 1

    @property
    def attempt(self) -> Path:
        return self.run_dir / f"attempt-{self.number}"

    @property
    def exit(self) -> dict:
        return json.loads((self.attempt / "exit.json").read_text())

    def table(self, name: str) -> np.ndarray:
        return read_table(self.attempt / "log.h5", name)

    def weights(self) -> bytes:
        return (self.run_dir / "model" / "model.safetensors").read_bytes()


def start(config: Config, run_dir: Path, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """`areal-hpc run` with this configuration, as a process."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    described = run_dir.with_name(run_dir.name + ".yaml")
    save_yaml(replace(config, run_dir=str(run_dir)), described)
    command = [python, "-m", "areal_hpc", "run", "smoke", "--config", str(described), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], run_dir: Path, attempt: int = 1) -> Job:
    """Wait for a started job."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Job(run_dir, process.returncode, stdout, stderr, attempt)


def run(config: Config, run_dir: Path, *arguments: str, python: str = sys.executable, attempt: int = 1) -> Job:
    """Run to the end, which must be a good one."""
    job = finish(start(config, run_dir, *arguments, python=python), run_dir, attempt)
    assert job.status == 0, f"status {job.status}\n{job.stdout}\n{job.stderr}"
    return job


def ranks_of(run_dir: Path, attempt: int = 1) -> dict[int, int]:
    """world rank -> pid of a running job."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(item.split("=", 1) for item in (process / "environ").read_text().split("\0") if "=" in item)
            command = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if environment.get("AREAL_HPC_ATTEMPT_DIR") == str(run_dir / f"attempt-{attempt}") and "PMI_RANK" in environment and "areal_hpc run" in command:
            found[int(environment["PMI_RANK"])] = int(process.name)
    return found


def wait_for_step(run_dir: Path, process: subprocess.Popen[str], attempt: int = 1) -> None:
    """Until the log of an attempt shows a finished step."""
    stop_at = time.monotonic() + 120
    while time.monotonic() < stop_at:
        assert process.poll() is None, process.communicate()
        log = run_dir / f"attempt-{attempt}" / "log.h5"
        if log.exists() and len(read_table(log, "steps")):
            return
        time.sleep(0.2)
    raise TimeoutError("no step within 120 s")


def check_ring(job: Job, way: int) -> None:
    """The last row of each lane in /ring agrees with the run's accounting: what was read is what arrived."""
    ring, groups = job.table("ring"), job.exit["groups"]
    last = [ring[ring["lane"] == lane][-1] for lane in np.unique(ring["lane"])]
    assert sum(row["records"] for row in last) == groups["admitted"] - groups["in_ring"] - groups["unfinished"]
    assert all((row["way"], row["checksum_errors"]) == (way, 0) for row in last)
    assert all(row["bytes"] > 0 and row["high_water_bytes"] > 0 for row in last)


def check_no_lane_left(patience_s: float = 10.0) -> None:
    """No run's lane has a name (`areal_hpc.TOKEN.LANE`) in /dev/shm. Those of another run on this machine go as soon as both its ends are attached."""
    stop_at = time.monotonic() + patience_s
    while left := [path.name for path in Path("/dev/shm").iterdir() if re.match(r"areal_hpc\.[0-9a-f]{16}\.", path.name)]:
        assert time.monotonic() < stop_at, left
        time.sleep(0.1)
