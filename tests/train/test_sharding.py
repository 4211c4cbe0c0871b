"""Memory options change no result: activation checkpointing, CPU offload, freeing of gathered layers and replicas, on 1, 2 and 4 ranks (Gloo) against one plain rank."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc import config
from areal_hpc.models import hf
from areal_hpc.models.decoder import Packed
from areal_hpc.recipes import laptop
from areal_hpc.train import checkpoint
from areal_hpc.train.sharding import ShardedDecoder
from areal_hpc.transport.weights import shard_rows

from .cases import TINY, tiny_trainer
from .sharding_worker import OPTIONS, REPLICATED, VARIANTS, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single rank needs no process group
TESTS = Path(__file__).parents[1]
RANKS = (1, 2, 4)
COMPARED = ("loss", "entropy", "grad_norm", "ratio_mean", "clipped_share", "kl_behav")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What every rank of each rank count computed, and what one rank without any option did."""
    folder = tmp_path_factory.mktemp("sharding")
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    subprocess.run([sys.executable, "-m", "train.sharding_worker", str(folder), *map(str, RANKS)], cwd=TESTS, env=environment, check=True, timeout=180)
    ranks = {n: [torch.load(folder / str(n) / f"rank{rank}.pt", weights_only=False) for rank in range(n)] for n in RANKS}
    return {"folder": folder, "ranks": ranks, "reference": trained(None, 1, 0)[1]}


@pytest.mark.parametrize(("num_ranks", "variant"), [(n, variant) for n in RANKS for variant in (*VARIANTS, *(REPLICATED if n > 1 else ()))])
def test_options_do_not_change_the_result(found: dict, num_ranks: int, variant: str) -> None:
    ranks, reference = [rank[variant] for rank in found["ranks"][num_ranks]], found["reference"]
    for rank in ranks:
        for ours, theirs in zip(rank["stats"], reference["stats"], strict=True):
            assert ours.train_tokens == theirs.train_tokens
            for name in COMPARED:
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5, abs=1e-6), name
        for name, expected in reference["full"].items():
            np.testing.assert_allclose(rank["full"][name], expected, atol=1e-5, err_msg=name)
    for name, whole in ranks[0]["full"].items():  # every row is pushed by one rank
        parts = [next(shard for shard in rank["shards"] if shard[0] == name) for rank in ranks]
        assert all(tuple(part[1]) == tuple(whole.shape) for part in parts)
        covered = np.zeros(len(whole), int)
        for _, _, start, rows in parts:
            covered[start : start + len(rows)] += 1
            assert torch.equal(rows, whole[start : start + len(rows)])
        assert (covered == 1).all(), name


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_rank_reads_its_own_rows_only(found: dict, num_ranks: int) -> None:
    ranks = [rank["loaded"] for rank in found["ranks"][num_ranks]]
    expected = dict(hf.build_random(TINY, seed=5).named_parameters())
    for name, tensor in expected.items():
        assert torch.equal(ranks[0]["full"][name], tensor)
        rows = [rank["rows_read"].get(name, 0) for rank in ranks]
        assert rows == [len(chunk) for chunk in tensor.chunk(num_ranks)] + [0] * (num_ranks - len(tensor.chunk(num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checkpoint_of_replicas_off_the_gpu_continues_on_one_rank(found: dict, num_ranks: int) -> None:
    trainer = tiny_trainer(**OPTIONS)
    checkpoint.load_checkpoint(found["folder"] / str(num_ranks) / "step", trainer)
    for name, tensor in trainer.full_state():
        assert torch.equal(tensor, found["ranks"][num_ranks][0]["replicas-all"]["full"][name])


def test_one_unwrapped_rank_checkpoints_activations_to_the_bit(found: dict) -> None:
    recomputed = trained(None, 1, 0, activation_checkpointing="layer")[1]
    for name, expected in found["reference"]["full"].items():
        assert torch.equal(recomputed["full"][name], expected)


def test_checkpointing_keeps_less_of_each_layer() -> None:
    batch = Packed.build([np.arange(100) % TINY.vocab_size], [1])
    kept = {}
    for mode in ("none", "layer"):
        model = ShardedDecoder(TINY, device=torch.device("cpu"), mesh=None, options=config.Train(activation_checkpointing=mode))
        model.load(hf.build_random(TINY, seed=5).named_parameters())
        saved: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.setdefault(tensor.data_ptr(), tensor.numel()) and tensor, lambda tensor: tensor
        ):
            model.decoder(batch, temperature=1.0)
        kept[mode] = sum(saved.values())
    assert kept["layer"] < kept["none"] / 2


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4))
def test_pushed_rows_tile_every_shard(num_rows: int, num_shards: int, num_replicas: int) -> None:
    owned = np.zeros(num_rows, int)
    chunks = torch.arange(num_rows).chunk(num_shards) if num_rows else ()
    for rank in range(num_shards * num_replicas):
        start, count = shard_rows(num_rows, num_shards * num_replicas, rank, num_replicas)
        owned[start : start + count] += 1
        shard = rank % num_shards
        mine = chunks[shard].tolist() if shard < len(chunks) else []
        assert set(range(start, start + count)) <= set(mine)
    assert (owned == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train": {"replicas": 3}, "topology": {"num_ranks": 8, "generation_fraction": 0.5}},
            "train.replicas=3 does not divide the 4 training ranks; use 2 or 4",
        ),
        ({"train": {"cpu_offload": True}, "device": "cpu"}, "train.cpu_offload keeps weights off the GPU, but device=cpu"),
        ({"train": {"attention": "varlen"}}, "train.attention=varlen needs a GPU and --model.dtype bfloat16, not device=auto and float32"),
    ],
)
def test_impossible_options_are_refused_before_the_run(options: dict, message: str) -> None:
    changed = {"train": config.Train(**options["train"]), "topology": config.Topology(**options.get("topology", {})), "device": options.get("device", "auto")}
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        config.check(dataclasses.replace(laptop(), **changed))


def test_replicas_must_divide_the_ranks() -> None:
    with pytest.raises(config.ConfigError, match=r"train\.replicas=2 does not divide the 1 training ranks"):
        tiny_trainer(replicas=2)
