"""Answers on their way from the first token to the verdict, over as many turns as model and environment take.

    requests ──▶ add ──▶ engine ──▶ ended ──▶ reward service ──▶ poll: verdict, the answer is complete
                           ▲                        │
                           └── same request, begun ◀┴─ reply of the environment, appended with loss mask 0

A sample whose environment is at work holds no slot of the engine; `num_away` counts it, so that not more samples start than the engine has slots for. What is
graded is the model's last turn alone: no text of an environment can be taken for an answer. An environment's text that does not fit `max_new_tokens` is cut there,
and the answer ends as truncated.

Determinism: replies come in the order in which programs end, and the samples that decode together decide the rounding of their sums. With `in_order`, nothing is to be
decoded while any environment is at work (`must_wait`), and all replies then go to the engine in the order of their ids: the same batches, so the same bits, in every run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from areal_hpc.config import Environment
from areal_hpc.data.prompts import Prompts
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.reward.service import Reply, RewardService, Verdict
from areal_hpc.rollout.engines.base import Begun, Completion, Engine, Request
from areal_hpc.transport.samples import joined_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All turns of an answer so far; columns have one entry per token, those of the environment included."""

    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    """float32 [R]: 0 at the environment's tokens."""
    versions_R: np.ndarray
    """int32 [R]: at the environment's tokens that of the model's token before them."""
    loss_mask_R: np.ndarray
    """bool [R]: sampled by the model."""
    turns: tuple[str, ...]
    """Texts of the model and of the environment, in turn; the first is the model's."""
    truncated: bool
    """The length limit was reached."""
    ended_at: float = field(default_factory=time.monotonic)

    @property
    def num_turns(self) -> int:
        """Of the model."""
        return (len(self.turns) + 1) // 2

    @property
    def graded_text(self) -> str:
        """The model's last turn."""
        return self.turns[-1] if len(self.turns) % 2 else self.turns[-2]

    @property
    def text(self) -> str:
        """For a reader."""
        return joined_turns(self.turns)


@dataclass(slots=True)
class _Open:
    """A sample without a verdict."""

    request: Request
    answer: Answer | None = None
    problem: int = -1
    split: Literal["train", "heldout"] = "train"


