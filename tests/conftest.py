"""What holds for every test: one thread per process, nothing left behind, and a budget per part.

Left behind means a name in /dev/shm that starts with the ring's prefix and that no live process maps, or a process that a test started and that still runs when
the session ends. Either fails the session, with its name. Budgets (tests/budget.toml) only report: machines differ, and a slow one is not a wrong one.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections import defaultdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; ranks and tests share the cores
os.environ["AREAL_HPC_TEST_SESSION"] = str(os.getpid())  # inherited by every process that a test starts

import hypothesis
import pytest

# `make test` decides whether a change lands: the same examples every time, and a busy machine is no failure. `make test-all` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("AREAL_HPC_HYPOTHESIS", "fixed"))

TESTS = Path(__file__).parent
SESSION_TOKEN = f"AREAL_HPC_TEST_SESSION={os.getpid()}"
SHM = Path("/dev/shm")
SHM_PREFIX = "areal_"
GRACE_S = 5.0
"""How long a process that is on its way out may take after the last test."""

_seconds_of_part: defaultdict[str, float] = defaultdict(float)
_names_before: set[str] = set()
_leaks: list[str] = []


def part_of(path: Path) -> str:
    """The budget that a test file draws from: its folder under tests/, or its own name without `test_`."""
    inside = path.relative_to(TESTS)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem.removeprefix("test_")


def budgets() -> dict[str, float]:
    """Seconds per part."""
    return tomllib.loads((TESTS / "budget.toml").read_text())["seconds"]


def pytest_sessionstart(session: pytest.Session) -> None:
    _names_before.update(_shm_names())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds_of_part[part_of(TESTS.parent / report.location[0])] += report.duration


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    stop_at = time.monotonic() + GRACE_S
    while (found := _leaked_names() + _orphans()) and time.monotonic() < stop_at:
        time.sleep(0.1)
    _leaks.extend(found)
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _leaks:
        terminalreporter.section("left behind", red=True, bold=True)
        for leak in _leaks:
            terminalreporter.line(leak, red=True)
    if sum(_seconds_of_part.values()) < 1:
        return
    terminalreporter.section("seconds per part (budget)")
    budget = budgets()
    for part, seconds in sorted(_seconds_of_part.items(), key=lambda item: -item[1]):
        over = seconds > budget.get(part, 0)
        terminalreporter.line(f"{part:12} {seconds:7.1f} ({budget.get(part, 0):g}){'  over budget' if over else ''}", yellow=over)
    total, total_budget = sum(_seconds_of_part.values()), sum(budget.values())
    terminalreporter.line(f"{'total':12} {total:7.1f} ({total_budget:g})", yellow=total > total_budget)


def _shm_names() -> set[str]:
    return {entry.name for entry in SHM.iterdir() if entry.name.startswith(SHM_PREFIX)} if SHM.is_dir() else set()


def _leaked_names() -> list[str]:
    """New names that no live process maps (a run beside this one may well have its own)."""
    new = _shm_names() - _names_before
    if not new:
        return []
    mapped = "\n".join(_read(process / "maps") for process in _processes())
    return [f"/dev/shm/{name}" for name in sorted(new) if f"/dev/shm/{name}" not in mapped]


def _orphans() -> list[str]:
    """Processes with our token in their environment; the helpers that multiprocessing keeps until this process ends are not counted."""
    found = []
    for process in _processes():
        command = _read(process / "cmdline").replace("\0", " ").strip()
        kept = "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
        if command and not kept and process.name != str(os.getpid()) and SESSION_TOKEN in _read(process / "environ").split("\0"):
            found.append(f"process {process.name}: {command[:120]}")
    return found


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(path: Path) -> str:
    """Content of a /proc file; empty when the process is gone, a zombie, or another user's."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
