"""Which checkpoint a resumed run takes, what it refuses, and who may work in a run directory: files and processes, no ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from areal_hpc import checkpoints
from areal_hpc.checkpoints import SavedFile, finish, folder_of, partial_of
from areal_hpc.cli import configure
from areal_hpc.config import Checkpoint, Config, ConfigError, Train
from areal_hpc.config_io import save_yaml
from areal_hpc.launch import ownership
from areal_hpc.launch.local import begin_attempt, discard_run_dir, is_done
from areal_hpc.launch.ownership import OWNER_FILE, Ownership, process_start
from areal_hpc.launch.resume import Attempt, attempts_of


def make_checkpoint(run_dir: Path, step: int, **meta: object) -> Path:
    folder = folder_of(run_dir, step)
    partial = partial_of(folder)
    (partial / "state").mkdir(parents=True)
    names = ["state/__0_0.distcp", "state/.metadata", "rank-training-0.safetensors"]
    for name in names:
        (partial / name).write_bytes(os.urandom(1000) + step.to_bytes(4, "little"))
    finish(folder, [SavedFile.of(partial, name) for name in names], {"step": step, "fingerprint": "f", **meta})
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 4."""
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def test_newest_undamaged_checkpoint_is_taken_and_the_others_are_named(run_dir: Path) -> None:
    assert checkpoints.newest_complete(run_dir) == (folder_of(run_dir, 4), [])
    partial_of(folder_of(run_dir, 5)).mkdir()
    shard = folder_of(run_dir, 4) / "state" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    (folder_of(run_dir, 3) / "manifest.json").unlink()
    damaged = folder_of(run_dir, 2) / "rank-training-0.safetensors"
    content = bytearray(damaged.read_bytes())
    content[500] ^= 1
    damaged.write_bytes(content)
    assert checkpoints.newest_complete(run_dir) == (
        folder_of(run_dir, 1),
        [
            "step-000005.tmp was never finished",
            "step-000004: state/__0_0.distcp has 1003 bytes, not 1004",
            "step-000003: no manifest.json",
            "step-000002: rank-training-0.safetensors has another checksum than when it was written",
        ],
    )
    (folder_of(run_dir, 1) / "state" / ".metadata").unlink()
    newest, skipped = checkpoints.newest_complete(run_dir)
    assert newest is None and skipped[-1] == "step-000001: state/.metadata is missing"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {"x": 3}}', '{"files": []}', "{}"])
def test_a_manifest_that_cannot_be_read_is_no_manifest(run_dir: Path, content: str) -> None:
    (folder_of(run_dir, 4) / "manifest.json").write_text(content)
    assert checkpoints.newest_complete(run_dir) == (folder_of(run_dir, 3), ["step-000004: manifest.json cannot be read"])


def test_every_file_of_a_checkpoint_counts(run_dir: Path) -> None:
    """Each byte of each file, meta.json included, is under a checksum: a flip anywhere is found."""
    folder = folder_of(run_dir, 4)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == 4
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:10] + bytes([content[10] ^ 0x80]) + content[11:])
        assert path.name in checkpoints.fault(folder)
        path.write_bytes(content)
    assert checkpoints.fault(folder) == ""


def test_a_file_of_another_size_than_its_writer_told_completes_nothing(tmp_path: Path) -> None:
    """A file system that shows training rank 0 less than another node wrote."""
    folder = folder_of(tmp_path, 1)
    partial_of(folder).mkdir(parents=True)
    (partial_of(folder) / "a").write_bytes(b"abc")
    with pytest.raises(OSError, match="a has 3 bytes here, 4 where it was written"):
        finish(folder, [SavedFile("a", 4, 0)], {})
    assert not folder.exists()


def test_retention(run_dir: Path) -> None:
    for step in range(5, 13):
        make_checkpoint(run_dir, step)
    (folder_of(run_dir, 2) / "manifest.json").unlink()  # damaged: left for people to look at
    assert checkpoints.remove_superseded(run_dir, keep=2, keep_every=5, newest=12) == [1, 3, 4, 6, 7, 8, 9]
    assert list(checkpoints.steps_of(run_dir)) == [2, 5, 10, 11, 12]
    make_checkpoint(run_dir, 6)  # the run went on from step 5, since the later ones are damaged, and has written this
    assert checkpoints.remove_superseded(run_dir, keep=1, keep_every=0, newest=6) == [5]
    assert list(checkpoints.steps_of(run_dir)) == [2, 6, 10, 11, 12], "later ones are in nobody's way"
    assert checkpoints.superseded([1, 2, 3], keep=1, keep_every=0) == [1, 2]


def config_of(run_dir: Path, **changes: object) -> Config:
    return replace(Config(recipe="smoke", run_dir=str(run_dir), train=Train(num_steps=10, batch_size=16, group_size=4)), **changes)


