"""Supervisor of one grader: passes jobs on, watches the clock from outside, kills and replaces a grader that hangs or dies.

consumes        settings and jobs of the rank (areal_hpc.reward.service)
produces        one verdict per job
waits for       sockets; the deadline of the answer being graded
unblocked by    a job, a verdict, the end of either peer, the deadline

An alarm inside the grader would not do: C code, or a handler of the library's own, keeps it from firing. The deadline counts from the moment the grader takes
the answer (the later of when it was sent and when the verdict before it came), never from when it was queued: a burst of jobs makes none of them late.
A timeout is final. An answer during which the grader died is tried once more on a fresh one, then counted as infra_error. Jobs behind it lose nothing.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from select import POLLIN, POLLOUT, poll
from typing import Any

from areal_hpc.reward import processes
from areal_hpc.reward.channel import Channel, ChannelClosedError

NUM_AHEAD = 64
"""Jobs that a grader holds at once, so that it never waits for the next one."""
MAX_FAILED_STARTS = 2
"""Graders in a row that may die before they are ready."""
MAX_ATTEMPTS = 2
"""Times that an answer is graded when the grader dies over it."""

Job = dict[str, Any]


class Server:
    def __init__(self, client: Channel, settings: dict[str, Any], jobs: list[Job]) -> None:
        self._client = client
        self._settings = settings
        self._queue: deque[Job] = deque(jobs)
        self._given: deque[Job] = deque()  # to the grader, in order; the first is the one being graded
        self._first_taken_s = 0.0
        self._num_failed_starts = 0
        self._start_grader()

    def _start_grader(self) -> None:
        self._process, self._grader = processes.spawn("areal_hpc.reward.worker")
        self._ready = False
        self._send_to_grader(self._settings)

    def run(self) -> None:
        """Until the client hangs up (raises ChannelClosedError)."""
        try:
            while True:
                self._wait()
                self._queue.extend(self._client.receive())
                self._take_verdicts()
                self._check_deadline()
                self._give_jobs()
                self._client.flush()
        finally:
            processes.kill(self._process)

    def _wait(self) -> None:
        waiting = poll()
        for channel in (self._client, self._grader):
            waiting.register(channel, POLLIN | (POLLOUT if channel.has_outgoing else 0))
        waiting.poll(max(0.0, self._deadline_s() - time.monotonic()) * 1000 + 1 if self._given else None)

    def _deadline_s(self) -> float:
        return self._first_taken_s + float(self._settings["deadline_s"])

    def _give_jobs(self) -> None:
        num_new = min(len(self._queue), NUM_AHEAD - len(self._given)) if self._ready else 0
        if num_new:
            if not self._given:
                self._first_taken_s = time.monotonic()
            jobs = [self._queue.popleft() for _ in range(num_new)]
            self._given.extend(jobs)
            self._send_to_grader(*jobs)

    def _send_to_grader(self, *messages: dict[str, Any]) -> None:
        with suppress(ChannelClosedError):  # it died; the next look at its verdicts finds the end of its stream and replaces it
            self._grader.send(*messages)

    def _take_verdicts(self) -> None:
        try:
            self._grader.flush()
            messages = self._grader.receive()
        except ChannelClosedError:
            self._grader_died()
            return
        for message in messages:
            if "job" in message:
                first = self._given.popleft()
                assert first["job"] == message["job"]
            elif "ready" in message:
                self._ready, self._num_failed_starts = True, 0
        if messages:
            self._first_taken_s = time.monotonic()
            self._client.send(*messages)

    def _check_deadline(self) -> None:
        if self._given and time.monotonic() >= self._deadline_s():
            late = self._given.popleft()
            self._client.send(_failure(late, "TIMEOUT", self._settings["deadline_s"]))
            self._replace_grader()

    def _grader_died(self) -> None:
        if not self._ready:
            self._num_failed_starts += 1
            if self._num_failed_starts == MAX_FAILED_STARTS:
                sys.exit(f"the grader ended {MAX_FAILED_STARTS} times before it was ready (status {self._process.wait()})")
        elif self._given:
            first = self._given[0]
            first["attempts"] = first.get("attempts", 0) + 1
            if first["attempts"] == MAX_ATTEMPTS:
                self._given.popleft()
                self._client.send(_failure(first, "INFRA_ERROR", time.monotonic() - self._first_taken_s))
        self._replace_grader()

    def _replace_grader(self) -> None:
        processes.kill(self._process)
        self._grader.close()
        self._queue.extendleft(reversed(self._given))
        self._given.clear()
        self._start_grader()


def _failure(job: Job, status: str, seconds: float) -> dict[str, Any]:
    return {"job": job["job"], "status": status, "score": None, "extracted": None, "seconds": seconds}


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
