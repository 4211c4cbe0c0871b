"""Model FLOPs of a training step: what the arithmetic needs, whatever a program computes twice (definition of MFU in arXiv 2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_hpc.models.decoder_config import DecoderConfig


def matrix_parameters(config: DecoderConfig) -> int:
    """Parameters that each token is multiplied with: all matrices of the layers and the head, without embedding look-up, norms and biases."""
    d, queries, keys = config.hidden_size, config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = d * queries + 2 * d * keys + queries * d + 3 * d * config.intermediate_size
    return config.num_hidden_layers * layer + config.vocab_size * d


def train_flops(config: DecoderConfig, lengths_S: Sequence[int] | np.ndarray) -> float:
    """FLOPs of forward and backward on sequences of these lengths (tokens):

        6 P sum(L)  +  layers * 6 * H * D * sum(L (L + 1))

    P = `matrix_parameters`; a multiply-add is 2 FLOPs and the backward twice the forward. Attention: a token at place t meets t keys, 4 H D FLOPs each
    (scores and mixture) forward, 12 H D with the backward; places add up to L (L + 1) / 2. The recomputation of pi_prox or of activations is not counted.
    """
    lengths_S = np.asarray(lengths_S, np.float64)
    width = config.num_attention_heads * config.head_dim
    return float(6 * matrix_parameters(config) * lengths_S.sum() + config.num_hidden_layers * 6 * width * (lengths_S * (lengths_S + 1)).sum())


def attention_crossover_tokens(config: DecoderConfig) -> float:
    """Length at which causal attention costs as much as the layers' matrices: `crossover_tokens` of `train.batching.estimated_cost`.

    6 P_layer L = 6 H D L^2 gives P_layer / (H D); 12 d without grouped heads and with intermediate size 8/3 d.
    """
    d, width = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return (2 * d * width + 2 * d * keys + 3 * d * config.intermediate_size) / width
