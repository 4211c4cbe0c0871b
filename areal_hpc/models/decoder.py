"""A decoder of the Llama / Qwen family on packed sequences, with Hugging Face's parameter names.

    x = embed(tokens)
    for each layer:  x = x + attention(rms_norm(x));  x = x + down(silu(gate(h)) * up(h)),  h = rms_norm(x)
    logits = rms_norm(x) @ head,  only at the places whose next token is scored
    logprob = log_softmax(logits / temperature)[target]

Trainer and embedded engine share this arithmetic (`rope_tables`, `rms_norm`), so that both compute the same numbers; tests compare it with `transformers`.
Shapes: N packed tokens, M scored tokens, H query heads, G key/value heads, D head size, d hidden size, V vocabulary.
Precision: layers compute in the type of their parameters (FSDP casts them); norms, rotation and log-probabilities are float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.packed import Attend, AttentionLayout, Packed, causal_attention
from areal_hpc.models.scores import TokenScores, token_scores

__all__ = ["Decoder", "DecoderConfig", "Packed", "TokenScores", "inverse_frequencies", "rms_norm", "rope_tables"]


def inverse_frequencies(config: DecoderConfig, device: torch.device | str) -> Tensor:
    """float32 [D/2]: radians per position of each rotated pair (RoPE, arXiv 2104.09864; scaling of Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)  # turns over the original context
    smooth = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


def rope_tables(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [..., D/2], of the rotation at these positions."""
    angles = positions[..., None].float() * inverse_frequencies(config, positions.device)
    return angles.cos(), angles.sin()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean taken in float32."""
    if x.dtype == torch.float32:
        return _RMSNorm.apply(x, weight, eps) if x.is_cpu and x.requires_grad else F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Six passes over [N, d] in backward; torch's own on a CPU takes twice the time, 6 % of a training step of the demo's model."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def, override]
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def, override]
        normed, scale, weight = ctx.saved_tensors
        products = grad * normed
        along = (products @ weight).div_(weight.numel())  # what moves x along itself does not change its direction
        grad_x = (grad * weight).addcmul_(normed, along[..., None], value=-1).mul_(scale)
        return grad_x, products.flatten(0, -2).sum(0), None


class _JoinRotated(torch.autograd.Function):
    """Rotate queries and keys and join them with the values: one write of [N, H + 2G, D] instead of six intermediate tensors."""

    @staticmethod
    def forward(ctx, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = (q_NHD.shape[1], k_NGD.shape[1])
        qkv = torch.cat((q_NHD, k_NGD, v_NGD), dim=1)
        _rotate_(qkv[:, : q_NHD.shape[1] + k_NGD.shape[1]], cos, sin)
        return qkv

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def, override]
        cos, sin = ctx.saved_tensors
        num_q, num_k = ctx.num_heads
        grad = grad.clone()
        _rotate_(grad[:, : num_q + num_k], cos, -sin)  # the inverse of a rotation is its transpose
        grad_q, grad_k, grad_v = grad.split([num_q, num_k, num_k], dim=1)
        return grad_q, grad_k, grad_v, None, None


def _rotate_(x_NXD: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> None:
    """Rotate, in place, the pairs (x[e], x[e + D/2]) of every head by the angle of its token."""
    cos, sin = cos_NE[:, None].to(x_NXD.dtype), sin_NE[:, None].to(x_NXD.dtype)
    first, second = x_NXD.chunk(2, dim=-1)
    rotated_first = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated_first)


def _select(x_Nd: Tensor, keep_M: Tensor | None) -> Tensor:
    return x_Nd if keep_M is None else x_Nd.index_select(0, keep_M)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend: Attend = causal_attention
        width_q, width_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width_q, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, width_kv, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, width_kv, bias=config.attention_bias)
        self.o_proj = nn.Linear(width_q, config.hidden_size, bias=False)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_Nd: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, keep_M: Tensor | None) -> Tensor:
        q_NHD = self.q_norm(self.q_proj(x_Nd).unflatten(-1, (-1, self.head_dim)))
        k_NGD = self.k_norm(self.k_proj(x_Nd).unflatten(-1, (-1, self.head_dim)))
        v_NGD = self.v_proj(x_Nd).unflatten(-1, (-1, self.head_dim))
        qkv_NXD = _JoinRotated.apply(q_NHD, k_NGD, v_NGD, cos, sin)
        return self.o_proj(_select(self.attend(qkv_NXD, q_NHD.shape[1], layout), keep_M))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_Nd: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_Nd)) * self.up_proj(x_Nd))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.recompute = False
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_Nd: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, keep_M: Tensor | None = None) -> Tensor:
        """[N, d], or [M, d] at the places `keep_M` (int64): what nobody reads behind the last layer is not computed there."""
        if self.recompute and torch.is_grad_enabled():  # inside the layer: FSDP's hooks stay outside and run once
            return checkpoint(self._residuals, x_Nd, cos, sin, layout, keep_M, use_reentrant=False, preserve_rng_state=False)
        return self._residuals(x_Nd, cos, sin, layout, keep_M)

    def _residuals(self, x_Nd: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, keep_M: Tensor | None) -> Tensor:
        x_Nd = _select(x_Nd, keep_M) + self.self_attn(self.input_layernorm(x_Nd), cos, sin, layout, keep_M)
        return x_Nd + self.mlp(self.post_attention_layernorm(x_Nd))


class Backbone(nn.Module):
    """Holds the parameters under the `model.` prefix; `Decoder.forward` drives it, so that FSDP's root hooks cover embedding, last norm and head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Training model. `fully_shard(layer)` for each of `model.layers`, then `fully_shard(decoder)`, or neither.

    Parameter names are Hugging Face's; with tied embeddings there is no `lm_head.weight`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, batch: Packed, *, temperature: float = 1.0) -> TokenScores:
        """Score the response tokens of a packed batch under softmax(logits / temperature). Raises ValueError beyond the model's context."""
        if max(batch.lengths) > self.config.max_context_tokens:
            raise ValueError(f"a sequence of {max(batch.lengths)} tokens exceeds the model's context of {self.config.max_context_tokens}")
        assert temperature > 0, f"temperature={temperature} must be above zero"
        head_Vd = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return token_scores(self.hidden(batch), head_Vd, batch.targets_M, temperature)

    def hidden(self, batch: Packed) -> Tensor:
        """[M, d]: states after the last norm, at the scored places. Called inside `forward` only (FSDP gathers the root's parameters there)."""
        cos, sin = rope_tables(self.config, batch.positions_N)
        x_Nd = self.model.embed_tokens(batch.tokens_N)
        *layers, last = self.model.layers
        for layer in layers:
            x_Nd = layer(x_Nd, cos, sin, batch.layout)
        return self.model.norm(last(x_Nd, cos, sin, batch.layout, batch.score_index_M))

    def choose(self, attend: Attend, *, recompute_layers: bool) -> None:
        """How layers attend (`packed.choose_attention`), and whether the backward computes each layer again from its input, all that is then kept of it."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.self_attn.attend, layer.recompute = attend, recompute_layers

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal with `initializer_range`, the two projections that write into the residual stream scaled down by sqrt(2 layers); norms 1, biases 0."""
        residual_scale = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, self.config.initializer_range * scale, generator=generator)


def named_shapes(config: DecoderConfig) -> list[tuple[str, torch.Size]]:
    """(Hugging Face name, shape) of every weight, tied ones once, in the order of the training model. Allocates nothing."""
    with torch.device("meta"):
        return [(name, parameter.shape) for name, parameter in Decoder(config).named_parameters()]
