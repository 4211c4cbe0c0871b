"""The log: both kinds of log behave alike; the file survives kill -9, a full disk, a second writer and live readers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.observe.schema import TABLES, split_utf8, to_rows
from areal_hpc.observe.telemetry import Log, MemoryLog, open_log, read_attributes, read_table, read_tail, sidecar_path

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=[Log, MemoryLog], ids=["file", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Clock], Log | MemoryLog]:
    return lambda clock: request.param.create(tmp_path / "log.h5", {"config": "seed: 0\n"}, clock)


def interval(k: int) -> dict[str, Any]:
    return {"rank": k % 3, "role": k % 2, "phase": k % 16, "start_s": float(k), "stop_s": k + 0.5}


def intervals(num: int) -> np.ndarray:
    """What the rows above must be, made without `to_rows`."""
    k = np.arange(num)
    rows = np.zeros(num, TABLES["timeline"].dtype)
    rows["rank"], rows["role"], rows["phase"], rows["start_s"], rows["stop_s"] = k % 3, k % 2, k % 16, k, k + 0.5
    return rows


def child(code: str, *arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})})


# --- the same verbs over both logs


def test_rows_come_back_in_order_however_they_were_given(make: Callable[[Clock], Log | MemoryLog]) -> None:
    log = make(Clock())
    log.append("timeline", interval(0))
    log.append("timeline", [interval(1), interval(2)])
    log.append("timeline", [])
    log.append("timeline", intervals(5)[3:])
    shuffled = intervals(8)[5:][["stop_s", "phase", "rank", "start_s", "role"]]
    log.append("timeline", shuffled)
    np.testing.assert_array_equal(log.rows("timeline"), intervals(8))
    log.flush()
    log.append("timeline", interval(8))
    log.close()
    log.close()
    np.testing.assert_array_equal(log.rows("timeline"), intervals(9))
    with pytest.raises(AssertionError, match="closed"):
        log.append("timeline", interval(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown columns \\['extra'\\]"),
        ({"phase": None}, "numbers expected"),
        ({"phase": 0.5}, "integers from 0 to 255"),
        ({"phase": 256}, "integers from 0 to 255"),
        ({"rank": float("nan")}, "integers from"),
        ({"start_s": "soon"}, "numbers expected"),
    ],
)
def test_what_a_column_cannot_hold_is_refused(make: Callable[[Clock], Log | MemoryLog], change: dict[str, Any], message: str) -> None:
    log = make(Clock())
    with pytest.raises(ValueError, match=message):
        log.append("timeline", {**interval(0), **change})
    with pytest.raises(ValueError, match="missing columns \\['rank', 'role'\\]"):
        log.append("timeline", {name: value for name, value in interval(0).items() if name not in ("rank", "role")})
    with pytest.raises(ValueError, match="no table 'times'; tables: steps"):
        log.append("times", interval(0))
    with pytest.raises(ValueError, match="at most 24 fit"):
        log.event(0, "a kind of more than 24 bytes", "text")
    assert len(log.rows("timeline")) == len(log.rows("events")) == 0


def test_long_event_takes_several_rows(make: Callable[[Clock], Log | MemoryLog]) -> None:
    log = make(Clock())
    text = "ß" * 300 + "end"
    log.event(3, "warning", text, time_s=1.5)
    log.event(3, "note", "")
    rows = log.rows("events")
    assert "".join(row["text"].decode() for row in rows if row["kind"] == b"warning") == text
    assert [len(row["text"]) for row in rows] == [240, 240, 123, 0]
    assert set(rows["time_s"][:3]) == {1.5}


@given(text=st.text(), width=st.integers(4, 9))
def test_splitting_loses_nothing_and_keeps_to_the_width(text: str, width: int) -> None:
    parts = split_utf8(text, width)
    assert "".join(parts) == text
    assert all(len(part.encode()) <= width for part in parts)


@settings(max_examples=15)
@given(parts=st.lists(st.tuples(st.sampled_from(["timeline", "evaluations", "ranks"]), st.integers(0, 5)), max_size=20))
def test_file_and_memory_agree_on_any_order_of_appends(parts: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    logs = [kind.create(tmp_path_factory.mktemp("log") / "log.h5", {}, Clock()) for kind in (Log, MemoryLog)]
    for k, (table, num) in enumerate(parts):
        rows = np.zeros(num, TABLES[table].dtype)
        rows[TABLES[table].column_names[0]] = k
        for log in logs:
            log.append(table, rows)
            if k % 3 == 0:
                log.flush()
    for log in logs:
        log.close()
    for table in TABLES:
        np.testing.assert_array_equal(logs[0].rows(table), logs[1].rows(table))


# --- the file


def test_append_flushes_once_per_second(tmp_path: Path) -> None:
    clock = Clock()
    log = Log.create(tmp_path / "log.h5", {}, clock)
    on_disk = []
    for now_s in (0.0, 0.5, 0.99, 1.0, 1.5, 2.1):
        clock.now_s = now_s
        log.append("timeline", interval(0))
        on_disk.append(len(read_table(log.path, "timeline")))
    assert on_disk == [0, 0, 0, 4, 4, 6]


def test_attributes_explain_the_file(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log.h5", {"config": "name: größe\n", "fingerprint": "", "cores": 3, "share": 0.25}, Clock())
    attributes = read_attributes(log.path)
    assert attributes["config"] == "name: größe\n"
    assert (attributes["fingerprint"], attributes["cores"], attributes["share"], attributes["start_s"]) == ("", 3, 0.25, 0.0)
    assert abs(attributes["start_unix"] - time.time()) < 60
    log.close()
    with h5py.File(log.path, "r") as file:  # after a clean end plain h5py opens it too
        assert file["steps"].attrs["wall_s"].decode().startswith("[s] duration")
        assert file["timeline"].attrs["phase_names"][:3].astype(str).tolist() == ["start", "decode", "gated"]
        assert set(file) == set(TABLES)
        fixed = [h5py.check_string_dtype(file["events"].dtype[name]) for name in ("kind", "text")]
        assert [(info.encoding, info.length) for info in fixed] == [("utf-8", 24), ("utf-8", 240)]


OPENERS = """
import h5py, sys
for mode, options in (("a", {}), ("r+", {"locking": False}), ("r+", {"libver": "latest"})):
    try:
        h5py.File(sys.argv[1], mode, **options)
    except OSError as error:
        print("refused" if "already open for write" in str(error) else error)
