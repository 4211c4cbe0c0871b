"""Tokens per second of the embedded engine on a small model, beside vLLM where that is installed: every sequence decodes `--new-tokens` tokens, prefill included.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/generation.py
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/generation.py

The model (4 layers, d = 128, 4/2 heads, vocabulary 64, random weights) is the one that `make demo` trains. Each batch size runs `--repeats` times;
the best and the median are printed, as other work on a shared machine only ever slows a run down. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.hf import build_random
from areal_hpc.rollout.engines.base import Engine, Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine
from areal_hpc.rollout.engines.sampling import stream_key

VOCAB_SIZE = 64


def demo_model() -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )


def generate(engine: Engine, batch_size: int, group_size: int, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds until all answers of one batch are there."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for ticket in range(-(-batch_size // group_size)):
        prompt = rng.integers(0, VOCAB_SIZE, prompt_tokens, dtype=np.int32)
        samples = range(ticket * group_size, min((ticket + 1) * group_size, batch_size))
        engine.add([Request(request_id=k, prompt_tokens=prompt, stream=stream_key(0, ticket, k), max_new_tokens=new_tokens) for k in samples])
    num_tokens = 0
    while engine.num_running or engine.num_waiting:
        num_tokens += sum(len(done.tokens_R) for done in engine.step())
    assert num_tokens == batch_size * new_tokens, "no stop token is set: every answer has full length"
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64], help="sequences decoded together")
    parser.add_argument("--group-size", type=int, default=8, help="samples of one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens decoded of each sequence")
    parser.add_argument("--repeats", type=int, default=10, help="runs per batch size")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_random(demo_model(), seed=0)
    makers: dict[str, Callable[..., Any]] = {"embedded": EmbeddedEngine}
    if importlib.util.find_spec("vllm") is not None:
        from areal_hpc.rollout.engines.vllm import VllmEngine

        makers["vllm"] = VllmEngine
    results: dict[str, dict[int, dict[str, int]]] = {name: {} for name in makers}
    for batch_size in args.batch_sizes:
        engines = {}
        for name, make in makers.items():
            engines[name] = make(model.config, max_num_running=batch_size, max_context_tokens=args.prompt_tokens + args.new_tokens, stop_tokens=())
            engines[name].update_weights(model.named_parameters(), 0)
            generate(engines[name], batch_size, args.group_size, args.prompt_tokens, args.new_tokens)  # warm up
        walls_s: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(args.repeats):
            for name, engine in engines.items():
                walls_s[name].append(generate(engine, batch_size, args.group_size, args.prompt_tokens, args.new_tokens))
        for name, found in walls_s.items():
            best, median = (batch_size * args.new_tokens / wall_s for wall_s in (min(found), statistics.median(found)))
            results[name][batch_size] = {"tokens_per_s_best": round(best), "tokens_per_s_median": round(median)}
            print(f"batch {batch_size:4d}, {name:8s}: best {best:8,.0f} tok/s, median {median:8,.0f} tok/s", flush=True)
        if "vllm" in engines:
            engines["vllm"].close()  # its groups are the process's own
    environment = {"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads, "cpu": torch.backends.cpu.get_cpu_capability()}
    print(json.dumps({"benchmark": "generation", "unit": "generated tokens/s", "by_engine_and_batch_size": results, **vars(args), **environment}))


if __name__ == "__main__":
    main()
