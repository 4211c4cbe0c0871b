"""Isolation: hostile programs do no harm at any level, as root and as an ordinary user; and the harness that says so can see harm."""

import errno
import itertools
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.config import ConfigError
from areal_hpc.reward import sandbox, seccomp
from areal_hpc.reward.code import CodeGrader, CodeOptions, ScriptTests
from areal_hpc.reward.sandbox import LEVELS, Host, Limits, SandboxError, probe, try_level
from areal_hpc.reward.verdict import Outcome
from tests.reward.programs import load
from tests.reward.users import ROOT, UID, as_user, folder_of_user, missing

ISOLATED = LEVELS[:3]
QUICK = Limits(cpu_s=2.0, wall_s=20.0)
ECHO = ScriptTests((("2 3\n", "5\n"),))
HONEST = "a, b = map(int, input().split())\nprint(a + b)"


def offered(level):
    """The level, if this machine has it; else a visible skip."""
    try:
        return try_level(level, ("numpy",))
    except SandboxError as error:
        pytest.skip(f"{level}: {error}")


def script(source, **given):
    return {"mode": "script", "source": source, "preamble": "", **given}


# ---- hostile programs


def run_hostile(level, user, titles=()):
    """{title: what happened}, from a process of its own that runs as `user` ("current" or "ordinary")."""
    if user == "ordinary" and (reason := missing()):
        pytest.skip(reason)
    offered(level)
    ordinary = user == "ordinary"
    with folder_of_user(UID if ordinary else os.getuid()) as folder:
        command = [sys.executable, str(ROOT / "tests/reward/hostile_worker.py"), level, str(folder), *titles]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(as_user(command) if ordinary else command, env=environment, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("level", "user"),
    [
        ("bubblewrap", "current"),
        ("landlock", "ordinary"),
        pytest.param("bubblewrap", "ordinary", marks=pytest.mark.slow),
        pytest.param("landlock", "current", marks=pytest.mark.slow),
        pytest.param("seccomp", "current", marks=pytest.mark.slow),
        pytest.param("seccomp", "ordinary", marks=pytest.mark.slow),
    ],
)
def test_hostile_programs_do_no_harm(level, user):
    found = run_hostile(level, user)
    assert found.keys() == load("hostile").keys()
    assert {title: result["harm"] for title, result in found.items() if result["harm"]} == {}
    assert {title: result for title, result in found.items() if result["reward"] != 0.0 and "got no core" not in result["reason"]} == {}


def test_the_harness_sees_harm():
    """Without isolation, the same programs are caught in the act."""
    expected = {"read a secret": "a secret", "network": "a connection", "abstract socket": "a connection", "a subprocess": "changed", "double fork": "changed"}
    found = run_hostile("limits", "current", titles=[*expected])
    late = found.pop("after all", {"harm": []})["harm"]
    missed = [title for title, harm in expected.items() if not any(line.startswith(harm) for line in [*found[title]["harm"], *late])]
    assert missed in ([], ["double fork"])  # the daemon is killed before it writes, also at this level
    assert not any("processes" in line for result in found.values() for line in result["harm"])


# ---- levels


@pytest.mark.parametrize("level", ISOLATED)
def test_a_level_that_holds_says_what_it_is(level):
    tried = offered(level)
    assert tried.level == level and tried.description.startswith(f"{level}: ") and "\n" not in tried.description


def test_the_strongest_level_is_chosen():
    holding = []
    for level in ISOLATED:
        try:
            holding.append(try_level(level).level)
        except SandboxError:
            continue
    assert probe().level == holding[0]


@pytest.fixture
def fresh_setup():
    """For tests that change what a set-up is made of."""
    caches = (sandbox._filter, sandbox._setup, sandbox._bubblewrap_command)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_trial_program_finds_what_a_level_lets_through(monkeypatch, fresh_setup):
    monkeypatch.setattr(sandbox, "_filter", lambda level: (b"", "none"))
    with pytest.raises(SandboxError, match=r"a program could start a process,.*open a socket"):
        try_level("landlock" if sandbox.landlock_abi() else "seccomp")


def test_without_landlock_and_namespaces_the_rest_is_used(monkeypatch, fresh_setup):
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "bubblewrap_path", lambda: None)
    found = probe()
    assert found.level == "seccomp" and set(found.refused) == {"bubblewrap", "landlock"}
    with pytest.raises(ConfigError, match=r"no sandbox at level landlock or above.*bubblewrap: no bubblewrap.*landlock: the kernel has no Landlock"):
        probe(floor="landlock")


