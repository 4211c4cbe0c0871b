"""One training step on a global batch: pi_prox, mini-batches, micro-batches, AdamW.

    1. pi_prox: log-probabilities under the parameters before the first update, computed once per global batch
       (those of the first mini-batch are its own first forward: the parameters are still the same, so that forward is saved)
    2. for each mini-batch
    3.     for each micro-batch: forward, loss of its tokens (loss.py) / denominator of the mini-batch on all ranks, backward
    4.     sum gradients over ranks, clip by global norm, AdamW

Micro-batches are the gradient accumulation: their number follows from `microbatch_tokens` and does not change the result. With a KL penalty the reference model,
sharded like the policy, scores the whole batch once before step 1.

Of an answer of several turns only the model's own tokens are scored (`Trajectory.loss_mask_R`); the environment's are read like a prompt. So there is no logit, no
loss, no statistic and no gradient of theirs: lengths, means, products over answers and denominators count the model's tokens.

Shapes: S trajectories of this rank, M scored tokens (the model's own) of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from areal_hpc import config
from areal_hpc.models.decoder import DecoderConfig, Packed
from areal_hpc.models.flops import train_flops
from areal_hpc.objectives import settings
from areal_hpc.train import loss
from areal_hpc.train.diagnostics import BatchStats, Tally, token_sums
from areal_hpc.train.schedule import learning_rate
from areal_hpc.train.sharding import Rows, Shard, ShardedDecoder
from areal_hpc.train.utilisation import peak_flops, peak_memory_bytes
from areal_hpc.transport.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's part of a global batch, as `batching.plan_batch` cut it."""

    trajectories: list[Trajectory]
    advantage_S: np.ndarray
    weight_S: np.ndarray
    """Factor of each trajectory's loss; 0 keeps it out of the step altogether."""
    minibatch_S: np.ndarray
    microbatch_S: np.ndarray
    num_microbatches: list[int]
    """Per mini-batch, equal on all ranks."""
    trained_tokens: list[int]
    """Per mini-batch: tokens that the model sampled in the trajectories with weight above zero, summed over *all* ranks."""
    denominators: list[int]
    """Per mini-batch: what its summed loss is divided by (`objectives.denominator`)."""


@dataclass(slots=True)
class _MicroBatch:
    packed: Packed
    advantages_M: Tensor
    weights_M: Tensor
    """Of the trajectory, over its length where the aggregation takes means within answers."""
    behav_logprobs_M: Tensor
    staleness_M: Tensor
    """int: versions between the one that is trained now and the one that sampled."""
    answers: loss.Answers
    idle: bool
    prox_logprobs_M: Tensor | None = None
    reference_logprobs_M: Tensor | None = None


