"""The watchdog on real ranks (watch_worker.py: MPI, launcher and watchdog of a run, without the training): every kind of death is named; nothing harmless is."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_hpc.config import Config, ConfigError, Watchdog, check
from areal_hpc.launch.deaths import Deaths, report
from areal_hpc.observe import status
from areal_hpc.observe.links import Hub, Spoke
from areal_hpc.observe.status import StatusFile, StatusView, read_statuses, this_process
from areal_hpc.observe.watchdog import START_GRACE_S, phase_deadline_s

WORKER = Path(__file__).with_name("watch_worker.py")
NUM_RANKS = 3


@dataclass
class Job:
    """Three ranks under the watchdog: 0 and 1 generate, 2 trains."""

    attempt_dir: Path
    process: subprocess.Popen[str]

    def wait_ready(self) -> None:
        stop_at = time.monotonic() + 60
        while not all((self.attempt_dir / f"ready-{rank}").exists() for rank in range(NUM_RANKS)):
            assert self.process.poll() is None and time.monotonic() < stop_at, self.process.communicate()
            time.sleep(0.01)
        time.sleep(0.7)  # for one beat: what a rank is at is in its file now

    def order(self, rank: int, kind: str) -> None:
        """Let a rank do one of watch_worker's faults."""
        unfinished = self.attempt_dir / "order"
        unfinished.write_text(kind)
        unfinished.rename(self.attempt_dir / f"fault-{rank}")

    def pid(self, rank: int) -> int:
        return next(found.pid for found in read_statuses(self.attempt_dir) if found.world_rank == rank)

    def finish(self) -> tuple[int, str]:
        """Status, and what was said. Nothing of it may live on."""
        pids = [found.pid for found in read_statuses(self.attempt_dir)]
        _, said = self.process.communicate(timeout=60)
        stop_at = time.monotonic() + 5
        while left := [pid for pid in pids if status.start_ticks(pid)]:
            assert time.monotonic() < stop_at, f"ranks outlived their job: {left}"
            time.sleep(0.01)
        return self.process.returncode, said

    def failure(self) -> dict:
        return json.loads((self.attempt_dir / "failure.json").read_text())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    attempt_dir = tmp_path / "attempt-1"
    attempt_dir.mkdir()
    command = [sys.executable, str(WORKER), str(attempt_dir), str(NUM_RANKS)]
    started = Job(attempt_dir, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.communicate()


@pytest.mark.mpi
def test_a_good_end_leaves_no_trace_and_no_alarm(job: Job) -> None:
    """Slow turns below the deadline, a suspension of the whole job (every rank stopped for longer than silence_s) and the end raise no alarm."""
    job.wait_ready()
    job.order(1, "slow")
    pids = [job.pid(rank) for rank in range(NUM_RANKS)]
    time.sleep(3.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(3 if number == signal.SIGSTOP else 0.5)
    (job.attempt_dir / "stop").touch()
    found, said = job.finish()
    assert (found, said) == (0, "")
    assert {path.name for path in job.attempt_dir.iterdir()} == {"exit.json", "stop", *(f"ready-{rank}" for rank in range(NUM_RANKS))}


@pytest.mark.mpi
@pytest.mark.parametrize("seed", range(5))
def test_killed_rank_is_named(job: Job, seed: int) -> None:
    """kill -9 of any rank at any moment, the start included: ended in seconds, and failure.json has its name and what it was at."""
    check_kill(job, seed)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 20))
def test_killed_rank_is_named_again(job: Job, seed: int) -> None:
    check_kill(job, seed)


