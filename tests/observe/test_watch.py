"""`areal-hpc watch` says of hand-made runs what they are known to contain: while they grow, after their writer was killed, over several attempts."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.config import ConfigError
from areal_hpc.launch.ownership import OWNER_FILE, Owner
from areal_hpc.observe import watch as module
from areal_hpc.observe.progress import sparkline
from areal_hpc.observe.telemetry import Log
from areal_hpc.observe.watch import duration, look, plain, rank_rows, watch
from areal_hpc.observe.words import Shares, best_split, bottleneck

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
synthetic = importlib.util.module_from_spec(_spec)
sys.modules["synthetic"] = synthetic
_spec.loader.exec_module(synthetic)
Shape, write_attempt = synthetic.Shape, synthetic.write_attempt
CONFIG = {"cores": 8, "config": "recipe: laptop\ntrain:\n  num_steps: 60\n"}
ROOT = Path(__file__).parents[2]


def test_a_known_run(tmp_path: Path) -> None:
    """3 + 1 ranks, 40 of 60 steps of 2 s: decode 1 s, train 1.6 s, push 0.4 s."""
    write_attempt(tmp_path, 1, Shape(attributes=CONFIG))
    view = look(tmp_path)
    assert (view.attempt, view.num_attempts, view.num_steps, len(view.steps)) == (1, 1, 60, 40)
    assert view.step_s == pytest.approx(2.0) and view.left_s == pytest.approx(40.0)
    assert view.shares is not None
    assert (view.shares.waited, view.shares.gated, view.shares.pushed) == pytest.approx((0.0, 0.5, 0.2))
    assert (view.shares.generation_busy, view.shares.training_busy) == pytest.approx((0.5, 0.8))
    assert (view.shares.num_generation, view.shares.num_training) == (3, 1)
    for seconds in view.seconds.values():
        assert seconds.sum() == pytest.approx(20 * 2.0), "phases of the latest 20 steps sum to their wall time"
    text = "\n".join(plain(view))
    assert "step 40/60  2 s/step  40 s to the last step" in text and "training bound: " in text
    assert "held-out 86.5 % (version 40)" in text


def test_attempts_are_joined_and_the_latest_is_shown(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, Shape(attributes=CONFIG))
    write_attempt(tmp_path, 2, Shape(first_step=30, last_step=50, seed=1, attributes=CONFIG))
    view = look(tmp_path)
    assert view.steps["step"].tolist() == list(range(1, 51))
    assert (view.attempt, view.num_attempts) == (2, 2) and "attempt 2 of 2" in plain(view)[0]
    assert view.left_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("files", "age_s", "says", "over"),
    [
        ({}, 1.0, "running", False),
        ({}, 3600.0, "gone: no sign of life for 1 h 00 min", True),
        ({"exit.json": {"status": 0}}, 3600.0, "done", True),
        ({"exit.json": {"status": 75}}, 1.0, "stopped on request with a complete checkpoint", True),
        (
            {"failure.json": {"name": "rank 3 (training 0) on host n1", "error": "ValueError: a\nb"}},
            1.0,
            "failed: rank 3 (training 0) on host n1: ValueError: a b",
            True,
        ),
    ],
)
def test_how_a_run_stands(tmp_path: Path, files: dict, age_s: float, says: str, over: bool) -> None:
    log = write_attempt(tmp_path, 1, Shape(attributes=CONFIG, last_step=3))
    for name, content in files.items():
        (log.parent / name).write_text(json.dumps(content))
    view = look(tmp_path, now=log.stat().st_mtime + age_s)
    assert view.state.startswith(says) and view.over is over


def test_an_owner_that_lives_and_one_that_does_not(tmp_path: Path) -> None:
    log = write_attempt(tmp_path, 1, Shape(attributes=CONFIG, last_step=3))
    owner = tmp_path / OWNER_FILE
    owner.write_text(json.dumps(asdict(Owner.myself())))
    silent = log.stat().st_mtime + 3600
    os.utime(owner, (silent, silent))
    assert not look(tmp_path, now=silent).over, "the log has not grown for an hour, but the job lives"
    dead = asdict(Owner.myself()) | {"pid": 2**22 - 1, "pid_started": 1, "host": socket.gethostname()}
    owner.write_text(json.dumps(dead))
    os.utime(owner, (silent, silent))
    assert look(tmp_path, now=silent).state.startswith("gone: process 4194303")
    owner.write_text(json.dumps(dead | {"host": "elsewhere"}))
    os.utime(owner, (silent, silent))
    assert not look(tmp_path, now=silent + 60).over and look(tmp_path, now=silent + 180).over


def test_time_limit(tmp_path: Path) -> None:
    log = write_attempt(tmp_path, 1, Shape(attributes={**CONFIG, "job_end_unix": time.time() + 30.0}))
    line = module.progress_line(look(tmp_path, now=log.stat().st_mtime))
    assert "40 s to the last step" in line and line.endswith("to the job's time limit: NOT enough")


def test_new_steps_are_lines_until_the_end(tmp_path: Path) -> None:
    """The log grows while it is watched: each step is said once, in order; then the end."""
    shape = Shape(attributes=CONFIG, ranks=4)
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    clock, draws = synthetic.Clock(), np.random.default_rng(0)
    log = Log.create(folder / "log.h5", shape.attributes, clock)
    generation = [synthetic.Phases(rank, "generation", clock) for rank in range(3)]
    training = [synthetic.Phases(3, "training", clock)]
    steps = iter(range(1, 8))

    def one_more(_: float) -> None:
        step = next(steps)
        synthetic.run_step(log, clock, generation, training, shape, step, draws, 8)
        log.append("timeline", np.concatenate([phases.drain() for phases in generation + training]))
        log.flush()
        if step == 5:
            synthetic.evaluate(log, clock, generation, training, 5)
            log.flush()
        if step == 7:
            (folder / "exit.json").write_text('{"status": 0}')

    stream = io.StringIO()
    assert watch(tmp_path, stream=stream, sleep=one_more) == 0
    log.close()
    lines = stream.getvalue().splitlines()
    assert "no training step has ended yet" in lines[2]
    assert [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/60  reward", line))] == list(range(1, 8))
    assert [line for line in lines if line.startswith("held-out accuracy") and line.endswith("version 5")]
    assert lines[-2].endswith(": done") and lines[-1].startswith("training bound")


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import numpy as np, synthetic
from areal_hpc.observe.progress import sparkline
from areal_hpc.observe.telemetry import Log
shape, clock, draws = synthetic.Shape(attributes={"config": "train:\\n  num_steps: 100000\\n"}), synthetic.Clock(), np.random.default_rng(0)
folder = Path(sys.argv[1]) / "attempt-1"
folder.mkdir()
log = Log.create(folder / "log.h5", shape.attributes, clock, flush_interval_s=0.0)
generation, training = [synthetic.Phases(0, "generation", clock)], [synthetic.Phases(1, "training", clock)]
for step in range(1, 100000):
    synthetic.run_step(log, clock, generation, training, shape, step, draws, 8)
    log.append("timeline", np.concatenate([phases.drain() for phases in generation + training]))
    print(step, flush=True)
"""


