"""The rank's side of grading: submit answers, poll for verdicts, never block.

Lifecycle: `start` (before MPI or CUDA is initialised), `configure`, then `submit` and `poll` in any order, `close`.

    with RewardService.start() as rewards:
        rewards.configure(config.data, config.reward)
        rewards.submit(job_id=7, problem_index=3, text="40+2=42\\n#### 42")
        for verdict in rewards.wait(timeout_s=10.0): ...

Trap: verdicts come in the order of the jobs except where a grader hung or died; match them by `job_id`.
The processes (this rank > server > graders) are killed with the rank, whatever kills it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal

from areal_hpc.config import ConfigError, Data, Environment, Reward
from areal_hpc.reward import processes
from areal_hpc.reward.channel import Channel, ChannelClosedError
from areal_hpc.transport.trajectory import Status

_STDERR_TAIL_BYTES = 4000
_CLOSE_S = 2.0


class RewardServerDied(RuntimeError):  # noqa: N818
    """The server ended by itself: exit status and the end of what it and its grader wrote to standard error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    job_id: int
    status: Status
    score: float | None
    """1.0 = right; None when the answer could not be graded (INFRA_ERROR, GOLD_BAD)."""
    extracted: str | None
    """The answer found in the text, None without one."""
    seconds: float
    """Time spent on grading, waiting in the queue excluded."""
    reason: str = ""
    """One line for a person, where the status does not say all."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says to the model's turn: the answer goes on behind it, and this job is done."""

    job_id: int
    text: str


