"""The system calls that a program may make, as a filter for seccomp(2): a list of what is allowed, everything else is refused with EPERM.

Nothing on the list starts a process, sends a signal, opens a connection, changes a file, or leaves anything behind. libseccomp builds the filter where it is
installed; `assemble` builds the same one without it (classic BPF, Documentation/userspace-api/seccomp_filter.rst; numbers from asm/unistd.h of each architecture).
"""

from __future__ import annotations

import errno
import importlib
import itertools
import platform
import struct
import tempfile
from dataclasses import dataclass

# CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM: what pthread_create asks for. Without them, clone makes a process.
_THREAD = 0x50F00
_CLONE_NAMESPACES = 0x7E020000  # any CLONE_NEW*

ALWAYS = (
    # memory
    "brk", "madvise", "mmap", "mprotect", "mremap", "munmap",
    # descriptors that are open already
    "close", "close_range", "dup", "dup2", "dup3", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_wait", "eventfd2", "fadvise64", "fstat", "lseek",
    "pipe", "pipe2",
    "poll", "ppoll", "pread64", "pselect6", "pwrite64", "read", "readv", "recvfrom", "select", "shutdown", "write", "writev",
    # names, without opening them
    "access", "faccessat", "faccessat2", "getcwd", "getdents64", "lstat", "newfstatat", "readlink", "readlinkat", "stat", "statx",
    # time
    "alarm", "clock_getres", "clock_gettime", "clock_nanosleep", "getitimer", "gettimeofday", "nanosleep", "setitimer", "time", "times",
    # the process itself
    "exit", "exit_group", "futex", "get_robust_list", "getegid", "geteuid", "getgid", "getgroups", "getpgrp", "getpid", "getppid", "getrandom",
    "getresgid", "getresuid",
    "getrlimit", "getrusage", "gettid", "getuid", "membarrier", "restart_syscall", "rseq", "rt_sigaction", "rt_sigpending", "rt_sigprocmask",
    "rt_sigreturn",
    "rt_sigtimedwait", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_yield", "set_robust_list", "setrlimit", "sigaltstack",
    "sysinfo", "uname",
)  # fmt: skip
OPENING = ("open", "openat")
"""Allowed only where Landlock or a mount namespace decides what can be opened."""


@dataclass(frozen=True, slots=True)
class Test:
    """(argument & mask) == value, on all 64 bits."""

    argument: int
    mask: int
    value: int


_ALL = (1 << 64) - 1
CONDITIONAL: dict[str, tuple[tuple[Test, ...], ...]] = {
    # Each entry: alternatives, of which one must hold completely.
    "clone": ((Test(0, _THREAD | _CLONE_NAMESPACES, _THREAD),),),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; never F_SETOWN, which sends signals
    "fcntl": tuple((Test(1, _ALL, command),) for command in (0, 1, 2, 3, 4, 1030)),
    "ioctl": tuple((Test(1, _ALL, request),) for request in (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)),  # TCGETS, TIOCGWINSZ, FIONBIO, FIONCLEX, FIOCLEX
    "prctl": ((Test(0, _ALL, 15),),),  # PR_SET_NAME
    "prlimit64": ((Test(0, _ALL, 0),),),  # its own; without capabilities a hard limit only falls
    "sendto": ((Test(4, _ALL, 0),),),  # to the other end of a socketpair (asyncio), never to an address
    "socketpair": ((Test(0, _ALL, 1), Test(1, 0xF, 1)),),  # AF_UNIX, SOCK_STREAM
}
NOT_THERE = ("clone3", "openat2")
"""Answered with ENOSYS: glibc then uses the older call, whose arguments a filter can see."""


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (pair.split("=") for pair in text.split())}


