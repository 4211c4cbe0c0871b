"""Tapes: what each rank writes down so that `areal-hpc replay` can do the same again. docs/replay.md says what that guarantees.

    attempt-K/tape-RRRR.h5      one file per world rank, tables in observe/schema.py
      generation rank           every call that changed its engine, by engine step, with hashes of the answers
      training rank             its share of every batch, in order, with hashes of the trajectories; checksums of its parameters after each step

Rows are gathered in memory and go to the file about once a second, so a killed rank leaves a prefix.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import Config, ConfigError
from areal_hpc.config_io import as_yaml
from areal_hpc.observe.schema import ALL_TABLES, GENERATION_TAPE, TRAINING_TAPE
from areal_hpc.observe.telemetry import Attribute, Log, hardware, read_attributes, read_table
from areal_hpc.topology import World
from areal_hpc.transport.trajectory import Status, Trajectory

FLUSH_S = 1.0
"""Seconds between two writes of a tape."""
TOKEN_COLUMNS = {"token": "tokens_R", "logprob": "logprobs_R", "version": "versions_R", "sampled": "loss_mask_R"}
"""Column of /answer_tokens -> field of Trajectory: what an answer is made of, for payload and hash alike."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed, and how."""

    attempt_dir: Path
    """attempt-K, with its tapes."""
    num_steps: int
    """Training steps to replay."""
    grade_again: bool = False
    """Ask the graders, instead of taking the recorded verdicts."""
    force: bool = False
    """Go on where processor, number of threads or version of torch are others than recorded."""


def digest(arrays: Iterable[np.ndarray]) -> int:
    """64 bits of BLAKE2b over lengths and bytes of the arrays."""
    data = b"".join(part for array in arrays for part in (len(array).to_bytes(8, "little"), array.tobytes()))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def trajectory_digest(trajectory: Trajectory) -> int:
    """Of everything that a trajectory trains with; not of the times it took."""
    verdict = np.array([trajectory.reward, float(trajectory.status)], np.float32)
    return digest([trajectory.prompt_P, *(getattr(trajectory, name) for name in TOKEN_COLUMNS.values()), verdict])


def tape_path(attempt_dir: Path, world_rank: int) -> Path:
    """attempt-K/tape-RRRR.h5."""
    return attempt_dir / f"tape-{world_rank:04d}.h5"


class TapeWriter:
    """The tape of this rank, being written.

    Lifecycle: construct -> (`add` | `add_rows`)*, `flush_when_due` now and then -> `close`.
    """

    def __init__(self, attempt_dir: Path, config: Config, world: World, attributes: Mapping[str, Attribute]) -> None:
        tables = GENERATION_TAPE if world.role == "generation" else TRAINING_TAPE
        attributes = identity(config, world) | dict(attributes)
        self._log = Log.create(tape_path(attempt_dir, world.world_rank), attributes, flush_interval_s=math.inf, tables=tables)
        self._rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._flushed_at = time.monotonic()

    def add(self, table: str, *values: Any) -> None:
        """One row, its values in the order of the columns."""
        self._rows[table].append(values)

    def add_rows(self, table: str, rows: np.ndarray) -> None:
        """Rows of the table's own type."""
        self._log.append(table, rows)

    def flush_when_due(self) -> None:
        """Write what has gathered, at most once in FLUSH_S."""
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        for table, rows in self._rows.items():
            self._log.append(table, np.array(rows, ALL_TABLES[table].dtype))
        self._rows.clear()
        self._log.flush()

    def close(self) -> None:
        """Write the rest and close the file."""
        self._flush()
        self._log.close()


def identity(config: Config, world: World) -> dict[str, Attribute]:
    """Attributes that say which run and which place a tape comes from."""
    return {
        "config": as_yaml(config),
        "record": config.log.record,
        "seed": config.seed,
        "rank": world.world_rank,
        "role": world.role,
        "num_generation_ranks": world.num_generation,
        "num_training_ranks": world.num_training,
        "host": world.host,
        **machine(),
        **machine_of_rank(),
    }


def machine() -> dict[str, Attribute]:
    """What bits depend on, as far as it is known without loading torch: processor, version of torch."""
    return {"cpu_model": hardware()["cpu_model"], "torch_version": version("torch")}


