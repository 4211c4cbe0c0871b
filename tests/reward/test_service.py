"""The reward service: no false zero, no hang, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.config import ConfigError, Data, Reward
from areal_hpc.data.datasets import load_problems
from areal_hpc.reward.service import RewardServerDied, RewardService
from areal_hpc.transport.trajectory import Status

SMALL = Data(size=200)
BY_TEXT = "tests.reward.graders:by_text"
ROOT = Path(__file__).parents[2]
READY_S = 60.0


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)  # graders are imported from the working folder


@pytest.fixture(scope="module")
def problems():
    return load_problems(SMALL)


def grade_all(service, jobs, timeout_s=30.0):
    """{job id: verdict} of (id, problem index, text) jobs."""
    for job_id, index, text in jobs:
        service.submit(job_id, index, text)
    found, stop_s = {}, time.monotonic() + timeout_s
    while service.num_pending and time.monotonic() < stop_s:
        found |= {verdict.job_id: verdict for verdict in service.wait(1.0)}
    assert service.num_pending == 0, f"{service.num_pending} without a verdict"
    return found


def start(data=SMALL, deadline_s=5.0, custom="", **options):
    service = RewardService.start()
    service.configure(data, Reward(deadline_s=deadline_s, custom=custom, **options))
    return service


def descendants(pid):
    """Process ids below `pid`, zombies included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended while we looked
    found, new = set(), {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return found


def is_running(pid):
    """Not gone and not a zombie (whose parent, here the container's init, may never reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_signals_to_the_whole_step_are_the_ranks_affair():
    """Slurm sends the signal of a time limit or a preemption to every process of a step: grading goes on until the rank ends."""
    with start(custom=BY_TEXT) as service:
        assert service.wait_ready(READY_S)
        of_the_rank = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
        for pid in (service._process.pid, *descendants(service._process.pid)):  # blocked, and neither caught nor ignored as in the rank
            masks = dict(
                line.split(":\t")
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("Sig") and line[3:6] != "Pnd" and line[3] != "Q"
            )
            blocked, ignored, caught = (int(masks[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt"))
            assert all(blocked >> number - 1 & 1 for number in of_the_rank)
            assert not any((ignored | caught) >> number - 1 & 1 for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM))
        for number in of_the_rank:
            for pid in (service._process.pid, *descendants(service._process.pid)):
                os.kill(pid, number)
        time.sleep(0.2)
        assert grade_all(service, [(1, 0, "fine\n#### 1")])[1].score is not None
    early = RewardService.start()  # and before the child has run a line of Python
    os.kill(early._process.pid, signal.SIGUSR1)
    early.configure(SMALL, Reward(custom=BY_TEXT))
    assert early.wait_ready(READY_S)
    early.close()


def wait_until_gone(pids, timeout_s=5.0):
    stop_s = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if is_running(pid)}) and time.monotonic() < stop_s:
        time.sleep(0.02)
    return left


# ---- what is right, what is wrong


def test_verdicts_of_both_splits(problems):
    with start() as service:
        answer, held = problems.train[3].answer, problems.heldout[1].answer
        service.submit(1, 3, f"some steps\n#### {answer}")
        service.submit(2, 3, f"#### {int(answer) + 1}")
        service.submit(3, 3, f"{answer}")
        service.submit(4, 3, "43+", truncated=True)
        service.submit(5, 3, f"#### {answer}", truncated=True)
        service.submit(6, 1, f"#### {held}", split="heldout")
        service.submit(7, 1, f"#### {int(held) + 1}", split="heldout")
        found = {}
        while service.num_pending:
            found |= {verdict.job_id: verdict for verdict in service.wait(READY_S)}
    statuses = {job_id: verdict.status for job_id, verdict in found.items()}
    assert statuses == {1: Status.RIGHT, 2: Status.WRONG, 3: Status.NO_ANSWER, 4: Status.TRUNCATED, 5: Status.RIGHT, 6: Status.RIGHT, 7: Status.WRONG}
    assert (found[1].score, found[1].extracted) == (1.0, answer) and found[2].score < 1.0
    assert found[3].extracted is None and found[3].score == 0.0
    assert all(0 <= verdict.seconds < 5 for verdict in found.values())


def test_a_burst_gives_no_false_zero_and_submitting_never_waits(problems):
    with start(deadline_s=0.5) as service:
        started_s = time.monotonic()
        num_problems, text = len(problems.train), "7+7=14\n" * 2000  # 14 kB each: far more than a socket holds
        for job_id in range(500):
            service.submit(job_id, job_id % num_problems, f"{text}#### {problems.train[job_id % num_problems].answer}")
        assert time.monotonic() - started_s < 2.0
        found = {}
        while service.num_pending:
            found |= {verdict.job_id: verdict for verdict in service.wait(READY_S)}
    assert {verdict.status for verdict in found.values()} == {Status.RIGHT} and len(found) == 500


def test_waiting_in_the_queue_does_not_count_as_grading():
    with start(deadline_s=1.0, custom=BY_TEXT) as service:
        found = grade_all(service, [(i, 0, "slow") for i in range(12)])  # 2.4 s in all
    assert {verdict.status for verdict in found.values()} == {Status.RIGHT}
    assert all(0.2 <= verdict.seconds < 1.0 for verdict in found.values())


# ---- graders that misbehave


def test_a_hanging_answer_is_killed_and_the_next_ones_are_right(tmp_path):
    with start(deadline_s=0.5, custom=BY_TEXT) as service:
        assert service.wait_ready(READY_S)
        jobs = [(0, 0, "fine"), (1, 0, "hang"), (2, 0, "fine"), (3, 0, f"sleep in a child {tmp_path / 'pid'}"), (4, 0, "fine"), (5, 0, "hang")]
        found = grade_all(service, jobs)
    assert [found[i].status for i in range(6)] == [Status.RIGHT, Status.INFRA_ERROR] * 3
    assert found[1].score is None and found[1].seconds >= 0.5
    assert not wait_until_gone({int((tmp_path / "pid").read_text())}), "the child of a killed grader lives on"


def test_a_crash_is_tried_once_more(tmp_path):
    with start(custom=BY_TEXT) as service:
        jobs = [(0, 0, "fine"), (1, 0, "crash"), (2, 0, f"crash once {tmp_path / 'marker'}"), (3, 0, "fine")]
        found = grade_all(service, jobs)
    assert [found[i].status for i in range(4)] == [Status.RIGHT, Status.INFRA_ERROR, Status.RIGHT, Status.RIGHT]
    assert found[1].score is None


def test_only_finite_numbers_are_scores():
    texts = ["none", "nan", "infinite", "text", "raise", "half", "true", "minus", "shout"]
    with start(custom=BY_TEXT) as service:
        found = grade_all(service, [(i, 0, text) for i, text in enumerate(texts)])
    assert [found[i].status for i in range(5)] == [Status.INFRA_ERROR] * 5
    assert all(found[i].score is None for i in range(5))
    assert [(found[i].status, found[i].score) for i in range(5, 9)] == [(Status.WRONG, 0.5), (Status.RIGHT, 1.0), (Status.WRONG, -1.0), (Status.RIGHT, 1.0)]


def test_graders_see_no_mpi(monkeypatch):
    for name in ("PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MPIR_CVAR_X"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with start(custom=BY_TEXT) as service:
        assert grade_all(service, [(0, 0, "environment")])[0].status is Status.RIGHT


@pytest.mark.parametrize(
    ("data", "custom", "message"),
    [
        (SMALL, "no_such_module_xyz:f", "custom reward 'no_such_module_xyz:f': No module named"),
        (SMALL, "tests.reward.graders:absent", "has no attribute 'absent'"),
        (SMALL, "tests.reward.graders", "expected 'module:function'"),
        (Data(path="/absent.jsonl"), "", "data.path=/absent.jsonl: no such file"),
    ],
)
def test_a_users_mistake_comes_back_as_one(data, custom, message):
    with start(data, custom=custom) as service, pytest.raises(ConfigError, match=message):
        service.wait_ready(READY_S)


# ---- what is left behind: nothing


@pytest.mark.parametrize("text", ["fine", "hang"])
def test_close_leaves_no_process(text):
    before = descendants(os.getpid())
    service = start(deadline_s=60.0, custom=BY_TEXT)
    assert service.wait_ready(READY_S)
    service.submit(0, 0, text)
    if text == "hang":
        time.sleep(0.2)
    assert len(descendants(os.getpid()) - before) == 2
    started_s = time.monotonic()
    service.close()
    service.close()
    assert time.monotonic() - started_s < 2.0
    assert descendants(os.getpid()) <= before  # not even a zombie


def test_nothing_outlives_a_killed_rank():
    code = (
        "import os, time; from areal_hpc.config import Data, Reward; from areal_hpc.reward.service import RewardService\n"
        f"service = RewardService.start(); service.configure(Data(size=200), Reward(deadline_s=60.0, custom={BY_TEXT!r})); assert service.wait_ready(60)\n"
        "service.submit(0, 0, 'hang'); print('up', flush=True); time.sleep(600)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert rank.stdout.readline() == "up\n"
    below = descendants(rank.pid)
    assert len(below) == 2
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert not wait_until_gone(below)


def test_a_dead_server_says_its_last_words():
    service = start(custom=BY_TEXT)
    assert service.wait_ready(READY_S)
    service.submit(0, 0, "raise")
    assert service.wait(READY_S)[0].status is Status.INFRA_ERROR
    service.submit(1, 0, "hang")
    grader = descendants(service._process.pid)
    os.kill(service._process.pid, signal.SIGKILL)
    with pytest.raises(RewardServerDied, match=r"status -9 and 1 answers pending(.|\n)*RuntimeError: the grading function is broken"):
        service.wait(READY_S)
    assert not wait_until_gone(grader)
    with pytest.raises(RewardServerDied):
        service.submit(2, 0, "fine")
    service.close()


def test_a_grader_that_cannot_start_ends_the_server(tmp_path, monkeypatch):
    (tmp_path / "broken_grader.py").write_text("raise SystemExit('no licence for this grader')")
    monkeypatch.chdir(tmp_path)
    with (
        start(custom="broken_grader:f") as service,
        pytest.raises(RewardServerDied, match=r"no licence for this grader(.|\n)*ended 2 times before it was ready"),
    ):
        service.wait_ready(READY_S)


def test_the_server_process_stays_small():
    """The supervisor imports neither numpy nor torch, nor the data; the grader adds the data, not numpy."""
    code = (
        "import sys; import areal_hpc.reward.server; server = set(sys.modules)\n"
        "import areal_hpc.reward.worker; worker = set(sys.modules)\n"
        "heavy = {'numpy', 'torch', 'mpi4py', 'sympy', 'tokenizers'}\n"
        "assert not server & (heavy | {'areal_hpc.data.datasets'}), server & heavy\n"
        "assert not worker & heavy, worker & heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
