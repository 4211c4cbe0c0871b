"""A training step against `transformers` on padded batches with textbook loss, clipping and AdamW; invariance to how the batch is cut."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from areal_hpc import config
from areal_hpc.models import decoder, hf
from areal_hpc.models.flops import train_flops
from areal_hpc.objectives import settings
from areal_hpc.train import loss
from areal_hpc.train import trainer as trainer_module
from areal_hpc.train.checkpoint import load_checkpoint

from . import reference
from .cases import MAX_NEW_TOKENS, TINY, local_batch, save_checkpoint, tiny_trainer, trajectories, with_turns

TEMPERATURE = 0.9
VERSION = 2
"""Newest version that sampled a token of cases.trajectories: the trainer's first one where staleness matters."""


def gradients_of_first_update(batch, **options):
    """(clipped gradients by name, stats) of one step with a single mini-batch."""
    trainer = tiny_trainer(**options)
    trainer.policy_version = VERSION
    seen = {}
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.update((name, p.grad.clone()) for name, p in trainer.model.local.items()))
    return seen, trainer.train_batch(batch)


class Reference:
    """The same model in `transformers`, trained by the formulas of the paper on right-padded batches in float64."""

    def __init__(self, tmp_path, train):
        from transformers import Qwen2ForCausalLM

        hf.save(tmp_path / "model", TINY.to_hf(), hf.build_random(TINY, seed=5).named_parameters())
        self.model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").double()
        self.train, self.num_updates, self.version = train, 0, VERSION
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps, weight_decay=train.weight_decay)

    def logprobs(self, trajs):
        """Per trajectory, log-probabilities of the tokens of its answer that the model sampled."""
        rows = [np.concatenate([t.prompt_P, t.tokens_R]) for t in trajs]
        longest = max(map(len, rows))
        tokens = torch.tensor(np.stack([np.pad(row, (0, longest - len(row))) for row in rows]), dtype=torch.int64)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        log_softmax = torch.log_softmax(self.model(input_ids=tokens, attention_mask=mask).logits / TEMPERATURE, -1)
        scores = log_softmax[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        return [scores[k, len(t.prompt_P) - 1 : len(row) - 1][torch.from_numpy(t.loss_mask_R)] for k, (t, row) in enumerate(zip(trajs, rows, strict=True))]

    def train_batch(self, batch, num_minibatches, options):
        """Loss and its gradient with respect to log-probabilities from reference.py, the rest by textbook; returns (loss, mean gradient norm)."""
        trajs = batch.trajectories
        prox = [logprobs.detach().numpy() for logprobs in self.logprobs(trajs)]
        losses, norms = [], []
        for m in range(num_minibatches):
            members = [s for s in range(len(trajs)) if batch.minibatch_S[s] == m and batch.weight_S[s] > 0]
            theta = self.logprobs([trajs[s] for s in members])
            held = [logprobs.detach().numpy() for logprobs in theta]
            columns = (
                held,
                [prox[s] for s in members],
                [trajs[s].logprobs_R[trajs[s].loss_mask_R].astype(np.float64) for s in members],
                [self.first_logprobs[trajs[s].ticket, trajs[s].sample] for s in members],
                [self.version - trajs[s].versions_R[trajs[s].loss_mask_R] for s in members],
                [float(batch.advantage_S[s]) for s in members],
            )
            losses.append((reference.batch_loss(held, *columns, max_new_tokens=MAX_NEW_TOKENS, **options), batch.denominators[m]))
            slopes = reference.gradient(held, *columns, max_new_tokens=MAX_NEW_TOKENS, **options)
            self.optimizer.zero_grad()
            torch.autograd.backward(theta, [torch.tensor(slope) for slope in slopes])
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.max_grad_norm)))
            self.num_updates += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.train.lr * min(1.0, self.num_updates / self.train.warmup_steps)
            self.optimizer.step()
        self.version += 1
        return sum(loss * d for loss, d in losses) / sum(d for _, d in losses), float(np.mean(norms))

    def remember_first(self, trajs):
        """The reference model of the KL penalty: the weights before the first step."""
        self.first_logprobs = {(t.ticket, t.sample): logprobs.detach().numpy() for t, logprobs in zip(trajs, self.logprobs(trajs), strict=True)}