def test_a_run_is_seen_while_it_is_written_and_after_it_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 5:
                break
        live = look(tmp_path)
        os.kill(writer.pid, signal.SIGKILL)
        told = [5, *(int(line) for line in writer.stdout.read().split("\n")[:-1])]
    dead = look(tmp_path, now=time.time() + 3600)
    assert not live.over and live.steps["step"][-1] >= 5
    assert dead.over and dead.state.startswith("gone") and dead.steps["step"].tolist() == list(range(1, len(dead.steps) + 1))
    assert max(told) <= len(dead.steps) <= max(told) + 1


def test_on_a_terminal_the_view_is_drawn(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, Shape(attributes=CONFIG))
    (tmp_path / "attempt-1" / "exit.json").write_text('{"status": 0}')
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        os.set_inheritable(child, False)
        assert watch(tmp_path, stream=stream) == 0
    seen = b""
    while True:
        try:
            seen += os.read(parent, 1 << 16)
        except OSError:  # the other end is closed and nothing is left
            break
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert "step 40/60" in text and "training bound" in text and "█" in text


def test_without_utf8_the_curves_are_ascii(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, Shape(attributes=CONFIG | {"config": CONFIG["config"] + "name: größe\n"}))
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    assert watch(tmp_path, once=True, stream=stream) == 0
    stream.flush()
    assert re.search(r"^accuracy +[_.~=+*#-]{40}  ", buffer.getvalue().decode("ascii"), re.MULTILINE)


