"""Commands as an ordinary user, where the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
UID = 54321
"""Of nobody else: it needs no entry in /etc/passwd."""
NEEDED = tuple(dict.fromkeys(Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)))


def missing() -> str:
    """Why a command cannot run as an ordinary user here; empty if it can."""
    if os.getuid() != 0:
        return "the tests run as an ordinary user already"
    if lacking := [tool for tool in ("setpriv", "unshare", "mount") if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)}"
    trial = subprocess.run(as_user([sys.executable, "-c", "import os; raise SystemExit(os.getuid())"]), capture_output=True, text=True)
    return "" if trial.returncode == UID & 0xFF else f"no ordinary user can run this interpreter: {trial.stderr.strip()}"


def as_user(command: list[str]) -> list[str]:
    """The command under another user id, with no group and no capability.

    Folders of root's that hold the interpreter or the repository are opened in a mount namespace of its own.
    """
    blocked = {top for path in NEEDED if (top := _closed_ancestor(path))}
    steps = ["set -e", "spare=$(mktemp -d)", 'mount -t tmpfs tmpfs "$spare"']
    inside = [path for path in NEEDED if _closed_ancestor(path)]
    for number, path in enumerate(inside):
        steps += [f'mkdir "$spare/{number}"', f'mount --rbind "{path}" "$spare/{number}"']
    steps += [f'mount -t tmpfs -o mode=755 tmpfs "{top}"' for top in blocked]
    for number, path in enumerate(inside):
        steps += [f'mkdir -p "{path}"', f'mount --rbind "$spare/{number}" "{path}"']
    steps += ['umount -l "$spare"', 'rmdir "$spare"', f'exec setpriv --reuid {UID} --regid {UID} --clear-groups --inh-caps=-all --bounding-set=-all -- "$@"']
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(steps), "sh", *command]


def _closed_ancestor(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not enter."""
    return next((folder for folder in reversed([path, *path.parents]) if not folder.stat().st_mode & 0o001), None)


@contextmanager
def folder_of_user(uid: int) -> Iterator[Path]:
    """An empty folder that belongs to the user. Not below pytest's own, which others may not enter."""
    with tempfile.TemporaryDirectory(prefix="areal-hpc-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "own").mkdir(mode=0o700)
        os.chown(folder / "own", uid, uid)
        yield folder / "own"