def test_attempts_follow_each_other(tmp_path: Path) -> None:
    """Anew where there is nothing; from the newest complete checkpoint else; a mistake that a rank finds takes back the attempt and leaves the run as it was."""
    run_dir = tmp_path / "run"
    config = config_of(run_dir)
    first = begin_attempt(config, resume=True, fingerprint="f")
    assert (first.number, first.checkpoint) == (1, None) and "attempt 1 begins anew" in first.notes[-1]
    assert (run_dir / "config.yaml").read_text() == (first.folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="--resume"):
        begin_attempt(config, resume=False, fingerprint="f")
    make_checkpoint(run_dir, 4)
    make_checkpoint(run_dir, 6)
    (folder_of(run_dir, 6) / "manifest.json").unlink()
    second = begin_attempt(replace(config, checkpoint=Checkpoint(every=7)), resume=True, fingerprint="f")
    assert (second.number, second.checkpoint) == (2, folder_of(run_dir, 4))
    assert second.notes == ["passed over: step-000006: no manifest.json", "attempt 2 goes on from step-000004"]
    assert "every: 7" in (run_dir / "config.yaml").read_text()
    discard_run_dir(second.folder)
    assert list(attempts_of(run_dir)) == [1] and "every: 50" in (run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="fingerprint"):
        begin_attempt(config, resume=True, fingerprint="g")
    with pytest.raises(ConfigError, match=r"train.num_steps=3: step-000004 has more steps already; use 4 or more"):
        begin_attempt(replace(config, train=replace(config.train, num_steps=3)), resume=True, fingerprint="f")
    assert list(attempts_of(run_dir)) == [1]


def test_ranks_hear_of_the_attempt_through_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attempt.from_environment() is None
    for attempt in (Attempt(tmp_path / "attempt-3", folder_of(tmp_path, 4)), Attempt(tmp_path / "attempt-1")):
        for name, value in attempt.environment().items():
            monkeypatch.setenv(name, value)
        assert Attempt.from_environment() == attempt


def test_a_run_that_is_done_stays_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    assert not is_done(config, resume=True)
    for attempt, report in ((1, {"status": 75, "steps": 10}), (2, {"status": 0, "steps": 10}), (3, {"status": 3, "steps": 10})):
        (tmp_path / f"attempt-{attempt}").mkdir()
        (tmp_path / f"attempt-{attempt}" / "exit.json").write_text(json.dumps(report))
        assert is_done(config, resume=True) == (attempt >= 2)  # 3: rows of the log are missing, steps are not
    assert "has 10 steps already" in capsys.readouterr().out
    assert not is_done(config, resume=False)
    assert not is_done(replace(config, train=replace(config.train, num_steps=11)), resume=True)
    (tmp_path / "attempt-4").mkdir()  # died
    assert not is_done(config, resume=True)


