"""Real jobs that are killed or stopped at random moments and go on: each ticket trained once, nothing saved is sampled again, ages bounded, the same bits at eta = 0."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc import checkpoints
from areal_hpc.config import Checkpoint, Config, Evaluation, Generation, Staleness
from areal_hpc.config_io import save_yaml
from areal_hpc.intervals import IntervalSet
from areal_hpc.launch.local import find_launcher
from areal_hpc.launch.resume import attempts_of
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.observe import runs
from areal_hpc.observe.samples import read_records
from areal_hpc.observe.schema import OUTCOMES
from areal_hpc.observe.telemetry import read_table
from areal_hpc.transport.cut import Cut

pytestmark = pytest.mark.mpi
OPEN_END = 100_000


def number_of_attempts(run_dir: Path) -> int:
    return max(attempts_of(run_dir), default=0)


def trained(run_dir: Path) -> np.ndarray:
    """Rows of trajectories that count, over all attempts, undone steps left out."""
    rows = runs.load(run_dir).trajectories
    return rows[np.array(OUTCOMES)[rows["outcome"]] == "trained"]


def check_each_once(run_dir: Path, config: Config, num_steps: int) -> np.ndarray:
    """Steps 1 to num_steps once each, no answer of a ticket twice; returns the tickets."""
    run = runs.load(run_dir)
    assert run.steps["step"].tolist() == list(range(1, num_steps + 1))
    assert run.pushes["version"].tolist() == list(range(num_steps + 1))
    rows = run.trajectories
    assert len(np.unique(rows[["ticket", "sample"]])) == len(rows), "an answer was closed twice"
    tickets = np.unique(trained(run_dir)["ticket"])
    assert len(tickets) == num_steps * config.groups_per_batch
    return tickets


def start_next(config: Config, run_dir: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """The next attempt of a run, and its number."""
    attempt = number_of_attempts(run_dir) + 1
    return jobs.start(config, run_dir, "--resume", *arguments), attempt


def kill_somebody(rng: random.Random, process: subprocess.Popen[str], run_dir: Path, attempt: int, within_s: float, *, saved: bool) -> None:
    """kill -9 of a random rank at a random moment after the attempt's first step (`saved`: and the run's first checkpoint), and the job's end."""
    jobs.wait_for_step(run_dir, process, attempt)
    stop_at = time.monotonic() + 60
    while saved and not any(map(checkpoints.is_complete, checkpoints.steps_of(run_dir).values())):
        assert process.poll() is None and time.monotonic() < stop_at, "no checkpoint"
        time.sleep(0.05)
    time.sleep(rng.uniform(0, within_s))
    ranks = jobs.ranks_of(run_dir, attempt)
    os.kill(rng.choice(list(ranks.values())), signal.SIGKILL)
    killed_at = time.monotonic()
    job = jobs.finish(process, run_dir, attempt)
    assert job.status not in (0, 2, 75), job.stdout + job.stderr
    assert time.monotonic() - killed_at < 30
    assert not jobs.ranks_of(run_dir, attempt)


