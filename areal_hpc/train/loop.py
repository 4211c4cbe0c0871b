"""The loop of a training rank: wait for a batch, collect it, train on it, publish the new version.

consumes        groups from its ring lanes; on training rank 0 also CONFIRM, SWAPPED, STARTED, EVALUATED, SAMPLES, SAVED, OBSERVED and ARRIVED messages
produces        policy versions, checkpoints (saving.py); on training rank 0 the plan of each batch, the ticket limit, the log
waits for       a complete batch (no collective is open meanwhile); before each push, the confirmation of the one before the last
unblocked by    the rings of the generation ranks; generation ranks that confirm
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.config import Config
from areal_hpc.observe.state import process_state
from areal_hpc.observe.timeline import Phases
from areal_hpc.signals import StopFlag
from areal_hpc.topology import World
from areal_hpc.train.collect import Arrival, Collector, exchange
from areal_hpc.train.compose import Composer, Plan
from areal_hpc.train.publish import Publisher
from areal_hpc.train.record import Recorder
from areal_hpc.train.saving import RankSaver, Saves
from areal_hpc.train.tape import NoTape
from areal_hpc.train.trainer import Trainer
from areal_hpc.transport.evaluation import Share, summarise
from areal_hpc.transport.messages import Mailbox, Message, Tag
from areal_hpc.walltime import Walltime

POLL_S = 0.0005
LOOK_EVERY_S = 1.0
"""Between two looks at the processes behind the lanes, and between two signs of life from training rank 0 while a batch is not complete."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Body of the PLAN message, the same for all training ranks."""

    plan: Plan | None
    """The next batch; None: the run was asked to stop."""
    rejected: list[int]
    """Tickets closed without training since the last batch."""
    save: bool
    """A checkpoint is written: after this batch, or before the run stops."""