def test_what_may_change_on_resume_and_what_may_not(tmp_path: Path) -> None:
    """The run's own configuration is the base; allowed options change it; the others are refused in one line that names them."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_yaml(config_of(run_dir), run_dir / "config.yaml")
    given = ["smoke", "--run-dir", str(run_dir), "--resume"]
    allowed = ["--train.num-steps", "99", "--train.lr", "3e-4", "--topology.num-ranks", "5", "--checkpoint.keep", "7", "--generation.max-num-running", "4"]
    config, flags = configure([*given, *allowed], "run")
    assert flags == ["--resume"]
    assert (config.train.num_steps, config.train.batch_size, config.topology.num_ranks, config.checkpoint.keep) == (99, 16, 5, 7)
    for name, value in {
        "seed": "1",
        "init_from": "elsewhere",
        "model.hidden_size": "8",
        "data.size": "9",
        "generation.max_new_tokens": "5",
        "generation.temperature": "0.5",
        "staleness.mode": "drop",
        "staleness.max_staleness": "0",
        "train.batch_size": "32",
        "train.group_size": "8",
        "reward.right": "1",
    }.items():
        with pytest.raises(ConfigError, match=rf"^{name}={value}.* may not change on --resume: the run has ") as refused:
            configure([*given, f"--{name.replace('_', '-')}", value], "run")
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="is a run of recipe smoke, not laptop"):
        configure(["laptop", *given[1:]], "run")
    with pytest.raises(ConfigError, match="--resume needs the folder of the run"):
        configure(["smoke", "--resume"], "run")
    new, _ = configure(["smoke", "--run-dir", str(tmp_path / "none"), "--resume", "--seed", "7"], "run")
    assert new.seed == 7


def test_a_lost_or_broken_configuration_is_not_made_up_on_resume(tmp_path: Path) -> None:
    """RUN/config.yaml is gone: the copy of the newest attempt; all are gone, or it cannot be read: one line that names the file."""
    given = ["smoke", "--run-dir", str(tmp_path), "--resume"]
    for attempt in (1, 2):
        (tmp_path / f"attempt-{attempt}").mkdir()
    save_yaml(replace(config_of(tmp_path), seed=5), tmp_path / "attempt-1" / "config.yaml")
    assert configure(given, "run")[0].seed == 5
    (tmp_path / "attempt-1" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"has attempts and no config.yaml"):
        configure(given, "run")
    (tmp_path / "config.yaml").write_text("train: [")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config.yaml: "):
        configure(given, "run")


# -- one job per run directory -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_process(run_dir: Path):
    """A process that owns the run directory until the block ends."""
    code = "import sys; from pathlib import Path; from areal_hpc.launch.ownership import Ownership;"
    code += f"Ownership.take(Path({str(run_dir)!r})); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with other_process(tmp_path) as process, pytest.raises(ConfigError, match=rf"is in use by process {process.pid} on host {socket.gethostname()} since "):
        Ownership.take(tmp_path)
    mine = Ownership.take(tmp_path)  # killed: its lock went with it
    assert f"process {process.pid}" in mine.took_over
    with pytest.raises(ConfigError, match="in use"):
        Ownership.take(tmp_path)
    mine.release()
    Ownership.take(tmp_path).release()
    assert not any(tmp_path.iterdir()) and tmp_path.exists()
    made = Ownership.take(tmp_path / "new")
    made.release()
    assert not (tmp_path / "new").exists()


def test_ranks_that_outlive_their_launcher_hold_the_directory(tmp_path: Path) -> None:
    """The lock is inherited: a launcher that was killed leaves nothing open to a second job while a rank of its own still runs."""
    code = (
        "import subprocess, sys; from pathlib import Path; from areal_hpc.launch.ownership import Ownership;"
        f"o = Ownership.take(Path({str(tmp_path)!r}));"
        "p = subprocess.Popen(['sleep', '60'], pass_fds=(o.descriptor,), stdout=subprocess.DEVNULL); print(p.pid, flush=True); sys.stdin.read()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    try:
        with pytest.raises(ConfigError, match=rf"process {launcher.pid} .*\(that process is gone, but ranks that it started still run\)"):
            Ownership.take(tmp_path)
    finally:
        os.kill(rank, 9)
    stop_at = time.monotonic() + 10
    while process_start(rank) is not None and time.monotonic() < stop_at:
        time.sleep(0.01)
    Ownership.take(tmp_path).release()


def left_by(run_dir: Path, **owner: object) -> None:
    """What a job that is not ours left in the run directory, without a lock."""
    record = {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_start(os.getpid()), "since": "then", "job_id": "", "restart": 0}
    (run_dir / OWNER_FILE).write_text(json.dumps(record | owner))


def test_stale_locks_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead process, a reused process id, half a record, an earlier life of the same Slurm job."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_by(tmp_path, pid=dead.pid)
    Ownership.take(tmp_path).release()
    left_by(tmp_path, pid=os.getppid(), pid_started=1)
    mine = Ownership.take(tmp_path)
    assert f"process {os.getppid()}" in mine.took_over
    mine.release()
    (tmp_path / OWNER_FILE).write_text('{"host": "n')
    Ownership.take(tmp_path).release()
    left_by(tmp_path, host="elsewhere", job_id="77", restart=0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    mine = Ownership.take(tmp_path)
    assert "Slurm job 77" in mine.took_over
    mine.release()


def test_the_lock_of_an_earlier_life_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server may hold the lock of a host that has lost its power for a minute or two: the requeued job must not end for that as a user's mistake."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with other_process(tmp_path) as process:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        monkeypatch.setattr(ownership, "LEASE_S", 0.5)
        with pytest.raises(ConfigError, match=f"in use by process {process.pid}.*Slurm job 77"):
            Ownership.take(tmp_path)
        monkeypatch.setattr(ownership, "LEASE_S", 30.0)
        timer = threading.Timer(0.5, process.kill)
        timer.start()
        mine = Ownership.take(tmp_path)
        timer.join()
    assert f"process {process.pid}" in mine.took_over
    mine.release()


def test_a_living_process_without_flock_is_respected(tmp_path: Path) -> None:
    left_by(tmp_path, pid=os.getppid(), pid_started=process_start(os.getppid()))
    with pytest.raises(ConfigError, match=f"in use by process {os.getppid()}"):
        Ownership.take(tmp_path)


def test_another_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file moves: refused. It stands still for STALE_S, or is long past: taken over; never an endless wait."""
    monkeypatch.setattr(ownership, "STALE_S", 1.0)
    left_by(tmp_path, host="elsewhere")
    touch = subprocess.Popen(["sh", "-c", f"for k in 1 2 3 4 5 6 7 8 9; do sleep 0.1; touch {tmp_path / OWNER_FILE}; done"])
    with pytest.raises(ConfigError, match="on host elsewhere"):
        Ownership.take(tmp_path)
    touch.wait()
    began_at = time.monotonic()
    Ownership.take(tmp_path).release()
    assert 1.0 <= time.monotonic() - began_at < 5.0
    left_by(tmp_path, host="elsewhere")
    os.utime(tmp_path / OWNER_FILE, (0, 0))
    began_at = time.monotonic()
    Ownership.take(tmp_path).release()
    assert time.monotonic() - began_at < 1.0


def test_the_owner_renews_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_S", 0.05)
    mine = Ownership.take(tmp_path)
    os.utime(tmp_path / OWNER_FILE, (0, 0))
    mine.keep_alive()
    stop_at = time.monotonic() + 5
    while (tmp_path / OWNER_FILE).stat().st_mtime < time.time() - 60:
        assert time.monotonic() < stop_at
        time.sleep(0.02)
    mine.release()
