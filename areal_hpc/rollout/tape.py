"""What a generation rank records: every call that changed its engine, in order. The same calls give the same bits, so nothing else is needed to repeat it.

`TapedEngine` stands around the engine, so that no caller can forget to record. Only new weights take another way into it (sinks.py): the worker tells of a swap.
The worker holds a `NoTape`, a `Recording` or, in a replay, a `Script`, which decides in its place what happens when (script.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from areal_hpc.config import Config
from areal_hpc.observe.schema import CALLS
from areal_hpc.rollout.engines.base import Begun, Completion, Engine, Request
from areal_hpc.rollout.leases import Grant
from areal_hpc.topology import World
from areal_hpc.transport.tape import TapeWriter, digest

if TYPE_CHECKING:
    import torch

    from areal_hpc.rollout.worker import RolloutWorker

ADD, FINISH, SWAP, ABORT, LEASE = range(len(CALLS))
"""Numbers of `schema.CALLS`."""
Call = tuple[int, int, int, int, int, int]
"""A row of /calls: step, kind, number, count, version, digest."""


class CallSink(Protocol):
    """Where calls go: into a file, or beside those of a recording."""

    def call(self, call: Call) -> None: ...


class TapedEngine(Engine):
    """An engine whose calls are told to `sink` as they happen. Everything else is the engine's."""

    def __init__(self, engine: Engine, sink: CallSink) -> None:
        self.engine, self.sink = engine, sink
        self.max_num_running, self.policy_version = engine.max_num_running, engine.policy_version
        self.num_steps = 0
        """Steps begun."""

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    def add(self, requests: Sequence[Request]) -> None:
        self.engine.add(requests)
        if requests:
            begun = [request.begun.tokens_R for request in requests if request.begun is not None]
            self._tell(ADD, requests[0].request_id, len(requests), digest([requests[0].prompt_tokens, *begun]))

    def step(self) -> list[Completion]:
        self.num_steps += 1
        finished = self.engine.step()
        for answer in finished:
            self._tell(FINISH, answer.request_id, len(answer.tokens_R), digest([answer.tokens_R, answer.logprobs_R, answer.versions_R]))
        return finished

    def running(self) -> dict[int, Begun]:
        return self.engine.running()

    def first_version(self, request_id: int) -> int | None:
        return self.engine.first_version(request_id)

    def abort(self, request_ids: Iterable[int]) -> None:
        ids = sorted(self.engine.running().keys() & set(request_ids))  # whether others, finished ones, are graded yet is timing
        self.engine.abort(ids)
        self._tell(ABORT, 0, len(ids), digest([np.array(ids, np.int64)]))

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.engine.update_weights(named_tensors, version)
        self.swapped(version)

    def swapped(self, version: int) -> None:
        """The engine has gone over to this version."""
        self.policy_version = version
        self._tell(SWAP, version, 0, 0)

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.engine.named_weights()

    def _tell(self, kind: int, number: int, count: int, hash64: int) -> None:
        self.sink.call((self.num_steps, kind, number, count, self.policy_version, hash64))


class NoTape:
    """Nothing is recorded, and timing decides what happens when. Also the verbs of all tapes."""

    bounded_outbox = True
    """Decoding stops when finished groups find no room in the ring."""

    def engine(self, engine: Engine) -> Engine:
        """The engine that the worker is to use."""
        return engine

    def attach(self, worker: RolloutWorker) -> None:
        """The worker is complete and about to run."""

    def leased(self, grant: Grant) -> None:
        """Tickets came from generation rank 0."""

    def swap_due(self, version: int) -> bool:
        """May the engine take this version now?"""
        return True

    def swapped(self, version: int) -> None:
        """The receiver has brought this version into the engine."""

    def step_due(self) -> bool:
        """May the engine decode now?"""
        return True

    def close(self) -> None:
        """Nothing more comes."""


class Recording(NoTape):
    """Writes the tape of this rank."""

    def __init__(self, writer: TapeWriter) -> None:
        self._writer = writer
        self._engine: TapedEngine | None = None

    def engine(self, engine: Engine) -> Engine:
        self._engine = TapedEngine(engine, self)
        return self._engine

    def call(self, call: Call) -> None:
        self._writer.add("calls", *call)
        self._writer.flush_when_due()

    def swapped(self, version: int) -> None:
        assert self._engine is not None
        self._engine.swapped(version)

    def leased(self, grant: Grant) -> None:
        """They do not touch the engine: the row is for readers."""
        tickets, version = grant
        if tickets and self._engine is not None:
            self.call((self._engine.num_steps, LEASE, tickets[0], len(tickets), version, 0))

    def close(self) -> None:
        self._writer.close()


def open_recording(config: Config, world: World, attempt_dir: Path) -> NoTape:
    """What `log.record` asks for."""
    return NoTape() if config.log.record == "none" else Recording(TapeWriter(attempt_dir, config, world, {}))