def default_num_graders(num_cores: int) -> int:
    """Half of the cores beyond two (the rank's own and its helper's), at least one."""
    return max(1, (num_cores - 2) // 2)


class RewardService:
    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, stderr: IO[bytes]) -> None:
        self._process = process
        self._channel = channel
        self._stderr = stderr
        self._pending: set[int] = set()
        self._replies: list[Reply] = []
        self._configured = self._ready = False
        self.metrics: Counter[str] = Counter()
        """Verdicts by status (lower case); for mathematics cache_hits, fast (decided without math-verify), fallback; replies, environment_failed and what an
        environment counts (python_calls, ...); graders killed, died, recycled;
        backpressure: times that the server's queue was full."""

    @classmethod
    def start(cls) -> RewardService:
        """Start the server process. Call it before MPI or CUDA is initialised, on a thread that lives as long as the rank (the server dies with that thread)."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        return cls(*processes.spawn("areal_hpc.reward.server", stderr), stderr)

    def configure(self, data: Data | None, reward: Reward, kinds: Sequence[Literal["math", "code"]] = (), environment: Environment | None = None) -> None:
        """Say what is graded, and who answers the model's turns; once. The graders load the problems from the same configuration, so jobs name them by position.

        data None: no problems, each job brings its own reference (`submit_reference`); `kinds` says which kinds these have.
        A mistake in `data`, in `reward.custom` or in the environment is raised as ConfigError by a later `poll`, `wait` or `wait_ready`.
        """
        assert not self._configured
        self._configured = True
        section = None if data is None else dataclasses.asdict(data)
        num_graders = reward.num_graders or default_num_graders(len(os.sched_getaffinity(0)))
        surroundings = dataclasses.asdict(environment) if environment is not None and environment.name else None
        settings = {"data": section, "reward": dataclasses.asdict(reward), "kinds": list(kinds), "environment": surroundings}
        self._send(settings | {"num_graders": num_graders})

    @property
    def num_pending(self) -> int:
        """Answers submitted whose verdict has not been returned."""
        return len(self._pending)

    def row(self) -> dict[str, int]:
        """How much of what has been done, and what is pending: a row of the log's table /graders, but for time and rank."""
        names = [status.name.lower() for status in Status] + ["fast", "cache_hits", "fallback", "killed", "died", "recycled", "backpressure"]
        return {"pending": self.num_pending} | {name: self.metrics[name] for name in names}

    def submit(
        self,
        job_id: int,
        problem_index: int,
        text: str,
        truncated: bool = False,
        *,
        split: Literal["train", "heldout"] = "train",
        turns: Sequence[str] = (),
    ) -> None:
        """Queue one answer to `Problems.SPLIT[problem_index]`. `truncated`: it was cut at the length limit. Never blocks. Raises RewardServerDied.

        `turns`: all texts so far, the model's and the environment's in turn, `text` the last. The environment is then asked first; what it says comes as a Reply instead
        of a verdict. Without, `text` is graded.
        """
        assert self._configured and job_id not in self._pending
        self._pending.add(job_id)
        self._send({"job": job_id, "problem": problem_index, "split": split, "text": text, "truncated": truncated, "turns": list(turns)})

    def submit_reference(self, job_id: int, kind: Literal["math", "code"], reference: Any, text: str) -> None:
        """Queue one answer with what it is judged by: the reference answer (or several, any of which will do), or tests. Never blocks. Raises RewardServerDied."""
        assert self._configured and job_id not in self._pending
        self._pending.add(job_id)
        self._send({"job": job_id, "kind": kind, "gold" if kind == "math" else "tests": reference, "text": text, "truncated": False})

    def poll(self) -> list[Verdict]:
        """The verdicts that have arrived. Never blocks. Raises RewardServerDied, or ConfigError for what `configure` was given."""
        try:
            self._channel.flush()
            messages = self._channel.receive()
        except ChannelClosedError:
            raise self._died() from None
        verdicts = []
        for message in messages:
            if self._is_notice(message):
                continue
            if "reply" in message:
                self._replies.append(self._reply(message))
            else:
                verdicts.append(self._verdict(message))
        return verdicts

    def take_replies(self) -> list[Reply]:
        """The environment's replies that the last calls of `poll` or `wait` found."""
        taken, self._replies = self._replies, []
        return taken

    def wait(self, timeout_s: float) -> list[Verdict]:
        """Like `poll`, but waits for at least one verdict or reply while any is pending. Empty when the time is up, or only replies came."""
        deadline_s = time.monotonic() + timeout_s
        verdicts = self.poll()
        while not verdicts and not self._replies and self._pending and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait_readable(left_s)
            verdicts = self.poll()
        return verdicts

    def wait_ready(self, timeout_s: float) -> bool:
        """Until the grader has loaded the problems (True) or the time is up. Call it before the first `submit`. Raises like `poll`."""
        assert self._configured and not self._pending
        deadline_s = time.monotonic() + timeout_s
        while not self._ready and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait_readable(left_s)
            self.poll()
        return self._ready

    def close(self) -> None:
        """End the server and its grader, whatever they are doing, and reap them. Harmless when called twice."""
        self._channel.close()  # the server ends by itself when its client hangs up, and takes the grader with it
        self._reap()
        self._stderr.close()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError:
            raise self._died() from None

    def _wait_readable(self, timeout_s: float) -> None:
        try:
            self._channel.wait(timeout_s)
        except ChannelClosedError:
            raise self._died() from None

    def _is_notice(self, message: dict[str, Any]) -> bool:
        if "config_error" in message:
            raise ConfigError(message["config_error"])
        self._ready = self._ready or "ready" in message
        self.metrics.update({name: count - self.metrics[name] for name, count in message.get("counts", {}).items()})
        return "job" not in message

    def _verdict(self, message: dict[str, Any]) -> Verdict:
        self._pending.remove(message["job"])
        self.metrics.update([message["status"].lower(), *message.get("how", ())])
        return Verdict(message["job"], Status[message["status"]], message["score"], message["extracted"], message["seconds"], message.get("reason", ""))

    def _reply(self, message: dict[str, Any]) -> Reply:
        self._pending.remove(message["job"])
        self.metrics.update(message["how"])
        return Reply(message["job"], message["reply"])

    def _reap(self) -> int:
        try:
            return self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            processes.kill(self._process)
            return self._process.returncode

    def _died(self) -> RewardServerDied:
        status = self._reap()
        self._stderr.seek(max(0, self._stderr.seek(0, 2) - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return RewardServerDied(f"the reward server ended with status {status} and {self.num_pending} answers pending; its last words:\n{tail or '(none)'}")
