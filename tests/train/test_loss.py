"""Objectives against float64 NumPy formulas (reference.py) in value, and in gradient against finite differences of a small model; what must hold of each by itself."""

import typing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc import objectives
from areal_hpc.config import Train
from areal_hpc.train import loss
from areal_hpc.train.diagnostics import MAXIMA, SUMS, token_sums
from areal_hpc.train.loss import SURROGATES, Answers, Clip, behaviour_weight, kl_penalty, loglinear_prox, token_losses

from . import reference
from .reference import CASES

LENGTHS = (5, 1, 9, 3, 12, 7)
MAX_NEW_TOKENS = 12


def columns(theta, seed):
    """prox, behav, ref, staleness, advantage for answers with these log-probabilities."""
    rng = np.random.default_rng(seed)
    prox = [t + rng.normal(0, 0.2, len(t)) for t in theta]
    behav = [p + rng.normal(0.02, 0.3, len(p)) for p in prox]
    ref = [t + rng.normal(0, 0.4, len(t)) for t in theta]
    staleness = [np.sort(rng.integers(0, 4, len(t)))[::-1] for t in theta]
    return prox, behav, ref, staleness, list(rng.normal(0, 1, len(theta)))


class SmallModel:
    """log_softmax(tanh(E[x]) W)[y] in float64, in torch and in NumPy: tokens x -> y of the answers."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.embed, self.head = rng.normal(0, 1, (6, 3)), rng.normal(0, 1, (3, 6))
        self.inputs, self.targets = ([rng.integers(0, 6, n) for n in LENGTHS] for _ in range(2))

    def numpy(self, embed, head):
        result = []
        for x, y in zip(self.inputs, self.targets, strict=True):
            logits = np.tanh(embed[x]) @ head
            logits = logits - logits.max(-1, keepdims=True)
            result.append((logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(y)), y])
        return result

    def torch(self):
        """(log-probabilities of all answers back to back, parameters)."""
        embed, head = torch.tensor(self.embed, requires_grad=True), torch.tensor(self.head, requires_grad=True)
        logits = torch.tanh(embed[np.concatenate(self.inputs)]) @ head
        return torch.log_softmax(logits, -1)[np.arange(sum(LENGTHS)), np.concatenate(self.targets)], (embed, head)


def micro_batch_loss(options, logprobs_M, prox, behav, ref, staleness, advantage, lengths=LENGTHS):
    """What the trainer computes of answers that fill one micro-batch."""
    chosen = objectives.settings(Train(**options))
    floats = [torch.tensor(np.concatenate(column)) for column in (prox, behav, ref)]
    losses = token_losses(
        chosen,
        options.get("kl_coef", 0.0),
        logprobs_M=logprobs_M,
        prox_logprobs_M=floats[0],
        behav_logprobs_M=floats[1],
        reference_logprobs_M=floats[2],
        staleness_M=torch.tensor(np.concatenate(staleness)),
        advantages_M=torch.tensor(np.repeat(advantage, lengths)),
        answers=Answers(lengths),
    )
    scale_M = torch.tensor(np.repeat(1 / np.array(lengths) if chosen.aggregation == "sequence" else np.ones(len(lengths)), lengths))
    denominator = objectives.denominator(chosen.aggregation, sum(lengths), len(lengths), MAX_NEW_TOKENS)
    return (losses.loss_M * scale_M).sum() / denominator, losses


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    """Loss of a micro-batch, and its gradient with respect to every parameter of a small model, against the formulas."""
    options, model = CASES[name], SmallModel(3)
    held = model.numpy(model.embed, model.head)
    rest = columns(held, 4)
    logprobs_M, parameters = model.torch()
    value, losses = micro_batch_loss(options, logprobs_M, *rest)

    def formula(embed, head):
        return reference.batch_loss(model.numpy(embed, head), held, *rest, max_new_tokens=MAX_NEW_TOKENS, **options)

    assert value.item() == pytest.approx(formula(model.embed, model.head), rel=1e-12)
    if "clip" in name or "TIS" in name or "MIS" in name or "narrow" in name:
        assert losses.clipped_M.any() or losses.cut_M.any(), "the case must reach what it is about"
    value.backward()
    arrays, step = [model.embed, model.head], 1e-6
    for parameter, array in zip(parameters, arrays, strict=True):
        slopes = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            values = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * step
                values.append(formula(*(moved if other is array else other for other in arrays)))
            slopes[index] = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose(parameter.grad.numpy(), slopes, rtol=1e-5, atol=2e-8)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_close(name):
    """The same in the type that the trainer uses."""
    model = SmallModel(3)
    held = model.numpy(model.embed, model.head)
    rest = columns(held, 4)
    chosen = objectives.settings(Train(**CASES[name]))
    prox, behav, ref = (torch.tensor(np.concatenate(column), dtype=torch.float32) for column in rest[:3])
    found = token_losses(
        chosen,
        CASES[name].get("kl_coef", 0.0),
        logprobs_M=torch.tensor(np.concatenate(held), dtype=torch.float32),
        prox_logprobs_M=prox,
        behav_logprobs_M=behav,
        reference_logprobs_M=ref,
        staleness_M=torch.tensor(np.concatenate(rest[3])),
        advantages_M=torch.tensor(np.repeat(rest[4], LENGTHS), dtype=torch.float32),
        answers=Answers(LENGTHS),
    ).loss_M
    assert found.dtype == torch.float32
    expected = [reference.answer_losses(*one, **CASES[name]) for one in zip(held, held, *rest, strict=True)]
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=2e-5, atol=2e-6)


def test_registries_agree():
    assert list(SURROGATES) == list(objectives.OBJECTIVES) == list(typing.get_args(typing.get_type_hints(Train)["objective"]))
    for name, (old_policy, aggregation, low, high) in reference.DEFAULTS.items():
        chosen = objectives.settings(Train(objective=name))
        assert (chosen.old_policy, chosen.aggregation, chosen.clip_low, chosen.clip_high) == (old_policy, aggregation, low, high)
    assert {case["objective"] for case in CASES.values()} == set(SURROGATES)


# -- what must hold by itself ------------------------------------------------------------------------------------------

numbers = st.floats(-2, 2, allow_nan=False, width=32)


@st.composite
def answers_and_logprobs(draw):
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    total = sum(lengths)
    vectors = [torch.tensor(draw(st.lists(numbers, min_size=total, max_size=total)), dtype=torch.float64) for _ in range(3)]
    advantage_M = torch.tensor(draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths))), dtype=torch.float64).repeat_interleave(
        torch.tensor(lengths)
    )
    return lengths, *vectors, advantage_M


def losses_of(options, lengths, logprobs_M, prox_M, behav_M, advantages_M, **more):
    return token_losses(
        objectives.settings(Train(**options)),
        0.0,
        logprobs_M=logprobs_M,
        prox_logprobs_M=prox_M,
        behav_logprobs_M=behav_M,
        advantages_M=advantages_M,
        answers=Answers(lengths),
        **more,
    )


@given(answers_and_logprobs())
@settings(deadline=None, max_examples=60)
def test_decoupled_with_prox_equal_to_behav_is_ppo(case):
    lengths, theta, _, behav, advantage = case
    decoupled = losses_of({"objective": "decoupled"}, lengths, theta, behav, behav, advantage)
    assert torch.equal(decoupled.loss_M, losses_of({"objective": "ppo"}, lengths, theta, None, behav, advantage).loss_M)


@given(answers_and_logprobs())
@settings(deadline=None, max_examples=60)
def test_weight_is_never_skipped(case):
    """Halving pi_behav doubles every token's loss, also in the first mini-batch, where pi_prox is pi_theta (`prox_logprobs_M` None)."""
    lengths, theta, prox, behav, advantage = case
    for given_prox in (prox, None):
        once = losses_of({"objective": "decoupled"}, lengths, theta, given_prox, behav, advantage).loss_M
        twice = losses_of({"objective": "decoupled"}, lengths, theta, given_prox, behav - np.log(2), advantage).loss_M
        np.testing.assert_allclose(twice, 2 * once, rtol=1e-12)


