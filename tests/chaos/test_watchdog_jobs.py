"""Whole jobs whose ranks are killed, stopped, held up or signalled, whose graders block and whose disk fills up: who is to blame is in failure.json.

Faults inside a rank come from a `sitecustomize` module on its path: a thread of the rank itself that waits for a file `fault-RANK`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.config import Checkpoint, Config, Log, Storage, Watchdog
from areal_hpc.observe.telemetry import sidecar_path

pytestmark = pytest.mark.mpi
LONG = 100_000
FAULTS = """
import ctypes, os, signal, threading, time
from pathlib import Path

def wait_for_order(order):
    while not order.exists():
        time.sleep(0.05)
    kind = order.read_text()
    if kind == "interpreter":
        ctypes.PyDLL(None).sleep(1000)
    elif kind == "thread":
        raise ArithmeticError("in a thread")
    elif kind == "main":
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

if "PMI_RANK" in os.environ:
    order = Path(__file__).with_name("fault-" + os.environ["PMI_RANK"])
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(1000))
    threading.Thread(target=wait_for_order, args=(order,), daemon=True).start()
"""


def watched(base: Config, **watchdog: float) -> Config:
    """A long job with short deadlines."""
    return replace(
        base, train=replace(base.train, num_steps=LONG), watchdog=Watchdog(**({"silence_s": 4.0, "phase_floor_s": 8.0, "phase_factor": 2.0} | watchdog))
    )


def failure_of(job: jobs.Job) -> dict:
    assert job.status == 1, job.stderr
    assert not (job.attempt / "exit.json").exists() and not jobs.ranks_of(job.run_dir)
    jobs.check_no_lane_left()
    return json.loads((job.attempt / "failure.json").read_text())


def start(config: Config, run_dir: Path) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A job that has trained a step, and the processes of its ranks."""
    process = jobs.start(config, run_dir)
    jobs.wait_for_step(run_dir, process)
    time.sleep(1.5)  # for some beats: a step takes milliseconds here, and the file of a rank that is stopped now could still say "start"
    return process, jobs.ranks_of(run_dir)


@pytest.mark.parametrize("victim", [pytest.param(0, id="generation", marks=pytest.mark.slow), pytest.param(1, id="only-training")])
def test_stopped_rank(base: Config, tmp_path: Path, victim: int) -> None:
    """SIGSTOP: the rank cannot act, the other one ends the job, kills it, and writes its own stack."""
    process, ranks = start(watched(base), tmp_path / "run")
    os.kill(ranks[victim], signal.SIGSTOP)
    stopped_at = time.monotonic()
    job = jobs.finish(process, tmp_path / "run")
    assert time.monotonic() - stopped_at < 30
    failure = failure_of(job)
    role = ("generation", "training")[victim]
    assert failure["name"] == f"rank {victim} ({role} 0) on host {socket.gethostname()}" and "its process is stopped" in failure["error"], failure
    assert "watchdog.py" in (job.attempt / f"stacks-rank-{1 - victim:05d}.txt").read_text()
    assert [row["rank"] for row in failure["ranks"]] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["generation-0", "generation-1", "training-0", "training-1"])
def test_killed_rank(base: Config, tmp_path: Path, victim: int) -> None:
    """kill -9 of each kind of rank while the job is in full swing."""
    process, ranks = start(jobs.with_ranks(watched(base), 4, 0.5), tmp_path / "run")
    time.sleep(0.3 * victim)
    os.kill(ranks[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    job = jobs.finish(process, tmp_path / "run")
    assert time.monotonic() - killed_at < 10
    failure = failure_of(job)
    assert failure["rank"] == victim and "in phase " in failure["error"], failure
    assert f"failed: {failure['name']}" in job.stderr
    assert len(job.table("steps")) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "kind", "error"),
    [
        (0, "interpreter", "silent for"),
        (1, "interpreter", "silent for"),
        (0, "main", "stuck in phase"),
        (1, "main", "stuck in phase"),
        (0, "thread", "ArithmeticError: in a thread"),
    ],
)
def test_fault_within_a_rank(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, kind: str, error: str) -> None:
    """A held interpreter, a main thread that hangs, a thread that raises."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process, _ = start(watched(base), tmp_path / "run")
    time.sleep(3)  # every phase has been seen more than once
    (tmp_path / "order").write_text(kind)
    (tmp_path / "order").rename(tmp_path / f"fault-{victim}")
    failure = failure_of(jobs.finish(process, tmp_path / "run"))
    assert failure["rank"] == victim and error in failure["error"], failure


@pytest.mark.slow
def test_grader_that_blocks(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose grading never ends are killed one by one and counted; the run ends with the rank that saw it, and not by the watchdog."""
    (tmp_path / "blocking_reward.py").write_text("import time\ndef grade(problem, text):\n    time.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = replace(
        watched(base), reward=replace(base.reward, custom="blocking_reward:grade", deadline_s=0.2), evaluation=replace(base.evaluation, num_problems=1)
    )
    job = jobs.finish(jobs.start(config, tmp_path / "run"), tmp_path / "run")
    failure = failure_of(job)
    assert failure["name"].startswith("rank 0 (generation 0)") and "could not be graded" in failure["error"], failure


