"""The consistent cut against a model: real rings, collector, ledger, leases and files; generation ranks and messages in random order."""

from __future__ import annotations

import random
import secrets
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.intervals import IntervalSet
from areal_hpc.rollout.leases import Dispatcher, Leases
from areal_hpc.staleness import Ledger, Mode
from areal_hpc.train.collect import Collector
from areal_hpc.transport import random_state
from areal_hpc.transport.cut import Cut, Grade, RankState, UnfinishedGroup, UnfinishedSample, file_name, write_state
from areal_hpc.transport.forward import ForwardReceiver
from areal_hpc.transport.lanes import Incoming
from areal_hpc.transport.ring import Ring, RingConsumer, RingProducer
from areal_hpc.transport.trajectory import Group, Status, Trajectory, group_bytes, write_group

LANE_BYTES = 1 << 13  # a few groups: lanes are often full


def trajectory(ticket: int, sample: int, tokens: list[int], version: int) -> Trajectory:
    tokens_R = np.array(tokens, np.int32)
    logprobs_R, versions_R = -tokens_R.astype(np.float32) / 7, np.full(len(tokens), version, np.int32)
    return Trajectory(ticket, sample, np.array([ticket, 1], np.int32), tokens_R, logprobs_R, versions_R, np.ones(len(tokens_R), bool), 5.0, Status.RIGHT)


def finished_group(ticket: int, version: int) -> Group:
    return Group(ticket, tuple(trajectory(ticket, sample, [ticket, sample, 3], version) for sample in range(2)))


@dataclass
class Generator:
    """A generation rank: what runs, what waits for room in the lane, and whether a marker has to enter it first."""

    lane: RingProducer
    leases: Leases
    version: int = 0
    running: dict[int, int] = field(default_factory=dict)
    """ticket -> start version."""
    outbox: deque[Group] = field(default_factory=deque)
    marker: int | None = None
    inbox: deque[tuple] = field(default_factory=deque)

    def push(self) -> None:
        if self.marker is not None:
            if self.lane.try_push_marker(self.marker) is None:
                return
            self.marker = None
        while self.outbox:
            group = self.outbox[0]
            slot = self.lane.try_reserve(group_bytes(group))
            if slot is None:
                return
            with slot:
                write_group(group, slot.buffer)
                slot.commit(ticket=group.ticket, version_min=0, version_max=0, num_tokens=1, num_samples=2)
            self.outbox.popleft()

    def snapshot(self) -> RankState:
        unfinished = [UnfinishedGroup(ticket, (half_answer(ticket, start), UnfinishedSample(*columns([], 0)))) for ticket, start in self.running.items()]
        return RankState(tuple(self.outbox), tuple(unfinished))


