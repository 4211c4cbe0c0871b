"""Attempts of a run: a new one, or the next one of a run that was stopped, preempted or killed.

`areal-hpc run RECIPE --run-dir RUN --resume [options]` goes on from the newest complete checkpoint, in RUN/attempt-K+1. Its configuration is RUN/config.yaml with the
options given now. Options that say what the trajectories on their way are, or which ones come next, may not change (`FIXED`); docs/checkpoints.md lists the others.
Where there is nothing to go on from, the attempt begins anew and says so: a job that is requeued after it died early needs no other command line.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc import checkpoints
from areal_hpc.config import Config, ConfigError
from areal_hpc.config_io import save_yaml

DONE, LOG_INCOMPLETE = 0, 3
"""Exit statuses of a run whose model is complete; with the second, rows are missing from its log, which more training would not bring back."""
FIXED = (
    "recipe",
    "init_from",
    "seed",
    "model",
    "data",
    "generation.engine",
    "generation.temperature",
    "generation.max_new_tokens",
    "generation.imposed_mean",
    "generation.imposed_sigma",
    "staleness",
    "train.batch_size",
    "train.group_size",
    "reward.right",
    "reward.wrong",
    "reward.custom",
)
"""Options, and whole sections, that a resumed run has to leave as they are."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where an attempt writes, and what it goes on from."""

    folder: Path
    """RUN/attempt-K; that of a replay is called attempt-K-LEVEL-N."""
    checkpoint: Path | None = None
    notes: list[str] = field(default_factory=list)
    """For people: which checkpoint, which were passed over and why."""

    @property
    def number(self) -> int:
        """K."""
        return int(self.folder.name.split("-")[1])

    def environment(self) -> dict[str, str]:
        """How ranks that are started for it hear of it."""
        return {"AREAL_HPC_ATTEMPT_DIR": str(self.folder), "AREAL_HPC_CHECKPOINT": str(self.checkpoint or "")}

    @classmethod
    def from_environment(cls) -> Attempt | None:
        """In such a rank; None in one that somebody else started."""
        folder, checkpoint = os.environ.get("AREAL_HPC_ATTEMPT_DIR"), os.environ.get("AREAL_HPC_CHECKPOINT")
        return cls(Path(folder), Path(checkpoint) if checkpoint else None) if folder else None


def attempts_of(run_dir: Path) -> dict[int, Path]:
    """K -> RUN/attempt-K, ascending."""
    found = {path.name.removeprefix("attempt-"): path for path in run_dir.glob("attempt-*")}
    return dict(sorted((int(number), path) for number, path in found.items() if number.isdigit()))


def check_unchanged(stored: Config, config: Config) -> None:
    """Raises ConfigError when an option differs that may not change on resume."""
    for name in FIXED:
        section, _, option = name.partition(".")
        old, new = getattr(stored, section), getattr(config, section)
        names = [option] if option else [item.name for item in dataclasses.fields(old)] if dataclasses.is_dataclass(old) else []
        for changed in names:
            _same(f"{section}.{changed}", getattr(old, changed), getattr(new, changed))
        if not names:
            _same(name, old, new)


def _same(name: str, old: Any, new: Any) -> None:
    if old != new:
        raise ConfigError(f"{name}={new} may not change on --resume: the run has {old}; leave it out, or begin a new run with --init-from")


def steps_done(run_dir: Path) -> int:
    """Steps of a run that ended as it should, by its latest attempt; 0 for any other."""
    for folder in reversed(attempts_of(run_dir).values()):
        try:
            report = json.loads((folder / "exit.json").read_text())
        except (OSError, ValueError):
            return 0
        return int(report.get("steps", 0)) if report.get("status") in (DONE, LOG_INCOMPLETE) else 0
    return 0


def next_attempt(config: Config, fingerprint: str) -> Attempt:
    """Choose the checkpoint and make RUN/attempt-K+1, as the owner of the run directory. Raises ConfigError.

    `fingerprint`: of the data as they are now.
    """
    run_dir = Path(config.run_dir)
    number = max(attempts_of(run_dir), default=0) + 1
    checkpoint, skipped = checkpoints.newest_complete(run_dir)
    notes = [f"passed over: {line}" for line in skipped]
    if checkpoint is None:
        notes.append(f"{run_dir} holds no complete checkpoint: attempt {number} begins anew")
    else:
        meta = checkpoints.read_meta(checkpoint)
        if meta["fingerprint"] != fingerprint:
            raise ConfigError(
                f"the data have another fingerprint ({fingerprint}) than in {checkpoint} ({meta['fingerprint']}); tickets would name other problems"
            )
        if meta["step"] > config.train.num_steps:
            raise ConfigError(f"train.num_steps={config.train.num_steps}: {checkpoint.name} has more steps already; use {meta['step']} or more")
        notes.append(f"attempt {number} goes on from {checkpoint.name}")
    folder = run_dir / f"attempt-{number}"
    try:
        folder.mkdir(parents=True)
        save_yaml(config, folder / "config.yaml")
        keep_as_newest(run_dir, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {error.strerror}") from None
    return Attempt(folder, checkpoint, notes)


def keep_as_newest(run_dir: Path, stored: Path) -> None:
    """RUN/config.yaml becomes a copy of an attempt's configuration, at once or not at all."""
    temporary = run_dir / "config.yaml.tmp"
    temporary.write_text(stored.read_text())
    temporary.replace(run_dir / "config.yaml")