def test_below_the_floor_is_refused():
    with pytest.raises(ConfigError, match=r"reward.code_sandbox=limits is weaker than reward.code_floor=seccomp; choose one of bubblewrap, landlock, seccomp"):
        probe("limits")
    assert "NOT ISOLATED" in probe("limits", floor="limits").description


# ---- the host


@pytest.fixture(params=ISOLATED)
def host(request):
    with offered(request.param).host() as opened:
        yield opened


def test_a_program_sees_no_variables_of_its_grader(host, monkeypatch):
    reply = host.run(script("import os\nprint(sorted(os.environ))"), QUICK)
    names = set(eval(reply.first))
    assert reply.status == 0 and not any(name.startswith(("SLURM", "PMI", "OMPI", "AREAL")) for name in names) and "PATH" not in names


def test_limits_end_a_program(host):
    endless = host.run(script("while True: pass"), Limits(cpu_s=0.2, wall_s=20.0))
    assert endless.kind == "cpu" and 0.2 <= endless.cpu_s < 2
    assert host.run(script("import time; time.sleep(1000)"), Limits(cpu_s=5.0, wall_s=0.2)).kind == "wall"
    assert host.run(script("print('x' * 300000)"), Limits(output_bytes=100_000)).kind == "output"
    greedy = host.run(script("x = bytearray(200 << 20)"), Limits(memory_bytes=100 << 20))
    assert (greedy.kind, greedy.status) == ("ended", 1) and greedy.second.startswith(b"MemoryError")
    modest = host.run(script("x = bytearray(50 << 20); print(len(x))"), Limits(memory_bytes=100 << 20))
    assert (modest.kind, modest.status, modest.first) == ("ended", 0, b"%d\n" % (50 << 20))


def test_large_input_and_output(host):
    reply = host.run(script("import sys; print(sys.stdin.read()[::-1])", stdin=b"ab" * 400_000), QUICK)
    assert reply.first == b"ba" * 400_000 + b"\n"
    assert host.run(script("print('ready')", stdin=b"x" * 5_000_000), QUICK).first == b"ready\n"  # it reads nothing


def test_every_run_starts_afresh(host):
    host.run(script("import builtins, math, sys; builtins.print = None; math.pi = 3; sys.setrecursionlimit(50)"), QUICK)
    assert host.run(script("import math; print(math.pi)"), QUICK).first.startswith(b"3.14159")


def test_a_child_that_cannot_be_locked_in_runs_nothing(monkeypatch, fresh_setup):
    monkeypatch.setattr(sandbox, "_filter", lambda level: (b"\x00" * 8, "broken"))
    with Host("landlock" if sandbox.landlock_abi() else "seccomp") as broken, pytest.raises(SandboxError, match=r"could not be locked in"):
        broken.run(script("print('ran')"), QUICK)


def test_a_host_that_dies_is_replaced_and_nothing_is_lost():
    with CodeGrader(CodeOptions()) as grader:
        shared = CodeGrader(CodeOptions(), offered("landlock")) if not grader.sandbox.shares_host else grader
        assert shared.grade(ECHO, HONEST).graded.reward == 1.0
        os.kill(shared._hosts["program"].pid, signal.SIGKILL)
        assert shared.grade(ECHO, HONEST).graded.reward == 1.0
        shared.close()


def test_a_sandbox_that_fails_is_no_zero(monkeypatch):
    with CodeGrader(CodeOptions(), offered("landlock")) as grader:

        def fail(self, *arguments):
            raise SandboxError("out of order")

        monkeypatch.setattr(Host, "run", fail)
        report = grader.grade(ECHO, HONEST)
    assert (report.graded.status, report.graded.reward, report.graded.reason) == (Outcome.INFRA_ERROR, None, "out of order")


@pytest.mark.parametrize("level", ISOLATED)
def test_hosts_die_with_the_grader(level):
    """The process that grades is killed while a program runs: neither host nor program survives."""
    offered(level)
    source = (
        "import os, sys\nfrom areal_hpc.reward.sandbox import *\n"
        f"host = Host({level!r})\nprint(host.pid, flush=True)\n"
        "host.run({'mode': 'script', 'source': 'import time; time.sleep(1000)', 'preamble': ''}, Limits(wall_s=1000.0))\n"
    )
    grader = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    host = int(grader.stdout.readline())
    family = {host}
    stop_s = time.monotonic() + 20
    while len(family) < (4 if level == "bubblewrap" else 2) and time.monotonic() < stop_s:
        family |= {child for parent in family for child in children(parent)}
        time.sleep(0.02)
    assert len(family) >= 2
    grader.kill()
    grader.wait()
    grader.stdout.close()
    while (alive := {pid for pid in family if is_running(pid)}) and time.monotonic() < stop_s:
        time.sleep(0.02)
    assert alive == set()


