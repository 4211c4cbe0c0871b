"""What a user sees while the run goes on."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys

import pytest

from areal_hpc.observe.progress import MAX_LINES, Progress, si
from areal_hpc.walltime import Walltime

ROW = {
    **{"step": 12, "reward_mean": 1.234, "accuracy": 0.614, "tokens_per_s": 12345.0, "staleness_mean": 1.21, "staleness_max": 3, "staleness_bound": 4},
    **{"wall_s": 1.05, "generation_wait_s": 0.21, "train_s": 0.8, "push_s": 0.02, "failed": 0, "dropped": 0, "filtered": 0, "masked": 0, "skipped_updates": 0},
}


def test_line_of_a_step() -> None:
    stream = io.StringIO()
    Progress(100, "lines", stream).step(ROW)
    assert stream.getvalue() == "step 12/100  reward 1.23  acc 0.61  12.3k tok/s  stale 1.2 (max 3, bound 4)  wait 0.21s train 0.80s push 0.02s\n"


FULL = """
import os, sys
from areal_hpc.observe.progress import Progress
progress = Progress(3, "lines")
for k in (1, 2, 3):
    progress.message(str(k))
print(progress.num_unsaid, file=sys.stderr, flush=True)
os._exit(0)
"""


def test_a_full_disk_behind_the_output_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as full:  # every write fails with ENOSPC
        done = subprocess.run([sys.executable, "-c", FULL], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr.split() == ["3"], done.stderr


def test_losses_unknowns_and_no_bound_are_shown() -> None:
    stream = io.StringIO()
    Progress(100, "lines", stream).step({**ROW, "reward_mean": math.nan, "staleness_bound": -1, "failed": 2, "skipped_updates": 1})
    assert "reward -  " in stream.getvalue() and "bound inf" in stream.getvalue()
    assert stream.getvalue().endswith("  failed 2  skipped_updates 1\n")


def test_time_left_and_the_steps_that_fit() -> None:
    """An hour is left, five minutes of it are kept free, a step takes a minute: 55 of the 88 that are wanted."""
    stream = io.StringIO()
    Progress(100, "lines", stream, Walltime(3600.0, 300.0, now=lambda: 0.0)).step({**ROW, "wall_s": 60.0})
    assert stream.getvalue().endswith("push 0.02s  job ends in 1:00:00, enough for about 55 of 88 steps\n")


@pytest.mark.parametrize("num_steps", [1, 3, 200, 201, 5000])
def test_a_batch_log_stays_short_and_shows_first_and_last(num_steps: int) -> None:
    stream = io.StringIO()
    progress = Progress(num_steps, "lines", stream)
    for step in range(1, num_steps + 1):
        progress.step({**ROW, "step": step})
    shown = [int(number) for number in re.findall(r"^step (\d+)/", stream.getvalue(), re.M)]
    assert shown[0] == 1 and shown[-1] == num_steps and shown == sorted(set(shown))
    assert min(num_steps, MAX_LINES // 2) <= len(shown) <= MAX_LINES + 1


def test_live_shows_a_bar_messages_and_leaves_the_cursor() -> None:
    stream = io.StringIO()
    progress = Progress(100, "live", stream)
    progress.message("[1/2] warm start")
    progress.evaluation(0, 0.41, 512)
    progress.step(ROW)
    progress.finish("accuracy 41 % -> 90 %")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "training waited for data 20 % of the last 1 steps: generation bound" in text and "reward ▅  tok/s ▅" in text
    assert "12/100" in text and "12.3k tok/s" in text and "[1/2] warm start" in text
    assert "held-out accuracy 41.0 % of 512 problems, version 0" in text
    assert text.rstrip().endswith("accuracy 41 % -> 90 %")
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l"), "the cursor is shown again"


def test_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(100, "none")
    progress.message("a")
    progress.step(ROW)
    progress.finish("b")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9.876, "9.88"), (999.4, "999"), (999.9, "1k"), (12345, "12.3k"), (999_499, "999k"), (999_600, "1M"), (2.5e9, "2.5G"), (math.nan, "-")],
)
def test_si(value: float, text: str) -> None:
    assert si(value) == text


def test_progress_needs_no_heavy_stack() -> None:
    code = "import sys, areal_hpc.observe.progress; print([m for m in ('torch', 'h5py', 'matplotlib', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
