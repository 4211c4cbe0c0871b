"""The weight push on real ranks: bit-equal on every receiver, never torn, damage and stalls named."""

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    remove_stale_files(began_at)
    return done


@pytest.mark.parametrize(("num_ranks", "fraction"), [(2, 0.5), (4, 0.25), (5, 0.2), (5, 0.6)], ids=["1+1", "1+3", "1+4", "3+2"])
def test_every_receiver_is_bit_equal(num_ranks: int, fraction: float, tmp_path: Path) -> None:
    """Four versions, buffers poisoned before and parameters destroyed right after each publish; uneven and empty shards."""
    done = push("ok", num_ranks, fraction, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("ok-*"))) == num_ranks


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    done = push("damaged", 3, 0.5, tmp_path)
    assert done.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "weights of version 2 from training rank 0 arrived damaged" in failure["error"]


def test_stalled_receiver_is_named_within_the_deadline(tmp_path: Path) -> None:
    done = push("stall", 3, 0.6, tmp_path)
    assert done.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert "version 0 was not confirmed within 3 s by" in failure["error"]
    assert "rank 1 (generation 1)" in failure["error"]  # a rank that it would have relayed to may stand beside it
