"""Who starts which ticket. Generation rank 0 grants tickets in order, below the ticket limit, in blocks sized to what a rank can take; ranks ask one block ahead.

At eta = 0 nothing is granted by message: ticket k belongs to generation rank k mod G, in order, so that the same seed gives the same batches, bit for bit.
Tickets that a resumed run knows already (closed, or on their way at the cut) are passed over: everything else below the limit is granted, again or for the first time.
A grant carries the policy version that its limit came from. The ticket must not start under an older one, otherwise the hard staleness bounds would not hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from areal_hpc.intervals import IntervalSet

Grant = tuple[list[int], int]
"""(tickets, version they may start under)."""


@dataclass(slots=True)
class Dispatcher:
    """Generation rank 0's counter of tickets and the queue of ranks that want some."""

    known: IntervalSet = field(default_factory=IntervalSet)
    """Tickets that are not granted: those that the run had known when it was resumed."""
    next_ticket: int = 0
    num_ranks: int = 1
    """Generation ranks: a block is at most this fraction of what the gate leaves, or those who ask first would take all of it and the others stand still."""
    _wants: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.next_ticket = self.known.first_missing(self.next_ticket)

    def want(self, rank: int, count: int) -> None:
        """A rank asks for `count` tickets."""
        self._wants.append((rank, count))

    def grants(self, ticket_limit: int, version: int) -> list[tuple[int, Grant]]:
        """(rank, grant) for everybody that can be served now, first come first served; a block may be cut short by the limit."""
        granted = []
        share = max(1, -(-(ticket_limit - self.next_ticket) // self.num_ranks))
        while self._wants and self.next_ticket < ticket_limit:
            rank, count = self._wants.popleft()
            tickets: list[int] = []
            while len(tickets) < min(count, share) and self.next_ticket < ticket_limit:
                tickets.append(self.next_ticket)
                self.next_ticket = self.known.first_missing(self.next_ticket + 1)
            granted.append((rank, (tickets, version)))
        return granted


@dataclass(slots=True)
class Leases:
    """The tickets that this rank may start, in order, and whether it has asked for more."""

    role_rank: int
    num_generation: int
    static: bool
    """eta = 0: tickets are role_rank, role_rank + G, ... and nobody is asked."""
    known: IntervalSet = field(default_factory=IntervalSet)
    """As the dispatcher's; for eta = 0."""
    asked: bool = False
    _held: deque[tuple[int, int]] = field(default_factory=deque)
    _next_static: int = -1

    def __post_init__(self) -> None:
        self._next_static = self.role_rank

    def __len__(self) -> int:
        return len(self._held)

    def receive(self, grant: Grant) -> None:
        """A block was granted."""
        tickets, version = grant
        self.asked = False
        self._held.extend((ticket, version) for ticket in tickets)

    def raise_limit(self, ticket_limit: int, version: int) -> None:
        """eta = 0: take this rank's share of the tickets below the new limit."""
        while self.static and self._next_static < ticket_limit:
            if self._next_static not in self.known:
                self._held.append((self._next_static, version))
            self._next_static += self.num_generation

    def num_to_ask(self, num_free_groups: int) -> int:
        """How many tickets to ask for now, 0 if none: what fits, and one block ahead."""
        block = max(1, num_free_groups)
        if self.static or self.asked or len(self._held) >= block:
            return 0
        self.asked = True
        return 2 * block - len(self._held)

    def take(self, version: int) -> int | None:
        """The next ticket that may start under `version`; None if there is none."""
        if self._held and self._held[0][1] <= version:
            return self._held.popleft()[0]
        return None
