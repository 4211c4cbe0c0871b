"""The decoder as the embedded engine runs it: fused weights, a slotted KV cache, prefill and one-token decode.

Same arithmetic as `models.decoder.Decoder` (tests compare both with `transformers`), laid out for generation:
- query, key and value weights are one matrix, gate and up weights another: one product each instead of three and two;
- the rows of query and key heads are permuted so that rotated pairs are neighbours: the rotation is one complex product. Scores do not change, as queries
  and keys are permuted alike; every weight stays readable under its Hugging Face name, bit for bit, through a view;
- the cache is one tensor [layers, K|V, slot, G, T, D]; running sequences fill the first n slots, so decoding slices it and never gathers.

Shapes: n running sequences, N packed tokens, H query heads, G key/value heads, X = H + 2G, D head size, E = D/2, T context, d hidden, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areal_hpc.models.decoder import inverse_frequencies, rms_norm
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.packed import AttentionLayout, causal_attention
from areal_hpc.rollout.engines.checks import whole_model
from areal_hpc.transport.images import ImageLayout, Place
from areal_hpc.transport.manifest import aligned

PREFILL_TOKENS = 8192  # packed tokens computed at a time, so that re-computing many long contexts needs no more memory than one


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLayer:
    qkv: Tensor
    """[X * D, d], the rows of query and key heads with rotated pairs side by side."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[D], permuted like the rows (Qwen3)."""
    k_norm: Tensor | None
    out: Tensor
    """[d, H * D]."""
    gate_up: Tensor
    """[2F, d]."""
    down: Tensor
    """[d, F]."""
    norm_1: Tensor
    norm_2: Tensor


