"""Supervisor of the graders: passes jobs on, watches the clock from outside, kills and replaces a grader that hangs or dies.

consumes        settings and jobs of the rank (areal_hpc.reward.service)
produces        one verdict per job
waits for       sockets; the limits of the answers being graded
unblocked by    a job, a verdict, the end of a peer, a limit

An alarm inside the grader would not do: C code, or a handler of the library's own, keeps it from firing. Limits count from the moment a grader takes the answer
(the later of when it was sent and when the verdict before it came), never from when it was queued: a burst of jobs makes none of them late.

    mathematics    processor time: the work was the answer's own, so it is wrong (TIMEOUT); on a machine that is too busy to give it that time, the wall clock
                   ends the attempt, which says nothing about the answer: once more on another grader, then INFRA_ERROR
    other jobs     wall clock; the end of it is an INFRA_ERROR, and final (whose fault it was cannot be known)

An answer during which a grader died is tried once more on a fresh one, then counted as INFRA_ERROR. Jobs behind it lose nothing.
Graders that are slow to start have a warm spare. Every grader is replaced after MAX_JOBS answers, or when it has grown to MAX_RESIDENT_BYTES; answers that ran no code
but ours count a fiftieth, since a start costs as much as thousands of them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from typing import Any

from areal_hpc.reward import processes
from areal_hpc.reward.channel import Channel, ChannelClosedError

NUM_AHEAD = 64
"""Jobs that the graders hold at once beyond the first of each, so that none waits for the next one."""
MAX_QUEUE = 8192
"""Jobs that wait here. While there are more, they stay with the rank (and are counted as backpressure)."""
MAX_FAILED_STARTS = 2
"""Graders in a row that may die before they are ready."""
MAX_ATTEMPTS = 2
"""Times that an answer is graded when the grader dies over it."""
MAX_JOBS = 2000
LIGHT = 0.02
"""What an answer counts that was graded without math-verify, a custom function or a program."""
MAX_RESIDENT_BYTES = 1 << 30
CHECK_EVERY_S = 0.1
"""Seconds between two looks at the processor time of a busy grader."""
LOOK_AT_MEMORY_EVERY = 50
"""Answers between two looks at a grader's memory."""

Job = dict[str, Any]


