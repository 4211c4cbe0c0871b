"""torch.distributed from MPI: one store on a free port, a default world of the training ranks, and spanning groups built directly on the store.

Rank 0 opens a TCPStore on port 0 and broadcasts (host, port), so there is no MASTER_PORT to collide. Training ranks get a default world of their own, for FSDP
and DCP; generation ranks get none, since vLLM makes one in its process (and enters `new_group` over the whole of one that it finds). The weight push needs groups
that span both: process-group objects on a prefix of the store, without a default world around them. Each group has one issuing thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_hpc.config import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from areal_hpc.topology import World

NEVER = timedelta(days=30)
"""Receives are posted long before their data exists; the deadlines are ours (see weights.py)."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where this rank computes and how it reaches the others."""

    device: torch.device
    store: dist.Store
    address: str
    gloo_device: Any
    """One for all groups: each device has a thread that wakes up a hundred times a second, and a generation rank is in as many groups as there are training ranks."""

    def spanning_group(self, name: str, members: list[int], world_rank: int) -> Any:  # torch types its process groups incompletely
        """A process group of `members` (world ranks, in this order) that belongs to no default world. Collective over its members."""
        store = dist.PrefixStore(name, self.store)
        rank, size = members.index(world_rank), len(members)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER
            return dist.ProcessGroupNCCL(store, rank, size, options)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = NEVER
        gloo._devices = [self.gloo_device]
        gloo._threads = 1
        return dist.ProcessGroupGloo(store, rank, size, gloo)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU. With one visible GPU per task its index is 0; with all visible it is the local rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("device=cuda but this rank sees no GPU; check CUDA_VISIBLE_DEVICES and the GPU binding of the job")
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} visible; start as many ranks per node as it has GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def connect(world: World, device: str, timeout_s: float) -> Connection:
    """Store, default world of this rank's role, device. Collective over the world."""
    address = own_address(world.num_nodes)
    timeout = timedelta(seconds=timeout_s)
    store: dist.TCPStore | None = None
    if world.world_rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    host, port = world.control.bcast((address, store.port) if store else None, root=0)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    chosen = pick_device(device, world.local_rank)
    if chosen.type == "cuda":  # FSDP's communicators and the push's share the GPU: kernels start in the order in which the host issued them
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    # gloo binds to the same interface rather than to whatever the host name resolves to: often nothing on compute nodes, or loopback, in silence
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if world.role == "training":  # a generation rank has none: vLLM makes one of its own in this process
        dist.init_process_group(backend, store=dist.PrefixStore(world.role, store), rank=world.role_rank, world_size=world.role_comm.size, timeout=NEVER)
    return Connection(chosen, store, address, dist.ProcessGroupGloo.create_device(hostname=address))


def training_mesh(world: World, device: torch.device) -> DeviceMesh:
    """One-dimensional mesh of the training ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (world.num_training,), mesh_dim_names=("shard",))


def own_address(num_nodes: int) -> str:
    """Address that the other ranks reach this one at: loopback on one node, else of the interface AREAL_HPC_IFACE names (or GLOO_SOCKET_IFNAME, or
    NCCL_SOCKET_IFNAME), else of the host name, else, where that says loopback or nothing, of the first interface of the network.

    Raises ConfigError when the named interface has no address, or when there is none at all.
    """
    if num_nodes == 1:
        return "127.0.0.1"
    if named := os.environ.get("AREAL_HPC_IFACE"):
        return address_of(named)
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        first = os.environ.get(variable, "").split(",")[0].removeprefix("=")  # NCCL also takes prefixes and exclusions: those are left to it
        if first in interfaces:
            return address_of(first)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:  # no name service on compute nodes
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    for interface in interfaces:
        with contextlib.suppress(ConfigError):
            address = address_of(interface)
            if not address.startswith("127."):
                return address
    raise ConfigError(f"host {socket.gethostname()} has no IPv4 address that other nodes could reach; name its network interface with AREAL_HPC_IFACE")


def interface_of(address: str) -> str | None:
    """Network interface that has this IPv4 address; None if none has (the host name may resolve to an address behind a translation)."""
    for _, interface in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            if address_of(interface) == address:
                return interface
    return None


def address_of(interface: str) -> str:
    """IPv4 address of a network interface (SIOCGIFADDR). Raises ConfigError naming it when it has none."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            there_are = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"network interface '{interface}': there is none of that name with an IPv4 address; there are: {there_are}") from error
    return socket.inet_ntoa(reply[20:24])
