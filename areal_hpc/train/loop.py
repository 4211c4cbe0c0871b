"""The loop of a training rank: wait for a batch, collect it, train on it, publish the new version.

consumes        groups from its ring lanes; on training rank 0 also CONFIRM, SWAPPED, STARTED, EVALUATED, SAMPLES, OBSERVED and ARRIVED messages
produces        policy versions; on training rank 0 the plan of each batch, the ticket limit, the log
waits for       a complete batch (no collective is open meanwhile); before each push, the confirmation of the one before
unblocked by    the rings of the generation ranks; generation ranks that confirm
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_hpc.config import Config
from areal_hpc.observe.memory import resident_bytes
from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.train.collect import Arrival, Collector, exchange
from areal_hpc.train.compose import Composer, Plan
from areal_hpc.train.publish import Publisher
from areal_hpc.train.record import Recorder
from areal_hpc.train.trainer import Trainer
from areal_hpc.transport.evaluation import Share, summarise
from areal_hpc.transport.messages import Mailbox, Message, Tag

POLL_S = 0.0005
LOOK_EVERY_S = 1.0
"""Between two looks at the processes behind the lanes, and between two signs of life from training rank 0 while a batch is not complete."""


@dataclass(slots=True)
class Head:
    """What training rank 0 does besides training: compose batches, steer the gate, follow evaluations, keep the log."""

    config: Config
    world: World
    mailbox: Mailbox
    publisher: Publisher
    composer: Composer
    recorder: Recorder
    stop_requested: Callable[[], bool]
    heldout_sources: Sequence[str] = ()
    """Source of each held-out problem."""
    groups: list[Arrival] = field(default_factory=list)
    """Groups of the batch that is being trained."""
    _shares: dict[int, list[Share]] = field(default_factory=dict)
    """Evaluations under way: version -> shares received."""
    _num_rejected_told: int = 0

    def pump(self) -> None:
        """Act on all messages that are here. Never blocks."""
        for message in self.mailbox.poll():
            self._receive(message)
        self.composer.ledger.oldest_active_version = max(0, self.publisher.oldest_active_version)
        self.publisher.excused_s = self.config.transport.data_deadline_s if self.evaluating else 0.0
        self.log_pushes()

    def log_pushes(self, *, final: bool = False) -> None:
        """Write the pushes that have come to their end."""
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
        elif message.tag == Tag.OBSERVED:
            self.recorder.observed(message)
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

    def next_plan(self) -> tuple[Plan, list[int]] | None:
        """The next batch and the tickets that were rejected meanwhile, for all training ranks; None while it cannot be composed."""
        composed = self.composer.compose()
        ledger = self.composer.ledger
        if ledger.num_rejected > self._num_rejected_told:
            self._num_rejected_told = ledger.num_rejected
            for rank in self.world.generation_ranks:
                self.mailbox.post(rank, Tag.LIMIT, (ledger.policy_version, ledger.limit))
        if composed is None:
            return None
        plan, self.groups = composed
        return plan, [arrival.ticket for arrival in self.composer.rejected]

    def wait(self, done: Callable[[], bool], deadline_s: float, what: Callable[[], str]) -> None:
        """Pump until `done`. Raises TimeoutError that says what was waited for."""
        stop_at = time.monotonic() + deadline_s
        while not done():
            self.pump()
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
    head: Head | None
    tokens_trained: int = 0
    _progress_at: float = 0.0
    """When the last trajectory arrived, or training rank 0 was last heard."""
    _told_at: float = 0.0

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

    def next_plan(self) -> Plan | None:
        """Wait for the next batch, emptying the lanes meanwhile. None: the run was asked to stop. Raises TimeoutError when no data comes."""
        self.phases.enter("wait_data")
        self._progress_at = time.monotonic()
        deadline_s = self.config.transport.data_deadline_s
        look_at = 0.0
        while True:
            arrivals = self.collector.drain()
            found = self._compose(arrivals) if self.head is not None else self._ask_head(arrivals)
            if found is not None:
                plan, rejected = found
                self.collector.drop(rejected)
                return plan
            now = time.monotonic()
            if now > self._progress_at + deadline_s:
                raise TimeoutError(f"no trajectory came for {deadline_s:g} s; {self._what_is_missing()}")
            if now > look_at:
                self.collector.check_producers()
                look_at = now + LOOK_EVERY_S
            if not arrivals:
                time.sleep(POLL_S)

    def _compose(self, arrivals: list[Arrival]) -> tuple[Plan | None, list[int]] | None:
        assert self.head is not None
        composer, others = self.head.composer, self.world.training_ranks[1:]
        num_arrived, now = composer.num_arrived, time.monotonic()
        for arrival in arrivals:
            composer.arrive(arrival)
        self.head.pump()
        if composer.num_arrived > num_arrived:
            self._progress_at = now
        found: tuple[Plan | None, list[int]] | None = (None, []) if self.head.stop_requested() else self.head.next_plan()
        if (
            found is not None or now > self._told_at + LOOK_EVERY_S
        ):  # a batch may take longer than the deadline: the others hear that it is still being composed
            self._told_at = now
            for rank in others:
                self.mailbox.post(rank, Tag.PLAN, found)
        return found

    def _ask_head(self, arrivals: list[Arrival]) -> tuple[Plan | None, list[int]] | None:
        if arrivals:
            self.mailbox.post(self.world.training_ranks[0], Tag.ARRIVED, arrivals)
        for message in self.mailbox.poll():
            if self.publisher.receive(message):
                continue
            assert message.tag == Tag.PLAN, f"unexpected {message.tag.name} message"
            self._progress_at = time.monotonic()
            if message.body is not None:
                return message.body
        return None

    def _what_is_missing(self) -> str:
        if self.head is None:
            return "training rank 0 has fallen silent"
        ledger = self.head.composer.ledger
        return f"{len(ledger.waiting)} groups are waiting, {self.config.groups_per_batch} make a batch, tickets below {ledger.limit} may run"

    def wait_for_stop(self, deadline_s: float) -> None:
        """Until training rank 0 has seen the run to its end: asleep, not in a collective. Raises TimeoutError."""
        stop_at = time.monotonic() + deadline_s
        while not any(message.tag == Tag.STOP for message in self.mailbox.poll() if not self.publisher.receive(message)):
            if time.monotonic() > stop_at:
                raise TimeoutError(f"waited {deadline_s:g} s for training rank 0 to end the run")
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
            "running": 0,
            "waiting": len(self.collector.held),
            "rss_bytes": resident_bytes(),
        }
        self.mailbox.post(self.world.training_ranks[0], Tag.OBSERVED, body | {"ring": ring, "final": final, "counters": {}})


def training_loop(rank: TrainingRank, save: Callable[[int], None]) -> int:
    """Train `num_steps` batches, or fewer when a signal asks to stop; returns the steps done. `save` writes a checkpoint (collective)."""
    rank.publish(version=0)
    if rank.head is not None:
        rank.head.recorder.begin()
    for step in range(1, rank.config.train.num_steps + 1):
        plan = rank.next_plan()
        if plan is None:
            return step - 1
        rank.phases.enter("collect")
        batch = exchange(plan, rank.collector, rank.world.role_comm)
        rank.phases.enter("train")
        stats = rank.trainer.train_batch(batch)
        rank.tokens_trained += sum(t.num_tokens for t in batch.trajectories)
        if rank.head is not None:
            rank.head.composer.ledger.advance()
        rank.publish(step)
        rank.phases.enter("log")
        if rank.head is not None:
            rank.head.recorder.step(step, plan, rank.head.groups, stats, rank.head.composer)
        rank.report(final=False)
        if rank.config.train.save_every and step % rank.config.train.save_every == 0:
            with rank.phases("save"):
                save(step)
    return rank.config.train.num_steps


def end_run(rank: TrainingRank, *, finished: bool) -> dict:
    """Wait for the last push and, if the run finished, the last evaluation; stop all ranks; account for every group. Returns the summary (training rank 0)."""
    rank.phases.enter("evaluate")
    deadline_s = rank.config.transport.data_deadline_s
    if rank.head is None:
        rank.report(final=True)
        rank.wait_for_stop(deadline_s)
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
    accuracies = [e.accuracy for e in head.recorder.evaluations]
    groups = head.recorder.account(head.composer)
    head.recorder.finish_samples()
    return {
        "groups": groups,
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if accuracies else None,
        "tokens_trained": head.recorder.tokens_trained,
    }
