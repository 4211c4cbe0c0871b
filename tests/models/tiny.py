"""Tiny random models of every supported architecture, built by transformers, for tests of the decoder and of the engine."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 48
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so short that the wavelengths of a head of 16 fall in all three ranges
}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2.5-7-to-1": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "hidden_size": 56,
        "head_dim": 8,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "llama3.2-tied": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE | {"factor": 32.0}, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "llama-no-groups": {"model_type": "llama", "num_key_value_heads": 4},
    # as SmolLM2's: Llama with tied embeddings, heads in threes, rotary base 1e5
    "smollm2": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "hidden_size": 72,
        "head_dim": 8,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.041666666666666664,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 6, "num_key_value_heads": 1},
    "mistral-window": {"model_type": "mistral", "sliding_window": 200, "tie_word_embeddings": True},
}


def reference_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 transformers model whose weights are large enough for attention, norms and biases to matter (entropies well below uniform)."""
    options = SHAPE | ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 1.0 if "norm" in parameter_name else 0.25
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale * 0.5 + (1.0 if "norm" in parameter_name else 0.0))
    return model


def weights_of(model: transformers.PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Named weights, tied ones once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]
