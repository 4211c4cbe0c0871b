"""The same job, one token at a time, written without the simulator's code: no closed forms, no heaps, no ledger, no leases.

The gate is eq. 3 as it stands in the paper, counted anew at every look; a batch is the B / n graded groups whose first token is oldest. One engine with any eta,
or several at eta = 0 (ticket k belongs to engine k mod G). O(tokens * sequences), for small cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from areal_hpc.simulate.cluster import Job


@dataclass(eq=False)
class Answer:
    ticket: int
    prompt: int
    total: int
    made: int = 0
    seen: bool = False
    """Had a place in the KV cache before."""


@dataclass
class Machine:
    number: int
    at: float = 0.0
    """Time of its next boundary."""
    version: int = 0
    running: list[Answer] = field(default_factory=list)
    waiting: list[Answer] = field(default_factory=list)
    tokens: int = 0
    preempted: int = 0
    stepping: bool = False
    """A step ends at `at`."""
    next_own: int = 0


class Reference:
    def __init__(self, job: Job) -> None:
        assert job.num_generation == 1 or job.eta == 0
        self.job = job
        self.machines = [Machine(g, next_own=g) for g in range(job.num_generation)]
        self.start: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.size: dict[int, list[int]] = {}
        self.graded: list[int] = []
        self.grading: list[tuple[float, int]] = []
        self.num_started = 0
        self.version = 0
        self.trained_at: float | None = None
        self.free_at = 0.0
        self.delivered: list[tuple[float, int]] = []
        self.rows: list[tuple[float, float, float, int]] = []
        """(end, wait, mean age, largest age) of each step."""

    def run(self) -> None:
        while len(self.rows) < self.job.num_steps:
            times = [m.at for m in self.machines] + [t for t, _ in self.grading] + [self.trained_at, self.free_at if self.free_at > self.now else None]
            times += [t for t, _ in self.delivered if t > self.now]
            self.now = min(t for t in times if t is not None and (t > self.now or not self.started))
            self.started = True
            self.look()

    now = 0.0
    started = False

    def look(self) -> None:
        """Everything that is due now, in the order of the loops: training ends, engines, grading, a new batch."""
        if self.trained_at is not None and self.trained_at <= self.now:
            self.publish()
        for machine in self.machines:
            if machine.at <= self.now or not machine.running:
                self.turn(machine)
        for due, ticket in sorted(self.grading):
            if due <= self.now:
                self.grading.remove((due, ticket))
                self.graded.append(ticket)
        self.compose()
        for machine in self.machines:  # what the new batch lets an idle engine do is nothing: the gate moves with versions only
            if not machine.running and machine.at <= self.now:
                machine.at = math.inf

    def turn(self, m: Machine) -> None:
        cost = self.job.decode
        if m.at == math.inf:
            m.at = self.now
        if m.at > self.now:
            return
        if m.stepping:
            for answer in m.running:
                answer.made += 1
                m.tokens += 1
            for answer in [a for a in m.running if a.made == a.total]:
                m.running.remove(answer)
                self.left[answer.ticket] -= 1
                if not self.left[answer.ticket]:
                    self.grading.append((self.now + self.job.reward_s, answer.ticket))
            while sum(a.prompt + a.made for a in m.running) > cost.kv_tokens and len(m.running) > 1:
                m.waiting.insert(0, m.running.pop())
                m.preempted += 1
        clock = self.now
        newest = max((v for t, v in self.delivered if t <= self.now), default=0)
        draining = False
        if newest > m.version:
            if m.running and not self.job.interruptible:
                draining = True
            else:
                m.version = newest
                clock += self.job.push.swap_s
                if m.running and self.job.kv_on_update == "recompute":
                    clock += sum(cost.prefill_token_s * (a.prompt + a.made) + cost.prefill_pair_s * (a.prompt + a.made) ** 2 for a in m.running)
        if not draining:
            while len(m.running) + len(m.waiting) < cost.max_num_running and self.may_start(m):
                self.begin(m)
            clock += self.admit(m)
        m.stepping = bool(m.running)
        if not m.running:
            m.at = clock if clock > self.now else math.inf
            return
        context = sum(a.prompt + a.made for a in m.running)
        m.at = clock + max(cost.host_s, cost.base_s + cost.per_sequence_s * len(m.running) + cost.per_context_token_s * context)

    def may_start(self, m: Machine) -> bool:
        """Eq. 3 for the last trajectory of the next ticket: floor((N_r - 1) / B) <= i + eta."""
        ticket = m.next_own if self.job.eta == 0 else self.num_started
        num_submitted = (ticket + 1) * self.job.group_size  # trained, waiting, running, and this one: nothing is ever rejected here
        return math.isinf(self.job.eta) or (num_submitted - 1) // self.job.batch_size <= m.version + self.job.eta

    def begin(self, m: Machine) -> None:
        ticket = m.next_own if self.job.eta == 0 else self.num_started
        m.next_own += self.job.num_generation
        self.num_started += 1
        prompt, answers = self.job.lengths.group(ticket, self.job.group_size)
        self.left[ticket], self.size[ticket] = len(answers), [prompt + a for a in answers]
        m.waiting += [Answer(ticket, prompt, a) for a in answers]

    def admit(self, m: Machine) -> float:
        cost, seconds, shared = self.job.decode, 0.0, -1
        while m.waiting and len(m.running) < cost.max_num_running:
            answer = m.waiting[0]
            length = answer.prompt + answer.made
            if m.running and sum(a.prompt + a.made for a in m.running) + length > cost.kv_tokens * 0.99:
                break
            m.running.append(m.waiting.pop(0))
            if answer.made or answer.ticket != shared:
                seconds += cost.prefill_token_s * length + cost.prefill_pair_s * length**2
            if not answer.made:
                shared = answer.ticket
            if answer.ticket not in self.start:
                self.start[answer.ticket] = m.version
        return seconds

    def compose(self) -> None:
        size = self.job.batch_size // self.job.group_size
        if self.trained_at is not None or self.now < self.free_at or len(self.graded) < size:
            return
        batch = sorted(sorted(self.graded, key=lambda k: (self.start[k], k))[:size])
        self.graded = [k for k in self.graded if k not in batch]
        tokens = sum(sum(self.size[k]) for k in batch)
        ages = [self.version - self.start[k] for k in batch]
        assert self.job.num_training == 1 and self.job.train.pair_s == self.job.train.microbatch_s == 0
        self.trained_at = self.now + self.job.train.step_s + self.job.train.token_s * tokens
        self.row = (self.now - self.free_at, sum(ages) / len(ages), max(ages))

    def publish(self) -> None:
        due = max((t for t, _ in self.delivered), default=0.0)
        if due > self.now:  # the push before has not settled
            self.trained_at = due
            return
        self.version += 1
        self.trained_at = None
        packed = self.now + self.job.push.pack_s
        self.delivered.append((packed + self.job.push.transfer_s, self.version))
        self.free_at = packed
        self.rows.append((packed, *self.row))