def test_waiting_for_a_run_that_begins(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: laptop\n")
    looks = []

    def begin(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            write_attempt(tmp_path, 1, Shape(attributes=CONFIG, last_step=2))
            (tmp_path / "attempt-1" / "exit.json").write_text('{"status": 0}')

    stream = io.StringIO()
    assert watch(tmp_path, stream=stream, sleep=begin) == 0
    assert stream.getvalue().count("waiting for the log") == 1 and "step 2/60" in stream.getvalue()


def test_a_folder_that_is_no_run_or_failed_early(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log of a run"):
        watch(tmp_path)
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "failure.json").write_text("{}")
    with pytest.raises(ConfigError, match="failed before training began"):
        watch(tmp_path)


def test_ranks_and_roles(tmp_path: Path) -> None:
    log = Log.create(_attempt(tmp_path) / "log.h5", CONFIG, clock := synthetic.Clock())
    phases = [synthetic.Phases(rank, "generation" if rank < 18 else "training", clock) for rank in range(20)]
    for each in phases:
        each.enter("decode" if each.role == "generation" else "train")
    clock.now_s += 3.0
    for each in phases:
        each.enter("gated" if each.role == "generation" else "wait_data")
    clock.now_s += 1.0
    for each in phases:
        log.append("timeline", each.drain())
        log.append("ranks", synthetic.row_of("ranks", rank=each.rank, role=int(each.role == "training"), running=2, rss_bytes=10**9))
    log.close()
    assert [row[:4] for row in rank_rows(look(tmp_path))] == [
        ("generation x 18", "75 %", "decode 75 %, gated 25 %", "36"),
        ("training x 2", "75 %", "train 75 %, wait_data 25 %", "4"),
    ]


def _attempt(run_dir: Path) -> Path:
    folder = run_dir / "attempt-1"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"), ([1, 3, 0, 0], 2, "█▁"), ([2, 2], 40, "▅▅"), ([math.nan, 0, 1], 40, " ▁█"), ([], 40, ""), ([math.nan], 1, " ")],
)
def test_sparkline(values: list[float], width: int, text: str) -> None:
    assert sparkline(np.array(values, float), width) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (3725, "1 h 02 min"), (90_000, "1 d 01 h")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_split_that_balances() -> None:
    """8 + 8 ranks, generation busy all the time, training 36 %: 8 and 2.88 rank-seconds a second. By hand: 11 + 5 -> 0.727 s, 12 + 4 -> 0.72 s, 13 + 3 -> 0.96 s."""
    shares = Shares(0.61, 0.0, 0.0, 0.02, 1.0, 0.36, 8, 8)
    best = best_split(shares)
    assert (best.num_generation, best.num_training) == (12, 4) and best.gain == pytest.approx(1 / 0.72)
    assert bottleneck(shares, 4) == (
        "generation bound: training ranks waited for data 61 % of the time, generation ranks stood at the gate 0 %; 12 + 4 ranks would balance "
        "(--topology.generation-fraction 0.75; it was 8 + 8), for about 1.39 x the tokens/s."
    )