@dataclass(slots=True)
class Head:
    """What training rank 0 does besides training: compose batches, steer the gate, follow evaluations, keep the log."""

    config: Config
    world: World
    mailbox: Mailbox
    publisher: Publisher
    composer: Composer
    recorder: Recorder
    stop: StopFlag
    walltime: Walltime
    saves: Saves
    data_state: dict[str, Any]
    """What meta.json tells of the data and the configuration; the same in every checkpoint of an attempt."""
    heldout_sources: Sequence[str] = ()
    """Source of each held-out problem."""
    replayed_steps: int | None = None
    """A replay ends after these, without a checkpoint."""
    groups: list[Arrival] = field(default_factory=list)
    """Groups of the batch that is being trained."""
    rejected: list[tuple[Arrival, str]] = field(default_factory=list)
    """Groups closed without training up to the end of that step, with reasons. Those of later belong to the next step, also where a checkpoint cuts between them."""
    _shares: dict[int, list[Share]] = field(default_factory=dict)
    """Evaluations under way: version -> shares received."""
    _num_rejected_told: int = 0
    _stop_asked_by: str = ""

    @property
    def stop_reason(self) -> str:
        """Why the run is to stop after this step: the signal, and the rank that got it if it was another one, or the end of the job's time. Empty: it is not."""
        return self.stop.signal_name or self._stop_asked_by or ("a replay ends here" if self._is_replayed else "")

    @property
    def _is_replayed(self) -> bool:
        return self.replayed_steps is not None and self.composer.ledger.policy_version >= self.replayed_steps

    def pump(self) -> None:
        """Act on all messages that are here. Never blocks."""
        for message in self.mailbox.poll():
            self._receive(message)
        self.composer.ledger.oldest_active_version = max(0, self.publisher.oldest_active_version)
        self.publisher.excused_s = self.config.transport.data_deadline_s if self.evaluating else 0.0
        self.log_pushes(final=self.saves.all_written)
        self.saves.poll(is_logged=self.recorder.logged_step >= self.saves.step)

    def begin_save(self, step: int) -> None:
        """The cut of training rank 0, before anything of the next step happens."""
        recorder = self.recorder
        meta = {"step": step, **self.composer.state(), "tokens_trained": recorder.tokens_trained, "accuracy_before": recorder.accuracy_before}
        self.saves.begin(step, meta | self.data_state | {"elapsed_s": recorder.elapsed_s()})

    def log_pushes(self, *, final: bool = False) -> None:
        """Write the pushes that have come to their end, and the rows of the steps that made their versions. `final`: without waiting for how long ranks paused."""
        for push in self.publisher.take_finished(final=final):
            self.recorder.push_settled(push)

    def _receive(self, message: Message) -> None:
        if self.publisher.receive(message):
            return
        if message.tag == Tag.ARRIVED:
            for arrival in message.body:
                self.composer.arrive(arrival)
        elif message.tag == Tag.STARTED:
            self.composer.ledger.start(*message.body)
        elif message.tag == Tag.EVALUATED:
            self._evaluated(message.body)
        elif message.tag == Tag.SAMPLES:
            if self.recorder.saved is not None:
                self.recorder.saved.receive(message.body)
        elif message.tag == Tag.SAVED:
            self.saves.receive(message.source, message.body)
        elif message.tag == Tag.OBSERVED:
            self.recorder.observed(message)
        elif message.tag == Tag.SIGNALLED:
            self._stop_asked_by = f"{message.body} at {self.world.name_of(message.source)}"
        else:
            raise RuntimeError(f"unexpected {message.tag.name} message from {self.world.name_of(message.source)}")

    def _evaluated(self, share: Share) -> None:
        shares = self._shares[share.version]
        shares.append(share)
        if len(shares) == self.world.num_generation:
            self.recorder.evaluation(summarise(shares, self.heldout_sources))
            del self._shares[share.version]

    @property
    def evaluating(self) -> bool:
        """An evaluation has been asked for and has not been answered by every rank."""
        return bool(self._shares)

    def expect_evaluation(self, version: int) -> None:
        """The version about to be published will be evaluated."""
        self._shares[version] = []

    def decide(self) -> Decision | None:
        """What all training ranks do next; None while it cannot be said: no batch can be composed, or a checkpoint has to be complete before the run stops."""
        version = self.composer.ledger.policy_version
        if self._is_replayed:
            return Decision(None, [], save=False)
        if self.stop_reason:
            if self.saves.busy and not self.saves.overdue:
                return None
            return Decision(None, [], save=not self.saves.busy and self.saves.newest != version and self.saves.prepare(version))
        composed = self.composer.compose()
        ledger = self.composer.ledger
        if ledger.num_rejected > self._num_rejected_told:
            self._num_rejected_told = ledger.num_rejected
            for rank in self.world.generation_ranks:
                self.mailbox.post(rank, Tag.LIMIT, (ledger.policy_version, ledger.limit))
        if composed is None:
            return None
        plan, self.groups = composed
        return Decision(plan, [arrival.ticket for arrival in self.composer.rejected], save=self.saves.is_due(version + 1))

    def wait(self, done: Callable[[], bool], deadline_s: float, what: Callable[[], str]) -> None:
        """Pump until `done`. Raises TimeoutError that says what was waited for."""
        stop_at = time.monotonic() + deadline_s
        while not done():
            self.pump()
            self.recorder.phases.alive(what())
            if time.monotonic() > stop_at:
                raise TimeoutError(f"waited {deadline_s:g} s for {what()}")
            time.sleep(POLL_S)


