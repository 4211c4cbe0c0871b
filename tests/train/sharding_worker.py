"""Training ranks of test_sharding.py: `python -m train.sharding_worker FOLDER NUM_RANKS...` in tests/; each rank writes what it computed to FOLDER/NUM_RANKS/rankN.pt."""

import sys
from pathlib import Path

import torch
import torch._dynamo  # pulled in by the first optimiser anyway: once here instead of once per rank
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from areal_hpc.models import hf
from areal_hpc.train import sharding

from .cases import TINY, local_batch, save_checkpoint, tiny_trainer, trajectories

OPTIONS = {"adam_eps": 1e-3}  # rounding of near-zero gradients must not be blown up to steps of size lr
VARIANTS: dict[str, dict] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": "layer"},
    "offload": {"cpu_offload": True},
    "freed": {"keep": 0},
    "all": {"activation_checkpointing": "layer", "cpu_offload": True, "keep": 0},
}
REPLICATED = {"replicas": {"replicas": 2}, "replicas-all": VARIANTS["all"] | {"replicas": 2}}


def batches(num_ranks: int, role_rank: int):
    yield local_batch(trajectories(0), num_ranks=num_ranks, role_rank=role_rank, num_minibatches=2, capacity=50, masked=(1, 5))


def trained(mesh, num_ranks: int, role_rank: int, keep: int = 10**9, **options):
    sharding.KEEP_GATHERED_PARAMETERS = keep
    trainer = tiny_trainer(mesh, **OPTIONS, **options)
    stats = [trainer.train_batch(batch) for batch in batches(num_ranks, role_rank)]
    return trainer, {"stats": stats, "full": {name: tensor.clone() for name, tensor in trainer.full_state()}}


def train_one_rank(role_rank: int, num_ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), num_ranks), rank=role_rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    result = {}
    for name, options in (VARIANTS | (REPLICATED if num_ranks % 2 == 0 else {})).items():
        trainer, result[name] = trained(mesh, num_ranks, role_rank, **options)
        result[name]["shards"] = [(shard.name, shard.shape, shard.row_start, shard.local.clone()) for shard in trainer.named_shards()]
    save_checkpoint(folder / "step", trainer, {})  # of the last variant: replicas and offloaded rows where there are several ranks
    read = ReadRows(folder.parent / "saved")
    fresh = tiny_trainer(mesh, **OPTIONS)
    fresh.load(read)
    result["loaded"] = {"full": {name: tensor.clone() for name, tensor in fresh.full_state()}, "rows_read": read.rows}
    torch.save(result, folder / f"rank{role_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class ReadRows:
    """`hf.open_weights`, counting the rows that are read of each tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, {}

    def __iter__(self):
        for name, saved in hf.open_weights(self.folder):
            yield name, Counted(saved, name, self.rows)


class Counted:
    def __init__(self, saved: hf.SavedTensor, name: str, rows: dict[str, int]) -> None:
        self.saved, self.name, self.rows, self.shape = saved, name, rows, saved.shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        read = self.saved[rows]
        self.rows[self.name] = self.rows.get(self.name, 0) + len(read)
        return read


if __name__ == "__main__":
    torch.set_num_threads(1)
    hf.save(Path(sys.argv[1]) / "saved", TINY.to_hf(), hf.build_random(TINY, seed=5).named_parameters())
    for num_ranks in map(int, sys.argv[2:]):
        folder = Path(sys.argv[1]) / str(num_ranks)
        folder.mkdir()
        mp.start_processes(train_one_rank, (num_ranks, folder), nprocs=num_ranks, start_method="fork")
