"""The job as discrete events: engines and a trainer with clocks, steered by the run's own gate, leases, ledger and packing.

    ENGINE    an engine reaches a boundary at which something happens      (rollout/worker.py: one turn of the loop)
    GRADED    the last verdict of a group is there, it goes to the trainer (transport, train/compose.py)
    TRAINED   the optimiser step on a batch is done                        (train/loop.py)
    READY     its version is packed, training is free for the next batch
    DELIVERED a new version is at the generation ranks, confirmed          (train/publish.py)
    FAILED    a rank dies; the job goes on from its last checkpoint

`Ledger`, `ticket_limit`, `Dispatcher`, `Leases`, `Tickets` and `plan_batch` are those of the run. Messages take no time. The same arguments give the same result.
"""

from __future__ import annotations

import copy
import heapq
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from areal_hpc.rollout.leases import Dispatcher, Leases
from areal_hpc.simulate.costs import DecodeCost, FailureCost, PushCost, TrainCost
from areal_hpc.simulate.engine import NEVER, Engine, Seconds, Sequence
from areal_hpc.simulate.lengths import Lengths
from areal_hpc.staleness import Ledger, Mode, age


class Kind(IntEnum):
    """Kinds of events; the order decides between events of the same time."""

    DELIVERED = 0
    TRAINED = 1
    ENGINE = 2
    GRADED = 3
    READY = 4
    FAILED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is simulated. B, n, eta, T and G are the project's symbols (docs/staleness.md)."""

    num_generation: int
    """G: engines; one engine may stand for several devices."""
    num_training: int
    """T: training ranks."""
    batch_size: int
    """B: trajectories of one global batch."""
    group_size: int
    """n: answers to one prompt."""
    eta: float
    """Permitted staleness; inf: no gate."""
    num_steps: int
    """Training steps."""
    decode: DecodeCost
    train: TrainCost
    lengths: Lengths
    push: PushCost = field(default_factory=PushCost)
    failures: FailureCost = field(default_factory=FailureCost)
    mode: Mode = "count"
    colocated: bool = False
    """The same ranks generate a whole batch, then train it (eta = 0): a rank's device belongs to one of the two at a time."""
    interruptible: bool = True
    """False: an engine finishes all it runs, and starts nothing new, before it takes new weights."""
    kv_on_update: str = "recompute"
    """recompute or keep: the KV cache of running sequences when weights change."""
    reward_s: float = 0.0
    """From the last token of a group to its verdict."""
    seed: int = 0
    """Of failures (lengths have a seed of their own)."""

    @property
    def groups_per_batch(self) -> int:
        """B / n."""
        return self.batch_size // self.group_size


@dataclass(slots=True)
class Step:
    """One training step, as /steps of a run's log has it."""

    step: int
    end_s: float
    """When its version was out: packed, and in the colocated mode delivered."""
    tokens: int
    """Prompt and answer tokens of its batch."""
    answer_tokens: int
    wait_s: float
    """Training waited for a complete batch."""
    train_s: float
    num_microbatches: int
    """On one rank, over all mini-batches."""
    staleness_mean: float
    staleness_max: int
    waiting_groups: int
    """Finished groups left for later batches."""


@dataclass(slots=True)
class _Group:
    """A ticket between its start and its batch."""

    prompt: int
    answers: list[int]
    num_open: int
    """Answers not finished."""
    start_version: int = -1


@dataclass(slots=True)
class _Version:
    """A version on its way to the engines."""

    number: int
    ticket_limit: int
    visible_s: float
    """When an engine may begin to deal with it."""
    delivered_s: float
    """When its bytes are there."""


