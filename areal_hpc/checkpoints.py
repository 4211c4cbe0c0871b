"""The folders of a run's checkpoints: what makes one complete, which one a resumed run takes, which ones stay. Needs neither torch nor MPI.

    RUN/checkpoints/
      step-000120/          complete: it was renamed only after everything in it was on the disk
        manifest.json       name, bytes and CRC32C of every other file
        meta.json           what training rank 0 knows (train/saving.py)
        ...                 docs/checkpoints.md
      step-000130.tmp/      being written, or left by a job that died meanwhile

A checkpoint is complete when its manifest is there, can be read, and agrees with the files. `newest_complete` goes from the newest to the oldest and says of each
that it passes over what is wrong with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc._ring import crc32c
from areal_hpc.config import ConfigError

MANIFEST_FILE = "manifest.json"
META_FILE = "meta.json"
FOLDER = "checkpoints"
FORMAT = 1
"""Of meta.json and the ranks' files; raised when a version could not read those of the one before."""
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a checkpoint, as the rank that wrote it knows it."""

    name: str
    """Path inside the checkpoint's folder."""
    num_bytes: int
    crc32c: int

    @classmethod
    def of(cls, folder: Path, name: str) -> SavedFile:
        """Read the file back and measure it. Raises OSError."""
        return cls(name, (folder / name).stat().st_size, checksum(folder / name))


def checksum(path: Path) -> int:
    """CRC32C of a file's bytes. Raises OSError."""
    value, block = 0, bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = crc32c(memoryview(block)[:count], value)
    return value


def folder_of(run_dir: Path, step: int) -> Path:
    """RUN/checkpoints/step-000123."""
    return run_dir / FOLDER / f"step-{step:06d}"


def partial_of(folder: Path) -> Path:
    """The name under which that folder is written."""
    return folder.with_name(f"{folder.name}.tmp")


def steps_of(run_dir: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint with a final name, oldest first; complete or not."""
    found = {int(match[1]): path for path in (run_dir / FOLDER).glob("step-*") if (match := re.fullmatch(r"step-(\d{6,})", path.name))}
    return dict(sorted(found.items()))


def is_complete(folder: Path) -> bool:
    """Whether the folder was finished by the run that wrote it; `fault` says whether it is undamaged."""
    return (folder / MANIFEST_FILE).is_file()


def read_meta(folder: Path) -> dict[str, Any]:
    """`meta.json` of a finished checkpoint. Raises ConfigError when it is not one."""
    if not is_complete(folder):
        raise ConfigError(f"{folder}: not a complete checkpoint (no {MANIFEST_FILE})")
    try:
        meta: dict[str, Any] = json.loads((folder / META_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / META_FILE}: {error}") from error
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{folder}: a checkpoint of format {meta.get('format')}; this version reads format {FORMAT}")
    return meta


def fault(folder: Path) -> str:
    """What is wrong with a checkpoint, in a few words; empty when every file is there with the size and the checksum that its manifest says. Reads all of it."""
    try:
        files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
        listed = [SavedFile(name, entry["bytes"], entry["crc32c"]) for name, entry in files.items()]
    except FileNotFoundError:
        return f"no {MANIFEST_FILE}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} cannot be read"
    for size_only in (True, False):  # sizes first: a file that was cut short needs no reading
        for file in listed:
            try:
                if (size := (folder / file.name).stat().st_size) != file.num_bytes:
                    return f"{file.name} has {size} bytes, not {file.num_bytes}"
                if not size_only and checksum(folder / file.name) != file.crc32c:
                    return f"{file.name} has another checksum than when it was written"
            except FileNotFoundError:
                return f"{file.name} is missing"
            except OSError as error:
                return f"{file.name} cannot be read ({error.strerror})"
    return ""


def newest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """(newest undamaged checkpoint of a run or None, one line for each newer folder that was passed over)."""
    folders = steps_of(run_dir)
    skipped = {int(path.name[5:-4]): f"{path.name} was never finished" for path in (run_dir / FOLDER).glob("step-*.tmp") if path.name[5:-4].isdigit()}
    for step, folder in reversed(folders.items()):
        wrong = fault(folder)
        if not wrong:
            return folder, [line for newer, line in sorted(skipped.items(), reverse=True) if newer > step]
        skipped[step] = f"{folder.name}: {wrong}"
    return None, [line for _, line in sorted(skipped.items(), reverse=True)]


def finish(folder: Path, files: Iterable[SavedFile], meta: Mapping[str, Any]) -> int:
    """Make `folder` out of its `.tmp`, whose files are written and synced: meta.json, manifest, sync, rename. Returns the bytes of all files.

    An older folder of that name is replaced. Raises OSError when the disk refuses, or a file is not there with the size that its writer told.
    """
    partial = partial_of(folder)
    write_synced(partial / META_FILE, (json.dumps({"format": FORMAT, **meta}, indent=1) + "\n").encode())
    listed = [*files, SavedFile.of(partial, META_FILE)]
    for file in listed:
        size = (partial / file.name).stat().st_size
        if size != file.num_bytes:
            raise OSError(f"{file.name} has {size} bytes here, {file.num_bytes} where it was written")
    manifest = {"files": {file.name: {"bytes": file.num_bytes, "crc32c": file.crc32c} for file in listed}}
    write_synced(partial / MANIFEST_FILE, (json.dumps(manifest, indent=1) + "\n").encode())
    for path in {(partial / file.name).parent for file in listed} | {partial}:
        sync(path)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return sum(file.num_bytes for file in listed)


def superseded(steps: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """Which of these checkpoints may go: all but the `keep` newest and those whose step is a multiple of `keep_every` (0: none for that reason)."""
    newest = set(sorted(steps)[-keep:])
    return [step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)]


def remove_superseded(run_dir: Path, keep: int, keep_every: int, newest: int) -> list[int]:
    """Delete what `superseded` names among the finished checkpoints up to step `newest`, the one just written; returns their steps.

    Damaged folders are left for their owner to look at. Later steps are such: the run went on from before them, so they neither count as kept nor are deleted.
    """
    finished = {step: path for step, path in steps_of(run_dir).items() if step <= newest and is_complete(path)}
    gone = superseded(list(finished), keep, keep_every)
    for step in gone:
        (finished[step] / MANIFEST_FILE).unlink(missing_ok=True)  # first: what is half deleted is not complete
        shutil.rmtree(finished[step], ignore_errors=True)
    return gone


def remove_partial(run_dir: Path) -> None:
    """Delete what unfinished saves left: no job but ours works in this run directory (launch/ownership.py)."""
    for path in (*(run_dir / FOLDER).glob("step-*.tmp"), *(run_dir / FOLDER).glob("step-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def slow_down() -> None:
    """Sleep before files are written: tests and benchmarks make saves slow on purpose with AREAL_HPC_SLOW_SAVE_S (seconds)."""
    time.sleep(float(os.environ.get("AREAL_HPC_SLOW_SAVE_S") or 0))


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and push it to the disk (fsync(2)). Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Push a file, or a folder's entries, to the disk (fsync(2)). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
