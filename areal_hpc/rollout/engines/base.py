"""The protocol of a generation engine: what the rollout loop steps, and where new weights arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What there is of an answer that is not finished: its first R tokens, with what belongs to them."""

    tokens_R: np.ndarray
    """int32 [R]."""
    logprobs_R: np.ndarray
    """float32 [R]."""
    versions_R: np.ndarray
    """int32 [R]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer to sample, or to go on with. Requests added together share one prompt."""

    request_id: int
    """Handle, unique among the requests that the engine holds."""
    prompt_tokens: np.ndarray
    """int32 [P], the same array for all samples of a group."""
    stream: int
    """Key of this sample's random numbers (see `sampling.stream_key`): the uniform of token t depends on (stream, t) alone."""
    max_new_tokens: int
    """Answers that reach it end with finish = "length"; begun tokens count."""
    is_imposed: bool = False
    """The answer gets max_new_tokens tokens, whatever is sampled, and then ends with finish = "stop" (benchmarks)."""
    begun: Begun | None = None
    """The answer's first tokens, from an earlier attempt or an earlier turn: it goes on behind them, with the random numbers of its position, and comes back whole."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (its log-probability is that of temperature 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished answer; all columns have one entry per generated token, the stop token included."""

    request_id: int
    tokens_R: np.ndarray
    """int32 [R]."""
    logprobs_R: np.ndarray
    """float32 [R]: log-probability of each token under the distribution it was drawn from (after temperature)."""
    versions_R: np.ndarray
    """int32 [R]: policy version that produced each token."""
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """Continuous batching, stepped from outside.

    Lifecycle: construct with any weights -> `update_weights(version 0)` -> (`add` | `step` | `update_weights`)*.
    Trap: not thread-safe; `update_weights` is called between two steps, never during one.
    """

    max_num_running: int
    policy_version: int

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences added but without a slot yet."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt, in order. Raises ValueError if prompt + max_new_tokens exceed the context or `begun` leaves nothing to sample."""
        ...

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token of every running sequence, return what finished."""
        ...

    def running(self) -> dict[int, Begun]:
        """What every request that the engine holds has so far, copied; of a waiting one without `begun`, nothing (R = 0)."""
        ...

    def first_version(self, request_id: int) -> int | None:
        """Policy version of the first token of a request that the engine holds; None while it has none."""
        ...

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget these requests, running or waiting; unknown ones are ignored."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Interrupt: load all weights (Hugging Face names, full tensors, tied ones once) and go on with the same sequences."""
        ...

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights in use under their Hugging Face names (tests and checks)."""
        ...