try:
    from pathlib import Path
    from areal_hpc.observe.telemetry import Log
    Log.create(Path(sys.argv[1]), {})
except FileExistsError as error:
    print("refused" if "each attempt has its own" in str(error) else error)
with h5py.File(sys.argv[1], "r", swmr=True) as file:
    print(len(file["timeline"]))
"""


@pytest.mark.parametrize("locking", ["FALSE", "TRUE", "BEST_EFFORT"])
def test_second_writer_is_refused_and_readers_are_not(tmp_path: Path, locking: str) -> None:
    log = Log.create(tmp_path / "log.h5", {}, Clock())
    log.append("timeline", intervals(5))
    log.flush()
    result = child(OPENERS, log.path, environment={"HDF5_USE_FILE_LOCKING": locking})
    assert result.stdout.split() == ["refused"] * 4 + ["5"], result.stderr
    log.append("timeline", interval(5))
    log.close()
    np.testing.assert_array_equal(read_table(log.path, "timeline"), intervals(6))


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from areal_hpc.observe.telemetry import Log
log = Log.create(Path(sys.argv[1]), {"config": "x"}, flush_interval_s=0.0)
for k in range(1000000):
    log.append("timeline", [{"rank": j % 3, "role": j % 2, "phase": j % 16, "start_s": float(j), "stop_s": j + 0.5} for j in range(7 * k, 7 * k + 7)])
    log.event(0, "count", str(k))
    print(7 * k + 7, flush=True)
"""


