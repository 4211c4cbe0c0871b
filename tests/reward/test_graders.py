"""Several graders, killed and replaced, on jobs that bring their own reference: no false zero for a healthy neighbour, whatever the others do."""

import os
import signal
import time
from pathlib import Path

import pytest

from areal_hpc.config import Data, Reward
from areal_hpc.reward import processes, server
from areal_hpc.reward.service import RewardService, default_num_graders
from areal_hpc.transport.trajectory import GRADED, Status
from tests.reward.math_files import rows, wrongly_graded
from tests.reward.test_service import READY_S, descendants, wait_until_gone

HANGS = "\\boxed{\\sum_{n=1}^{9999} n^{n}}"
"""Harmless to look at; math-verify works on it for many seconds."""


def start(**options):
    service = RewardService.start()
    service.configure(None, Reward(**options), ["math"])
    assert service.wait_ready(READY_S)
    return service


def grade_all(service, pairs, timeout_s=120.0):
    """Verdicts in the order of the (gold, text) pairs."""
    for job_id, (gold, text) in enumerate(pairs):
        service.submit_reference(job_id, "math", gold, text)
    found, stop_s = {}, time.monotonic() + timeout_s
    while service.num_pending and time.monotonic() < stop_s:
        found |= {verdict.job_id: verdict for verdict in service.wait(1.0)}
    assert service.num_pending == 0, f"{service.num_pending} without a verdict"
    return [found[job_id] for job_id in range(len(pairs))]


@pytest.fixture(scope="module")
def service():
    """One for many tests: what one of them does to its graders must not matter to the next."""
    with start(num_graders=2, math_cpu_s=1.0) as service:
        yield service


@pytest.fixture
def counted(service):
    """Metrics since the test began."""
    before = service.metrics.copy()
    return lambda name: service.metrics[name] - before[name]


def graders(service):
    return sorted(descendants(service._process.pid) - {service._process.pid})


def wait_for_graders(service, number):
    """Until there are so many: the spare starts once all graders are ready."""
    stop_s = time.monotonic() + READY_S
    while len(graders(service)) != number and time.monotonic() < stop_s:
        service.poll()
        time.sleep(0.02)
    assert len(graders(service)) == number
    return graders(service)


@pytest.mark.parametrize("name", ["math_cases.jsonl", "math_more.jsonl"])
def test_all_cases_through_the_service(service, name):
    cases = rows(name)
    verdicts = grade_all(service, [(case["gold"], case["answer"]) for case in cases])
    assert not wrongly_graded(cases, [verdict.status.name.lower() for verdict in verdicts])
    assert all((verdict.score is None) == (verdict.status not in GRADED) for verdict in verdicts)
    assert all(verdict.status is Status.GOLD_BAD for case, verdict in zip(cases, verdicts, strict=True) if not case["gold"].strip())


def test_all_graders_hang_and_the_next_answers_are_right(service, counted):
    pairs = [("5", HANGS)] * 4 + [(str(k), f"\\boxed{{{k}}}") for k in range(200)]
    verdicts = grade_all(service, pairs)
    assert [verdict.status for verdict in verdicts[:4]] == [Status.TIMEOUT] * 4
    assert all(verdict.score == 0.0 and "processor time" in verdict.reason for verdict in verdicts[:4])
    assert {verdict.status for verdict in verdicts[4:]} == {Status.RIGHT}
    assert (counted("killed"), counted("timeout"), counted("right")) == (4, 4, 200)


def test_five_hundred_at_once_without_a_false_zero(service):
    text = "7+7=14, and so on. " * 700  # 13 kB: far more than a socket holds
    pairs = [(f"\\frac{{{k}}}{{7}}" if k % 5 == 0 else str(k), f"{text}\\boxed{{{k}/7}}" if k % 5 == 0 else f"{text}\\boxed{{{k}}}") for k in range(500)]
    assert {verdict.status for verdict in grade_all(service, pairs)} == {Status.RIGHT}


