"""The timeline: a valid file of Chrome's Trace Event Format that holds every interval of the log, on one clock, drift removed."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.observe.runs import load
from areal_hpc.observe.schema import PHASES, TABLES
from areal_hpc.observe.telemetry import Log, read_attributes, read_table
from areal_hpc.observe.trace import JOB, corrected, write_trace

_spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).parent / "synthetic.py")
synthetic = importlib.util.module_from_spec(_spec)
sys.modules["synthetic"] = synthetic
_spec.loader.exec_module(synthetic)
NEEDS = {
    "X": {"ts", "dur", "pid", "tid", "name", "cat"},
    "C": {"ts", "pid", "name", "args"},
    "i": {"ts", "pid", "tid", "s", "name"},
    "M": {"name", "pid", "args"},
}
"""Fields that each kind of event must have, by the format's description."""


def read(path: Path) -> list[dict[str, Any]]:
    """Strict JSON, and the rules of the format."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        document = json.load(file, parse_constant=refuse)
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert NEEDS[event["ph"]] <= event.keys()
        assert isinstance(event["pid"], int) and all(isinstance(event[name], (int, float)) for name in ("ts", "dur") if name in event)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return document["traceEvents"]


def test_every_interval_is_there(tmp_path: Path) -> None:
    log = synthetic.write_attempt(tmp_path, 1, synthetic.Shape(last_step=5))
    trace = read(write_trace(tmp_path))
    zero_s = float(read_attributes(log)["start_s"])
    rows = read_table(log, "timeline")
    spans = [(round(1e6 * (row["start_s"] - zero_s)), round(1e6 * (row["stop_s"] - row["start_s"]))) for row in rows]
    wanted = sorted((int(row["rank"]), PHASES[row["phase"]], *span) for row, span in zip(rows, spans, strict=True))
    slices = [event for event in trace if event["ph"] == "X"]
    found = sorted((event["pid"], event["name"], round(event["ts"]), round(event["dur"])) for event in slices if event["cat"] == "phase")
    assert found == wanted
    steps = [event for event in slices if event["cat"] == "step"]
    expected = [(f"step {k}", 15_000_000 + 2_000_000 * (k - 1), 2_000_000) for k in range(1, 6)]
    assert [(event["name"], round(event["ts"]), round(event["dur"])) for event in steps] == expected
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {0: "rank 0 (generation)", 1: "rank 1 (generation)", 2: "rank 2 (generation)", 3: "rank 3 (training)", JOB: "job"}
    running = [event["args"]["running"] for event in trace if event["name"] == "sequences decoding" and event["pid"] == 1]
    assert running == [5, 6, 7, 8, 4]
    assert [event["args"]["decoded"] for event in trace if event["name"] == "tokens/s" and event["pid"] == 1] == [50.0] * 4
    assert [event["args"]["text"] for event in trace if event["ph"] == "i"] == ["done"]


def test_slices_of_a_thread_do_not_overlap(tmp_path: Path) -> None:
    """Complete events of one thread must nest; ours follow each other."""
    synthetic.write_attempt(tmp_path, 1, synthetic.Shape(wait_s=0.3, last_step=8))
    of_thread = defaultdict(list)
    for event in read(write_trace(tmp_path, tmp_path / "out.json")):
        if event["ph"] == "X" and event["cat"] != "push":
            of_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(of_thread) == 5
    for spans in of_thread.values():
        spans.sort()
        assert all(earlier[1] <= later[0] + 1e-3 for earlier, later in itertools.pairwise(spans))


def test_pushes_lie_where_they_were_announced(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    log = Log.create(tmp_path / "attempt-1" / "log.h5", {}, synthetic.Clock())
    log.append("pushes", synthetic.row_of("pushes", version=3, announced_s=104.5, transfer_s=0.25))
    log.append("pushes", synthetic.row_of("pushes", version=4, transfer_s=0.25))
    log.close()
    pushes = [event for event in read(write_trace(tmp_path)) if event.get("cat") == "push"]
    assert [(event["name"], event["ts"], event["dur"]) for event in pushes] == [("version 3", pytest.approx(4.5e6), pytest.approx(250e3))], (
        "one row does not say when"
    )


def test_attempts_lie_one_behind_the_other(tmp_path: Path) -> None:
    for attempt, began, steps in ((1, 1000.0, (1, 5)), (2, 1100.0, (4, 6))):
        attributes = {"start_unix": began, "attempt": attempt}
        synthetic.write_attempt(tmp_path, attempt, synthetic.Shape(first_step=steps[0], last_step=steps[1], attributes=attributes))
    steps = [event for event in read(write_trace(tmp_path)) if event.get("cat") == "step"]
    assert [(event["name"], round(event["ts"] / 1e6)) for event in steps] == [
        *((f"step {k}", 15 + 2 * (k - 1)) for k in range(1, 6)),
        *((f"step {k}", 115 + 2 * (k - 4)) for k in range(4, 7)),
    ]
    assert [event["name"] for event in steps if "repeated_later" in event["args"]] == ["step 4", "step 5"]


def test_drift_is_taken_out() -> None:
    """Node 1's clock loses 10 ms in 100 s, node 2 has one measurement, node 0 none."""
    clocks = np.zeros(3, TABLES["clocks"].dtype)
    clocks["node"], clocks["time_s"], clocks["offset_s"] = [1, 1, 2], [200.0, 300.0, 200.0], [0.0, 0.010, 0.0]
    times = np.array([200.0, 250.0, 300.0, 310.0, 250.0, 250.0])
    nodes = np.array([1, 1, 1, 1, 2, 0])
    assert corrected(times, nodes, clocks) - times == pytest.approx([0.0, 0.005, 0.010, 0.011, 0.0, 0.0], abs=1e-12)


def test_only_the_rank_on_the_drifting_node_moves(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    attributes = {"hosts": "n0, n1", "node_of_rank": "1 0"}
    log = Log.create(tmp_path / "attempt-1" / "log.h5", attributes, synthetic.Clock())
    for rank, phase in ((0, "decode"), (1, "train")):
        log.append("timeline", {"rank": rank, "role": rank, "phase": PHASES.index(phase), "start_s": 100.0, "stop_s": 200.0})
    for time_s, offset_s in ((100.0, 0.0), (200.0, 0.5)):
        log.append("clocks", {"node": 1, "time_s": time_s, "offset_s": offset_s, "error_s": 0.0})
    log.close()
    trace = read(write_trace(tmp_path))
    assert {event["pid"]: round(event["dur"]) for event in trace if event["ph"] == "X"} == {0: 100_500_000, 1: 100_000_000}
    assert {event["args"]["name"] for event in trace if event["name"] == "process_name"} >= {"rank 0 (generation) on n1", "rank 1 (training) on n0"}
    assert len(load(tmp_path).sampled["clocks"][0]) == 2


def test_trace_loads_in_perfetto(tmp_path: Path) -> None:
    """Perfetto's own trace processor counts the slices (package `perfetto`, and its program, which the package downloads on first use)."""
    processor = pytest.importorskip("perfetto.trace_processor", reason="the package perfetto is not installed")
    log = synthetic.write_attempt(tmp_path, 1, synthetic.Shape(last_step=5))
    try:
        with processor.TraceProcessor(trace=str(write_trace(tmp_path, tmp_path / "out.json"))) as loaded:
            (row,) = loaded.query("select count(*) as n from slice where category = 'phase'")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"Perfetto's trace processor cannot be had here: {error}")
    assert row.n == len(read_table(log, "timeline"))
