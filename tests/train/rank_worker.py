"""Training ranks of test_trainer_ranks.py: `python -m train.rank_worker FOLDER NUM_RANKS...` in tests/; each rank writes what it computed to FOLDER/NUM_RANKS/rankN.pt.

Ranks are forked from one process that has imported everything and started no thread: importing torch once per rank would take most of the test's time.
"""

import sys
from pathlib import Path

import torch
import torch._dynamo  # pulled in by the first optimiser anyway: once here instead of once per rank
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from areal_hpc.train import checkpoint

from . import reference
from .cases import TINY, local_batch, save_checkpoint, tiny_trainer, trajectories

NUM_STEPS = 3
OPTIONS = {"adam_eps": 1e-3}  # rounding of near-zero gradients must not be blown up to steps of size lr


def batches(num_ranks: int, role_rank: int):
    """Mini-batches, uneven micro-batches, masked trajectories; in the last batch some micro-batches are masked altogether, hence idle."""
    for seed in range(NUM_STEPS - 1):
        yield local_batch(trajectories(seed), num_ranks=num_ranks, role_rank=role_rank, num_minibatches=2, capacity=50, masked=(1, 5))
    yield local_batch(trajectories(8, num=6), num_ranks=num_ranks, role_rank=role_rank, capacity=1, masked=(0, 1, 2))


def objective_steps(mesh, num_ranks: int, role_rank: int) -> dict:
    """Case -> (stats of a step, this rank's rows after it), for every case of reference.py; each rank count cuts and orders in its own way.

    Two mini-batches where pi_prox is then another policy than pi_theta. Rows instead of whole parameters: gathering them would take as long as the steps.
    """
    found = {}
    for name, options in reference.CASES.items():
        trainer = tiny_trainer(mesh, **OPTIONS, **options)
        trainer.policy_version = 2  # the newest that sampled a token
        chosen = trainer.settings
        batch = local_batch(
            trajectories(4),
            num_ranks=num_ranks,
            role_rank=role_rank,
            num_minibatches=2 if chosen.old_policy == "prox" else 1,
            capacity=40 + 20 * num_ranks,
            masked=(1, 5),
            aggregation=chosen.aggregation,
            shuffle=num_ranks,
        )
        found[name] = (trainer.train_batch(batch), {shard.name: shard.local.clone() for shard in trainer.named_shards()})
    return found


def whole(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_state()}


def train_one_rank(role_rank: int, num_ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), num_ranks), rank=role_rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    trainer = tiny_trainer(mesh, **OPTIONS)
    assert trainer.model.mesh is not None, "sharded"
    result = {"stats": [trainer.train_batch(batch) for batch in batches(num_ranks, role_rank)], "full": whole(trainer)}
    result["objectives"] = objective_steps(mesh, num_ranks, role_rank)
    result["shards"] = [(shard.name, shard.shape, shard.row_start, shard.local.clone()) for shard in trainer.named_shards()]
    result["bfloat16"] = tiny_trainer(mesh, torch.bfloat16, **OPTIONS).train_batch(next(batches(num_ranks, role_rank)))
    save_checkpoint(folder / "step", trainer, {"policy_version": NUM_STEPS})
    checkpoint.save_model(folder / "model", trainer, TINY)
    checkpoint.load_checkpoint(folder.parent / "one" / "step", trainer)  # written by a single rank, continued by several
    trainer.train_batch(next(batches(num_ranks, role_rank)))
    torch.save(result | {"continued": whole(trainer)}, folder / f"rank{role_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for num_ranks in map(int, sys.argv[2:]):
        folder = Path(sys.argv[1]) / str(num_ranks)
        folder.mkdir()
        mp.start_processes(train_one_rank, (num_ranks, folder), nprocs=num_ranks, start_method="fork")
