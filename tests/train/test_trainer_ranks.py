"""Sharded training on 2, 3 and 4 ranks (Gloo, separate processes) equals training on one rank, and checkpoints move between rank counts."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_hpc import checkpoints
from areal_hpc.train import checkpoint

from . import reference
from .cases import save_checkpoint, tiny_trainer
from .rank_worker import OPTIONS, batches, objective_steps, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single rank needs no process group
TESTS = Path(__file__).parents[1]
COMPARED = ("loss", "entropy", "grad_norm", "ratio_mean", "ratio_max", "clipped_share", "prox_behav_mean", "prox_behav_max", "cut_share", "kl_behav", "lr")
COMPARED += ("effective_share", "model_flops")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Results and checkpoint of a single rank; the folder also holds those of 2, 3 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    trainer = tiny_trainer(**OPTIONS)
    stats = [trainer.train_batch(batch) for batch in batches(1, 0)]
    save_checkpoint(folder / "one" / "step", trainer, {})
    full = whole(trainer)
    trainer.train_batch(next(batches(1, 0)))
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    subprocess.run([sys.executable, "-m", "train.rank_worker", str(folder), "2", "3", "4"], cwd=TESTS, env=environment, check=True, timeout=240)
    return {"folder": folder, "stats": stats, "full": full, "continued": whole(trainer), "objectives": objective_steps(None, 1, 0)}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_do_not_change_the_result(one, num_ranks):
    folder = one["folder"] / str(num_ranks)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    for rank in ranks:
        assert repr(rank["stats"]) == repr(ranks[0]["stats"])  # the same numbers on every rank (as text: nan is not equal to itself)
    for ours, theirs in zip(ranks[0]["stats"], one["stats"], strict=True):
        assert ours.train_tokens == theirs.train_tokens
        for name in COMPARED:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5, abs=1e-6), name
    assert ranks[0]["stats"][-1].num_idle > 0
    for name in ("loss", "entropy", "grad_norm"):  # computed in bfloat16 on float32 master weights
        assert getattr(ranks[0]["bfloat16"], name) == pytest.approx(getattr(one["stats"][0], name), rel=0.02), name
    for kind in ("full", "continued"):
        for name, expected in one[kind].items():
            np.testing.assert_allclose(ranks[0][kind][name], expected, atol=1e-5, err_msg=name)
    assert_shards_tile([rank["shards"] for rank in ranks], ranks[0]["full"])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_one_rank_reads_what_several_wrote(one, num_ranks):
    folder = one["folder"] / str(num_ranks)
    expected = torch.load(folder / "rank0.pt", weights_only=False)["full"]
    single = tiny_trainer(**OPTIONS)
    assert checkpoint.load_checkpoint(folder / "step", single) == {"format": checkpoints.FORMAT, "policy_version": 3}
    for loaded in (whole(single), dict(checkpoint.load_weights_from(folder / "step")), dict(checkpoint.load_weights_from(folder / "model"))):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", reference.CASES)
def test_every_objective_is_the_same_on_any_number_of_ranks(one, num_ranks, name):
    """A step on one batch, each rank count with its own micro-batches and packing order: numbers and parameters to 1e-5."""
    ranks = [load_objectives(one["folder"] / str(num_ranks) / f"rank{rank}.pt")[name] for rank in range(num_ranks)]
    expected_stats, expected = one["objectives"][name]
    assert len({repr(stats) for stats, _ in ranks}) == 1
    for parameter, tensor in expected.items():
        np.testing.assert_allclose(torch.cat([rows[parameter] for _, rows in ranks]), tensor, atol=1e-5, err_msg=parameter)
    ours = ranks[0][0]
    assert ours.train_tokens == expected_stats.train_tokens > 0
    for column in (*COMPARED, *(("kl_ref",) if "kl_coef" in reference.CASES[name] else ())):
        assert getattr(ours, column) == pytest.approx(getattr(expected_stats, column), rel=1e-5, abs=1e-5), column


@functools.cache
def load_objectives(path):
    return torch.load(path, weights_only=False)["objectives"]


def assert_shards_tile(shards_by_rank, full):
    """The ranks' rows, end to end, are the whole tensors; names, order and shapes agree; rows are torch's dim-0 chunks."""
    assert [name for name, *_ in shards_by_rank[0]] == list(full)
    for entries in zip(*shards_by_rank, strict=True):
        name, shape = entries[0][:2]
        assert all(entry[:2] == (name, shape) for entry in entries)
        assert torch.equal(torch.cat([local for *_, local in entries]), full[name])
        chunks = full[name].chunk(len(entries))
        for rank, (_, _, row_start, local) in enumerate(entries):
            assert len(local) == (len(chunks[rank]) if rank < len(chunks) else 0)
            assert torch.equal(full[name][row_start : row_start + len(local)], local)
