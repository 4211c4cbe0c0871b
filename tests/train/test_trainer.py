"""A training step against `transformers` on padded batches with textbook loss, clipping and AdamW; invariance to how the batch is cut."""

import math

import numpy as np
import pytest
import torch

from areal_hpc import config
from areal_hpc.models import hf
from areal_hpc.train import trainer as trainer_module

from .cases import TINY, local_batch, tiny_trainer, trajectories

TEMPERATURE = 0.9


def gradients_of_first_update(batch, **options):
    """(clipped gradients by name, stats) of one step with a single mini-batch."""
    trainer = tiny_trainer(**options)
    seen = {}
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.update((name, p.grad.clone()) for name, p in trainer.model.local.items()))
    return seen, trainer.train_batch(batch)


class Reference:
    """The same model in `transformers`, trained by the formulas of the paper on right-padded batches in float64."""

    def __init__(self, tmp_path, train):
        from transformers import Qwen2ForCausalLM

        hf.save(tmp_path / "model", TINY.to_hf(), hf.build_random(TINY, seed=5).named_parameters())
        self.model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").double()
        self.train, self.num_updates = train, 0
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps, weight_decay=train.weight_decay)

    def logprobs(self, trajs):
        """Per trajectory, log-probabilities of its answer."""
        rows = [np.concatenate([t.prompt_P, t.tokens_R]) for t in trajs]
        longest = max(map(len, rows))
        tokens = torch.tensor(np.stack([np.pad(row, (0, longest - len(row))) for row in rows]), dtype=torch.int64)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        log_softmax = torch.log_softmax(self.model(input_ids=tokens, attention_mask=mask).logits / TEMPERATURE, -1)
        scores = log_softmax[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        return [scores[k, len(t.prompt_P) - 1 : len(row) - 1] for k, (t, row) in enumerate(zip(trajs, rows, strict=True))]

    def train_batch(self, batch, num_minibatches):
        trajs = batch.trajectories
        prox = [logprobs.detach() for logprobs in self.logprobs(trajs)]
        losses, norms = [], []
        for m in range(num_minibatches):
            members = [s for s in range(len(trajs)) if batch.minibatch_S[s] == m and batch.weight_S[s] > 0]
            theta = self.logprobs([trajs[s] for s in members])
            total, count = 0.0, 0
            for s, logprobs in zip(members, theta, strict=True):
                behav, advantage = torch.tensor(trajs[s].logprobs_R).double(), float(batch.advantage_S[s])
                if self.train.objective == "decoupled":
                    u, weight = torch.exp(logprobs - prox[s]), torch.exp(prox[s] - behav)
                else:
                    u, weight = torch.exp(logprobs - behav), 1.0
                total = total - (weight * torch.min(u * advantage, u.clamp(1 - self.train.clip_eps, 1 + self.train.clip_eps) * advantage)).sum()
                count += len(logprobs)
            self.optimizer.zero_grad()
            (total / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.max_grad_norm)))
            self.num_updates += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.train.lr * min(1.0, self.num_updates / self.train.warmup_steps)
            self.optimizer.step()
            losses.append((float(total.detach()), count))
        return sum(x for x, _ in losses) / sum(c for _, c in losses), float(np.mean(norms))


