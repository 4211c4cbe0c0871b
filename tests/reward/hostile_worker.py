"""Runs the hostile programs at one level of isolation, as the user it is started as, and looks for harm after each one.

    python tests/reward/hostile_worker.py LEVEL FOLDER [TITLE ...]       # the last line is a JSON object {title: {status, reward, seconds, harm}}

FOLDER is an empty folder that this user may write to. A process of its own, because harm could reach the process that grades.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import sysconfig
import time
from pathlib import Path

from areal_hpc.reward import sandbox
from areal_hpc.reward.code import CodeGrader, CodeOptions, ScriptTests
from areal_hpc.reward.sandbox import Host, Limits, Reply, try_level
from tests.reward.programs import load

TESTS = ScriptTests((("2 3\n", "5\n"),))
HONEST = "a, b = map(int, input().split())\nprint(a + b)"
SHORT = CodeOptions(cpu_s=0.15, wall_s=0.8)
"""For the hostile ones; the honest one after each of them has the default limits."""
LONGEST_S = 25.0
"""Far above what the limits allow, for machines that are busy with other things."""
KEY = 0x70C3
"""Of the System V objects that a program tries to make."""
seen: list[Reply] = []


class WatchedHost(Host):
    def run(self, request: dict, limits: Limits) -> Reply:
        seen.append(super().run(request, limits))
        return seen[-1]


def children(pid: int) -> set[int]:
    """Live children of a process, its zombies included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


class Surroundings:
    """What a program could harm: a secret, a folder, listeners, shared memory, this process and its children."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token
        self.secret = folder / "secret"
        self.secret.mkdir()
        self.secret /= "key"
        self.secret.write_text(f"{token}-secret")
        self.secret.chmod(0o600)
        self.open_folder = folder / "open"
        self.open_folder.mkdir()
        tcp = socket.socket()
        tcp.bind(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        udp = socket.socket(type=socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", self.port))
        stream, datagram, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
        stream.bind(f"\0{token}")
        datagram.bind(f"\0{token}-datagram")
        named.bind(str(self.open_folder / "socket"))
        for listener in (tcp, stream, named):
            listener.listen()
        self.listeners = [tcp, udp, stream, datagram, named]
        self._before = self._state()

    def fill(self, program: str) -> str:
        values = {
            "FOLDER": str(self.open_folder),
            "SECRET": str(self.secret),
            "PORT": self.port,
            "PARENT": os.getpid(),
            "PACKAGES": sysconfig.get_path("purelib"),
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        return lines + program.replace("TOKEN", self.token)

    def _state(self) -> tuple:
        found = self.secret.stat()
        return self.secret.read_text(), found.st_mode, found.st_mtime, found.st_nlink, os.listxattr(self.secret), sorted(self.open_folder.iterdir())

    def harm(self, hosts: set[int]) -> list[str]:
        found = []
        if self._state() != self._before:
            found.append(f"changed: {self._state()}")
        if select.select(self.listeners, [], [], 0)[0]:
            found.append("a connection")
        for folder in ("/dev/shm", "/tmp", "/var/tmp", "/", "/run", os.path.expanduser("~")):
            if os.access(folder, os.R_OK):
                found += [f"{folder}/{name}" for name in os.listdir(folder) if self.token in name]
        for kind in ("shm", "msg", "sem"):
            rows = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            found += [f"System V {kind}: {row}" for row in rows if row.split()[0] == str(KEY)]
        if strangers := children(os.getpid()) - hosts:
            found.append(f"processes of the grader: {strangers}")
        for host in hosts:
            if strangers := children(host):
                found.append(f"processes of the host: {strangers}")
        if any(f"{self.token}-secret".encode() in reply.first + reply.second for reply in seen):
            found.append("a secret was read, or something worked that must not")
        return found


def main(level: str, folder: str, titles: list[str]) -> None:
    surroundings = Surroundings(Path(folder), f"tok{os.urandom(6).hex()}")
    os.environ["PASSWORD"] = f"{surroundings.token}-secret"
    sandbox.Host = WatchedHost  # type: ignore[misc]
    tried = try_level(level, ("numpy",))  # type: ignore[arg-type]
    programs = load("hostile")
    found = {}
    with CodeGrader(CodeOptions(), tried) as grader:
        for number, title in enumerate(titles or programs):
            seen.clear()
            began_s = time.monotonic()
            grader.options = SHORT
            report = grader.grade(TESTS, surroundings.fill(programs[title]))
            grader.options = CodeOptions()
            seconds = time.monotonic() - began_s
            hosts = {host.pid for host in grader._hosts.values()}
            harm = surroundings.harm(hosts)
            if seconds > LONGEST_S:
                harm.append(f"took {seconds:.1f} s")
            seen.clear()
            next_shares_something = tried.shares_host or number % 8 == 0
            if next_shares_something and grader.grade(TESTS, HONEST).graded.reward != 1.0:
                harm.append("the next program was not graded")
            found[title] = {"status": report.graded.status, "reward": report.graded.reward, "seconds": seconds, "harm": harm, "reason": report.graded.reason}
    time.sleep(1.2)  # what a daemon would wait before it does something
    if late := surroundings.harm(set()):
        found["after all"] = {"harm": late, "reward": None}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