_X86_64 = _table(
    """
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 rt_sigaction=13 rt_sigprocmask=14
    rt_sigreturn=15 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 access=21 pipe=22 select=23 sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33
    nanosleep=35 getitimer=36 alarm=37 setitimer=38 getpid=39 sendto=44 recvfrom=45 shutdown=48 socketpair=53 clone=56 exit=60 uname=63 fcntl=72 getcwd=79
    readlink=89 gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110 getpgrp=111
    getgroups=115 getresuid=118 getresgid=120 rt_sigpending=127 rt_sigtimedwait=128 sigaltstack=131 sched_getparam=143 sched_getscheduler=145 prctl=157
    setrlimit=160 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217 restart_syscall=219 fadvise64=221 clock_gettime=228 clock_getres=229
    clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233 openat=257 newfstatat=262 readlinkat=267 faccessat=269 pselect6=270 ppoll=271
    set_robust_list=273 get_robust_list=274 epoll_pwait=281 eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 prlimit64=302 getrandom=318 membarrier=324
    statx=332 rseq=334 clone3=435 close_range=436 openat2=437 faccessat2=439
    """
)
_AARCH64 = _table(
    """
    getcwd=17 eventfd2=19 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 fcntl=25 ioctl=29 faccessat=48 openat=56 close=57 pipe2=59
    getdents64=61 lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 pselect6=72 ppoll=73 readlinkat=78 newfstatat=79 fstat=80 exit=93
    exit_group=94 futex=98 set_robust_list=99 get_robust_list=100 nanosleep=101 getitimer=102 setitimer=103 clock_gettime=113 clock_getres=114
    clock_nanosleep=115 sched_getscheduler=120 sched_getparam=121 sched_getaffinity=123 sched_yield=124 restart_syscall=128 sigaltstack=132
    rt_sigaction=134 rt_sigprocmask=135 rt_sigpending=136 rt_sigtimedwait=137 rt_sigreturn=139 getresuid=148 getresgid=150 times=153 getgroups=158
    uname=160 getrlimit=163 setrlimit=164 getrusage=165 prctl=167 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 getegid=177
    gettid=178 sysinfo=179 socketpair=199 sendto=206 recvfrom=207 shutdown=210 brk=214 munmap=215 mremap=216 clone=220 mmap=222 fadvise64=223 mprotect=226
    madvise=233 prlimit64=261 getrandom=278 membarrier=283 statx=291 rseq=293 clone3=435 close_range=436 openat2=437 faccessat2=439
    """
)
ARCHITECTURES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""AUDIT_ARCH word and system call numbers by machine name. A name that an architecture lacks (aarch64 has no `open`) cannot be called there."""

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_X32_BIT = 0x40000000


class UnsupportedMachineError(RuntimeError):
    """There is no table of system calls for this processor, and no libseccomp."""


def build(may_open: bool) -> tuple[bytes, str]:
    """The filter for this machine, as an array of struct sock_filter, and who built it. Raises UnsupportedMachineError."""
    try:
        return _from_libseccomp(may_open), "libseccomp"
    except (ImportError, OSError, RuntimeError, TypeError):  # not installed, or too old to know a name; pyseccomp raises the last two without the library
        return assemble(may_open, platform.machine()), "own assembler"


def allowed(may_open: bool) -> tuple[str, ...]:
    """Names allowed whatever the arguments."""
    return ALWAYS + (OPENING if may_open else ())


def assemble(may_open: bool, machine: str) -> bytes:
    """The filter in classic BPF. Raises UnsupportedMachineError."""
    if machine not in ARCHITECTURES:
        raise UnsupportedMachineError(f"no table of system calls for {machine}: install libseccomp and pyseccomp")
    architecture, numbers = ARCHITECTURES[machine]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    for name in allowed(may_open):
        if name in numbers:
            code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    for name in NOT_THERE:
        code += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for name, alternatives in CONDITIONAL.items():
        block = list(itertools.chain.from_iterable(_alternative(tests) for tests in alternatives))
        block.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
        code += [(_EQUAL, 0, len(block), numbers[name]), *block]
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _alternative(tests: tuple[Test, ...]) -> list[tuple[int, int, int, int]]:
    """Allow if all tests hold, else fall through to what follows."""
    checks = [
        ((_LOAD, 0, 0, 16 + 8 * test.argument + 4 * half), (_AND, 0, 0, test.mask >> 32 * half & 0xFFFFFFFF), test.value >> 32 * half & 0xFFFFFFFF)
        for test in tests
        for half in (0, 1)  # struct seccomp_data holds 64-bit arguments; both architectures are little endian
    ]
    length = 3 * len(checks) + 1
    code: list[tuple[int, int, int, int]] = []
    for load, mask, value in checks:
        code += [load, mask]
        code.append((_EQUAL, 0, length - len(code) - 1, value))
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _from_libseccomp(may_open: bool) -> bytes:
    pyseccomp = importlib.import_module("pyseccomp")  # raises without the library
    built = pyseccomp.SyscallFilter(defaction=pyseccomp.ERRNO(errno.EPERM))
    architecture = ARCHITECTURES.get(platform.machine())
    for name in allowed(may_open):
        if architecture is None or name in architecture[1]:
            built.add_rule(pyseccomp.ALLOW, name)
    for name in NOT_THERE:
        built.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
    for name, alternatives in CONDITIONAL.items():
        for tests in alternatives:
            built.add_rule(pyseccomp.ALLOW, name, *(pyseccomp.Arg(test.argument, pyseccomp.MASKED_EQ, test.mask, test.value) for test in tests))
    with tempfile.TemporaryFile() as file:
        built.export_bpf(file)
        file.seek(0)
        return bytes(file.read())
