"""Roles on nodes: how many, where, and what is impossible."""

from __future__ import annotations

import pytest

from areal_hpc.config import Config, ConfigError, Topology, Train, check_layout, num_training_ranks
from areal_hpc.topology import assign_roles, lane_owner
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