@dataclass(slots=True)
class TrainingRank:
    """State of a training rank; `training_loop` is its story. `head` exists on training rank 0 only."""

    config: Config
    world: World
    trainer: Trainer
    collector: Collector
    publisher: Publisher
    mailbox: Mailbox
    phases: Phases
    saver: RankSaver
    head: Head | None
    stop: StopFlag
    tape: NoTape = field(default_factory=NoTape)
    """Where this rank writes down what it trains; in a replay, what it is compared with."""
    tokens_trained: int = 0
    _progress_at: float = 0.0
    """When the last trajectory arrived, or training rank 0 was last heard."""
    _told_at: float = 0.0
    _told_signal: bool = False
    _stopped: bool = False
    """Training rank 0 has seen the run to its end."""

    def publish(self, version: int) -> None:
        """Make this version the one that generation ranks use next."""
        last, every = self.config.train.num_steps, self.config.evaluation.every
        evaluate = version in (0, last) or bool(every and version % every == 0)
        limit = 0
        if self.head is not None:
            if evaluate:
                self.head.wait(lambda: not self.head.evaluating, self.config.transport.data_deadline_s, lambda: "the evaluation before")  # type: ignore[union-attr]
                self.head.expect_evaluation(version)
            limit = self.head.composer.ledger.limit
        all_roots = self.config.transport.push == "all-roots"
        rows = ((shard.name, shard.local) for shard in self.trainer.named_shards()) if all_roots else self.trainer.full_state()
        self.publisher.publish(rows, version, limit, evaluate=evaluate, final=version == last, pump=self.pump_and_listen)

    def pump_and_listen(self) -> None:
        """A rank that does not confirm may be dead."""
        if self.head is None:
            return
        self.head.pump()
        self.collector.check_producers()

    def begin_save(self, step: int) -> None:
        """The cut of a checkpoint on this rank: between the optimiser step that made version `step` and anything that depends on that version."""
        with self.phases("save"):
            if self.head is not None:
                self.head.begin_save(step)
            self.saver.begin(step)

    def go_on_saving(self) -> None:
        """Tell training rank 0 when this rank's share is done. Never blocks."""
        saved = self.saver.poll()
        if saved is None:
            return
        if self.head is not None:
            self.head.saves.receive(self.world.world_rank, saved)
        else:
            self.mailbox.post(self.world.training_ranks[0], Tag.SAVED, saved)

    def finish_saving(self) -> None:
        """Before the run ends: until the checkpoint under way is complete, has failed or is overdue. Lanes are emptied up to their markers meanwhile."""
        self.phases.enter("save")
        self.collector.max_held = sys.maxsize  # no batch will make room any more
        stop_at = time.monotonic() + self.config.checkpoint.deadline_s
        while self.saver.busy and time.monotonic() < stop_at:
            self._pass_on(self.collector.drain())
            self.collector.check_producers()
            self.go_on_saving()
            if self.head is not None:
                self.head.pump()
            time.sleep(POLL_S)
        if self.head is not None:
            saves = self.head.saves
            self.head.wait(lambda: not saves.busy or saves.overdue, 2 * self.config.checkpoint.deadline_s, lambda: "a checkpoint")

    def _pass_on(self, arrivals: list[Arrival]) -> None:
        """Training rank 0 learns what has arrived here."""
        if self.head is not None:
            for arrival in arrivals:
                self.head.composer.arrive(arrival)
        elif arrivals:
            self.mailbox.post(self.world.training_ranks[0], Tag.ARRIVED, arrivals)

    def next_plan(self) -> Decision:
        """Wait for the next batch, emptying the lanes meanwhile, or for the decision to stop. Raises TimeoutError when no data comes."""
        self.phases.enter("wait_data")
        self._progress_at = time.monotonic()
        deadline_s = self.config.transport.data_deadline_s
        look_at, waits_for = 0.0, ""
        while True:
            self.phases.alive(waits_for)
            arrivals = self.collector.drain()
            self.go_on_saving()
            found = self._compose(arrivals) if self.head is not None else self._ask_head(arrivals)
            if found is not None:
                self.collector.drop(found.rejected)
                return found
            now = time.monotonic()
            if now > self._progress_at + deadline_s:
                raise TimeoutError(f"no trajectory came for {deadline_s:g} s; {self._what_is_missing()}")
            if now > look_at:
                self.collector.check_producers()
                look_at, waits_for = now + LOOK_EVERY_S, f"a batch: {self._what_is_missing()}"
            if not arrivals:
                time.sleep(POLL_S)

    def _compose(self, arrivals: list[Arrival]) -> Decision | None:
        assert self.head is not None
        composer, others = self.head.composer, self.world.training_ranks[1:]
        num_arrived, now = composer.num_arrived, time.monotonic()
        self._pass_on(arrivals)
        self.head.pump()
        self.head.walltime.ask(self.head.stop)
        if composer.num_arrived > num_arrived or (self.head.stop_reason and self.head.saves.busy):
            self._progress_at = now
        found = self.head.decide()
        if (
            found is not None or now > self._told_at + LOOK_EVERY_S
        ):  # a batch may take longer than the deadline: the others hear that it is still being composed
            self._told_at = now
            for rank in others:
                self.mailbox.post(rank, Tag.PLAN, found)
        return found

    def _ask_head(self, arrivals: list[Arrival]) -> Decision | None:
        self._pass_on(arrivals)
        if self.stop.requested and not self._told_signal:
            self._told_signal = True
            self.mailbox.post(self.world.training_ranks[0], Tag.SIGNALLED, self.stop.signal_name)
        found: Decision | None = None
        for message in self.mailbox.poll():  # all of them: behind the decision to stop there may be STOP, or a bucket to send once more
            if self.publisher.receive(message):
                continue
            if message.tag == Tag.STOP:
                self._stopped = True
                continue
            assert message.tag == Tag.PLAN, f"unexpected {message.tag.name} message"
            self._progress_at = time.monotonic()
            found = message.body if message.body is not None else found
        return found

    def _what_is_missing(self) -> str:
        if self.head is None:
            return "nothing came from training rank 0"
        ledger = self.head.composer.ledger
        return f"{len(ledger.waiting)} groups are waiting, {self.config.groups_per_batch} make a batch, tickets below {ledger.limit} may run"

    def wait_for_stop(self, deadline_s: float) -> None:
        """Until training rank 0 has seen the run to its end: asleep, not in a collective. Raises TimeoutError."""
        stop_at = time.monotonic() + deadline_s
        while not self._stopped:
            for message in self.mailbox.poll():
                self._stopped |= not self.publisher.receive(message) and message.tag == Tag.STOP
            if time.monotonic() > stop_at:
                raise TimeoutError(f"waited {deadline_s:g} s for training rank 0 to end the run")
            self.phases.alive("training rank 0 to end the run")
            time.sleep(POLL_S)

    def report(self, final: bool) -> None:
        """State of this rank's lanes, for the log; of a rank other than 0 its phases too."""
        ring = self.collector.lanes.rows(self.world.clock(), self.world.world_rank)
        if self.head is not None:
            self.head.recorder.lanes(ring)
            return
        body = {
            "phases": self.phases.drain(),
            "tokens": self.tokens_trained,
            "prefill_tokens": 0,
            "running": 0,
            "queued": 0,
            "waiting": len(self.collector.held),
            **process_state(self.phases),
        }
        self.mailbox.post(self.world.training_ranks[0], Tag.OBSERVED, body | {"ring": ring, "final": final, "counters": {}})


