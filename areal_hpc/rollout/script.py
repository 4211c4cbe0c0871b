"""A generation rank in a replay: the tape says at which engine step tickets start and weights change; timing decides nothing. All answers are compared.

The worker's loop is the same. It asks the script instead of the clock, and the script says yes only to what the tape has next. What must wait:
- tickets: `ScriptedLeases` hands out the ticket whose requests come next, the engine between two recorded steps;
- an answer that goes on (its environment has replied early): held back here until it is due;
- a version: `HeldReceiver` receives the one after the next only when the next is in use, as in the recorded run, whose receiver had one place for staging as well;
- a decode step: until everything recorded before it has been done.
Nobody waits for anybody who waits for him: every event waits only for events that came before it in the recorded run.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.guard import Difference
from areal_hpc.observe.schema import CALLS
from areal_hpc.reward.service import RewardService, Verdict
from areal_hpc.rollout.engines.base import Engine, Request
from areal_hpc.rollout.evaluate import EVALUATION_IDS
from areal_hpc.rollout.leases import Grant, Leases
from areal_hpc.rollout.tape import ABORT, ADD, FINISH, LEASE, SWAP, Call, NoTape, TapedEngine
from areal_hpc.topology import World
from areal_hpc.transport.tape import Replay, Tape, of_role, tapes_of_replay
from areal_hpc.transport.trajectory import GRADED, Status
from areal_hpc.transport.weights import Announcement, Receiver

if TYPE_CHECKING:
    from areal_hpc.rollout.worker import RolloutWorker

IDLE_S = 0.0005


class Script(NoTape):
    """Compares each call with the tape and says what comes next."""

    bounded_outbox = False  # a rank may be asked for groups while training still waits for another's

    def __init__(self, calls: np.ndarray, name: str, group_size: int, statuses: Mapping[int, Status] | None) -> None:
        """`calls`: rows of /calls. `name`: of this rank, for messages. `statuses`: request -> recorded verdict; None: ask the graders."""
        rows = calls[calls["kind"] != LEASE]
        self._calls: list[Call] = [cast(Call, tuple(row)) for row in rows.tolist()]
        self._name, self._group_size, self._statuses = name, group_size, statuses
        self._next = 0
        self._started: set[int] = set()
        self._counters: Counter[str] = Counter()
        self._engine: ScriptedEngine | None = None

    def engine(self, engine: Engine) -> Engine:
        self._engine = ScriptedEngine(engine, self)
        return self._engine

    def attach(self, worker: RolloutWorker) -> None:
        worker.leases = ScriptedLeases(self)
        worker.receiver = cast(Receiver, HeldReceiver(worker.receiver, self))
        if self._statuses is not None:
            worker.rewards = worker.turns.rewards = cast(RewardService, RecordedVerdicts(worker.rewards, self._statuses))
        self._counters = worker.counters  # which training rank 0 adds up at the end

    # -- what comes next -------------------------------------------------------------------------------------------

    @property
    def num_left(self) -> int:
        """Recorded calls that have not been made yet."""
        return len(self._calls) - self._next

    def _expected(self, ahead: int = 0) -> Call | None:
        position = self._next + ahead
        return self._calls[position] if position < len(self._calls) else None

    @property
    def _num_steps(self) -> int:
        assert self._engine is not None
        return self._engine.num_steps

    def step_due(self) -> bool:
        """Everything recorded before the next step has been done. Behind the end of the tape: always. Raises Difference when there is nothing to decode."""
        assert self._engine is not None
        self._engine.add_due()
        call = self._expected()
        if call is None:
            return True
        if call[0] > self._num_steps:
            if self._engine.num_running + self._engine.num_waiting == 0:
                raise Difference(f"{self._name}, engine step {self._num_steps}: nothing is left to decode; recorded: {self._words(call)}")
            return True
        time.sleep(IDLE_S)
        return False

    def swap_due(self, version: int) -> bool:
        """The swap to this version comes next, after the end of what it ends (the last version)."""
        ahead = 0
        while (call := self._expected(ahead)) is not None and call[0] == self._num_steps and call[1] == ABORT:
            ahead += 1
        return call is not None and call[:3] == (self._num_steps, SWAP, version)

    def swapped(self, version: int) -> None:
        assert self._engine is not None
        self._engine.swapped(version)

    @property
    def next_version(self) -> int | None:
        """The version that this rank swaps to next; None: no more."""
        return next((call[2] for call in self._calls[self._next :] if call[1] == SWAP), None)

    def next_ticket(self) -> int | None:
        """The ticket whose requests come next; None if something else does, a decode step or a request that goes on among them."""
        call = self._expected()
        if call is None or call[:2] != (self._num_steps, ADD) or call[2] >= EVALUATION_IDS:
            return None
        ticket = call[2] // self._group_size
        return None if ticket in self._started else ticket

    def adds_next(self, request_id: int) -> bool:
        """This request is what comes next; so is any behind the end of the tape."""
        call = self._expected()
        return call is None or call[:3] == (self._num_steps, ADD, request_id)

    # -- comparison ------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        """It happened. Raises Difference when the tape has something else. Behind the end of the tape (a killed run's) nothing is compared."""
        expected = self._expected()
        if expected is None:
            return
        if call != expected:
            raise Difference(f"{self._name}, engine step {call[0]}: {self._words(call)}; recorded: {self._words(expected)}")
        self._next += 1
        if call[1] == ADD:
            self._started.add(call[2] // self._group_size)
        elif call[1] == FINISH:
            self._counters["compared_answers"] += 1

    def _words(self, call: Call) -> str:
        step, kind, number, count, version, digest = call
        if kind == SWAP:
            what = f"version {number}"
        elif kind == ABORT:
            what = f"{count} requests"
        elif number >= EVALUATION_IDS:
            what = f"evaluation answer {number - EVALUATION_IDS}"
        else:
            what = "ticket {}, sample {}".format(*divmod(number, self._group_size))
        tokens = f" of {count} tokens" if kind == FINISH else ""
        return f"{CALLS[kind]} {what}{tokens} under version {version}, digest {digest:016x}" + (f", in step {step}" if step != self._num_steps else "")


class ScriptedEngine(TapedEngine):
    """Holds back requests that come before the tape has them (a reply of an environment may be faster than it was)."""

    def __init__(self, engine: Engine, script: Script) -> None:
        super().__init__(engine, script)
        self._script = script
        self._held: dict[int, Sequence[Request]] = {}

    def add(self, requests: Sequence[Request]) -> None:
        if requests:
            self._held[requests[0].request_id] = requests
            self.add_due()

    def abort(self, request_ids: Iterable[int]) -> None:
        ids = list(request_ids)
        for number in ids:
            self._held.pop(number, None)
        super().abort(ids)

    def add_due(self) -> None:
        """Add what was held back and comes next."""
        while due := [number for number in self._held if self._script.adds_next(number)]:
            super().add(self._held.pop(due[0]))


class ScriptedLeases(Leases):
    """Hands out the tickets of the tape; asks nobody."""

    def __init__(self, script: Script) -> None:
        super().__init__(role_rank=0, num_generation=1, static=True)
        self._script = script

    def receive(self, grant: Grant) -> None:
        raise AssertionError(f"a replay leases nothing, got {grant}")

    def raise_limit(self, ticket_limit: int, version: int) -> None:
        pass

    def num_to_ask(self, num_free_groups: int) -> int:
        return 0

    def take(self, version: int) -> int | None:
        return self._script.next_ticket()


class HeldReceiver:
    """Puts off a version that the tape uses later than the one in staging: it would take its place. Everything else is the receiver's."""

    def __init__(self, receiver: Receiver, script: Script) -> None:
        assert receiver.is_staged, "a replay stages: to write over the weights in use would stop decode steps that the tape has before the swap"
        self._receiver, self._script = receiver, script
        self._announced: deque[Announcement] = deque()

    def begin(self, announcement: Announcement) -> None:
        self._announced.append(announcement)

    def poll(self, *, busy: bool, hold: bool = False) -> bool:
        wanted = self._script.next_version
        while self._announced and (wanted is None or self._announced[0].version <= wanted):
            self._receiver.begin(self._announced.popleft())
        return self._receiver.poll(busy=busy, hold=hold)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)


@dataclass(slots=True)
class RecordedVerdicts:
    """The reward service of a replay: the recorded verdict at once. Answers that were never trained, evaluations among them, count as without an answer."""

    service: RewardService
    """Does everything but grade."""
    statuses: Mapping[int, Status]
    _verdicts: list[Verdict] = field(default_factory=list)

    def submit(self, job_id: int, *arguments: Any, **options: Any) -> None:
        if options.get("turns"):  # the environment works again; if it says that the answer is complete, its verdict is replaced below
            self.service.submit(job_id, *arguments, **options)
        else:
            self._verdicts.append(self._recorded(job_id))

    def poll(self) -> list[Verdict]:
        verdicts, self._verdicts = self._verdicts + [self._recorded(verdict.job_id) for verdict in self.service.poll()], []
        return verdicts

    def _recorded(self, job_id: int) -> Verdict:
        status = self.statuses.get(job_id, Status.NO_ANSWER)
        return Verdict(job_id, status, float(status == Status.RIGHT) if status in GRADED else None, None, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


def recorded_statuses(tapes: Sequence[Tape], group_size: int) -> dict[int, Status]:
    """Request -> verdict of every trajectory that was trained."""
    found: dict[int, Status] = {}
    for tape in of_role(tapes, "training"):
        rows = tape.table("batches")
        found |= dict(zip((rows["ticket"] * group_size + rows["sample"]).tolist(), map(Status, rows["status"].tolist()), strict=True))
    return found


def open_script(replay: Replay, world: World, group_size: int) -> Script:
    """The script of this rank. Raises ConfigError when a tape is missing or cannot be read."""
    tapes = tapes_of_replay(replay)
    tape, statuses = tapes[world.world_rank], None if replay.grade_again else recorded_statuses(tapes, group_size)
    calls = tape.table("calls")
    if (np.diff(calls["step"]) < 0).any():  # it would wait for ever for what should have happened before
        raise ConfigError(f"{tape.path}: damaged, /calls is not in the order of engine steps")
    return Script(calls, world.name_of(world.world_rank), group_size, statuses)