@pytest.mark.parametrize("locking", ["FALSE", "TRUE"])
def test_killed_writer_leaves_a_prefix_that_was_readable_all_along(tmp_path: Path, locking: str) -> None:
    path = tmp_path / "log.h5"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HDF5_USE_FILE_LOCKING": locking}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        live = []
        for _ in range(300):
            acknowledged = int(writer.stdout.readline())
            if acknowledged % 210 == 0:
                live.append((acknowledged, len(read_table(path, "timeline"))))
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
    assert len(live) == 10 and all(seen >= written for written, seen in live)
    rows = read_table(path, "timeline")
    assert acknowledged <= len(rows) <= acknowledged + 7, "every acknowledged row is there, and at most the batch under way besides"
    np.testing.assert_array_equal(rows, intervals(len(rows)))
    assert [int(text) for text in read_table(path, "events")["text"]] == list(range(len(read_table(path, "events"))))
    assert read_attributes(path)["config"] == "x"


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from areal_hpc.observe.telemetry import Log

def write(path, told):
    log = Log.create(path, {"config": "x"}, flush_interval_s=0.2)
    for k in range(10**9):
        now_s = time.monotonic()
        log.append("timeline", {"rank": k % 3, "role": k % 2, "phase": k % 16, "start_s": now_s, "stop_s": now_s + k})
        if k % 50 == 0:
            log.append("trajectories", rows[:1 + k % 97])
            log.event(0, "count", str(k))
        os.pwrite(told, f"{now_s:.9f}".encode().ljust(32), 0)

import numpy as np
from areal_hpc.observe.schema import TABLES
rows = np.zeros(100, TABLES["trajectories"].dtype)
rows["ticket"] = np.arange(100)
draws = random.Random(int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    told = os.open(folder / "told", os.O_RDWR | os.O_CREAT)
    child = os.fork()
    if child == 0:
        try:
            write(folder / "log.h5", told)
        finally:
            os._exit(1)
    while not os.fstat(told).st_size:
        time.sleep(0.001)
    time.sleep(draws.uniform(0.0, 1.0))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), flush=True)
"""


@pytest.mark.parametrize(("seed", "number"), [(0, 5), pytest.param(1, 20, marks=pytest.mark.slow)])
def test_kill_at_random_moments_loses_one_flush_interval_at_most(tmp_path: Path, seed: int, number: int) -> None:
    """Each writer was killed wherever it was, also within a flush. What is in the file is a prefix of each table, and lacks the rows of the last 0.2 s at most."""
    result = child(KILLS, tmp_path, seed, number, environment={"HDF5_USE_FILE_LOCKING": ("FALSE", "TRUE")[seed % 2]})
    assert result.stdout.split() == [str(int(signal.SIGKILL))] * number, result.stderr
    for folder in map(str, range(number)):
        path = tmp_path / folder / "log.h5"
        timeline, events, trajectories = (read_table(path, table) for table in ("timeline", "events", "trajectories"))
        assert (timeline["rank"] == np.arange(len(timeline)) % 3).all() and (timeline["phase"] == np.arange(len(timeline)) % 16).all()
        assert timeline["stop_s"] - timeline["start_s"] == pytest.approx(np.arange(len(timeline)), abs=1e-6)
        assert events["text"].astype(int).tolist() == [50 * k for k in range(len(events))]
        written = [ticket for k in range(len(events) + 2) for ticket in range(1 + 50 * k % 97)]
        assert trajectories["ticket"].tolist() == written[: len(trajectories)]
        last_s = float((tmp_path / folder / "told").read_text())
        kept_s = timeline["start_s"][-1] if len(timeline) else last_s - 0.2
        assert last_s - kept_s < 0.2 + 0.5, "one interval, and what the row before the flush took on a busy machine"
        assert read_attributes(path)["config"] == "x"


FULL = """
import os, resource, signal, sys
from pathlib import Path
from areal_hpc.observe.telemetry import Log
if sys.argv[2] != "0":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
log = Log.create(Path(sys.argv[1]), {})
for k in range(int(sys.argv[3])):
    log.append("timeline", [{"rank": j % 3, "role": j % 2, "phase": j % 16, "start_s": float(j), "stop_s": j + 0.5} for j in range(40 * k, 40 * k + 40)])
    log.event(0, "nan", str(k), time_s=float("nan"))
    log.event(0, "inf", str(k), time_s=float("inf"))
    log.flush()