@given(answers_and_logprobs(), st.floats(1.01, 4))
@settings(deadline=None, max_examples=60)
def test_dual_clip_only_acts_where_the_advantage_is_negative(case, dual):
    lengths, theta, _, behav, advantage = case
    answers = Answers(lengths)
    single = loss.ppo(theta, behav, advantage, Clip(0.2, 0.2), answers)
    double = loss.ppo(theta, behav, advantage, Clip(0.2, 0.2, dual), answers)
    changed = single.loss_M != double.loss_M
    assert ((advantage < 0) | ~changed).all()
    assert torch.equal(changed, (advantage < 0) & (-single.loss_M < dual * advantage))
    assert (double.loss_M <= single.loss_M).all()


@given(answers_and_logprobs())
@settings(deadline=None, max_examples=60)
def test_sequence_weights_are_products_of_token_weights(case):
    lengths, _, prox, behav, _ = case
    answers = Answers(lengths)
    tokens, _ = behaviour_weight(prox, behav, "full", "token", None, answers)
    whole, _ = behaviour_weight(prox, behav, "full", "sequence", None, answers)
    expected = torch.cat([part.prod().expand(len(part)) for part in tokens.split(lengths)])
    np.testing.assert_allclose(whole, expected, rtol=1e-9)


@given(answers_and_logprobs(), st.sampled_from(["token", "sequence"]), st.floats(0.5, 3))
@settings(deadline=None, max_examples=60)
def test_truncated_and_masked_weights(case, level, cap):
    """Both agree with the full weight up to the cap and count what lies above; masks stay in the denominator (tests/train/reference.py divides by all)."""
    lengths, _, prox, behav, _ = case
    answers = Answers(lengths)
    full, none_cut = behaviour_weight(prox, behav, "full", level, None, answers)
    truncated, cut = behaviour_weight(prox, behav, "truncated", level, cap, answers)
    masked, cut_too = behaviour_weight(prox, behav, "masked", level, cap, answers)
    assert not none_cut.any() and torch.equal(cut, cut_too)
    assert torch.equal(truncated[~cut], full[~cut]) and torch.equal(masked[~cut], full[~cut])
    assert (masked[cut] == 0).all()
    np.testing.assert_allclose(truncated[cut], cap, rtol=1e-12)
    assert (full[cut] > cap * (1 - 1e-9)).all()


