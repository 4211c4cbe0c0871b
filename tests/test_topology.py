"""Roles on nodes: how many, where, and what is impossible."""

from __future__ import annotations

import pytest

from areal_hpc.config import Config, ConfigError, Topology, Train, Transport, check, check_layout, num_training_ranks
from areal_hpc.topology import assign_roles, lane_owner, number_nodes
from areal_hpc.transport.weights import Manifest, shard_rows


@pytest.mark.parametrize(("ranks", "training"), [(2, 1), (3, 1), (4, 1), (6, 2), (8, 2), (16, 4), (64, 16), (512, 128)])
def test_a_quarter_trains_by_default(ranks: int, training: int) -> None:
    assert num_training_ranks(ranks, 0.75) == training


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.75, 0.99])
def test_both_roles_always_exist(fraction: float) -> None:
    for ranks in range(2, 130):
        roles = assign_roles([0] * ranks, fraction)
        assert set(roles) == {"generation", "training"}
        assert roles.count("training") == num_training_ranks(ranks, fraction)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_training_ranks_share_as_few_nodes_as_possible(ranks_per_node: int) -> None:
    for nodes in range(1, 9):
        if nodes * ranks_per_node < 2:
            continue
        node_of_rank = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
        roles = assign_roles(node_of_rank, 0.75)
        used = {node for node, role in zip(node_of_rank, roles, strict=True) if role == "training"}
        assert len(used) == -(-roles.count("training") // ranks_per_node)


def test_uneven_nodes() -> None:
    """Two training ranks of eight: the node of two takes them, rather than the middle of a larger one."""
    roles = assign_roles([0, 0, 0, 0, 0, 0, 1, 1], 0.75)
    assert roles == ["generation"] * 6 + ["training"] * 2


@pytest.mark.parametrize(("ranks", "fraction"), [(1, 0.75), (0, 0.75), (4, 0.0), (4, 1.0), (4, -1.0)])
def test_impossible_layouts(ranks: int, fraction: float) -> None:
    with pytest.raises(ConfigError):
        num_training_ranks(ranks, fraction)


def test_batch_smaller_than_training_ranks_names_a_way_out() -> None:
    config = Config(topology=Topology(num_ranks=64, generation_fraction=0.5), train=Train(batch_size=16, group_size=4))
    with pytest.raises(ConfigError, match=r"--train.batch-size 32 or more"):
        check_layout(config, 64)


def test_lanes_are_spread_over_training_ranks() -> None:
    assert [lane_owner(g, 3) for g in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    """Ranks dealt out in turn over two nodes, a third node at the end."""
    places = [(0, "b"), (1, "a"), (0, "b"), (1, "a"), (4, "c")]
    assert number_nodes(places) == ((0, 1, 0, 1, 2), ("b", "a", "c"))


def test_address_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that is named, else the host name's unless that is loopback; a wrong name is a mistake that lists the right ones."""
    from areal_hpc import groups

    for variable in ("AREAL_HPC_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "192.0.2.77")
    assert groups.own_address(1) == "127.0.0.1"
    assert groups.own_address(2) == "192.0.2.77"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo,other")
    assert groups.own_address(2) == "127.0.0.1"
    monkeypatch.setenv("AREAL_HPC_IFACE", "nowhere0")
    with pytest.raises(ConfigError, match=r"'nowhere0'.* there are: .*lo"):
        groups.own_address(2)
    monkeypatch.delenv("AREAL_HPC_IFACE")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")  # Debian's /etc/hosts
    there_are = {"lo": "127.0.0.1", "ib0": "192.0.2.5"}
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(there_are, 1)))
    monkeypatch.setattr(groups, "address_of", there_are.__getitem__)
    assert groups.own_address(2) == "192.0.2.5" and groups.interface_of("192.0.2.5") == "ib0" and groups.interface_of("192.0.2.6") is None
    del there_are["ib0"]
    with pytest.raises(ConfigError, match="AREAL_HPC_IFACE"):
        groups.own_address(2)


def test_silence_deadline_leaves_room_for_signs_of_life() -> None:
    with pytest.raises(ConfigError, match=r"transport.silence_deadline_s=2: .* use 3 or more"):
        check(Config(transport=Transport(silence_deadline_s=2.0)))


def test_shards_are_torch_chunks() -> None:
    """Rows of each root, uneven and empty ones included, against `Tensor.chunk`, which FSDP2 uses."""
    import torch

    for rows in range(1, 20):
        for roots in range(1, 8):
            chunks = list(torch.arange(rows).chunk(roots))
            chunks += [torch.arange(0)] * (roots - len(chunks))
            for root, chunk in enumerate(chunks):
                start, count = shard_rows(rows, roots, root)
                assert torch.arange(rows)[start : start + count].tolist() == chunk.tolist()


def test_manifest_order_depends_on_names_only() -> None:
    import torch

    shapes = {"model.layers.10.w": (3, 2), "model.layers.9.w": (3, 2), "model.embed.w": (5, 2), "lm_head.w": (5, 2)}
    first = Manifest.of(shapes.items(), torch.float32, 2)
    second = Manifest.of(reversed(shapes.items()), torch.float32, 2)
    assert first == second and first.digest() == second.digest()
    assert [entry.name for entry in first.entries] == ["lm_head.w", "model.embed.w", "model.layers.9.w", "model.layers.10.w"]
    assert first.num_bytes == 4 * (3 * 2 * 2 + 5 * 2 * 2)
    assert Manifest.of(shapes.items(), torch.float32, 3).digest() != first.digest()
