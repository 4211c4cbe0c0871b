"""An eta = 0 job against a serial re-implementation that shares no code with it: `transformers`, one answer at a time, padded, torch.optim.AdamW.

Only the definition of the run is shared: which problem a ticket asks and which uniform number draws a token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch

from areal_hpc.config import Config, Staleness, Topology
from areal_hpc.data.datasets import load_problems, score
from areal_hpc.data.tickets import Tickets
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.reward.answers import extract
from areal_hpc.rollout.engines.sampling import stream_key, uniforms

pytestmark = pytest.mark.mpi


def sample(model: torch.nn.Module, prompt: list[int], stream: int, config: Config, eos: int) -> tuple[list[int], list[float]]:
    """One answer, without cache: the whole sequence is computed again for every token."""
    tokens, logprobs = list(prompt), []
    for position in range(config.generation.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double() / config.generation.temperature
        probabilities = torch.softmax(logits, -1)
        uniform = uniforms(np.array([stream], np.uint64), np.array([position]))[0]
        token = int(torch.searchsorted(torch.cumsum(probabilities, 0), torch.tensor(uniform, dtype=torch.float64), right=True))
        tokens.append(token)
        logprobs.append(float(torch.log(probabilities[token])))
        if token == eos:
            break
    return tokens[len(prompt) :], logprobs


def reference_run(config: Config) -> torch.nn.Module:
    """`num_steps` steps of synchronous decoupled PPO on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    words, problems = Tokenizer.from_folder(config.model.path), load_problems(config.data)
    tickets, train = Tickets(len(problems.train), config.seed), config.train
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=train.lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
    )
    for step in range(train.num_steps):
        batch = []
        for ticket in range(step * config.groups_per_batch, (step + 1) * config.groups_per_batch):
            problem = problems.train[tickets.problem_index(ticket)]
            prompt = words.encode(problem.question + config.data.suffix).tolist()
            for n in range(train.group_size):
                answer, behav = sample(model, prompt, stream_key(config.seed, ticket, n), config, words.eos_token_id)
                right = score(problem, extract(words.decode(answer))) == 1.0
                # A reward that a random model earns often enough to learn from: see `config` below.
                batch.append((ticket, prompt, answer, behav, config.reward.right if right else config.reward.wrong))
        optimise(model, optimizer, batch, config)
    return model


def optimise(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list, config: Config) -> None:
    """One step on the batch: advantages, pi_prox, eq. 5, AdamW."""
    groups = {ticket: np.array([row[4] for row in batch if row[0] == ticket]) for ticket, *_ in batch}
    raw = [0.0 if groups[t].std() == 0 else (reward - groups[t].mean()) / groups[t].std() for t, _, _, _, reward in batch]
    advantages = np.array(raw) / max(np.sqrt(np.mean(np.square(raw))), 1e-6)
    prox = [answer_logprobs(model, prompt, answer, config).detach() for _, prompt, answer, _, _ in batch]
    total, count = torch.zeros(()), sum(len(answer) for _, _, answer, _, _ in batch)
    for (_, prompt, answer, behav, _), advantage, prox_R in zip(batch, advantages, prox, strict=True):
        ratio = torch.exp(answer_logprobs(model, prompt, answer, config) - prox_R)
        clipped = ratio.clamp(0.8, 1.2)  # the default objective's published range
        weight = torch.exp(prox_R - torch.tensor(behav, dtype=torch.float32))
        total = total - (weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
    optimizer.zero_grad()
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    optimizer.step()


def answer_logprobs(model: torch.nn.Module, prompt: list[int], answer: list[int], config: Config) -> torch.Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / config.generation.temperature
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(("num_ranks", "fraction"), [(2, 0.75), (4, 0.5)])
def test_synchronous_job_equals_the_serial_reference(base: Config, tmp_path: Path, num_ranks: int, fraction: float) -> None:
    """Parameters after three steps, within 1e-5. The data's answers are what the random model often writes, so that rewards vary within groups."""
    from transformers import AutoModelForCausalLM

    rows = "".join(f'{{"question": "say {k}", "answer": "{k % 3}"}}\n' for k in range(40))
    (tmp_path / "data.jsonl").write_text(rows)
    config = replace(
        base,
        data=replace(base.data, path=str(tmp_path / "data.jsonl"), heldout_fraction=0.2),
        model=replace(base.model, path=str(taught_model(Path(base.model.path), tmp_path))),
        staleness=Staleness(max_staleness=0),
        topology=Topology(num_ranks=num_ranks, generation_fraction=fraction),
        generation=replace(base.generation, temperature=0.9),
        evaluation=replace(base.evaluation, num_problems=2),
        train=replace(base.train, lr=1e-3),
    )
    job = jobs.run(config, tmp_path / "run")
    accuracy = job.table("steps")["accuracy"]
    assert (accuracy > 0).all() and (accuracy < 1).all(), "the comparison needs rewards of both kinds"
    expected = dict(reference_run(config).named_parameters())
    found = dict(AutoModelForCausalLM.from_pretrained(job.run_dir / "model", dtype=torch.float32).named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).named_parameters())
    assert max(float((before[name] - found[name]).detach().abs().max()) for name in found) > 1e-3, "the model did learn something"
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def taught_model(source: Path, tmp_path: Path) -> Path:
    """The tiny model after a few supervised steps on '#### digit': it answers in the right form, with a random digit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    words = Tokenizer.from_folder(source)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = []
        for _ in range(16):
            prompt = words.encode(f"say {rng.integers(40)}\n").tolist()
            rows.append((prompt, [*words.encode(f"#### {rng.integers(4)}").tolist(), words.eos_token_id]))
        losses = [torch.nn.functional.cross_entropy(model(torch.tensor([p + a])).logits[0, len(p) - 1 : -1], torch.tensor(a)) for p, a in rows]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    folder = tmp_path / "taught"
    model.save_pretrained(folder)
    words.save(folder)
    return folder