def test_a_product_over_a_long_answer_does_not_overflow():
    prox, behav = torch.zeros(3000), torch.full((3000,), -1.0)
    answers = Answers([3000])
    assert torch.isinf(behaviour_weight(prox, behav, "full", "sequence", None, answers)[0]).all()
    for kind, expected in (("truncated", 2.0), ("masked", 0.0)):
        weight, cut = behaviour_weight(prox, behav, kind, "sequence", 2.0, answers)
        assert torch.allclose(weight, torch.tensor(expected)) and cut.all()


@given(answers_and_logprobs(), st.integers(2, 4))
@settings(deadline=None, max_examples=60)
def test_gspo_is_normalised_by_length(case, times):
    """An answer whose token ratios repeat `times` over has the same ratio and loss; answers of one token are PPO's."""
    lengths, theta, _, behav, advantage = case
    clip = Clip(0.2, 0.2)
    once = loss.gspo(theta, behav, advantage, clip, Answers(lengths))
    repeated = [torch.cat([part.repeat(times) for part in column.split(lengths)]) for column in (theta, behav, advantage)]
    again = loss.gspo(*repeated, clip, Answers([times * n for n in lengths]))
    for first, second, n in zip(once.loss_M.split(lengths), again.loss_M.split([times * n for n in lengths]), lengths, strict=True):
        np.testing.assert_allclose(second[:n], first, rtol=1e-9, atol=1e-12)
    alone = Answers([1] * len(theta))
    np.testing.assert_allclose(loss.gspo(theta, behav, advantage, clip, alone).loss_M, loss.ppo(theta, behav, advantage, clip, alone).loss_M, rtol=1e-12)


@given(answers_and_logprobs(), st.sampled_from(sorted(CASES)))
@settings(deadline=None, max_examples=100)
def test_any_order_of_answers_gives_the_same_losses(case, name):
    """Packing order does not matter: permuted answers have permuted losses."""
    lengths, theta, prox, behav, advantage = case
    more = {"staleness_M": torch.arange(len(theta)) % 3}
    options = {key: value for key, value in CASES[name].items() if not key.startswith("kl")}
    losses = losses_of(options, lengths, theta, prox, behav, advantage, **more).loss_M
    order = list(range(len(lengths)))[::-1]

    def permuted(column):
        parts = column.split(lengths)
        return torch.cat([parts[s] for s in order])

    more = {"staleness_M": permuted(more["staleness_M"])}
    again = losses_of(options, [lengths[s] for s in order], *(permuted(column) for column in (theta, prox, behav, advantage)), **more).loss_M
    np.testing.assert_allclose(again, permuted(losses), rtol=1e-12, atol=1e-14)


def test_loglinear_lies_between_the_policies():
    theta, behav = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0, -3.0])
    found = loglinear_prox(theta, behav, torch.tensor([0, 1, 3, 10**9]))
    np.testing.assert_allclose(found, [-3.0, -2.0, -1.5, -1.0], rtol=1e-6)
    assert not loglinear_prox(theta.requires_grad_(), behav, torch.tensor([0, 1, 3, 9])).requires_grad