@pytest.mark.parametrize("name", reference.CASES)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_steps_equal_transformers_on_padded_batches(tmp_path, name, num_minibatches):
    options = reference.CASES[name]
    train = config.Train(lr=3e-3, adam_eps=1e-3, max_grad_norm=0.5, warmup_steps=2, **options)
    trainer, padded = tiny_trainer(**options, lr=3e-3, adam_eps=1e-3), Reference(tmp_path, train)
    trainer.policy_version = VERSION
    batches = [local_batch(trajectories(seed), num_minibatches=num_minibatches, masked=(1, 5), aggregation=trainer.settings.aggregation) for seed in range(2)]
    first = [padded_first(padded, batch) for batch in batches]
    for k, batch in enumerate(batches):
        padded.first_logprobs = first[k]
        stats = trainer.train_batch(batch)
        loss, grad_norm = padded.train_batch(batch, num_minibatches, options)
        assert stats.loss == pytest.approx(loss, rel=2e-4, abs=1e-5)
        assert stats.grad_norm == pytest.approx(grad_norm, rel=2e-4)
        assert stats.num_updates == num_minibatches
        assert stats.train_tokens == sum(batch.trained_tokens)
        assert math.isnan(stats.kl_ref) == ("kl_coef" not in options)
        assert 0 < stats.effective_share <= 1
    ours = dict(trainer.full_state())
    for parameter, theirs in padded.model.named_parameters():
        np.testing.assert_allclose(ours[parameter].numpy(), theirs.detach().numpy(), atol=2e-5, err_msg=parameter)


@pytest.mark.parametrize("name", reference.CASES)
def test_environment_tokens_are_in_no_loss_and_no_denominator(tmp_path, name):
    """Answers of several turns, two mini-batches, against the formulas over the model's own tokens and `transformers` on padded batches."""
    options = reference.CASES[name]
    train = config.Train(lr=3e-3, adam_eps=1e-3, max_grad_norm=0.5, warmup_steps=2, **options)
    trainer, padded = tiny_trainer(**options, lr=3e-3, adam_eps=1e-3), Reference(tmp_path, train)
    trainer.policy_version = VERSION
    trajs = with_turns(trajectories(0), 0)
    assert 0.2 < np.mean(np.concatenate([~t.loss_mask_R for t in trajs])) < 0.8
    batch = local_batch(trajs, num_minibatches=2, masked=(1, 5), aggregation=trainer.settings.aggregation)
    padded_first(padded, batch)
    stats = trainer.train_batch(batch)
    loss, grad_norm = padded.train_batch(batch, 2, options)
    assert stats.loss == pytest.approx(loss, rel=2e-4, abs=1e-5)
    assert stats.grad_norm == pytest.approx(grad_norm, rel=2e-4)
    assert stats.train_tokens == sum(batch.trained_tokens) == sum(t.num_sampled for s, t in enumerate(trajs) if s not in (1, 5))
    ours = dict(trainer.full_state())
    for parameter, theirs in padded.model.named_parameters():
        np.testing.assert_allclose(ours[parameter].numpy(), theirs.detach().numpy(), atol=2e-5, err_msg=parameter)


