"""Tiled log-probabilities and entropies against the closed form in float64, in value, gradient and memory. Shapes as in models/scores.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_hpc.models import scores
from areal_hpc.models.scores import token_scores


@pytest.fixture(scope="module")
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "PLAIN_LOGITS", 0)
        patch.setattr(scores, "TILE_TOKENS", 7)
        patch.setattr(scores, "TILE_WORDS", 16)
        yield


def problem(num_tokens: int, num_words: int, size: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_Md = torch.randn(num_tokens, size, generator=generator) * scale
    head_Vd = torch.randn(num_words, size, generator=generator)
    targets_M = torch.randint(0, num_words, (num_tokens,), generator=generator)
    return hidden_Md.requires_grad_(), head_Vd.requires_grad_(), targets_M, torch.randn(num_tokens, generator=generator)


def exact(hidden_Md: Tensor, head_Vd: Tensor, targets_M: Tensor, weight_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and gradients of their weighted sum, in float64: d = weight (onehot - p) / temperature."""
    hidden, head = hidden_Md.detach().double(), head_Vd.detach().double()
    log_p = torch.log_softmax(hidden @ head.T / temperature, -1)
    onehot = torch.nn.functional.one_hot(targets_M, len(head)).double()
    gradient = weight_M.double()[:, None] * (onehot - log_p.exp()) / temperature
    return log_p.gather(1, targets_M[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1), gradient @ head, gradient.T @ hidden


def test_both_paths_agree_at_their_border(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for plain_logits in (50 * 40, 50 * 40 - 1):
        monkeypatch.setattr(scores, "PLAIN_LOGITS", plain_logits)
        monkeypatch.setattr(scores, "TILE_WORDS", 16)
        hidden_Md, head_Vd, targets_M, weight_M = problem(50, 40, 8)
        found = token_scores(hidden_Md, head_Vd, targets_M, 0.8)
        (found.logprobs_M * weight_M).sum().backward()
        results.append((found.logprobs_M.detach(), found.entropy_M, hidden_Md.grad, head_Vd.grad))
        assert (type(found.logprobs_M.grad_fn).__name__ == "_TiledScoresBackward") == (plain_logits < 50 * 40)
    for plain, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(2, 70), st.sampled_from([0.6, 1.0, 1.7]), st.sampled_from([1.0, 6.0]), st.integers(0, 9))
def test_tiles_equal_the_closed_form(num_tokens: int, num_words: int, temperature: float, scale: float, seed: int) -> None:
    hidden_Md, head_Vd, targets_M, weight_M = problem(num_tokens, num_words, 5, seed, scale)
    found = token_scores(hidden_Md, head_Vd, targets_M, temperature)
    (found.logprobs_M * weight_M).sum().backward()
    logprobs_M, entropy_M, grad_hidden_Md, grad_head_Vd = exact(hidden_Md, head_Vd, targets_M, weight_M, temperature)
    torch.testing.assert_close(found.logprobs_M.double(), logprobs_M, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy_M.double(), entropy_M, atol=5e-5, rtol=1e-5)
    assert hidden_Md.grad is not None and head_Vd.grad is not None
    torch.testing.assert_close(hidden_Md.grad.double(), grad_hidden_Md, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(head_Vd.grad.double(), grad_head_Vd, atol=5e-5, rtol=1e-4)
    assert not found.entropy_M.requires_grad


@pytest.mark.usefixtures("small_tiles")
def test_logits_of_thousands_stay_finite() -> None:
    hidden_Md, head_Vd, targets_M, weight_M = problem(9, 50, 4, scale=2000.0)
    found = token_scores(hidden_Md, head_Vd, targets_M, 1.0)
    (found.logprobs_M * weight_M).sum().backward()
    logprobs_M, entropy_M, *_ = exact(hidden_Md, head_Vd, targets_M, weight_M, 1.0)
    torch.testing.assert_close(found.logprobs_M.double(), logprobs_M, atol=0.01, rtol=1e-5)
    torch.testing.assert_close(found.entropy_M.double(), entropy_M, atol=0.01, rtol=0)
    assert hidden_Md.grad is not None and hidden_Md.grad.isfinite().all()


@pytest.mark.usefixtures("small_tiles")
def test_bfloat16_is_as_good_as_its_products() -> None:
    """The head's gradient is rounded once, not once per tile: its error stays that of bfloat16 products."""
    hidden_Md, head_Vd, targets_M, weight_M = problem(200, 40, 16)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden_Md, head_Vd)]
    found = token_scores(low[0], low[1], targets_M, 1.0)
    assert found.logprobs_M.dtype == torch.float32
    (found.logprobs_M * weight_M).sum().backward()
    logprobs_M, _, grad_hidden_Md, grad_head_Vd = exact(low[0], low[1], targets_M, weight_M, 1.0)
    assert (found.logprobs_M - logprobs_M).abs().max() < 0.1
    for tensor, expected in zip(low, (grad_hidden_Md, grad_head_Vd), strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == torch.bfloat16
        assert (tensor.grad.double() - expected).norm() / expected.norm() < 0.02


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("num_tokens", [200, 3200])
def test_no_tensor_of_tokens_by_words_exists(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size, num_words = 4, 900
    monkeypatch.setattr(scores, "PLAIN_LOGITS", 0)
    monkeypatch.setattr(scores, "TILE_TOKENS", 64)
    monkeypatch.setattr(scores, "TILE_WORDS", 256)
    hidden_Md, head_Vd, targets_M, weight_M = problem(num_tokens, num_words, size)
    with LargestAllocation() as seen:
        (token_scores(hidden_Md, head_Vd, targets_M, 1.0).logprobs_M * weight_M).sum().backward()
    assert seen.largest == max(num_tokens * size, num_words * size, scores.TILE_TOKENS * scores.TILE_WORDS)
    assert math.isfinite(float(head_Vd.grad.sum()))  # type: ignore[union-attr]