@pytest.mark.slow
def test_slow_graders_slow_evaluations_and_long_answers_are_no_failure(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts that take longer than silence_s and phase_floor_s together: ranks wait for them, say so, and are left alone."""
    (tmp_path / "slow_reward.py").write_text("import time\ndef grade(problem, text):\n    time.sleep(1.0)\n    return float(len(text) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = replace(
        base,
        reward=replace(base.reward, custom="slow_reward:grade"),
        train=replace(base.train, num_steps=2, batch_size=8),
        evaluation=replace(base.evaluation, num_problems=8),
        watchdog=Watchdog(silence_s=2.0, phase_floor_s=3.0, phase_factor=1.0),
    )
    assert jobs.run(config, tmp_path / "run").exit["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2], ids=["generation", "training-1"])
def test_signal_at_one_rank_stops_the_run(base: Config, tmp_path: Path, victim: int) -> None:
    """SIGUSR1 to a single rank that is not training rank 0: all stop after the same step, with a checkpoint and status 75, and the log says who was signalled."""
    config = jobs.with_ranks(replace(base, train=replace(base.train, num_steps=LONG)), 3, 0.34)
    process, ranks = start(config, tmp_path / "run")
    os.kill(ranks[victim], signal.SIGUSR1)
    job = jobs.finish(process, tmp_path / "run")
    assert job.status == 75, job.stderr
    role = "generation 0" if victim == 0 else "training 1"
    assert f"stopped on request (SIGUSR1 at rank {victim} ({role}))" in job.stdout
    assert (job.run_dir / "checkpoints" / f"step-{job.exit['steps']:06d}").is_dir()
    tapes = [f"tape-{rank:04d}.h5" for rank in range(3)]
    assert sorted(path.name for path in job.attempt.iterdir()) == ["checks.json", "config.yaml", "exit.json", "log.h5", "samples", *tapes]


PERTURBED = """
import copy, sys, threading, time

def changed(weights):
    other = copy.copy(weights)
    other.norm = weights.norm * 1.5
    return other

def perturb():
    while not hasattr(sys.modules.get("areal_hpc.rollout.engines.embedded"), "EmbeddedEngine"):
        time.sleep(0.001)
    engine = sys.modules["areal_hpc.rollout.engines.embedded"].EmbeddedEngine
    real = engine.swap_weights
    engine.swap_weights = lambda self, weights, version: real(self, changed(weights), version)

threading.Thread(target=perturb, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("perturbed", [True, False])
def test_engine_with_other_weights_than_the_trainers_is_noticed(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, perturbed: bool) -> None:
    """An engine that computes with something else than what was pushed: its log-probabilities are not the trainer's, and the alarm goes off at the first step."""
    (tmp_path / "sitecustomize.py").write_text(PERTURBED if perturbed else "")
    (tmp_path / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    job = jobs.run(replace(base, reward=replace(base.reward, custom="parity_reward:grade")), tmp_path / "run")
    alarms = [event["text"].decode() for event in job.table("events") if event["kind"] == b"logprob_alarm"]
    assert [text.split(":")[0] for text in alarms] == (["step 1"] if perturbed else [])
    assert ("warning: step 1: engine and trainer differ" in job.stdout) == perturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_disk_that_stays_full(base: Config, small_disk: Path) -> None:
    """The model finds no room in the end: that is the failure, and it is on file all the same."""
    config = replace(base, train=replace(base.train, num_steps=30))
    process, _ = start(config, small_disk / "run")
    fill(small_disk)
    job = jobs.finish(process, small_disk / "run")
    failure = failure_of(job)
    assert failure["name"].startswith("rank 1 (training 0)") and "No space left on device" in failure["error"] and "save_model" in failure["traceback"]
    assert job.stderr.count("WARNING: cannot write") == 3, "once for the log and for the tape of each rank"


def fill(folder: Path) -> Path:
    """Take all the room that is left."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return folder / "ballast"


@pytest.mark.slow
@pytest.mark.parametrize("room_bytes", [1_000_000, 6 << 20], ids=["little-room", "room"])
def test_disk_that_fills_up(base: Config, small_disk: Path, room_bytes: int) -> None:
    """Training goes on, and a warning says that the log is text now. With room again the log is whole in the end (status 0); with room for the model only, the rest of
    the log stays text, and the status is 3."""
    run_dir = small_disk / "run"
    config = replace(
        base,
        train=replace(base.train, num_steps=100),
        storage=Storage(log_retry_s=1.0),
        evaluation=replace(base.evaluation, save_training_groups=0),
    )
    if room_bytes < 1 << 20:  # the text of tapes and a checkpoint would take the little room that the model needs
        config = replace(config, log=Log(record="none"), checkpoint=Checkpoint(every=0))
    process, _ = start(config, run_dir)
    ballast = fill(small_disk)
    stop_at = time.monotonic() + 60
    while not sidecar_path(run_dir / "attempt-1" / "log.h5").exists():  # the first attempt to write text
        assert time.monotonic() < stop_at and process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(1.0)
    os.truncate(ballast, max(0, ballast.stat().st_size - room_bytes))
    job = jobs.finish(process, run_dir)
    recovered = room_bytes > 1 << 20
    assert job.status == (0 if recovered else 3), job.stderr
    assert job.exit["status"] == job.status and job.exit["steps"] == 100
    assert "WARNING: cannot write" in job.stderr and "done; the model is in" in job.stdout
    assert job.exit["log"]["degraded"] == (not recovered) and job.exit["log"]["lost_rows"] == 0
    assert (job.exit["log"]["missing_rows"] == 0) == recovered
    assert job.table("steps")["step"].tolist() == list(range(1, 101)), "file and text together have every step"
    groups = job.exit["groups"]
    trained = job.table("trajectories")
    assert len(np.unique(trained["ticket"])) == groups["trained"] + groups["dropped"] + groups["filtered"] + groups["failed"]
