"""Grading of programs: run them in the sandbox, compare what comes back here, outside.

    tests                      what the program's process gets        what decides, out here
    ScriptTests                standard input                         standard output, by the rule of LiveCodeBench (`same_output`)
    CallTests                  arguments, one call at a time          equality of canonical texts: exact types (areal_hpc.reward.plain)
    AssertTests that split     the same                               the same
    AssertTests otherwise      arguments, one call at a time          `check(candidate)` in a third process: lower trust (`Report.trust`)

An expected value never enters the process that runs the program. A call is bound to its answer by a nonce that is sent with the call; a line with another one,
or one that nobody asked for, is counted, and the program is hostile. The first test that fails ends it. What goes wrong on our side (`infra_error`, `gold_bad`) is no
reward, never a 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from areal_hpc.config import Reward
from areal_hpc.reward import asserts, plain
from areal_hpc.reward.sandbox import Host, Level, Limits, Reply, Sandbox, SandboxError, probe
from areal_hpc.reward.verdict import Graded, Outcome

MAX_PROGRAM_CHARS = 1 << 18
MAX_ATTEMPTS = 2
"""Times that a program is tried when the sandbox fails over it."""
TESTS_ARE_WRONG = frozenset({"NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NotPlainError"})
"""What `check(candidate)` raises by its own fault, or because it needs values that cannot cross."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOptions:
    """`reward.code_*` of the configuration, and the seed of the choice of tests."""

    sandbox: Literal["auto", "bubblewrap", "landlock", "seccomp", "limits"] = "auto"
    """Level of isolation; auto: the strongest that holds on this machine."""
    floor: Level = "seccomp"
    """Weakest level to run programs at; below it the run is refused."""
    cpu_s: float = 6.0
    """CPU seconds of one test, where the problem does not say. Wall-clock seconds are twice that and one more."""
    wall_s: float = 60.0
    """Wall-clock seconds of one program over all its tests."""
    memory_mib: int = 512
    """MiB of address space of one program beyond the interpreter's, where the problem does not say."""
    output_kib: int = 1024
    """KiB that a program may print in one test, or return from one call."""
    max_tests: int = 20
    """Tests of one problem that are run: a choice that depends on `seed` alone, the same for every answer."""
    seed: int = 0
    """Seed of that choice."""
    packages: tuple[str, ...] = ("numpy",)
    """Packages that programs may import, where they are installed, besides the standard library."""

    @classmethod
    def of(cls, reward: Reward) -> CodeOptions:
        """From the configuration."""
        names = {item.name: f"code_{item.name}" for item in dataclasses.fields(cls) if item.name != "seed"}
        return cls(**{name: getattr(reward, option) for name, option in names.items()})


@dataclass(frozen=True, slots=True)
class ScriptTests:
    """(standard input, expected standard output)"""

    cases: tuple[tuple[str, str], ...]
    cpu_s: float | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class CallTests:
    """(arguments, values of which any is right) of a function, or of a method of `Solution`."""

    function: str
    cases: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    tuples_as_lists: bool = True
    """The values come from JSON, which cannot say tuple."""
    cpu_s: float | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class AssertTests:
    """HumanEval: the answer goes on from `prompt`, or defines `entry_point` anew; `test` defines check(candidate)."""

    entry_point: str
    prompt: str
    test: str
    reference: str = ""
    """A right answer, for tests that compare with one by the function's name."""
    cpu_s: float | None = None
    memory_mib: int | None = None


Tests = ScriptTests | CallTests | AssertTests


@dataclass(frozen=True, slots=True)
class Report:
    """A verdict, and what the reports of a run count about it."""

    graded: Graded
    level: Level
    trust: Literal["values", "asserts"]
    """values: compared out here. asserts: by the data's own test, which takes True for 1."""
    num_tests: int
    num_passed: int
    signals: Counter[str] = field(compare=False)
    """Signs of cheating: early_exit, forged_line, not_plain, output_flood, thread_flood, left_processes."""
    cpu_s: float = 0.0
    wall_s: float = 0.0


# ---- tests as data sets bring them