def check_kill(job: Job, seed: int) -> None:
    chance = random.Random(seed)
    victim = seed % NUM_RANKS
    if seed % 2:
        stop_at = time.monotonic() + 60
        while victim not in [found.world_rank for found in read_statuses(job.attempt_dir)]:
            assert time.monotonic() < stop_at
            time.sleep(0.001)
    else:
        job.wait_ready()
    time.sleep(chance.uniform(0, 0.6))
    os.kill(job.pid(victim), signal.SIGKILL)
    killed_at = time.monotonic()
    found, said = job.finish()
    assert time.monotonic() - killed_at < 10
    failure = job.failure()
    assert found == 1 and failure["rank"] == victim, (failure, said)
    assert failure["name"].startswith(f"rank {victim} ") and f"on host {socket.gethostname()}" in failure["name"], failure["name"]
    assert "in phase " in failure["error"] and failure["phase"] in ("mpi", "start", "decode", "wait_data"), failure["error"]
    assert f"failed: {failure['name']}: {failure['error']}" in said
    assert not (job.attempt_dir / "exit.json").exists()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rank", "kind", "error"),
    [
        (1, "interpreter", "silent for"),
        (2, "stuck", "stuck in phase evaluate for"),
        (0, "thread", "ZeroDivisionError: division by zero"),
        pytest.param(2, "raise", "RuntimeError: as told", marks=pytest.mark.slow),
        pytest.param(0, "exit", "died", marks=pytest.mark.slow),
        pytest.param(1, "segfault", "died", marks=pytest.mark.slow),
        pytest.param(0, "interpreter", "silent for", marks=pytest.mark.slow),
        pytest.param(1, "stuck", "stuck in phase evaluate for", marks=pytest.mark.slow),
    ],
)
def test_fault_is_named(job: Job, rank: int, kind: str, error: str) -> None:
    """A rank that keeps its interpreter, one that hangs, one whose thread raises: named, with the state of all ranks, and with stacks where there was time for them."""
    job.wait_ready()
    job.order(rank, kind)
    found, said = job.finish()
    failure = job.failure()
    assert found == 1 and failure["rank"] == rank and error in failure["error"], (failure, said)
    assert failure["name"] in said
    assert [row["rank"] for row in failure["ranks"]] == [0, 1, 2]
    others = [row for row in failure["ranks"] if row["rank"] != rank]
    assert all(row["waits_for"] == "orders" and row["phase"] in ("decode", "wait_data") for row in others), others
    stacks = [(job.attempt_dir / f"stacks-rank-{r:05d}.txt").read_text() for r in range(NUM_RANKS)]
    if kind == "interpreter":
        assert "in fail" in stacks[rank], "also the stack of the one that could not run"
        assert all("in be_rank" in stack for stack in stacks)
    if kind == "stuck":
        assert "waiting for a thing that never comes" in failure["error"] and "first time there" not in failure["error"]
        assert all("in be_rank" in stack for stack in stacks) and "in fail" in stacks[rank]


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_stopped_rank_is_named_and_does_not_survive(job: Job, rank: int) -> None:
    """SIGSTOP of the only training rank: it can do nothing itself, the generation ranks end the job."""
    job.wait_ready()
    os.kill(job.pid(rank), signal.SIGSTOP)
    found, said = job.finish()
    failure = job.failure()
    assert found == 1 and failure["rank"] == rank, (failure, said)
    assert "its process is stopped" in failure["error"] and failure["found_by"] != failure["name"]
    row = next(row for row in failure["ranks"] if row["rank"] == rank)
    assert row["silent_s"] > 2


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["second", pytest.param("deadline", marks=pytest.mark.slow)])
def test_signals_that_nobody_acts_on_end_the_job(job: Job, way: str) -> None:
    """A main loop that never looks at the flag: the same signal again, or stop_deadline_s after the first, ends the job hard. Two at once, or of two kinds, are one."""
    job.wait_ready()
    pid = job.pid(1)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.1)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1.2)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.7)
    assert job.process.poll() is None
    if way == "second":
        os.kill(pid, signal.SIGUSR1)
    found, said = job.finish()
    expected = "ended by a second signal (SIGUSR1 after SIGUSR1)" if way == "second" else "the run had not ended 4 s after SIGUSR1"
    assert found == 1 and expected in job.failure()["error"], said
    assert job.failure()["rank"] == 1


