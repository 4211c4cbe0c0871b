"""Recorded calls of a real engine, made again by a caller with another timing: the same bits; and each kind of difference is named."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.guard import Difference
from areal_hpc.observe.schema import GENERATION_TAPE
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines.base import Begun, Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.engines.sampling import stream_key
from areal_hpc.rollout.evaluate import EVALUATION_IDS
from areal_hpc.rollout.script import HeldReceiver, RecordedVerdicts, Script, ScriptedLeases
from areal_hpc.rollout.tape import FINISH, LEASE, Call, TapedEngine
from areal_hpc.transport.trajectory import Status
from areal_hpc.transport.weights import Announcement
from tests.models.tiny import VOCAB_SIZE, reference_model, weights_of
from tests.rollout.test_embedded import config_of

NAME, GROUP_SIZE, MAX_NEW = "qwen2-tied", 3, 9
WEIGHTS = [dict(weights_of(reference_model(NAME, seed))) for seed in range(3)]


class Calls(list[Call]):
    """A tape in memory."""

    def call(self, call: Call) -> None:
        self.append(call)

    def rows(self) -> np.ndarray:
        return np.array(self, GENERATION_TAPE["calls"].dtype)


def engine() -> EmbeddedEngine:
    return EmbeddedEngine(config_of(NAME), max_num_running=5, max_context_tokens=32, stop_tokens=[0])


def requests(first: int, num: int, begun: Begun | None = None) -> list[Request]:
    prompt = np.random.default_rng(first // GROUP_SIZE).integers(1, VOCAB_SIZE, 6, dtype=np.int32)
    keys = [stream_key(7, first, sample) for sample in range(num)]
    return [Request(request_id=first + k, prompt_tokens=prompt, stream=key, max_new_tokens=MAX_NEW, begun=begun) for k, key in enumerate(keys)]


def record(actions: list[str]) -> Calls:
    """A history of calls: groups, answers that go on, evaluations, swaps, steps; an abort and a last swap at the end."""
    calls = Calls()
    taped = TapedEngine(engine(), calls)
    version, tickets, finished = 0, 0, list[Any]()
    taped.update_weights(WEIGHTS[0].items(), 0)
    for action in actions:
        if action == "group":
            taped.add(requests(tickets * GROUP_SIZE, GROUP_SIZE))
            tickets += 1
        elif action == "evaluation":
            taped.add(requests(EVALUATION_IDS + len(calls), 1))
        elif action == "swap":
            version += 1
            taped.update_weights(WEIGHTS[version % 3].items(), version)
        elif action == "goes on" and finished:
            answer = finished.pop()
            taped.add(requests(answer.request_id, 1, head(answer)))
        elif action == "step" and taped.num_running + taped.num_waiting:  # as the worker, which lets an empty engine rest
            finished += [answer for answer in taped.step() if answer.request_id < EVALUATION_IDS and len(answer.tokens_R) > 2]
    calls.call((taped.num_steps, LEASE, 90, 2, version, 0))  # rows for readers do not concern a replay
    taped.abort(list(taped.running()))
    taped.update_weights(WEIGHTS[2].items(), version + 1)
    return calls


def head(answer: Any) -> Begun:
    return Begun(tokens_R=answer.tokens_R[:2], logprobs_R=answer.logprobs_R[:2], versions_R=answer.versions_R[:2])


def repeat(calls: np.ndarray, timing: random.Random) -> Script:
    """Offer everything at random moments, as a worker would whose messages come at other times; the script decides."""
    script = Script(calls, "rank 0 (generation 0)", GROUP_SIZE, None)
    scripted = script.engine(engine())
    leases = ScriptedLeases(script)
    continued = {number for number in calls["number"][(calls["kind"] == 0) & (calls["count"] == 1)].tolist() if number < EVALUATION_IDS}
    evaluations = [number for number in calls["number"][calls["kind"] == 0].tolist() if number >= EVALUATION_IDS]
    last = int(calls["number"][-1])
    for number in evaluations:  # long before they are due
        scripted.add(requests(number, 1))
    for _ in range(10_000):
        if script.num_left == 0:
            return script
        action = timing.choice(["swap", "take", "step"])
        if action == "swap":
            version = scripted.policy_version + 1
            if script.swap_due(version):
                if version == last:
                    scripted.abort(list(scripted.running()))
                scripted.update_weights(WEIGHTS[2 if version == last else version % 3].items(), version)
        elif action == "take":
            ticket = leases.take(scripted.policy_version)
            if ticket is not None:
                scripted.add(requests(ticket * GROUP_SIZE, GROUP_SIZE))
        elif script.step_due():
            for answer in scripted.step():
                if answer.request_id in continued and len(answer.tokens_R) > 2:
                    continued.remove(answer.request_id)
                    scripted.add(requests(answer.request_id, 1, head(answer)))  # at once, though it may have come later
    raise AssertionError(f"{script.num_left} calls were never due")


ACTIONS = st.lists(st.sampled_from(["group", "group", "evaluation", "swap", "goes on", *["step"] * 12]), min_size=5, max_size=50)


@settings(max_examples=20, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32))
def test_another_timing_gives_the_same_calls(actions: list[str], seed: int) -> None:
    calls = record(actions)
    script = repeat(calls.rows(), random.Random(seed))
    assert script.num_left == 0


HISTORY = ["group", "step", "step", "group", "step", "swap", *["step"] * 12, "group", *["step"] * 12]


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("digest", lambda value: value ^ np.uint64(1), "digest"),
        ("count", lambda value: value + 1, "tokens"),
        ("version", lambda value: value + 1, "under version"),
        ("step", lambda value: value + 1, "in step"),
    ],
)
def test_a_changed_answer_is_named(column: str, change: Any, said: str) -> None:
    calls = record(HISTORY).rows()
    changed = np.flatnonzero(calls["kind"] == FINISH)[-1]
    calls[column][changed] = change(calls[column][changed])
    ticket, sample = divmod(int(calls["number"][changed]), GROUP_SIZE)
    named = rf"^rank 0 \(generation 0\), engine step \d+: finish ticket {ticket}, sample {sample} of .*; recorded: finish ticket .*{said}"
    with pytest.raises(Difference, match=named):
        repeat(calls, random.Random(0))


def test_steps_that_nothing_is_left_for_are_named() -> None:
    """All answers have ended, and the tape says that decoding went on: a replay must not wait for that."""
    calls = record(HISTORY).rows()
    calls["step"][-2:] += 1
    with pytest.raises(Difference, match=r"engine step \d+: nothing is left to decode; recorded: abort 0 requests under version 1, "):
        repeat(calls, random.Random(0))


def test_other_weights_are_found_at_the_first_answer() -> None:
    """The recorded digests are those of what the engine gave, not of what it was asked."""
    calls = record(HISTORY).rows()
    script = Script(calls, "rank 0 (generation 0)", GROUP_SIZE, None)
    scripted = script.engine(engine())
    assert script.swap_due(0) and not script.swap_due(1)
    scripted.update_weights(WEIGHTS[1].items(), 0)
    ticket = script.next_ticket()
    assert ticket == 0
    scripted.add(requests(0, GROUP_SIZE))
    assert script.next_ticket() is None, "the next ticket starts two steps later"

    def go_on() -> None:
        for _ in range(40):
            while (ticket := script.next_ticket()) is not None:
                scripted.add(requests(ticket * GROUP_SIZE, GROUP_SIZE))
            if script.swap_due(1):
                scripted.update_weights(WEIGHTS[2].items(), 1)
            assert script.step_due()
            scripted.step()

    with pytest.raises(Difference, match="finish ticket 0"):
        go_on()


def test_only_what_the_engine_holds_is_aborted() -> None:
    """An answer that is finished but not graded at the last version may be graded in a replay; one that would have gone on is forgotten where it was held back."""
    calls = Calls()
    taped = TapedEngine(engine(), calls)
    taped.update_weights(WEIGHTS[0].items(), 0)
    taped.add(requests(0, GROUP_SIZE))
    taped.step()
    taped.abort([1, 2, 77])
    assert calls[-1][3] == 2
    script = Script(calls.rows(), "rank 0 (generation 0)", GROUP_SIZE, None)
    scripted = script.engine(engine())
    scripted.update_weights(WEIGHTS[0].items(), 0)
    scripted.add(requests(77, 1))
    scripted.add(requests(0, GROUP_SIZE))
    scripted.step()
    scripted.abort([2, 1, 77])
    assert script.num_left == 0 and script.step_due() and set(scripted.running()) == {0}


def test_a_version_waits_until_the_one_before_is_in_use() -> None:
    """Versions that the tape passes over are received at once; one that it uses later would take the place of one that it uses now."""
    begun: list[int] = []
    receiver: Any = SimpleNamespace(is_staged=True, staged=None, begin=lambda announcement: begun.append(announcement.version), poll=lambda **_: False)
    script: Any = SimpleNamespace(next_version=2)
    held = HeldReceiver(receiver, script)
    for version in range(1, 5):
        held.begin(Announcement(version, 0, (), evaluate=False, final=False))
    assert not held.poll(busy=False) and begun == [1, 2]
    receiver.staged = "version 2"
    assert held.staged == "version 2"
    script.next_version = 3
    assert not held.poll(busy=False) and begun == [1, 2, 3]
    script.next_version = None
    assert not held.poll(busy=False) and begun == [1, 2, 3, 4]
    receiver.is_staged = False
    with pytest.raises(AssertionError, match="a replay stages"):
        HeldReceiver(receiver, script)


def test_recorded_verdicts_come_at_once() -> None:
    """Of answers that were never trained nothing is known: they count as without an answer. The service itself grades nothing."""
    with RewardService.start() as service:
        verdicts: Any = RecordedVerdicts(service, {5: Status.RIGHT, 6: Status.INFRA_ERROR})
        for job in (6, 5, 9):
            verdicts.submit(job, 0, "text", truncated=False)
        found = [(verdict.job_id, verdict.status, verdict.score) for verdict in verdicts.poll()]
        assert found == [(6, Status.INFRA_ERROR, None), (5, Status.RIGHT, 1.0), (9, Status.NO_ANSWER, 0.0)]
        assert verdicts.poll() == [] and verdicts.num_pending == 0