def read_tests(value: Any) -> Tests:
    """From an object or its JSON text. Raises ValueError with the reason.

    {inputs, outputs, fn_name?, timeout?, memory?}            APPS, TACO, AReaL; seconds of CPU per test, MiB
    [{input, output, testtype or type, fn_name?}, ...]        LiveCodeBench, PrimeIntellect, Codeforces
    {entry_point, test, prompt?, canonical_solution?}         HumanEval
    """
    if isinstance(value, (str, bytes)):
        try:
            value = json.loads(value)
        except RecursionError as error:
            raise ValueError("tests are nested too deeply") from error
    if isinstance(value, list):
        return _from_list(value)
    if not isinstance(value, dict):
        raise ValueError(f"tests must be an object or a list, not {type(value).__name__}")
    if {"entry_point", "test"} <= value.keys():
        return _from_asserts(value)
    if {"inputs", "outputs"} <= value.keys():
        return _from_columns(value["inputs"], value["outputs"], value.get("fn_name") or "", *_limits_of(value))
    raise ValueError(f"tests have neither inputs and outputs nor entry_point and test, but {', '.join(map(str, value)) or 'nothing'}")


def _from_asserts(value: dict[str, Any]) -> AssertTests:
    entry_point, test, reference = value["entry_point"], value["test"], value.get("canonical_solution", "")
    if asserts.split(test) is None and not reference and re.search(rf"\b{re.escape(entry_point)}\b", test):
        raise ValueError(f"the test calls {entry_point} itself, which would compare an answer with itself, and there is no canonical_solution")
    return AssertTests(entry_point, value.get("prompt", ""), test, reference, *_limits_of(value))


def _limits_of(value: dict[str, Any]) -> tuple[float | None, int | None]:
    cpu_s, memory_mib = value.get("timeout"), value.get("memory")
    return (float(cpu_s) if cpu_s else None, int(memory_mib) if memory_mib else None)


def _from_list(rows: list[Any]) -> Tests:
    if not rows or not all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):
        raise ValueError("a list of tests must hold objects with input and output, at least one")
    function = next((str(row[key]) for row in rows for key in ("fn_name", "func_name") if row.get(key)), "")
    kinds = {str(row.get("testtype") or row.get("type") or "stdin") for row in rows}
    if kinds & {"functional", "function_call"} and not function:
        raise ValueError("function-call tests without fn_name")
    return _from_columns([row["input"] for row in rows], [row["output"] for row in rows], function)


def _from_columns(inputs: Any, outputs: Any, function: str, cpu_s: float | None = None, memory_mib: int | None = None) -> Tests:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("inputs and outputs must be lists of the same length, at least 1")
    if not function:
        cases = tuple((_lines(given), _lines(expected)) for given, expected in zip(inputs, outputs, strict=True))
        return ScriptTests(cases, cpu_s, memory_mib)
    calls = tuple((_arguments(given), _expected(expected)) for given, expected in zip(inputs, outputs, strict=True))
    return CallTests(function, calls, cpu_s=cpu_s, memory_mib=memory_mib)


def _lines(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"a test's input or output must be text, not {type(value).__name__}")
    return value


def _arguments(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):  # one JSON value per line
        return tuple(json.loads(line) for line in value.splitlines() if line.strip())
    if not isinstance(value, list):
        raise ValueError(f"a call's arguments must be a list, or one JSON value per line, not {type(value).__name__}")
    return tuple(value)


def _expected(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        try:
            return (json.loads(value),)
        except ValueError:
            return (value,)
    return (value, value[0]) if isinstance(value, list) and len(value) == 1 else (value,)  # TACO wraps some results in a list, others not


def choose(cases: Sequence[Any], max_tests: int, seed: int) -> list[Any]:
    """At most `max_tests` of them, in their order."""
    if len(cases) <= max_tests:
        return list(cases)
    return [cases[index] for index in sorted(random.Random(seed).sample(range(len(cases)), max_tests))]


# ---- the program in a text

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*\1`*[ \t]*$", re.MULTILINE | re.DOTALL)
_OPENING = re.compile(r"^[ \t]*(?:`{3}|~{3})", re.MULTILINE)


def extract_program(text: str) -> str | None:
    """The last closed block marked as Python, else the last closed one without a language, else the whole text if it has no blocks. None: no program."""
    _, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in rest:
        return None
    blocks = [(match[2].lower(), match[3]) for match in _FENCE.finditer(rest + "\n")]
    for languages in (("python", "py", "python3"), ("",)):
        matching = [program for language, program in blocks if language in languages]
        if matching:
            return matching[-1] if matching[-1].strip() else None
    return rest if rest.strip() and not _OPENING.search(rest) else None


_USUAL = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Mapping NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache partial reduce total_ordering wraps",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle dropwhile groupby islice pairwise permutations product repeat "
    "starmap takewhile zip_longest",
    "math": "atan2 ceil comb cos dist e exp factorial floor gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sin sqrt tan tau",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
}
_USUAL_MODULES: tuple[str, ...] = (
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "os",
)
_USUAL_MODULES += ("random", "re", "statistics", "string", "sys", "time")