def children(pid):
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def is_running(pid):
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- the filter


def simulate(code, number, arguments, architecture):
    """What a classic BPF program returns for a system call: an interpreter of the six instructions that filters use."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *arguments)
    program = [struct.unpack_from("<HBBI", code, 8 * k) for k in range(len(code) // 8)]
    position = accumulator = 0
    while True:
        operation, if_true, if_false, constant = program[position]
        position += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, constant)[0]
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            position += constant
        elif operation == 0x06:
            return constant
        else:
            holds = {0x15: accumulator == constant, 0x25: accumulator > constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}[operation]
            position += if_true if holds else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000


@pytest.mark.parametrize("may_open", [True, False])
@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_own_filter_allows_what_is_listed_and_nothing_else(machine, may_open):
    architecture, numbers = seccomp.ARCHITECTURES[machine]
    code = seccomp.assemble(may_open, machine)
    names = {number: name for name, number in numbers.items()}
    for number in range(600):
        name = names.get(number)
        if name in seccomp.CONDITIONAL:
            continue
        expected = ALLOW if name in seccomp.allowed(may_open) else ENOSYS if name in seccomp.NOT_THERE else EPERM
        assert simulate(code, number, [0] * 6, architecture) == expected, name or number
    assert simulate(code, numbers["read"], [0] * 6, architecture ^ 1) == KILL
    if machine == "x86_64":
        assert simulate(code, numbers["read"] | 0x40000000, [0] * 6, architecture) == KILL
    thread, process = [0x3D0F00, 0, 0, 0, 0, 0], [0x01200011, 0, 0, 0, 0, 0]
    assert simulate(code, numbers["clone"], thread, architecture) == ALLOW
    assert simulate(code, numbers["clone"], process, architecture) == EPERM
    assert simulate(code, numbers["clone"], [0x3D0F00 | 0x10000000, 0, 0, 0, 0, 0], architecture) == EPERM
    assert simulate(code, numbers["fcntl"], [5, 3, 0, 0, 0, 0], architecture) == ALLOW
    assert simulate(code, numbers["fcntl"], [5, 8, 0, 0, 0, 0], architecture) == EPERM  # F_SETOWN
    assert simulate(code, numbers["fcntl"], [5, 1 << 32 | 3, 0, 0, 0, 0], architecture) == EPERM
    assert simulate(code, numbers["sendto"], [5, 0, 0, 0, 1 << 40, 16], architecture) == EPERM
    assert simulate(code, numbers["prlimit64"], [0, 3, 0, 0, 0, 0], architecture) == ALLOW
    assert simulate(code, numbers["prlimit64"], [1, 3, 0, 0, 0, 0], architecture) == EPERM


@pytest.mark.parametrize("may_open", [True, False])
def test_libseccomp_builds_the_same_filter(may_open):
    code, builder = seccomp.build(may_open)
    if builder != "libseccomp":
        pytest.skip("no libseccomp")
    machine = platform.machine()
    architecture, numbers = seccomp.ARCHITECTURES[machine]
    own = seccomp.assemble(may_open, machine)
    words = (0, 1, 2, 3, 4, 8, 15, 17, 1030, 0x5401, 0x5412, 0x5421, 0x3D0F00, 0x01200011, 0x50F00, 0x10050F00, 1 << 32, (1 << 32) + 1, (1 << 64) - 1)
    for number in range(600):
        samples = itertools.product(words, words[:5]) if number in {numbers[name] for name in seccomp.CONDITIONAL} else [(0, 0)]
        for first, second in samples:
            for arguments in ([first, second, 0, 0, 0, 0], [0, second, 0, 0, first, 0], [second, first, 0, 0, 0, 0]):
                assert simulate(code, number, arguments, architecture) == simulate(own, number, arguments, architecture), (number, arguments)


def test_own_filter_serves_without_libseccomp(monkeypatch, fresh_setup):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    assert "own assembler" in offered("landlock").description
