"""Embedded engine: continuous batching in the rank's own process, on a CPU or one GPU, interruptible between any two tokens.

One step:
1. admit waiting requests, first come first served, into free slots; each distinct prompt is computed once and copied to its samples' slots;
2. decode one token of every running sequence (its newest token goes in, logits come out);
3. sample with counter-based random numbers; stamp log-probability and policy version;
4. return finished answers; the last slot moves into the hole, so running sequences always are slots 0 .. n-1.

The newest token of a sequence is *pending*: known, but not in the KV cache. A prompt therefore enters as "cache all but the last token, then decode", and new
weights mean "cache all but the last token again": admission and interrupt are the same operation.
Slot tables live on the host as NumPy arrays: S slots, T context tokens, n running sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.rollout.engines import sampling
from areal_hpc.rollout.engines.base import Begun, Completion, Request
from areal_hpc.rollout.engines.checks import check_context, check_requests
from areal_hpc.rollout.engines.fused import FusedDecoder, FusedWeights

_NOTHING = Begun(tokens_R=np.empty(0, np.int32), logprobs_R=np.empty(0, np.float32), versions_R=np.empty(0, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """Prompt shared by the requests added together; compared by identity."""

    tokens_P: np.ndarray


class _SlotTable:
    """What the host knows of each running sequence. Row s belongs to slot s; columns of [S, T] tables are places in the sequence, prompt included."""

    def __init__(self, num_slots: int, max_context_tokens: int) -> None:
        self.request_id_S = np.zeros(num_slots, np.int64)
        self.stream_S = np.zeros(num_slots, np.uint64)
        self.temperature_S = np.ones(num_slots, np.float32)
        self.prompt_length_S = np.zeros(num_slots, np.int64)
        self.length_S = np.zeros(num_slots, np.int64)
        self.max_length_S = np.zeros(num_slots, np.int64)
        self.is_imposed_S = np.zeros(num_slots, bool)
        self.tokens_ST = np.zeros((num_slots, max_context_tokens), np.int64)
        self.logprobs_ST = np.zeros((num_slots, max_context_tokens), np.float32)
        self.versions_ST = np.zeros((num_slots, max_context_tokens), np.int32)

    def fill(self, slot: int, request: Request, prompt_P: np.ndarray) -> None:
        self.request_id_S[slot], self.stream_S[slot], self.temperature_S[slot] = request.request_id, request.stream, request.temperature
        self.prompt_length_S[slot] = self.length_S[slot] = len(prompt_P)
        self.max_length_S[slot] = len(prompt_P) + request.max_new_tokens
        self.is_imposed_S[slot] = request.is_imposed
        self.tokens_ST[slot, : len(prompt_P)] = prompt_P
        if request.begun is not None:
            begun = slice(len(prompt_P), len(prompt_P) + len(request.begun.tokens_R))
            self.length_S[slot] = begun.stop
            self.tokens_ST[slot, begun] = request.begun.tokens_R
            self.logprobs_ST[slot, begun] = request.begun.logprobs_R
            self.versions_ST[slot, begun] = request.begun.versions_R

    def answer(self, slot: int) -> Begun:
        """Copies of what has been sampled in this slot."""
        answer = slice(self.prompt_length_S[slot], self.length_S[slot])
        return Begun(
            tokens_R=self.tokens_ST[slot, answer].astype(np.int32),
            logprobs_R=self.logprobs_ST[slot, answer].copy(),
            versions_R=self.versions_ST[slot, answer].copy(),
        )

    def move(self, source: int, target: int) -> None:
        length = self.length_S[source]
        for table_ST in (self.tokens_ST, self.logprobs_ST, self.versions_ST):
            table_ST[target, :length] = table_ST[source, :length]
        for column_S in (self.request_id_S, self.stream_S, self.temperature_S, self.prompt_length_S, self.length_S, self.max_length_S, self.is_imposed_S):
            column_S[target] = column_S[source]


class EmbeddedEngine:
    """`base.Engine` for decoders of our own.

    Lifecycle: construct (weights undefined) -> `update_weights(..., 0)` -> (`add` | `step` | `update_weights`)*. The same calls give the same bits.
    Trap: a prompt whose KV was computed under old weights is reused for its waiting samples only until the next update.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_num_running: int,
        max_context_tokens: int,
        stop_tokens: Collection[int],
        kv_on_update: Literal["recompute", "keep"] = "recompute",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate weights and KV cache for `max_num_running` sequences of `max_context_tokens`. Raises ValueError beyond the model's own context."""
        check_context(max_context_tokens, config.max_context_tokens)
        self.max_num_running = max_num_running
        self.max_context_tokens = max_context_tokens
        self.policy_version = -1
        self.is_interrupted = False
        self._kv_on_update = kv_on_update
        self._device = torch.device(device)
        self._is_stop_V = np.zeros(config.vocab_size, bool)
        self._is_stop_V[list(stop_tokens)] = True
        self._spare_slot = max_num_running  # keeps the prompt of the one group that may be admitted in part
        self._model = FusedDecoder(config, num_slots=max_num_running + 1, max_context_tokens=max_context_tokens, device=device, dtype=dtype)
        self._table = _SlotTable(max_num_running, max_context_tokens)
        self._rows_S = np.arange(max_num_running)
        self._num_running = 0
        self._waiting: deque[tuple[Request, _Prompt]] = deque()
        self._spare_prompt: _Prompt | None = None
        self.num_prefill_tokens = 0
        """Tokens whose cache was computed at an admission or after new weights, since the start."""

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Sequences added but without a slot yet."""
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt, in order.

        Raises ValueError for an empty prompt or one that cannot fit the context with its answer, and for an answer begun that leaves nothing to sample.
        """
        assert self.policy_version >= 0, "add() before the first update_weights()"
        check_requests(requests, self.max_context_tokens)
        for request in requests:
            assert request.prompt_tokens is requests[0].prompt_tokens or np.array_equal(request.prompt_tokens, requests[0].prompt_tokens)
        if requests:
            prompt = _Prompt(np.asarray(requests[0].prompt_tokens, dtype=np.int64))
            self._waiting.extend((request, prompt) for request in requests)

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token of every running sequence, return what finished."""
        assert not self.is_interrupted, "step() while the weights are being overwritten"
        self._admit()
        if self._num_running == 0:
            return []
        self._decode()
        return self._take_finished()

    def running(self) -> dict[int, Begun]:
        """What every request that the engine holds has so far, copied; of a waiting one without `begun`, nothing (R = 0)."""
        found = {int(self._table.request_id_S[slot]): self._table.answer(slot) for slot in range(self._num_running)}
        return found | {request.request_id: request.begun or _NOTHING for request, _ in self._waiting}

    def first_version(self, request_id: int) -> int | None:
        """Policy version of the first token of a request; None while it has none. Raises KeyError for a request that the engine does not hold."""
        slots = np.flatnonzero(self._table.request_id_S[: self._num_running] == request_id)
        if len(slots):
            return int(self._table.versions_ST[slots[0], self._table.prompt_length_S[slots[0]]])
        for request, _ in self._waiting:
            if request.request_id == request_id:
                return int(request.begun.versions_R[0]) if request.begun is not None and len(request.begun.versions_R) else None
        raise KeyError(f"request {request_id} neither runs nor waits")

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget these requests, running or waiting; unknown ones are ignored."""
        unwanted = set(request_ids)
        self._waiting = deque(item for item in self._waiting if item[0].request_id not in unwanted)
        running_n = self._table.request_id_S[: self._num_running]
        self._release(np.flatnonzero(np.isin(running_n, list(unwanted))))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Interrupt: take new weights and go on with the same sequences.

        Every weight must be there once, in any order (Hugging Face names, tied head absent). Raises ValueError naming the first wrong one; then the old
        weights stay in use. With `kv_on_update = "recompute"` the cache of all running sequences is computed anew, as in the paper.
        """
        self._model.weights.load(named_tensors)
        self._go_on(version)

    def swap_weights(self, weights: FusedWeights, version: int) -> FusedWeights:
        """Interrupt: go on with other weights, by a change of pointers; returns those that were in use, whose memory is free now."""
        used = self._model.weights
        self._model.use(weights)
        self._go_on(version)
        return used

    def new_weights(self, image: Tensor | None = None) -> FusedWeights:
        """Weights for `swap_weights`, in this image or in memory of their own; undefined until somebody writes them."""
        in_use = self._model.weights
        return FusedWeights(in_use.config, in_use.dtype, torch.empty_like(in_use.image) if image is None else image)

    @property
    def weights(self) -> FusedWeights:
        """The weights in use."""
        return self._model.weights

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._model.cache_bytes

    def interrupt(self) -> None:
        """The weights in use are about to be overwritten: `step` refuses until `swap_weights` or `update_weights`."""
        self.is_interrupted = True

    def _go_on(self, version: int) -> None:
        self.policy_version = version
        self.is_interrupted = False
        self._spare_prompt = None
        if self._kv_on_update == "recompute" and self._num_running:
            table = self._table
            sequences = [table.tokens_ST[slot, : table.length_S[slot] - 1] for slot in range(self._num_running)]
            self._model.prefill(sequences, [[slot] for slot in range(self._num_running)])
            self.num_prefill_tokens += sum(map(len, sequences))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights in use under their Hugging Face names, bit-equal to what the engine was given (after the cast to its type)."""
        return self._model.weights.named_weights()

    def _admit(self) -> None:
        """Consumes waiting requests; produces running ones whose cache holds all but the last of their tokens."""
        prompts: list[_Prompt] = []
        slots: list[list[int]] = []
        begun: list[int] = []
        while self._waiting and self._num_running < self.max_num_running:
            request, prompt = self._waiting.popleft()
            slot = self._num_running
            self._num_running += 1
            self._table.fill(slot, request, prompt.tokens_P)
            if request.begun is not None:
                begun.append(slot)
            elif prompt is self._spare_prompt:
                self._model.copy_slot(self._spare_slot, slot, len(prompt.tokens_P) - 1)
            elif prompts and prompts[-1] is prompt:
                slots[-1].append(slot)
            else:
                prompts.append(prompt)
                slots.append([slot])
        if prompts and self._waiting and self._waiting[0][1] is prompts[-1]:
            self._spare_prompt = prompts[-1]
            slots[-1].append(self._spare_slot)
        sequences = [prompt.tokens_P[:-1] for prompt in prompts] + [self._table.tokens_ST[slot, : self._table.length_S[slot] - 1] for slot in begun]
        if sequences:
            self._model.prefill(sequences, slots + [[slot] for slot in begun])
            self.num_prefill_tokens += sum(map(len, sequences))

    @torch.inference_mode()
    def _decode(self) -> None:
        table, num = self._table, self._num_running
        rows_n, length_n = self._rows_S[:num], table.length_S[:num]
        temperature_n = table.temperature_S[:num]
        tokens_n = torch.from_numpy(table.tokens_ST[rows_n, length_n - 1]).to(self._device)
        positions_n = torch.from_numpy(length_n - 1).to(self._device)
        logits_nV = self._model.decode(tokens_n, positions_n, span=int(length_n.max()))
        uniforms_n = torch.from_numpy(sampling.uniforms(table.stream_S[:num], length_n - table.prompt_length_S[:num])).to(self._device)
        sampled_n, logprobs_n = sampling.sample_tokens(logits_nV, uniforms_n, None if (temperature_n == 1).all() else temperature_n)
        table.tokens_ST[rows_n, length_n] = sampled_n.cpu().numpy()
        table.logprobs_ST[rows_n, length_n] = logprobs_n.cpu().numpy()
        table.versions_ST[rows_n, length_n] = self.policy_version
        length_n += 1

    def _take_finished(self) -> list[Completion]:
        table, num = self._table, self._num_running
        newest_n = table.tokens_ST[self._rows_S[:num], table.length_S[:num] - 1]
        full_n = table.length_S[:num] == table.max_length_S[:num]
        stopped_n = np.where(table.is_imposed_S[:num], full_n, self._is_stop_V[newest_n])
        finished = np.flatnonzero(stopped_n | full_n)
        completions = [self._completion(slot, "stop" if stopped_n[slot] else "length") for slot in finished]
        self._release(finished)
        return completions

    def _release(self, slots: np.ndarray) -> None:
        """Free these slots (ascending)."""
        for slot in slots[::-1]:  # from behind, so that the sequence moved into the hole is never one that is released too
            last = self._num_running = self._num_running - 1
            if slot != last:
                self._model.copy_slot(last, slot, int(self._table.length_S[last]) - 1)
                self._table.move(last, slot)

    def _completion(self, slot: int, finish: Literal["stop", "length"]) -> Completion:
        answer = self._table.answer(slot)
        return Completion(
            request_id=int(self._table.request_id_S[slot]),
            tokens_R=answer.tokens_R,
            logprobs_R=answer.logprobs_R,
            versions_R=answer.versions_R,
            finish=finish,
        )