START = """
import sys
from pathlib import Path
from areal_hpc import guard
from areal_hpc.launch.local import world_rank_hint
from areal_hpc.observe.watchdog import announce
import time
if world_rank_hint() == 1:
    time.sleep(60)
place = announce(Path(sys.argv[1]), 0)
with guard.deadline_of_mpi_start(Path(sys.argv[1]), place.name, 1.5):
    from mpi4py import MPI
"""


@pytest.mark.mpi
def test_mpi_that_does_not_start_is_given_up(tmp_path: Path) -> None:
    """Rank 1 never joins: rank 0, inside MPI_Init and deaf to Python, is ended from outside, with its host, and its stack."""
    from areal_hpc.launch.local import find_launcher

    began_at = time.monotonic()
    done = subprocess.run([*find_launcher().command(2), sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and time.monotonic() - began_at < 15
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["name"] == f"rank 0 on host {socket.gethostname()}" and "MPI did not start within 1.5 s" in failure["error"]
    assert failure["name"] in done.stderr
    assert 'File "<string>", line 12 in <module>' in (tmp_path / "stacks-rank-00000.txt").read_text()


# --- parts


def test_deadlines_adapt_to_what_was_measured() -> None:
    config = Config(watchdog=Watchdog(silence_s=3, phase_floor_s=10, phase_factor=5))
    first = config.transport.start_deadline_s + START_GRACE_S
    assert phase_deadline_s("train", None, config) == first, "the first time may compile"
    assert phase_deadline_s("start", 1.0, config) == first
    assert phase_deadline_s("train", 0.5, config) == 10
    assert phase_deadline_s("train", 30.0, config) == 150
    assert phase_deadline_s("stop", 1.0, config) == float("inf")


@pytest.mark.parametrize(
    ("change", "message"), [({"silence_s": 1.0}, "2 or more"), ({"silence_s": 200.0}, "below watchdog.phase_floor_s"), ({"phase_factor": 0.5}, "1 or more")]
)
def test_senseless_deadlines_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(watchdog=Watchdog(**change)))


def test_status_file_says_what_was_written_and_goes_at_the_end(tmp_path: Path) -> None:
    first = this_process(7, "rank 7 (training 1) on host ß")
    file = StatusFile(tmp_path, first)
    view = StatusView(file.path)
    assert view.read() == first
    now = dataclasses.replace(first, phase="push_wait", waits_for="ü" * 400, num_beats=3, phase_since=first.written_at - 2)
    file.write(now)
    seen = view.read()
    assert seen is not None and seen.waits_for == "ü" * 256 and dataclasses.replace(seen, waits_for=now.waits_for) == now, "cut at 512 bytes, the rest exact"
    assert read_statuses(tmp_path) == [seen]
    assert seen.row(first.written_at + 5) == {
        "rank": 7,
        "name": "rank 7 (training 1) on host ß",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "phase": "push_wait",
        "phase_s": 2.0,
        "waits_for": "ü" * 256,
        "reports": 0,
        "silent_s": 5.0,
        "left": False,
    }
    (tmp_path / "ranks" / "rank-00008.status").write_bytes(b"half a file")
    assert len(read_statuses(tmp_path)) == 1
    (tmp_path / "ranks" / "rank-00008.status").unlink()
    file.leave()
    left = view.read()
    assert left is not None and left.left, "those who still look see why it went"
    assert not (tmp_path / "ranks").exists()


def test_a_reused_process_number_is_not_taken_for_the_process() -> None:
    child = subprocess.Popen(["sleep", "60"])
    ticks = status.start_ticks(child.pid)
    descriptor = status.open_process(child.pid, ticks)
    assert descriptor is not None and status.open_process(child.pid, ticks + 1) is None
    os.kill(child.pid, signal.SIGSTOP)
    stop_at = time.monotonic() + 10
    while not status.is_stopped(child.pid):
        assert time.monotonic() < stop_at
    child.kill()
    while not (how := status.how_it_ended(child.pid)):  # a zombie until it is waited for
        assert time.monotonic() < stop_at
    assert how.startswith("killed by SIGKILL")
    child.wait()
    os.close(descriptor)
    assert status.open_process(child.pid, ticks) is None and status.how_it_ended(child.pid) == ""


RANK = """
import sys
from pathlib import Path
from areal_hpc.observe import status
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
status.hold_lifeline(rank)
status.StatusFile(folder, status.this_process(rank))
print("here", flush=True)
input()
status._lifeline.pop().close()
print("closed", flush=True)
input()
"""


def test_the_launcher_knows_who_died_first(tmp_path: Path) -> None:
    """Also when it comes to look only after all are dead, and when the first one's process, its connections closed by the kernel already, ends last."""
    deaths = Deaths(tmp_path)
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=os.environ | deaths.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    launcher = subprocess.Popen(["sleep", "60"])
    descriptor = os.pidfd_open(launcher.pid)

    def say(rank: int, order: str, answer: str) -> None:
        stdin, stdout = ranks[rank].stdin, ranks[rank].stdout
        assert stdin is not None and stdout is not None
        stdin.write(order)
        stdin.flush()
        assert stdout.readline() == answer

    try:
        for rank in range(4):
            say(rank, "", "here\n")
        while deaths.num_known < 4:
            assert not deaths.wait(descriptor)
        say(2, "\n", "closed\n")
        for rank in (3, 0, 2, 1):
            ranks[rank].kill()
            ranks[rank].wait()
        launcher.kill()
        while not deaths.wait(descriptor):
            pass
        assert [line.world_rank for line in deaths.ended] == [2, 3, 0, 1]
        found = report(deaths)
        assert found is not None and found["rank"] == 2 and [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]
    finally:
        deaths.close()
        os.close(descriptor)
        for process in (*ranks, launcher):
            process.kill()
            process.communicate()


def test_links_tell_beats_failures_ends_and_deaths() -> None:
    """Hub and spokes over real sockets: a broken connection is a death unless the other end had said that it leaves; a stranger is hung up on."""
    hub = Hub("127.0.0.1", [3, 4])
    spokes = {rank: Spoke("127.0.0.1", hub.port, hub.token, rank, 5.0) for rank in (3, 4)}
    stranger = socket.create_connection(("127.0.0.1", hub.port))
    stranger.sendall(b'{"token": "guess", "rank": 3}\n{"end": {}}\n')
    stranger.setblocking(False)
    hung_up, stop_at = False, time.monotonic() + 10
    while not hung_up:
        assert not hub.receive().ends and time.monotonic() < stop_at
        with suppress(BlockingIOError):
            hung_up = stranger.recv(1) == b""
    stranger.close()

    def heard(links: Hub | Spoke, want: str):
        stop_at = time.monotonic() + 10
        while not (found := getattr(links.receive(), want)):
            assert time.monotonic() < stop_at, want
            time.sleep(0.01)
        return found

    spokes[3].beat({"phase": "decode"})
    assert heard(hub, "beats") == {3: {"phase": "decode"}}
    hub.receive()
    hub.beat({"phase": "train"})
    assert heard(spokes[3], "beats") == {0: {"phase": "train"}}
    spokes[3].tell_end({"name": "rank 3"})
    assert heard(hub, "ends") == [{"name": "rank 3"}]
    for _ in range(100_000):  # a hub that does not read blocks nobody, and does not fill memory
        spokes[4].beat({"phase": "x" * 200})
    assert len(spokes[4]._connections[0]._outgoing) < 1000
    heard(hub, "beats")
    spokes[4].leave()
    stop_at = time.monotonic() + 10
    while len(hub._connections) > 1:
        assert not hub.receive().lost and time.monotonic() < stop_at
    spokes[3]._connections[0].socket.close()
    assert heard(hub, "lost") == [3]
    hub.leave()
