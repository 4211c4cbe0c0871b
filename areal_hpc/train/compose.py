"""Training rank 0's part: from arrivals to the plan of a global batch (which trajectories, which weights and advantages, which rank, which micro-batch).

A group that arrives may be closed at once instead of waiting for a batch: *failed*, no answer was graded; *filtered*, fewer than `min_group_size` answers are left
to train, or (dynamic sampling, DAPO, arXiv 2503.14476) their rewards are all equal, so that it would teach nothing. Either raises the ticket limit: another ticket
starts in its place. Should nearly everything be filtered, the run ends with an error instead of generating for ever.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_hpc.config import Config
from areal_hpc.intervals import IntervalSet
from areal_hpc.objectives import Settings, denominator, overlong, settings
from areal_hpc.staleness import Ledger, age
from areal_hpc.train.advantages import advantages, has_contrast, overlong_penalty
from areal_hpc.train.batching import plan_batch
from areal_hpc.train.collect import Arrival
from areal_hpc.transport.cut import Cut
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
    """0 masks a trajectory: not graded, or (staleness mode `mask`) older than eta, or (train.truncated `mask`) at the length limit."""
    age_S: np.ndarray
    num_microbatches: list[int]
    trained_tokens: list[int]
    """Tokens that the model sampled in answers with weight > 0, of each mini-batch, over all ranks."""
    denominators: list[int]
    """What the summed loss of each mini-batch is divided by (`objectives.denominator`)."""
    num_penalised: int
    """Trained trajectories that got reward.wrong for reaching the length limit."""
    num_overlong: int
    """Trained trajectories whose reward the overlong buffer lowered."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Groups that a resumed run has from the attempts before it, as of its checkpoint."""

    closed: int = 0
    waiting: int = 0
    running: int = 0

    @property
    def total(self) -> int:
        return self.closed + self.waiting + self.running


