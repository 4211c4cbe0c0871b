"""The small model that a run starts from when it is given none: built from the problems' characters, then taught by worked solutions.

    1. tokenizer from the characters of the problems, random decoder of the Qwen2 architecture
    2. `warmstart_steps` supervised steps: maximise the log-probability of worked solutions (answer and end token; the prompt is not trained);
       matrices of the layers by Muon, the rest by AdamW; in the last `warmstart_direct_steps` most solutions are the answer alone
    3. written as a Hugging Face folder, under a name that is the hash of everything it depends on, so the next run finds it

It plays the part of a pre-trained model: good enough to be right now and then, which reinforcement learning needs. What made it quick, held-out loss after
100 steps of 64 solutions of chain_sum (nats per token): AdamW 1.38; first weights of size 1/sqrt(width) 0.88; Muon 0.70; both and a short rotary base 0.36.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import areal_hpc
from areal_hpc.config import Data, Model
from areal_hpc.data import files, worked
from areal_hpc.data.datasets import GOLD_MARKER, Problem, Problems, load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.models import hf, tokenizer
from areal_hpc.models.decoder import Decoder, DecoderConfig, Packed

MAX_POSITION_EMBEDDINGS = 4096
WARMUP_SHARE = 0.05
"""Share of the steps over which the learning rate rises."""
FINAL_LR_SHARE = 0.1
DIRECT_SHARE = 0.75
"""Share of solutions without steps in the last `warmstart_direct_steps`."""
MAX_GRAD_NORM = 1.0
MUON_LR = 0.02
MUON_MOMENTUM = 0.95
ROPE_THETA = 100.0
"""Base of the rotary frequencies: answers are tens of tokens long, so longer wavelengths than a few hundred tokens would say nothing."""
MAX_THREADS = 2


def cached_model(model: Model, data: Data, cache_dir: Path, num_threads: int | None = None) -> Path:
    """Hugging Face folder of the warm-started model for these settings, built on first use.

    Two processes may race: each builds its own, the first rename wins, the loser discards its copy. Raises ConfigError for data without worked solutions.
    """
    name = re.sub(r"[^\w.-]+", "_", Path(data.path).stem) if data.path else data.tasks[0]  # a glob has characters that names of folders should not have
    folder = cache_dir / f"{name}-{cache_key(model, data)[:16]}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        print(f"building the small model: {model.warmstart_steps} supervised steps, a minute or two; kept in {folder}", flush=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".building-") as private:
            built = Path(private) / folder.name
            warmstart(model, data, built, num_threads or spare_threads())
            with contextlib.suppress(OSError):  # not empty: somebody else was first, and the same settings gave the same model
                built.rename(folder)
    assert (folder / "config.json").is_file(), folder
    return folder


def spare_threads() -> int:
    """Threads to build a model with (the run's other ranks sleep then): two where a core is idle, else one, as threads that wait for a busy core are far slower."""
    samples = []
    for _ in range(5):
        samples.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))  # processes that run at this moment, this one included (proc(5))
        time.sleep(0.02)
    others = sorted(samples)[2] - 1
    return MAX_THREADS if len(os.sched_getaffinity(0)) - others >= MAX_THREADS else 1


def cache_key(model: Model, data: Data) -> str:
    """SHA-256 (hexadecimal) of the settings, the content of data files, and the code that turns them into weights (versions, and the sources that shape it)."""
    sources = (__file__, worked.__file__, tokenizer.__file__)
    given = {"data.path": data.path, "data.heldout_path": data.heldout_path}
    tables = [table for option, path in given.items() if path for table in files.find(option, path)[0]]
    settings = {
        "model": {key: value for key, value in dataclasses.asdict(model).items() if key not in ("path", "dtype")},
        "data": dataclasses.asdict(data),
        "sources": [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources],
        "files": [hashlib.sha256(table.path.read_bytes()).hexdigest() for table in tables],
        "versions": [areal_hpc.__version__, importlib.metadata.version("reasoning-gym"), torch.__version__],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def warmstart(model: Model, data: Data, folder: Path, num_threads: int = 1) -> None:
    """Build, train and write the model. Same settings, same machine, same threads: same bits. Raises ConfigError for data without worked solutions."""
    problems = load_problems(data)
    tokens = build_tokenizer(problems, data)
    prompts = Prompts(data, tokens)
    decoder = hf.build_random(decoder_config(model, tokens), model.warmstart_seed)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    supervise(decoder, _batches(prompts.fitting(problems).train, tokens, prompts, model, data.worked), model)
    torch.set_num_threads(threads_before)
    hf.save(folder, decoder.config.to_hf(), decoder.named_parameters(), tokens.files)


def build_tokenizer(problems: Problems, data: Data) -> tokenizer.Tokenizer:
    """The small model's tokenizer: the characters of prompts and worked solutions."""
    characters = data.suffix + data.system_prompt
    if data.worked == "steps":
        return tokenizer.build(problems, characters)
    return tokenizer.build(problems, characters + worked.PYTHON_CHARACTERS, worked.PYTHON_PHRASES)


def decoder_config(model: Model, tokens: tokenizer.Tokenizer) -> DecoderConfig:
    """Shape of the small model: Qwen2 with tied embeddings."""
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=tokens.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_theta=ROPE_THETA,
        initializer_range=model.hidden_size**-0.5,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )


