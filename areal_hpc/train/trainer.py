"""One training step on a global batch: pi_prox, mini-batches, micro-batches, AdamW.

    1. pi_prox: log-probabilities under the parameters before the first update, computed once per global batch
       (those of the first mini-batch are its own first forward: the parameters are still the same, so that forward is saved)
    2. for each mini-batch
    3.     for each micro-batch: forward, loss of eq. 5 (or 2) / trained tokens of the mini-batch on all ranks, backward
    4.     sum gradients over ranks, clip by global norm, AdamW

Shapes: S trajectories of this rank, M answer tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from areal_hpc import config
from areal_hpc.models.decoder import DecoderConfig, Packed
from areal_hpc.train import loss
from areal_hpc.train.sharding import Shard, ShardedDecoder
from areal_hpc.transport.trajectory import Trajectory

MAX_SKIPPED_IN_A_ROW = 3
"""Updates with a non-finite gradient after which the run ends."""


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
    """Per mini-batch: answer tokens of the trajectories with weight above zero, summed over *all* ranks."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What one step did, the same numbers on every training rank. Means are over trained tokens of the global batch."""

    train_tokens: int
    loss: float
    entropy: float
    """nats"""
    grad_norm: float
    """Before clipping, mean over the updates; nan without one."""
    lr: float
    """Of the last update."""
    ratio_mean: float
    """pi_theta / pi_prox (pi_behav under "ppo")."""
    ratio_max: float
    clipped_share: float
    """Tokens whose gradient the clip removed."""
    prox_behav_mean: float
    """pi_prox / pi_behav (1 under "ppo")."""
    prox_behav_max: float
    kl_behav: float
    """Estimate of KL(pi_behav || pi_theta), nats."""
    logprob_gap: float
    """Mean |log pi_theta - log pi_behav| over the tokens that this very policy version sampled, where any difference is the engine's; nan without such tokens."""
    num_gap_tokens: int
    num_updates: int
    num_skipped: int
    """Updates left out because a gradient was not finite."""
    num_empty: int
    """Mini-batches without a trained token, left out."""
    num_idle: int
    """Micro-batches, over all ranks, computed only to stay in step with other ranks."""


