"""The small process that runs programs, one after the other, each in a fork that is locked down before it sees the program.

consumes        requests of areal_hpc.reward.sandbox over a socket: a program to run, arguments to call it with. Never an expected value.
produces        what came back: output, answer lines, how the child ended. The host itself never runs a program and never interprets what one wrote.
waits for       the child's pipes, its end, its limits
unblocked by    any of them; the host dies with the process that started it, and every child with the host

This file is sent as code to a bare interpreter (see `sandbox.Host`), so that it needs no file where it runs, and imports little, because in a fresh namespace that
is most of what a start costs. It uses nothing of this package. The order in `lock_down` matters: each step may need what the next one takes away.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself builds enums at import, which takes half as long as the start of an interpreter
import ctypes
import errno
import gc
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # as of `typing`, which takes longer to import than an interpreter to start
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RIGHTS = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""File rights that exist, by ABI: the last holds for all later ones (linux/landlock.h)."""
RIGHTS = {"file": 4, "folder": 4 | 8, "list": 8, "device": 4 | 2}
"""READ_FILE 4, READ_DIR 8, WRITE_FILE 2. "folder": what is in it may be read; "list": only the names in it."""
LEAVE = os._exit
MAX_THREADS = 64
MAX_DEPTH = 60
STDERR_TAIL_BYTES = 2000
STACK_BYTES = 64 << 20
MAX_FILES = 64
TICK_S = 0.02
MAX_TICK_S = 0.1


# ---- messages: a length in 8 bytes, then marshal towards the program, plain text and bytes away from it


def read_exactly(fd: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.read(fd, min(num_bytes, 1 << 20))
        if not part:
            os._exit(0)  # the other side is gone
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def receive(fd: int) -> Any:
    """Only for what comes from the grading side: marshal must never see what a program wrote."""
    return marshal.loads(read_exactly(fd, int.from_bytes(read_exactly(fd, 8), "little")))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def reply(fd: int, kind: str, numbers: tuple[int, ...] = (), first: bytes = b"", second: bytes = b"") -> None:
    header = f"{kind} {' '.join(map(str, numbers))} {len(first)} {len(second)}\n".encode()
    write_all(fd, b"%4d" % len(header) + header + first + second)


# ---- confinement


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int, pointer: Any = 0) -> None:
    word = ctypes.c_ulong
    checked(LIBC.prctl(option, word(argument), pointer if pointer else word(0), word(0), word(0)), f"prctl {option}")


def syscall(*arguments: Any) -> int:
    return int(LIBC.syscall(*(argument if isinstance(argument, bytes) or argument is None else ctypes.c_long(argument) for argument in arguments)))