class Trainer:
    """Owns the parameters and the optimiser on the training ranks.

    Lifecycle: construct -> `load` (or `checkpoint.load_checkpoint`) -> `train_batch` per global batch, `named_shards` after each for the weight push.
    Every method is called on all training ranks in the same order. Trap: the tensors of `named_shards` are live, copy them before the next `train_batch`.
    """

    def __init__(
        self,
        decoder_config: DecoderConfig,
        train: config.Train,
        *,
        temperature: float,
        device: torch.device,
        mesh: DeviceMesh | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.train, self.temperature, self.device = train, temperature, device
        self.settings = settings(train)
        self.model = ShardedDecoder(decoder_config, device=device, mesh=mesh, dtype=dtype, options=train)
        self.reference = ShardedDecoder(decoder_config, device=device, mesh=mesh, dtype=dtype, options=train) if train.kl_coef > 0 else None
        self.optimizer = _adamw(self.model, train)
        self.policy_version = 0
        self.num_updates = 0
        self._skipped_in_a_row = 0

    @property
    def decoder_config(self) -> DecoderConfig:
        return self.model.config

    def load(self, named_tensors: Iterable[tuple[str, Rows]]) -> None:
        """Take this rank's rows of every tensor (`checkpoint.open_weights_of`): version 0, and the reference model unless it has a path."""
        self.model.load(named_tensors)
        if self.reference is not None:
            self._load_reference(self.reference)

    @torch.no_grad()
    def _load_reference(self, reference: ShardedDecoder) -> None:
        """Raises ConfigError when `reference_path` holds another model than the policy's."""
        if self.train.reference_path:
            from areal_hpc.train.checkpoint import open_weights_of  # which imports this module

            reference.load(open_weights_of(Path(self.train.reference_path)))
        else:
            for name, local in reference.local.items():
                local.copy_(self.model.local[name])
        for parameter in (*reference.parameters.values(), *reference.local.values()):
            parameter.requires_grad_(False)

    def named_shards(self) -> list[Shard]:
        """This rank's rows of every parameter, in manifest order; live views."""
        return self.model.shards()

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor), one at a time; collective."""
        return self.model.full_tensors()

    def train_batch(self, batch: LocalBatch) -> BatchStats:
        """One step on a global batch: policy_version i -> i + 1. Raises RuntimeError when losses or gradients stay non-finite."""
        minibatches = [self._microbatches(batch, m) for m in range(len(batch.num_microbatches))]
        if self.reference is not None:
            self._score_reference(self.reference, minibatches)
        if self.settings.prox == "recompute":
            self._recompute_prox(minibatches[1:])
        tally = Tally(self.device)
        for microbatches, trained_tokens, denominator in zip(minibatches, batch.trained_tokens, batch.denominators, strict=True):
            if trained_tokens == 0:
                tally.num_empty += 1
                continue
            tally.denominator += denominator
            for k, microbatch in enumerate(microbatches):
                self.model.accumulate_only(k < len(microbatches) - 1)
                self._backward(microbatch, denominator, tally)
            self._update(tally)
        self.policy_version += 1
        tally.model_flops = train_flops(
            self.decoder_config, [t.num_tokens for t, weight in zip(batch.trajectories, batch.weight_S, strict=True) if weight != 0]
        )
        return tally.stats(
            self.model,
            has_reference=self.reference is not None,
            peak_flops=peak_flops(self.device),
            peak_memory_bytes=peak_memory_bytes(self.device),
        )

    def _microbatches(self, batch: LocalBatch, minibatch: int) -> list[_MicroBatch]:
        """Pack the trained trajectories of each micro-batch; an idle one gets the shortest trajectory with weight 0, so that collectives still match."""
        packed = []
        for k in range(batch.num_microbatches[minibatch]):
            members = np.flatnonzero((batch.minibatch_S == minibatch) & (batch.microbatch_S == k) & (batch.weight_S != 0))
            idle = len(members) == 0
            if idle:
                members = np.array([int(np.argmin([t.num_tokens for t in batch.trajectories]))])
            chosen = [batch.trajectories[s] for s in members]
            masks = [t.loss_mask_R for t in chosen]
            counts = [t.num_sampled for t in chosen]
            versions_M = np.concatenate([t.versions_R[t.loss_mask_R] for t in chosen])
            weight_S = np.zeros(1) if idle else batch.weight_S[members]
            if self.settings.aggregation == "sequence":
                weight_S = weight_S / counts
            packed.append(
                _MicroBatch(
                    packed=Packed.build([np.concatenate([t.prompt_P, t.tokens_R]) for t in chosen], [len(t.prompt_P) for t in chosen], self.device, masks),
                    advantages_M=self._floats(np.repeat(batch.advantage_S[members], counts)),
                    weights_M=self._floats(np.repeat(weight_S, counts)),
                    behav_logprobs_M=self._floats(np.concatenate([t.logprobs_R[t.loss_mask_R] for t in chosen])),
                    staleness_M=torch.as_tensor(self.policy_version - versions_M, device=self.device),
                    answers=loss.Answers(counts, self.device),
                    idle=idle,
                )
            )
        return packed

    def _floats(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def _recompute_prox(self, minibatches: list[list[_MicroBatch]]) -> None:
        """pi_prox of the mini-batches that later updates will have moved away from."""
        for microbatches in minibatches:
            for microbatch in microbatches:
                microbatch.prox_logprobs_M = self.model.decoder(microbatch.packed, temperature=self.temperature).logprobs_M

    @torch.no_grad()
    def _score_reference(self, reference: ShardedDecoder, minibatches: list[list[_MicroBatch]]) -> None:
        for microbatches in minibatches:
            for microbatch in microbatches:
                microbatch.reference_logprobs_M = reference.decoder(microbatch.packed, temperature=self.temperature).logprobs_M

    def _backward(self, microbatch: _MicroBatch, denominator: int, tally: Tally) -> None:
        scores = self.model.decoder(microbatch.packed, temperature=self.temperature)
        logprobs_M, behav_M, reference_M = scores.logprobs_M, microbatch.behav_logprobs_M, microbatch.reference_logprobs_M
        losses = loss.token_losses(
            self.settings,
            self.train.kl_coef,
            logprobs_M=logprobs_M,
            behav_logprobs_M=behav_M,
            advantages_M=microbatch.advantages_M,
            answers=microbatch.answers,
            prox_logprobs_M=microbatch.prox_logprobs_M,
            reference_logprobs_M=reference_M,
            staleness_M=microbatch.staleness_M,
        )
        loss_M = losses.loss_M * microbatch.weights_M
        total = loss_M.sum() / denominator
        tally.loss_not_finite |= ~torch.isfinite(total.detach())
        total.backward()
        tally.num_idle += microbatch.idle
        if not microbatch.idle:
            current_M = (microbatch.staleness_M == 0) & (tally.num_updates == 0)  # after an update the parameters are no longer those that sampled
            tally.add(*token_sums(losses, loss_M, scores.entropy_M, logprobs_M, behav_M, reference_M, current_M))

    @torch.no_grad()
    def _update(self, tally: Tally) -> None:
        """Clip by global norm and step, unless the loss or a gradient is not finite on some rank (seen by all alike)."""
        gradients = self.model.collect_gradients()
        grad_norm = self.model.gradient_norm(gradients)
        loss_not_finite = tally.take_loss_not_finite(self.model)
        if math.isfinite(grad_norm) and not loss_not_finite:
            if grad_norm > self.train.max_grad_norm:
                torch._foreach_mul_(gradients, self.train.max_grad_norm / grad_norm)
            tally.lr = self._set_lr()
            self.optimizer.step()
            self.num_updates += 1
            tally.num_updates += 1
            tally.grad_norm_sum += grad_norm
            self._skipped_in_a_row = 0
        else:
            tally.num_skipped += 1
            self._skipped_in_a_row += 1
        self.model.drop_gradients()
        if self._skipped_in_a_row >= self.train.max_skipped_updates:
            raise RuntimeError(
                f"loss or gradient not finite in {self._skipped_in_a_row} updates in a row (policy version {self.policy_version}); lower train.lr?"
            )

    def _set_lr(self) -> float:
        lr = learning_rate(self.train, self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, for torch.distributed.checkpoint: live tensors, cut like the parameters, plus a copy of the counters."""
        state: dict[str, Tensor] = {}
        for name, local in self.model.local.items():
            state[f"model.{name}"] = self.model.as_global(name, local)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{moment}.{name}"] = self.model.as_global(name, self.optimizer.state[local][moment])
        state["counters"] = torch.tensor([self.policy_version, self.num_updates, self._skipped_in_a_row])
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict` whose tensors were filled in place."""
        self.policy_version, self.num_updates, self._skipped_in_a_row = state["counters"].tolist()
        for local in self.model.local.values():
            self.optimizer.state[local]["step"].fill_(self.num_updates)
        self.model.reshard()


def _adamw(model: ShardedDecoder, train: config.Train) -> torch.optim.AdamW:
    """AdamW on this rank's rows, weight decay on matrices only. The state exists from the start, so that a checkpoint can be loaded into it."""
    groups = [
        {"params": [local for local in model.local.values() if local.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [local for local in model.local.values() if local.ndim < 2], "weight_decay": 0.0},
    ]
    fused = train.adam_kernel == "fused"
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps, fused=fused, foreach=not fused)
    for local in model.local.values():
        optimizer.state[local] = {
            "step": torch.zeros((), dtype=torch.float32, device=local.device),
            "exp_avg": torch.zeros_like(local),
            "exp_avg_sq": torch.zeros_like(local),
        }
    return optimizer
