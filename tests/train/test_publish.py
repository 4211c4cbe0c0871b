"""The book of training rank 0: what is confirmed, what goes to the log, and who is named when a push does not come to its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc.observe.timeline import Phases
from areal_hpc.train.loop import Decision, TrainingRank
from areal_hpc.train.publish import Publisher, Push
from areal_hpc.transport.messages import Message, Tag
from areal_hpc.transport.weights import Damage


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


def test_a_wait_gives_signs_of_life_and_says_for_whom() -> None:
    """Of the watchdog's table: first the late ones of the oldest version, then those that keep the image of an older one."""
    made = publisher(deadline_s=60)
    made.shared_ranks, said = (0, 1), list[str]()
    steps = iter([(0, 0), (1, 0), (1, 1), (0, 1)])

    def pump() -> None:
        confirm(made, *next(steps))

    def room() -> bool:
        said.append(made.phases.report.waits_for)
        return made.settled

    made._wait(room, pump)
    one, other = "rank 0 (generation 0)", "rank 1 (generation 1)"
    confirmations = [f"0 by {other}", f"1 by {one}, {other}", f"1 by {one}"]
    assert said == ["", *(f"confirmation of version {late}" for late in confirmations), f"the swap to version 1 by {one}, {other}"]
    made.active_version = {0: 1, 1: 1}
    assert made.waits_for == ""


def test_training_ranks_that_wait_for_the_first_live_and_answer() -> None:
    """It may wait for confirmations, an evaluation or an image: the others give signs of life, send damaged buckets once more, and have a deadline."""
    made = publisher()
    posted, reports = list[Any](), list[tuple[int, str]]()
    inbox = [[Message(2, Tag.RESEND, (Damage(0, 1, 4), 0))]]

    def is_ready() -> bool:
        reports.append((made.phases.report.number, made.phases.report.waits_for))
        return len(reports) > 3

    request, sent = SimpleNamespace(Test=is_ready), lambda version, deadline_s, alive: alive()
    made.world.is_first_trainer = False  # type: ignore[misc]
    made.world.role_comm = SimpleNamespace(Ibarrier=lambda: request, bcast=lambda image: image)  # type: ignore[misc]
    made.mailbox = SimpleNamespace(poll=lambda: inbox.pop() if inbox else [], post=lambda *message: posted.append(message))  # type: ignore[assignment]
    made.sender.root, made.sender.payload, made.sender.wait_sent = 1, lambda version, bucket: b"rows", sent  # type: ignore[method-assign, assignment]
    made.pushes.clear()
    assert made._wait_room(2, lambda: None) == 0
    assert posted == [(0, Tag.BUCKET, (Damage(0, 1, 4), b"rows"))]
    assert {text for _, text in reports[1:]} == {"training rank 0, before the push of version 2"}
    assert len({number for number, _ in reports}) == len(reports)
    made.head_deadline_s, request.Test = 0.02, lambda: False
    with pytest.raises(TimeoutError, match=r"^waited 0\.02 s for training rank 0, before the push of version 2$"):
        made._wait_room(2, lambda: None)


def test_what_comes_right_behind_the_decision_to_stop_is_not_lost() -> None:
    """Training rank 0 may have no push to wait for: its STOP comes in one look with the decision, and a bucket may be wanted between them."""
    made = publisher()
    made.sender.payload = lambda version, bucket: b"rows"  # type: ignore[method-assign]
    decision, posted = Decision(None, [], save=False), list[Any]()
    inbox = [[Message(2, Tag.PLAN, None), Message(2, Tag.PLAN, decision), Message(2, Tag.RESEND, (Damage(1, 0, 0), 0)), Message(2, Tag.STOP, None)]]
    mailbox: Any = SimpleNamespace(poll=lambda: inbox.pop() if inbox else [], post=lambda *message: posted.append(message))
    made.mailbox, nothing = mailbox, SimpleNamespace(requested=False)
    rank = TrainingRank(nothing, made.world, nothing, nothing, made, mailbox, made.phases, nothing, None, nothing)  # type: ignore[arg-type]
    assert rank._ask_head([]) is decision and posted == [(0, Tag.BUCKET, (Damage(1, 0, 0), b"rows"))]
    rank.wait_for_stop(0.0)
