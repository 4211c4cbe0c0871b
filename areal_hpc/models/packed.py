"""Sequences packed back to back, and causal attention over them without any token seeing another sequence.

Shapes: N packed input tokens, M scored tokens, P padded tokens (P >= N), H query heads, G key/value heads, D head size, L bucket length.

Linear layers work on [N, d] and never touch padding. Only attention needs a rectangle: sequences are sorted by length and cut into buckets of similar
length, tokens are gathered into the buckets once per layer, one fused causal attention call runs per bucket, and the result is gathered back. Padding sits
behind each sequence, where a causal mask hides it from every real token. (A block-diagonal mask over all N tokens costs 4 times as much on a CPU.)

On a GPU a *varlen* kernel reads the packed tokens as they are, told where sequences begin (`starts_S`): flash-attn's where it is installed, else torch's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areal_hpc.config import ConfigError

BUCKET_RATIO = 1.25  # a bucket's longest sequence is at most this many times its shortest ...
BUCKET_SLACK_TOKENS = 16  # ... or at most this much longer: one attention call costs as much as a little padding


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """`num` sequences of up to `length` tokens each, side by side in the padded order."""

    num: int
    length: int

    @property
    def num_padded(self) -> int:
        return self.num * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """Where each packed token sits in the length-sorted padded buckets, and back. Built once, used by all layers."""

    buckets: tuple[Bucket, ...]
    pad_index_P: Tensor
    """int64: packed token at each padded place (padding repeats its sequence's last token)."""
    unpad_index_N: Tensor
    """int64: padded place of each packed token."""
    starts_S: Tensor
    """int32 [S + 1]: first packed token of each sequence, and N (the kernels' `cu_seqlens`)."""
    max_length: int
    """Tokens of the longest sequence."""

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> AttentionLayout:
        """Layout of sequences of these lengths (zero allowed), packed back to back."""
        lengths_S = np.asarray(lengths, dtype=np.int64)
        starts_S = np.cumsum(lengths_S) - lengths_S
        order = [int(s) for s in np.argsort(-lengths_S, kind="stable") if lengths_S[s] > 0]
        unpad_index_N = np.empty(int(lengths_S.sum()), dtype=np.int64)
        pad_parts, buckets, num_padded = [], [], 0
        for members in _cut(order, lengths_S):
            length = int(lengths_S[members[0]])
            offsets_L = np.arange(length)
            pad_parts.append((starts_S[members, None] + np.minimum(offsets_L, lengths_S[members, None] - 1)).ravel())
            for s in members:
                unpad_index_N[starts_S[s] : starts_S[s] + lengths_S[s]] = num_padded + offsets_L[: lengths_S[s]]
                num_padded += length
            buckets.append(Bucket(num=len(members), length=length))
        pad_index_P = np.concatenate(pad_parts) if pad_parts else np.empty(0, dtype=np.int64)
        return cls(
            buckets=tuple(buckets),
            pad_index_P=torch.from_numpy(pad_index_P).to(device),
            unpad_index_N=torch.from_numpy(unpad_index_N).to(device),
            starts_S=torch.from_numpy(np.append(0, np.cumsum(lengths_S)).astype(np.int32)).to(device),
            max_length=int(lengths_S.max(initial=0)),
        )


def _cut(order: Sequence[int], lengths_S: np.ndarray) -> list[list[int]]:
    """Cut sequences sorted by falling length into buckets of similar length."""
    groups: list[list[int]] = []
    for s in order:
        longest = lengths_S[groups[-1][0]] if groups else None
        if longest is not None and (longest <= BUCKET_RATIO * lengths_S[s] or longest - lengths_S[s] <= BUCKET_SLACK_TOKENS):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A micro-batch without padding.

    The last token of a sequence predicts nothing that is scored, so it is a target but no input: a sequence of n tokens takes n - 1 places.
    """

    tokens_N: Tensor
    """int64 input tokens, sequences back to back."""
    positions_N: Tensor
    """int64 place of each token in its own sequence."""
    score_index_M: Tensor
    """int64 indices into N of the tokens that predict a response token, sequence after sequence."""
    targets_M: Tensor
    """int64 response tokens that are scored."""
    lengths: tuple[int, ...]
    """Places of each sequence in N."""
    response_lengths: tuple[int, ...]
    """Scored tokens of each sequence: `scores.split(response_lengths)` gives them back one by one."""
    layout: AttentionLayout = field(repr=False)

    @classmethod
    def build(
        cls,
        tokens: Sequence[np.ndarray | Tensor],
        prompt_lengths: Sequence[int],
        device: torch.device | str = "cpu",
        masks: Sequence[np.ndarray] | None = None,
    ) -> Packed:
        """Pack whole sequences (prompt + response); scored are the tokens behind each prompt, of these only the ones that `masks` marks (bool [response], None: all).

        Of a sequence of n tokens with a prompt of p >= 1, inputs 0 .. n-2 are packed and places p-1 .. n-2 predict tokens p .. n-1. A token that is not scored is
        read by those behind it, and nothing else: no logits exist for it.
        """
        assert len(tokens) == len(prompt_lengths) and len(tokens) > 0, "one prompt length per sequence"
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in tokens]
        for array, prompt in zip(arrays, prompt_lengths, strict=True):
            assert 1 <= prompt <= len(array), f"prompt of {prompt} tokens in a sequence of {len(array)}"
        lengths = [len(array) - 1 for array in arrays]
        starts = np.cumsum([0, *lengths[:-1]])
        positions = [np.arange(length) for length in lengths]
        scored = [start + np.arange(prompt - 1, length) for start, prompt, length in zip(starts, prompt_lengths, lengths, strict=True)]
        targets = [array[prompt:] for array, prompt in zip(arrays, prompt_lengths, strict=True)]
        if masks is not None:
            scored = [places[mask] for places, mask in zip(scored, masks, strict=True)]
            targets = [response[mask] for response, mask in zip(targets, masks, strict=True)]

        def joined(parts: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

        return cls(
            tokens_N=joined([array[:-1] for array in arrays]),
            positions_N=joined(positions),
            score_index_M=joined(scored),
            targets_M=joined(targets),
            lengths=tuple(lengths),
            response_lengths=tuple(map(len, targets)),
            layout=AttentionLayout.build(lengths, device),
        )

    @property
    def num_tokens(self) -> int:
        """N: places that the linear layers compute."""
        return len(self.tokens_N)


class _Pad(torch.autograd.Function):
    """[N, ...] -> [P, ...]. The gradient of padding is exactly zero (a causal mask hides it), so backward is a gather, not a scatter-add."""

    @staticmethod
    def forward(ctx, x_N: Tensor, layout: AttentionLayout) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.layout = layout
        return x_N.index_select(0, layout.pad_index_P)

    @staticmethod
    def backward(ctx, grad_P: Tensor):  # type: ignore[no-untyped-def, override]
        return grad_P.index_select(0, ctx.layout.unpad_index_N), None


class _Unpad(torch.autograd.Function):
    """[P, ...] -> [N, ...]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx, x_P: Tensor, layout: AttentionLayout) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.layout, ctx.num_padded = layout, len(x_P)
        return x_P.index_select(0, layout.unpad_index_N)

    @staticmethod
    def backward(ctx, grad_N: Tensor):  # type: ignore[no-untyped-def, override]
        grad_P = grad_N.new_zeros(ctx.num_padded, *grad_N.shape[1:])
        return grad_P.index_copy_(0, ctx.layout.unpad_index_N, grad_N), None


