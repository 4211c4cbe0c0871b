"""Small models and global batches that the trainer's tests share."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_hpc import checkpoints, config
from areal_hpc.models import hf
from areal_hpc.models.decoder import DecoderConfig
from areal_hpc.objectives import denominator
from areal_hpc.train import checkpoint
from areal_hpc.train.batching import plan_batch
from areal_hpc.train.trainer import LocalBatch, Trainer
from areal_hpc.transport.trajectory import Status, Trajectory

TINY = DecoderConfig(
    model_type="qwen2",
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
    max_position_embeddings=128,
    eos_token_id=0,
    initializer_range=0.2,
)


def trajectories(seed: int, num: int = 12, group_size: int = 3) -> list[Trajectory]:
    """Random prompts and answers of varying length with made-up behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    result = []
    for k in range(num):
        if k % group_size == 0:
            prompt_P = rng.integers(1, TINY.vocab_size, rng.integers(2, 9)).astype(np.int32)
        num_tokens = int(rng.integers(1, 30))
        result.append(
            Trajectory(
                ticket=k // group_size,
                sample=k % group_size,
                prompt_P=prompt_P,
                tokens_R=rng.integers(0, TINY.vocab_size, num_tokens).astype(np.int32),
                logprobs_R=rng.normal(-3, 0.5, num_tokens).astype(np.float32),
                versions_R=np.sort(rng.integers(0, 3, num_tokens)).astype(np.int32),
                loss_mask_R=np.ones(num_tokens, bool),
                reward=float(rng.choice([5.0, -5.0])),
                status=Status.RIGHT,
            )
        )
    return result


def with_turns(trajs: list[Trajectory], seed: int) -> list[Trajectory]:
    """The same, with texts of an environment in the answers: runs of tokens behind the first that the model did not sample."""
    rng, result = np.random.default_rng(seed), []
    for t in trajs:
        mask_R = np.ones(len(t.tokens_R), bool)
        for _ in range(2):
            start = int(rng.integers(1, len(mask_R) + 1))
            mask_R[start : start + int(rng.integers(1, 7))] = False
        result.append(replace(t, loss_mask_R=mask_R, logprobs_R=np.where(mask_R, t.logprobs_R, np.float32(0))))
    return result


MAX_NEW_TOKENS = 30


def local_batch(
    trajs: list[Trajectory],
    *,
    num_ranks: int = 1,
    role_rank: int = 0,
    num_minibatches: int = 1,
    capacity: int = 64,
    min_microbatches: int = 1,
    masked=(),
    aggregation: str = "token",
    shuffle: int | None = None,
) -> LocalBatch:
    """What training rank `role_rank` gets of a global batch whose advantages depend on the trajectories alone. `shuffle`: seed of another packing order."""
    advantage_S = np.random.default_rng(7).normal(size=len(trajs))
    weight_S = np.array([float(s not in masked) for s in range(len(trajs))])
    plan = plan_batch(
        [t.num_tokens for t in trajs],
        [t.ticket for t in trajs],
        num_ranks=num_ranks,
        num_minibatches=num_minibatches,
        capacity_tokens=capacity,
        min_microbatches=min_microbatches,
    )
    tokens_S = np.array([t.num_sampled for t in trajs])
    mine = np.flatnonzero(plan.rank_S == role_rank)
    if shuffle is not None:
        mine = np.random.default_rng(shuffle).permutation(mine)
    trained_S = [(plan.minibatch_S == m) & (weight_S > 0) for m in range(num_minibatches)]
    trained_tokens = [int(tokens_S[trained].sum()) for trained in trained_S]
    return LocalBatch(
        trajectories=[trajs[s] for s in mine],
        advantage_S=advantage_S[mine],
        weight_S=weight_S[mine],
        minibatch_S=plan.minibatch_S[mine],
        microbatch_S=plan.microbatch_S[mine],
        num_microbatches=plan.num_microbatches_M.tolist(),
        trained_tokens=trained_tokens,
        denominators=[denominator(aggregation, tokens, int(trained.sum()), MAX_NEW_TOKENS) for tokens, trained in zip(trained_tokens, trained_S, strict=True)],
    )


def tiny_trainer(mesh=None, dtype=torch.float32, **options) -> Trainer:
    settings = {"lr": 1e-2, "adam_eps": 1e-8, "max_grad_norm": 0.5, "warmup_steps": 2} | options
    trainer = Trainer(TINY, config.Train(**settings), temperature=0.9, device=torch.device("cpu"), mesh=mesh, dtype=dtype)
    trainer.load(hf.build_random(TINY, seed=5).named_parameters())
    return trainer


def save_checkpoint(folder: Path, trainer: Trainer, meta: dict, tokenizer_files: Mapping[str, bytes] | None = None) -> None:
    """What the threads of all training ranks do (train/saving.py), in one go. Collective where there is a process group."""
    rank, group = (dist.get_rank(), dist.group.WORLD) if dist.is_initialized() else (0, None)
    partial = checkpoints.partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    files = checkpoint.write_parameters(partial, checkpoint.copy_state(trainer), rank, group)
    if group is not None:
        written: list[list[checkpoints.SavedFile]] = [[]] * dist.get_world_size()
        dist.all_gather_object(written, files)
        files = [file for share in written for file in share]
    if rank == 0:
        checkpoints.finish(folder, files + checkpoint.write_model_files(partial, trainer.decoder_config, tokenizer_files or {}), meta)
    if group is not None:
        dist.barrier()
