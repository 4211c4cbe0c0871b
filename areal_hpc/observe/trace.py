"""`areal-hpc trace RUN`: what all ranks did, on one clock, as a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is Chrome's Trace Event Format, a JSON object with `traceEvents`; times in microseconds, here since the run's first attempt began. A process is a rank. Events:

    X  complete slice   a phase of a rank (/timeline); a step (/steps); a push, from its announcement to the slowest receiver (/pushes);
                         a checkpoint, from the cut until it is complete (/checkpoints)
    C  counter          /ranks: sequences decoding, groups waiting, tokens/s decoded; /ring: bytes in use
    i  instant          /events
    M  metadata         names and order of processes and threads

All rows are on the run's clock already: that of training rank 0's node, which every node's was set against through MPI at the start (topology.py). At the end each is
measured once more (/clocks): the drift is taken out of what ranks wrote with their own clocks (/timeline, /ring), as a line from the first measurement to the last.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.observe.runs import Run, load, roles
from areal_hpc.observe.schema import PHASES, ROLES, SAVE_OUTCOMES
from areal_hpc.observe.telemetry import Attribute

PHASE_COLORS = {  # names of the viewer's palette: good work, waiting, weights
    "decode": "thread_state_running",
    "train": "thread_state_running",
    "prox": "thread_state_running",
    "gated": "thread_state_iowait",
    "wait_data": "thread_state_iowait",
    "ring_full": "terrible",
    "swap": "thread_state_runnable",
    "pack": "thread_state_runnable",
    "push_wait": "thread_state_runnable",
}
JOB, JOB_NAME = 1_000_000, "job"
"""Process number of what belongs to no rank: steps, pushes, checkpoints."""
STEPS, PUSHES, SAVES = 1, 2, 3
"""Threads of the job."""
PHASE_THREAD = 1


def corrected(time_s: np.ndarray, node: np.ndarray, clocks: np.ndarray) -> np.ndarray:
    """Times on the run's clock as ranks wrote them -> without the drift of their nodes' clocks.

    `time_s` float64 [N]; `node` int [N], node of the rank that wrote each; `clocks`: rows of /clocks. A node with fewer than two measurements has no known drift.
    """
    out = np.array(time_s, float)
    for number in np.unique(clocks["node"]):
        rows = np.sort(clocks[clocks["node"] == number], order="time_s")
        first, last = rows[0], rows[-1]
        if last["time_s"] <= first["time_s"]:
            continue
        mine = node == number
        slope = (last["offset_s"] - first["offset_s"]) / (last["time_s"] - first["time_s"])
        out[mine] += slope * (out[mine] - first["time_s"])
    return out


def events(run: Run) -> Iterator[dict[str, Any]]:
    """All events of a run, metadata first."""
    first_unix = min((float(start.get("start_unix", 0.0)) for start in run.starts), default=0.0)
    yield from _names(run)
    for number, start in enumerate(run.starts):
        zero_s = float(start.get("start_s", 0.0)) - (float(start.get("start_unix", 0.0)) - first_unix)
        yield from _attempt(run, number, start, zero_s)


def _names(run: Run) -> Iterator[dict[str, Any]]:
    of_role = roles(run)
    hosts = [str(name) for name in str(run.attributes.get("hosts", "")).split(", ") if name]
    nodes = _nodes(run.attributes)
    for order, rank in enumerate(sorted(of_role, key=lambda rank: (of_role[rank] != "training", rank))):
        host = f" on {hosts[nodes[rank]]}" if rank in nodes and nodes[rank] < len(hosts) else ""
        yield from _process(rank, f"rank {rank} ({of_role[rank]}){host}", order + 1)
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": PHASE_THREAD, "args": {"name": "phases"}}
    yield from _process(JOB, JOB_NAME, 0)
    for thread, name in ((STEPS, "training steps"), (PUSHES, "weight pushes"), (SAVES, "checkpoints")):
        yield {"ph": "M", "name": "thread_name", "pid": JOB, "tid": thread, "args": {"name": name}}


def _process(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    found = [("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})]
    return [{"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args} for kind, args in found]


def _nodes(start: Mapping[str, Attribute]) -> dict[int, int]:
    """World rank -> node index, from the attribute `node_of_rank`; empty in logs without it."""
    text = str(start.get("node_of_rank", ""))
    return {rank: int(node) for rank, node in enumerate(text.split())} if text else {}


def _attempt(run: Run, number: int, start: Mapping[str, Attribute], zero_s: float) -> Iterator[dict[str, Any]]:
    nodes, clocks = _nodes(start), run.sampled["clocks"][number]

    def microseconds(time_s: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        node = np.array([nodes.get(int(rank), 0) for rank in ranks], int)
        return 1e6 * (corrected(time_s, node, clocks) - zero_s)

    timeline = run.sampled["timeline"][number]
    begins, ends = microseconds(timeline["start_s"], timeline["rank"]), microseconds(timeline["stop_s"], timeline["rank"])
    for row, begin, end in zip(timeline, begins, ends, strict=True):
        phase = PHASES[row["phase"]]
        color = {"cname": PHASE_COLORS[phase]} if phase in PHASE_COLORS else {}
        yield _slice(int(row["rank"]), PHASE_THREAD, phase, "phase", float(begin), float(end), {}) | color
    first_of_next = next((int(later["steps"]["step"].min()) for later in run.attempts[number + 1 :] if len(later["steps"])), None)
    for row in run.attempts[number]["steps"]:
        end = 1e6 * (float(row["end_s"]) - zero_s)
        about = {name: _plain(row[name]) for name in ("policy_version", "tokens", "tokens_per_s", "reward_mean", "staleness_mean", "staleness_max")}
        about |= {"repeated_later": True} if first_of_next is not None and row["step"] >= first_of_next else {}
        yield _slice(JOB, STEPS, f"step {row['step']}", "step", end - 1e6 * float(row["wall_s"]), end, about)
    for row in run.attempts[number]["pushes"]:
        if row["announced_s"] > 0:  # logs of earlier versions do not say when
            at = 1e6 * (float(row["announced_s"]) - zero_s)
            about = {name: _plain(row[name]) for name in ("bytes", "pack_s", "transfer_s", "confirm_s", "pause_max_s")}
            yield _slice(JOB, PUSHES, f"version {row['version']}", "push", at, at + 1e6 * float(row["transfer_s"]), about)
    for row in run.sampled["checkpoints"][number]:
        at = 1e6 * (float(row["begun_s"]) - zero_s)
        about = {"outcome": SAVE_OUTCOMES[row["outcome"]], **{name: _plain(row[name]) for name in ("bytes", "waiting_groups", "unfinished_groups")}}
        yield _slice(JOB, SAVES, f"checkpoint of step {row['step']}", "checkpoint", at, at + 1e6 * float(row["seconds"]), about)
    yield from _counters(run, number, zero_s, microseconds)
    for row in run.sampled["events"][number]:
        at = 1e6 * (float(row["time_s"]) - zero_s)
        text = row["text"].decode(errors="replace")
        yield {
            "ph": "i",
            "s": "p",
            "name": row["kind"].decode(),
            "cat": "event",
            "ts": at,
            "pid": int(row["rank"]),
            "tid": PHASE_THREAD,
            "args": {"text": text},
        }


def _counters(run: Run, number: int, zero_s: float, microseconds: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Iterator[dict[str, Any]]:
    states, ring = run.sampled["ranks"][number], run.sampled["ring"][number]
    for rank in np.unique(states["rank"]):
        mine = states[states["rank"] == rank]
        rates = np.diff(mine["tokens"]) / np.maximum(np.diff(mine["time_s"]), 1e-9)
        for k, row in enumerate(mine):
            at = 1e6 * (float(row["time_s"]) - zero_s)
            if ROLES[row["role"]] == "generation":
                yield _counter(int(rank), "sequences decoding", at, {"running": int(row["running"])})
                if k:
                    yield _counter(int(rank), "tokens/s", at, {"decoded": round(float(rates[k - 1]), 1)})
            yield _counter(int(rank), "groups waiting", at, {"groups": int(row["waiting"])})
    for row, at in zip(ring, microseconds(ring["time_s"], ring["rank"]), strict=True):
        yield _counter(int(row["rank"]), f"lane {row['lane']} bytes in use", float(at), {"bytes": int(row["used_bytes"])})


def _slice(pid: int, tid: int, name: str, category: str, begin_us: float, end_us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin_us, "dur": max(0.0, end_us - begin_us), "pid": pid, "tid": tid, "args": args}


def _counter(pid: int, name: str, at_us: float, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "ts": at_us, "pid": pid, "tid": 0, "args": values}


def _plain(value: Any) -> Any:
    """Strict JSON has no not-a-number."""
    number = value.item()
    return None if isinstance(number, float) and not np.isfinite(number) else number


def write_trace(run_dir: Path, out: Path | None = None) -> Path:
    """Write RUN/report/trace.json.gz, or the file `out` (compressed if its name ends in .gz); returns its path. Raises ConfigError when there is no log."""
    run = load(run_dir)
    path = out or run_dir / "report" / "trace.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"run": run.name, "attempts": len(run.starts)}) + ', "traceEvents": [\n')
            for number, event in enumerate(events(run)):
                file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; choose a file that can be written") from error
    return path


def main(args: Sequence[str]) -> int:
    """`areal-hpc trace RUN [--out FILE]`. Raises ConfigError for a mistake of the user."""
    usage = "areal-hpc trace RUN [--out FILE.json or FILE.json.gz]"
    names: list[str] = []
    out: Path | None = None
    rest = iter(args)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name == "--out":
            value = value or next(rest, "")
            if not value.endswith((".json", ".json.gz")):
                raise ConfigError(f"--out '{value}' must end in .json or .json.gz: {usage}")
            out = Path(value)
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option '{argument}' of areal-hpc trace; there is: --out")
        else:
            names.append(argument)
    if len(names) != 1:
        raise ConfigError(f"areal-hpc trace needs one run folder, got {len(names)}: {usage}")
    path = write_trace(Path(names[0]), out)
    print(f"trace: {path} (open it at ui.perfetto.dev or in chrome://tracing; nothing is sent anywhere)")
    return 0
