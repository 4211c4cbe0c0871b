"""One rank of the weight-push tests: `mpiexec -n N python push_worker.py MODE FRACTION OUT`.

Every training rank makes the same seeded model for a version, keeps torch's dim-0 chunk of each tensor (with foreign strides), and publishes. Every generation rank
compares the bits in its engine with its own copy of that model. Modes: ok (all ways and types, one after the other); damaged (a bucket is damaged on the way, once);
broken (and once more, when it is sent again); stall (one generation rank never receives); kill (one is killed with its receives posted).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_hpc import groups, topology
from areal_hpc.config import Config, Topology, Train, Transport
from areal_hpc.guard import AbortGuard
from areal_hpc.models.decoder import Decoder, DecoderConfig
from areal_hpc.observe.timeline import Phases
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.sinks import EmbeddedSink, layout_of, open_receiver
from areal_hpc.train.publish import Publisher
from areal_hpc.transport.manifest import Manifest
from areal_hpc.transport.messages import Mailbox, Tag
from areal_hpc.transport.paths import open_paths
from areal_hpc.transport.weights import NetworkReceiver, Sender

VERSIONS = 5
CONFIG = DecoderConfig(  # 5 rows of some tensors on 3 roots: uneven shards and, with 4 roots, an empty one
    model_type="qwen2", vocab_size=37, hidden_size=20, intermediate_size=13, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, head_dim=4
)
TIED = replace(CONFIG, tie_word_embeddings=True)


def half_of_them(name: str) -> torch.dtype:
    return torch.float32 if "norm" in name else torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """A way to push, and what is pushed."""

    transport: Transport
    dtype_of: Callable[[str], torch.dtype] = lambda name: torch.float32
    """Wire type of each tensor."""
    engine_dtype: torch.dtype = torch.float32
    config: DecoderConfig = CONFIG


SMALL = Transport(bucket_bytes=1000, push_path="network", staging="on")  # many buckets
VARIANTS = {
    "all roots, staged": Variant(SMALL),
    "all roots, in place, types mixed": Variant(replace(SMALL, staging="off"), half_of_them),
    "one root, bfloat16, tied": Variant(replace(SMALL, push="single-root"), lambda name: torch.bfloat16, torch.bfloat16, TIED),
    "all roots, shared memory": Variant(Transport()),
    "one root, shared memory, types mixed, tied": Variant(Transport(push="single-root"), half_of_them, torch.float32, TIED),
    "all roots, shared memory, bfloat16": Variant(Transport(), lambda name: torch.bfloat16, torch.bfloat16),
}


def model(config: DecoderConfig, version: int) -> dict[str, torch.Tensor]:
    """All weights of a version, the same on every rank."""
    generator = torch.Generator().manual_seed(version)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def main(mode: str, fraction: float, out: Path) -> None:
    with AbortGuard(out) as guard:
        size = guard.comm.size
        world = topology.join(Config(topology=Topology(num_ranks=size, generation_fraction=fraction), train=Train(batch_size=64)))
        guard.name = world.name()
        connection = groups.connect(world, "cpu", 60)
        for name, variant in VARIANTS.items() if mode == "ok" else [("all roots, staged", VARIANTS["all roots, staged"])]:
            push(mode, name, variant, world, replace(connection, store=dist.PrefixStore(name, connection.store)))
        (out / f"ok-{world.world_rank}").touch()
        world.comm.Barrier()


def push(mode: str, name: str, variant: Variant, world: topology.World, connection: groups.Connection) -> None:
    config = Config(topology=Topology(num_ranks=world.size), train=Train(batch_size=64), transport=variant.transport)
    num_roots = world.num_training if variant.transport.push == "all-roots" else 1
    weights = model(variant.config, 0)
    manifest = Manifest.of(((n, t.shape) for n, t in weights.items()), {n: variant.dtype_of(n) for n in weights}, num_roots)
    manifest.agree(world.comm)
    mailbox = Mailbox(world.control)
    if world.role == "training":
        paths = open_paths(config, world, connection, None)
        kinds = {"damaged": DamagingSender, "broken": BreakingSender}
        root = world.role_rank if world.world_rank in paths.senders else None
        sender = kinds.get(mode, Sender)(manifest, root, connection.device, network=paths.network, images=paths.images, layout=paths.layout)
        send(mode, variant, world, sender, mailbox, paths.shared)
    else:
        engine = EmbeddedEngine(variant.config, max_num_running=2, max_context_tokens=16, stop_tokens=[0], dtype=variant.engine_dtype)
        paths = open_paths(config, world, connection, layout_of(engine))
        assert bool(paths.shared) == (variant.transport.push_path == "auto")
        receive(mode, variant, world, open_receiver(config, world, engine, manifest, paths, connection.device), engine, mailbox)
    world.comm.Barrier()


class DamagingSender(Sender):
    """The third version's first bucket is damaged on its way."""

    def send(self, version: int) -> None:
        if version != 2:
            return super().send(version)
        bucket = self._buffers[version % 2][0]
        original = bucket.clone()
        bucket[7] ^= 1
        super().send(version)
        self.wait_sent(version, 60)
        bucket.copy_(original)
        return None


