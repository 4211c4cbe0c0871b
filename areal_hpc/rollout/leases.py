"""Who starts which ticket. Generation rank 0 grants tickets in order, below the ticket limit, in blocks sized to what a rank can take; ranks ask one block ahead.

At eta = 0 nothing is granted by message: ticket k belongs to generation rank k mod G, in order, so that the same seed gives the same batches, bit for bit.
A grant carries the policy version that its limit came from. The ticket must not start under an older one, otherwise the hard staleness bounds would not hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

Grant = tuple[list[int], int]
"""(tickets, version they may start under)."""


@dataclass(slots=True)
class Dispatcher:
    """Generation rank 0's counter of tickets and the queue of ranks that want some."""

    next_ticket: int = 0
    num_ranks: int = 1
    """Generation ranks: a block is at most this fraction of what the gate leaves, or those who ask first would take all of it and the others stand still."""
    _wants: deque[tuple[int, int]] = field(default_factory=deque)

    def want(self, rank: int, count: int) -> None:
        """A rank asks for `count` tickets."""
        self._wants.append((rank, count))

    def grants(self, ticket_limit: int, version: int) -> list[tuple[int, Grant]]:
        """(rank, grant) for everybody that can be served now, first come first served; a block may be cut short by the limit."""
        granted = []
        share = max(1, -(-(ticket_limit - self.next_ticket) // self.num_ranks))
        while self._wants and self.next_ticket < ticket_limit:
            rank, count = self._wants.popleft()
            stop = min(self.next_ticket + min(count, share), ticket_limit)
            granted.append((rank, (list(range(self.next_ticket, stop)), version)))
            self.next_ticket = stop
        return granted


@dataclass(slots=True)
class Leases:
    """The tickets that this rank may start, in order, and whether it has asked for more."""

    role_rank: int
    num_generation: int
    static: bool
    """eta = 0: tickets are role_rank, role_rank + G, ... and nobody is asked."""
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