@pytest.mark.parametrize("name", reference.CASES)
def test_gradients_of_environment_tokens_are_exactly_zero(name, monkeypatch):
    """No logit is computed for one of them in any forward pass; whatever their log-probabilities and versions, even not-a-number, no bit of a gradient changes."""
    options = reference.CASES[name]
    scored = []
    original = decoder.token_scores

    def recorded(hidden_Md, head_Vd, targets_M, temperature):
        assert len(hidden_Md) == len(targets_M)
        scored.append(targets_M.numpy().copy())
        return original(hidden_Md, head_Vd, targets_M, temperature)

    monkeypatch.setattr(decoder, "token_scores", recorded)
    trajs = with_turns(trajectories(3), 3)
    aggregation = settings(config.Train(**options)).aggregation
    gradients, stats = gradients_of_first_update(local_batch(trajs, aggregation=aggregation), **options)
    own = np.sort(np.concatenate([t.tokens_R[t.loss_mask_R] for t in trajs]))
    num_passes = 2 if "kl_coef" in options else 1
    assert np.array_equal(np.sort(np.concatenate(scored)), np.sort(np.tile(own, num_passes)))
    nonsense = [
        dataclasses.replace(
            t, logprobs_R=np.where(t.loss_mask_R, t.logprobs_R, np.float32(np.nan)), versions_R=np.where(t.loss_mask_R, t.versions_R, -(2**20)).astype(np.int32)
        )
        for t in trajs
    ]
    again, stats_again = gradients_of_first_update(local_batch(nonsense, aggregation=aggregation), **options)
    assert all(torch.equal(gradients[parameter], again[parameter]) for parameter in gradients)
    assert any((gradient != 0).any() for gradient in gradients.values())
    watched = [field.name for field in dataclasses.fields(stats) if field.name not in ("peak_flops", "peak_memory_bytes")]
    np.testing.assert_equal([getattr(stats_again, field) for field in watched], [getattr(stats, field) for field in watched])
    assert stats.train_tokens == len(own)


@pytest.mark.parametrize("name", ["decoupled sequence weight", "decoupled loglinear", "grpo", "gspo"])
def test_any_cut_of_answers_of_several_turns_gives_the_same_gradient(name):
    options = reference.CASES[name]
    trajs, aggregation = with_turns(trajectories(3), 4), settings(config.Train(**options)).aggregation
    whole, stats = gradients_of_first_update(local_batch(trajs, capacity=10_000, aggregation=aggregation), **options)
    for cut in ({"capacity": 64}, {"capacity": 1}, {"capacity": 10_000, "shuffle": 1}):
        found, cut_stats = gradients_of_first_update(local_batch(trajs, aggregation=aggregation, **cut), **options)
        for parameter, gradient in whole.items():
            assert (found[parameter] - gradient).norm() <= 1e-5 * gradient.norm(), parameter
        assert cut_stats.loss == pytest.approx(stats.loss, rel=1e-5, abs=1e-6)


def padded_first(padded, batch):
    padded.remember_first(batch.trajectories)
    return padded.first_logprobs


@pytest.mark.parametrize("name", reference.CASES)
def test_any_cut_and_any_order_gives_the_same_gradient(name):
    options = reference.CASES[name]
    trajs, aggregation = trajectories(3), settings(config.Train(**options)).aggregation
    whole, stats = gradients_of_first_update(local_batch(trajs, capacity=10_000, aggregation=aggregation), **options)
    for cut in (
        {"capacity": 64},
        {"capacity": 1},
        {"capacity": 10_000, "min_microbatches": 5},
        {"capacity": 10_000, "shuffle": 1},
        {"capacity": 50, "shuffle": 2},
    ):
        batch = local_batch(trajs, aggregation=aggregation, **cut)
        assert batch.num_microbatches[0] > 1 or "shuffle" in cut
        found, cut_stats = gradients_of_first_update(batch, **options)
        for parameter, gradient in whole.items():
            assert (found[parameter] - gradient).norm() <= 1e-5 * gradient.norm(), parameter
        assert cut_stats.loss == pytest.approx(stats.loss, rel=1e-5, abs=1e-6)


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
        denominators=full.denominators,
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


def test_a_loss_that_is_not_finite_skips_the_update_though_its_gradient_is_finite(monkeypatch):
    """As a constant that overflows would make it: no gradient tells."""
    real = loss.token_losses
    monkeypatch.setattr(loss, "token_losses", lambda *a, **k: (found := real(*a, **k))._replace(loss_M=found.loss_M + math.inf))
    trainer = tiny_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.full_state()}
    stats = trainer.train_batch(local_batch(trajectories(0), num_minibatches=2))
    assert (stats.num_skipped, stats.num_updates) == (2, 0) and not math.isfinite(stats.loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_state())
    monkeypatch.undo()
    assert trainer.train_batch(local_batch(trajectories(0))).num_updates == 1


