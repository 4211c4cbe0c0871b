"""Training rank 0's part: from arrivals to the plan of a global batch (which trajectories, which weights and advantages, which rank, which micro-batch)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from areal_hpc.config import Config
from areal_hpc.staleness import Ledger, age
from areal_hpc.train.advantages import advantages
from areal_hpc.train.batching import plan_batch
from areal_hpc.train.collect import Arrival
from areal_hpc.transport.trajectory import GRADED

GRADED_VALUES = [int(status) for status in GRADED]


@dataclass(frozen=True, slots=True)
class Plan:
    """A global batch; columns have one entry per trajectory, in the order of (ticket, sample). The same on every training rank."""

    policy_version: int
    """i: the version the batch trains in."""
    ticket_S: np.ndarray
    sample_S: np.ndarray
    owner_S: np.ndarray
    """Training rank that holds the payload."""
    rank_S: np.ndarray
    """Training rank that trains it."""
    minibatch_S: np.ndarray
    microbatch_S: np.ndarray
    advantage_S: np.ndarray
    weight_S: np.ndarray
    """0 masks a trajectory: not graded, or (mode `mask`) older than eta."""
    age_S: np.ndarray
    num_microbatches: list[int]
    trained_tokens: list[int]
    """Answer tokens with weight > 0 in each mini-batch, over all ranks: the loss is their mean."""


@dataclass(slots=True)
class Composer:
    """Keeps the ledger and the arrivals; makes plans."""

    config: Config
    num_training: int
    ledger: Ledger = field(init=False)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    num_arrived: int = 0
    rejected: list[Arrival] = field(default_factory=list)
    """Groups closed without training since they were last taken (for the log)."""

    def __post_init__(self) -> None:
        staleness = self.config.staleness
        self.ledger = Ledger(staleness.eta, staleness.mode, self.config.groups_per_batch)

    def arrive(self, arrival: Arrival) -> None:
        """A group came out of the ring. One without a single graded answer is closed as failed."""
        self.num_arrived += 1
        self.arrivals[arrival.ticket] = arrival
        self.ledger.arrive(arrival.ticket, arrival.start_version)
        if not np.isin(arrival.table["status"], GRADED_VALUES).any():
            self.ledger.reject(arrival.ticket, "failed")
            self.rejected.append(self.arrivals.pop(arrival.ticket))

    def compose(self) -> tuple[Plan, list[Arrival]] | None:
        """The next batch and its groups, or None while it cannot be composed."""
        tickets = self.ledger.compose()
        stale = [ticket for ticket in self.arrivals if ticket in self.ledger.closed and (tickets is None or ticket not in tickets)]
        self.rejected += [self.arrivals.pop(ticket) for ticket in stale]
        if tickets is None:
            return None
        groups = [self.arrivals.pop(ticket) for ticket in tickets]
        return self._plan(groups), groups

    def _plan(self, groups: list[Arrival]) -> Plan:
        train, version = self.config.train, self.ledger.policy_version
        table = np.concatenate([group.table for group in groups])
        group_S = np.repeat(np.arange(len(groups)), [len(group.table) for group in groups])
        prompt_S = np.array([group.prompt_tokens for group in groups])[group_S]
        age_S = np.array([age(version, int(start)) for start in table["version_min"]])
        weight_S = np.isin(table["status"], GRADED_VALUES).astype(np.float32)
        if self.config.staleness.mode == "mask":
            weight_S[age_S > self.config.staleness.eta] = 0.0
        lengths_S = prompt_S + table["num_tokens"]
        plan = plan_batch(
            lengths_S,
            group_S,
            num_ranks=self.num_training,
            num_minibatches=train.num_minibatches,
            capacity_tokens=train.microbatch_tokens,
            min_microbatches=train.min_microbatches,
        )
        trained = [int(table["num_tokens"][(plan.minibatch_S == m) & (weight_S > 0)].sum()) for m in range(train.num_minibatches)]
        return Plan(
            policy_version=version,
            ticket_S=np.array([group.ticket for group in groups])[group_S],
            sample_S=table["sample"].astype(np.int64),
            owner_S=np.array([group.owner for group in groups])[group_S],
            rank_S=plan.rank_S,
            minibatch_S=plan.minibatch_S,
            microbatch_S=plan.microbatch_S,
            advantage_S=advantages(table["reward"].astype(np.float64), group_S, weight_S > 0, train.advantage),
            weight_S=weight_S,
            age_S=age_S,
            num_microbatches=[int(count) for count in plan.num_microbatches_M],
            trained_tokens=trained,
        )
