"""The weight push on this machine, beside what it is measured against, all rivals in turn in one job.

    python benchmarks/weights.py [--mib 4 64] [--ranks 2 3 4] [--turns 5] [--no-pin]

For each number of ranks (1 + 1, 1 + 2, 2 + 2, 2 + 6) and model size, seconds from the beginning of the packing until training rank 0 has every confirmation, checksums
compared, swapped in at the embedded engine's memory:

    ours            all roots, Gloo, staged          ours, one root     gathered to training rank 0 first     ours, shared    images mapped
    flat Gloo       one broadcast of the bytes       MPI_Bcast          the same with MPI
    gather + bcast  gathered whole tensors (`dist.all_gather` of equal shards), then one broadcast of each bucket, unpacked
    by tensor       one Gloo broadcast a tensor from one root, waited for one by one, as several trainers do

and the parts, each alone: pack, unpack, checksums. Then the embedded engine decodes on one core while versions of --decode-mib arrive: tokens/s against undisturbed,
and pauses in decode steps (median and p99), with the KV
cache kept, so that a pause is the swap alone, and recomputed, which takes its time by itself.
Ranks are pinned to cores in turn. Median over --turns; ratios are of medians. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_hpc import groups, topology
from areal_hpc.config import Config, Topology, Train, Transport
from areal_hpc.guard import AbortGuard
from areal_hpc.launch.local import find_launcher
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.observe.timeline import Phases
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.sinks import layout_of, open_receiver
from areal_hpc.train.publish import Publisher
from areal_hpc.transport.manifest import Manifest
from areal_hpc.transport.messages import Mailbox, Tag
from areal_hpc.transport.paths import open_paths
from areal_hpc.transport.weights import Sender, checksum

FRACTION = {2: 0.5, 3: 0.67, 4: 0.5, 8: 0.75}
GOALS = {
    "ours / parts": 1.15,
    "gather + bcast / ours": 2.5,
    "by tensor / ours (4 MiB)": 3.0,
    "pause p99, decode steps": 2.0,
    "share of tokens/s, network": 0.6,
    "share of tokens/s, shared": 0.85,
}
WAYS = {
    "ours": Transport(push_path="network", staging="on", bucket_bytes=4 << 20),
    "ours, one root": Transport(push_path="network", staging="on", push="single-root", bucket_bytes=4 << 20),
    "ours, shared": Transport(),
}


def model_of(mib: int) -> DecoderConfig:
    """About `mib` MiB of float32 in 218 tensors (24 layers) at 4 MiB, in fewer and wider ones above."""
    layers, width = {4: (24, 64), 64: (12, 384), 512: (16, 896)}[mib]
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=512,
        hidden_size=width,
        intermediate_size=int(2.5 * width),
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        tie_word_embeddings=True,
    )


NAMES = itertools.count()
"""Of sets of process groups."""


class Bench:
    """One rank: what all rivals share."""

    def __init__(self, world: topology.World, connection: groups.Connection, config: DecoderConfig, kv: str = "keep") -> None:
        self.world, self.connection, self.config, self.kv = world, connection, config, kv
        self.engine = self.new_engine()
        self.rival = EmbeddedEngine(config, max_num_running=1, max_context_tokens=16, stop_tokens=())
        self.manifest = self.manifest_for(world.num_training)
        self.generator = world.role == "generation"
        generator = torch.Generator().manual_seed(1)
        rows = {e.name: self.manifest.rows(e, world.role_rank) for e in self.manifest.entries} if not self.generator else {}
        self.shards = {e.name: torch.randn(rows[e.name][1], e.row_elements, generator=generator) for e in self.manifest.entries} if rows else {}
        self.flat = torch.zeros(self.manifest.num_bytes, dtype=torch.uint8)

    def new_engine(self) -> EmbeddedEngine:
        return EmbeddedEngine(self.config, max_num_running=16, max_context_tokens=192, stop_tokens=(), kv_on_update=self.kv)  # type: ignore[arg-type]

    def manifest_for(self, num_roots: int) -> Manifest:
        return Manifest.of(((n, t.shape) for n, t in self.engine.named_weights()), torch.float32, num_roots)

    def fresh(self) -> groups.Connection:
        """Process groups need names of their own."""
        return replace(self.connection, store=dist.PrefixStore(f"bench{next(NAMES)}", self.connection.store))

    def full_state(self) -> list[tuple[str, torch.Tensor]]:
        """Whole tensors at every training rank, one all-gather a tensor (as FSDP's `full_tensor`)."""
        found = []
        for entry in self.manifest.entries:
            size = -(-entry.num_rows // self.world.num_training)
            padded = torch.zeros(size, entry.row_elements)
            padded[: len(self.shards[entry.name])] = self.shards[entry.name]
            parts = [torch.empty_like(padded) for _ in range(self.world.num_training)]
            dist.all_gather(parts, padded)
            found.append((entry.name, torch.cat(parts)[: entry.num_rows]))
        return found

    def timed(self, action: Callable[[], None]) -> float:
        """Seconds from a common start until all ranks are done."""
        self.world.comm.Barrier()
        start = time.perf_counter()
        action()
        self.world.comm.Barrier()
        return time.perf_counter() - start


def our_push(bench: Bench, transport: Transport) -> tuple[Callable[[], None], Any]:
    """One version a call; and the sender, on training ranks."""
    world, engine = bench.world, bench.new_engine()
    config = Config(topology=Topology(num_ranks=world.size), train=Train(batch_size=64), transport=transport)
    one_root = transport.push == "single-root"
    manifest = bench.manifest_for(1 if one_root else world.num_training)
    paths = open_paths(config, world, bench.fresh(), layout_of(engine) if bench.generator else None)
    mailbox = Mailbox(world.control)
    version = -1
    if bench.generator:
        with contextlib.redirect_stdout(sys.stderr):
            receiver = open_receiver(config, world, engine, manifest, paths, torch.device("cpu"))

        def receive() -> None:
            nonlocal version
            version += 1
            while engine.policy_version < version:
                turn(bench, mailbox, receiver, busy=False)
                time.sleep(0.0001)
            mailbox.drain(60)

        return receive, (mailbox, receiver, engine)
    sender = Sender(
        manifest,
        world.role_rank if world.world_rank in paths.senders else None,
        torch.device("cpu"),
        network=paths.network,
        images=paths.images,
        layout=paths.layout,
    )
    publisher = Publisher(world, mailbox, sender, Phases(world.world_rank, "training"), 120, paths.shared)

    def pump() -> None:
        for message in mailbox.poll():
            assert publisher.receive(message)

    def send() -> None:
        nonlocal version
        version += 1
        rows = bench.full_state() if one_root else list(bench.shards.items())
        publisher.publish(rows, version, 0, evaluate=False, final=False, pump=pump)
        if world.is_first_trainer:
            publisher.wait_settled(pump)
            while publisher.oldest_active_version < version:
                pump()
            publisher.take_finished(final=True)
        sender.wait_sent(version, 60)
        mailbox.drain(60)

    return send, (mailbox, sender)


def turn(bench: Bench, mailbox: Mailbox, receiver: Any, *, busy: bool) -> float | None:
    """What the worker does between two steps; the pause, if there was a swap."""
    for message in mailbox.poll():
        receiver.begin(message.body)
    if not receiver.poll(busy=busy):
        return None
    first = bench.world.training_ranks[0]
    version = receiver.staged.version
    mailbox.post(first, Tag.CONFIRM, (version, receiver.receive_s, receiver.stage_s, receiver.is_staged))
    pause_s = receiver.swap()
    mailbox.post(first, Tag.SWAPPED, (version, pause_s))
    return pause_s


def flat_gloo(bench: Bench) -> Callable[[], None]:
    world = bench.world
    members = [world.training_ranks[0], *world.generation_ranks]
    connection = bench.fresh()  # on every rank, a member or not: the names are counted
    if world.world_rank not in members:
        return lambda: None
    group = connection.spanning_group("flat", members, world.world_rank)
    return lambda: group.broadcast([bench.flat], dist.BroadcastOptions()).wait()


def mpi_bcast(bench: Bench) -> Callable[[], None]:
    world = bench.world
    members = [world.training_ranks[0], *world.generation_ranks]
    comm = world.comm.Split(int(world.world_rank in members), members.index(world.world_rank) if world.world_rank in members else 0)
    data = bench.flat.numpy()
    return lambda: comm.Bcast(data, root=0) if world.world_rank in members else None


def gather_and_broadcast(bench: Bench, *, by_tensor: bool) -> Callable[[], None]:
    """Rank 0 gathers whole tensors and broadcasts buckets of them, or each by itself; receivers load them while they stand still."""
    world = bench.world
    members = [world.training_ranks[0], *world.generation_ranks]
    connection = bench.fresh()
    group = connection.spanning_group("gathered", members, world.world_rank) if world.world_rank in members else None

    def tensors() -> list[tuple[str, torch.Tensor]]:
        return [(e.name, torch.empty(e.num_rows, e.row_elements)) for e in bench.manifest.entries]

    def broadcast(buffer: torch.Tensor) -> None:
        assert group is not None
        group.broadcast([buffer], dist.BroadcastOptions()).wait()

    def run() -> None:
        named = tensors() if bench.generator else bench.full_state()
        if group is None:
            return
        if by_tensor:
            for _, tensor in named:
                broadcast(tensor)
        else:
            flat = bench.flat.view(torch.float32)
            if not bench.generator:
                torch.cat([tensor.reshape(-1) for _, tensor in named], out=flat)
            for bucket in flat.split(1 << 20):
                broadcast(bucket)
            parts = flat.split([tensor.numel() for _, tensor in named])
            named = [(name, part.view_as(tensor)) for part, (name, tensor) in zip(parts, named, strict=True)]
        if bench.generator:
            shapes = {e.name: e.shape for e in bench.manifest.entries}
            bench.rival.update_weights(((name, tensor.view(shapes[name])) for name, tensor in named), 0)

    return run


def part_seconds(bench: Bench, parts: Any) -> dict[str, float]:
    """Pack, unpack and checksums of this rank alone; the others stand still."""
    found: dict[str, float] = {}
    if not bench.generator:
        _, sender = parts
        for k, piece_list in enumerate(b.pieces for b in sender._mine):
            for piece in piece_list:
                piece.rows(sender._buffers[0][k]).copy_(piece.rows(sender._buffers[1][k]))  # warm
        start = time.perf_counter()
        for name, pieces in sender._pieces.items():
            first, _ = bench.manifest.rows(pieces[0][1].entry, bench.world.role_rank)
            for k, piece in pieces:
                piece.rows(sender._buffers[0][k]).copy_(bench.shards[name][piece.first_row - first : piece.first_row - first + piece.num_rows])
        found["pack"] = time.perf_counter() - start
        start = time.perf_counter()
        for buffer in sender._buffers[0]:
            checksum(buffer)
        found["checksum, sender"] = time.perf_counter() - start
    else:
        weights = bench.engine.new_weights()
        weights.image.zero_()
        planned = [bucket for root in range(bench.manifest.num_roots) for bucket in bench.manifest.buckets(root, 4 << 20)]
        buckets = [(bucket, torch.zeros(bucket.num_bytes, dtype=torch.uint8)) for bucket in planned]
        start = time.perf_counter()
        for bucket, data in buckets:
            for piece in bucket.pieces:
                weights.places[piece.entry.name].put(weights.image, piece.first_row, piece.rows(data))
        found["unpack"] = time.perf_counter() - start
        start = time.perf_counter()
        for _, data in buckets:
            checksum(data)
        found["checksum, receiver"] = time.perf_counter() - start
    return found


def measure(bench: Bench, turns: int) -> dict[str, Any]:
    ours = {name: our_push(bench, transport) for name, transport in WAYS.items() if name != "ours, one root" or bench.world.num_training > 1}
    rivals: dict[str, Callable[[], None]] = {
        "flat Gloo": flat_gloo(bench),
        "MPI_Bcast": mpi_bcast(bench),
        "gather + bcast": gather_and_broadcast(bench, by_tensor=False),
        "by tensor": gather_and_broadcast(bench, by_tensor=True),
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(turns + 1):
        for name, (action, _) in ours.items():
            seconds.setdefault(name, []).append(bench.timed(action))
        for name, action in rivals.items():
            seconds.setdefault(name, []).append(bench.timed(action))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    parts: dict[str, float] = {}
    for rank in range(bench.world.size):  # one after the other
        bench.world.comm.Barrier()
        if rank == bench.world.world_rank:
            mine = [part_seconds(bench, ours["ours"][1]) for _ in range(3)]
            parts = {name: statistics.median(m[name] for m in mine) for name in mine[0]}
    largest: dict[str, float] = {}
    for found in bench.world.comm.allgather(parts):
        for name, value in found.items():
            largest[name] = max(largest.get(name, 0.0), value)
    total = medians["flat Gloo"] + sum(largest.values())
    return {
        "seconds": medians,
        "parts": largest,
        "ours / parts": medians["ours"] / total,
        "gather + bcast / ours": medians["gather + bcast"] / medians["ours"],
    } | {
        "by tensor / ours": medians["by tensor"] / medians["ours"],
        "tensors": len(bench.manifest.entries),
        "bytes": bench.manifest.num_bytes,
    }


def decode_under_push(bench: Bench, transport: Transport, num_versions: int) -> dict[str, float]:
    """The engine decodes 16 sequences; versions come one after the other. Generation rank 0's numbers."""
    world = bench.world
    action, parts = our_push(bench, transport)
    if not bench.generator:
        action()
        world.comm.Barrier()
        for _ in range(num_versions):
            action()
        world.comm.Barrier()
        return {}
    mailbox, receiver, engine = parts
    action()

    def refill() -> None:
        if engine.num_running + engine.num_waiting < 16:
            engine.add([Request(request_id=refill.next, prompt_tokens=np.arange(8, dtype=np.int32), stream=refill.next, max_new_tokens=160)])  # type: ignore[attr-defined]
            refill.next += 1  # type: ignore[attr-defined]

    refill.next = 0  # type: ignore[attr-defined]
    for _ in range(40):
        refill()
        engine.step()
    start, num_tokens, steps = time.perf_counter(), 0, []
    while time.perf_counter() < start + 2.0:
        refill()
        step_at = time.perf_counter()
        num_tokens += engine.num_running
        engine.step()
        steps.append(time.perf_counter() - step_at)
    quiet = num_tokens / (time.perf_counter() - start)
    world.comm.Barrier()
    start, num_tokens, pauses = time.perf_counter(), 0, []
    while engine.policy_version < num_versions:
        refill()
        num_tokens += engine.num_running
        engine.step()
        pause_s = turn(bench, mailbox, receiver, busy=True)
        if pause_s is not None:
            pauses.append(pause_s)
    disturbed = num_tokens / (time.perf_counter() - start)
    mailbox.drain(60)
    world.comm.Barrier()
    step_s = statistics.median(steps)
    return {
        "undisturbed tokens/s": quiet,
        "tokens/s while pushes follow each other": disturbed,
        "share": disturbed / quiet,
        "decode step, ms": 1e3 * step_s,
        "pause median, decode steps": statistics.median(pauses) / step_s,
        "pause p99, decode steps": float(np.percentile(pauses, 99)) / step_s,
        "versions": len(pauses),
    }


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with AbortGuard(Path(tempfile.gettempdir()) / f"bench-weights-{os.getppid()}") as guard:
        size = guard.comm.size
        if args.pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[guard.comm.rank % len(cores)]})
        world = topology.join(Config(topology=Topology(num_ranks=size, generation_fraction=FRACTION[size]), train=Train(batch_size=64)))
        connection = groups.connect(world, "cpu", 60)
        result: dict[str, Any] = {"generation": world.num_generation, "training": world.num_training}
        for mib in args.mib:
            result[f"{mib} MiB"] = measure(Bench(world, connection, model_of(mib)), args.turns)
        if size == 2 and args.decode_mib:
            for name, kv in [("ours", "keep"), ("ours, shared", "keep"), ("ours", "recompute")]:
                found = decode_under_push(Bench(world, connection, model_of(args.decode_mib), kv), WAYS[name], args.versions)
                result[f"decode, {name}, {kv}"] = world.comm.bcast(found, root=world.generation_ranks[0])
        if world.world_rank == 0:
            print("RESULT " + json.dumps(result), flush=True)
        world.comm.Barrier()


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64], choices=[4, 64, 512], help="MiB of float32 weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], choices=list(FRACTION), help="MPI ranks")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each rival")
    parser.add_argument("--decode-mib", type=int, default=64, help="model of the decoding test; 0: none")
    parser.add_argument("--versions", type=int, default=10, help="versions pushed while it decodes")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="leave the cores to the kernel")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return
    results = {}
    for size in args.ranks:
        launcher = find_launcher()
        command = [*launcher.command(size), sys.executable, os.path.abspath(__file__), "--rank", *sys.argv[1:]]
        environment = os.environ | launcher.environment() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True, env=environment)
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        results[f"{size} ranks"] = rounded(json.loads(line.removeprefix("RESULT ")))
        print(json.dumps(results[f"{size} ranks"], indent=1), flush=True)
    cpu = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    print(json.dumps({"benchmark": "weights", "unit": "s", "goals": GOALS, "turns": args.turns, **results, **cpu}))


if __name__ == "__main__":
    main()
