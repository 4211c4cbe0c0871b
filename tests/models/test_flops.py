"""Model FLOPs against those that torch counts for a transformers model with attention written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.flops import attention_crossover_tokens, matrix_parameters, train_flops
from areal_hpc.train.batching import estimated_cost
from tests.models.tiny import ARCHITECTURES, reference_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_of_the_matrices(name: str) -> None:
    """`eager` computes attention to the future as well: L * L pairs where we count L (L + 1) / 2."""
    reference, length = reference_model(name), 40
    config = DecoderConfig.from_hf(reference.config.to_dict())
    with FlopCounterMode(display=False) as counted:
        reference(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    attention = train_flops(config, [length]) - 6 * matrix_parameters(config) * length
    expected = 6 * matrix_parameters(config) * length + attention * 2 * length / (length + 1)
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)  # the rotary frequencies are a product, too
    assert train_flops(config, [length, 7]) == train_flops(config, [length]) + train_flops(config, [7])


def test_attention_costs_as_much_as_the_matrices_at_the_crossover() -> None:
    config = DecoderConfig.from_hf(reference_model("qwen3-untied").config.to_dict())
    length = attention_crossover_tokens(config)
    layers = 6 * (matrix_parameters(config) - config.vocab_size * config.hidden_size) * length
    width = config.num_attention_heads * config.head_dim
    assert config.num_hidden_layers * 6 * width * length**2 == pytest.approx(layers)
    assert estimated_cost([length], length) == pytest.approx(2 * length)  # type: ignore[arg-type]