def preamble(program: str) -> str:
    """Imports that judges of programming contests put before a solution, as far as its words occur."""
    words = set(re.findall(r"[A-Za-z_]\w*", program))
    lines = [f"import {module}" for module in _USUAL_MODULES if re.search(rf"\b{module}\.", program)]
    for module, names in _USUAL.items():
        if used := [name for name in names.split() if name in words and f"{name}." not in program]:
            lines.append(f"from {module} import {', '.join(used)}")
    return "\n".join(lines)


# ---- comparison of printed output

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)


def same_output(printed: str, expected: str) -> bool:
    """LiveCodeBench's rule: line by line without surrounding white space; a line that differs may still consist of equal numbers."""
    ours, theirs = _stripped_lines(printed), _stripped_lines(expected)
    return len(ours) == len(theirs) and all(a == b or _same_numbers(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or bool(_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b) and Decimal(a) == Decimal(b)) for a, b in zip(ours, theirs, strict=True)
    )


# ---- grading


class _Verdict(Exception):  # noqa: N818 (ends the grading of one program)
    def __init__(self, status: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class CodeGrader:
    """Grades one program after the other, in one process and on one thread.

    with CodeGrader(options) as grader: report = grader.grade(tests, answer)

    Trap: two graders on one machine are fine, one grader on two threads is not. Raises ConfigError at once when no allowed level of isolation holds.
    """

    def __init__(self, options: CodeOptions, sandbox: Sandbox | None = None) -> None:
        self.options = options
        self.sandbox = sandbox or probe(options.sandbox, options.floor, options.packages)
        self._hosts: dict[str, Host] = {}

    def close(self) -> None:
        for role in list(self._hosts):
            self._hosts.pop(role).close()

    def __enter__(self) -> CodeGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, tests: Tests, answer: str, truncated: bool = False) -> Report:
        """Never raises for anything a program or its tests do."""
        program = extract_program(answer)
        if program is None:
            return self._report(_Verdict(Outcome.TRUNCATED if truncated else Outcome.NO_ANSWER, ""), _Run(tests, "", self.options), None)
        for attempt in range(MAX_ATTEMPTS):
            run = _Run(tests, program, self.options)
            try:
                verdict = self._judge(run)
                self._end(run)
            except SandboxError as error:
                self.close()
                verdict = _Verdict(Outcome.INFRA_ERROR, str(error))
            if verdict.status is not Outcome.INFRA_ERROR or attempt + 1 == MAX_ATTEMPTS:
                break
        return self._report(verdict, run, program)

    def _end(self, run: _Run) -> None:
        """No program runs when this returns."""
        for host in self._hosts.values():
            if host.is_running:
                run.add(host.stop())
        if not self.sandbox.shares_host:
            self.close()

    def _report(self, verdict: _Verdict, run: _Run, program: str | None) -> Report:
        graded = Graded.of(verdict.status, program, verdict.reason)
        return Report(graded, self.sandbox.level, run.trust, run.num_tests, run.num_passed, run.signals, run.cpu_s, time.monotonic() - run.began_s)

    def _host(self, role: str) -> Host:
        if role not in self._hosts:
            self._hosts[role] = self.sandbox.host()
        return self._hosts[role]

    def _judge(self, run: _Run) -> _Verdict:
        """Raises SandboxError."""
        tests, num_chars = run.tests, len(run.program)
        try:
            if num_chars > MAX_PROGRAM_CHARS:
                raise _Verdict(Outcome.WRONG, f"the program has {num_chars} characters, of which {MAX_PROGRAM_CHARS} are allowed")
            if isinstance(tests, ScriptTests):
                self._judge_script(run, tests)
            elif isinstance(tests, CallTests):
                self._judge_calls(run, tests.function, tests.cases, run.program, preamble(run.program), tests.tuples_as_lists)
            else:
                self._judge_asserts(run, tests)
        except _Verdict as verdict:
            return verdict
        return _Verdict(Outcome.RIGHT, "")

    def _judge_script(self, run: _Run, tests: ScriptTests) -> None:
        host, before = self._host("program"), preamble(run.program)
        for given, expected in run.choose(tests.cases):
            request = {"mode": "script", "source": run.program, "preamble": before, "stdin": given.encode("utf-8", "surrogatepass")}
            reply = host.run(request, run.limits())
            run.ended(reply, self.sandbox.level)
            if reply.kind != "ended" or reply.status != 0:
                raise _Verdict(Outcome.WRONG, f"exit status {reply.status}: {_tail(reply)}")
            if not same_output(reply.first.decode("utf-8", "replace"), expected):
                raise _Verdict(Outcome.WRONG, "output differs")
            run.num_passed += 1

    def _judge_calls(self, run: _Run, function: str, cases: Sequence[Any], program: str, before: str, tuples_as_lists: bool) -> None:
        try:  # before the program runs: what cannot be compared is no test
            chosen = [(given, {plain.canonical_of(value, tuples_as_lists=tuples_as_lists) for value in right}) for given, right in run.choose(cases)]
            for given, _ in chosen:
                plain.tagged(given)
        except plain.NotPlainError as error:
            raise _Verdict(Outcome.GOLD_BAD, str(error)) from error
        caller = self._start_calls(run, program, before, function)
        for given, right in chosen:
            if caller(("arguments", given), tuples_as_lists) not in right:
                raise _Verdict(Outcome.WRONG, "a value differs")
            run.num_passed += 1

    def _start_calls(self, run: _Run, program: str, before: str, function: str) -> Callable[[tuple[str, Any], bool], str]:
        """Load the program; returns what calls its function: (kind of data, data) -> canonical text of the value."""
        host = self._host("program")
        nonce = secrets.token_hex(8)
        first = host.run({"mode": "calls", "source": program, "preamble": before, "function": function, "nonce": nonce}, run.limits())
        if run.value(first, nonce, self.sandbox.level) != "true":
            raise _Verdict(Outcome.WRONG, f"there is no function {function}")

        def call(data: tuple[str, Any], tuples_as_lists: bool = False) -> str:
            nonce = secrets.token_hex(8)
            return run.value(host.call(nonce, *data, run.limits()), nonce, self.sandbox.level, tuples_as_lists)

        return call

    def _judge_asserts(self, run: _Run, tests: AssertTests) -> None:
        program = complete(tests, run.program)
        try:
            cases = asserts.split(tests.test)
        except ValueError as error:
            raise _Verdict(Outcome.GOLD_BAD, str(error)) from error
        if cases is not None:
            self._judge_calls(run, tests.entry_point, [(given, (value,)) for given, value in cases], program, "", False)
            return
        run.trust, run.num_tests = "asserts", 1
        caller = self._start_calls(run, program, "", tests.entry_point)
        self._converse(run, tests, caller)
        run.num_passed = 1

    def _converse(self, run: _Run, tests: AssertTests, caller: Callable[[tuple[str, Any], bool], str]) -> None:
        """Pass calls of `check` on to the program, and values back, until `check` is through."""
        checker, nonce = self._host("check"), secrets.token_hex(8)
        raised_by_program: set[str] = set()
        reply = checker.run({"mode": "check", "source": f"{tests.prompt}{tests.reference}\n{tests.test}", "preamble": "", "nonce": nonce}, run.limits())
        while True:
            if reply.kind != "line":
                run.ended(reply, self.sandbox.level)
            if reply.kind != "line" or not reply.first.startswith(f"{nonce} ".encode()):
                raise _Verdict(Outcome.GOLD_BAD, f"the test ended with {reply.kind}: {_tail(reply)}")
            _, kind, text = reply.first.decode().split(" ", 2)
            if kind == "D":
                return
            if kind != "C":
                error = json.loads(text)
                if error in raised_by_program:  # most tests let it pass through
                    raise _Verdict(Outcome.WRONG, f"raised {error}")
                raise _Verdict(Outcome.GOLD_BAD if error in TESTS_ARE_WRONG else Outcome.WRONG, f"the test raised {error}")
            arguments = plain.canonical(text)
            try:
                answer = ("V", caller(("json", arguments), False))
            except _Raised as raised:
                raised_by_program.add(raised.name)
                answer = ("E", json.dumps(raised.name))
            nonce = secrets.token_hex(8)
            reply = checker.call(nonce, *answer, run.limits())


