"""Counter-based random numbers and inverse-CDF sampling: a sample is a function of its logits and (seed, ticket, sample, position), never of its batch mates.

One uniform number per token is a hash of (stream, position); the position is all the state a sampler has, so an interrupted or requeued answer goes on with
the numbers it would have drawn anyway. The hash is SplitMix64 (Steele, Lea, Flood 2014): output number `position` of the generator seeded with `stream`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, ticket: int, sample: int) -> int:
    """64-bit key of the random numbers of one answer: sample `sample` of group `ticket` in a run with this seed."""
    key = 0
    for part in (seed, ticket, sample):
        key = _mix((key + _GOLDEN + (part & _MASK)) & _MASK)
    return key


def uniforms(streams_n: np.ndarray, positions_n: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1 - 2^-52], one per (stream, position). streams_n: uint64; positions_n: non-negative integers (token number in the answer)."""
    z = streams_n + (positions_n.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(12)) * 2.0**-52  # 52 bits: u * total stays below total in float64, so the search below cannot run off the end


def sample_tokens(logits_nV: Tensor, uniforms_n: Tensor, temperatures: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature) by inverting its cumulative sum.

    logits_nV: float32. uniforms_n: float64. temperatures: float32 [n], None when all are 1; 0 takes the most likely token.
    Returns tokens int64 [n] and their log-probabilities float32 [n] (at temperature 1 where temperature is 0). A drawn token has non-zero probability.
    """
    if temperatures is not None:
        divisor_n = torch.from_numpy(np.where(temperatures == 0, np.float32(1), temperatures)).to(logits_nV.device)
        logits_nV = logits_nV / divisor_n[:, None]
    logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
    cumulative_nV = torch.cumsum(logprobs_nV.exp(), dim=-1, dtype=torch.float64)
    thresholds_n = uniforms_n * cumulative_nV[:, -1]
    tokens_n1 = torch.searchsorted(cumulative_nV, thresholds_n[:, None], right=True)  # first token whose cumulative sum exceeds the threshold
    if temperatures is not None and (temperatures == 0).any():
        greedy_n = torch.from_numpy(temperatures == 0).to(logits_nV.device)
        tokens_n1 = torch.where(greedy_n[:, None], logits_nV.argmax(dim=-1, keepdim=True), tokens_n1)
    return tokens_n1.squeeze(1), logprobs_nV.gather(1, tokens_n1).squeeze(1)
