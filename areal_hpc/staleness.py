"""Staleness: which tickets may start (the gate), how old a trajectory is, and which finished groups form the next batch.

The unit is the group: ticket k names the k-th prompt of the run, a batch takes B / n groups. The paper's rule (eq. 3), with N_r the trajectories trained,
waiting, running or submitted now, is

    floor((N_r - 1) / B) <= i + eta    <=>    k < (i + eta + 1) * B / n + rejected tickets     (ticket k is the next one)

so the gate is arithmetic on one number, the *ticket limit*. Rejected tickets (failed, stale, filtered) leave N_r and raise the limit by one each, otherwise a
filter would starve the run. Everything here is pure: the training loop, the simulator and the property tests call the same code. docs/staleness.md proves the bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from areal_hpc.intervals import IntervalSet

Mode = Literal["count", "dropless", "drop", "mask"]
NO_LIMIT = 2**62
"""Ticket limit of eta = inf."""


def ticket_limit(policy_version: int, eta: float, groups_per_batch: int, num_rejected: int) -> int:
    """Tickets below this number may start while the policy version is `policy_version` (eq. 3)."""
    if math.isinf(eta):
        return NO_LIMIT
    return (policy_version + int(eta) + 1) * groups_per_batch + num_rejected


def age(trained_version: int, start_version: int) -> int:
    """Versions between the batch a trajectory trains in and its oldest token (its first one); queue time included."""
    return trained_version - start_version


@dataclass(slots=True)
class Ledger:
    """What training rank 0 knows about every ticket: running, waiting to be trained, or closed with a reason.

    Lifecycle of a ticket: (started ->) arrived -> trained | stale, or (started ->) failed | filtered. Each ticket is closed exactly once.
    Example: `ledger.arrive(3, start_version=0)`; `batch = ledger.compose()`; if it is not None, train it, then `ledger.advance()`.
    Trap: in mode `dropless` the ledger must hear of starts (`start`) and of the oldest version still generated with (`oldest_active_version`).
    """

    eta: float
    mode: Mode
    groups_per_batch: int
    policy_version: int = 0
    oldest_active_version: int = 0
    """No ticket that has not been reported can have started, or will start, under an older version."""
    num_rejected: int = 0
    running: dict[int, int] = field(default_factory=dict)
    """Started, not arrived: ticket -> start version."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Arrived, not trained: ticket -> start version."""
    closed: IntervalSet = field(default_factory=IntervalSet)
    num_closed: Counter[str] = field(default_factory=Counter)
    """Tickets closed by reason: trained, stale, failed, filtered."""

    @property
    def limit(self) -> int:
        """Ticket limit under the present policy version."""
        return ticket_limit(self.policy_version, self.eta, self.groups_per_batch, self.num_rejected)

    def start(self, ticket: int, start_version: int) -> None:
        """A generation rank produced the first token of the ticket. The report may come after the group itself."""
        if ticket not in self.waiting and ticket not in self.closed:
            self.running[ticket] = start_version

    def arrive(self, ticket: int, start_version: int) -> None:
        """A finished group is here."""
        assert ticket not in self.waiting and ticket not in self.closed, f"ticket {ticket} arrived twice"
        assert ticket < self.limit, f"ticket {ticket} was started beyond the limit {self.limit}"
        self.running.pop(ticket, None)
        self.waiting[ticket] = start_version

    def reject(self, ticket: int, reason: str) -> None:
        """Close a ticket without training it; another one may start in its place."""
        self.running.pop(ticket, None)
        self.waiting.pop(ticket, None)
        self._close(ticket, reason)
        self.num_rejected += 1

    def compose(self) -> list[int] | None:
        """Tickets of the next batch, closed as trained; None while it cannot be composed. In mode `drop` stale groups are rejected on the way."""
        if self.mode == "drop":
            for ticket in [k for k, start in self.waiting.items() if age(self.policy_version, start) > self.eta]:
                self.reject(ticket, "stale")
        if len(self.waiting) < self.groups_per_batch:
            return None
        oldest_first = sorted(self.waiting, key=lambda ticket: (self.waiting[ticket], ticket))
        batch, rest = oldest_first[: self.groups_per_batch], oldest_first[self.groups_per_batch :]
        if self.mode == "dropless" and not self._feasible_after(rest):
            return None
        for ticket in batch:
            del self.waiting[ticket]
            self._close(ticket, "trained")
        return sorted(batch)

    def advance(self) -> None:
        """The optimiser step on the composed batch is done: version i becomes i + 1."""
        self.policy_version += 1

    def _feasible_after(self, rest: list[int]) -> bool:
        """Could all that remains, oldest first, still be trained within eta? (Tickets nobody has reported count with the oldest version they can have.)"""
        num_open = self.limit - len(self.closed)
        num_unreported = num_open - len(self.waiting) - len(self.running)
        starts = [self.waiting[ticket] for ticket in rest] + list(self.running.values()) + [self.oldest_active_version] * num_unreported
        starts.sort()
        return all(self.policy_version + 1 + j // self.groups_per_batch - start <= self.eta for j, start in enumerate(starts))

    def _close(self, ticket: int, reason: str) -> None:
        assert ticket not in self.closed, f"ticket {ticket} closed twice"
        self.closed.add(ticket)
        self.num_closed[reason] += 1
