"""Attention by a varlen kernel: a reference of `flash_attn_varlen_func`, written from its documentation, stands where the GPU's is. Shapes as in models/packed.py."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_hpc.config import ConfigError
from areal_hpc.models import packed
from areal_hpc.models.decoder import Packed
from areal_hpc.models.packed import AttentionLayout, causal_attention, choose_attention, varlen_attention
from tests.models.test_decoder import PROMPTS, our_decoder, sequences
from tests.models.tiny import ARCHITECTURES, VOCAB_SIZE, reference_model


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
) -> Tensor:
    """q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim), cu_seqlens (batch + 1,) int32; query head h reads key head h // (nheads // nheads_k)."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and dropout_p == 0.0 and causal
    assert int(cu_seqlens_q[0]) == 0 and int(cu_seqlens_q[-1]) == len(q)
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(lengths_q.max()) == max_seqlen_q and int(lengths_k.max()) == max_seqlen_k
    heads, out = q.shape[1] // k.shape[1], torch.empty(0, *q.shape[1:])
    for first_q, length_q, first_k, length_k in zip(cu_seqlens_q, lengths_q, cu_seqlens_k, lengths_k, strict=False):
        queries, keys, values = q[first_q : first_q + length_q], k[first_k : first_k + length_k], v[first_k : first_k + length_k]
        logits = torch.einsum("ihd,jhd->hij", queries, keys.repeat_interleave(heads, 1)) * (softmax_scale or q.shape[-1] ** -0.5)
        logits = logits.masked_fill(torch.ones(length_q, length_k, dtype=torch.bool).triu(1), -torch.inf)
        out = torch.cat([out, torch.einsum("hij,jhd->ihd", logits.softmax(-1), values.repeat_interleave(heads, 1))])
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_varlen_equals_buckets(name: str) -> None:
    """In values and gradients of the whole model."""
    results = []
    for attend in (causal_attention, varlen_attention):
        decoder = our_decoder(reference_model(name))
        decoder.choose(attend, recompute_layers=False)
        logprobs_M = decoder(Packed.build(sequences(), PROMPTS), temperature=1.0).logprobs_M
        (logprobs_M * torch.linspace(-1, 1, len(logprobs_M))).sum().backward()
        results.append((logprobs_M.detach(), *(parameter.grad for parameter in decoder.parameters())))
    for buckets, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, buckets, atol=2e-5 * max(1.0, buckets.abs().max().item()), rtol=0)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("changed", range(len(PROMPTS) - 1))
def test_no_token_sees_another_sequence(changed: int) -> None:
    decoder = our_decoder(reference_model("qwen2.5-7-to-1"))
    decoder.choose(varlen_attention, recompute_layers=False)
    before, after = sequences(), sequences()
    after[changed] = (after[changed] + 1) % VOCAB_SIZE
    batches = [Packed.build(tokens, PROMPTS) for tokens in (before, after)]
    with torch.no_grad():
        first, second = (decoder(batch, temperature=1.0).logprobs_M.split(batch.response_lengths) for batch in batches)
    for k, (old, new) in enumerate(zip(first, second, strict=True)):
        assert (len(old) == 0) or torch.equal(old, new) == (k != changed)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_starts_of_sequences(lengths: list[int]) -> None:
    layout = AttentionLayout.build(lengths)
    assert layout.starts_S.tolist() == np.cumsum([0, *lengths]).tolist()
    assert layout.starts_S.dtype == torch.int32 and layout.max_length == max(lengths)


def test_torch_stands_in_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of torch's kernel: causal is a window of (-1, 0), heads are grouped only where they are."""
    calls = []

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        calls.append((window_size, enable_gqa))
        return flash_attn_varlen_func(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal=window_size == (-1, 0))

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    layout = AttentionLayout.build([5, 9])
    for num_kv_heads in (1, 4):
        qkv_NXD = torch.randn(14, 4 + 2 * num_kv_heads, 8)
        torch.testing.assert_close(varlen_attention(qkv_NXD, 4, layout), causal_attention(qkv_NXD, 4, layout))
    assert calls == [((-1, 0), True), ((-1, 0), False)]


def test_choice_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", cpu, torch.float32) is causal_attention
    assert choose_attention("buckets", gpu, torch.bfloat16) is causal_attention
    assert choose_attention("auto", gpu, torch.float32) is causal_attention
    assert choose_attention("auto", gpu, torch.bfloat16) is varlen_attention
    needs = r"^train\.attention=varlen: its kernels need a GPU and --model\.dtype bfloat16, this rank computes in float32 on cpu; use auto or buckets$"
    with pytest.raises(ConfigError, match=needs):
        choose_attention("varlen", cpu, torch.float32)

    def missing() -> None:
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(packed, "_varlen_kernel", missing)
    assert choose_attention("auto", gpu, torch.bfloat16) is causal_attention
    with pytest.raises(ConfigError, match="neither flash-attn nor torch"):
        choose_attention("varlen", gpu, torch.bfloat16)
