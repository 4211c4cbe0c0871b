"""The weight push on real ranks: bit-equal on every receiver and every way, never torn, damage mended once, stalls and deaths named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.launch.local import find_launcher, remove_stale_files

pytestmark = pytest.mark.mpi
WORKER = Path(__file__).with_name("push_worker.py")


def push(mode: str, num_ranks: int, fraction: float, out: Path) -> subprocess.CompletedProcess[str]:
    command = [*find_launcher().command(num_ranks), sys.executable, str(WORKER), mode, str(fraction), str(out)]
    began_at = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    remove_stale_files(began_at)
    return done


def check_all_arrived(num_ranks: int, fraction: float, out: Path) -> None:
    """Five versions each way (worker's VARIANTS), memory poisoned before, parameters destroyed right after each publish."""
    done = push("ok", num_ranks, fraction, out)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("ok-*"))) == num_ranks
    assert "staging on" in done.stdout and "staging off" in done.stdout and "3 images of" in done.stdout


@pytest.mark.parametrize(("num_ranks", "fraction"), [(2, 0.5), (5, 0.6)], ids=["1+1", "3+2"])
def test_every_receiver_is_bit_equal(num_ranks: int, fraction: float, tmp_path: Path) -> None:
    check_all_arrived(num_ranks, fraction, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "fraction"), [(3, 0.4), (4, 0.25), (4, 0.7), (5, 0.2), (6, 0.35)], ids=["1+2", "1+3", "3+1", "1+4", "2+4"])
def test_every_receiver_is_bit_equal_in_other_worlds(num_ranks: int, fraction: float, tmp_path: Path) -> None:
    """With four training ranks some own no row of a tensor of five."""
    check_all_arrived(num_ranks, fraction, tmp_path)


def test_damaged_weights_are_sent_once_more(tmp_path: Path) -> None:
    """One bucket of every root, at every receiver; every rank then has all versions, bit-equal."""
    done = push("damaged", 3, 0.3, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("ok-*"))) == 3


@pytest.mark.slow
def test_weights_damaged_twice_end_the_job(tmp_path: Path) -> None:
    done = push("broken", 3, 0.5, tmp_path)
    assert done.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "weights of version 2 from training rank 0 arrived damaged, also when sent once more: bucket 0" in failure["error"]


def test_stalled_receiver_is_named_within_the_deadline(tmp_path: Path) -> None:
    done = push("stall", 3, 0.6, tmp_path)
    assert done.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "version 0 was not confirmed within 3 s by" in failure["error"]
    assert "rank 1 (generation 1)" in failure["error"]  # a rank that it would have relayed to may stand beside it


@pytest.mark.slow
def test_killed_receiver_ends_the_job(tmp_path: Path) -> None:
    """Killed with its receives posted: nobody waits for it, mpiexec says by which signal (survivors that notice first name it: tests/train/test_publish.py)."""
    done = push("kill", 3, 0.6, tmp_path)
    assert done.returncode != 0
    assert "signal 9" in (done.stdout + done.stderr).lower() or "rank 1 (generation 1)" in (tmp_path / "failure.json").read_text()
    assert not list(tmp_path.glob("ok-*"))
