"""Offline evaluation in one process: the embedded engine on the held-out set, graded by the reward service."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from areal_hpc.config import Config
from areal_hpc.data.datasets import load_problems
from areal_hpc.groups import pick_device
from areal_hpc.models import hf
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines import create_engine
from areal_hpc.rollout.evaluate import EVALUATION_IDS, EvaluationInProgress, evaluation_request
from areal_hpc.train.checkpoint import load_weights_from
from areal_hpc.transport.evaluation import summarise


def evaluate_model(config: Config, folder: Path) -> str:
    """Accuracy of the model in `folder`, as one line. The same problems and random numbers as the evaluations of a run with this configuration."""
    torch.set_num_threads(config.topology.threads_per_rank)
    problems = load_problems(config.data).heldout[: config.evaluation.num_problems]
    tokenizer = Tokenizer.from_folder(folder)
    engine = create_engine(config, hf.load_config(folder), tokenizer.stop_token_ids, pick_device(config.device, 0))
    engine.update_weights(load_weights_from(folder), 0)
    rewards = RewardService.start()
    rewards.configure(config.data, config.reward)
    running = EvaluationInProgress(0, list(range(len(problems))))
    for index, problem in enumerate(problems):
        engine.add([evaluation_request(config, problem, index, tokenizer)])
    began_at = time.monotonic()
    while not running.complete:
        for completion in engine.step() if engine.num_running + engine.num_waiting else []:
            index = completion.request_id - EVALUATION_IDS
            running.tokens[index] = len(completion.tokens_R)
            rewards.submit(completion.request_id, index, tokenizer.decode(completion.tokens_R), truncated=completion.finish == "length", split="heldout")
        idle = engine.num_running + engine.num_waiting == 0
        for verdict in rewards.wait(1.0) if idle else rewards.poll():
            running.verdicts[verdict.job_id - EVALUATION_IDS] = verdict
    rewards.close()
    found = summarise([running.share()])
    rate = sum(running.tokens.values()) / (time.monotonic() - began_at)
    return (
        f"{folder}: accuracy {100 * found.accuracy:.1f} % +- {100 * found.ci95:.1f} ({found.correct} of {found.num_problems} held-out problems, "
        f"temperature {config.evaluation.temperature:g}), {found.answer_tokens_mean:.1f} tokens per answer, {rate:,.0f} tokens/s"
    )
