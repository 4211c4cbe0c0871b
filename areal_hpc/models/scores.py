"""Log-probabilities and entropies of the scored tokens, without ever holding a logit for every token and every word.

    logits = hidden @ head / temperature,   logprob = logits[target] - lse,   lse = log sum exp logits,   entropy = lse - sum p logits

Few logits (`PLAIN_LOGITS`; a small vocabulary) are computed in one go and kept for the backward: nothing is computed twice. Otherwise they are computed in tiles
of some tokens by some words, forward with a running maximum and sum (online log-sum-exp, arXiv 1805.02867), and again in the backward, where each tile adds its
part to the gradients of hidden states and head and is gone. Memory beyond the two gradients: a few tiles, whatever the number of tokens and words.

Shapes: M scored tokens, V vocabulary, d hidden size, m and v tokens and words of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PLAIN_LOGITS = 1 << 22
"""Logits (float32: 16 MiB) up to which they are kept for the backward."""
TILE_TOKENS = 1024
TILE_WORDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What the loss needs of each scored token, in the order of the sequences."""

    logprobs_M: Tensor
    """float32, with gradient: log-probability of the target under logits / temperature."""
    entropy_M: Tensor
    """float32, without gradient: entropy of that distribution in nats."""


def token_scores(hidden_Md: Tensor, head_Vd: Tensor, targets_M: Tensor, temperature: float) -> TokenScores:
    """Scores of `targets_M` (int64) under softmax(hidden @ head^T / temperature). Products are in the type of `hidden_Md`, everything behind them in float32."""
    if len(targets_M) * len(head_Vd) <= PLAIN_LOGITS:
        return _plain(hidden_Md, head_Vd, targets_M, 1.0 / temperature)
    logprobs_M, entropy_M = _TiledScores.apply(hidden_Md, head_Vd, targets_M, 1.0 / temperature)
    return TokenScores(logprobs_M=logprobs_M, entropy_M=entropy_M)


def _plain(hidden_Md: Tensor, head_Vd: Tensor, targets_M: Tensor, inv_temperature: float) -> TokenScores:
    logits_MV = F.linear(hidden_Md, head_Vd).float()
    log_softmax_MV = F.log_softmax(logits_MV if inv_temperature == 1.0 else logits_MV * inv_temperature, dim=-1)
    logprobs_M = log_softmax_MV.gather(-1, targets_M[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy_M = -(log_softmax_MV.exp() * log_softmax_MV).sum(-1)
    return TokenScores(logprobs_M=logprobs_M, entropy_M=entropy_M)


class _TiledScores(torch.autograd.Function):
    """(logprobs_M, entropy_M) from tiles; gradient through the log-probabilities only."""

    @staticmethod
    def forward(ctx, hidden_Md: Tensor, head_Vd: Tensor, targets_M: Tensor, inv_temperature: float):  # type: ignore[no-untyped-def, override]
        blank_M = hidden_Md.new_zeros(len(targets_M), dtype=torch.float32)
        peak_M, sum_M, weighted_M, target_M = torch.full_like(blank_M, -torch.inf), blank_M.clone(), blank_M.clone(), blank_M.clone()
        for words, tokens in _tiles(len(head_Vd), len(targets_M)):
            logits_mv = _logits(hidden_Md[tokens], head_Vd[words], inv_temperature)
            column_m, inside_m = _columns(targets_M[tokens], words)
            target_M[tokens] += logits_mv.gather(1, column_m[:, None]).squeeze(1) * inside_m
            peak_m = torch.maximum(peak_M[tokens], logits_mv.amax(1))
            shrink_m = torch.exp(peak_M[tokens] - peak_m)  # what was summed under a lower maximum
            exp_mv = (logits_mv - peak_m[:, None]).exp_()
            sum_M[tokens] = sum_M[tokens] * shrink_m + exp_mv.sum(1)
            weighted_M[tokens] = weighted_M[tokens] * shrink_m + exp_mv.mul_(logits_mv).sum(1)
            peak_M[tokens] = peak_m
        lse_M = peak_M + sum_M.log()
        ctx.save_for_backward(hidden_Md, head_Vd, targets_M, lse_M)
        ctx.inv_temperature = inv_temperature
        entropy_M = lse_M - weighted_M / sum_M
        ctx.mark_non_differentiable(entropy_M)
        return target_M - lse_M, entropy_M

    @staticmethod
    def backward(ctx, grad_M: Tensor, _entropy):  # type: ignore[no-untyped-def, override]
        hidden_Md, head_Vd, targets_M, lse_M = ctx.saved_tensors
        grad_M = grad_M.float() * ctx.inv_temperature
        grad_hidden_Md = torch.zeros_like(hidden_Md, dtype=torch.float32)
        grad_head_Vd = torch.empty_like(head_Vd)
        for words, tiles in _tiles_by_words(len(head_Vd), len(targets_M)):
            grad_head_vd = torch.zeros_like(head_Vd[words], dtype=torch.float32)
            for tokens in tiles:
                hidden_md = hidden_Md[tokens]
                grad_mv = _logits(hidden_md, head_Vd[words], ctx.inv_temperature)
                grad_mv.sub_(lse_M[tokens, None]).exp_().mul_(-grad_M[tokens, None])  # d logprob / d logits = (one at the target) - p
                column_m, inside_m = _columns(targets_M[tokens], words)
                grad_mv.scatter_add_(1, column_m[:, None], (grad_M[tokens] * inside_m)[:, None])
                cast_mv = grad_mv.to(hidden_Md.dtype)
                _add_product(grad_hidden_Md[tokens], cast_mv, head_Vd[words])
                _add_product(grad_head_vd, cast_mv.t(), hidden_md)
            grad_head_Vd[words] = grad_head_vd  # rounded to the type of the head once, after all tokens
        return grad_hidden_Md.to(hidden_Md.dtype), grad_head_Vd, None, None


def _logits(hidden_md: Tensor, head_vd: Tensor, inv_temperature: float) -> Tensor:
    return (hidden_md @ head_vd.t()).float().mul_(inv_temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in place; the product is rounded to its own type only where that is not float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _columns(targets_m: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """(column of each target in the tile, 0 where it is not in it; whether it is in it)."""
    inside_m = (targets_m >= words.start) & (targets_m < words.stop)
    return (targets_m - words.start) * inside_m, inside_m


def _tiles_by_words(num_words: int, num_tokens: int) -> Iterator[tuple[slice, list[slice]]]:
    tokens = _cut(num_tokens, TILE_TOKENS)
    for words in _cut(num_words, TILE_WORDS):
        yield words, tokens


def _tiles(num_words: int, num_tokens: int) -> Iterator[tuple[slice, slice]]:
    for words, tiles in _tiles_by_words(num_words, num_tokens):
        for tokens in tiles:
            yield words, tokens


def _cut(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]
