"""Who answers the model between two turns of an answer: a shipped tool that runs its programs, or a function of the user's.

    def environment(problem, turns):        # problem: areal_hpc.data.datasets.Problem
        return "text for the model"         # turns: texts so far, the model's and the environment's in turn; the last one is the model's
        return None                         # the answer is final, and is graded

It runs in a grader process, which is killed when it takes longer than `environment.deadline_s`; so it may block, but it may not remember: any grader may be
asked about any turn, and twice about the same one when a grader died. What it raises is our failure, never the model's: the answer is not graded and does not train.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from areal_hpc.config import ConfigError, Environment, Reward

if TYPE_CHECKING:
    from areal_hpc.data.datasets import Problem
    from areal_hpc.reward.sandbox import Host, Reply

Answering = Callable[["Problem", Sequence[str]], str | None]
PYTHON = "python"
MAX_ATTEMPTS = 2
"""Times that a program is run when the sandbox, not the program, failed over it."""
OUTPUT_BYTES = 1 << 18
"""What a program may print before it is stopped; far more than a model is shown."""
_CALL = re.compile(r".*<python>(.*?)</python>\s*", re.DOTALL)
_FENCED_CALL = re.compile(r"(?:.*\n)?[ \t]*```(?:python|py)[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)


def load_environment(settings: Environment, reward: Reward) -> Answering | None:
    """The environment of this name; None: there is none. Raises ConfigError: no such function, or no sandbox at the level that `reward.code_floor` asks for."""
    if not settings.name:
        return None
    return PythonTool(settings, reward) if settings.name == PYTHON else load_function("environment.name", settings.name)


def load_function(option: str, name: str) -> Answering:
    """The function "module:function". Raises ConfigError when there is none."""
    module_name, _, function_name = name.partition(":")
    try:
        function: Answering = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}={name}: {error}") from error
    return function


def called_program(turn: str, *, fenced: bool) -> str | None:
    """The program that ends a turn of the model, between <python> and </python> or (`fenced`) in a block marked as Python; None: the turn calls no tool."""
    match = _CALL.fullmatch(turn) or (_FENCED_CALL.fullmatch(turn) if fenced else None)
    return match[1].strip("\n") if match else None


def as_output(text: str) -> str:
    """What the model is shown of a program's output."""
    return f"\n<output>\n{text}\n</output>\n"


def cut(text: str, most_chars: int) -> str:
    """`text`, or its beginning and end with a line between them that says how much is missing."""
    if len(text) <= most_chars:
        return text
    head = most_chars // 2
    tail = most_chars - head
    return f"{text[:head]}\n[... {len(text) - most_chars} of {len(text)} characters left out ...]\n{text[len(text) - tail :]}"


class PythonTool:
    """Runs the program that ends the model's turn in the strongest sandbox that holds here, and answers with what it printed.

    A block marked as Python is a call too, except where the answer itself is a program. Each program starts afresh: nothing of an earlier one is left. One that
    fails, or takes too long, gives the model the error that it would see in a terminal. Raises ConfigError when no allowed level of isolation holds,
    SandboxError when the sandbox failed.
    """

    def __init__(self, settings: Environment, reward: Reward) -> None:
        from areal_hpc.reward.sandbox import Limits, probe

        self._sandbox = probe(reward.code_sandbox, reward.code_floor, reward.code_packages)
        cpu_s = settings.python_cpu_s
        self._limits = Limits(cpu_s=cpu_s, wall_s=2 * cpu_s + 1, memory_bytes=reward.code_memory_mib << 20, output_bytes=OUTPUT_BYTES)
        self._most_chars = settings.python_output_chars
        self._host: Host | None = None
        self.counts: Counter[str] = Counter()
        """python_calls, and of these python_failed (ended with an error), python_timeouts, python_cut (output shortened)."""

    def __call__(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """The output of the program that the last turn calls; None when it calls none."""
        program = called_program(turns[-1], fenced=problem.kind != "code")
        return None if program is None else as_output(self._shown(program))

    def _shown(self, program: str) -> str:
        self.counts["python_calls"] += 1
        reply = self._run(program)
        if reply.kind == "ended" and reply.status == 0:
            error = ""
        elif self._timed_out(reply):
            self.counts["python_timeouts"] += 1
            error = (
                f"TimeoutError: the program took more than {f'{self._limits.wall_s:g} s' if reply.kind == 'wall' else f'{self._limits.cpu_s:g} s of CPU time'}"
            )
        else:
            self.counts["python_failed"] += 1
            error = _failure(reply)
        printed = reply.first.decode("utf-8", "replace").strip("\n")
        text = "\n".join(part for part in (printed, error) if part) or "(no output)"
        shown = cut(text, self._most_chars)
        self.counts["python_cut"] += shown != text
        return shown

    def _timed_out(self, reply: Reply) -> bool:
        """By the host's clock, or by the kernel's limit of CPU seconds."""
        return reply.kind in ("cpu", "wall") or (reply.kind == "ended" and reply.status in (-9, -24) and reply.cpu_s >= self._limits.cpu_s)

    def _run(self, program: str) -> Reply:
        """Run it to its end; once more when the machine, not the program, ended it. Raises SandboxError."""
        from areal_hpc.reward.sandbox import SandboxError

        request = {"mode": "script", "source": program, "preamble": ""}
        failure = SandboxError("not tried")
        for _ in range(MAX_ATTEMPTS):
            try:
                self._host = self._host or self._sandbox.host()
                reply = self._host.run(request, self._limits)
                if not self._sandbox.shares_host:
                    self.close()
            except SandboxError as error:
                self.close()
                failure = error
                continue
            killed = reply.kind == "ended" and reply.status == -9 and not self._timed_out(reply)
            if reply.kind != "starved" and not (killed and self._sandbox.level != "limits"):  # at level limits it can send itself a signal
                return reply
            failure = SandboxError("killed from outside" if killed else f"got no core for {reply.waited_s:.1f} of {reply.wall_s:.1f} s")
        raise failure

    def close(self) -> None:
        """End the process that holds programs. Harmless when called twice."""
        if self._host is not None:
            self._host.close()
            self._host = None


def _failure(reply: Reply) -> str:
    """Why a program did not end well, as its author would see it."""
    if reply.kind == "output":
        return f"RuntimeError: the program printed more than {OUTPUT_BYTES} bytes"
    if reply.kind == "threads":
        return "RuntimeError: the program started too many threads"
    said = reply.second.decode("utf-8", "replace").strip()
    return said or (f"the program was ended by signal {-reply.status}" if reply.status < 0 else f"the program ended with exit status {reply.status}")