@dataclass(slots=True)
class _MicroBatch:
    packed: Packed
    advantages_M: Tensor
    weights_M: Tensor
    behav_logprobs_M: Tensor
    current_M: Tensor
    """bool: sampled by the policy version that is trained now."""
    idle: bool
    prox_logprobs_M: Tensor | None = None


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
        self.model = ShardedDecoder(decoder_config, device=device, mesh=mesh, dtype=dtype)
        self.optimizer = _adamw(self.model, train)
        self.policy_version = 0
        self.num_updates = 0
        self._skipped_in_a_row = 0

    @property
    def decoder_config(self) -> DecoderConfig:
        return self.model.config

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take this rank's rows of whole tensors (`hf.load_weights`, `checkpoint.load_weights_from`)."""
        self.model.load(named_tensors)

    def named_shards(self) -> list[Shard]:
        """This rank's rows of every parameter, in manifest order; live views."""
        return self.model.shards()

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor), one at a time; collective."""
        return self.model.full_tensors()

    def train_batch(self, batch: LocalBatch) -> BatchStats:
        """One step on a global batch: policy_version i -> i + 1. Raises RuntimeError when gradients stay non-finite."""
        minibatches = [self._microbatches(batch, m) for m in range(len(batch.num_microbatches))]
        if self.train.objective == "decoupled":
            self._recompute_prox(minibatches[1:])
        tally = _Tally(self.device)
        for microbatches, trained_tokens in zip(minibatches, batch.trained_tokens, strict=True):
            if trained_tokens == 0:
                tally.num_empty += 1
                continue
            for k, microbatch in enumerate(microbatches):
                self.model.accumulate_only(k < len(microbatches) - 1)
                self._backward(microbatch, trained_tokens, tally)
            self._update(tally)
        self.policy_version += 1
        return tally.stats(self.model)

    def _microbatches(self, batch: LocalBatch, minibatch: int) -> list[_MicroBatch]:
        """Pack the trained trajectories of each micro-batch; an idle one gets the shortest trajectory with weight 0, so that collectives still match."""
        packed = []
        for k in range(batch.num_microbatches[minibatch]):
            members = np.flatnonzero((batch.minibatch_S == minibatch) & (batch.microbatch_S == k) & (batch.weight_S != 0))
            idle = len(members) == 0
            if idle:
                members = np.array([int(np.argmin([t.num_tokens for t in batch.trajectories]))])
            chosen = [batch.trajectories[s] for s in members]
            counts = [len(t.tokens_R) for t in chosen]
            versions_M = np.concatenate([t.versions_R for t in chosen])
            packed.append(
                _MicroBatch(
                    packed=Packed.build([np.concatenate([t.prompt_P, t.tokens_R]) for t in chosen], [len(t.prompt_P) for t in chosen], self.device),
                    advantages_M=self._floats(np.repeat(batch.advantage_S[members], counts)),
                    weights_M=self._floats(np.repeat(np.zeros(1) if idle else batch.weight_S[members], counts)),
                    behav_logprobs_M=self._floats(np.concatenate([t.logprobs_R for t in chosen])),
                    current_M=torch.as_tensor(versions_M == self.policy_version, device=self.device),
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

    def _backward(self, microbatch: _MicroBatch, trained_tokens: int, tally: _Tally) -> None:
        scores = self.model.decoder(microbatch.packed, temperature=self.temperature)
        logprobs_M, behav_M, advantages_M, eps = scores.logprobs_M, microbatch.behav_logprobs_M, microbatch.advantages_M, self.train.clip_eps
        if self.train.objective == "decoupled":
            old_M = logprobs_M.detach() if microbatch.prox_logprobs_M is None else microbatch.prox_logprobs_M
            loss_M = loss.decoupled_ppo(logprobs_M, old_M, behav_M, advantages_M, eps)
        else:
            old_M = behav_M
            loss_M = loss.ppo(logprobs_M, old_M, advantages_M, eps)
        loss_M = loss_M * microbatch.weights_M
        (loss_M.sum() / trained_tokens).backward()
        tally.num_idle += microbatch.idle
        if not microbatch.idle:
            current_M = microbatch.current_M & (tally.num_updates == 0)  # after an update the parameters are no longer those that sampled
            tally.add(*loss.diagnostics(loss_M.detach(), scores.entropy_M, logprobs_M, old_M, behav_M, advantages_M, current_M, eps))

    @torch.no_grad()
    def _update(self, tally: _Tally) -> None:
        """Clip by global norm and step, unless a gradient is not finite (seen by all ranks alike)."""
        gradients = self.model.collect_gradients()
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        grad_norm = math.sqrt(float(self.model.all_reduce(squares, dist.ReduceOp.SUM)))
        if math.isfinite(grad_norm):
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
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(f"gradient not finite in {self._skipped_in_a_row} updates in a row (policy version {self.policy_version}); lower train.lr?")

    def _set_lr(self) -> float:
        """Linear warm-up over `warmup_steps` updates, then constant."""
        lr = self.train.lr * min(1.0, (self.num_updates + 1) / max(1, self.train.warmup_steps))
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


class _Tally:
    """Sums over the micro-batches of a step, reduced over ranks once at its end."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(loss.SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.full((len(loss.MAXIMA),), -math.inf, dtype=torch.float64, device=device)
        self.lr = self.grad_norm_sum = 0.0
        self.num_updates = self.num_skipped = self.num_empty = self.num_idle = 0

    def add(self, sums: Tensor, maxima: Tensor) -> None:
        self.sums += sums
        self.maxima = torch.maximum(self.maxima, maxima)

    def stats(self, model: ShardedDecoder) -> BatchStats:
        sums = model.all_reduce(torch.cat([self.sums, self.sums.new_tensor([self.num_idle])]), dist.ReduceOp.SUM).tolist()
        maxima = model.all_reduce(self.maxima, dist.ReduceOp.MAX).tolist()
        total, peak = dict(zip((*loss.SUMS, "idle"), sums, strict=True)), dict(zip(loss.MAXIMA, maxima, strict=True))
        tokens = total["tokens"] or math.nan
        return BatchStats(
            train_tokens=int(total["tokens"]),
            loss=total["loss"] / tokens,
            entropy=total["entropy"] / tokens,
            grad_norm=self.grad_norm_sum / (self.num_updates or math.nan),
            lr=self.lr,
            ratio_mean=total["ratio"] / tokens,
            ratio_max=peak["ratio_max"] if total["tokens"] else math.nan,
            clipped_share=total["clipped"] / tokens,
            prox_behav_mean=total["prox_behav"] / tokens,
            prox_behav_max=peak["prox_behav_max"] if total["tokens"] else math.nan,
            kl_behav=total["kl_behav"] / tokens,
            logprob_gap=total["gap"] / (total["gap_tokens"] or math.nan),
            num_gap_tokens=int(total["gap_tokens"]),
            num_updates=self.num_updates,
            num_skipped=self.num_skipped,
            num_empty=self.num_empty,
            num_idle=int(total["idle"]),
        )


def _adamw(model: ShardedDecoder, train: config.Train) -> torch.optim.AdamW:
    """AdamW on this rank's rows, weight decay on matrices only. The state exists from the start, so that a checkpoint can be loaded into it."""
    groups = [
        {"params": [local for local in model.local.values() if local.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [local for local in model.local.values() if local.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps, fused=True)
    for local in model.local.values():
        optimizer.state[local] = {
            "step": torch.zeros((), dtype=torch.float32, device=local.device),
            "exp_avg": torch.zeros_like(local),
            "exp_avg_sq": torch.zeros_like(local),
        }
    return optimizer
