"""Clocks of nodes over real MPI: a clock that lies and runs slow is set right at the start, and its drift is measured at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.launch.local import find_launcher


@pytest.mark.mpi
def test_drift_of_a_slow_clock(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [*find_launcher().command(3), sys.executable, str(Path(__file__).with_name("clock_worker.py")), str(out)]
    subprocess.run(command, check=True, timeout=120)
    (offset_s, nothing), (same_s, nothing_too), (zero_s, rows) = json.loads(out.read_text())
    assert offset_s == same_s == pytest.approx(5000.0, abs=0.5) and zero_s == 0.0, "ranks of one node agree; they began within half a second"
    assert nothing == nothing_too == []
    first, last = rows
    assert (first["node"], first["offset_s"], last["node"]) == (0, 0.0, 0)
    passed_s = last["time_s"] - first["time_s"]
    assert passed_s == pytest.approx(2.0, abs=1.0)
    assert last["offset_s"] == pytest.approx(0.01 * passed_s, abs=0.004) and 0 < last["error_s"] < 0.01