log.close()
print(log.degraded, len(log.rows("timeline")) if sys.argv[2] == "0" else "")
if sys.argv[2] != "0":
    os._exit(0)
"""


@pytest.mark.parametrize("limit_bytes", [120_000, 131_072, 199_999])
def test_refused_write_goes_on_as_text_without_gap_or_double(tmp_path: Path, limit_bytes: int) -> None:
    path, flushes = tmp_path / "log.h5", limit_bytes // 2000  # the text file is under the same limit
    result = child(FULL, path, limit_bytes, flushes)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("True")
    assert result.stderr.count("WARNING") == 1 and "log.degraded.jsonl" in result.stderr
    np.testing.assert_array_equal(read_table(path, "timeline"), intervals(40 * flushes))
    with open_log(path) as file:
        assert 0 < len(file["timeline"]) < 40 * flushes, "part of the rows is in each file"
    events = read_table(path, "events")
    assert events["text"].astype(int).tolist() == [k for k in range(flushes) for _ in range(2)]
    assert np.isnan(events["time_s"][::2]).all() and np.isposinf(events["time_s"][1::2]).all()
    with sidecar_path(path).open("a") as file:
        file.write('{"table": "timeline", "row": 99')  # a line that a kill cut
    assert len(read_table(path, "timeline")) == 40 * flushes


def test_tail_is_the_end_of_the_table_in_file_and_text(tmp_path: Path) -> None:
    path = tmp_path / "log.h5"
    result = child(FULL, path, 120_000, 40)
    assert result.returncode == 0 and sidecar_path(path).exists(), result.stderr
    whole = tmp_path / "whole.h5"
    log = Log.create(whole, {}, Clock())
    log.append("timeline", intervals(1600))
    log.close()
    for most in (0, 1, 1599, 1600, 5000):
        for log_path in (path, whole):
            np.testing.assert_array_equal(read_tail(log_path, "timeline", most), intervals(1600)[max(0, 1600 - most) :])
    with pytest.raises(KeyError):
        read_tail(whole, "no_such_table", 1)


def test_full_disk_ends_cleanly_even_without_a_hard_exit(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        result = child(FULL, tmp_path / "log.h5", 0, 400)
        saved = read_table(tmp_path / "log.h5", "timeline")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", str(len(saved))], "the writer itself can read what was saved"
    np.testing.assert_array_equal(saved, intervals(len(saved)))
    assert "could not be saved" in result.stderr and len(saved) % 40 == 0
    unsaved = [json.loads(line) for line in result.stderr.splitlines() if line.startswith('{"table": "events"')]
    assert unsaved[-1]["text"] == "399", "events that no disk took are on stderr"


def test_rows_of_a_large_table_are_read_back(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log.h5", {}, Clock())
    rows = np.zeros(1_000_000, TABLES["trajectories"].dtype)
    rows["ticket"] = np.arange(len(rows))
    log.append("trajectories", rows)
    log.close()
    read = read_table(log.path, "trajectories")
    np.testing.assert_array_equal(read["ticket"], rows["ticket"])


def test_a_structured_array_is_copied(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log.h5", {}, Clock())
    rows = intervals(2)
    log.append("timeline", rows)
    rows["rank"] = 99
    np.testing.assert_array_equal(log.rows("timeline"), intervals(2))
    assert to_rows("timeline", intervals(1)[0:1][0:0]).size == 0


# --- a disk that fills up, and has room again


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def write(log: Log, clock: Clock, start: int, stop: int) -> None:
    """Rows start to stop - 1 of /timeline and one event for every hundred, ten rows and half a second to a flush."""
    for k in range(start, stop):
        log.append("timeline", interval(k))
        if k % 100 == 0:
            log.event(0, "count", str(k))
        if k % 10 == 9:
            clock.now_s += 0.5
            log.flush()


@pytest.mark.parametrize("with_fallback", [False, True], ids=["memory", "fallback"])
def test_log_recovers_when_the_disk_has_room_again_and_nothing_is_lost(
    small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], with_fallback: bool
) -> None:
    """Full twice, room again twice: one loud warning each, at the end every row is in log.h5 alone, read live all the while where a disk had room for it."""
    clock = Clock()
    attempt = small_disk / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    fallback = tmp_path / "elsewhere" if with_fallback else None
    if fallback is not None:
        fallback.mkdir()
    log = Log.create(attempt / "log.h5", {"config": "x"}, clock, fallback=fallback, retry_s=5.0)
    num = 0
    for turn in (1, 2):
        write(log, clock, num, num + 500)
        ballast = fill(small_disk)
        write(log, clock, num + 500, num + 3000)  # far more than the room in the chunks that the file has
        assert log.degraded and log.num_missing > 0
        assert log.state()["missing_rows"] == log.num_missing
        if fallback is not None:
            assert (fallback / f"run-attempt-1-{sidecar_path(log.path, turn - 1).name}").stat().st_size > 0
        ballast.unlink()
        write(log, clock, num + 3000, num + 3200)
        num += 3200
        assert not log.degraded and log.num_recoveries == turn and log.num_missing == 0
        np.testing.assert_array_equal(read_table(log.path, "timeline"), intervals(num))
    log.close()
    assert [path.name for path in attempt.iterdir()] == ["log.h5"] and (fallback is None or not list(fallback.iterdir()))
    with h5py.File(log.path, "r") as file:  # a plain reader sees all
        np.testing.assert_array_equal(file["timeline"][:], intervals(num))
    assert read_attributes(log.path)["config"] == "x"
    assert read_table(log.path, "events")["text"].astype(int).tolist() == list(range(0, num, 100))
    said = capfd.readouterr().err
    assert said.count("WARNING: cannot write") == 2 and said.count("can be written again") == 2


def test_log_that_stays_degraded_says_where_its_rows_are(small_disk: Path, tmp_path: Path) -> None:
    clock, fallback = Clock(), tmp_path / "elsewhere"
    fallback.mkdir()
    log = Log.create(small_disk / "log.h5", {}, clock, fallback=fallback, retry_s=5.0)
    write(log, clock, 0, 100)
    fill(small_disk)
    write(log, clock, 100, 3000)
    log.close()
    state = log.state()
    texts = [Path(path) for path in state["text"]]
    assert state["degraded"] and state["lost_rows"] == 0 and fallback in [path.parent for path in texts]
    assert state["missing_rows"] == sum(len(path.read_text().splitlines()) for path in texts)
    for path in texts:  # how docs/failures.md says to join them
        if path.parent == fallback:
            with (tmp_path / "log.degraded.jsonl").open("a") as joined:
                joined.write(path.read_text())
    (tmp_path / "log.h5").write_bytes(log.path.read_bytes())
    if (beside := sidecar_path(log.path)).exists():
        with (tmp_path / "log.degraded.jsonl").open("a") as joined:
            joined.write(beside.read_text())
    np.testing.assert_array_equal(read_table(tmp_path / "log.h5", "timeline"), intervals(3000))


def test_memory_of_a_log_that_no_disk_takes_is_bounded(small_disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_hpc.observe.telemetry.MAX_HELD_BYTES", 50_000)
    clock = Clock()
    log = Log.create(small_disk / "log.h5", {}, clock, retry_s=5.0)
    fill(small_disk)
    write(log, clock, 0, 3000)
    assert log._held_bytes <= 50_000 + 3000 and log._num_lost > 0
    log.close()
    said = capfd.readouterr().err
    last = [json.loads(line)["text"] for line in said.splitlines() if line.startswith('{"table": "events"')][-1]
    assert last == "2900" and '"timeline"' not in said