def machine_of_rank() -> dict[str, Attribute]:
    """The rest: instructions that torch uses, threads of this process."""
    import torch

    return {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def check_machine(tape: Tape, here: Mapping[str, Attribute]) -> None:
    """Raises ConfigError when `here` is not the machine that the tape was recorded on."""
    others = [f"{name} is {value}, recorded {tape.attributes.get(name)}" for name, value in here.items() if tape.attributes.get(name) != value]
    if others:
        raise ConfigError(f"{tape.path}: {'; '.join(others)}: bits may differ for that alone; --force replays nevertheless")


class Tape:
    """A recorded tape. Tables are read when they are first asked for, so nobody holds tokens that he does not train."""

    def __init__(self, attempt_dir: Path, world_rank: int) -> None:
        """Raises ConfigError when there is no readable tape of this rank."""
        self.path = tape_path(attempt_dir, world_rank)
        try:
            _check_whole(self.path)
            self.attributes = read_attributes(self.path)
        except OSError as error:
            raise self._unreadable(error) from error
        self._tables: dict[str, np.ndarray] = {}

    def table(self, name: str) -> np.ndarray:
        """All rows. Raises ConfigError when they cannot be read."""
        if name not in self._tables:
            try:
                self._tables[name] = read_table(self.path, name)
            except (OSError, KeyError) as error:
                raise self._unreadable(error) from error
        return self._tables[name]

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path}: not a readable tape ({' '.join(str(error).split())})")

    def at_step(self, table: str, step: int) -> np.ndarray:
        """Rows of one training step."""
        rows = self.table(table)
        found: np.ndarray = rows[rows["step"] == step]
        return found

    @property
    def num_steps(self) -> int:
        """Last training step that is on the tape as a whole: the rows of a step end with the checksums of its tensors, which all steps have alike."""
        steps = self.table("tensors")["step"]
        num_tensors = int((steps == self.first_step).sum())
        counts = np.bincount(steps[steps > self.first_step], minlength=1)
        complete = self.first_step
        while complete + 1 < len(counts) and counts[complete + 1] == num_tensors:
            complete += 1
        return complete

    @property
    def first_step(self) -> int:
        """Policy version that training began with: 0, or that of a checkpoint."""
        return int(self.attributes["first_step"])

    @property
    def tensor_names(self) -> list[str]:
        return str(self.attributes["tensors"]).split("\n")

    def trajectories(self, step: int) -> list[Trajectory]:
        """What this rank trained in a step, from the payload. Raises ConfigError when it is not on the tape."""
        rows = self.table("batches")
        mine = np.flatnonzero(rows["step"] == step)
        prompt_stops, answer_stops = np.cumsum(rows["num_prompt"], dtype=np.int64), np.cumsum(rows["num_answer"], dtype=np.int64)
        prompts, answers = self.table("prompt_tokens")["token"], self.table("answer_tokens")
        if len(mine) and (len(prompts) < prompt_stops[mine[-1]] or len(answers) < answer_stops[mine[-1]]):
            raise ConfigError(f"{self.path}: the tokens of step {step} are not on it; record them with --log.record tokens")
        found = []
        for k in mine:
            row, answer = rows[k], answers[answer_stops[k] - rows["num_answer"][k] : answer_stops[k]]
            columns: dict[str, Any] = {field: answer[column].copy() for column, field in TOKEN_COLUMNS.items()}
            columns["loss_mask_R"] = columns["loss_mask_R"].astype(bool)
            columns["prompt_P"] = prompts[prompt_stops[k] - row["num_prompt"] : prompt_stops[k]].copy()
            try:
                reward, status = float(row["reward"]), Status(int(row["status"]))
            except ValueError as error:
                raise ConfigError(f"{self.path}: damaged, in an answer of step {step}: {error}") from error
            found.append(Trajectory(ticket=int(row["ticket"]), sample=int(row["sample"]), reward=reward, status=status, **columns))
        return found


def _check_whole(path: Path) -> None:
    """HDF5 asks again and again for what a file that was cut short promises to hold. Raises OSError for such a file.

    Format: superblock of version 3 (HDF5 File Format Specification, II.A), whose "end of file address" stands at byte 28.
    """
    with path.open("rb") as file:
        superblock = file.read(36)
    promised, there = int.from_bytes(superblock[28:36], "little"), path.stat().st_size
    if len(superblock) == 36 and superblock[8] == 3 and promised > there:
        raise OSError(f"cut short: {there} of {promised} bytes are there")


def read_tapes(attempt_dir: Path) -> list[Tape]:
    """The tapes of all ranks, by world rank. Raises ConfigError when one is missing or cannot be read."""
    first = Tape(attempt_dir, 0)
    num_ranks = int(first.attributes["num_generation_ranks"]) + int(first.attributes["num_training_ranks"])
    return [first, *(Tape(attempt_dir, rank) for rank in range(1, num_ranks))]


def tapes_of_replay(replay: Replay) -> list[Tape]:
    """The tapes of all ranks, on a machine like theirs as far as this rank can tell. Raises ConfigError."""
    tapes = read_tapes(replay.attempt_dir)
    if not replay.force:
        check_machine(tapes[0], machine() | machine_of_rank())
    return tapes


def of_role(tapes: Iterable[Tape], role: str) -> list[Tape]:
    """The tapes of the ranks of one role, by role rank."""
    return [tape for tape in tapes if tape.attributes["role"] == role]
