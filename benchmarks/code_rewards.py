"""Programs graded per second of CPU time, at each level of isolation that this machine offers.

.venv/bin/python benchmarks/code_rewards.py      # about a minute; medians; the last line is one JSON object

Counted is the CPU time of the whole tree of processes, the grader included, so that other work on the machine changes little.
A trivial program reads two numbers and prints their sum.
"""

from __future__ import annotations

import json
import resource
import statistics
import time

from areal_hpc.observe.telemetry import hardware
from areal_hpc.reward.code import CallTests, CodeGrader, CodeOptions, ScriptTests, Tests
from areal_hpc.reward.sandbox import LEVELS, Sandbox, SandboxError, try_level

SCRIPT = "a, b = map(int, input().split())\nprint(a + b)"
FUNCTION = "def add(a, b):\n    return a + b"
ONE_SCRIPT = ScriptTests((("2 3\n", "5\n"),))
TWENTY_SCRIPTS = ScriptTests(tuple((f"{k} 3\n", f"{k + 3}\n") for k in range(20)))
TWENTY_CALLS = CallTests("add", tuple(((k, 3), (k + 3,)) for k in range(20)))
KINDS = {"trivial": (ONE_SCRIPT, SCRIPT), "twenty_scripts": (TWENTY_SCRIPTS, SCRIPT), "twenty_calls": (TWENTY_CALLS, FUNCTION)}


def used_cpu_s() -> float:
    """Of this process and of all that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cost(level: Sandbox, tests: Tests, program: str, num_programs: int) -> tuple[float, float]:
    """(CPU, wall-clock) seconds of a grader that grades so many programs, from its start to its end."""
    cpu_before_s, began_s = used_cpu_s(), time.perf_counter()
    with CodeGrader(CodeOptions(), level) as grader:
        rewards = [grader.grade(tests, program).graded.reward for _ in range(num_programs)]
    assert rewards == [1.0] * num_programs
    return used_cpu_s() - cpu_before_s, time.perf_counter() - began_s


def measure_code(rounds: int = 5, num_programs: int = 40) -> dict[str, dict[str, float]]:
    """{level: {kind: programs per core-second, kind_wall: programs per second}}, medians over `rounds`. Levels that this machine does not offer are left out.

    The start of a grader, which a run pays once, is measured beside it and subtracted.
    """
    found: dict[str, dict[str, float]] = {}
    for name in LEVELS:
        try:
            level = try_level(name)
        except SandboxError as error:
            print(f"{name:12} not offered: {error}")
            continue
        found[name] = {}
        for kind, (tests, program) in KINDS.items():
            rates = []
            for _ in range(rounds):
                start, all_of_them = cost(level, tests, program, 1), cost(level, tests, program, num_programs + 1)
                rates.append([num_programs / (total - once) for total, once in zip(all_of_them, start, strict=True)])
            found[name] |= dict(zip((kind, f"{kind}_wall"), map(statistics.median, zip(*rates, strict=True)), strict=True))
            print(f"{name:12} {kind:16} {found[name][kind]:8.1f} per core-second {found[name][f'{kind}_wall']:8.1f} per second")
    return found


if __name__ == "__main__":
    print(json.dumps({"programs_per_core_s": measure_code(), **hardware()}))