def test_kl_estimators_estimate_the_divergence():
    """Averaged over pi_theta's own distribution, k1 and k3 are the KL itself, and the gradients of k1 and k2 are the KL's."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 1, 9), requires_grad=True)
    ref = torch.log_softmax(torch.tensor(rng.normal(0, 1, 9)), -1)
    log_p = torch.log_softmax(logits, -1)
    kl = (log_p.exp() * (log_p - ref)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3"):
        per_token = kl_penalty(log_p, ref, estimator)
        mean = (log_p.detach().exp() * per_token).sum()  # the samples are fixed: no gradient through their distribution
        if estimator != "k2":
            assert mean.item() == pytest.approx(kl.item(), rel=1e-12)
        if estimator != "k3":
            (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
            np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-14)
        assert (kl_penalty(ref, ref, estimator) == 0).all()


@pytest.mark.parametrize("name", ["decoupled", "ppo dual clip", "decoupled token MIS", "gspo wide, token mean", "cispo narrow", "grpo k3", "rloo"])
def test_diagnostics(name):
    """Sums over tokens against NumPy; clipped tokens against the gradient that is really gone, or changed."""
    options, model = CASES[name], SmallModel(5)
    held = model.numpy(model.embed, model.head)
    prox, behav, ref, staleness, advantage = columns(held, 6)
    theta = torch.tensor(np.concatenate(held), requires_grad=True)
    _, losses = micro_batch_loss(options, theta, prox, behav, ref, staleness, advantage)
    scaled, entropy = losses.loss_M.detach() / 3, torch.linspace(0, 1, sum(LENGTHS), dtype=torch.float64)
    current = torch.arange(sum(LENGTHS)) % 3 == 0
    ref_M = torch.tensor(np.concatenate(ref))
    sums, maxima = token_sums(losses, scaled, entropy, theta, torch.tensor(np.concatenate(behav)), ref_M, current)
    theta_N, behav_N, ref_N = (np.concatenate(column) for column in (held, behav, ref))
    old_N = np.concatenate(behav if objectives.settings(Train(**options)).old_policy == "behav" else prox)
    if options["objective"] == "gspo":
        u = np.concatenate([np.full(len(t), np.exp(np.mean(t - o))) for t, o in zip(held, np.split(old_N, np.cumsum(LENGTHS)[:-1]), strict=True)])
    else:
        u = np.exp(theta_N - old_N)
    r, q = np.exp(theta_N - behav_N), np.exp(ref_N - theta_N)
    cap = options.get("behav_cap", 2.0) if options.get("behav_weight") == "masked" else np.inf
    (gradient,) = torch.autograd.grad(losses.loss_M.sum(), theta)
    answer_gradient = gradient.numpy()
    advantage_N = np.repeat(advantage, LENGTHS)
    if options["objective"] in ("cispo", "rloo"):
        clipped = np.zeros(len(u), bool) if options["objective"] == "rloo" else (u < 0.9) | (u > 1.2)
    elif options.get("kl_coef"):
        clipped = np.where(advantage_N > 0, u > 1.2, u < 0.8)
    else:
        clipped = (answer_gradient == 0) & (np.exp(np.concatenate(prox) - behav_N) <= cap)
    expected = {
        "tokens": len(u),
        "loss": scaled.sum(),
        "entropy": entropy.sum(),
        "ratio": u.sum(),
        "clipped": clipped.sum(),
        "prox_behav": np.exp(old_N - behav_N).sum(),
        "cut": (np.exp(old_N - behav_N) > cap).sum(),
        "kl_behav": (r - 1 - np.log(r)).sum(),
        "kl_ref": (q - 1 - np.log(q)).sum(),
        "weight": r.sum(),
        "weight_squared": (r**2).sum(),
        "gap_tokens": current.sum(),
        "gap": np.abs(theta_N - behav_N)[current.numpy()].sum(),
    }
    if name == "decoupled token MIS":  # where the mask has silenced a token, its gradient cannot tell whether the clip acted as well
        keep = [k for k in expected if k != "clipped"]
    else:
        keep = list(expected)
    assert list(expected) == list(SUMS)
    found = dict(zip(SUMS, sums.tolist(), strict=True))
    np.testing.assert_allclose([found[k] for k in keep], [float(expected[k]) for k in keep], rtol=1e-9)
    assert len(MAXIMA) == 2
    np.testing.assert_allclose(maxima, [u.max(), np.exp(old_N - behav_N).max()], rtol=1e-9)