@dataclass(slots=True)
class Result:
    """What came out. Conservation: admitted tickets = trained + dropped + waiting + unfinished; decoded tokens likewise (`Cluster.account`)."""

    steps: list[Step]
    seconds: list[Seconds]
    """Of each engine."""
    wall_s: float
    """Until the last step."""
    train_s: float
    """Time that training computed, repeated work included."""
    num_tokens_decoded: int
    num_tokens_recomputed: int
    num_preempted: int
    num_failures: int
    lost_s: float
    """Time spent on work that failures undid, restarts included."""
    num_groups: dict[str, int]
    """Where tickets went: admitted, trained, stale, waiting, unfinished."""

    @property
    def tokens_per_s(self) -> float:
        """All tokens of the global batches over the whole time."""
        return sum(step.tokens for step in self.steps) / self.wall_s

    def steady(self, skip: float = 0.25) -> Result:
        """Without the first share `skip` of the steps, in which queues fill up: only `steps` and `wall_s` change."""
        first = int(len(self.steps) * skip)
        if first == 0:
            return self
        return replace(self, steps=self.steps[first:], wall_s=self.wall_s - self.steps[first - 1].end_s)

    @property
    def staleness_mean(self) -> float:
        """Mean over the steps."""
        return float(np.mean([step.staleness_mean for step in self.steps]))

    def share(self, phase: str) -> float:
        """Share of the engines' time in a phase of `Seconds`."""
        total = sum(getattr(seconds, name) for seconds in self.seconds for name in Seconds.__slots__)
        return sum(getattr(seconds, phase) for seconds in self.seconds) / total if total else 0.0


