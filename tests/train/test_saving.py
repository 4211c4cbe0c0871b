"""Training rank 0's book of checkpoints: what it makes of the ranks' reports, of disks that refuse, of ranks that do not answer."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from areal_hpc import checkpoints
from areal_hpc.checkpoints import folder_of, partial_of
from areal_hpc.config import Checkpoint, Config
from areal_hpc.observe.schema import SAVE_OUTCOMES
from areal_hpc.observe.telemetry import MemoryLog
from areal_hpc.topology import World
from areal_hpc.train.saving import Saves
from areal_hpc.transport.cut import RankState, Saved, write_state
from areal_hpc.transport.messages import Tag

RANKS = (0, 1, 2)


@dataclass
class Outbox:
    """Keeps what a mailbox would send."""

    posted: list = field(default_factory=list)

    def post(self, destination, tag, body=None):
        self.posted.append((destination, tag, body))


@pytest.fixture
def book(tmp_path):
    """Of a run with generation ranks 0 and 1 and training rank 2; every second step is due."""
    world = World(2, "training", 0, 2, (0, 1), (2,), (0, 0, 0), ("here",), 0.0, None, None, None, None, None)
    said, log = [], MemoryLog.create()
    saves = Saves(
        Config(checkpoint=Checkpoint(every=2, keep=1, deadline_s=60.0)),
        world,
        Outbox(),
        tmp_path,
        1000,
        lambda kind, text: said.append((kind, text)),
        lambda row: log.append("checkpoints", row),
    )
    yield saves, said
    rows = log.rows("checkpoints")
    assert Counter(SAVE_OUTCOMES[row["outcome"]] for row in rows) == saves.counts
    assert all((row["bytes"] > 0) == (row["outcome"] == 0) and row["seconds"] >= 0 for row in rows)


def share(saves, step, rank):
    """What a rank has written."""
    name = f"rank-training-{rank}.safetensors"
    return Saved(step, (write_state(partial_of(folder_of(saves.run_dir, step)), name, RankState()),))


def settle(saves):
    stop_at = time.monotonic() + 30
    while saves.busy:
        saves.poll()
        assert time.monotonic() < stop_at
        time.sleep(0.001)


def save(saves, step, errors=()):
    """A whole checkpoint; `errors`: ranks whose disk refuses."""
    assert saves.is_due(step)
    saves.begin(step, {"step": step})
    for rank in RANKS:
        saves.receive(rank, Saved(step, error="No space left on device") if rank in errors else share(saves, step, rank))
    settle(saves)


def test_complete_only_with_every_rank_and_the_log(book):
    saves, said = book
    assert not saves.is_due(1) and saves.is_due(2)
    saves.begin(2, {"step": 2})
    folder = folder_of(saves.run_dir, 2)
    assert saves.mailbox.posted == [(rank, Tag.SNAPSHOT, (2, str(partial_of(folder)))) for rank in (0, 1)]
    for rank in RANKS:
        saves.poll()
        assert saves.busy and not folder.exists()
        saves.receive(rank, share(saves, 2, rank))
    for _ in range(50):  # the row of step 2 still waits for its push: a run that went on from here would lack it
        saves.poll(is_logged=False)
        time.sleep(0.001)
    assert saves.busy and not folder.exists()
    settle(saves)
    assert checkpoints.fault(folder) == "" and checkpoints.read_meta(folder)["step"] == 2 and saves.newest == 2
    save(saves, 4)
    assert list(checkpoints.steps_of(saves.run_dir)) == [4]  # keep = 1
    assert [kind for kind, _ in said] == ["save", "save"] and "deleted: step 2" in said[1][1]


def test_a_disk_that_refuses_is_said_once_and_the_older_one_stays(book):
    saves, said = book
    save(saves, 2)
    save(saves, 4, errors=(1,))
    save(saves, 6, errors=(0, 2))
    saves.expected_bytes, before = 1 << 60, saves.expected_bytes
    assert not saves.is_due(8)
    saves.expected_bytes = before
    assert [path.name for path in (saves.run_dir / "checkpoints").iterdir()] == ["step-000002"]
    save(saves, 10)
    assert [kind for kind, _ in said] == ["save", "save_failed", "save", "save_recovered"]
    assert said[1][1].startswith("warning: no checkpoint of step 4: rank 1 (generation 1): No space left on device; that of step 2 stays, training goes on")
    assert "3 could not be written" in said[3][1]
    assert saves.counts == {"complete": 2, "failed": 2, "skipped_no_room": 1}


def test_one_at_a_time_and_not_for_ever(book):
    """What is due meanwhile is skipped and counted; one that takes too long is given up, names who is late, and leaves nothing once that rank has answered."""
    saves, said = book
    save(saves, 2)
    saves.config = replace(saves.config, checkpoint=replace(saves.config.checkpoint, deadline_s=0.01))
    assert saves.is_due(4)
    saves.begin(4, {"step": 4})
    assert not saves.is_due(6) and saves.counts["skipped_busy"] == 1
    saves.receive(0, share(saves, 4, 0))
    saves.receive(2, share(saves, 4, 2))
    time.sleep(0.02)
    saves.poll()
    assert saves.overdue and "not written within 0.01 s by rank 1 (generation 1) on host here; that of step 2 stays" in said[-1][1]
    saves.poll()
    assert saves.busy and not saves.is_due(8)
    saves.receive(1, share(saves, 4, 1))
    settle(saves)
    assert [path.name for path in (saves.run_dir / "checkpoints").iterdir()] == ["step-000002"]
    saves.config = replace(saves.config, checkpoint=replace(saves.config.checkpoint, deadline_s=60.0))
    save(saves, 10)
    assert saves.counts == {"complete": 2, "failed": 1, "skipped_busy": 2} and said[-1][0] == "save_recovered"


def test_the_last_step_is_due_whatever_its_number(book):
    saves, _ = book
    saves.config = replace(saves.config, train=replace(saves.config.train, num_steps=5))
    assert not saves.is_due(3)
    save(saves, 5)
    saves.config = replace(saves.config, checkpoint=replace(saves.config.checkpoint, every=0))
    assert not saves.is_due(5)