@pytest.mark.parametrize("objective", ["decoupled", "ppo"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_steps_equal_transformers_on_padded_batches(tmp_path, objective, num_minibatches):
    train = config.Train(objective=objective, lr=1e-2, adam_eps=1e-3, max_grad_norm=0.5, warmup_steps=2)
    trainer, reference = tiny_trainer(objective=objective, adam_eps=1e-3), Reference(tmp_path, train)
    for seed in range(3):
        batch = local_batch(trajectories(seed), num_minibatches=num_minibatches, masked=(1, 5))
        stats = trainer.train_batch(batch)
        loss, grad_norm = reference.train_batch(batch, num_minibatches)
        assert stats.loss == pytest.approx(loss, rel=1e-6 if seed == 0 and num_minibatches == 1 else 1e-4)
        assert stats.grad_norm == pytest.approx(grad_norm, rel=1e-4)
        assert stats.num_updates == num_minibatches
        assert stats.train_tokens == sum(batch.trained_tokens)
    ours = dict(trainer.full_state())
    for name, theirs in reference.model.named_parameters():
        np.testing.assert_allclose(ours[name].numpy(), theirs.detach().numpy(), atol=2e-5, err_msg=name)


def test_any_cut_into_microbatches_gives_the_same_gradient():
    trajs = trajectories(3)
    whole, stats = gradients_of_first_update(local_batch(trajs, capacity=10_000))
    for options in ({"capacity": 64}, {"capacity": 1}, {"capacity": 10_000, "min_microbatches": 5}):
        batch = local_batch(trajs, **options)
        assert batch.num_microbatches[0] > 1
        cut, cut_stats = gradients_of_first_update(batch)
        for name, gradient in whole.items():
            assert (cut[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
        assert cut_stats.loss == pytest.approx(stats.loss, rel=1e-6)


def test_masked_trajectories_leave_no_trace():
    """Same gradient as a batch without them, also where a whole micro-batch is masked (computed idle, counted)."""
    trajs = trajectories(3)
    masked = {2, 3, 4, 5}
    full = local_batch(trajs, capacity=1, masked=masked)
    kept = np.array([s for s in range(len(trajs)) if s not in masked])
    alone = trainer_module.LocalBatch(
        trajectories=[trajs[s] for s in kept],
        advantage_S=full.advantage_S[kept],
        weight_S=full.weight_S[kept],
        minibatch_S=full.minibatch_S[kept],
        microbatch_S=np.arange(len(kept)),
        num_microbatches=[len(kept)],
        trained_tokens=full.trained_tokens,
    )
    masked_gradients, stats = gradients_of_first_update(full)
    gradients, alone_stats = gradients_of_first_update(alone)
    assert (stats.num_idle, alone_stats.num_idle) == (4, 0)
    assert stats.train_tokens == alone_stats.train_tokens
    for name in gradients:
        assert (masked_gradients[name] - gradients[name]).norm() <= 1e-6 * gradients[name].norm()


def test_logprob_gap_watches_tokens_of_the_current_version_only():
    trainer, batch = tiny_trainer(), local_batch(trajectories(0), num_minibatches=2)
    stats = trainer.train_batch(batch)
    first = [t for t, m in zip(batch.trajectories, batch.minibatch_S, strict=True) if m == 0]
    assert stats.num_gap_tokens == sum(int((t.versions_R == 0).sum()) for t in first)
    assert stats.logprob_gap > 0
    assert trainer.policy_version == 1


def test_non_finite_gradients_skip_the_update_and_end_the_run_when_they_persist():
    trainer, batch = tiny_trainer(), local_batch(trajectories(0))
    before = {name: tensor.clone() for name, tensor in trainer.full_state()}
    broken = local_batch(trajectories(0))
    broken.advantage_S[0] = np.nan
    for _ in range(2):
        stats = trainer.train_batch(broken)
        assert (stats.num_skipped, stats.num_updates) == (1, 0)
        assert math.isnan(stats.grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_state())
    assert trainer.train_batch(batch).num_updates == 1  # a good update forgives
    trainer.train_batch(broken)
    trainer.train_batch(broken)
    with pytest.raises(RuntimeError, match="not finite in 3 updates in a row"):
        trainer.train_batch(broken)


def test_a_batch_without_trained_tokens_changes_nothing():
    trainer = tiny_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.full_state()}
    stats = trainer.train_batch(local_batch(trajectories(0), masked=range(12)))
    assert (stats.num_empty, stats.num_updates, stats.train_tokens) == (1, 0, 0)
    assert math.isnan(stats.ratio_max)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_state())


def test_load_refuses_what_does_not_fit():
    weights = dict(hf.build_random(TINY, seed=0).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in (
        ({**weights, "model.extra": torch.zeros(1)}, "model.extra is not a parameter"),
        ({**weights, name: weights[name][1:]}, "has shape"),
        ({k: v for k, v in weights.items() if k != name}, f"1 are missing, first {name}"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            tiny_trainer().load(wrong.items())
