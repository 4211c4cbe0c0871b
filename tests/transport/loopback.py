"""The lowest layer of the weight push without a network: what `transport.weights.Network` is given instead, in one process.

`Loopback` carries buckets from senders to one receiver; like Gloo's, a broadcast is complete at the receiver once it has been posted at both ends, and a test may
damage what passes. `Fabric` is NCCL as far as the push can tell: one communicator, grouped launches that must name the same broadcasts in the same order on all
ranks, executed when the last rank has launched.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Work:
    """A broadcast that is complete once `complete` says so."""

    complete: Callable[[], bool]
    error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.error is not None or self.complete()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class Loopback:
    num_roots: int
    bucket_bytes: int
    damage: Callable[[int, int, Tensor], None] = lambda root, index, bucket: None
    """Called with every bucket that arrives."""
    is_grouped = False
    _sent: dict[int, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    _num_received: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def round(self, bucket_of_root: dict[int, Tensor]) -> dict[int, Work]:
        """The sender's end: all that it sends stays as it is until it has arrived."""
        for root, bucket in bucket_of_root.items():
            self._sent[root].append(bucket)
        return {root: Work(lambda bucket=bucket, root=root: all(bucket is not b for b in self._sent[root])) for root, bucket in bucket_of_root.items()}

    def receiver(self) -> Any:
        return _Receiving(self)


@dataclass
class _Receiving:
    net: Loopback
    is_grouped = False

    @property
    def bucket_bytes(self) -> int:
        return self.net.bucket_bytes

    def round(self, bucket_of_root: dict[int, Tensor]) -> dict[int, Work]:
        return {root: Work(self._arrival(root, into)) for root, into in bucket_of_root.items()}

    def _arrival(self, root: int, into: Tensor) -> Callable[[], bool]:
        done = False

        def complete() -> bool:
            nonlocal done
            if not done and self.net._sent[root]:
                into.copy_(self.net._sent[root].popleft())
                self.net.damage(root, self.net._num_received[root], into)
                self.net._num_received[root] += 1
                done = True
            return done

        return complete


class Fabric:
    """Launches of all ranks, matched one by one."""

    def __init__(self, num_ranks: int) -> None:
        self.launched: list[list[list[tuple[int, Tensor]]]] = [[] for _ in range(num_ranks)]
        self.num_done = 0

    def match(self) -> None:
        while all(len(launches) > self.num_done for launches in self.launched):
            groups = [launches[self.num_done] for launches in self.launched]
            described = [[(root, tensor.numel()) for root, tensor in group] for group in groups]
            assert all(d == described[0] for d in described), f"launch {self.num_done} differs between ranks, NCCL would hang: {described}"
            for k, (root, _) in enumerate(groups[0]):
                for group in groups:
                    group[k][1].copy_(groups[root][k][1])
            self.num_done += 1


@dataclass
class FakeNccl:
    """Stands for `torch.distributed.ProcessGroupNCCL` of one rank."""

    fabric: Fabric
    rank: int
    _group: list[tuple[int, Tensor]] | None = None

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._group is None
        self._group = []

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        assert self._group is not None, "a broadcast outside of a grouped launch"
        (tensor,) = tensors
        self._group.append((options.rootRank, tensor))

    def _end_coalescing(self, device: torch.device) -> Work:
        assert self._group is not None
        launches = self.fabric.launched[self.rank]
        launches.append(self._group)
        self._group, index = None, len(launches) - 1

        def complete() -> bool:
            self.fabric.match()
            return self.fabric.num_done > index

        return Work(complete)


@dataclass(frozen=True)
class FakeConnection:
    """What `Network` asks of `groups.Connection`, on a machine with a GPU."""

    fabric: Fabric
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))  # its kind decides for grouped launches; nothing is put there

    def spanning_group(self, name: str, members: list[int], world_rank: int) -> FakeNccl:
        return FakeNccl(self.fabric, members.index(world_rank))