Attend = Callable[[Tensor, int, AttentionLayout], Tensor]
"""`causal_attention`, or a function that computes the same."""


def causal_attention(qkv_NXD: Tensor, num_query_heads: int, layout: AttentionLayout) -> Tensor:
    """Softmax attention of every token to its own sequence's past, scaled by 1/sqrt(D).

    qkv_NXD: [N, H + 2G, D], the heads of queries, keys and values. Returns [N, H * D].
    """
    num_heads, head_dim = qkv_NXD.shape[1:]
    num_kv_heads = (num_heads - num_query_heads) // 2
    padded = _Pad.apply(qkv_NXD, layout)
    outputs = []
    for bucket, part in zip(layout.buckets, padded.split([bucket.num_padded for bucket in layout.buckets]), strict=True):
        heads_BXLD = part.view(bucket.num, bucket.length, num_heads, head_dim).transpose(1, 2)
        q, k, v = heads_BXLD.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)
        out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_kv_heads != num_query_heads)
        outputs.append(out_BHLD.transpose(1, 2).reshape(bucket.num_padded, num_query_heads * head_dim))
    return _Unpad.apply(torch.cat(outputs), layout)


def varlen_attention(qkv_NXD: Tensor, num_query_heads: int, layout: AttentionLayout) -> Tensor:
    """`causal_attention` by a varlen kernel: no padding, no copies. On a GPU, in bfloat16 or float16 only (so are the kernels)."""
    num_kv_heads = (qkv_NXD.shape[1] - num_query_heads) // 2
    q_NHD, k_NGD, v_NGD = qkv_NXD.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)
    return _varlen_kernel()(q_NHD, k_NGD, v_NGD, layout.starts_S, layout.max_length).flatten(1)


def _varlen_kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]:
    """flash-attn's kernel, else torch's. Raises ImportError when there is neither."""
    try:
        flash = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        return lambda q, k, v, starts, longest: varlen(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])
    return lambda q, k, v, starts, longest: flash(q, k, v, starts, starts, longest, longest, causal=True)


def choose_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The function for `train.attention`. Raises ConfigError when "varlen" is asked for where it cannot run; "auto" takes it where it can."""
    if wanted == "buckets":
        return causal_attention
    reason = None
    if device.type != "cuda" or dtype == torch.float32:
        reason = f"its kernels need a GPU and --model.dtype bfloat16, this rank computes in {str(dtype).removeprefix('torch.')} on {device.type}"
    else:
        try:
            _varlen_kernel()
        except ImportError as error:
            reason = f"neither flash-attn nor torch.nn.attention.varlen can be imported ({error})"
    if reason is None:
        return varlen_attention
    if wanted == "varlen":
        raise ConfigError(f"train.attention=varlen: {reason}; use auto or buckets")
    return causal_attention
