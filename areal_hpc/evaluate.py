"""Offline evaluation in one process: the embedded engine on the held-out set, graded by the reward service.

Leaves in its folder: results.json (numbers and configuration), samples/ (answers, as a run leaves them), samples.html (the same to browse).
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_hpc import __version__
from areal_hpc.config import Config, ConfigError, to_dict
from areal_hpc.data.datasets import Problems, load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.groups import pick_device
from areal_hpc.models import hf
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.observe import samples
from areal_hpc.reward.service import RewardService
from areal_hpc.rollout.engines import create_engine
from areal_hpc.rollout.engines.base import Engine
from areal_hpc.rollout.evaluate import EvaluationInProgress, evaluation_requests
from areal_hpc.rollout.turns import Turns
from areal_hpc.train.checkpoint import load_weights_from
from areal_hpc.transport.evaluation import Evaluation, Result, source_of, summarise


@dataclass(frozen=True, slots=True)
class Offline:
    """An evaluation of one folder."""

    config: Config
    folder: Path
    evaluation: Evaluation
    tokens_per_s: float
    problems: Problems

    @property
    def line(self) -> str:
        """The result in one line."""
        total, temperature = self.evaluation.total, self.config.evaluation.temperature
        if total.k == 1:
            counted = f"accuracy {100 * total.accuracy:.1f} % +- {100 * total.ci95:.1f} ({total.correct} of {total.num_problems} held-out problems"
        else:
            counted = f"avg@{total.k} {100 * total.accuracy:.1f} % +- {100 * total.ci95:.1f} ({total.num_problems} held-out problems x {total.k} answers"
        rest = f"{total.answer_tokens_mean:.1f} tokens per answer, {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.folder}: {counted}, temperature {temperature:g}), {rest}"

    @property
    def left_out(self) -> str:
        """Problems of the data that could not be used, in one line; empty: none."""
        report, most = self.problems.report, self.config.data.max_prompt_tokens
        counts = {f"prompts of more than data.max_prompt_tokens={most} tokens": report.num_overlong, "rows that cannot be used": report.num_invalid}
        return ", ".join(f"left out of the data: {count} {what}" for what, count in counts.items() if count)

    @property
    def table(self) -> str:
        """One line per source, and one for all where there are several."""
        evaluation = self.evaluation
        rows = [*evaluation.sources, *([dataclasses.replace(evaluation.total, source="all")] if len(evaluation.sources) > 1 else [])]
        k = evaluation.total.k
        many = [f"pass@{j}" for j in rows[0].passes if j > 1] + [f"majority@{k}"] if k > 1 else []
        header = ["source", "problems", f"avg@{k}", "95 % interval", *many, "tokens", "truncated", "no answer", "ungraded"]
        return _aligned([header, *(_cells(row) for row in rows)])

    def to_json(self) -> dict[str, Any]:
        """Everything that was found and what it was found with."""
        evaluation = self.evaluation
        return {
            "model": str(self.folder),
            "areal_hpc": __version__,
            "fingerprint": self.problems.fingerprint,
            "num_overlong": self.problems.report.num_overlong,
            "num_invalid": self.problems.report.num_invalid,
            "temperature": self.config.evaluation.temperature,
            "total": _plain(evaluation.total),
            "sources": [_plain(result) for result in evaluation.sources],
            "seconds": evaluation.seconds,
            "tokens_per_s": self.tokens_per_s,
            "config": to_dict(self.config),
        }


def _plain(result: Result) -> dict[str, Any]:
    """JSON has no not-a-number: null."""
    values = {item.name: getattr(result, item.name) for item in dataclasses.fields(result) if item.name != "passes"}
    values |= {"accuracy": result.accuracy, "ci95": result.ci95, **{f"pass_{j}": value for j, value in result.passes.items()}}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _cells(row: Result) -> list[str]:
    def percent(value: float) -> str:
        return "-" if math.isnan(value) else f"{100 * value:.1f}"

    many = [percent(value) for j, value in row.passes.items() if j > 1] + [percent(row.majority_k)] if row.k > 1 else []
    between = f"{percent(row.ci_low)} - {percent(row.ci_high)}"
    counts = [str(count) for count in (row.truncated, row.no_answer, row.ungraded)]
    return [row.source, str(row.num_problems), percent(row.accuracy), between, *many, f"{row.answer_tokens_mean:.1f}", *counts]


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def evaluate_model(config: Config, folder: Path, out: Path) -> Offline:
    """Evaluate the model in `folder`, write the results into the folder `out`, return them. Raises ConfigError for data that does not fit.

    The same problems and random numbers as the evaluations of a run with this configuration.
    """
    torch.set_num_threads(config.topology.threads_per_rank)
    tokenizer = Tokenizer.from_folder(folder)
    prompts = Prompts(config.data, tokenizer)
    problems = prompts.fitting(load_problems(config.data))
    try:
        engine = create_engine(config, hf.load_config(folder), tokenizer.stop_token_ids, pick_device(config.device, 0))
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}; lower --data.max-prompt-tokens or --generation.max-new-tokens") from error
    engine.update_weights(load_weights_from(folder), 0)
    running = EvaluationInProgress.of(config, 0, list(range(len(problems.heldout[: config.evaluation.num_problems]))))
    began_at = time.monotonic()
    with RewardService.start() as rewards:
        rewards.configure(config.data, config.reward, environment=config.environment)
        turns = Turns(config.environment, engine, rewards, tokenizer, prompts)
        for index in running.problems:
            turns.add(evaluation_requests(config, problems.heldout[index], index, prompts))
        _answer_all(running, problems, engine, turns)
    rate = sum(running.tokens.values()) / (time.monotonic() - began_at)
    found = Offline(config, folder, summarise([running.share()], [source_of(problem) for problem in problems.heldout]), rate, problems)
    (out / "results.json").write_text(json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
    saved = running.saved_answers()
    if saved:
        rows = [samples.record(answer, problems.heldout[answer.problem], kind="evaluation", version=0) for answer in saved]
        samples.add_records(out / samples.FOLDER / samples.file_name("evaluation", 0), rows)
        samples.write_page(out, out / "samples.html", f"Answers of {folder}")
    return found


def _answer_all(running: EvaluationInProgress, problems: Problems, engine: Engine, turns: Turns) -> None:
    while not running.complete:
        for completion in engine.step() if engine.num_running + engine.num_waiting else []:
            turns.ended(completion, problems.position("heldout", running.problem_of(completion.request_id)), "heldout")
        idle = engine.num_running + engine.num_waiting == 0
        for answer, verdict in turns.poll(1.0 if idle else 0.0):
            running.graded(answer, verdict, problems.heldout)