class BreakingSender(DamagingSender):
    """And again when it is sent once more."""

    def payload(self, version: int, bucket: int) -> bytes:
        data = super().payload(version, bucket)
        return data[:-1] + bytes([data[-1] ^ 1])


def send(mode: str, variant: Variant, world: topology.World, sender: Sender, mailbox: Mailbox, shared: tuple[int, ...]) -> None:
    publisher = Publisher(world, mailbox, sender, Phases(world.world_rank, "training"), 3 if mode == "stall" else 60, shared)

    def pump() -> None:
        if world.is_first_trainer:
            for message in mailbox.poll():
                assert publisher.receive(message)

    for version in range(VERSIONS):
        weights = model(variant.config, version)
        shards = {}
        for entry in sender.manifest.entries:  # rows as slices of a transposed copy: neither contiguous nor at the start of their memory
            start, count = sender.manifest.rows(entry, sender.root) if sender.root is not None else (0, entry.num_rows)
            shards[entry.name] = weights[entry.name].t().contiguous().t()[start : start + count]
        publisher.publish(shards.items(), version, 0, evaluate=False, final=False, pump=pump)
        for shard in shards.values():
            shard.fill_(float("nan"))  # the optimiser may do this the moment publish() has returned
    if world.is_first_trainer:
        publisher.wait_settled(pump)
        while publisher.oldest_active_version < VERSIONS - 1:
            pump()
        pushes = publisher.take_finished(final=True)
        assert [p.version for p in pushes] == list(range(VERSIONS))
        assert sum(p.num_resent for p in pushes) == (world.num_generation * world.num_training if mode == "damaged" else 0)
        for rank in (r for r in range(world.size) if r != world.world_rank):
            mailbox.post(rank, Tag.STOP)
    else:
        while not any(message.tag == Tag.STOP for message in mailbox.poll() if not publisher.receive(message)):
            time.sleep(0.0005)
    for version in (VERSIONS - 2, VERSIONS - 1):
        sender.wait_sent(version, 60)
    mailbox.drain(60)


def poison(receiver: Any) -> None:
    """NaN wherever the coming version should arrive; an image in shared memory is overwritten whole by the training ranks, whose memory starts as zeros."""
    if isinstance(receiver, NetworkReceiver):
        assert isinstance(receiver.sink, EmbeddedSink)
        if not receiver.is_staged:
            receiver.sink.engine.interrupt()
        receiver.sink._target.image.fill_(0xFF)
        for slot in receiver._memory:
            for data in slot.values():
                data.fill_(0xFF)


def receive(mode: str, variant: Variant, world: topology.World, receiver: Any, engine: EmbeddedEngine, mailbox: Mailbox) -> None:
    last = world.role_rank == world.num_generation - 1
    stopped, expected_version = False, 0
    while not stopped:
        for message in mailbox.poll():
            if message.tag == Tag.STOP:
                stopped = True
            elif message.tag == Tag.BUCKET:
                receiver.accept(*message.body)
            elif not (mode == "stall" and last):
                if receiver._incoming is None and not receiver._queue:
                    poison(receiver)
                receiver.begin(message.body)
                if mode == "kill" and last and message.body.version == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        if receiver.poll(busy=False):
            assert receiver.staged is not None
            version = receiver.staged.version
            mailbox.post(world.training_ranks[0], Tag.CONFIRM, (version, receiver.receive_s, receiver.stage_s, receiver.is_staged))
            receiver.swap()
            assert engine.policy_version == version == expected_version
            expected_version += 1
            found = dict(engine.named_weights())
            expected = {n: t.to(variant.dtype_of(n)).to(variant.engine_dtype) for n, t in model(variant.config, version).items()}
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), f"version {version}: {name} differs"
            mailbox.post(world.training_ranks[0], Tag.SWAPPED, (version, 0.0))
        while receiver.damaged:
            mailbox.post(world.training_ranks[0], Tag.DAMAGED, receiver.damaged.pop())
        time.sleep(0.0005)
    mailbox.drain(60)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
