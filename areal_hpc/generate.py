"""`areal-hpc generate MODEL PROMPTS.jsonl`: answers to a file of prompts with either engine, each rank with its share of them.

    areal-hpc generate RUN prompts.jsonl --num-samples 4                    one process
    mpiexec -n 8 areal-hpc generate MODEL prompts.jsonl --out answers.jsonl    the same answers, from eight

One JSON object a line in, with `prompt` (a user's message) or `messages` (role and content of each); one line out for each answer, in the order of prompts and samples.
Answers do not depend on the number of ranks (embedded engine). Prompts that are too long are answered with an `error` in their place.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.config import Config, ConfigError
from areal_hpc.launch.local import is_rank, world_rank_hint

DEADLINE_S = 24 * 3600.0
"""That a rank waits for the others to end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt."""

    number: int
    text: str
    messages: tuple[tuple[str, str], ...]


def read_prompts(path: Path) -> list[Row]:
    """Raises ConfigError "FILE:LINE: reason"."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    rows: list[Row] = []
    for line, content in enumerate(lines, start=1):
        if content.strip():
            try:
                rows.append(_row(len(rows), json.loads(content)))
            except ValueError as error:
                raise ConfigError(f"{path}:{line}: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no prompts")
    return rows


def _row(number: int, value: Any) -> Row:
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return Row(number, value["prompt"], ())
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('expected an object with "prompt" (text) or "messages" (a list)')
    found: tuple[Any, ...] = tuple((message.get("role"), message.get("content")) for message in messages if isinstance(message, dict))
    if len(found) < len(messages) or not all(isinstance(part, str) for message in found for part in message) or found[-1][0] != "user":
        raise ValueError('"messages" must be objects with the texts "role" and "content", the last one of role "user"')
    return Row(number, found[-1][1], found if len(found) > 1 else ())


def answers(config: Config, folder: Path, rows: Sequence[Row], num_samples: int, temperature: float) -> Iterator[dict[str, Any]]:
    """One object per answer, as they finish. Raises ConfigError for a model that the engine does not take."""
    import torch

    from areal_hpc.data.datasets import Problem
    from areal_hpc.data.prompts import Prompts
    from areal_hpc.groups import pick_device
    from areal_hpc.models import hf
    from areal_hpc.models.tokenizer import Tokenizer
    from areal_hpc.rollout.engines import Request, create_engine
    from areal_hpc.rollout.engines.sampling import stream_key
    from areal_hpc.train.checkpoint import load_weights_from

    torch.set_num_threads(config.topology.threads_per_rank)
    tokenizer = Tokenizer.from_folder(folder)
    prompts, generation = Prompts(config.data, tokenizer), config.generation
    try:
        engine = create_engine(config, hf.load_config(folder), tokenizer.stop_token_ids, pick_device(config.device, 0))
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}; lower --data.max-prompt-tokens or --generation.max-new-tokens") from error
    engine.update_weights(load_weights_from(folder), 0)
    waiting = iter(rows)
    left = True
    while left or engine.num_running or engine.num_waiting:
        while left and engine.num_running + engine.num_waiting < generation.max_num_running:
            row = next(waiting, None)
            if row is None:
                left = False
                break
            prompt_P = prompts.tokens(Problem(row.number, row.text, "", "file", messages=row.messages))
            if len(prompt_P) > config.data.max_prompt_tokens:
                too_long = f"prompt of {len(prompt_P)} tokens exceeds data.max_prompt_tokens={config.data.max_prompt_tokens}"
                yield from ({"prompt": row.number, "sample": sample, "error": too_long} for sample in range(num_samples))
                continue
            engine.add(
                [
                    Request(
                        request_id=row.number * num_samples + sample,
                        prompt_tokens=prompt_P,
                        stream=stream_key(config.seed, row.number, sample),
                        max_new_tokens=generation.max_new_tokens,
                        temperature=temperature,
                    )
                    for sample in range(num_samples)
                ]
            )
        for done in engine.step():
            number, sample = divmod(done.request_id, num_samples)
            yield {
                "prompt": number,
                "sample": sample,
                "answer": tokenizer.decode(done.tokens_R),
                "tokens": len(done.tokens_R),
                "finish": done.finish,
                "logprob": float(done.logprobs_R.sum()),
            }


def generate(config: Config, folder: Path, prompts: Path, out: Path, num_samples: int, temperature: float) -> str:
    """Answer all prompts, each rank its share; rank 0 joins them in `out`. Returns what to say (rank 0), else nothing."""
    rows, began_at = read_prompts(prompts), time.monotonic()
    if not is_rank():
        found = sorted(answers(config, folder, rows, num_samples, temperature), key=_place)
        _write(out, found)
        return _said(found, time.monotonic() - began_at, 1, out)
    from areal_hpc import guard

    with guard.deadline_of_mpi_start(None, f"rank {world_rank_hint()}", config.transport.start_deadline_s):
        from mpi4py import MPI
    comm = MPI.COMM_WORLD
    try:
        mine = list(answers(config, folder, rows[comm.rank :: comm.size], num_samples, temperature))
        request, stop_at = comm.Ibarrier(), time.monotonic() + DEADLINE_S
        while not request.Test():  # asleep: others may need the core
            if time.monotonic() > stop_at:
                raise TimeoutError(f"rank {comm.rank} waited {DEADLINE_S:g} s for the others")
            time.sleep(0.01)
        parts = comm.gather(mine)
        found = sorted((row for part in parts for row in part), key=_place) if parts is not None else []
        if parts is not None:
            _write(out, found)
    except ConfigError:  # on every rank alike
        raise
    except Exception:  # noqa: BLE001 (whatever it is, the others would wait for ever)
        import traceback

        print(f"rank {comm.rank} failed, the job ends:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        comm.Abort(1)
    return _said(found, time.monotonic() - began_at, comm.size, out) if comm.rank == 0 else ""


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["prompt"], row["sample"]


def _write(out: Path, found: Sequence[dict[str, Any]]) -> None:
    """Whole or not at all. Raises ConfigError when the place refuses."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
        partial.rename(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _said(found: Sequence[dict[str, Any]], seconds: float, num_ranks: int, out: Path) -> str:
    good = [row for row in found if "error" not in row]
    tokens = sum(row["tokens"] for row in good)
    cut = sum(row["finish"] == "length" for row in good)
    errors = f", {len(found) - len(good)} of prompts that are too long" if len(good) < len(found) else ""
    return f"{out}: {len(good)} answers, {cut} cut at generation.max_new_tokens{errors}; {tokens:,} tokens in {seconds:.1f} s on {num_ranks} ranks, loading included"