def columns(tokens: list[int], version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    made = trajectory(0, 0, tokens, version)
    return made.tokens_R, made.logprobs_R, made.versions_R


def half_answer(ticket: int, version: int) -> UnfinishedSample:
    return UnfinishedSample(*columns([ticket, 9], version))


@dataclass
class Attempt:
    """One attempt of a run without models: G generators, T training ranks, messages of each pair in order, everything else at random."""

    rng: random.Random
    ledger: Ledger
    num_generation: int
    num_training: int
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    generators: list[Generator] = field(default_factory=list)
    collectors: list[Collector] = field(default_factory=list)
    consumers: list[RingConsumer] = field(default_factory=list)
    told: list[deque] = field(default_factory=list)
    """Per training rank: arrivals that training rank 0 has yet to hear of."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    saved: dict[str, RankState] = field(default_factory=dict)
    closed_at_cut: IntervalSet | None = None
    cut_pending: set[int] = field(default_factory=set)
    """Training ranks t > 0 whose own cut is still to come: they trained the step a little later."""

    def __post_init__(self) -> None:
        run = secrets.token_hex(4)
        lanes: list[dict[int, RingConsumer]] = [{} for _ in range(self.num_training)]
        for g in range(self.num_generation):
            ring = Ring(f"areal_test.{run}.{g}", LANE_BYTES, lane=g)
            consumer = ring.consumer()
            producer = ring.producer(timeout_s=1)
            consumer.unlink()
            self.consumers.append(consumer)
            lanes[g % self.num_training][g] = consumer
            leases = Leases(g, self.num_generation, static=self.ledger.eta == 0, known=self.dispatcher.known)
            self.generators.append(Generator(producer, leases, version=self.ledger.policy_version))
        receiver = ForwardReceiver(None, "", [], 1.0)  # type: ignore[arg-type]  # no lane comes from another node
        self.collectors = [Collector(t, Incoming(lanes[t], receiver, {}), max_held=1000) for t in range(self.num_training)]
        self.told = [deque() for _ in range(self.num_training)]
        self.publish()

    def close(self) -> None:
        for generator, consumer in zip(self.generators, self.consumers, strict=True):
            generator.lane.close()
            consumer.close()

    def publish(self) -> None:
        for generator in self.generators:
            generator.inbox.append(("version", self.ledger.policy_version, self.ledger.limit))

    # -- what a generation rank does ---------------------------------------------------------------------------------

    def hear(self, g: int) -> None:
        generator = self.generators[g]
        if not generator.inbox:
            return
        kind, *body = generator.inbox.popleft()
        if kind == "snapshot":
            self.saved[file_name("generation", g)] = generator.snapshot()
            generator.marker = body[0]
            return
        version, limit = body
        generator.version = version
        generator.leases.raise_limit(limit, version)
        self.ledger.oldest_active_version = min(other.version for other in self.generators)
        if g == 0 and self.ledger.eta > 0:
            self.limit = (limit, version)

    limit: tuple[int, int] = (0, 0)

    def lease(self, g: int) -> None:
        if count := self.generators[g].leases.num_to_ask(2):
            self.dispatcher.want(g, count)
        for rank, grant in self.dispatcher.grants(*self.limit):
            self.generators[rank].leases.receive(grant)

    def start(self, g: int) -> None:
        generator = self.generators[g]
        if len(generator.running) < 3 and (ticket := generator.leases.take(generator.version)) is not None:
            assert ticket not in self.started and ticket not in self.ledger.closed, "a ticket was granted twice"
            self.started.add(ticket)
            generator.running[ticket] = generator.version
            if self.ledger.mode == "dropless":
                self.ledger.start(ticket, generator.version)

    def finish(self, g: int) -> None:
        generator = self.generators[g]
        if generator.running and len(generator.outbox) < 3:
            ticket = self.rng.choice(list(generator.running))
            generator.outbox.append(finished_group(ticket, generator.running.pop(ticket)))

    def push(self, g: int) -> None:
        self.generators[g].push()

    # -- what a training rank does -----------------------------------------------------------------------------------

    def drain(self, t: int) -> None:
        if t not in self.cut_pending:  # still in the step that ends at the cut
            self.told[t].extend(self.collectors[t].drain())

    def tell(self, t: int) -> None:
        if self.told[t]:
            arrival = self.told[t].popleft()
            self.ledger.arrive(arrival.ticket, arrival.start_version)
            if self.rng.random() < 0.1:
                self.ledger.reject(arrival.ticket, "filtered")
                self.publish()

    def train(self, marker: int | None = None) -> bool:
        """A batch, if there is one; with a marker the cut that follows it."""
        if self.cut_pending:
            return False
        waiting = dict(self.ledger.waiting)
        batch = self.ledger.compose()
        if batch is None:
            return False
        for collector in self.collectors:
            collector.drop(batch)
        self.ages += [self.ledger.policy_version - waiting[ticket] for ticket in batch]
        self.ledger.advance()
        self.steps[self.ledger.policy_version] = batch
        if marker is not None:
            self.closed_at_cut = IntervalSet.from_list(self.ledger.closed.to_list())
            for generator in self.generators:
                generator.inbox.append(("snapshot", marker))
            self.collectors[0].begin_cut(marker)
            self.cut_pending = set(range(1, self.num_training))
            self.marker = marker
        self.publish()
        return True

    marker: int = 0

    def own_cut(self, t: int) -> None:
        if t in self.cut_pending:
            self.collectors[t].begin_cut(self.marker)
            self.cut_pending.discard(t)

    def save(self, folder: Path) -> bool:
        """True once every rank's part of the cut is known, and written."""
        for t, collector in enumerate(self.collectors):
            if t not in self.cut_pending and (groups := collector.take_cut()) is not None:
                self.saved[file_name("training", t)] = RankState(finished=tuple(groups))
        if len(self.saved) < self.num_generation + self.num_training:
            return False
        for name, state in self.saved.items():
            write_state(folder, name, state)
        return True

    def event(self) -> None:
        kind = self.rng.choices(["hear", "lease", "start", "finish", "push", "drain", "tell", "train", "own_cut"], [3, 2, 4, 4, 3, 2, 4, 1, 1])[0]
        if kind == "train":
            self.train()
        elif kind in ("drain", "tell", "own_cut"):
            getattr(self, kind)(self.rng.randrange(self.num_training))
        elif kind != "lease" or self.ledger.eta > 0:
            getattr(self, kind)(self.rng.randrange(self.num_generation))


def resumed(rng: random.Random, old: Attempt, folder: Path, num_generation: int, num_training: int, version: int) -> Attempt:
    """The next attempt, on other numbers of ranks, from what the files say."""
    closed = old.closed_at_cut
    assert closed is not None
    cut = Cut.open(folder, closed)
    assert cut.num_duplicates == 0, "a group was saved twice"
    ledger = Ledger(old.ledger.eta, old.ledger.mode, old.ledger.groups_per_batch, policy_version=version)
    ledger.closed, ledger.num_rejected = closed, len(closed) - version * ledger.groups_per_batch
    for ticket, start in cut.start_version.items():
        ledger.start(ticket, start)
    new = Attempt(rng, ledger, num_generation, num_training, Dispatcher(known=cut.known()))
    dealt = []
    for g, generator in enumerate(new.generators):
        for group in cut.unfinished_of(g, num_generation, static=ledger.eta == 0):
            assert group.samples[0].tokens_R.tolist() == [group.ticket, 9] and len(group.samples[1].tokens_R) == 0
            generator.running[group.ticket] = group.start_version
            dealt.append(group.ticket)
    for t, collector in enumerate(new.collectors):
        groups = cut.finished_of(t, num_training)
        assert all([x.tokens_R.tolist() for x in group.trajectories] == [[group.ticket, 0, 3], [group.ticket, 1, 3]] for group in groups)
        collector.put_back(groups)
        dealt += [group.ticket for group in groups]
    assert len(set(dealt)) == len(dealt) == cut.num_finished + cut.num_unfinished, "each group is dealt to one rank"
    new.started = set(dealt)
    return new


@pytest.mark.parametrize(("mode", "eta", "seed"), [(mode, eta, seed) for mode in ("count", "dropless") for eta in (0, 1, 3) for seed in range(2)])
def test_cut_and_resume_under_random_event_orders(tmp_path: Path, mode: Mode, eta: int, seed: int) -> None:
    """Three attempts, each from a cut at a random moment of the one before, on random numbers of ranks: no ticket is trained twice, lost or granted again."""
    rng = random.Random(f"{mode}{eta}{seed}")
    attempt = Attempt(rng, Ledger(eta, mode, 2), rng.randint(1, 4), rng.randint(1, 3))
    trained: dict[int, list[int]] = {}
    for number in range(3):
        for _ in range(rng.randrange(600)):
            attempt.event()
        marker = 1000 + number
        for _ in range(200_000):
            attempt.event()
            if attempt.train(marker):
                break
        version = attempt.ledger.policy_version
        folder = tmp_path / str(number)
        folder.mkdir()
        for _ in range(200_000):  # goes on training meanwhile
            attempt.event()
            if attempt.save(folder):
                break
        trained |= {step: batch for step, batch in attempt.steps.items() if step <= version}  # later steps are undone
        assert max(attempt.ages) <= eta or mode == "count"
        attempt.close()
        attempt = resumed(rng, attempt, folder, rng.randint(1, 4), rng.randint(1, 3), version)
    for _ in range(20_000):
        attempt.event()
    trained |= attempt.steps
    attempt.close()
    assert sorted(trained) == list(range(1, max(trained) + 1)) and len(attempt.steps) > 20
    tickets = [ticket for batch in trained.values() for ticket in batch]
    assert len(set(tickets)) == len(tickets), "a ticket was trained twice"
    closed = {ticket for start, stop in attempt.ledger.closed.to_list() for ticket in range(start, stop)}
    assert set(tickets) <= closed and set(range(max(tickets))) <= closed | attempt.started, "a ticket was lost"
    assert max(attempt.ages) <= eta or mode == "count"


# -- the files ---------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
GRADES = st.builds(
    Grade,
    status=st.sampled_from(Status),
    score=st.none() | st.floats(0, 1),
    extracted=st.none() | st.text(max_size=5),
    seconds=st.floats(0, 9),
    ago_s=st.floats(0, 9),
)


@st.composite
def samples(draw: st.DrawFn, must_have_begun: bool) -> UnfinishedSample:
    parts = columns(draw(TOKENS.filter(len) if must_have_begun else TOKENS), draw(st.integers(0, 2**31 - 1)))
    finish = draw(st.sampled_from([None, "stop", "length"])) if len(parts[0]) else None
    return UnfinishedSample(*parts, finish=finish, finished_ago_s=draw(st.floats(0, 9)), grade=draw(st.none() | GRADES) if finish else None)


@st.composite
def groups(draw: st.DrawFn, tickets: list[int]) -> list[UnfinishedGroup]:
    return [UnfinishedGroup(k, (draw(samples(True)), *draw(st.lists(samples(False), max_size=2))), draw(st.floats(0, 9))) for k in tickets]


def same_group(a: UnfinishedGroup, b: UnfinishedGroup) -> bool:
    def key(group: UnfinishedGroup) -> list:
        arrays = [(s.tokens_R.tolist(), s.logprobs_R.tolist(), s.versions_R.tolist(), s.finish, s.finished_ago_s, s.grade) for s in group.samples]
        return [group.ticket, group.admitted_ago_s, arrays]

    return key(a) == key(b)


@settings(deadline=None, max_examples=15)
@given(data=st.data(), owners=st.lists(st.integers(0, 1), max_size=8), num_ranks=st.integers(1, 5), static=st.booleans())
def test_files_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, owners: list[int], num_ranks: int, static: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    written: list[UnfinishedGroup] = []
    for rank in range(2):
        mine = data.draw(groups([3 * ticket for ticket, owner in enumerate(owners) if owner == rank]))
        finished = tuple(finished_group(3 * ticket + 1, 2) for ticket, owner in enumerate(owners) if owner == rank)
        write_state(folder, file_name("generation", rank), RankState(finished, tuple(mine), random_state.capture()))
        written += mine
    cut = Cut.open(folder, IntervalSet())
    assert cut.start_version == {group.ticket: group.start_version for group in written} | {3 * ticket + 1: 2 for ticket in range(len(owners))}
    read = [group for rank in range(num_ranks) for group in cut.unfinished_of(rank, num_ranks, static=static)]
    assert all(same_group(a, b) for a, b in zip(sorted(read, key=lambda g: g.ticket), sorted(written, key=lambda g: g.ticket), strict=True))
    if static:
        assert all(group.ticket % num_ranks == rank for rank in range(num_ranks) for group in cut.unfinished_of(rank, num_ranks, static=True))
    waiting = [group.ticket for rank in range(num_ranks) for group in cut.finished_of(rank, num_ranks)]
    assert sorted(waiting) == [3 * ticket + 1 for ticket in range(len(owners))]
    assert [t for a, b in cut.known().to_list() for t in range(a, b)] == sorted(waiting + [group.ticket for group in written])


def test_a_ticket_is_taken_once(tmp_path: Path) -> None:
    """Closed counts before finished, finished before unfinished; what is left out is counted, but for groups that were rejected while their owner still held them."""
    begun = [UnfinishedGroup(ticket, (half_answer(ticket, 1),)) for ticket in (1, 2, 3)]
    write_state(tmp_path, file_name("generation", 0), RankState((finished_group(2, 1),), tuple(begun)))
    write_state(tmp_path, file_name("training", 0), RankState((finished_group(2, 1), finished_group(3, 1), finished_group(4, 1), finished_group(9, 1))))
    closed = IntervalSet.from_list([[0, 1], [9, 10]])
    cut = Cut.open(tmp_path, closed)
    assert [group.ticket for group in cut.finished_of(0, 1)] == [2, 3, 4]
    assert [group.ticket for group in cut.unfinished_of(0, 1, static=False)] == [1]
    assert cut.num_duplicates == 3
    assert cut.known().to_list() == [[0, 5], [9, 10]] and closed.to_list() == [[0, 1], [9, 10]]


def test_random_number_generators_go_on(tmp_path: Path) -> None:
    import torch

    np.random.normal()  # noqa: NPY002  (leaves a cached second value behind)
    random.gauss(0, 1)
    write_state(tmp_path, file_name("training", 1), RankState(random=random_state.capture()))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002

    expected = draw()
    assert draw() != expected
    cut = Cut.open(tmp_path, IntervalSet())
    assert cut.random_of("training", 2) == {}
    random_state.restore(cut.random_of("training", 1))
    assert draw() == expected
