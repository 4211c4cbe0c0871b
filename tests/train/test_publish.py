"""The book of training rank 0: what is confirmed, what goes to the log, and who is named when a push does not come to its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc.observe.timeline import Phases
from areal_hpc.train.publish import Publisher, Push
from areal_hpc.transport.messages import Message, Tag


def publisher(deadline_s: float = 0.05, sender_error: str = "") -> Publisher:
    """Of two generation ranks, with versions 0 and 1 on the way."""

    def check() -> None:
        if sender_error:
            raise ConnectionError(sender_error)

    name = "rank {0} (generation {0})".format
    world: Any = SimpleNamespace(generation_ranks=(0, 1), num_generation=2, name_of=name, full_name_of=lambda rank: f"{name(rank)} on host n1")
    sender: Any = SimpleNamespace(check=check, root=0)
    made = Publisher(world, SimpleNamespace(), sender, Phases(2, "training"), deadline_s)  # type: ignore[arg-type]
    now = made.phases._clock()
    made.pushes = [Push(version, 100, 0.1, 7, now) for version in (0, 1)]
    return made


def confirm(made: Publisher, rank: int, version: int, *, is_staged: bool = True) -> None:
    assert made.receive(Message(rank, Tag.CONFIRM, (version, 0.5, 0.1, is_staged)))


def test_pushes_go_to_the_log_in_order_once_nothing_is_missing() -> None:
    made = publisher()
    confirm(made, 0, 0)
    assert not made.take_finished() and len(made.unsettled) == 2
    confirm(made, 1, 0)
    assert not made.take_finished(), "pauses may still come"
    assert made.receive(Message(0, Tag.SWAPPED, (0, 0.01))) and made.receive(Message(1, Tag.SWAPPED, (0, 0.03)))
    (push,) = made.take_finished()
    assert push.row()["pause_max_s"] == 0.03 and push.row()["transfer_s"] == 0.5 and push.row()["stage_max_s"] == 0.1
    for rank in (0, 1):
        confirm(made, rank, 1)
    assert made.settled and not made.take_finished()
    assert [push.version for push in made.take_finished(final=True)] == [1]
    assert made.oldest_active_version == 0
    assert not made.receive(Message(0, Tag.STARTED, (0, 0)))


def test_only_the_late_are_named_for_the_older_version() -> None:
    made = publisher()
    confirm(made, 0, 0)
    with pytest.raises(TimeoutError, match=r"version 0 was not confirmed within 0\.05 s by rank 1 \(generation 1\) on host n1$"):
        made.wait_settled(lambda: None)


def test_ranks_without_staging_are_excused_while_an_evaluation_runs() -> None:
    made = publisher()
    confirm(made, 0, 0)
    confirm(made, 1, 0, is_staged=False)
    confirm(made, 0, 1)
    made.excused_s = 0.2
    with pytest.raises(TimeoutError, match=r"version 1 was not confirmed within 0\.25 s by rank 1"):
        made.wait_settled(lambda: None)


def test_a_push_that_breaks_off_names_who_has_not_confirmed() -> None:
    made = publisher(deadline_s=60, sender_error="the weight push from training rank 0 broke off")
    confirm(made, 1, 0)
    with pytest.raises(ConnectionError, match=r"broke off; not confirmed by rank 0 \(generation 0\) on host n1$"):
        made.wait_settled(lambda: None)