def landlock_ruleset(rules: list[tuple[str, str]]) -> int:
    """Descriptor of a rule set that refuses every file access but these, and, where the kernel can, TCP, signals and abstract sockets.

    Paths that do not exist are skipped.
    """
    abi = checked(syscall(LANDLOCK_CREATE_RULESET, None, 0, 1), "landlock")
    rights = LANDLOCK_RIGHTS[min(abi, len(LANDLOCK_RIGHTS) - 1)]
    attributes = rights.to_bytes(8, "little")
    attributes += (3).to_bytes(8, "little") if abi >= 4 else b""
    attributes += (3).to_bytes(8, "little") if abi >= 6 else b""
    ruleset = checked(syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    for path, kind in rules:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # most systems lack some of the folders
        beneath = RIGHTS[kind].to_bytes(8, "little") + parent.to_bytes(4, "little")
        checked(syscall(LANDLOCK_ADD_RULE, ruleset, 1, beneath, 0), f"landlock_add_rule {path}")
        os.close(parent)
    return ruleset


class FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def lock_down(setup: dict[str, Any], ruleset: int | None, limits: dict[str, int], keep: tuple[int, ...]) -> None:
    """For good: what a program runs under. Raises OSError if any step fails."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["address_bytes"]),
    ):
        hard = resource.getrlimit(kind)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bounded, bounded))
    stack_hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES if stack_hard == resource.RLIM_INFINITY else min(STACK_BYTES, stack_hard), stack_hard))
    prctl(PR_SET_DUMPABLE, 0)  # nobody of the same user can trace it or read its memory
    header, nothing = (0x20080522).to_bytes(4, "little") + bytes(4), bytes(24)
    checked(LIBC.capset(header, nothing), "capset")  # also where root runs this
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if ruleset is not None:
        checked(syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    previous = 2
    for fd in sorted((*keep, 1 << 16)):
        os.closerange(previous + 1, fd)
        previous = fd
    if setup["filter"]:
        program = FilterProgram(len(setup["filter"]) // 8, setup["filter"])
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


# ---- in the child, before and around the program


class NotPlainError(TypeError):
    """A value that is not None, bool, int, float, str, or a list, tuple, set or dict of such; or too large, or too deep."""


def encode(value: Any, room: list[int], depth: int = 0) -> str:
    """JSON in which each type has its own form (areal_hpc.reward.plain reads it). `room`: characters that are left. Raises NotPlainError."""
    kind = type(value)
    if value is None or kind is bool:
        text = "null" if value is None else "true" if value else "false"
    elif kind is str:
        if len(value) > room[0]:
            raise NotPlainError("too large")
        text = escape(value)
    elif kind is int:
        if value.bit_length() > 4 * room[0]:
            raise NotPlainError("too large")
        text = f'["i","{value:x}"]'
    elif kind is float:
        text = f'["f","{value.hex()}"]'
    elif depth >= MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    elif kind is list or kind is tuple or kind is set:
        text = f'["{kind.__name__[0]}"{"".join(["," + encode(item, room, depth + 1) for item in value])}]'
    elif kind is dict or (kind.__module__ == "collections" and kind.__name__ in ("Counter", "defaultdict", "OrderedDict")):
        text = f'["d"{"".join(["," + encode(item, room, depth + 1) for pair in value.items() for item in pair])}]'
    else:
        raise NotPlainError(f"{kind.__name__}"[:80])
    room[0] -= len(text) if depth == 0 or text[0] != "[" or text[1:3] in ('"i', '"f') else 8
    if room[0] < 0:
        raise NotPlainError("too large")
    return text


def escape(text: str) -> str:
    from _json import encode_basestring_ascii

    return encode_basestring_ascii(text)


def decode(value: Any) -> Any:
    """The inverse of `encode`, after JSON."""
    if not isinstance(value, list):
        return value
    tag, *items = value
    if tag == "i":
        return int(items[0], 16)
    if tag == "f":
        return float.fromhex(items[0])
    items = [decode(item) for item in items]
    if tag == "d":
        return dict(zip(items[::2], items[1::2], strict=True))
    return {"l": list, "t": tuple, "s": set}[tag](items)


class Conversation:
    """The child's side of calls: requests come in, one line goes out for each."""

    def __init__(self, requests: int, answers: int, nonce: str, max_bytes: int) -> None:
        self._requests, self._answers, self._nonce, self._max_bytes = requests, answers, nonce, max_bytes

    def next(self) -> tuple[str, Any]:
        self._nonce, kind, data = receive(self._requests)
        return kind, data

    def value(self, value: Any) -> None:
        try:
            self._line("V", encode(value, [self._max_bytes]))
        except (NotPlainError, RecursionError) as error:
            self._line("N", escape(str(error)))

    def error(self, error: BaseException) -> None:
        self._line("E", escape(type(error).__name__[:80]))

    def call(self, arguments: tuple[Any, ...]) -> Any:
        """The checking side: ask for a call of the candidate, which runs in another process."""
        self._line("C", encode(arguments, [self._max_bytes]))
        kind, data = self.next()
        import json

        if kind == "E":
            import builtins

            found = getattr(builtins, json.loads(data), None)
            raise found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError("the candidate raised")
        return decode(json.loads(data))

    def done(self) -> None:
        self._line("D", "null")

    def _line(self, kind: str, text: str) -> None:
        write_all(self._answers, f"{self._nonce} {kind} {text}\n".encode())


def fresh_module(name: str) -> ModuleType:
    module = type(sys)(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module  # dataclasses and typing look their module up
    return module


def execute(source: str, namespace: dict[str, Any], preamble: str) -> None:
    if preamble:
        exec(compile(preamble, "<preamble>", "exec", dont_inherit=True), namespace)
    exec(compile(source, "<program>", "exec", dont_inherit=True), namespace)


def run_script(request: dict[str, Any]) -> None:
    """As `python program.py` would: the same standard streams, exit status, threads that are waited for, and functions called at exit."""
    sys.argv = ["program.py"]
    status = 0
    try:
        try:
            execute(request["source"], fresh_module("__main__").__dict__, request["preamble"])
        finally:
            if "threading" in sys.modules:
                sys.modules["threading"]._shutdown()
            if "atexit" in sys.modules:
                sys.modules["atexit"]._run_exitfuncs()
    except SystemExit as leaving:
        status = exit_status(leaving.code)
    except BaseException as error:  # noqa: BLE001 (whatever the program raises)
        status = 1
        complain(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:  # noqa: SIM105 (contextlib takes longer to import than an interpreter to start)
                stream.flush()
            except BaseException:  # noqa: BLE001, S110 (the program may have closed or replaced it)
                pass
        LEAVE(status)


def exit_status(code: Any) -> int:
    if code is None:
        return 0
    return code & 0xFF if type(code) is int else 1


def complain(error: BaseException) -> None:
    try:  # noqa: SIM105
        os.write(2, f"{type(error).__name__}: {str(error)[:500]}".encode(errors="replace"))
    except BaseException:  # noqa: BLE001, S110 (its own __str__ may raise anything)
        pass


def answer_calls(request: dict[str, Any], conversation: Conversation) -> None:
    """Load the program, say so, then call its function as often as asked. A class `Solution` is made anew for each call."""
    namespace = fresh_module("program").__dict__
    try:
        execute(request["source"], namespace, request["preamble"])
        name = request["function"]
        owner = namespace.get("Solution")
        method = name not in namespace and isinstance(owner, type) and hasattr(owner, name)
        conversation.value(bool(method or callable(namespace.get(name))))
    except BaseException as error:  # noqa: BLE001
        complain(error)
        conversation.error(error)
    while True:
        kind, data = conversation.next()
        try:
            if kind == "json":
                import json

                data = decode(json.loads(data))
            conversation.value((getattr(owner(), name) if method else namespace[name])(*data))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001
            complain(error)
            conversation.error(error)


def check(request: dict[str, Any], conversation: Conversation) -> None:
    """Run the data's own `check(candidate)`, where `candidate` is a call into the other process. No text of a model gets here, only plain values."""
    namespace = fresh_module("check").__dict__
    try:
        execute(request["source"], namespace, request["preamble"])
        namespace["check"](lambda *arguments: conversation.call(arguments))
        conversation.done()
    except BaseException as error:  # noqa: BLE001
        complain(error)
        conversation.error(error)
    LEAVE(0)


def child(setup: dict[str, Any], ruleset: int | None, request: dict[str, Any], pipes: dict[str, int]) -> NoReturn:
    """Never returns. Writes one byte to `locked` once nothing can escape any more; without it the host knows that no program ran."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in request["modules"]:
            try:
                __import__(name)
            except ImportError:
                continue  # the program will find out
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(pipes[name], number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the program's, until the end)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        limits = {"cpu_s": request["cpu_s"], "address_bytes": setup["own_bytes"] + request["memory_bytes"]}
        lock_down(setup, ruleset, limits, (pipes["requests"], pipes["answers"], pipes["locked"]))
        os.write(pipes["locked"], b"!")
        os.close(pipes["locked"])
    except BaseException as error:  # noqa: BLE001
        complain(error)
        os._exit(1)
    try:
        run_mode(request, pipes)
    finally:
        while True:  # whatever a program replaced or raised: the host's own code goes on nowhere but in the host
            LEAVE(1)


def run_mode(request: dict[str, Any], pipes: dict[str, int]) -> None:
    mode = request["mode"]
    if mode == "script":
        os.close(pipes["requests"])
        os.close(pipes["answers"])
        run_script(request)
    conversation = Conversation(pipes["requests"], pipes["answers"], request["nonce"], request["output_bytes"])
    if mode == "check":
        check(request, conversation)
    answer_calls(request, conversation)


# ---- in the host


class Child:
    """A running program, seen from outside."""

    def __init__(self, setup: dict[str, Any], ruleset: int | None, request: dict[str, Any], peer: int, woken: int) -> None:
        self._peer, self._woken = peer, woken
        self._output_bytes = request["output_bytes"]
        ends = {name: os.pipe() for name in ("stdin", "requests", "stdout", "stderr", "answers", "locked")}
        inside = {name: pair[0] if name in ("stdin", "requests") else pair[1] for name, pair in ends.items()}
        self._fds = {name: pair[1] if name in ("stdin", "requests") else pair[0] for name, pair in ends.items()}
        self._began_s = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            child(setup, ruleset, request, inside)
        for fd in inside.values():
            os.close(fd)
        for name, fd in self._fds.items():
            if name != "locked":
                os.set_blocking(fd, False)
        self._pending = {"stdin": memoryview(request["stdin"]), "requests": memoryview(b"")}
        self._received = {"stdout": bytearray(), "stderr": bytearray(), "answers": bytearray()}
        self._num_discarded = 0
        self._hung_up = False
        if not self._pending["stdin"]:
            self._close("stdin")

    def ask(self, payload: bytes) -> bytes:
        """Queue a request. Returns what the program had written without being asked."""
        for _ in range(8):
            if not self._read("answers"):
                break
        stale = bytes(self._received["answers"])
        self._received["answers"].clear()
        self._pending["requests"] = memoryview(payload)
        return stale

    def watch(self, cpu_s: float, wall_s: float, for_line: bool) -> str:
        """Until it ends ("ended"), an answer line is complete ("line"), or a limit is passed ("cpu", "wall", "starved", "output", "threads", "abandoned")."""
        began_s = time.monotonic()
        cpu_before_s, _ = self._usage()
        waited_before_s = self._waited_s()
        tick_s = TICK_S
        while True:
            if self._has_ended:
                for name in ("stdout", "stderr", "answers"):
                    while self._read(name):
                        pass
                return "line" if for_line and b"\n" in self._received["answers"] else "ended"  # its last words come first
            self._exchange(max(0.0, min(tick_s, began_s + wall_s - time.monotonic())))
            if for_line and b"\n" in self._received["answers"]:
                return "line"
            received = sum(map(len, self._received.values())) + self._num_discarded
            if received > self._output_bytes + (1 << 16):
                return "output"
            if self._hung_up:
                return "abandoned"
            now_s = time.monotonic()
            if now_s - began_s < tick_s:
                continue
            tick_s = tick_s if now_s - began_s < MAX_TICK_S else MAX_TICK_S
            used_s, num_threads = self._usage()
            if used_s - cpu_before_s > cpu_s:
                return "cpu"
            if num_threads > MAX_THREADS:
                return "threads"
            if now_s - began_s >= wall_s:
                return "starved" if self._waited_s() - waited_before_s > 0.5 * wall_s else "wall"

    def _exchange(self, timeout_s: float) -> None:
        poller = select.poll()
        for name in self._received:
            if name in self._fds:
                poller.register(self._fds[name], select.POLLIN)
        for name, data in self._pending.items():
            if data and name in self._fds:
                poller.register(self._fds[name], select.POLLOUT)
        poller.register(self._woken, select.POLLIN)
        poller.register(self._peer, 0)
        ready = dict(poller.poll(timeout_s * 1000))
        self._hung_up = self._peer in ready
        if self._woken in ready:
            os.read(self._woken, 4096)
        for name in ("stdout", "stderr", "answers"):
            if self._fds.get(name) in ready:
                self._read(name)
        for name in ("stdin", "requests"):
            if self._fds.get(name) in ready:
                self._write(name)

    def _read(self, name: str) -> bool:
        if name not in self._fds:
            return False
        try:
            part = os.read(self._fds[name], 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            self._close(name)
            return False
        received = self._received[name]
        received += part
        kept = STDERR_TAIL_BYTES if name == "stderr" else self._output_bytes + (1 << 16)
        if len(received) > kept:
            self._num_discarded += len(received) - kept
            del received[:-kept]
        return bool(self._num_discarded < self._output_bytes + (1 << 20))

    def _write(self, name: str) -> None:
        try:
            num_bytes = os.write(self._fds[name], self._pending[name][: 1 << 16])
        except BlockingIOError:
            return
        except BrokenPipeError:  # it closed its end: not interested
            self._close(name)
            return
        self._pending[name] = self._pending[name][num_bytes:]
        if name == "stdin" and not self._pending[name]:
            self._close(name)

    def _close(self, name: str) -> None:
        os.close(self._fds.pop(name))

    @property
    def _has_ended(self) -> bool:
        """Looks without reaping: until then nobody else gets the number of its process group."""
        ended: object = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None

    def _usage(self) -> tuple[float, int]:
        """CPU seconds and threads."""
        try:
            fields = read_file(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS, int(fields[17])
        except (OSError, IndexError):
            return 0.0, 1

    def _waited_s(self) -> float:
        """Seconds that it was ready to run and got no core."""
        try:
            return int(read_file(f"/proc/{self.pid}/schedstat").split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def take_line(self) -> bytes:
        line, _, rest = bytes(self._received["answers"]).partition(b"\n")
        self._received["answers"][:] = rest
        return line

    def end(self) -> tuple[tuple[int, ...], bytes, bytes]:
        """Kill it with all it has started. (locked, exit status, CPU, wall and waiting time in us, processes found), output, end of standard error."""
        waited_s = self._waited_s()
        kill_group(self.pid)
        _, waited, usage = os.wait4(self.pid, 0)
        status, cpu_s = os.waitstatus_to_exitcode(waited), usage.ru_utime + usage.ru_stime
        num_left = kill_descendants()
        locked = os.read(self._fds["locked"], 1) == b"!"
        for name in list(self._fds):
            self._close(name)
        wall_s = time.monotonic() - self._began_s
        numbers = int(locked), status, int(cpu_s * 1e6), int(wall_s * 1e6), int(waited_s * 1e6), num_left
        return numbers, bytes(self._received["stdout"]), bytes(self._received["stderr"])


CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def read_file(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def kill_group(pid: int) -> None:
    """The child, which is not reaped yet, and what is left of the session it leads."""
    os.kill(pid, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:  # it had no time to found one, or a zombie is all of it
        return


def kill_descendants() -> int:
    """Orphans of the program come to the host (it is their subreaper). Returns how many processes there were."""
    found: set[int] = set()
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return len(found)
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    parent = int(read_file(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
                    if parent == os.getpid():
                        found.add(int(name))
                        os.kill(int(name), signal.SIGKILL)
                except (OSError, IndexError):
                    continue  # it ended while we looked


def address_space_bytes() -> int:
    return int(read_file("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def main(peer: int, parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = receive(peer)
    sys.path[:] = setup["path"]
    sys.dont_write_bytecode = True
    for name in setup["preload"]:
        try:
            __import__(name)
        except ImportError:
            continue  # not every build of Python has every module
    ruleset = landlock_ruleset(setup["landlock"]) if setup["landlock"] is not None else None
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    setup["own_bytes"] = address_space_bytes()
    gc.freeze()  # a collection in a child then leaves shared pages alone
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # if memory runs out, the kernel takes this
            file.write("1000")
    except OSError:
        pass
    reply(peer, "ready")
    running: Child | None = None
    while True:
        kind, data = receive(peer)
        stale = b""
        if kind == "run":
            running = Child(setup, ruleset, data, peer, woken)
            cpu_s, wall_s, for_line = data["cpu_s_now"], data["wall_s"], data["mode"] != "script"
        elif kind == "call":
            assert running is not None
            payload, cpu_s, wall_s = data
            for_line, stale = True, running.ask(len(payload).to_bytes(8, "little") + payload)
        happened = "asked" if kind == "stop" else running.watch(cpu_s, wall_s, for_line)  # type: ignore[union-attr]
        assert running is not None
        if happened == "line":
            reply(peer, "line", (), running.take_line(), stale)
        else:
            numbers, output, complaint = running.end()
            running = None
            reply(peer, happened, numbers, output, complaint)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except OSError as problem:
        if problem.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
