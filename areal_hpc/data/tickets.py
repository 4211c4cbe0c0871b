"""Tickets: group k asks the problem that a seeded permutation gives to ticket k, so ranks agree on prompts without sending any.

Epoch e covers tickets e*N ... e*N + N - 1 (N training problems) in an order of its own. Which tickets are closed (trained, rejected, dropped, failed) is
an `areal_hpc.intervals.IntervalSet`: together with the data fingerprint it is the whole data state of a checkpoint.
"""

from __future__ import annotations

import numpy as np


class Tickets:
    """Ticket k (0, 1, 2, ...) -> position in `Problems.train`; the same on every rank for the same seed and number of problems."""

    def __init__(self, num_problems: int, seed: int) -> None:
        assert num_problems > 0
        self.num_problems = num_problems
        self._seed = seed % 2**64
        self._orders: dict[int, np.ndarray] = {}

    def problem_index(self, ticket: int) -> int:
        assert ticket >= 0
        epoch, offset = divmod(ticket, self.num_problems)
        if epoch not in self._orders:
            if len(self._orders) == 2:  # tickets near the end of an epoch are asked for together with those of the next one
                del self._orders[min(self._orders)]
            self._orders[epoch] = np.random.Generator(np.random.PCG64((self._seed, epoch))).permutation(self.num_problems)
        return int(self._orders[epoch][offset])