def example(problem: Problem, tokens: tokenizer.Tokenizer, prompts: Prompts, *, with_steps: bool, style: str = "steps") -> tuple[np.ndarray, int, np.ndarray]:
    """(prompt and solution as one int32 array, length of the prompt, bool [R]: solution tokens that are learned, which an environment's are not).

    Each turn of the model ends with the end token. Without steps the solution is the answer alone. `style`: data.worked.
    """
    prompt_P = prompts.tokens(problem)
    turns = worked.worked_turns(problem, style) if with_steps else (f"{GOLD_MARKER}{problem.answer}",)
    parts = [
        prompts.reply_tokens(text) if number % 2 else np.append(tokens.encode(text, add_special_tokens=False), tokens.eos_token_id)
        for number, text in enumerate(turns)
    ]
    learned_R = np.concatenate([np.full(len(part), number % 2 == 0) for number, part in enumerate(parts)])
    return np.concatenate([prompt_P, *parts]).astype(np.int32), len(prompt_P), learned_R


def _batches(problems: Sequence[Problem], tokens: tokenizer.Tokenizer, prompts: Prompts, model: Model, style: str) -> Iterator[Packed]:
    """One batch a step; each problem once before any comes again."""
    rng, order = np.random.default_rng(model.warmstart_seed), np.zeros(0, np.int64)
    for step in range(model.warmstart_steps):
        while len(order) < model.warmstart_batch_size:
            order = np.append(order, rng.permutation(len(problems)))
        chosen, order = order[: model.warmstart_batch_size], order[model.warmstart_batch_size :]
        direct = step >= model.warmstart_steps - model.warmstart_direct_steps
        with_steps = rng.random(len(chosen)) >= (DIRECT_SHARE if direct else 0)
        examples = [example(problems[k], tokens, prompts, with_steps=bool(steps), style=style) for k, steps in zip(chosen, with_steps, strict=True)]
        sequences, prompt_lengths, masks = zip(*examples, strict=True)
        yield Packed.build(sequences, prompt_lengths, masks=masks)


def supervise(decoder: Decoder, batches: Iterator[Packed], model: Model) -> list[float]:
    """Supervised steps: Muon and AdamW, linear warm-up, then cosine to 10 %. Returns the loss of each step (nats per token)."""
    matrices = [parameter for parameter in decoder.model.layers.parameters() if parameter.ndim == 2]
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    others = [parameter for name, parameter in decoder.named_parameters() if parameter.ndim < 2 or "layers" not in name]
    optimizer = torch.optim.AdamW(others, lr=model.warmstart_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    losses = []
    for step in range(model.warmstart_steps):
        share = _schedule(step, model.warmstart_steps)
        optimizer.param_groups[0]["lr"] = model.warmstart_lr * share
        loss = -decoder(next(batches), temperature=1.0).logprobs_M.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        muon_step(matrices, momenta, MUON_LR * share)
        decoder.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def muon_step(matrices: list[torch.nn.Parameter], momenta: list[torch.Tensor], lr: float) -> None:
    """Muon (kellerjordan.github.io/posts/muon): Nesterov momentum whose singular values are set to about one, scaled by sqrt(rows / columns) where that exceeds one.

    torch.optim.Muon computes in bfloat16, which takes 16 times as long as float32 on a CPU without such instructions.
    """
    for matrix, momentum in zip(matrices, momenta, strict=True):
        assert matrix.grad is not None
        momentum.mul_(MUON_MOMENTUM).add_(matrix.grad)
        update = orthogonalised(matrix.grad + MUON_MOMENTUM * momentum)
        matrix.sub_(update, alpha=lr * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def orthogonalised(matrix: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """A matrix with the same singular vectors and singular values near one (0.7 to 1.2), by a quintic Newton-Schulz iteration."""
    x = matrix / (matrix.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(num_iterations):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def _schedule(step: int, num_steps: int) -> float:
    """Share of the peak learning rate."""
    warmup = max(1, round(WARMUP_SHARE * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