def kill_and_resume(config: Config, run_dir: Path, num_kills: int, seed: int, within_s: float = 1.5, slow_s: str = "0.2") -> None:
    """`num_kills` attempts that are killed, each going on from the one before; there is a checkpoint before the last of them is."""
    rng = random.Random(seed)
    os.environ["AREAL_HPC_SLOW_SAVE_S"] = slow_s  # kills then often hit a half-written checkpoint
    try:
        for number in range(num_kills):
            process, attempt = start_next(config, run_dir, "--train.num-steps", str(OPEN_END))
            kill_somebody(rng, process, run_dir, attempt, within_s, saved=number == num_kills - 1)
    finally:
        del os.environ["AREAL_HPC_SLOW_SAVE_S"]


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments(chaos: Config, tmp_path: Path, num_kills: int) -> None:
    """kill -9 of random ranks, checkpoints, pushes and ring commits under way: no ticket is trained twice or lost, and `dropless` keeps its bound."""
    config = jobs.with_ranks(replace(chaos, staleness=Staleness(max_staleness=2, mode="dropless"), checkpoint=Checkpoint(every=3)), 4, 0.5)
    run_dir = tmp_path / "run"
    kill_and_resume(config, run_dir, num_kills, seed=num_kills)
    newest, _ = checkpoints.newest_complete(run_dir)
    assert newest is not None
    num_steps = checkpoints.read_meta(newest)["step"] + 5
    job = jobs.run(config, run_dir, "--resume", "--train.num-steps", str(num_steps), attempt=number_of_attempts(run_dir) + 1)
    assert f"goes on from {newest.name}" in job.stdout
    tickets = check_each_once(run_dir, config, num_steps)
    groups = job.exit["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    assert groups["trained"] == len(tickets)
    left = groups["admitted"] - groups["trained"]
    assert tickets[-1] < len(tickets) + left, "every ticket below the last one was trained or is accounted for as under way"
    assert trained(run_dir)["age"].max() <= 2
    jobs.check_no_lane_left()


@pytest.mark.parametrize("num_kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_same_bits_as_if_never_killed(chaos: Config, tmp_path: Path, num_kills: int) -> None:
    """eta = 0: whatever was killed, steps are repeated from a cut between two of them, so parameters, tickets and losses are those of an undisturbed run."""
    config = jobs.with_ranks(replace(chaos, staleness=Staleness(max_staleness=0), checkpoint=Checkpoint(every=2)), *((3, 0.75) if num_kills == 1 else (4, 0.5)))
    run_dir = tmp_path / "run"
    by_messages = replace(config, transport=replace(config.transport, lanes="forwarded"))  # markers take the way between nodes; bits do not depend on it
    kill_and_resume(by_messages, run_dir, num_kills, seed=5, within_s=1.0, slow_s="0")
    newest, _ = checkpoints.newest_complete(run_dir)
    assert newest is not None
    num_steps = checkpoints.read_meta(newest)["step"] + 3
    job = jobs.run(config, run_dir, "--resume", "--train.num-steps", str(num_steps), attempt=number_of_attempts(run_dir) + 1)
    reference = jobs.run(config, tmp_path / "undisturbed", "--train.num-steps", str(num_steps))
    assert job.weights() == reference.weights()
    assert runs.load(run_dir).steps["loss"].tolist() == reference.table("steps")["loss"].tolist()
    assert (reference.table("steps")["grad_norm"] > 0).all(), "without gradients equality would prove nothing"
    assert check_each_once(run_dir, config, num_steps).tolist() == list(range(num_steps * config.groups_per_batch))
    columns = ["ticket", "sample", "batch", "answer_tokens", "version_min", "version_max", "reward", "advantage"]
    assert runs.load(run_dir).trajectories[columns].tolist() == reference.table("trajectories")[columns].tolist()


def half_finished(checkpoint: Path, words: Tokenizer) -> dict[tuple[int, int], str]:
    """(ticket, sample) -> text of what a checkpoint has of each answer that was begun."""
    cut = Cut.open(checkpoint, IntervalSet.from_list(checkpoints.read_meta(checkpoint)["closed_tickets"]))
    assert cut.num_duplicates == 0
    groups = cut.unfinished_of(0, 1, static=False)
    return {(group.ticket, k): words.decode(sample.tokens_R) for group in groups for k, sample in enumerate(group.samples) if len(sample.tokens_R)}


def stop(process: subprocess.Popen[str], run_dir: Path, attempt: int, number: int) -> Path:
    """A signal to the launcher; the checkpoint that the job leaves, which is of its last step."""
    jobs.wait_for_step(run_dir, process, attempt)
    process.send_signal(number)
    job = jobs.finish(process, run_dir, attempt)
    assert job.status == 75, job.stdout + job.stderr
    newest, skipped = checkpoints.newest_complete(run_dir)
    assert newest is not None and not skipped
    assert newest.name == f"step-{job.exit['steps']:06d}"
    assert checkpoints.fault(newest) == ""
    groups = job.exit["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    return newest


@pytest.mark.slow
def test_stopped_twice_and_resumed_on_other_numbers_of_ranks(chaos: Config, tmp_path: Path) -> None:
    """4 -> 3 -> 5 ranks, SIGTERM then SIGUSR1: half-finished answers go on behind the tokens they have; no ticket twice; a second job is refused meanwhile.

    Grading is slow, so that answers wait for it at every cut, and 50 steps are a long time.
    """
    (tmp_path / "slow_reward.py").write_text("import time\nimport parity_reward\ndef grade(*a):\n    time.sleep(0.03)\n    return parity_reward.grade(*a)\n")
    config = replace(
        jobs.with_ranks(chaos, 4, 0.5),
        reward=replace(chaos.reward, custom="slow_reward:grade", num_graders=1),
        generation=Generation(max_new_tokens=60, max_num_running=24),
        staleness=Staleness(max_staleness=2, mode="dropless"),
        evaluation=Evaluation(num_problems=8, save_training_groups=OPEN_END),
        checkpoint=Checkpoint(every=0),
    )
    run_dir, words = tmp_path / "run", Tokenizer.from_folder(Path(chaos.model.path))
    process = jobs.start(config, run_dir, "--train.num-steps", "50")  # answers of every batch's groups are saved for reading in runs of up to 50 steps
    jobs.wait_for_step(run_dir, process)
    second = jobs.finish(jobs.start(config, run_dir, "--resume", "--train.num-steps", "50"), run_dir)
    assert second.status == 2 and f"in use by process {process.pid} on host" in second.stderr and second.stderr.count("\n") == 1, second.stderr
    first = stop(process, run_dir, 1, signal.SIGTERM)
    saved = half_finished(first, words)
    assert saved, "answers take many steps: some are half finished at any moment"
    process, attempt = start_next(config, run_dir, "--train.num-steps", "50", "--topology.num-ranks", "3", "--topology.generation-fraction", "0.3")
    newest = stop(process, run_dir, attempt, signal.SIGUSR1)
    saved_later = half_finished(newest, words)
    num_steps = checkpoints.read_meta(newest)["step"] + 5
    job = jobs.run(
        config, run_dir, "--resume", "--topology.num-ranks", "5", "--topology.generation-fraction", "0.6", "--train.num-steps", str(num_steps), attempt=3
    )
    check_each_once(run_dir, config, num_steps)
    assert trained(run_dir)["age"].max() <= 2
    assert job.exit["groups"]["trained"] == num_steps * config.groups_per_batch
    answers = {
        (row["ticket"], row["sample"]): row["answer"]
        for attempt in (2, 3)
        for path in sorted((run_dir / f"attempt-{attempt}" / "samples").glob("training-*.jsonl"))
        for row in read_records(path)
    }
    for cut in (saved, saved_later):
        found = {key: answers[key] for key in cut if key in answers}
        assert found, "some of the half-finished answers were trained"
        assert all(found[key].startswith(cut[key]) for key in found), "saved tokens were sampled again"
    with_old_and_new = [row for row in trained(run_dir) if row["version_min"] < row["version_max"]]
    assert with_old_and_new


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size at `folder`."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def wait_for_event(log: Path, kind: str, process: subprocess.Popen[str], number: int = 1) -> None:
    stop_at = time.monotonic() + 60
    while time.monotonic() < stop_at:
        assert process.poll() is None, process.communicate()
        if log.exists() and (read_table(log, "events")["kind"] == kind.encode()).sum() >= number:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no event {kind} within 60 s: {read_table(log, 'events')}")


def test_full_disk_ends_no_training(chaos: Config, tmp_path: Path) -> None:
    """The disk of the checkpoints fills up: said once, the old one stays, training goes on; there is room again: so are checkpoints."""
    run_dir = tmp_path / "run"
    config = jobs.with_ranks(replace(chaos, checkpoint=Checkpoint(every=4, keep=1)), 3)
    with small_disk(run_dir / "checkpoints", 2) as disk:
        process = jobs.start(config, run_dir, "--train.num-steps", str(OPEN_END))
        log = run_dir / "attempt-1" / "log.h5"
        wait_for_event(log, "save", process)
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(b"x" * 4096)
        wait_for_event(log, "save_failed", process)
        steps = len(read_table(log, "steps"))
        assert checkpoints.newest_complete(run_dir)[0] is not None
        stop_at = time.monotonic() + 30
        while len(read_table(log, "steps")) < steps + 20:
            assert process.poll() is None and time.monotonic() < stop_at, "training stands still on a full disk"
            time.sleep(0.1)
        (disk / "filler").unlink()
        wait_for_event(log, "save_recovered", process)
        process.send_signal(signal.SIGTERM)
        job = jobs.finish(process, run_dir)
        assert job.status == 75, job.stderr
        kinds = read_table(log, "events")["kind"].tolist()
        assert kinds.count(b"save_failed") == 1 and job.stdout.count("warning: no checkpoint of step") == 1
        counts = job.exit["checkpoints"]
        assert counts.get("failed", 0) + counts.get("skipped_no_room", 0) >= 1 and counts["complete"] >= 2
        assert checkpoints.fault(checkpoints.newest_complete(run_dir)[0]) == ""


def test_a_slow_save_stops_nobody(chaos: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files take two seconds each to be written: tokens are generated and steps trained meanwhile.

    Under the user's own mpiexec, as under srun: ranks agree on attempt and checkpoint; `--resume` of a run that is not there begins it; a signal to mpiexec
    leaves a checkpoint from which the next attempt goes on.
    """
    run_dir = tmp_path / "run"
    described = tmp_path / "config.yaml"
    save_yaml(jobs.with_ranks(replace(chaos, checkpoint=Checkpoint(every=5), run_dir=str(run_dir)), 3), described)
    command = [*find_launcher().command(3), sys.executable, "-m", "areal_hpc", "run", "smoke", "--config", str(described), "--resume"]
    monkeypatch.setenv("AREAL_HPC_SLOW_SAVE_S", "2")
    process = subprocess.Popen([*command, "--train.num-steps", str(OPEN_END)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    jobs.STARTED.append(process)
    wait_for_event(run_dir / "attempt-1" / "log.h5", "save", process)
    process.send_signal(signal.SIGUSR1)
    job = jobs.finish(process, run_dir)
    assert job.exit["status"] == 75 and not (run_dir / "owner.json").exists(), job.stderr
    assert "holds no complete checkpoint: attempt 1 begins anew" in job.stdout
    steps = job.exit["steps"]
    assert checkpoints.newest_complete(run_dir)[0] == checkpoints.folder_of(run_dir, steps)
    events, rows, ranks = job.table("events"), job.table("steps"), job.table("ranks")
    ended = next(event for event in events if event["kind"] == b"save")
    stop_s = float(ended["time_s"])
    start_s = stop_s - float(ended["text"].decode().rsplit("; ", 1)[1].removesuffix(" s"))
    assert stop_s - start_s > 2
    assert ((rows["end_s"] > start_s + 0.1) & (rows["end_s"] < stop_s - 0.1)).sum() >= 3, "training stood still"
    for rank in np.unique(ranks["rank"][ranks["role"] == 0]):
        mine = ranks[(ranks["rank"] == rank) & (ranks["time_s"] > start_s) & (ranks["time_s"] < stop_s + 0.5)]
        assert len(mine) >= 2 and mine["tokens"][-1] > mine["tokens"][0], "generation stood still"
    monkeypatch.setenv("AREAL_HPC_SLOW_SAVE_S", "0")
    again = subprocess.run([*command, "--train.num-steps", str(steps + 2)], capture_output=True, text=True)
    assert again.returncode == 0 and f"attempt 2 goes on from step-{steps:06d}" in again.stdout, again.stderr
    check_each_once(run_dir, jobs.with_ranks(chaos, 3), steps + 2)
