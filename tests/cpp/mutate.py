"""Is every memory order of the ring needed, and would a test notice if one were missing?

    python tests/cpp/mutate.py [unchanged]          # `unchanged`: only the headers as they are

In a copy of the headers each site is weakened in turn: an acquire or release becomes relaxed, a fence goes away. tests/cpp/test_orders.cpp must notice: its part
`races` under ThreadSanitizer, or its part `wakes` on the store buffers of store_buffer.hpp. Sites are found by regular expression, so a new one takes part by
itself. The unchanged headers must pass both, and `wakes` on the store buffers of this processor and the futex of this kernel. Prints one line per mutant;
status 1 if one was not caught, 77 if `wakes` finds no two CPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "areal_hpc" / "csrc"
HEADERS = ("layout.hpp", "memory.hpp", "ring.hpp")
PROGRAM = ROOT / "tests" / "cpp" / "test_orders.cpp"
CXX = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-pthread"]
NUM_COMPILERS = 2
RACES = ["-O1", "-g", "-fsanitize=thread", "-Wno-tsan", "-fno-builtin"]  # a memcpy that gcc expands in place is not seen
WAKES = ["-O2", "-DAREAL_HPC_SPIN_NS=0", "-DAREAL_HPC_FUTEX_CAP_NS=2000000000"]
WAKES_S = 2.0
"""Of each program; a lost wake-up ends it before."""

ORDER = re.compile(r"std::memory_order_(acquire|release|acq_rel|seq_cst)")
FENCE = re.compile(r"std::atomic_thread_fence\([^)]*\);")
CALL = re.compile(r"\.(load|store|exchange|fetch_\w+|compare_exchange_\w+)\(")
STORE_BUFFERS = (
    (r"std::atomic<", "store_buffer::atomic<"),
    (r"std::atomic_thread_fence\(", "store_buffer::fence("),
    (r"::syscall\(SYS_futex, ", "store_buffer::futex("),
)


@dataclass(frozen=True)
class Site:
    """One order in a header; `line` counts from 1, `start` and `stop` are columns of it."""

    header: str
    line: int
    start: int
    stop: int
    weaker: str
    text: str

    @property
    def is_fence(self) -> bool:
        return self.weaker == ""

    @property
    def what(self) -> str:
        return "removed" if self.is_fence else f"{self.text.removeprefix('std::memory_order_')} -> relaxed"


def find_sites() -> list[Site]:
    """All orders that are stronger than relaxed. Raises ValueError for an atomic operation that names none: that would be seq_cst in silence."""
    sites = []
    for header in HEADERS:
        for number, line in enumerate((CSRC / header).read_text().splitlines(), 1):
            code = line.split("//")[0]
            for call in CALL.finditer(code):
                if "memory_order" not in code[call.end() :] and not code.rstrip().endswith(","):
                    raise ValueError(f"{header}:{number}: an atomic operation without a memory order: {line.strip()}")
            fences = list(FENCE.finditer(code))
            sites += [Site(header, number, match.start(), match.end(), "", match.group()) for match in fences]
            for match in ORDER.finditer(code):
                if not any(fence.start() <= match.start() < fence.end() for fence in fences):
                    sites.append(Site(header, number, match.start(), match.end(), "std::memory_order_relaxed", match.group()))
    return sites


def copy_headers(folder: Path, site: Site | None, store_buffers: bool) -> None:
    """The headers with that site weakened, and on the emulated store buffers if wished."""
    shutil.copytree(CSRC, folder, ignore=shutil.ignore_patterns("*.cpp"))
    if site is not None:
        lines = (folder / site.header).read_text().splitlines(keepends=True)
        line = lines[site.line - 1]
        lines[site.line - 1] = line[: site.start] + site.weaker + line[site.stop :]
        (folder / site.header).write_text("".join(lines))
    if store_buffers:
        for header in HEADERS:
            text = (folder / header).read_text()
            for pattern, replacement in STORE_BUFFERS:
                text = re.sub(pattern, replacement, text)
            (folder / header).write_text(text)


def build(folder: Path, site: Site | None, part: str) -> Path:
    """Compile one part for one mutant (None: the unchanged headers). Raises RuntimeError with the compiler's words."""
    copy_headers(folder, site, store_buffers=part == "wakes")
    options = {"races": RACES, "wakes": [*WAKES, "-DAREAL_HPC_STORE_BUFFER"], "wakes-here": WAKES}[part]
    result = subprocess.run([*CXX, *options, f"-I{folder}", str(PROGRAM), "-o", str(folder / part)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{site}: {result.stderr}")
    return folder / part


def run(program: Path, seconds: float) -> tuple[int, str]:
    """Status, and what it said in one line."""
    arguments = ["races"] if program.name == "races" else ["wakes", f"{seconds:g}"]
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1 io_sync=0"}  # reads of one file order nothing
    try:
        result = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, timeout=120)
    except subprocess.TimeoutExpired:
        return 124, "ran for more than 120 s"
    lines = (result.stdout + result.stderr).strip().splitlines() or ["nothing"]
    said = next((line for line in lines if line.startswith("SUMMARY: ")), lines[-1])
    said = re.sub(r"/\S*/", "", said.removeprefix("SUMMARY: ThreadSanitizer: ").replace("areal_hpc::(anonymous namespace)::", ""))
    return result.returncode, re.sub(r"(\w)\(.*", r"\1", said) if said.startswith("data race") else said


def main() -> int:
    sites = [] if sys.argv[1:] == ["unchanged"] else find_sites()
    mutants: list[Site | None] = [None, *sites]
    with tempfile.TemporaryDirectory(prefix="areal-hpc-mutants-") as scratch, ThreadPoolExecutor(NUM_COMPILERS) as compilers:

        def start(index: int, part: str):
            return compilers.submit(build, Path(scratch) / f"{index}-{part}", mutants[index], part)

        def parts_for(site: Site | None) -> tuple[str, ...]:
            if site is None:
                return ("races", "wakes", "wakes-here")
            return ("wakes", "races") if site.is_fence else ("races", "wakes")

        likely = [parts_for(site) for site in mutants]
        first = [start(index, parts[0]) for index, parts in enumerate(likely)]
        width = max([len(f"{site.header}:{site.line}") for site in sites], default=0)
        failed = []
        for index, site in enumerate(mutants):
            name, what = ("unchanged", "") if site is None else (f"{site.header}:{site.line}", site.what)
            verdicts = []
            for turn, part in enumerate(likely[index]):
                program = first[index].result() if turn == 0 else start(index, part).result()
                status, said = run(program, WAKES_S)
                verdicts.append(f"{part}: {said}")
                if status == 77:
                    return status
                if status not in (0, 1, 66):
                    raise RuntimeError(f"{name} {what}: status {status}: {said}")
                if status != 0:
                    verdicts = [verdicts[-1]]
                    break
            caught = status != 0
            if caught == (site is None):
                failed.append(name)
            print(f"{name:{width}}  {what:18}  {'caught' if caught else 'passed'}  {'; '.join(verdicts)}", flush=True)
    print(f"wrong: {', '.join(failed)}" if failed else f"the unchanged headers pass; {len(sites)} mutants, all caught")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