class _Raised(_Verdict):
    """A call that raised: for a test's own `check` a thing it may expect."""

    def __init__(self, name: str) -> None:
        super().__init__(Outcome.WRONG, f"raised {name}")
        self.name = name


class _Run:
    """One program on its way through its tests."""

    def __init__(self, tests: Tests, program: str, options: CodeOptions) -> None:
        self.tests, self.program, self._options = tests, program, options
        self.trust: Literal["values", "asserts"] = "values"
        self.num_tests = self.num_passed = 0
        self.signals: Counter[str] = Counter()
        self.cpu_s = 0.0
        self.began_s = time.monotonic()
        self._waited_s = 0.0

    def choose(self, cases: Sequence[Any]) -> list[Any]:
        chosen = choose(cases, self._options.max_tests, self._options.seed)
        self.num_tests = len(chosen)
        return chosen

    def limits(self) -> Limits:
        """Of the next test. Raises _Verdict when the program has had its time (seconds for which it waited for a core not counted)."""
        left_s = self._options.wall_s - (time.monotonic() - self.began_s - self._waited_s)
        if left_s <= 0:
            raise _Verdict(Outcome.TIMEOUT, f"used {self._options.wall_s} s over {self.num_passed} tests")
        cpu_s = self.tests.cpu_s or self._options.cpu_s
        memory_mib = self.tests.memory_mib or self._options.memory_mib
        return Limits(cpu_s=cpu_s, wall_s=min(2 * cpu_s + 1, left_s), memory_bytes=memory_mib << 20, output_bytes=self._options.output_kib << 10)

    def add(self, reply: Reply) -> None:
        """Count what a process has used and left."""
        self.cpu_s += reply.cpu_s
        self._waited_s += reply.waited_s
        if reply.num_left:
            self.signals["left_processes"] += reply.num_left

    def ended(self, reply: Reply, level: Level) -> None:
        """Count what the end of a process says. Raises _Verdict when it was not an end of its own."""
        self.add(reply)
        if reply.kind in ("cpu", "wall"):
            raise _Verdict(Outcome.TIMEOUT, f"{reply.kind} time: {reply.cpu_s:.2f} s of CPU, {reply.wall_s:.2f} s in all")
        if reply.kind == "starved":
            raise _Verdict(Outcome.INFRA_ERROR, f"got no core for {reply.waited_s:.1f} of {reply.wall_s:.1f} s")
        if reply.kind in ("output", "threads"):
            self.signals["output_flood" if reply.kind == "output" else "thread_flood"] += 1
            raise _Verdict(Outcome.WRONG, "too much output" if reply.kind == "output" else "too many threads")
        if reply.kind == "ended" and reply.status in (-9, -24):  # it cannot send signals: its limit of CPU seconds, or the kernel, out of memory
            if reply.cpu_s >= (self.tests.cpu_s or self._options.cpu_s):
                raise _Verdict(Outcome.TIMEOUT, f"{reply.cpu_s:.2f} s of CPU")
            if level != "limits":
                raise _Verdict(Outcome.INFRA_ERROR, "killed from outside")

    def value(self, reply: Reply, nonce: str, level: Level, tuples_as_lists: bool = False) -> str:
        """Canonical text of the value in an answer line. Raises _Verdict for anything else."""
        if reply.kind != "line":
            self.ended(reply, level)
            self.signals["early_exit"] += 1
            raise _Verdict(Outcome.WRONG, f"ended with status {reply.status} before it answered: {_tail(reply)}")
        parts = reply.first.split(b" ", 2)
        if reply.second or len(parts) != 3 or parts[0] != nonce.encode():
            self.signals["forged_line"] += 1
            raise _Verdict(Outcome.HOSTILE, "wrote to the channel of answers")
        try:
            if parts[1] == b"V":
                return plain.canonical(parts[2], tuples_as_lists=tuples_as_lists)
            name = str(json.loads(parts[2]))[:80]
        except (ValueError, RecursionError) as error:
            self.signals["forged_line"] += 1
            raise _Verdict(Outcome.HOSTILE, f"wrote to the channel of answers: {error}") from error
        if parts[1] == b"N":
            self.signals["not_plain"] += 1
            raise _Verdict(Outcome.WRONG, f"returned no plain value: {name}")
        if name in ("SystemExit", "KeyboardInterrupt"):
            self.signals["early_exit"] += 1
        raise _Raised(name)


def _tail(reply: Reply) -> str:
    """The last line of standard error, one line of at most 200 characters."""
    lines = reply.second.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def complete(tests: AssertTests, program: str) -> str:
    """The prompt and an answer to it as one program: the answer defines the function anew, or goes on where the prompt stops."""
    defines = re.search(rf"^(?:async\s+)?def\s+{re.escape(tests.entry_point)}\b|^{re.escape(tests.entry_point)}\s*=", program, re.MULTILINE)
    return f"{tests.prompt}\n\n{program}" if defines else tests.prompt + program


@functools.lru_cache(maxsize=4)
def _grader(options: CodeOptions) -> CodeGrader:
    return CodeGrader(options)


def grade_program(tests: Tests, answer: str, options: CodeOptions | None = None) -> Graded:
    """The verdict on the program in `answer`. Keeps one grader per set of options. Raises ConfigError when no allowed level of isolation holds."""
    return _grader(options or CodeOptions()).grade(tests, answer).graded