def test_a_run_that_ends_for_its_numbers_leaves_the_last_checkpoint_as_it_was(tmp_path):
    trainer, broken = tiny_trainer(max_skipped_updates=2), local_batch(trajectories(0))
    trainer.train_batch(local_batch(trajectories(1)))
    save_checkpoint(tmp_path / "step-000001", trainer, {})
    saved = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    good = {name: tensor.clone() for name, tensor in trainer.full_state()}
    broken.advantage_S[0] = np.nan
    trainer.train_batch(broken)
    with pytest.raises(RuntimeError, match="not finite in 2 updates in a row"):
        trainer.train_batch(broken)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == saved
    again = tiny_trainer()
    load_checkpoint(tmp_path / "step-000001", again)
    assert all(torch.equal(tensor, good[name]) for name, tensor in again.full_state())


def test_a_batch_without_trained_tokens_changes_nothing():
    trainer = tiny_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.full_state()}
    stats = trainer.train_batch(local_batch(trajectories(0), masked=range(12)))
    assert (stats.num_empty, stats.num_updates, stats.train_tokens) == (1, 0, 0)
    assert math.isnan(stats.ratio_max)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.full_state())


def test_number_of_skipped_updates_is_an_option():
    trainer, broken = tiny_trainer(max_skipped_updates=1), local_batch(trajectories(0))
    broken.advantage_S[0] = np.inf
    with pytest.raises(RuntimeError, match="not finite in 1 updates in a row"):
        trainer.train_batch(broken)


def test_adam_kernels_agree():
    fused, foreach = tiny_trainer(adam_eps=1e-3), tiny_trainer(adam_eps=1e-3, adam_kernel="foreach")
    for seed in range(3):
        for trainer in (fused, foreach):
            trainer.train_batch(local_batch(trajectories(seed)))
    for (name, ours), (_, theirs) in zip(fused.full_state(), foreach.full_state(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)


def test_reference_model_from_a_folder(tmp_path):
    """`reference_path` against version 0: another model gives another divergence; one of another shape is refused; the reference never moves."""
    hf.save(tmp_path / "other", TINY.to_hf(), hf.build_random(TINY, seed=6).named_parameters())
    batch = local_batch(trajectories(0))
    own, other = tiny_trainer(kl_coef=0.1), tiny_trainer(kl_coef=0.1, reference_path=str(tmp_path / "other"))
    assert own.train_batch(batch).kl_ref == 0  # the first forward is that of version 0
    assert own.train_batch(batch).kl_ref > 0
    before = {name: local.clone() for name, local in other.reference.local.items()}
    assert other.train_batch(batch).kl_ref > 0.01
    weights = dict(hf.load_weights(tmp_path / "other"))
    assert all(torch.equal(local, before[name]) and torch.equal(local, weights[name]) for name, local in other.reference.local.items())
    assert tiny_trainer().reference is None
    larger = dataclasses.replace(TINY, intermediate_size=32)
    hf.save(tmp_path / "larger", larger.to_hf(), hf.build_random(larger, seed=6).named_parameters())
    with pytest.raises(config.ConfigError, match="has shape"):
        tiny_trainer(kl_coef=0.1, reference_path=str(tmp_path / "larger"))


def test_cost_of_a_step_is_known():
    """FLOPs by the definition of models/flops.py, over the trajectories that train; peaks of the device are positive."""
    trajs = trajectories(0)
    stats = tiny_trainer().train_batch(local_batch(trajs, masked=(0, 1)))
    assert stats.model_flops == train_flops(TINY, [t.num_tokens for t in trajs[2:]])
    assert stats.peak_flops > 1e8
    assert stats.peak_memory_bytes >= 2**26  # torch alone


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