class Grader:
    """One grader process with the jobs it holds, the first of which it is working on."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.process, self.channel = processes.spawn("areal_hpc.reward.worker")
        self.given: deque[Job] = deque()
        self.ready = False
        self.num_jobs = 0
        self._wear = 0.0
        self.limits: dict[str, float | None] = {}
        self._taken_s = self._taken_cpu_s = 0.0
        self.send(settings)

    def send(self, *messages: dict[str, Any]) -> None:
        with suppress(ChannelClosedError):  # it died; the next look at its verdicts finds the end of its stream and replaces it
            self.channel.send(*messages)

    def take(self) -> None:
        """The clock of the first job starts now."""
        self._taken_s = time.monotonic()
        self._taken_cpu_s = processes.cpu_s(self.process.pid) if self._limit("cpu_s") is not None else 0.0

    def give(self, jobs: list[Job]) -> None:
        was_idle = not self.given
        self.given.extend(jobs)
        if was_idle:
            self.take()
        self.send(*jobs)

    def _limit(self, name: str) -> float | None:
        limits = self.given[0].get("limits", self.limits) if self.given else self.limits
        value = limits.get(name)
        return None if value is None else float(value)

    @property
    def waited_s(self) -> float:
        """Seconds since the first job was taken."""
        return time.monotonic() - self._taken_s

    def spent(self) -> str:
        """ "cpu_s" or "wall_s" when the first job has used that limit up; else empty."""
        if not self.given:
            return ""
        cpu_limit, wall_limit = self._limit("cpu_s"), self._limit("wall_s")
        if cpu_limit is not None and self.waited_s >= 0.9 * cpu_limit and processes.cpu_s(self.process.pid) - self._taken_cpu_s >= cpu_limit:
            return "cpu_s"
        return "wall_s" if wall_limit is not None and self.waited_s >= wall_limit else ""

    def patience_s(self) -> float | None:
        """Seconds until the limits of the first job must be looked at again; None without a job."""
        if not self.given:
            return None
        cpu_limit, wall_limit = self._limit("cpu_s"), self._limit("wall_s")
        left = [] if wall_limit is None else [wall_limit - self.waited_s]
        if cpu_limit is not None:
            left.append(max(CHECK_EVERY_S, cpu_limit - self.waited_s))
        return max(0.0, min(left)) if left else None

    def finish(self, message: dict[str, Any]) -> None:
        """The verdict on its first job came."""
        first = self.given.popleft()
        assert first["job"] == message["job"]
        self.num_jobs += 1
        self._wear += LIGHT if {"fast", "cache_hits"} & set(message.get("how", ())) else 1.0
        if self.num_jobs % LOOK_AT_MEMORY_EVERY == 0 and processes.resident_bytes(self.process.pid) > MAX_RESIDENT_BYTES:
            self._wear = MAX_JOBS

    @property
    def is_worn(self) -> bool:
        """It has graded enough, or grown too much: it gets no more jobs, and is replaced when it has finished those it holds."""
        return self._wear >= MAX_JOBS

    def end(self) -> None:
        processes.kill(self.process)
        self.channel.close()


class Server:
    def __init__(self, client: Channel, settings: dict[str, Any], jobs: list[Job]) -> None:
        self._client = client
        self._settings = settings
        self._queue: deque[Job] = deque(jobs)
        self._counts: Counter[str] = Counter()
        self._num_failed_starts = 0
        self._announced = False
        self._wants_spare = False
        self._spare: Grader | None = None
        self._graders = [Grader(settings) for _ in range(settings["num_graders"])]

    def run(self) -> None:
        """Until the client hangs up (raises ChannelClosedError)."""
        try:
            while True:
                self._wait()
                self._read_jobs()
                for grader in [*self._graders, *([self._spare] if self._spare else [])]:
                    self._take_verdicts(grader)
                for grader in list(self._graders):
                    self._check(grader)
                self._give_jobs()
                self._client.flush()
        finally:
            for grader in [*self._graders, *([self._spare] if self._spare else [])]:
                processes.kill(grader.process)

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= MAX_QUEUE

    def _read_jobs(self) -> None:
        if self._is_full:
            self._counts["backpressure"] += 1
        else:
            self._queue.extend(self._client.receive())

    def _wait(self) -> None:
        waiting = poll()
        waiting.register(self._client, (0 if self._is_full else POLLIN) | (POLLOUT if self._client.has_outgoing else 0))
        for grader in [*self._graders, *([self._spare] if self._spare else [])]:
            waiting.register(grader.channel, POLLIN | (POLLOUT if grader.channel.has_outgoing else 0))
        patience = [left for grader in self._graders if (left := grader.patience_s()) is not None]
        waiting.poll(min(patience) * 1000 + 1 if patience else None)

    def _give_jobs(self) -> None:
        ready = [grader for grader in self._graders if grader.ready and not grader.is_worn]
        ahead = 1 + NUM_AHEAD // len(self._graders) ** 2  # with others idle, no answer should wait behind a slow one
        while self._queue and ready:
            grader = min(ready, key=lambda each: len(each.given))
            num_new = min(len(self._queue), max(1, ahead // 4), ahead - len(grader.given))
            if num_new <= 0:
                return
            grader.give([self._queue.popleft() for _ in range(num_new)])

    def _take_verdicts(self, grader: Grader) -> None:
        try:
            grader.channel.flush()
            messages = grader.channel.receive()
        except ChannelClosedError:
            self._died(grader)
            return
        passed_on = []
        for message in messages:
            if "job" in message:
                grader.finish(message)
                passed_on.append(message)
            elif "taking" in message:  # a job with limits of its own begins, or the grading of one whose environment had others
                grader.given[0]["limits"] = message["limits"]
            elif "ready" in message:
                grader.ready, grader.limits, self._num_failed_starts = True, message["limits"], 0
                self._wants_spare |= message["slow_start"]
                if not self._announced:
                    self._announced = True
                    passed_on.append({"ready": True})
            else:
                passed_on.append(message)
        self._client.send(*passed_on)
        if messages and grader.given:
            grader.take()
        self._refill_spare()

    def _refill_spare(self) -> None:
        if self._wants_spare and self._spare is None and all(grader.ready for grader in self._graders):
            self._spare = Grader(self._settings)

    def _check(self, grader: Grader) -> None:
        """Limits of the answer it is grading; its own age."""
        spent = grader.spent()
        if spent:
            late = grader.given.popleft()
            limits = late.get("limits", grader.limits)
            if spent == "wall_s" and limits.get("cpu_s") is not None and self._again(late):
                self._queue.appendleft(late)
            else:
                status, score = ("TIMEOUT", 0.0) if spent == "cpu_s" else ("INFRA_ERROR", None)
                reason = f"more than {limits[spent]:g} s of {'processor' if spent == 'cpu_s' else 'wall'} time"
                self._client.send(_failure(late, status, score, grader.waited_s, reason))
            self._replace(grader, "killed")
        elif not grader.given and grader.is_worn:
            self._replace(grader, "recycled")

    @staticmethod
    def _again(job: Job) -> bool:
        """Counts an attempt that failed through no fault of the answer; whether there is another."""
        job["attempts"] = job.get("attempts", 0) + 1
        return bool(job["attempts"] < MAX_ATTEMPTS)

    def _died(self, grader: Grader) -> None:
        if not grader.ready:
            self._num_failed_starts += 1
            if self._num_failed_starts == MAX_FAILED_STARTS:
                sys.exit(f"the grader ended {MAX_FAILED_STARTS} times before it was ready (status {grader.process.wait()})")
        elif grader.given and not self._again(grader.given[0]):
            self._client.send(_failure(grader.given.popleft(), "INFRA_ERROR", None, grader.waited_s, f"the grader died {MAX_ATTEMPTS} times"))
        self._replace(grader, "died")

    def _replace(self, grader: Grader, why: str) -> None:
        """Its jobs go back to the head of the queue; the spare, or a new one, takes its place."""
        grader.end()
        for job in reversed(grader.given):
            job.pop("limits", None)
            self._queue.appendleft(job)
        self._counts[why] += 1
        if grader is self._spare:
            self._spare = None
        else:
            self._graders[self._graders.index(grader)] = self._spare or Grader(self._settings)
            self._spare = None
        self._refill_spare()
        self._client.send({"counts": dict(self._counts)})


def _failure(job: Job, status: str, score: float | None, seconds: float, reason: str) -> dict[str, Any]:
    return {"job": job["job"], "status": status, "score": score, "extracted": None, "seconds": seconds, "reason": reason}


def main() -> None:
    client = processes.adopt_parent()
    with suppress(ChannelClosedError):  # the rank is done with us
        messages: list[dict[str, Any]] = []
        while not messages:
            client.wait(None)
            messages = client.receive()
        Server(client, messages[0], messages[1:]).run()


if __name__ == "__main__":
    main()
