"""Random models of 1 M and 4 M parameters with a character tokenizer and problems for them: what trainer.py and peers.py run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from areal_hpc.config import Data
from areal_hpc.data.datasets import load_problems
from areal_hpc.models import hf, tokenizer
from areal_hpc.models.decoder import Decoder
from areal_hpc.models.decoder_config import DecoderConfig

SHAPES = {"1M": (128, 4, 384), "4M": (256, 5, 768)}
"""name -> width, layers, width of the feed-forward layers; heads of 32, half as many for keys and values."""


def write_model(folder: Path, size: str, *, stops: bool = True) -> Path:
    """FOLDER/problems.jsonl (sums of two digits) and FOLDER/model, a Qwen2 model with random weights: near-uniform over its tokens but for the
    one that ends an answer, whose probability is 5 % everywhere (19 of 64 tokens on average), or practically zero without `stops`.
    """
    rng = np.random.default_rng(0)
    pairs = [(int(a), int(b)) for a, b in rng.integers(10, 100, (400, 2))]
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a, b in dict.fromkeys(pairs)]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    tokens = tokenizer.build(load_problems(Data(path=str(folder / "problems.jsonl"))), "\n")
    width, layers, intermediate = SHAPES[size]
    shape = DecoderConfig(
        model_type="qwen2",
        vocab_size=tokens.vocab_size,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    decoder = hf.build_random(shape, seed=0)
    stop_probability = 0.05 if stops else 1e-9
    set_stop_logit(decoder, tokens.eos_token_id, math.log((tokens.vocab_size - 1) * stop_probability / (1 - stop_probability)))
    hf.save(folder / "model", shape.to_hf(), decoder.named_parameters(), tokens.files)
    return folder / "model"


@torch.no_grad()
def set_stop_logit(decoder: Decoder, token: int, logit: float) -> None:
    """Make one token's logit about the same everywhere: channel 0 of every state gets one positive value (a bias of the values, written by one column of o_proj and by
    nothing else) that outweighs the others, so that it is sqrt(width) after the last norm, and only that token's row has an entry there."""
    embedding = decoder.model.embed_tokens.weight
    embedding[:, 0] = 0
    embedding[token, 0] = logit / decoder.config.hidden_size**0.5
    for layer in decoder.model.layers:
        layer.self_attn.v_proj.weight[0] = 0
        layer.self_attn.v_proj.bias[0] = 1
        layer.self_attn.o_proj.weight[0] = 0
        layer.self_attn.o_proj.weight[0, 0] = 1
        layer.mlp.down_proj.weight[0] = 0