def test_a_grader_killed_in_the_middle_loses_nothing(service, counted):
    before = wait_for_graders(service, 3)
    for job_id in range(400):
        service.submit_reference(job_id, "math", f"\\sqrt{{{job_id + 2}}}", f"\\boxed{{\\frac{{{job_id + 2}}}{{\\sqrt{{{job_id + 2}}}}}}}")
    found = []
    for victim in before:  # all graders, and the spare
        while not (new := service.wait(READY_S)):
            pass
        found += new
        os.kill(victim, signal.SIGKILL)
    while service.num_pending:
        found += service.wait(READY_S)
    assert sorted(verdict.job_id for verdict in found) == list(range(400))
    assert {verdict.status for verdict in found} == {Status.RIGHT}
    assert counted("died") == 3
    wait_for_graders(service, 3)


def test_a_stopped_grader_is_no_timeout_of_the_answer():
    """A grader that gets no processor time proves nothing about the answer: tried again, right."""
    with start(num_graders=1, math_cpu_s=0.1, deadline_s=0.5) as service:
        grader = wait_for_graders(service, 2)[0]
        os.kill(grader, signal.SIGSTOP)
        service.submit_reference(0, "math", "5", "\\boxed{5}")
        (verdict,) = service.wait(READY_S)
    assert verdict.status is Status.RIGHT and service.metrics["killed"] == 1


def test_graders_are_recycled(monkeypatch):
    """Those that run users' functions, after 2,000 answers; answers graded by our own code alone wear a grader out fifty times more slowly."""
    monkeypatch.chdir(Path(__file__).parents[2])
    for custom, times in (("tests.reward.graders:by_text", 1), ("", 0)):
        with RewardService.start() as service:
            service.configure(Data(size=50), Reward(custom=custom, num_graders=1))
            assert service.wait_ready(READY_S)
            (first,) = graders(service)
            for job_id in range(server.MAX_JOBS + 100):
                service.submit(job_id, 0, "fine")
            while service.num_pending:
                service.wait(READY_S)
            assert service.metrics["right" if custom else "no_answer"] == server.MAX_JOBS + 100
            assert service.metrics["recycled"] == times
            assert (first in graders(service)) == (not times)


def test_memory_is_limited(service):
    """What would take more than the limit is no reward, and no infrastructure failure of its neighbours."""
    verdicts = grade_all(service, [("5", "\\boxed{\\begin{pmatrix}" + "&".join(["9!^{99}!"] * 30) + "\\end{pmatrix}\\det}"), ("5", "\\boxed{5}")])
    assert verdicts[0].status in (Status.WRONG, Status.HOSTILE, Status.TIMEOUT) and verdicts[1].status is Status.RIGHT
    for pid in graders(service):
        limit = next(line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max address space"))
        assert int(limit.split()[3]) == processes.ADDRESS_SPACE_BYTES


def test_graders_step_back(service):
    wait_for_graders(service, 3)
    grade_all(service, [("5", "\\boxed{5}")] * 50)
    for pid in graders(service)[:2]:
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)  # no rank to yield to
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "SYMPY_GROUND_TYPES=python" in environment and "OMP_NUM_THREADS=1" in environment


def test_graders_beside_a_rank_yield_to_it():
    with RewardService.start() as service:
        service.configure(Data(size=50), Reward())
        assert service.wait_ready(READY_S)
        (pid,) = graders(service)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + processes.NICENESS)
        assert os.sched_getaffinity(pid) == processes.grader_cores(os.sched_getaffinity(0))


def test_close_while_all_hang():
    service = start(num_graders=2, math_cpu_s=60.0)
    below = set(wait_for_graders(service, 3))
    for job_id in range(2):
        service.submit_reference(job_id, "math", "5", HANGS)
    time.sleep(0.2)
    service.close()
    assert not wait_until_gone(below)


def test_metrics_say_how(service, counted):
    pairs = [("5", "\\boxed{5}")] * 3 + [("5", "no box"), ("", "\\boxed{5}"), ("\\frac13", "\\boxed{\\int_0^1 x^2dx}"), ("5", "\\boxed{9^{9^{9^9}}}")]
    grade_all(service, pairs)
    expected = {"right": 4, "no_answer": 1, "gold_bad": 1, "hostile": 1, "fallback": 1}
    assert {name: counted(name) for name in expected} == expected
    assert counted("fast") + counted("cache_hits") >= 3


def test_cores():
    assert processes.grader_cores({4, 5}) == {4, 5}
    assert processes.grader_cores({3, 4, 5, 6}) == {5, 6}
    assert [default_num_graders(n) for n in (1, 2, 4, 6, 16)] == [1, 1, 1, 2, 7]
