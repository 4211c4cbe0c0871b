"""Checks that need files but no rank, no GPU and no torch: found by the launcher before `mpiexec` starts."""

from __future__ import annotations

from pathlib import Path

from areal_hpc.config import Config, ConfigError


def check_inputs(config: Config) -> None:
    """Data and model folder. Raises ConfigError: malformed data, prompt longer than allowed, missing model files."""
    from areal_hpc.data.datasets import load_problems
    from areal_hpc.models.tokenizer import Tokenizer, build

    problems = load_problems(config.data)
    if config.model_source:
        tokenizer = Tokenizer.from_folder(model_folder(Path(config.model_source)))
    else:
        from areal_hpc.data.worked import worked_solution

        if config.model.warmstart_steps:
            for problem in {problem.source: problem for problem in problems.train}.values():
                worked_solution(problem)  # raises when a task has no worked solutions to warm-start on
        tokenizer = build(problems, config.data.suffix)
    limit = config.data.max_prompt_tokens
    for split in (problems.train, problems.heldout):
        for problem in split:
            num_tokens = len(tokenizer.encode(problem.question + config.data.suffix))
            if num_tokens > limit:
                raise ConfigError(
                    f"{problem.source} problem {problem.index}: its prompt has {num_tokens} tokens, data.max_prompt_tokens is {limit}; raise it or drop the problem"
                )


def model_folder(path: Path) -> Path:
    """A Hugging Face folder or checkpoint; for a run folder its final model, else its newest checkpoint. Raises ConfigError when there is none."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    if (path / "config.json").is_file():
        return path
    if (path / "model" / "config.json").is_file():
        return path / "model"
    checkpoints = sorted((path / "checkpoints").glob("step-??????"))
    if checkpoints:
        return checkpoints[-1]
    raise ConfigError(f"{path} holds neither a model (config.json) nor a run with a model or checkpoint")