class FusedWeights:
    """The weights of the engine: views of one flat piece of memory, the image, whose layout depends on the model and the type alone.

    Undefined until loaded, or until something else writes the image (`transport.images`).
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, image: Tensor) -> None:
        """`image`: uint8 [layout(config, dtype).num_bytes], or on the meta device to know the layout."""
        self.config, self.image = config, image
        self.dtype, self._used_bytes = dtype, 0
        self.places: dict[str, Place] = {}
        self._views: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        c = config
        self.embed = self._own("model.embed_tokens.weight", self._take(c.vocab_size, c.hidden_size))
        self.layers = [self._make_layer(f"model.layers.{k}.") for k in range(c.num_hidden_layers)]
        self.norm = self._own("model.norm.weight", self._take(c.hidden_size))
        self.head = self.embed if c.tie_word_embeddings else self._own("lm_head.weight", self._take(c.vocab_size, c.hidden_size))

    @classmethod
    def layout(cls, config: DecoderConfig, dtype: torch.dtype) -> ImageLayout:
        return ImageLayout.of(cls(config, dtype, torch.empty(0, dtype=torch.uint8, device="meta")).places)

    def _take(self, *shape: int) -> Tensor:
        """The next tensor of the image."""
        num_bytes = math.prod(shape) * self.dtype.itemsize
        start, self._used_bytes = self._used_bytes, self._used_bytes + aligned(num_bytes)
        if self.image.is_meta:
            tensor = torch.empty(shape, dtype=self.dtype, device="meta")
        else:
            tensor = self.image[start : start + num_bytes].view(self.dtype).view(shape)
        self._start = start
        return tensor

    def _own(self, name: str, view: Tensor, shape: tuple[int, ...] | None = None, *, offset: int | None = None, interleave: int = 0) -> Tensor:
        """Register a view of the image as the home of the weight `name`, whose Hugging Face shape may be flatter than the view's.

        `offset`: bytes from the start of the image; the tensor taken last, if not given.
        """
        full = shape or tuple(view.shape)
        self._views[name] = (view, full)
        self.places[name] = Place(self._start if offset is None else offset, full[0], math.prod(full[1:]), self.dtype, interleave)
        return view

    def _make_layer(self, prefix: str) -> FusedLayer:
        c = self.config
        head_dim, width_q, width_kv = c.head_dim, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        qkv, bias = self._take(width_q + 2 * width_kv, c.hidden_size), None
        self._own_qkv(prefix, "weight", qkv)
        if c.attention_bias:
            bias = self._take(width_q + 2 * width_kv)
            self._own_qkv(prefix, "bias", bias)
        gate_up = self._take(2 * c.intermediate_size, c.hidden_size)
        for k, (part, name) in enumerate(zip(gate_up.chunk(2), ("gate", "up"), strict=True)):
            self._own(f"{prefix}mlp.{name}_proj.weight", part, offset=self._start + k * part.numel() * self.dtype.itemsize)
        norms: list[Tensor | None] = [None, None]
        for k, name in enumerate("qk" if c.qk_norm else ""):
            norm = norms[k] = self._take(head_dim)
            self._own(f"{prefix}self_attn.{name}_norm.weight", norm.unflatten(0, (-1, 2)).transpose(0, 1), (head_dim,), interleave=head_dim)
        return FusedLayer(
            qkv=qkv,
            qkv_bias=bias,
            q_norm=norms[0],
            k_norm=norms[1],
            out=self._own(f"{prefix}self_attn.o_proj.weight", self._take(c.hidden_size, width_q)),
            gate_up=gate_up,
            down=self._own(f"{prefix}mlp.down_proj.weight", self._take(c.hidden_size, c.intermediate_size)),
            norm_1=self._own(f"{prefix}input_layernorm.weight", self._take(c.hidden_size)),
            norm_2=self._own(f"{prefix}post_attention_layernorm.weight", self._take(c.hidden_size)),
        )

    def _own_qkv(self, prefix: str, kind: str, fused: Tensor) -> None:
        """Query, key and value rows of one tensor; ours hold rotated pairs side by side, Hugging Face's the two halves of a head."""
        c, offset = self.config, self._start
        widths = [c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.num_key_value_heads * c.head_dim]
        for part, name in zip(fused.split(widths), "qkv", strict=True):
            view = part if name == "v" else part.unflatten(0, (-1, c.head_dim // 2, 2)).transpose(1, 2)
            interleave = 0 if name == "v" else c.head_dim
            self._own(f"{prefix}self_attn.{name}_proj.{kind}", view, tuple(part.shape), offset=offset, interleave=interleave)
            offset += part.numel() * self.dtype.itemsize

    @torch.inference_mode()
    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights, in any order. Raises ValueError naming the first wrong one, before anything is overwritten."""
        tensors = whole_model(named_tensors, {name: shape for name, (_, shape) in self._views.items()})
        for name, (view, _) in self._views.items():
            view.copy_(tensors[name].reshape(view.shape))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor); a copy where our layout differs."""
        for name, (view, shape) in self._views.items():
            yield name, view.reshape(shape)


class FusedDecoder:
    """The embedded engine's model: weights, which can be exchanged between two steps, and cache. All methods run under `torch.inference_mode`."""

    def __init__(self, config: DecoderConfig, *, num_slots: int, max_context_tokens: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.config = config
        c, options = config, {"device": device, "dtype": dtype}
        self.use(FusedWeights(c, dtype, torch.empty(FusedWeights.layout(c, dtype).num_bytes, dtype=torch.uint8, device=device)))
        cache_shape = (c.num_hidden_layers, 2, num_slots, c.num_key_value_heads, max_context_tokens, c.head_dim)
        self._cache = torch.zeros(cache_shape, **options)  # type: ignore[call-overload] # finite from the start: masked places are multiplied by 0
        self._places_T = torch.arange(max_context_tokens, device=device)
        angles_TE = self._places_T[:, None].float() * inverse_frequencies(c, device)
        self._rotations_TE = torch.polar(torch.ones_like(angles_TE), angles_TE)
        self._slots = torch.arange(num_slots, device=device)

    def use(self, weights: FusedWeights) -> None:
        """Compute with these weights from now on."""
        self.weights = weights
        self._embed, self._layers, self._norm, self._head = weights.embed, weights.layers, weights.norm, weights.head

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._cache.numel() * self._cache.element_size()

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` cached places of a slot over another's."""
        self._cache[:, :, target, :, :num_tokens] = self._cache[:, :, source, :, :num_tokens]

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        """Compute keys and values of whole sequences (int64 tokens) and store each in its slots, from place 0 on. Other slots are not touched."""
        first, num_tokens = 0, 0
        for k, sequence in enumerate(sequences):
            if k > first and num_tokens + len(sequence) > PREFILL_TOKENS:
                self._prefill_packed(sequences[first:k], slots[first:k])
                first, num_tokens = k, 0
            num_tokens += len(sequence)
        if num_tokens:
            self._prefill_packed(sequences[first:], slots[first:])

    def _prefill_packed(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        device, c = self._cache.device, self.config
        lengths = [len(sequence) for sequence in sequences]
        starts = np.cumsum([0, *lengths[:-1]])
        copies = [(start, length, slot) for start, length, targets in zip(starts, lengths, slots, strict=True) for slot in targets]

        def joined(parts: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device)

        positions_N = joined([np.arange(length) for length in lengths])
        source_R = joined([np.arange(start, start + length) for start, length, _ in copies])  # one row per token and slot that it goes to
        slot_R = joined([np.full(length, slot) for _, length, slot in copies])
        place_R = positions_N[source_R]
        layout = AttentionLayout.build(lengths, device)
        cis_N1E = self._rotations_TE[positions_N][:, None]
        x_Nd = self._embed[joined(sequences)]
        for layer, cache in zip(self._layers, self._cache.unbind(0), strict=True):
            qkv_NXD = self._qkv(layer, x_Nd, cis_N1E)
            kv_N2GD = qkv_NXD[:, c.num_attention_heads :].unflatten(1, (2, -1))
            cache[:, slot_R, :, place_R] = kv_N2GD[source_R]
            if layer is not self._layers[-1]:  # only keys and values are wanted
                x_Nd = self._rest(layer, x_Nd, causal_attention(qkv_NXD, c.num_attention_heads, layout))

    @torch.inference_mode()
    def decode(self, tokens_n: Tensor, positions_n: Tensor, span: int) -> Tensor:
        """Next-token logits, float32 [n, V], of the sequences in slots 0 .. n-1.

        tokens_n: int64, the newest token of each; positions_n: int64, its place (keys and values of all places before it are cached); span: their largest + 1.
        """
        num, c = len(tokens_n), self.config
        slots_n, num_heads, num_kv_heads = self._slots[:num], c.num_attention_heads, c.num_key_value_heads
        cis_n1E = self._rotations_TE.index_select(0, positions_n)[:, None]
        future_nT = self._places_T[:span] > positions_n[:, None]
        mask_n11T = torch.zeros_like(future_nT, dtype=self._cache.dtype).masked_fill_(future_nT, -torch.inf)[:, None, None]
        x_nd = self._embed.index_select(0, tokens_n)
        for layer, cache in zip(self._layers, self._cache.unbind(0), strict=True):
            qkv_nXD = self._qkv(layer, x_nd, cis_n1E)
            cache[:, slots_n, :, positions_n] = qkv_nXD[:, num_heads:].unflatten(1, (2, -1))
            keys, values = cache[0, :num, :, :span], cache[1, :num, :, :span]
            queries = qkv_nXD[:, :num_heads].unflatten(1, (num_kv_heads, -1))  # the query heads of one key/value head stand where its queries would
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask_n11T)
            x_nd = self._rest(layer, x_nd, attended.reshape(num, -1))
        return F.linear(rms_norm(x_nd, self._norm, c.rms_norm_eps), self._head).float()

    def _qkv(self, layer: FusedLayer, x_Nd: Tensor, cis_N1E: Tensor) -> Tensor:
        """[N, X, D]: rotated queries and keys, and values."""
        c = self.config
        hidden = rms_norm(x_Nd, layer.norm_1, c.rms_norm_eps)
        qkv_NXD = F.linear(hidden, layer.qkv, layer.qkv_bias).unflatten(1, (-1, c.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys, _ = qkv_NXD.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], dim=1)
            queries.copy_(rms_norm(queries, layer.q_norm, c.rms_norm_eps))
            keys.copy_(rms_norm(keys, layer.k_norm, c.rms_norm_eps))
        rotated = qkv_NXD[:, : c.num_attention_heads + c.num_key_value_heads]
        if rotated.dtype == torch.float32:
            torch.view_as_complex(rotated.unflatten(2, (-1, 2))).mul_(cis_N1E)
        else:
            rotated.copy_(torch.view_as_real(torch.view_as_complex(rotated.float().unflatten(2, (-1, 2))) * cis_N1E).flatten(2))
        return qkv_NXD

    def _rest(self, layer: FusedLayer, x_Nd: Tensor, attended: Tensor) -> Tensor:
        """Output projection and feed-forward part; overwrites x_Nd."""
        x_Nd.addmm_(attended, layer.out.t())
        gate, up = F.linear(rms_norm(x_Nd, layer.norm_2, self.config.rms_norm_eps), layer.gate_up).chunk(2, dim=1)
        return x_Nd.addmm_(F.silu(gate).mul_(up), layer.down.t())