class Cluster:
    """One run. `Cluster(job).run()`."""

    def __init__(self, job: Job) -> None:
        if job.batch_size % job.group_size:
            raise ValueError(f"group_size={job.group_size} does not divide batch_size={job.batch_size}")
        if job.colocated and job.eta != 0:
            raise ValueError(f"colocated ranks train what they have generated: eta must be 0, not {job.eta:g}")
        self.job = job
        self.now_s = 0.0
        self.ledger = Ledger(job.eta, job.mode, job.groups_per_batch)
        self.engines = [Engine(job.decode) for _ in range(job.num_generation)]
        self.versions = [0] * job.num_generation
        """Version that each engine samples with."""
        self.dispatcher = Dispatcher(num_ranks=job.num_generation)
        self.leases = [Leases(g, job.num_generation, static=job.eta == 0) for g in range(job.num_generation)]
        self.ticket_limit, self.limit_version = self.ledger.limit, 0
        """What generation rank 0 knows of the gate."""
        self.groups: dict[int, _Group] = {}
        self.pushed: _Version | None = None
        """The latest version on its way or there."""
        self.landed: _Version | None = None
        """The latest version that engines can deal with."""
        self.steps: list[Step] = []
        self.num_admitted = 0
        self.step: Step | None = None
        """What is being trained, until training is ready for the next batch."""
        self.ready_since_s = 0.0
        self.train_s = 0.0
        self.num_failures = 0
        self.lost_s = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        """Heap of (time, kind, serial, argument)."""
        self._serial = 0
        self._stamp = [0] * job.num_generation
        """Serial number of each engine's only valid event; 0: none."""
        self._planned = [(math.inf, 0, 0.0)] * job.num_generation
        """(time, steps until it, seconds of these steps) of that event."""
        self._saved: Cluster | None = None
        self._rng = np.random.Generator(np.random.PCG64((job.seed, 7)))

    # -- events ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until `num_steps` are trained. Raises RuntimeError when nothing can happen any more before that."""
        for g, lease in enumerate(self.leases):
            lease.raise_limit(self.ticket_limit, 0)
            self._post(0.0, Kind.ENGINE, g)
        self._save()
        self._draw_failure()
        while len(self.steps) < self.job.num_steps:
            if not self._events:
                raise RuntimeError(
                    f"at {self.now_s:g} s nothing can happen any more: {len(self.ledger.waiting)} groups wait, version {self.ledger.policy_version}"
                )
            time_s, kind, serial, argument = heapq.heappop(self._events)
            if kind == Kind.ENGINE:
                if self._stamp[argument] != serial:
                    continue
                self.now_s = time_s
                self._turn(argument)
            else:
                self.now_s = time_s
                self._act(Kind(kind), argument)
        return self._result()

    def _act(self, kind: Kind, argument: int) -> None:
        if kind == Kind.GRADED:
            self._arrive(argument)
        elif kind == Kind.TRAINED:
            self._publish()
        elif kind == Kind.READY:
            self._ready()
        elif kind == Kind.DELIVERED:
            self.landed = self.pushed
            for g in range(self.job.num_generation):
                self._poke(g)
        else:
            self._fail()

    def _post(self, time_s: float, kind: Kind, argument: int) -> None:
        self._serial += 1
        if kind == Kind.ENGINE:
            self._stamp[argument] = self._serial
        heapq.heappush(self._events, (time_s, kind, self._serial, argument))

    # -- a generation rank -----------------------------------------------------------------------------------------

    def _turn(self, g: int) -> None:
        """Engine g at the boundary it was waiting for: rollout/worker.py, one turn of the loop."""
        engine = self.engines[g]
        _, steps, decode_s = self._planned[g]
        for sequence in engine.advance(steps, decode_s):
            self._finished(sequence.ticket)
        if not engine.busy:
            engine.idle_until(self.now_s)
        self._take_new_weights(g)
        self._lease_and_admit(g)
        self._plan(g)

    def _plan(self, g: int, not_before_s: float = math.inf) -> None:
        """Set the engine's next event: something of its own, or the first boundary at or after `not_before_s`."""
        engine = self.engines[g]
        if not engine.busy:
            wake_s = max(engine.clock_s, not_before_s)
            self._planned[g], self._stamp[g] = (wake_s, 0, 0.0), 0
            if wake_s < math.inf:
                self._post(wake_s, Kind.ENGINE, g)
            return
        steps = engine.steps_to_event()
        if not_before_s < math.inf:
            steps = min(steps, engine.cost.decode_steps(engine.num_running, engine.context, not_before_s - engine.clock_s))
        assert steps < NEVER
        decode_s = engine.cost.decode_seconds(engine.num_running, engine.context, steps)
        time_s = max(self.now_s, engine.clock_s + decode_s)  # rounding must not turn time back
        self._planned[g] = (time_s, steps, decode_s)
        self._post(time_s, Kind.ENGINE, g)

    def _poke(self, g: int) -> None:
        """There is news for engine g: it looks at its next boundary."""
        if not self._stamp[g] or self._planned[g][0] > self.now_s:
            self._plan(g, not_before_s=self.now_s)

    def _take_new_weights(self, g: int) -> None:
        new, engine = self.landed, self.engines[g]
        if new is None or new.number <= self.versions[g]:
            return
        if engine.busy and not self.job.interruptible:
            return
        engine.pause(max(0.0, new.delivered_s - engine.clock_s) + self.job.push.swap_s)
        self.versions[g] = new.number
        if engine.busy and self.job.kv_on_update == "recompute":
            engine.recompute()
        self.leases[g].raise_limit(new.ticket_limit, new.number)
        if g == 0:
            self.ticket_limit, self.limit_version = max(new.ticket_limit, self.ticket_limit), new.number
        if self.job.mode == "dropless":
            self.ledger.oldest_active_version = min(self.versions)
            self._compose()

    def _lease_and_admit(self, g: int) -> None:
        engine, lease = self.engines[g], self.leases[g]
        if not self.job.interruptible and self.landed is not None and self.landed.number > self.versions[g]:
            return  # it drains
        while True:
            free = self._num_free_groups(g)
            if count := lease.num_to_ask(free):
                self.dispatcher.want(g, count)
            self._grant(g)
            started = False
            while free and (ticket := lease.take(self.versions[g])) is not None:
                self._start(g, ticket)
                started, free = True, self._num_free_groups(g)
            if not started:
                break
        if not engine.waiting:
            return
        for sequence in engine.admit():
            group = self.groups[sequence.ticket]
            if group.start_version < 0:
                group.start_version = self.versions[g]
                if self.job.mode == "dropless":
                    self.ledger.start(sequence.ticket, group.start_version)

    def _num_free_groups(self, g: int) -> int:
        engine = self.engines[g]
        free = engine.cost.max_num_running - engine.num_running - len(engine.waiting)
        return max(0, -(-free // self.job.group_size))

    def _grant(self, asking: int) -> None:
        """Generation rank 0 serves those who ask; others that get something look at it at their next boundary."""
        if self.leases[0].static:
            return
        for rank, grant in self.dispatcher.grants(self.ticket_limit, self.limit_version):
            self.leases[rank].receive(grant)
            if rank != asking:
                self._poke(rank)

    def _start(self, g: int, ticket: int) -> None:
        prompt, answers = self.job.lengths.group(ticket, self.job.group_size)
        self.groups[ticket] = _Group(prompt, answers, len(answers))
        self.num_admitted += 1
        self.engines[g].add([Sequence(ticket, prompt, answer, prompt) for answer in answers])

    def _finished(self, ticket: int) -> None:
        group = self.groups[ticket]
        group.num_open -= 1
        if not group.num_open:
            self._post(self.now_s + self.job.reward_s, Kind.GRADED, ticket)

    # -- the training ranks ----------------------------------------------------------------------------------------

    def _arrive(self, ticket: int) -> None:
        self.ledger.arrive(ticket, self.groups[ticket].start_version)
        self._compose()

    def _compose(self) -> None:
        """Start the next step if training is free and a batch can be composed."""
        if self.step is not None:
            return
        waiting, num_rejected = list(self.ledger.waiting) if self.job.mode == "drop" else [], self.ledger.num_rejected
        batch = self.ledger.compose()
        if self.ledger.num_rejected > num_rejected:
            kept = {*self.ledger.waiting, *(batch or ())}
            for ticket in waiting:
                if ticket not in kept:
                    del self.groups[ticket]
            self._raise_limit()
        if batch is None:
            return
        groups = [self.groups.pop(ticket) for ticket in batch]
        lengths_S = np.array([group.prompt + answer for group in groups for answer in group.answers])
        train_s, num_microbatches = self.job.train.seconds(lengths_S, np.repeat(np.arange(len(groups)), self.job.group_size), self.job.num_training)
        ages = [age(self.ledger.policy_version, group.start_version) for group in groups]
        self.train_s += train_s
        self.step = Step(
            step=self.ledger.policy_version + 1,
            end_s=math.nan,
            tokens=int(lengths_S.sum()),
            answer_tokens=sum(sum(group.answers) for group in groups),
            wait_s=self.now_s - self.ready_since_s,
            train_s=train_s,
            num_microbatches=num_microbatches,
            staleness_mean=float(np.mean(ages)),
            staleness_max=max(ages),
            waiting_groups=len(self.ledger.waiting),
        )
        self._post(self.now_s + train_s, Kind.TRAINED, 0)

    def _raise_limit(self) -> None:
        """Rejected tickets leave N_r: the generation ranks hear of the new limit at once, not with the next version."""
        self.ticket_limit, self.limit_version = max(self.ticket_limit, self.ledger.limit), max(self.limit_version, self.ledger.policy_version)
        for g, lease in enumerate(self.leases):
            lease.raise_limit(self.ledger.limit, self.ledger.policy_version)
            self._poke(g)

    def _publish(self) -> None:
        """train/publish.py: the version before must have settled; then pack, and the bytes are on their way."""
        push = self.job.push
        settled_s = self.pushed.delivered_s if self.pushed is not None else 0.0
        if settled_s > self.now_s:
            self._post(settled_s, Kind.TRAINED, 0)
            return
        self.ledger.advance()
        version = self.ledger.policy_version
        packed_s = self.now_s + push.pack_s
        delivered_s = packed_s + push.transfer_s
        self.pushed = _Version(version, self.ledger.limit, delivered_s if push.staged else packed_s, delivered_s)
        free_s = packed_s if push.staged and not self.job.colocated else delivered_s
        if version % self.job.failures.checkpoint_every == 0:
            free_s += self.job.failures.checkpoint_s
        assert self.step is not None
        self.step.end_s = free_s
        self._post(self.pushed.visible_s, Kind.DELIVERED, 0)
        self._post(free_s, Kind.READY, 0)

    def _ready(self) -> None:
        """Training is free for the next batch."""
        assert self.step is not None
        self.steps.append(self.step)
        self.step, self.ready_since_s = None, self.now_s
        if self.ledger.policy_version % self.job.failures.checkpoint_every == 0:
            self._save()
        self._compose()

    # -- failures --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """A consistent cut of everything but what the job is and what will fail."""
        if math.isfinite(self.job.failures.rank_mtbf_s):
            self._saved = None
            self._saved = copy.deepcopy(self, {id(self.job): self.job, id(self._rng): self._rng})

    def _draw_failure(self) -> None:
        if math.isfinite(self.job.failures.rank_mtbf_s):
            ranks = self.job.num_generation if self.job.colocated else self.job.num_generation + self.job.num_training
            self._post(self.now_s + float(self._rng.exponential(self.job.failures.rank_mtbf_s / ranks)), Kind.FAILED, 0)

    def _fail(self) -> None:
        """All ranks end. The state of the last checkpoint goes on, later: every clock in it is shifted; KV caches are computed anew."""
        saved = self._saved
        assert saved is not None
        kept = (self._rng, saved, self.num_failures + 1, self.train_s)
        shift_s = self.now_s + self.job.failures.restart_s - saved.now_s
        lost_s = self.lost_s + shift_s
        self.__dict__.update(copy.deepcopy(saved, {id(self.job): self.job, id(self._rng): self._rng}).__dict__)
        self._rng, self._saved, self.num_failures, self.train_s = kept
        self.lost_s = lost_s
        self.now_s += shift_s
        self.ready_since_s += shift_s
        if self.pushed is not None:
            self.pushed.visible_s += shift_s
            self.pushed.delivered_s += shift_s  # `landed` is the same object, or one whose times no longer matter
        self._events = [(time_s + shift_s, kind, serial, argument) for time_s, kind, serial, argument in self._events if kind != Kind.FAILED]
        self._planned = [(time_s + shift_s, steps, decode_s) for time_s, steps, decode_s in self._planned]
        for g, engine in enumerate(self.engines):
            engine.clock_s += shift_s
            if engine.busy:
                engine.recompute()
                self._plan(g)
        self._saved = None
        self._save()  # the same cut, later: a failure before the next checkpoint comes back to it once more
        self._draw_failure()

    # -- results ---------------------------------------------------------------------------------------------------

    def _result(self) -> Result:
        closed = self.ledger.num_closed
        unfinished = self.num_admitted - len(self.ledger.closed) - len(self.ledger.waiting)
        in_training = 0 if self.step is None else self.job.groups_per_batch
        return Result(
            steps=self.steps,
            seconds=[engine.seconds for engine in self.engines],
            wall_s=self.steps[-1].end_s,
            train_s=self.train_s,
            num_tokens_decoded=sum(engine.num_tokens for engine in self.engines),
            num_tokens_recomputed=sum(engine.num_recomputed for engine in self.engines),
            num_preempted=sum(engine.num_preempted for engine in self.engines),
            num_failures=self.num_failures,
            lost_s=self.lost_s,
            num_groups={
                "admitted": self.num_admitted,
                "trained": closed["trained"] - in_training,
                "training": in_training,
                "stale": closed["stale"],
                "waiting": len(self.ledger.waiting),
                "unfinished": unfinished,
            },
        )


def simulate(job: Job) -> Result:
    """Run the job. Raises ValueError for a job that cannot be."""
    return Cluster(job).run()