@dataclass(slots=True)
class Composer:
    """Keeps the ledger and the arrivals; makes plans."""

    config: Config
    num_training: int
    crossover_tokens: float = 12 * 1024
    """Length at which attention costs as much as the matrices (`models.flops.attention_crossover_tokens`); for the balance over ranks."""
    ledger: Ledger = field(init=False)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    resumed: Resumed = Resumed()
    num_arrived: int = 0
    """Groups that have arrived since the run began, in earlier attempts as far as the checkpoint has them as closed."""
    rejected: list[Arrival] = field(default_factory=list)
    """Groups closed without training that the ranks which hold them have yet to hear of, with the next plan."""
    _unlogged: list[tuple[Arrival, str]] = field(default_factory=list)
    """Groups closed without training, each with its reason (failed, filtered, stale), until the log takes them."""
    _num_announced: int = 0
    """The first of `rejected` went out with the last plan."""
    _settings: Settings = field(init=False)
    _num_filtered_in_a_row: int = 0
    """Groups filtered since the last batch."""

    def __post_init__(self) -> None:
        staleness = self.config.staleness
        self._settings = settings(self.config.train)
        self.ledger = Ledger(staleness.eta, staleness.mode, self.config.groups_per_batch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the ledger, ready for JSON: taken at the cut. Waiting and running groups are in the ranks' files."""
        ledger = self.ledger
        return {
            "policy_version": ledger.policy_version,
            "num_rejected": ledger.num_rejected,
            "num_closed": dict(ledger.num_closed),
            "closed_tickets": ledger.closed.to_list(),
        }

    def restore(self, state: Mapping[str, Any], cut: Cut) -> None:
        """Go on from a checkpoint: before the first arrival. Groups that waited arrive again through the collectors."""
        ledger = self.ledger
        ledger.policy_version, ledger.num_rejected = state["policy_version"], state["num_rejected"]
        ledger.closed, ledger.num_closed = IntervalSet.from_list(state["closed_tickets"]), Counter(state["num_closed"])
        for ticket, start_version in cut.start_version.items():  # of finished ones too: until a training rank tells of them they would pass for newer ones
            ledger.start(ticket, start_version)
        self.num_arrived = len(ledger.closed)
        self.resumed = Resumed(len(ledger.closed), cut.num_finished, cut.num_unfinished)
        self.check_books()

    def check_books(self) -> None:
        """The accounting identity as far as this rank knows it: every group that arrived is closed, for one reason, or waits. Raises RuntimeError."""
        ledger, num_closed = self.ledger, self.ledger.num_closed
        trained = ledger.policy_version * ledger.groups_per_batch
        rejected = num_closed.total() - num_closed["trained"]
        if (
            self.num_arrived != len(ledger.closed) + len(ledger.waiting)
            or (num_closed.total(), num_closed["trained"], ledger.num_rejected) != (len(ledger.closed), trained, rejected)
            or not ledger.waiting.keys().isdisjoint(ledger.running)
        ):
            raise RuntimeError(
                f"groups do not add up at version {ledger.policy_version}: {self.num_arrived} arrived, {len(ledger.waiting)} waiting, "
                f"{len(ledger.closed)} closed ({dict(num_closed)}), {ledger.num_rejected} replaced, {trained} should be trained"
            )

    def arrive(self, arrival: Arrival) -> None:
        """A group came out of the ring; one that cannot train is closed. Raises RuntimeError when too many were filtered out since the last batch."""
        self.num_arrived += 1
        self.arrivals[arrival.ticket] = dataclasses.replace(arrival, arrived_at=time.monotonic())
        self.ledger.arrive(arrival.ticket, arrival.start_version)
        reason = self._unfit(arrival.table)
        if reason is not None:
            self.ledger.reject(arrival.ticket, reason)
            self._close(arrival.ticket, reason)
            self._num_filtered_in_a_row += reason == "filtered"
            self._check_filtered()

    def compose(self) -> tuple[Plan, list[Arrival]] | None:
        """The next batch and its groups, or None while it cannot be composed. With a batch, `rejected` is everything to be dropped since the one before."""
        del self.rejected[: self._num_announced]
        self._num_announced = 0
        tickets = self.ledger.compose()
        for ticket in [ticket for ticket in self.arrivals if ticket in self.ledger.closed and (tickets is None or ticket not in tickets)]:
            self._close(ticket, "stale")
        if tickets is None:
            return None
        self._num_filtered_in_a_row = 0
        self._num_announced = len(self.rejected)
        groups = [self._take(ticket) for ticket in tickets]
        return self._plan(groups), groups

    def take_rejected(self) -> list[tuple[Arrival, str]]:
        """Groups closed without training since the last call, each with the reason."""
        taken, self._unlogged = self._unlogged, []
        return taken

    def _take(self, ticket: int) -> Arrival:
        """It waits no longer."""
        arrival = self.arrivals.pop(ticket)
        return dataclasses.replace(arrival, waited_s=time.monotonic() - arrival.arrived_at)

    def _close(self, ticket: int, reason: str) -> None:
        arrival = self._take(ticket)
        self.rejected.append(arrival)
        self._unlogged.append((arrival, reason))

    def _unfit(self, table: np.ndarray) -> str | None:
        """Why a group with this sample table cannot train: failed, filtered; None if it can."""
        if not np.isin(table["status"], GRADED_VALUES).any():
            return "failed"
        trains_S = self._trains(table)
        if trains_S.sum() < self.config.train.min_group_size:
            return "filtered"
        if self._settings.dynamic_sampling == "refill" and not has_contrast(self._rewards(table), np.zeros(len(table), np.int64), trains_S).any():
            return "filtered"
        return None

    def _check_filtered(self) -> None:
        limit = self._settings.max_filtered
        if limit is not None and self._num_filtered_in_a_row > limit * self.config.groups_per_batch:
            train = self.config.train
            raise RuntimeError(
                f"{self._num_filtered_in_a_row} groups in a row were filtered out since the last batch (rewards all equal, or fewer than "
                f"train.min_group_size={train.min_group_size} answers left to train; train.truncated={train.truncated}): more than train.max_filtered={limit} "
                f"batches of {self.config.groups_per_batch}; "
                "use problems that the model solves now and then, or --train.dynamic-sampling none"
            )

    def _at_limit(self, table: np.ndarray) -> np.ndarray:
        """bool [S]: answers that reached the length limit (an environment's tokens count)."""
        return table["num_tokens"] >= self.config.generation.max_new_tokens

    def _trains(self, table: np.ndarray) -> np.ndarray:
        """bool [S]: answers that train as far as their grade and length go."""
        graded_S = np.isin(table["status"], GRADED_VALUES)
        return graded_S & ~self._at_limit(table) if self.config.train.truncated == "mask" else graded_S

    def _rewards(self, table: np.ndarray) -> np.ndarray:
        """float64 [S]: rewards as graded, or reward.wrong for answers at the length limit (`train.truncated` penalise)."""
        reward_S = table["reward"].astype(np.float64)
        if self.config.train.truncated == "penalise":
            reward_S[self._at_limit(table)] = self.config.reward.wrong
        return reward_S

    def _plan(self, groups: list[Arrival]) -> Plan:
        train, version = self.config.train, self.ledger.policy_version
        table = np.concatenate([group.table for group in groups])
        group_S = np.repeat(np.arange(len(groups)), [len(group.table) for group in groups])
        prompt_S = np.array([group.prompt_tokens for group in groups])[group_S]
        age_S = np.array([age(version, int(start)) for start in table["version_min"]])
        weight_S = self._trains(table).astype(np.float32)
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
            crossover_tokens=self.crossover_tokens,
        )
        trained_S = weight_S > 0
        tokens_M = np.bincount(plan.minibatch_S[trained_S], table["num_sampled"][trained_S], train.num_minibatches).astype(int).tolist()
        answers_M = np.bincount(plan.minibatch_S[trained_S], minlength=train.num_minibatches).tolist()
        max_new_tokens = self.config.generation.max_new_tokens
        penalty_S = overlong_penalty(table["num_tokens"], max_new_tokens, *overlong(self.config))
        penalised_S = trained_S & self._at_limit(table) & (train.truncated == "penalise")
        return Plan(
            policy_version=version,
            ticket_S=np.array([group.ticket for group in groups])[group_S],
            sample_S=table["sample"].astype(np.int64),
            owner_S=np.array([group.owner for group in groups])[group_S],
            rank_S=plan.rank_S,
            minibatch_S=plan.minibatch_S,
            microbatch_S=plan.microbatch_S,
            advantage_S=advantages(self._rewards(table) - penalty_S, group_S, trained_S, self._settings.advantage),
            weight_S=weight_S,
            age_S=age_S,
            num_microbatches=[int(count) for count in plan.num_microbatches_M],
            trained_tokens=tokens_M,
            denominators=[denominator(self._settings.aggregation, t, a, max_new_tokens) for t, a in zip(tokens_M, answers_M, strict=True)],
            num_penalised=int(penalised_S.sum()),
            num_overlong=int((trained_S & (penalty_S > 0)).sum()),
        )
