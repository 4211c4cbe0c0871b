"""The decoder against transformers: log-probabilities, gradients, packing, chunked scores. Shapes as in models/decoder.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import ConfigError
from areal_hpc.models import scores as scores_module
from areal_hpc.models.decoder import Decoder, DecoderConfig, Packed, TokenScores
from areal_hpc.models.hf import copy_weights
from areal_hpc.models.packed import BUCKET_RATIO, BUCKET_SLACK_TOKENS, AttentionLayout
from tests.models.tiny import ARCHITECTURES, VOCAB_SIZE, reference_model, weights_of

LENGTHS, PROMPTS = (37, 5, 90, 2, 41, 17, 1), (9, 1, 30, 1, 41, 3, 1)  # the last but two has no response; the last packs to nothing
TEMPERATURE = 0.8


def sequences(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length, dtype=np.int32) for length in LENGTHS]


def our_decoder(reference: transformers.PreTrainedModel) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    copy_weights(decoder, weights_of(reference))
    return decoder


def reference_logprobs(model: transformers.PreTrainedModel, tokens: np.ndarray, prompt: int, temperature: float = TEMPERATURE) -> torch.Tensor:
    tokens_T = torch.from_numpy(tokens.astype(np.int64))
    logprobs_TV = torch.log_softmax(model(tokens_T[None]).logits[0] / temperature, dim=-1)
    return logprobs_TV[prompt - 1 : -1].gather(1, tokens_T[prompt:, None]).squeeze(1)


def scores(decoder: Decoder, temperature: float = TEMPERATURE) -> TokenScores:
    return decoder(Packed.build(sequences(), PROMPTS), temperature=temperature)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_gradients_equal_transformers(name: str) -> None:
    reference = reference_model(name)
    decoder = our_decoder(reference)
    found_M = scores(decoder).logprobs_M
    expected_M = torch.cat([reference_logprobs(reference, tokens, prompt) for tokens, prompt in zip(sequences(), PROMPTS, strict=True)])
    assert expected_M.std() > 0.5, "the reference must be far from uniform, or the comparison says little"
    torch.testing.assert_close(found_M, expected_M, atol=1e-5, rtol=0)
    weight_M = torch.linspace(-1, 1, len(found_M))
    (found_M * weight_M).sum().backward()
    (expected_M * weight_M).sum().backward()
    expected = {parameter_name: parameter.grad for parameter_name, parameter in reference.named_parameters()}
    assert {parameter_name for parameter_name, _ in decoder.named_parameters()} == set(expected)
    for parameter_name, parameter in decoder.named_parameters():
        scale = expected[parameter_name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[parameter_name], atol=2e-5 * scale, rtol=1e-4, msg=lambda text, n=parameter_name: f"{n}: {text}")


def test_packed_equals_one_by_one() -> None:
    decoder = our_decoder(reference_model("qwen2-tied"))
    together = scores(decoder)
    parts = together.logprobs_M.split([length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)])
    for tokens, prompt, part in zip(sequences(), PROMPTS, parts, strict=True):
        if len(tokens) > 1:
            alone = decoder(Packed.build([tokens], [prompt]), temperature=TEMPERATURE)
            torch.testing.assert_close(part, alone.logprobs_M, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("changed", range(len(LENGTHS) - 1))
def test_no_token_sees_another_sequence(changed: int) -> None:
    decoder = our_decoder(reference_model("llama3-rope"))
    before, after = sequences(), sequences()
    after[changed] = (after[changed] + 1) % VOCAB_SIZE
    batches = [Packed.build(tokens, PROMPTS) for tokens in (before, after)]
    with torch.no_grad():
        first, second = (decoder(batch, temperature=1.0).logprobs_M.split(batch.response_lengths) for batch in batches)
    for k, (old, new) in enumerate(zip(first, second, strict=True)):
        assert (len(old) == 0) or torch.equal(old, new) == (k != changed)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    reference = reference_model("qwen3")
    tokens = sequences()[0]
    found_M = our_decoder(reference)(Packed.build([tokens], [9]), temperature=TEMPERATURE).entropy_M
    probabilities_TV = torch.softmax(reference(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0] / TEMPERATURE, dim=-1)
    torch.testing.assert_close(found_M, torch.special.entr(probabilities_TV).sum(-1)[8:-1].detach(), atol=1e-5, rtol=1e-5)
    assert not found_M.requires_grad


def test_tiles_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for plain_logits in (1 << 22, 0):
        monkeypatch.setattr(scores_module, "PLAIN_LOGITS", plain_logits)
        monkeypatch.setattr(scores_module, "TILE_WORDS", 20)
        decoder = our_decoder(reference_model("mistral"))
        found = scores(decoder)
        found.logprobs_M.square().sum().backward()
        results.append((found.logprobs_M.detach(), found.entropy_M, *(parameter.grad for parameter in decoder.parameters())))
    for whole, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, whole, atol=2e-5 * max(1.0, whole.abs().max().item()), rtol=0)


def test_bfloat16_stays_near_float32() -> None:
    decoder = our_decoder(reference_model("qwen3"))
    exact_M = scores(decoder).logprobs_M
    rounded_M = scores(decoder.to(torch.bfloat16)).logprobs_M
    assert rounded_M.dtype == torch.float32
    assert (rounded_M - exact_M).abs().median() < 0.05


def test_context_is_bounded() -> None:
    decoder = our_decoder(reference_model("qwen2-tied"))
    with pytest.raises(ValueError, match="sequence of 257 tokens exceeds the model's context of 256"):
        decoder(Packed.build([np.zeros(258, np.int64)], [1]), temperature=1.0)


@given(st.lists(st.integers(0, 120), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_layout_is_a_permutation_with_little_padding(lengths: list[int]) -> None:
    layout = AttentionLayout.build(lengths)
    num_tokens = sum(lengths)
    assert torch.equal(layout.pad_index_P[layout.unpad_index_N], torch.arange(num_tokens))
    assert sum(bucket.num for bucket in layout.buckets) == sum(length > 0 for length in lengths)
    assert len(layout.pad_index_P) == sum(bucket.num_padded for bucket in layout.buckets)
    assert len(layout.pad_index_P) <= max(BUCKET_RATIO * num_tokens, num_tokens + BUCKET_SLACK_TOKENS * len(lengths))
    owner_N = np.repeat(np.arange(len(lengths)), lengths)
    place = 0
    for bucket in layout.buckets:  # each row of a bucket holds one sequence, in order, padded with its own last token
        rows = layout.pad_index_P[place : place + bucket.num_padded].view(bucket.num, bucket.length).numpy()
        place += bucket.num_padded
        for row in rows:
            assert len(set(owner_N[row])) == 1
            assert np.array_equal(row, np.minimum(row[0] + np.arange(bucket.length), row[-1]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_config_round_trip(name: str) -> None:
    config = DecoderConfig.from_hf(SHAPE_OF[name])
    assert DecoderConfig.from_hf(config.to_hf()) == config
    again = transformers.AutoConfig.for_model(**config.to_hf())
    assert DecoderConfig.from_hf(again.to_dict()) == config


SHAPE_OF = {name: reference_model(name).config.to_dict() for name in ARCHITECTURES}


def test_old_rope_keys_are_read() -> None:
    old = dict(SHAPE_OF["llama3-rope"])
    rope = old.pop("rope_parameters")
    old |= {"rope_theta": rope["rope_theta"], "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"}}
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(SHAPE_OF["llama3-rope"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama"),
        ({"attention_bias": True}, "attention_bias=True is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported for llama"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_hf(SHAPE_OF["llama3-rope"] | change)


def test_sliding_window_bounds_the_context() -> None:
    windowed = DecoderConfig.from_hf(SHAPE_OF["mistral"] | {"sliding_window": 64})
    assert windowed.max_context_tokens == 64
    assert DecoderConfig.from_hf(windowed.to_hf()) == windowed
    unused = DecoderConfig.from_hf(SHAPE_OF["qwen2-tied"] | {"sliding_window": 64, "use_sliding_window": False})
    assert unused.max_context_tokens == 256
