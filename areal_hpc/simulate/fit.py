"""Every parameter of the simulator from the log of a run of ours, so that other settings of the same job can be predicted.

    lengths      the logged groups, drawn with replacement                                    /trajectories
    decoding     least squares over the intervals between two reports of a generation rank:
                 decode seconds = base_s * steps + per_sequence_s * tokens, steps = tokens / running; then one factor on both,
                 such that the simulated run spends as many decode seconds per token as the log       /ranks, /timeline
    training     least squares over the steps: train_s = step_s + token_s * tokens / T; what the step
                 took besides (collecting, packing, the log) is added to step_s, as its median      /steps
    push         median transfer                                                               /pushes
    swap         seconds in that phase per generation rank and version, KV cache recomputed included  /timeline
    grading      mean over the groups of their slowest answer                                  /trajectories

Coefficients are zero or more. Evaluations are left out: a held-out setting is predicted without them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from areal_hpc.config import Config, ConfigError, num_training_ranks
from areal_hpc.config_io import load_yaml
from areal_hpc.observe.runs import Run, attempt_logs, load, phase_seconds
from areal_hpc.observe.schema import PHASES, ROLES
from areal_hpc.observe.telemetry import read_table
from areal_hpc.recipes import recipe
from areal_hpc.simulate.cluster import Job, Result, simulate
from areal_hpc.simulate.costs import DecodeCost, PushCost, TrainCost
from areal_hpc.simulate.lengths import LoggedLengths

FIRST_STEPS = 0.2
"""Share of the steps left out of fits and rates: caches, buffers and queues fill up."""
SCALE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What a log says about costs."""

    config: Config
    """Of the run."""
    base_s: float
    per_sequence_s: float
    token_s: float
    """Training, per token and rank."""
    step_s: float
    push: PushCost
    reward_s: float
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """(prompt tokens, answer tokens) of each logged group."""
    tokens_per_s: float
    """Measured, without the first steps."""
    staleness_mean: float

    def parameters(self) -> dict[str, float]:
        """By name, in seconds."""
        names = ("base_s", "per_sequence_s", "token_s", "step_s", "reward_s")
        return {name: getattr(self, name) for name in names} | {f"push.{name}": getattr(self.push, name) for name in ("pack_s", "transfer_s", "swap_s")}

    def job(self, config: Config) -> Job:
        """The job of `config` at these costs. Raises ConfigError where the log cannot tell (longer answers than any it holds)."""
        cap, logged = config.generation.max_new_tokens, self.config.generation.max_new_tokens
        if cap > logged:
            raise ConfigError(
                f"generation.max_new_tokens={cap}: the run had {logged}, and its log does not say how long longer answers would be; use at most {logged}"
            )
        num_training = num_training_ranks(config.topology.num_ranks, config.topology.generation_fraction)
        groups = tuple((prompt, tuple(min(length, cap) for length in answers)) for prompt, answers in self.groups)
        return Job(
            num_generation=config.topology.num_ranks - num_training,
            num_training=num_training,
            batch_size=config.train.batch_size,
            group_size=config.train.group_size,
            eta=config.staleness.eta,
            mode=config.staleness.mode,
            num_steps=config.train.num_steps,
            decode=DecodeCost(base_s=self.base_s, per_sequence_s=self.per_sequence_s, max_num_running=config.generation.max_num_running),
            train=TrainCost(
                token_s=self.token_s,
                step_s=self.step_s,
                capacity_tokens=config.train.microbatch_tokens,
                min_microbatches=config.train.min_microbatches,
                num_minibatches=config.train.num_minibatches,
            ),
            push=self.push,
            reward_s=self.reward_s,
            lengths=LoggedLengths(groups, config.seed),
        )


def fit(run_dir: Path) -> Fitted:
    """Costs of a finished run. Raises ConfigError when there is no log or it is too short (fewer than 5 steps)."""
    run = load(run_dir)
    log = attempt_logs(run_dir)[-1]
    config = _config(run, log)
    steps = run.steps[int(len(run.steps) * FIRST_STEPS) :]
    if len(steps) < 4:
        raise ConfigError(f"{run_dir}: {len(run.steps)} logged steps are too few to fit from; use a run of 5 or more")
    num_training = int(run.attributes["num_training_ranks"])
    base_s, per_sequence_s, decode_s_per_token = _decoding(run, read_table(log, "ranks"))
    step_s, token_s = nonnegative(np.stack([np.ones(len(steps)), steps["tokens"] / num_training], 1), steps["train_s"])
    other_s = float(np.median(steps["wall_s"] - steps["generation_wait_s"] - steps["train_s"]))
    pushes = run.pushes[1:] if len(run.pushes) > 1 else run.pushes
    groups, reward_s = _groups(run.trajectories)
    found = Fitted(
        config=config,
        base_s=base_s,
        per_sequence_s=per_sequence_s,
        token_s=token_s,
        step_s=step_s + max(0.0, other_s),
        push=PushCost(transfer_s=float(np.median(pushes["transfer_s"])), swap_s=_swap_s(run)),
        reward_s=reward_s,
        groups=groups,
        tokens_per_s=float(steps["tokens"].sum() / steps["wall_s"].sum()),
        staleness_mean=float(steps["staleness_mean"].mean()),
    )
    return _scaled(found, decode_s_per_token)


