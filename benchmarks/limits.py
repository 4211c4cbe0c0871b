"""What no program can pass in the paper's settings, from data sheets alone, and how much of it the paper and our simulator reach. No GPU, a minute of one core.

    .venv/bin/python benchmarks/limits.py

All in k tokens/s of global batches, prompts included, for batches of 8,192 trajectories of 9,276 tokens, at 100 % of a device's memory bandwidth or FLOP/s:

    decode     generation ranks read all weights once a step and the cached tokens of every running sequence; as many run as the cache holds, at most 256 a GPU
    training   8 FLOPs a token and parameter (pi_prox, forward, backward) and attention, on the training ranks
    tail       synchronous only: a batch takes at least as long as its longest answer, one token a step, each step one reading of the weights

An asynchronous run is bound by the lesser of decode and training; a synchronous one by the sum of its phases' times, of which the tail is the least generation can take.
Last line: one JSON object.
"""

from __future__ import annotations

import json
from dataclasses import replace

from areal_hpc.models.flops import matrix_parameters
from areal_hpc.simulate import hardware, paper

Limits = dict[str, float]


def limits(name: str, gpus: int, context: int) -> Limits:
    """k tokens/s: `decode`, `training`, `tail`, and what follows for `asynchronous` and `synchronous` (both on the split of three quarters and one)."""
    gpu, preset = hardware.device("h800"), hardware.model(name)
    engines, trainers = gpus * 3 // 4 // preset.tensor_parallel, gpus // 4
    lengths = paper.lengths(context)
    groups = [lengths.group(ticket, paper.GROUP) for ticket in range(paper.BATCH // paper.GROUP)]
    tokens_S = [prompt + answer for prompt, answers in groups for answer in answers]
    answer_tokens, tokens = sum(sum(answers) for _, answers in groups), sum(tokens_S)
    mean_context = sum(length * length for length in tokens_S) / (
        2 * tokens
    )  # of a token that is decoded: half of its sequence's length, long sequences weighing more
    running = min(256 * preset.tensor_parallel, hardware.kv_capacity(gpu, preset, preset.tensor_parallel) / mean_context)
    bandwidth = preset.tensor_parallel * gpu.bandwidth
    step_s = (preset.weight_bytes + preset.kv_bytes * mean_context * running) / bandwidth
    decode_s = answer_tokens / (engines * running / step_s)
    shape = preset.shape
    flops = sum(8 * matrix_parameters(shape) * n + 8 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * n * n for n in tokens_S)
    train_s = flops / (trainers * gpu.flops)
    tail_s = max(answer for _, answers in groups for answer in answers) * preset.weight_bytes / bandwidth
    seconds = {"decode": decode_s, "training": train_s, "tail": tail_s}
    seconds |= {"asynchronous": max(decode_s, train_s), "synchronous": max(decode_s, tail_s) + train_s}
    return {what: tokens / second / 1e3 for what, second in seconds.items()}


def main() -> None:
    """A table, then the JSON object."""
    rows = []
    print(f"{'setting':18s} {'':12s} {'decode':>8s} {'training':>9s} {'tail':>8s} {'limit':>8s} {'simulated':>16s} {'paper':>16s}")
    for name, gpus in (("1.5b", 128), ("7b", 128), ("32b", 256)):
        bound = limits(name, gpus, 32768)
        job = paper.asynchronous(name, gpus, 32768, 8, 12)
        for way, eta in (("asynchronous", 8), ("synchronous", 0)):
            found = paper.throughput(replace(job, eta=eta, num_steps=12 if eta else 4))
            theirs = paper.FIG_5C[eta] if (name, gpus) == ("1.5b", 128) else None
            row = {"setting": f"{name.upper()}, {gpus} GPUs", "way": way, **bound, "limit": bound[way], "simulated": found, "paper": theirs}
            rows.append(row)
            reached = [f"{value:8.1f} ({100 * value / bound[way]:4.1f} %)" if value else f"{'-':>17s}" for value in (found, theirs)]
            tail = f"{bound['tail']:8.1f}" if way == "synchronous" else f"{'-':>8s}"
            print(
                f"{row['setting']:18s} {way:12s} {bound['decode']:8.1f} {bound['training']:9.1f} {tail} {bound[way]:8.1f} {reached[0]} {reached[1]}", flush=True
            )
    print(json.dumps({"benchmark": "limits", "unit": "k tokens/s", "rows": rows}))


if __name__ == "__main__":
    main()
