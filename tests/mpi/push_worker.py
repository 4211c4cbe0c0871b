"""One rank of the weight-push tests: `mpiexec -n N python push_worker.py MODE FRACTION OUT`.

Every training rank makes the same seeded model for a version, keeps torch's dim-0 chunk of each tensor, and publishes. Every generation rank compares the
bytes in its engine with its own copy of that model. Modes: ok; damaged (an announced checksum is wrong); stall (one generation rank never receives).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from areal_hpc import groups, topology
from areal_hpc.config import Config, Topology, Train
from areal_hpc.guard import AbortGuard
from areal_hpc.models.decoder import Decoder, DecoderConfig
from areal_hpc.observe.timeline import Phases
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.train.publish import Publisher
from areal_hpc.transport.messages import Mailbox, Tag
from areal_hpc.transport.weights import Manifest, Network, Receiver, Sender, shard_rows

VERSIONS = 4
CONFIG = DecoderConfig(  # 5 rows of some tensors on 3 roots: uneven shards and, with 4 roots, an empty one
    model_type="qwen2", vocab_size=37, hidden_size=20, intermediate_size=13, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, head_dim=4
)


def model(version: int) -> dict[str, torch.Tensor]:
    """All weights of a version, the same on every rank."""
    generator = torch.Generator().manual_seed(version)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(CONFIG).named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def main(mode: str, fraction: float, out: Path) -> None:
    with AbortGuard(out) as guard:
        size = guard.comm.size
        world = topology.join(Config(topology=Topology(num_ranks=size, generation_fraction=fraction), train=Train(batch_size=64)))
        guard.name = world.name()
        connection = groups.connect(world, "cpu", 60)
        manifest = Manifest.of(((name, t.shape) for name, t in model(0).items()), torch.float32, world.num_training)
        manifest.agree(world.comm)
        network = Network(world, connection, bucket_bytes=1000)  # many buckets
        mailbox = Mailbox(world.control)
        if world.role == "training":
            send(mode, world, manifest, network, mailbox, connection.device)
        else:
            receive(mode, world, Receiver(manifest, network, connection.device), mailbox)
        world.comm.Barrier()
        (out / f"ok-{world.world_rank}").touch()


class DamagingSender(Sender):
    """Announces a wrong checksum for the third version."""

    num_packed = 0

    def pack(self, shards: Iterable[tuple[str, torch.Tensor]]) -> int:
        self.num_packed += 1
        return super().pack(shards) ^ (self.num_packed == 3)


def send(mode: str, world: topology.World, manifest: Manifest, network: Network, mailbox: Mailbox, device: torch.device) -> None:
    sender = (DamagingSender if mode == "damaged" else Sender)(manifest, world.role_rank, network, device)
    publisher = Publisher(world, mailbox, sender, Phases(world.world_rank, "training"), deadline_s=3 if mode == "stall" else 60)

    def pump() -> None:
        for message in mailbox.poll():
            assert publisher.receive(message)

    for version in range(VERSIONS):
        shards = {}
        for name, tensor in model(version).items():
            start, count = shard_rows(tensor.shape[0], world.num_training, world.role_rank)
            shards[name] = tensor[start : start + count].clone()
        if world.is_first_trainer:
            publisher.wait_settled(pump)
        publisher.publish(shards.items(), version, 0, evaluate=False, final=False)
        for shard in shards.values():
            shard.fill_(float("nan"))  # the optimiser may do this the moment publish() has returned
    if world.is_first_trainer:
        publisher.wait_settled(pump)
        while publisher.oldest_active_version < VERSIONS - 1:
            pump()
        for rank in world.generation_ranks:
            mailbox.post(rank, Tag.STOP)
    publisher.sender.wait_sent(60)
    mailbox.drain(60)


def receive(mode: str, world: topology.World, receiver: Receiver, mailbox: Mailbox) -> None:
    engine = EmbeddedEngine(CONFIG, max_num_running=2, max_context_tokens=16, stop_tokens=[0])
    stalled = mode == "stall" and world.role_rank == world.num_generation - 1
    stopped = False
    while not stopped:
        for message in mailbox.poll():
            if message.tag == Tag.STOP:
                stopped = True
            elif not stalled:
                for flat in receiver._flats.values():
                    flat.fill_(float("nan"))  # poison: whatever is not received would show
                receiver.begin(message.body)
        if receiver.poll():
            assert receiver.staged is not None
            version = receiver.staged.version
            mailbox.post(world.training_ranks[0], Tag.CONFIRM, (version, receiver.receive_s))
            engine.update_weights(receiver.named_tensors(), version)
            found = dict(engine.named_weights())
            for name, expected in model(version).items():
                assert torch.equal(found[name].contiguous().view(torch.int32), expected.view(torch.int32)), f"version {version}: {name} differs"
            mailbox.post(world.training_ranks[0], Tag.SWAPPED, (version, 0.0))
        time.sleep(0.0005)
    mailbox.drain(60)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
