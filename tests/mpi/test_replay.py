"""Asynchronous runs, disturbed at random, done again from their tapes at other timings: the same tokens and parameters, bit for bit; and any change is named."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest

from areal_hpc.config import Config, Log, Staleness
from areal_hpc.launch.local import find_launcher
from areal_hpc.train.script import recorded_batch
from areal_hpc.train.tape import batch_rows
from areal_hpc.transport.tape import Tape, read_tapes

pytestmark = pytest.mark.mpi


def replay(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`areal-hpc replay` as a user types it."""
    return subprocess.run([sys.executable, "-m", "areal_hpc", "replay", str(run_dir), *arguments], capture_output=True, text=True, timeout=jobs.TIMEOUT_S)


def processes_of(run_dir: Path) -> list[int]:
    """Ranks and their graders."""
    found = list(jobs.ranks_of(run_dir).values())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent in found or (parent != 1 and "areal_hpc.reward" in (process / "cmdline").read_text() and _grandparent(parent) in found):
                found.append(int(process.name))
        except (OSError, ValueError):
            continue
    return found


def _grandparent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@contextmanager
def disturbed(run_dir: Path, seed: int) -> Iterator[list[int]]:
    """Meanwhile stop all processes of the job (ranks and graders), in random turns and for random times, again and again. Yields those that were stopped."""
    stopped: list[int] = []
    over = threading.Event()

    def disturb() -> None:
        rng, victims = random.Random(seed), list[int]()
        while not over.wait(rng.uniform(0.005, 0.05)):
            if not victims:
                victims = processes_of(run_dir)
                rng.shuffle(victims)
            if victims:
                victim = victims.pop()
                stopped.append(victim)
                try:
                    os.kill(victim, signal.SIGSTOP)
                    over.wait(rng.uniform(0.02, 0.2))
                    os.kill(victim, signal.SIGCONT)
                except ProcessLookupError:
                    continue

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join()


