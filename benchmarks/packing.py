"""Micro-batches by tokens (Algorithm 1) beside a fixed number of sequences; time to plan a batch; memory of the log-probabilities at a vocabulary of 152k.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/packing.py            # about five minutes

1. Training step of a 1 M model on log-normal lengths (sigma 0.85, mean 116, cap 358: the paper's distribution divided by 80), three ways within C tokens: packed
   micro-batches; as many sequences as surely fit, without padding; the same padded to the longest (as trainers without packing do). Tokens/s, in turns, medians.
2. `plan_batch` for 8,192 sequences on 128 ranks, and at other sizes: seconds, and the heaviest rank's cost over the mean.
3. Peak resident memory of log-probabilities, entropy and their backward beyond hidden states and head, at several numbers of tokens, each in a fresh process.
   Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from small_models import SHAPES

from areal_hpc import config
from areal_hpc.models import hf
from areal_hpc.models.decoder_config import DecoderConfig
from areal_hpc.models.scores import token_scores
from areal_hpc.observe.telemetry import hardware
from areal_hpc.train.batching import estimated_cost, pack_microbatches, plan_batch
from areal_hpc.train.trainer import LocalBatch, Trainer
from areal_hpc.transport.trajectory import Status, Trajectory

VOCAB_SIZE, HIDDEN_SIZE = 151_936, 256
SCORED_TOKENS = (256, 1024, 4096)
PLANS = ((8192, 128, 1), (8192, 128, 4), (16384, 128, 1), (32768, 128, 1), (8192, 1, 1))
"""sequences, ranks, mini-batches"""


def lognormal(num: int, mean: float, cap: int, seed: int) -> np.ndarray:
    """Lengths in tokens with the paper's sigma of 0.85."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - 0.85**2 / 2, 0.85, num)
    return np.clip(lengths, 2, cap).astype(int)


def model() -> DecoderConfig:
    width, layers, intermediate = SHAPES["1M"]
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=64,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        tie_word_embeddings=True,
    )


def batch(lengths: np.ndarray, microbatches: list[list[int]], *, padded: bool) -> LocalBatch:
    """One mini-batch cut as told; padding is made of real tokens at the end of the answer, which costs what padding costs."""
    rng, trajectories, number = np.random.default_rng(0), [], np.zeros(len(lengths), int)
    for m, members in enumerate(microbatches):
        number[members] = m
    for s, length in enumerate(lengths):
        tokens = max(lengths[microbatches[number[s]]]) if padded else length
        trajectories.append(
            Trajectory(
                ticket=s,
                sample=0,
                prompt_P=rng.integers(0, 64, 1).astype(np.int32),
                tokens_R=rng.integers(0, 64, tokens - 1).astype(np.int32),
                logprobs_R=np.full(tokens - 1, -4.0, np.float32),
                versions_R=np.zeros(tokens - 1, np.int32),
                loss_mask_R=np.ones(tokens - 1, bool),
                reward=5.0,
                status=Status.RIGHT,
            )
        )
    trained = sum(len(t.tokens_R) for t in trajectories)
    ones = np.ones(len(lengths))
    return LocalBatch(
        trajectories=trajectories,
        advantage_S=ones,
        weight_S=ones,
        minibatch_S=np.zeros(len(lengths), int),
        microbatch_S=number,
        num_microbatches=[len(microbatches)],
        trained_tokens=[trained],
        denominators=[trained],
    )