class Turns:
    """Lifecycle: (`add` | `ended` | `poll` | `drop`)*, on the thread of the engine. One sample is in one place at a time: engine, reward service, or done."""

    def __init__(
        self, environment: Environment, engine: Engine, rewards: RewardService, tokenizer: Tokenizer, prompts: Prompts, *, in_order: bool = False
    ) -> None:
        self._max_turns = environment.max_turns if environment.name else 1
        self._engine, self.rewards, self._tokenizer, self._prompts, self._in_order = engine, rewards, tokenizer, prompts, in_order
        self._open: dict[int, _Open] = {}
        self._away: set[int] = set()
        self._held: list[Reply] = []
        """Replies kept back until all are here (`in_order`)."""

    @property
    def num_away(self) -> int:
        """Samples whose environment is at work: they will come back to the engine, or have ended."""
        return len(self._away)

    @property
    def must_wait(self) -> bool:
        """Nothing is to be decoded or admitted now."""
        return self._in_order and bool(self._away)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt."""
        self._open |= {request.request_id: _Open(request) for request in requests}
        self._engine.add(requests)

    def open_answers(self) -> dict[int, tuple[Answer, bool]]:
        """What every sample without a verdict has so far, and whether its last turn has ended (it is with the environment or the grader then); copies."""
        sampling, found = self._engine.running(), {}
        for request_id, state in self._open.items():
            begun = sampling.get(request_id)
            if begun is None:
                assert state.answer is not None
                found[request_id] = state.answer, True
                continue
            mask_R, turns = (np.empty(0, bool), ()) if state.answer is None else (state.answer.loss_mask_R, state.answer.turns)
            found[request_id] = (
                Answer(
                    tokens_R=begun.tokens_R,
                    logprobs_R=begun.logprobs_R,
                    versions_R=begun.versions_R,
                    loss_mask_R=np.append(mask_R, np.ones(len(begun.tokens_R) - len(mask_R), bool)),
                    turns=turns,
                    truncated=False,
                ),
                False,
            )
        return found

    def take_up(self, answers: Sequence[tuple[Request, Answer, bool]], problem: int) -> None:
        """Go on with samples of one prompt as `open_answers` told of them: half-finished turns in the engine, ended ones with the environment or the grader."""
        sampling = []
        for request, answer, has_ended in answers:
            state = self._open[request.request_id] = _Open(request, answer if answer.turns else None, problem)
            if has_ended:
                self._pass_on(request.request_id, state)
            else:
                begun = Begun(tokens_R=answer.tokens_R, logprobs_R=answer.logprobs_R, versions_R=answer.versions_R)
                sampling.append(replace(request, begun=begun) if len(answer.tokens_R) else request)
                if answer.turns:  # the mask and the texts up to the turn that is sampled now
                    ended = int(np.flatnonzero(~answer.loss_mask_R)[-1]) + 1
                    state.answer = replace(
                        answer,
                        tokens_R=answer.tokens_R[:ended],
                        logprobs_R=answer.logprobs_R[:ended],
                        versions_R=answer.versions_R[:ended],
                        loss_mask_R=answer.loss_mask_R[:ended],
                    )
        self._engine.add(sampling)

    def ended(self, completion: Completion, problem: int, split: Literal["train", "heldout"]) -> None:
        """A turn ended: on to the environment, or to the grader if it was the last. `problem`: its position for the graders."""
        state = self._open[completion.request_id]
        state.problem, state.split = problem, split
        state.answer = self._extended(state.answer, completion)
        self._pass_on(completion.request_id, state)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Answer, Verdict]]:
        """Complete answers with their verdicts; samples with a reply go back to the engine. Waits at most `timeout_s` for either."""
        graded = []
        for verdict in self.rewards.wait(timeout_s) if timeout_s else self.rewards.poll():
            self._away.discard(verdict.job_id)
            state = self._open.pop(verdict.job_id, None)
            if state is not None:  # not dropped meanwhile
                assert state.answer is not None
                graded.append((state.answer, verdict))
        self._held += self.rewards.take_replies()
        self._away -= {reply.job_id for reply in self._held}
        if not self.must_wait:
            replies, self._held = sorted(self._held, key=lambda reply: reply.job_id), []
            for reply in replies:
                self._resume(reply)
        return graded

    def drop(self, request_ids: Iterable[int]) -> None:
        """Forget these samples, wherever they are; unknown ones are ignored."""
        unwanted = [request_id for request_id in request_ids if request_id in self._open]
        self._engine.abort(unwanted)
        for request_id in unwanted:
            del self._open[request_id]
            self._away.discard(request_id)

    def _extended(self, before: Answer | None, completion: Completion) -> Answer:
        start = 0 if before is None else len(before.tokens_R)
        turns, mask_R = ((), np.empty(0, bool)) if before is None else (before.turns, before.loss_mask_R)
        return Answer(
            tokens_R=completion.tokens_R,
            logprobs_R=completion.logprobs_R,
            versions_R=completion.versions_R,
            loss_mask_R=np.append(mask_R, np.ones(len(completion.tokens_R) - start, bool)),
            turns=(*turns, self._tokenizer.decode(completion.tokens_R[start:])),
            truncated=completion.finish == "length",
        )

    def _pass_on(self, request_id: int, state: _Open) -> None:
        assert state.answer is not None
        if state.answer.truncated or state.answer.num_turns >= self._max_turns:
            self._grade(request_id, state)
            return
        self._away.add(request_id)
        self.rewards.submit(request_id, state.problem, state.answer.graded_text, split=state.split, turns=state.answer.turns)

    def _grade(self, request_id: int, state: _Open) -> None:
        assert state.answer is not None
        self.rewards.submit(request_id, state.problem, state.answer.graded_text, truncated=state.answer.truncated, split=state.split)

    def _resume(self, reply: Reply) -> None:
        """The answer goes on behind the environment's text, or ends with as much of it as fits."""
        state = self._open.get(reply.job_id)
        if state is None:  # dropped meanwhile
            return
        request, answer = state.request, state.answer
        assert answer is not None
        room = request.max_new_tokens - len(answer.tokens_R)
        reply_E = self._prompts.reply_tokens(reply.text)[:room]
        is_full = len(reply_E) == room
        state.answer = answer = Answer(
            tokens_R=np.append(answer.tokens_R, reply_E).astype(np.int32),
            logprobs_R=np.append(answer.logprobs_R, np.zeros(len(reply_E), np.float32)),
            versions_R=np.append(answer.versions_R, np.full(len(reply_E), answer.versions_R[-1], np.int32)),
            loss_mask_R=np.append(answer.loss_mask_R, np.zeros(len(reply_E), bool)),
            turns=(*answer.turns, self._tokenizer.decode(reply_E) if is_full else reply.text),
            truncated=is_full,
            ended_at=answer.ended_at if not is_full else time.monotonic(),
        )
        if is_full:
            self._grade(reply.job_id, state)
        else:
            begun = Begun(tokens_R=answer.tokens_R, logprobs_R=answer.logprobs_R, versions_R=answer.versions_R)
            self._engine.add([replace(request, begun=begun)])