def predict(job: Job) -> Result:
    """The steady part of the simulated job."""
    return simulate(job).steady(FIRST_STEPS)


def _config(run: Run, log: Path) -> Config:
    return load_yaml(str(log.parent / "config.yaml"), recipe("laptop"))


def _scaled(found: Fitted, decode_s_per_token: float) -> Fitted:
    """One factor on the decode costs: running sequences between two reports are not known, decode seconds per token are."""
    for _ in range(SCALE_ROUNDS):
        result = simulate(found.job(found.config))
        factor = decode_s_per_token * result.num_tokens_decoded / sum(seconds.decode for seconds in result.seconds)
        found = replace(found, base_s=found.base_s * factor, per_sequence_s=found.per_sequence_s * factor)
    return found


def nonnegative(columns_NK: np.ndarray, target_N: np.ndarray) -> list[float]:
    """Least squares with coefficients of zero or more: the best subset of the (two) columns whose coefficients are."""
    num = columns_NK.shape[1]
    best, best_error = [0.0] * num, float(np.square(target_N).sum())
    for subset in range(1, 2**num):
        chosen = [k for k in range(num) if subset >> k & 1]
        solution = np.linalg.lstsq(columns_NK[:, chosen], target_N, rcond=None)[0]
        error = float(np.square(columns_NK[:, chosen] @ solution - target_N).sum())
        if (solution >= 0).all() and error < best_error * (1 - 1e-9):
            best, best_error = [0.0] * num, error
            for k, value in zip(chosen, solution, strict=True):
                best[k] = float(value)
    return best


def _decoding(run: Run, ranks: np.ndarray) -> tuple[float, float, float]:
    """(base_s, per_sequence_s, decode seconds per decoded token over all generation ranks)."""
    columns, target = [], []
    timeline, decode = run.timelines[-1], PHASES.index("decode")
    ranks = ranks[ranks["role"] == ROLES.index("generation")]
    total_s = total_tokens = 0.0
    for rank in np.unique(ranks["rank"]):
        rows, mine = ranks[ranks["rank"] == rank], timeline[timeline["rank"] == rank]
        total_s += phase_seconds(mine, -np.inf, np.inf)[int(rank)][decode]
        total_tokens += int(rows["tokens"].max())
        for before, after in itertools.pairwise(rows):
            tokens, running = float(after["tokens"] - before["tokens"]), (int(before["running"]) + int(after["running"])) / 2
            if tokens > 0 and running > 0:
                columns.append([tokens / running, tokens])
                target.append(phase_seconds(mine, float(before["time_s"]), float(after["time_s"]))[int(rank)][decode])
    if not columns or not total_tokens:
        raise ConfigError("the log holds no two reports of a decoding rank: the run was too short to fit from")
    base_s, per_sequence_s = nonnegative(np.array(columns), np.array(target))
    if base_s == per_sequence_s == 0:
        per_sequence_s = total_s / total_tokens
    return base_s, per_sequence_s, total_s / total_tokens


def _swap_s(run: Run) -> float:
    """Mean over the generation ranks and versions. (`pause_max_s` of /pushes is zero where the push was logged before the last rank had swapped.)"""
    swap = PHASES.index("swap")
    timeline = run.timelines[-1][run.timelines[-1]["role"] == ROLES.index("generation")]
    by_rank = phase_seconds(timeline, -np.inf, np.inf)
    return float(np.mean([seconds[swap] for seconds in by_rank.values()])) / max(1, len(run.pushes)) if by_rank else 0.0


def _groups(trajectories: np.ndarray) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], float]:
    """(prompt and answer tokens of each group, mean over the groups of the longest grading)."""
    groups, slowest = [], []
    for ticket in np.unique(trajectories["ticket"]):
        rows = trajectories[trajectories["ticket"] == ticket]
        groups.append((int(rows["prompt_tokens"][0]), tuple(int(length) for length in rows["answer_tokens"])))
        slowest.append(float(rows["graded_s"].max()))
    return tuple(groups), float(np.mean(slowest))
