"""A set of mostly consecutive integers, kept as intervals: the tickets that are closed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class IntervalSet:
    """A set of non-negative integers kept as disjoint, non-touching, sorted intervals [start, stop): small when the members are mostly consecutive."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._num_members = 0

    @classmethod
    def from_list(cls, intervals: Iterable[Iterable[int]]) -> IntervalSet:
        """The inverse of `to_list`. Raises ValueError for intervals that are empty, out of order, overlapping or touching."""
        found = cls()
        previous_stop = -1
        for start, stop in intervals:
            if not previous_stop < start < stop:
                raise ValueError(f"interval [{start}, {stop}) is empty or does not lie beyond {previous_stop}, the end of the one before")
            found._starts.append(start)
            found._stops.append(stop)
            found._num_members += stop - start
            previous_stop = stop
        return found

    def to_list(self) -> list[list[int]]:
        """[[start, stop), ...], ready for JSON."""
        return [[start, stop] for start, stop in zip(self._starts, self._stops, strict=True)]

    def add(self, member: int) -> bool:
        """True when the member is new; False (and nothing changes) when it was there already."""
        assert member >= 0
        at = bisect_right(self._starts, member)  # intervals before `at` start at or below the member
        if at and member < self._stops[at - 1]:
            return False
        self._num_members += 1
        joins_left = at > 0 and self._stops[at - 1] == member
        joins_right = at < len(self._starts) and self._starts[at] == member + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = member + 1
        elif joins_right:
            self._starts[at] = member
        else:
            self._starts.insert(at, member)
            self._stops.insert(at, member + 1)
        return True

    def __contains__(self, member: int) -> bool:
        at = bisect_right(self._starts, member)
        return at > 0 and member < self._stops[at - 1]

    def __len__(self) -> int:
        return self._num_members

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self._starts == other._starts and self._stops == other._stops

    def first_missing(self, start: int = 0) -> int:
        """The smallest non-member at or above `start`."""
        at = bisect_left(self._starts, start + 1)
        return max(start, self._stops[at - 1]) if at else start