def learning(base: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Rewards that a random model earns half of the time; long answers on few slots, so that training waits for generation, and new weights interrupt answers."""
    (folder / "parity_reward.py").write_text("def grade(problem, text):\n    return float(sum(map(ord, text)) % 2)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return replace(
        base,
        staleness=Staleness(max_staleness=4),
        reward=replace(base.reward, custom="parity_reward:grade"),
        generation=replace(base.generation, max_new_tokens=32, max_num_running=6),
        train=replace(base.train, num_steps=6, num_minibatches=2),
        evaluation=replace(base.evaluation, every=3),
        log=Log(record="tokens"),
    )


@pytest.fixture(scope="module")
def recorded(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[jobs.Job]:
    """A disturbed asynchronous run on 2 + 1 ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = jobs.with_ranks(learning(base, folder, monkeypatch), 3)
        yield disturbed_run(config, folder / "run", seed=1)


def disturbed_run(config: Config, run_dir: Path, seed: int) -> jobs.Job:
    process = jobs.start(config, run_dir)
    with disturbed(run_dir, seed) as stopped:
        job = jobs.finish(process, run_dir)
    assert job.status == 0, job.stderr
    assert len(set(stopped)) > config.topology.num_ranks, "ranks and graders were disturbed"
    steps, trajectories = job.table("steps"), job.table("trajectories")
    assert (steps["grad_norm"] > 0).all(), "without gradients equality would prove nothing"
    assert (trajectories["version_min"] < trajectories["version_max"]).any(), "some answers were interrupted"
    assert steps["staleness_max"].max() > 0
    return job


def copied(job: jobs.Job, folder: Path, world_rank: int, table: str, change: Callable[[np.ndarray], None]) -> Path:
    """The run with rows of one tape changed."""
    run_dir = folder / "changed"
    shutil.copytree(job.run_dir, run_dir, ignore=shutil.ignore_patterns("replay", "model"))
    with h5py.File(run_dir / "attempt-1" / f"tape-{world_rank:04d}.h5", "r+", locking=False) as file:
        rows = file[table][:]
        change(rows)
        file[table][:] = rows
    return run_dir


def differs(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """Status 1 and one line that names these."""
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("different: ")]
    assert all(name in line for name in named), line
    assert "Traceback" not in done.stderr and "equal" not in done.stdout


def test_training_again_gives_the_same_parameters(recorded: jobs.Job) -> None:
    done = replay(recorded.run_dir, "--level", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    num_tensors = 7 * len(read_tapes(recorded.attempt)[2].tensor_names)
    assert f"equal: 6 steps, 96 trajectories, {num_tensors} checksums of tensors" in done.stdout


def test_generating_again_gives_the_same_tokens(recorded: jobs.Job) -> None:
    """All answers, of evaluations too, and all parameters; the graders are asked again and say the same."""
    before = recorded.weights()
    done = replay(recorded.run_dir, "--level", "full", "--grade-again")
    assert done.returncode == 0, done.stdout + done.stderr
    finished = sum(int((tape.table("calls")["kind"] == 1).sum()) for tape in read_tapes(recorded.attempt)[:2])
    assert f"equal: 6 steps, {finished} of {finished} recorded answers, 96 trajectories" in done.stdout
    assert recorded.weights() == before and sorted(path.name for path in recorded.run_dir.iterdir()) == [
        "attempt-1",
        "checkpoints",
        "config.yaml",
        "model",
        "replay",
    ]
    jobs.check_no_lane_left()


def test_changed_checksum_is_named(recorded: jobs.Job, tmp_path: Path) -> None:
    """Level train: step, rank and tensor."""
    tape = read_tapes(recorded.attempt)[2]

    def change(rows: np.ndarray) -> None:
        rows["crc32c"][np.flatnonzero(rows["step"] == 4)[5]] ^= 1

    done = replay(copied(recorded, tmp_path, 2, "tensors", change), "--level", "train")
    differs(done, "step 4, rank 2 (training 0): tensor", tape.tensor_names[5])


@pytest.mark.slow
def test_changed_token_is_named(recorded: jobs.Job, tmp_path: Path) -> None:
    """A token of the payload differs from its hash: the trajectory is named. Its hash changed with it: the first tensor that another token gives other numbers."""
    tape = read_tapes(recorded.attempt)[2]
    rows = tape.table("batches")
    position = int(np.flatnonzero((rows["step"] == 3) & (rows["weight"] > 0) & (rows["advantage"] != 0))[0])
    token = int(rows["num_answer"][:position].sum())

    def change(tokens: np.ndarray) -> None:
        tokens["token"][token] = (tokens["token"][token] + 1) % 10

    run_dir = copied(recorded, tmp_path, 2, "answer_tokens", change)
    place = f"(ticket {rows['ticket'][position]}, sample {rows['sample'][position]})"
    differs(replay(run_dir, "--level", "train"), "step 3, rank 2 (training 0): trajectory", place, "digest is")
    changed = Tape(run_dir / "attempt-1", 2)
    with h5py.File(changed.path, "r+", locking=False) as file:
        found = file["batches"][:]
        found["digest"][rows["step"] == 3] = batch_rows(3, recorded_batch(changed, 3))["digest"]
        file["batches"][:] = found
    differs(replay(run_dir, "--level", "train"), "step 3, rank 2 (training 0): tensor model.")


@pytest.mark.slow
def test_changed_order_is_named(recorded: jobs.Job, tmp_path: Path) -> None:
    """Two trajectories change places. Level train takes the order from the tape, so parameters differ; level full composes the batch itself."""

    def change(rows: np.ndarray) -> None:
        first = np.flatnonzero(rows["step"] == 2)
        other = next(k for k in first if (rows["minibatch"][k], rows["microbatch"][k]) != (rows["minibatch"][first[0]], rows["microbatch"][first[0]]))
        for column in ("minibatch", "microbatch"):
            rows[column][[first[0], other]] = rows[column][[other, first[0]]]

    run_dir = copied(recorded, tmp_path, 2, "batches", change)
    differs(replay(run_dir, "--level", "train"), "step 2, rank 2 (training 0): tensor model.")
    differs(replay(run_dir, "--level", "full"), "step 2, rank 2 (training 0): trajectory 0 of the batch", "batch is")


@pytest.mark.slow
def test_changed_answer_and_verdict_are_named(recorded: jobs.Job, tmp_path: Path) -> None:
    """Level full: a bit of the hash of an answer; a swap one engine step later; an impossible order; a verdict that the graders do not give again."""

    def flip(rows: np.ndarray) -> None:
        rows["digest"][np.flatnonzero(rows["kind"] == 1)[50]] ^= np.uint64(1) << np.uint64(40)

    def later(rows: np.ndarray) -> None:
        swap = np.flatnonzero((rows["kind"] == 2) & (rows["number"] == 3))[0]
        rows["step"][swap:][rows["step"][swap:] == rows["step"][swap]] += 1

    def damage(rows: np.ndarray) -> None:
        rows["step"][40] = 1000

    def wrong(rows: np.ndarray) -> None:
        rows["status"][rows["status"] == 0] = 1

    call = read_tapes(recorded.attempt)[1].table("calls")
    call = call[call["kind"] == 1][50]
    done = replay(copied(recorded, tmp_path / "a", 1, "calls", flip), "--level", "full")
    what = f"evaluation answer {call['number'] - 2**60}" if call["number"] >= 2**60 else f"ticket {call['number'] // 4}, sample {call['number'] % 4}"
    differs(done, f"rank 1 (generation 1), engine step {call['step']}: finish {what} of {call['count']} tokens")
    differs(replay(copied(recorded, tmp_path / "b", 0, "calls", later), "--level", "full"), "rank 0 (generation 0), engine step", "recorded:")
    damaged = replay(copied(recorded, tmp_path / "d", 0, "calls", damage), "--level", "full")
    assert damaged.returncode == 2 and "tape-0000.h5: damaged, /calls is not in the order of engine steps" in damaged.stderr
    run_dir = copied(recorded, tmp_path / "c", 2, "batches", wrong)
    differs(replay(run_dir, "--level", "full", "--grade-again"), "step 1, rank 2 (training 0): trajectory", "status is 0, recorded 1")


@pytest.mark.slow
def test_another_timing_alone_gives_another_run(recorded: jobs.Job, base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the replays prove is not trivial: the same configuration, undisturbed, trains other parameters."""
    config = jobs.with_ranks(learning(base, tmp_path, monkeypatch), 3)
    assert jobs.run(config, tmp_path / "run").weights() != recorded.weights()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "objective"), [("count", "decoupled"), ("dropless", "decoupled"), ("drop", "dapo"), ("mask", "decoupled")])
def test_two_training_ranks(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, objective: str) -> None:
    """2 + 2 ranks, disturbed, in every mode, with groups that are filtered out; both levels, and the first steps alone."""
    config = jobs.with_ranks(learning(base, tmp_path, monkeypatch), 4, 0.5)
    eta = 4 if mode == "count" else 1
    config = replace(config, staleness=Staleness(max_staleness=eta, mode=mode), train=replace(config.train, objective=objective, num_steps=8))
    job = disturbed_run(config, tmp_path / "run", seed=2)
    for level in ("train", "full"):
        done = replay(job.run_dir, "--level", level)
        assert done.returncode == 0 and "equal: 8 steps" in done.stdout, done.stdout + done.stderr
    done = replay(job.run_dir, "--level", "full", "--steps", "3")
    assert done.returncode == 0 and "equal: 3 steps" in done.stdout, done.stdout + done.stderr
    changed = read_tapes(job.attempt)[3].tensor_names[0]

    def change(rows: np.ndarray) -> None:
        rows["crc32c"][np.flatnonzero(rows["step"] == 2)[0]] += 1

    differs(replay(copied(job, tmp_path, 3, "tensors", change), "--level", "full"), "step 2, rank 3 (training 1): tensor", changed)


@pytest.mark.slow
@pytest.mark.parametrize(("push", "staging"), [("all-roots", "on"), ("single-root", "off")])
def test_weights_over_the_network(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: str, staging: str) -> None:
    """2 + 2 ranks: swaps are recorded whichever way the weights take, also where they are written over those in use; and another way gives the same bits."""
    config = jobs.with_ranks(learning(base, tmp_path, monkeypatch), 4, 0.5)
    transport = replace(config.transport, push=push, push_path="network", staging=staging)
    config = replace(config, transport=transport, staleness=Staleness(max_staleness=2), train=replace(config.train, num_steps=8))
    job = disturbed_run(config, tmp_path / "run", seed=3)
    stored = job.attempt / "config.yaml"
    for path in ("network", "auto"):
        stored.write_text(stored.read_text().replace("push_path: network", f"push_path: {path}"))
        done = replay(job.run_dir, "--level", "full")
        assert done.returncode == 0 and "equal: 8 steps" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_replay_of_a_run_that_was_killed_or_stopped(base: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tapes of a killed run end at different moments: the steps that all of them hold are replayed. One that was stopped by a signal is whole."""
    config = learning(base, tmp_path, monkeypatch)
    config = jobs.with_ranks(replace(config, train=replace(config.train, num_steps=100_000), log=Log(record="order")), 3)
    for name, kill in (("killed", True), ("stopped", False)):
        process = jobs.start(config, tmp_path / name)
        jobs.wait_for_step(tmp_path / name, process)
        threading.Event().wait(2.5)  # more than one flush of the tapes
        if kill:
            os.kill(jobs.ranks_of(tmp_path / name)[2], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        assert jobs.finish(process, tmp_path / name).status == (1 if kill else 75)
        done = replay(tmp_path / name, "--level", "full")
        assert done.returncode == 0 and "equal: " in done.stdout, done.stdout + done.stderr
    refused = replay(tmp_path / "killed", "--level", "train")
    assert refused.returncode == 2 and "needs a run with --log.record tokens, this one had order; use --level full" in refused.stderr


def test_mistakes_are_one_line(recorded: jobs.Job, tmp_path: Path) -> None:
    """Found before a rank starts: status 2, and nothing is written."""
    (tmp_path / "untaped" / "attempt-1").mkdir(parents=True)
    before = sorted((recorded.run_dir / "replay").glob("*")) if (recorded.run_dir / "replay").exists() else []
    for arguments, said in (
        (["no/such/run"], "not the folder of a run"),
        ([str(tmp_path / "untaped")], "has no tape; record one with --log.record"),
        ([str(recorded.run_dir), "--attempt", "7"], "attempt-7: no such attempt"),
        ([str(recorded.run_dir), "--level", "half"], "--level=half: use train or full"),
        ([str(recorded.run_dir), "--steps", "7"], "--steps=7: the tapes of"),
        ([str(recorded.run_dir), "--stops", "7"], "unknown option '--stops' of replay"),
    ):
        done = subprocess.run([sys.executable, "-m", "areal_hpc", "replay", *arguments], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert done.stderr.startswith("error: ") and said in done.stderr
    assert before == (sorted((recorded.run_dir / "replay").glob("*")) if (recorded.run_dir / "replay").exists() else [])


@pytest.mark.slow
def test_another_machine_is_refused(recorded: jobs.Job, tmp_path: Path) -> None:
    """Another processor than recorded: one line; --force replays nevertheless, under the user's own mpiexec as well."""
    run_dir = copied(recorded, tmp_path, 0, "calls", lambda rows: None)
    with h5py.File(run_dir / "attempt-1" / "tape-0000.h5", "r+", locking=False) as file:
        file.attrs["cpu_model"] = "Pentium"
    refused = replay(run_dir, "--level", "train")
    assert refused.returncode == 2 and "recorded Pentium: bits may differ for that alone; --force" in refused.stderr
    command = [*find_launcher().command(1), sys.executable, "-m", "areal_hpc", "replay", str(run_dir), "--level", "train"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    done = subprocess.run([*command, "--force"], capture_output=True, text=True)
    assert done.returncode == 0 and "equal: 6 steps" in done.stdout, done.stderr
    (out,) = (run_dir / "replay").iterdir()
    assert json.loads((out / "exit.json").read_text())["compared_trajectories"] == 96
    too_many = subprocess.run([*find_launcher().command(2), *command[len(find_launcher().command(1)) :], "--force"], capture_output=True, text=True)
    assert too_many.returncode == 2 and "2 ranks were started; level train of this run needs 1" in too_many.stderr
