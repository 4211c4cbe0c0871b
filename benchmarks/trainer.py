"""Trained tokens/s of our training step beside that of TRL's GRPOTrainer: same model, sequences, optimiser and cores, both on one process.

    .venv/bin/python benchmarks/trainer.py                 # about ten minutes on 2 cores; makes build/peers-venv on first use
    .venv/bin/python benchmarks/trainer.py --ours-only     # without TRL

Sequences: prompts of 8 to 24 tokens, answers of 4 to 96 (uniform; `--constant`: all 96), B = 128 in groups of 8, random weights. A step is forward, loss, backward,
clipping and AdamW; nothing is generated. Tokens: prompts and answers of the batch / wall time of the step; both sides run in turns, medians over steps and turns,
TRL with the micro-batch that suits it best. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl_rival
from small_models import SHAPES, write_model

from areal_hpc import config
from areal_hpc.models import hf
from areal_hpc.observe.telemetry import hardware
from areal_hpc.train.batching import plan_batch
from areal_hpc.train.trainer import LocalBatch, Trainer
from areal_hpc.transport.trajectory import Status, Trajectory

NUM_BATCHES = 4
GROUP_SIZE = 8
WARM_UP = 2
"""Steps that do not count."""


def sequences(samples: int, vocab_size: int, *, constant: bool) -> list[list[Trajectory]]:
    """Global batches of made-up trajectories; the same for both sides."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(NUM_BATCHES):
        batch = []
        for k in range(samples):
            if k % GROUP_SIZE == 0:
                prompt_P = rng.integers(3, vocab_size, rng.integers(8, 25)).astype(np.int32)
            length = 96 if constant else int(rng.integers(4, 97))
            batch.append(
                Trajectory(
                    ticket=k // GROUP_SIZE,
                    sample=k % GROUP_SIZE,
                    prompt_P=prompt_P,
                    tokens_R=rng.integers(3, vocab_size, length).astype(np.int32),
                    logprobs_R=np.full(length, -np.log(vocab_size), np.float32),
                    versions_R=np.zeros(length, np.int32),
                    loss_mask_R=np.ones(length, bool),
                    reward=5.0,
                    status=Status.RIGHT,
                )
            )
        batches.append(batch)
    return batches


def local_batch(trajectories: list[Trajectory], microbatch_tokens: int) -> LocalBatch:
    plan = plan_batch(
        [t.num_tokens for t in trajectories],
        [t.ticket for t in trajectories],
        num_ranks=1,
        num_minibatches=1,
        capacity_tokens=microbatch_tokens,
        min_microbatches=1,
    )
    trained = sum(len(t.tokens_R) for t in trajectories)
    return LocalBatch(
        trajectories=trajectories,
        advantage_S=advantages(len(trajectories)),
        weight_S=np.ones(len(trajectories)),
        minibatch_S=plan.minibatch_S,
        microbatch_S=plan.microbatch_S,
        num_microbatches=plan.num_microbatches_M.tolist(),
        trained_tokens=[trained],
        denominators=[trained],
    )


def advantages(num: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=num)


def ours(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of our training steps, in this process."""
    torch.set_num_threads(settings["threads"])
    model = Path(settings["model"])
    trainer = Trainer(hf.load_config(model), config.Train(lr=settings["lr"]), temperature=1.0, device=torch.device("cpu"), mesh=None)
    trainer.load(hf.load_weights(model))
    data = sequences(settings["samples"], trainer.decoder_config.vocab_size, constant=settings["constant"])
    batches = [local_batch(batch, settings["microbatch_tokens"]) for batch in data]
    step_s = []
    for step in range(settings["steps"]):
        start = time.perf_counter()
        trainer.train_batch(batches[step % NUM_BATCHES])
        step_s.append(time.perf_counter() - start)
    return {"step_s": step_s}


def in_own_process(settings: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(settings)], capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def save_sequences(path: Path, batches: list[list[Trajectory]]) -> None:
    columns: dict[str, Any] = {"num_batches": len(batches)}
    for b, batch in enumerate(batches):
        columns[f"{b}.advantages"] = advantages(len(batch))
        for s, trajectory in enumerate(batch):
            columns[f"{b}.{s}.prompt"], columns[f"{b}.{s}.answer"] = trajectory.prompt_P, trajectory.tokens_R
    np.savez(path, **columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1M", help="model")
    parser.add_argument("--samples", type=int, default=128, help="trajectories of a step")
    parser.add_argument("--constant", action="store_true", help="all answers have 96 tokens")
    parser.add_argument("--steps", type=int, default=10, help="steps of each turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--microbatch-tokens", type=int, default=4096, help="ours: tokens of a micro-batch")
    parser.add_argument("--microbatch", type=int, nargs="+", default=[16, 32, 128], help="TRL: sequences of a micro-batch; the best counts")
    parser.add_argument("--ours-only", action="store_true", help="leave TRL out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(ours(json.loads(args.child))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), args.size)
        settings = {
            "model": str(model),
            "problems": str(Path(folder) / "problems.jsonl"),
            "sequences": str(Path(folder) / "sequences.npz"),
            "threads": args.threads,
            "samples": args.samples,
            "group_size": GROUP_SIZE,
            "constant": args.constant,
            "steps": args.steps,
            "lr": 1e-6,
            "max_new_tokens": 96,
            "microbatch_tokens": args.microbatch_tokens,
        }
        batches = sequences(args.samples, hf.load_config(model).vocab_size, constant=args.constant)
        save_sequences(Path(settings["sequences"]), batches)
        tokens = statistics.mean(sum(t.num_tokens for t in batch) for batch in batches)
        step_s: dict[str, list[float]] = {"ours": [], **({} if args.ours_only else {f"trl-{size}": [] for size in args.microbatch})}
        for turn in range(args.turns):
            for name, found in step_s.items():
                side = in_own_process(settings) if name == "ours" else trl_rival.run("step", settings | {"microbatch": int(name.removeprefix("trl-"))})
                found += side["step_s"][WARM_UP:]
                print(f"turn {turn}  {name:8s} {tokens / statistics.median(found):9,.0f} tokens/s", flush=True)
    rates = {name: tokens / statistics.median(found) for name, found in step_s.items()}
    best = max((rate for name, rate in rates.items() if name != "ours"), default=None)
    ratio = rates["ours"] / best if best else None
    options = {name: value for name, value in vars(args).items() if name != "child"}
    print(
        json.dumps({"benchmark": "trainer", "unit": "trained tokens/s", **options, "tokens_per_s": rates, "ratio_to_best_trl": ratio, "hardware": hardware()})
    )


if __name__ == "__main__":
    main()