def training_loop(rank: TrainingRank) -> int:
    """Train until `num_steps` batches are done, in this attempt and those before, or a signal asks to stop; returns the steps done."""
    first_version = rank.trainer.policy_version
    rank.tape.weights(first_version, rank.trainer.named_shards())
    rank.publish(first_version)
    if rank.head is not None:
        rank.head.recorder.begin()
    for step in range(first_version + 1, rank.config.train.num_steps + 1):
        decision = rank.next_plan()
        plan = decision.plan
        if plan is None:
            if decision.save:
                if rank.head is not None:
                    rank.head.recorder.rejected(step - 1, rank.head.composer.take_rejected())
                rank.begin_save(step - 1)
            return step - 1
        rank.phases.enter("collect")
        batch = exchange(plan, rank.collector, rank.world.role_comm)
        rank.phases.enter("train")
        stats = rank.trainer.train_batch(batch)
        rank.tokens_trained += sum(t.num_tokens for t in batch.trajectories)
        rank.phases.enter("log")
        rank.tape.step(step, batch, rank.trainer.named_shards())
        if rank.head is not None:
            rank.head.composer.ledger.advance()
            rank.head.composer.check_books()
            rank.head.rejected = rank.head.composer.take_rejected()
        if decision.save:
            rank.begin_save(step)
        rank.publish(step)
        rank.phases.enter("log")
        if rank.head is not None:
            rank.head.recorder.step(step, plan, rank.head.groups, stats, rank.head.composer, rank.head.rejected)
        rank.report(final=False)
    return rank.config.train.num_steps


def end_run(rank: TrainingRank, *, finished: bool) -> dict:
    """Wait for the last push and, if the run finished, the last evaluation; stop all ranks; account for every group. Returns the summary (training rank 0)."""
    rank.finish_saving()
    rank.phases.enter("evaluate")
    deadline_s = rank.config.transport.data_deadline_s
    if rank.head is None:
        rank.report(final=True)
        rank.wait_for_stop(deadline_s + 2 * rank.config.checkpoint.deadline_s)
        return {}
    head = rank.head
    rank.publisher.wait_settled(rank.pump_and_listen)
    if finished:
        head.wait(lambda: not head.evaluating, deadline_s, lambda: "the last evaluation")
    head.log_pushes(final=True)
    rank.phases.enter("stop")
    others = [r for r in range(rank.world.size) if r != rank.world.world_rank]
    for world_rank in others:
        rank.mailbox.post(world_rank, Tag.STOP)
    head.wait(
        lambda: all(r in head.recorder.finals for r in others),
        deadline_s,
        lambda: f"last reports of ranks {[r for r in others if r not in head.recorder.finals]}",
    )
    rank.report(final=True)
    head.recorder.log.append("timeline", rank.phases.drain())
    groups = head.recorder.account(head.composer, finished=finished)
    head.recorder.finish_samples()
    return {
        "groups": groups,
        "accuracy_before": head.recorder.accuracy_before,
        "accuracy_after": head.recorder.evaluations[-1].accuracy if head.recorder.evaluations else None,
        "tokens_trained": head.recorder.tokens_trained,
        "training_s": head.recorder.elapsed_s(),
        "checkpoints": dict(head.saves.counts),
    }
