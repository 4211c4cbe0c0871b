"""Forwarded lanes: the protocol against a network that delays and does not buffer, and on real ranks (forward_worker.py has the other half of each test)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.launch.local import find_launcher, remove_stale_files

pytestmark = pytest.mark.mpi
WORKER = Path(__file__).with_name("forward_worker.py")
TIMEOUT_S = 120


def start(mode: str, num_ranks: int, out: Path, seed: int = 0) -> subprocess.Popen[str]:
    command = [*find_launcher().command(num_ranks), sys.executable, str(WORKER), mode, str(out), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], num_ranks: int) -> None:
    """It must end well, on every rank."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        remove_stale_files(time.time() - TIMEOUT_S)
    assert process.returncode == 0 and stdout.count("well") == num_ranks, stdout + stderr


def wait_for(process: subprocess.Popen[str], *files: Path) -> None:
    stop_at = time.monotonic() + TIMEOUT_S
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < stop_at, f"waited for {files}"
        time.sleep(0.01)


def test_protocol_on_an_unfriendly_network(tmp_path: Path) -> None:
    """Any order of turns, any delay, with and without buffering by MPI: exactly once, in order, never without credit; silence and misuse are errors."""
    finish(start("model", 1, tmp_path), 1)


@pytest.mark.parametrize(("mode", "num_ranks"), [("stress", 3), ("asleep", 2), ("full", 3), ("leftover", 3)])
def test_on_real_ranks(mode: str, num_ranks: int, tmp_path: Path) -> None:
    """See the function of that name in forward_worker.py."""
    finish(start(mode, num_ranks, tmp_path, seed=3), num_ranks)


def test_stopped_receiver_holds_the_producer_and_loses_nothing(tmp_path: Path) -> None:
    """SIGSTOP of the training rank until all lanes are full, then SIGCONT."""
    process = start("stopped", 3, tmp_path)
    wait_for(process, tmp_path / "ready-0")
    receiver = int((tmp_path / "pid").read_text())
    os.kill(receiver, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    wait_for(process, tmp_path / "full-1", tmp_path / "full-2")
    os.kill(receiver, signal.SIGCONT)
    finish(process, 3)
    assert (tmp_path / "read").read_text().split() == [(tmp_path / f"sent-{rank}").read_text() for rank in (1, 2)]


def test_end_that_does_not_come_is_named(tmp_path: Path) -> None:
    process = start("never_closed", 2, tmp_path)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    remove_stale_files(time.time() - TIMEOUT_S)
    assert process.returncode != 0
    error = json.loads((tmp_path / "failure.json").read_text())["error"]
    assert "rank 0 waited 1 s for forwarded records: rank 1 has not said how many records it sent (5 arrived)" in error, stderr
