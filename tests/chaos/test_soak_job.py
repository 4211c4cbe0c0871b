"""A whole job for ten minutes: the memory of every rank and its open files stay where they are, and nothing is left in shared memory.

Checkpoints, evaluations, weight pushes and saved answers go on all the time. Memory is judged by its slope after a third of the time: caches, pools and
the first evaluation have filled by then.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

from areal_hpc.config import Checkpoint, Config, Staleness

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
SOAK_S = 600
SETTLED_SHARE = 1 / 3
MAX_GROWTH_BYTES_PER_MIN = 256 << 10
MAX_EXTRA_FILES = 4
"""A checkpoint under way has files open for a moment."""


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Theil-Sen: the median of the slopes between points half of the range apart, which single peaks do not move."""
    half = len(x) // 2
    return float(np.median((y[half : 2 * half] - y[:half]) / (x[half : 2 * half] - x[:half])))


def test_ten_minutes(chaos: Config, tmp_path: Path) -> None:
    config = jobs.with_ranks(chaos, 4, 0.5)
    config = replace(
        config,
        staleness=Staleness(max_staleness=2, mode="dropless"),
        checkpoint=Checkpoint(every=20, keep=2),
        evaluation=replace(config.evaluation, every=50),
        train=replace(config.train, lr=1e-4, num_steps=1_000_000),
    )
    run_dir = tmp_path / "run"
    process = jobs.start(config, run_dir)
    jobs.wait_for_step(run_dir, process)
    ranks = jobs.ranks_of(run_dir)
    assert len(ranks) == 4
    files = defaultdict[int, list[int]](list)
    stop_at = time.monotonic() + SOAK_S
    while time.monotonic() < stop_at:
        assert process.poll() is None, process.communicate()
        for rank, pid in ranks.items():
            files[rank].append(open_files(pid))
        time.sleep(2.0)
    process.send_signal(signal.SIGTERM)
    job = jobs.finish(process, run_dir)
    assert job.status == 75, job.stdout + job.stderr
    rows, groups = job.table("ranks"), job.exit["groups"]
    assert groups["admitted"] == sum(count for name, count in groups.items() if name != "admitted")
    print(f"{job.exit['steps']} steps, {job.exit['checkpoints']} checkpoints")
    for rank in ranks:
        mine = rows[rows["rank"] == rank]
        settled = mine[mine["time_s"] > mine["time_s"][0] + SETTLED_SHARE * SOAK_S]
        growth = 60 * slope(settled["time_s"], settled["rss_bytes"].astype(float))
        early, late = files[rank][: len(files[rank]) // 3], files[rank][-len(files[rank]) // 3 :]
        print(
            f"rank {rank}: {settled['rss_bytes'][-1] >> 20} MiB, {growth / 1024:+.0f} KiB a minute; open files {np.median(early):.0f} -> {np.median(late):.0f}"
        )
        assert growth < MAX_GROWTH_BYTES_PER_MIN, f"rank {rank} grows by {growth / 1024:.0f} KiB a minute"
        assert np.median(late) <= np.median(early), f"rank {rank} keeps files open"
        assert max(late) <= max(early) + MAX_EXTRA_FILES
    jobs.check_no_lane_left()