def micro_batches(repeats: int) -> dict[str, float]:
    """Tokens/s (real ones) of a training step for each way to cut it."""
    lengths, capacity = lognormal(256, 116, 358, 0), 4096
    packed = pack_microbatches(lengths, capacity, 1)
    per_microbatch = capacity // int(lengths.max())  # what surely fits without knowing the lengths
    fixed = [list(range(s, min(s + per_microbatch, len(lengths)))) for s in range(0, len(lengths), per_microbatch)]
    cases = {
        "packed": batch(lengths, packed, padded=False),
        "fixed": batch(lengths, fixed, padded=False),
        "fixed and padded": batch(lengths, fixed, padded=True),
    }
    trainer = Trainer(model(), config.Train(lr=1e-6), temperature=1.0, device=torch.device("cpu"), mesh=None)
    trainer.load(hf.build_random(model(), seed=0).named_parameters())
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            trainer.train_batch(case)
            seconds[name].append(time.perf_counter() - start)
    rates = {name: float(lengths.sum() / statistics.median(found[1:])) for name, found in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:18s} {rate:8,.0f} tokens/s in {cases[name].num_microbatches[0]} micro-batches")
    print(f"fill of the packed ones {lengths.sum() / (len(packed) * capacity):.3f}")
    return rates


def planning() -> list[dict[str, float]]:
    rows = []
    for num, ranks, minibatches in PLANS:
        lengths, group_S, best = lognormal(num, 9280, 28672, 1), np.repeat(np.arange(num // 16), 16), float("inf")
        for _ in range(3):
            start = time.perf_counter()
            plan = plan_batch(lengths, group_S, num_ranks=ranks, num_minibatches=minibatches, capacity_tokens=32768, min_microbatches=1)
            best = min(best, time.perf_counter() - start)
        costs = estimated_cost(lengths, 12 * 1024)
        loads = np.array([np.bincount(plan.rank_S[plan.minibatch_S == m], costs[plan.minibatch_S == m], ranks) for m in range(minibatches)])
        rows.append(
            {"sequences": num, "ranks": ranks, "minibatches": minibatches, "plan_s": best, "max_over_mean": float((loads.max(1) / loads.mean(1)).max())}
        )
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()))
    return rows


def peak_bytes(num_tokens: int, way: str) -> int:
    """Peak resident bytes beyond inputs and accumulated gradients (new gradients included); `way`: ours, or the logits of all tokens at once."""
    torch.manual_seed(0)
    hidden_Md, head_Vd = torch.randn(num_tokens, HIDDEN_SIZE), torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    hidden_Md.grad, head_Vd.grad = torch.ones_like(hidden_Md), torch.ones_like(head_Vd)
    hidden_Md.requires_grad_(), head_Vd.requires_grad_()
    targets_M = torch.randint(0, VOCAB_SIZE, (num_tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here (proc(5))
    before = status_bytes("VmRSS")
    if way == "ours":
        token_scores(hidden_Md, head_Vd, targets_M, 1.0).logprobs_M.sum().backward()
    else:
        torch.log_softmax(hidden_Md @ head_Vd.T, -1).gather(1, targets_M[:, None]).sum().backward()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """An entry of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def memory() -> dict[str, dict[int, float]]:
    """MiB for each way and number of tokens."""
    found: dict[str, dict[int, float]] = {"ours": {}, "all logits": {}}
    for way, by_tokens in found.items():
        for num_tokens in SCORED_TOKENS if way == "ours" else SCORED_TOKENS[:2]:
            command = [sys.executable, __file__, "--child", json.dumps([num_tokens, way])]
            by_tokens[num_tokens] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 2**20
            gradients = (num_tokens + VOCAB_SIZE) * HIDDEN_SIZE * 4 / 2**20
            print(f"{way:10s} {num_tokens:6d} tokens: {by_tokens[num_tokens]:8,.0f} MiB more at the peak, {gradients:,.0f} MiB of them new gradients")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="steps of each way to cut a batch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        print(peak_bytes(*json.loads(args.child)))
        return
    rates = micro_batches(args.repeats)
    result = {"tokens_per_s": rates, "ratio": rates["packed"] / rates["fixed and padded"], "planning": planning(), "logprob_peak_mib": memory()}
    print(json.dumps({"benchmark": "packing", "repeats": args.repeats, **result, "hardware": hardware()}))


if __name__ == "__main__":
    main()
