"""Counter-based random numbers and inverse-CDF sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_hpc.rollout.engines.sampling import sample_tokens, stream_key, uniforms

CHI_SQUARE_999 = {7: 24.3, 15: 37.7}
"""Upper 0.1 % points by degrees of freedom; seeds are fixed, so a pass is a pass for ever."""


def splitmix64(state: int, skip: int) -> int:
    """Output number `skip` of the published generator, stepped one by one in Python integers."""
    for _ in range(skip + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
    return z


def test_uniforms_are_splitmix64() -> None:
    assert splitmix64(1234567, 0) == 6457827717110365317, "published test vector"
    streams = np.array([0, 1234567, 2**64 - 1, stream_key(3, 5, 7)], np.uint64)
    for position in (0, 1, 17, 200):
        found = uniforms(streams, np.full(4, position))
        assert found.tolist() == [(splitmix64(int(stream), position) >> 12) / 2**52 for stream in streams]


def test_stream_keys_are_distinct_and_stable() -> None:
    keys = {stream_key(seed, ticket, sample) for seed in range(4) for ticket in range(200) for sample in range(16)}
    assert len(keys) == 4 * 200 * 16
    assert stream_key(0, 1, 2) != stream_key(0, 2, 1)


@pytest.mark.parametrize("by", ["position", "sample", "ticket"])
def test_uniforms_are_uniform_along_each_axis(by: str) -> None:
    count = 16000
    if by == "position":
        drawn = uniforms(np.full(count, stream_key(1, 2, 3), np.uint64), np.arange(count))
    else:
        keys = [stream_key(1, 0, k) if by == "sample" else stream_key(1, k, 0) for k in range(count)]
        drawn = uniforms(np.array(keys, np.uint64), np.zeros(count, np.int64))
    observed = np.histogram(drawn, bins=16, range=(0, 1))[0]
    assert ((observed - count / 16) ** 2 / (count / 16)).sum() < CHI_SQUARE_999[15]
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(count)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_distribution(temperature: float) -> None:
    count = 20000
    logits_V = torch.tensor([0.0, 1.0, -1.0, 0.3, 2.0, -0.5, 0.7, 1.3])
    numbers = torch.from_numpy(uniforms(np.full(count, stream_key(0, 0, 0), np.uint64), np.arange(count)))
    tokens, logprobs = sample_tokens(logits_V.expand(count, -1), numbers, np.full(count, temperature, np.float32))
    expected_V = np.exp(logits_V.double().numpy() / temperature)
    expected_V /= expected_V.sum()
    observed_V = np.bincount(tokens.numpy(), minlength=8)
    assert ((observed_V - count * expected_V) ** 2 / (count * expected_V)).sum() < CHI_SQUARE_999[7]
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected_V)[tokens.numpy()], atol=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    logits_nV = torch.full((6, 5), -torch.inf)
    logits_nV[:, [1, 3]] = 0.0
    ends = torch.tensor([0.0, 1 - 2.0**-52, 0.5 - 2.0**-52, 0.5, 2.0**-52, 0.75], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits_nV, ends)
    assert tokens.tolist() == [1, 3, 1, 3, 1, 3]
    np.testing.assert_allclose(logprobs.numpy(), np.log(0.5), atol=1e-6)


def test_the_last_token_survives_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_nV = torch.randn(500, 4096, generator=generator) * 5
    tokens, _ = sample_tokens(logits_nV, torch.full((500,), 1 - 2.0**-52, dtype=torch.float64))
    assert tokens.max() < 4096


def test_zero_temperature_is_greedy_and_mixes_with_others() -> None:
    logits_nV = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
    tokens, logprobs = sample_tokens(logits_nV, torch.tensor([0.999, 0.999, 0.0], dtype=torch.float64), np.array([0, 1, 0], np.float32))
    assert tokens.tolist() == [1, 2, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits_nV, -1).gather(1, tokens[:, None]).squeeze(1))
