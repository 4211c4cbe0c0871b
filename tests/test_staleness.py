"""The gate and the four staleness modes under random event orders, against a model that knows nothing of the implementation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.rollout.leases import Dispatcher, Leases
from areal_hpc.staleness import NO_LIMIT, Ledger, age, ticket_limit

EVENTS_PER_CASE = 3_000
CASES = [(mode, eta, groups) for mode in ("count", "dropless", "drop", "mask") for eta in (0, 1, 2, 4, 8) for groups in (1, 2, 8)]


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize(("batch_size", "group_size"), [(8, 1), (16, 4), (12, 3)])
def test_limit_is_equation_3(eta: int, batch_size: int, group_size: int) -> None:
    """Ticket k may start if and only if floor((N_r - 1) / B) <= i + eta for its last trajectory, N_r counting what was trained or is under way."""
    groups = batch_size // group_size
    for version in range(4):
        for rejected in range(3):
            limit = ticket_limit(version, eta, groups, rejected)
            for ticket in range(limit + 2 * groups):
                num_submitted = (ticket + 1 - rejected) * group_size
                assert (ticket < limit) == ((num_submitted - 1) // batch_size <= version + eta)


def test_no_gate_without_eta() -> None:
    assert ticket_limit(0, math.inf, 4, 0) == NO_LIMIT


def test_age_counts_versions_since_the_first_token() -> None:
    assert [age(5, start) for start in (5, 4, 0)] == [0, 1, 5]


@dataclass
class Job:
    """A run without models: generation ranks that start, finish and fail tickets in random order; messages that arrive late but in order per rank."""

    ledger: Ledger
    rng: random.Random
    num_ranks: int = 3
    slots: int = 6
    slow_rank: int = -1
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    leases: list[Leases] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    running: list[dict[int, int]] = field(default_factory=list)
    mail: list[list[tuple]] = field(default_factory=list)
    outcome: dict[int, str] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    masked: int = 0
    confirmed: dict[int, int] = field(default_factory=dict)
    limit: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.leases = [Leases(rank, self.num_ranks, static=self.ledger.eta == 0) for rank in range(self.num_ranks)]
        self.version = [0] * self.num_ranks
        self.running = [{} for _ in range(self.num_ranks)]
        self.mail = [[("active", 0)] for _ in range(self.num_ranks)]
        self.new_limit()

    def new_limit(self) -> None:
        """Training rank 0 tells the limit; it applies on a rank once that rank has the version it came with."""
        self.limit = (self.ledger.policy_version, self.ledger.limit)

    def lease(self) -> None:
        version, limit = self.limit
        for rank, lease in enumerate(self.leases):
            if lease.static:
                lease.raise_limit(limit, version)
            elif count := lease.num_to_ask(2):
                self.dispatcher.want(rank, count)
        if self.ledger.eta > 0 and self.version[0] >= version:
            for rank, grant in self.dispatcher.grants(limit, version):
                self.leases[rank].receive(grant)

    def start(self, rank: int) -> None:
        if len(self.running[rank]) < self.slots:
            ticket = self.leases[rank].take(self.version[rank])
            if ticket is not None:
                assert ticket < self.ledger.limit, "the gate was passed"
                assert ticket not in self.outcome, "a ticket was started twice"
                self.outcome[ticket] = "running"
                self.running[rank][ticket] = self.version[rank]
                self.mail[rank].append(("start", ticket, self.version[rank]))

    def finish(self, rank: int) -> None:
        if self.running[rank]:
            ticket = self.rng.choice(list(self.running[rank]))
            self.mail[rank].append(("arrive", ticket, self.running[rank].pop(ticket)))

    def swap(self, rank: int) -> None:
        if self.version[rank] < self.ledger.policy_version:
            self.version[rank] = self.ledger.policy_version
            self.mail[rank].append(("active", self.version[rank]))

    def deliver(self, rank: int) -> None:
        if not self.mail[rank]:
            return
        kind, *body = self.mail[rank].pop(0)
        if kind == "start":
            self.ledger.start(*body)
        elif kind == "arrive":
            self.ledger.arrive(*body)
            if self.rng.random() < 0.1:  # failed, or filtered out
                self.ledger.reject(body[0], self.rng.choice(["failed", "filtered"]))
                self.close(body[0], "rejected")
                self.new_limit()
        else:
            self.confirmed[rank] = body[0]
            self.ledger.oldest_active_version = max(0, min(self.confirmed.get(r, -1) for r in range(self.num_ranks)))

    def close(self, ticket: int, how: str) -> None:
        assert self.outcome[ticket] == "running", f"ticket {ticket} closed twice"
        self.outcome[ticket] = how

    def train(self) -> bool:
        waiting = dict(self.ledger.waiting)
        batch = self.ledger.compose()
        for ticket in set(waiting) - set(self.ledger.waiting) - set(batch or []):
            assert self.ledger.mode == "drop"
            assert age(self.ledger.policy_version, waiting[ticket]) > self.ledger.eta, "dropped although fresh enough"
            self.close(ticket, "stale")
            self.new_limit()
        if batch is None:
            return False
        assert batch == sorted(batch)
        assert len(batch) == self.ledger.groups_per_batch
        for ticket in batch:
            self.close(ticket, "trained")
            trained_age = age(self.ledger.policy_version, waiting[ticket])
            if self.ledger.mode == "mask" and trained_age > self.ledger.eta:
                self.masked += 1
            else:
                self.ages.append(trained_age)
        left = [start for ticket, start in waiting.items() if ticket in self.ledger.waiting]
        assert not left or max(waiting[t] for t in batch) <= min(left), "a newer group was trained before an older one that had finished"
        self.ledger.advance()
        self.new_limit()
        return True


def drive(job: Job, num_events: int) -> int:
    """Random events; then everything that is possible, until nothing is. Returns the batches trained."""
    batches = 0
    for _ in range(num_events):
        rank = job.rng.randrange(job.num_ranks)
        if rank == job.slow_rank and job.rng.random() < 0.95:
            continue  # its messages lag, and it swaps late
        event = job.rng.choices(["lease", "start", "finish", "swap", "deliver", "train"], [2, 4, 3, 1, 6, 2])[0]
        if event == "lease":
            job.lease()
        elif event == "train":
            batches += job.train()
        else:
            getattr(job, event)(rank)
    return batches


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(("mode", "eta", "groups"), CASES)
def test_modes_under_random_event_orders(mode: str, eta: int, groups: int, slow: bool) -> None:
    """Never beyond the gate, each ticket closed once, never too old where the bound is hard, and never stuck."""
    rng = random.Random(f"{mode}{eta}{groups}{slow}")
    job = Job(Ledger(eta, mode, groups), rng, num_ranks=rng.choice([2, 3, 5]), slots=rng.choice([1, 3, 10]), slow_rank=1 if slow else -1)
    drive(job, EVENTS_PER_CASE)
    if mode != "count":
        assert max(job.ages, default=0) <= eta
    # No deadlock: from any state, if ranks keep finishing what runs, another batch comes within a bounded number of events.
    for _ in range(3):
        for _ in range(20_000):
            if drive(job, 50):
                break
        else:
            pytest.fail(f"no batch after {20_000 * 50} events: {job.ledger}")
    closed = [ticket for ticket, how in job.outcome.items() if how != "running"]
    assert sorted(closed) == [ticket for start, stop in job.ledger.closed.to_list() for ticket in range(start, stop)]
    assert job.ledger.num_closed.total() == len(closed)
    on_the_way = sum(len(r) for r in job.running) + sum(1 for mail in job.mail for item in mail if item[0] == "arrive") + len(job.ledger.waiting)
    assert len(job.outcome) == len(closed) + on_the_way, "admitted = closed + waiting + running"


def test_count_mode_does_not_bound_the_age() -> None:
    """The reason for the other modes: with eta = 1 a straggler is trained at age 2 under eq. 3 alone."""
    ledger = Ledger(1, "count", 1)
    for ticket in (1, 2):  # ticket 0 straggles; each batch is one group
        ledger.arrive(ticket, ledger.policy_version)
        assert ledger.compose() == [ticket]
        ledger.advance()
    ledger.arrive(0, 0)
    assert ledger.compose() == [0]
    assert age(ledger.policy_version, 0) == 2


def test_dropless_waits_for_the_straggler() -> None:
    ledger = Ledger(1, "dropless", 1)
    ledger.start(0, 0)
    ledger.arrive(1, 0)
    assert ledger.compose() == [1]
    ledger.advance()
    ledger.oldest_active_version = 1
    ledger.arrive(2, 1)
    assert ledger.compose() is None  # training 2 now would leave 0 to be trained at age 2
    ledger.arrive(0, 0)
    assert ledger.compose() == [0]


@given(num_ranks=st.integers(1, 9), limit=st.integers(1, 60), counts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_block_is_at_most_a_fair_share(num_ranks: int, limit: int, counts: list[int]) -> None:
    """Whoever asks first does not get everything: no block exceeds what the gate leaves over the ranks, rounded up; tickets stay in order."""
    dispatcher = Dispatcher(num_ranks=num_ranks)
    for rank, count in enumerate(counts):
        dispatcher.want(rank, count)
    granted = [grant for _, (grant, _) in dispatcher.grants(limit, 0)]
    assert all(1 <= len(block) <= -(-limit // num_ranks) for block in granted)
    assert [ticket for block in granted for ticket in block] == list(range(dispatcher.next_ticket))
    assert all(len(block) <= count for block, count in zip(granted, counts, strict=False))
    assert dispatcher.next_ticket == limit or len(granted) == len(counts)
