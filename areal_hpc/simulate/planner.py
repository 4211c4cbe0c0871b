"""Which split, tensor parallelism, staleness and batch for a model and a number of GPUs: every choice simulated, the rest of the answer follows from the best one.

1. split       all divisions of the GPUs at eta = 4, the asked batch and the smallest tensor parallelism that fits; the best throughput wins
2. engines     the next larger tensor parallelism at that split
3. staleness   the smallest eta that gives at least 97 % of the best: older data teaches worse (Table 2 of arXiv 2505.24298)
4. batch       the smallest of B/4, B/2, B that gives at least 95 % of the largest

One after the other, not jointly: a larger engine together with another split can be a few percent better. A tie (within 2 %) goes to the smaller tensor
parallelism, then to more generation ranks, since answers grow while a model learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from areal_hpc.config import ConfigError
from areal_hpc.simulate import hardware
from areal_hpc.simulate.cluster import Job, Result, simulate
from areal_hpc.simulate.costs import TrainCost
from areal_hpc.simulate.lengths import LogNormalLengths

TRAINING_SHARES = (1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
ETAS = (1, 2, 4, 8)
PLANNED_ETA = 4
NUM_STEPS = 14
"""Simulated steps of each choice."""
SKIP = 0.5
"""Share of them left out: the first batches are short answers, since these finish first."""
GPUS_PER_NODE = 8
TIE = 0.02
ETA_SHARE, BATCH_SHARE = 0.97, 0.95
WAITING, NO_WAITING = 0.10, 0.02
"""Share of the time above which a role's waiting is called a bound; below which training never waits, and so is the bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the user asks for."""

    model: str
    gpus: int
    context: int = 32768
    """Prompt and answer, tokens."""
    device: str = "h100"
    batch_size: int = 8192
    group_size: int = 16
    num_minibatches: int = 4
    microbatch_tokens: int = 32768
    prompt: int = 500
    mean_answer: float | None = None
    """Mean answer tokens; none: 8,776, the paper's, cut at the context."""
    sigma: float = 0.85
    seed: int = 0

    def lengths(self) -> LogNormalLengths:
        """Raises ConfigError when the mean does not fit below the cap."""
        cap = self.context - 2 * self.prompt
        if cap < 2:
            raise ConfigError(f"--context {self.context} leaves no room for answers beside prompts of {self.prompt} tokens")
        if self.mean_answer is None:
            return replace(LogNormalLengths.with_mean(8776, self.sigma, 27648, self.prompt, seed=self.seed), cap=cap)
        try:
            return LogNormalLengths.with_mean(self.mean_answer, self.sigma, cap, self.prompt, seed=self.seed)
        except ValueError as error:
            raise ConfigError(f"--mean: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One setting and what it gives."""

    num_training: int
    tensor_parallel: int
    eta: float
    batch_size: int
    colocated: bool
    tokens_per_s: float
    step_s: float
    staleness_mean: float
    waiting_share: float
    """Of the time, training waits for generation."""
    idle_share: float
    """Of the time, engines have nothing to decode."""

    @property
    def bound(self) -> str:
        """What bounds it, in words."""
        if self.colocated:
            return "one after the other"
        if self.eta == 0:
            return "synchronous: the longest answers"
        if self.waiting_share > WAITING:
            return "the gate: too little may run ahead" if self.idle_share > WAITING else "generation"
        return "training" if self.waiting_share < NO_WAITING else "balanced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer."""

    wanted: Wanted
    best: Choice
    splits: list[Choice]
    """At eta = 4 and the asked batch, engines as small as they can be, least training first."""
    engines: list[Choice]
    """The best split with larger engines."""
    etas: list[Choice]
    batches: list[Choice]
    synchronous: list[Choice]
    """Of the same split at eta = 0, and colocated."""
    generation_bytes: dict[str, float]
    """Of each generation device."""
    training_bytes: dict[str, float]


def train_cost(wanted: Wanted) -> TrainCost:
    cost = hardware.train_cost(hardware.device(wanted.device), hardware.model(wanted.model), num_minibatches=wanted.num_minibatches)
    return replace(cost, capacity_tokens=max(wanted.microbatch_tokens, wanted.context))


def job(wanted: Wanted, *, num_training: int, tensor_parallel: int, eta: float, batch_size: int, num_steps: int, colocated: bool = False) -> Job:
    """Ours: staged push, sharded training. Raises ConfigError for what cannot be."""
    gpu, preset = hardware.device(wanted.device), hardware.model(wanted.model)
    generating = wanted.gpus if colocated else wanted.gpus - num_training
    if generating < tensor_parallel or generating % tensor_parallel:
        raise ConfigError(f"{generating} generation GPUs do not divide into engines of {tensor_parallel}; use another split or --tp")
    trajectories, trainers = batch_size // wanted.num_minibatches, wanted.gpus if colocated else num_training
    if trajectories < trainers:
        raise ConfigError(
            f"{trainers} training GPUs need that many trajectories in a mini-batch, which has {trajectories}; "
            f"use --batch {trainers * wanted.num_minibatches} or more"
        )
    if batch_size % (wanted.group_size * wanted.num_minibatches):
        raise ConfigError(
            f"--batch {batch_size} is not a multiple of {wanted.group_size * wanted.num_minibatches}: "
            f"{wanted.group_size} answers x {wanted.num_minibatches} mini-batches"
        )
    return Job(
        num_generation=generating // tensor_parallel,
        num_training=trainers,
        batch_size=batch_size,
        group_size=wanted.group_size,
        eta=eta,
        num_steps=num_steps,
        decode=hardware.decode_cost(gpu, preset, tensor_parallel, staging=not colocated),
        train=train_cost(wanted),
        lengths=wanted.lengths(),
        push=hardware.push_cost(gpu, preset, tensor_parallel, trainers),
        colocated=colocated,
    )


def simulated(wanted: Wanted, num_training: int, tensor_parallel: int, eta: float, batch_size: int, colocated: bool = False) -> Choice:
    """Simulate one setting."""
    described = job(
        wanted, num_training=num_training, tensor_parallel=tensor_parallel, eta=eta, batch_size=batch_size, num_steps=NUM_STEPS, colocated=colocated
    )
    return choice_of(described, simulate(described), tensor_parallel, wanted.gpus)


def choice_of(described: Job, result: Result, tensor_parallel: int, gpus: int) -> Choice:
    """What the result says."""
    steady = result.steady(SKIP)
    return Choice(
        num_training=gpus if described.colocated else described.num_training,
        tensor_parallel=tensor_parallel,
        eta=described.eta,
        batch_size=described.batch_size,
        colocated=described.colocated,
        tokens_per_s=steady.tokens_per_s,
        step_s=steady.wall_s / len(steady.steps),
        staleness_mean=steady.staleness_mean,
        waiting_share=sum(step.wait_s for step in steady.steps) / steady.wall_s,
        idle_share=result.share("idle"),
    )


def splits_of(gpus: int) -> list[int]:
    """Numbers of training GPUs worth a look."""
    return sorted({max(1, min(gpus - 1, round(gpus * share))) for share in TRAINING_SHARES})


def engines_of(wanted: Wanted) -> list[int]:
    """Tensor parallelisms that fit: the smallest whose devices hold weights, a staging copy and some contexts, and its double. Raises ConfigError if none does."""
    gpu, preset = hardware.device(wanted.device), hardware.model(wanted.model)
    fitting = [tp for tp in (1, 2, 4, 8) if tp <= wanted.gpus - 1 and hardware.kv_capacity(gpu, preset, tp, staging=True) >= 4 * wanted.context]
    if not fitting:
        raise ConfigError(
            f"{preset.name} with a context of {wanted.context} tokens does not fit engines of up to 8 {gpu.name} among {wanted.gpus}; "
            "use more GPUs or a smaller --context"
        )
    return fitting[:2]


def plan(wanted: Wanted, say: Callable[[str], None] = lambda text: None) -> Plan:
    """Some 20 simulations, each of which `say` hears of: minutes for a thousand GPUs. Raises ConfigError when the model does not fit."""

    def choose(num_training: int, tensor_parallel: int, eta: float, batch_size: int, colocated: bool = False) -> Choice:
        split = "colocated" if colocated else f"{wanted.gpus - num_training} + {num_training}"
        say(f"simulating {split}, engines of {tensor_parallel}, eta = {eta:g}, B = {batch_size:,}")
        return simulated(wanted, num_training, tensor_parallel, eta, batch_size, colocated)

    engines = engines_of(wanted)
    training = [t for t in splits_of(wanted.gpus) if fits_training(wanted, t)]
    if not training:
        raise ConfigError(f"{hardware.model(wanted.model).name}: optimiser state and activations do not fit {wanted.gpus - 1} training GPUs; use more GPUs")
    possible = [t for t in training if (wanted.gpus - t) % engines[0] == 0 and wanted.batch_size // wanted.num_minibatches >= t]
    if not possible:
        raise ConfigError(f"--batch {wanted.batch_size} is too small for any split of {wanted.gpus} GPUs")
    splits = [choose(t, engines[0], PLANNED_ETA, wanted.batch_size) for t in possible]
    split = best_of(splits)
    larger = [choose(split.num_training, tp, PLANNED_ETA, wanted.batch_size) for tp in engines[1:] if (wanted.gpus - split.num_training) % tp == 0]
    split = best_of([split, *larger])
    etas = [split if eta == PLANNED_ETA else choose(split.num_training, split.tensor_parallel, eta, wanted.batch_size) for eta in ETAS]
    fastest = max(choice.tokens_per_s for choice in etas)
    eta = next(choice.eta for choice in etas if choice.tokens_per_s >= ETA_SHARE * fastest)
    unit = wanted.group_size * wanted.num_minibatches
    sizes = sorted({max(unit, wanted.batch_size // part // unit * unit) for part in (4, 2)} | {wanted.batch_size})
    batches = [choose(split.num_training, split.tensor_parallel, eta, size) for size in sizes if size // wanted.num_minibatches >= split.num_training]
    best = next(choice for choice in batches if choice.tokens_per_s >= BATCH_SHARE * batches[-1].tokens_per_s)
    synchronous = [choose(split.num_training, split.tensor_parallel, 0, best.batch_size)]
    if best.batch_size // wanted.num_minibatches >= wanted.gpus and wanted.gpus % split.tensor_parallel == 0:
        synchronous.append(choose(wanted.gpus, split.tensor_parallel, 0, best.batch_size, colocated=True))
    return Plan(
        wanted=wanted,
        best=best,
        splits=splits,
        engines=larger,
        etas=etas,
        batches=batches,
        synchronous=synchronous,
        generation_bytes=generation_bytes(wanted, split.tensor_parallel),
        training_bytes=hardware.training_bytes(hardware.model(wanted.model), split.num_training, max(wanted.microbatch_tokens, wanted.context)),
    )


def best_of(choices: list[Choice]) -> Choice:
    """The fastest; within 2 % of it the smaller tensor parallelism, then more generation ranks."""
    fastest = max(choice.tokens_per_s for choice in choices)
    near = [choice for choice in choices if choice.tokens_per_s >= (1 - TIE) * fastest]
    return min(near, key=lambda choice: (choice.tensor_parallel, choice.num_training))


def fits_training(wanted: Wanted, num_training: int) -> bool:
    """Optimiser state, weights and activations fit the device."""
    needs = hardware.training_bytes(hardware.model(wanted.model), num_training, max(wanted.microbatch_tokens, wanted.context))
    return sum(needs.values()) <= hardware.MEMORY_SHARE * hardware.device(wanted.device).memory_bytes


def generation_bytes(wanted: Wanted, tensor_parallel: int) -> dict[str, float]:
    """Of each device of an engine."""
    gpu, preset = hardware.device(wanted.device), hardware.model(wanted.model)
    weights = preset.weight_bytes / tensor_parallel
    capacity = hardware.kv_capacity(gpu, preset, tensor_parallel, staging=True)
    per_token = preset.kv_bytes / min(tensor_parallel, preset.shape.num_key_value_heads)
    return {"weights": weights, "staging": weights, "KV cache": capacity * per_token, "activations, graphs": hardware.RESERVED_BYTES}


def sbatch_line(found: Plan) -> str:
    """How to submit it."""
    best, wanted = found.best, found.wanted
    fraction = (wanted.gpus - best.num_training) / wanted.gpus
    nodes = -(-wanted.gpus // GPUS_PER_NODE)
    options = [
        f"--topology.generation-fraction {fraction:g}",
        f"--staleness.max-staleness {best.eta:g}",
        f"--train.batch-size {best.batch_size}",
        f"--train.group-size {wanted.group_size}",
        f"--train.num-minibatches {wanted.num_minibatches}",
        f"--train.microbatch-tokens {max(wanted.microbatch_tokens, wanted.context)}",
        f"--generation.max-new-tokens {wanted.lengths().cap}",
        f"--data.max-prompt-tokens {wanted.context - wanted.lengths().cap}",
    ]
    return f"sbatch --nodes={nodes} slurm/areal_64gpu.sh " + " ".join(options)


def hours(choice: Choice, trajectories: int) -> float:
    """To train that many trajectories."""
    return trajectories / choice.batch_size * choice.step_s / 3600


def plot(found: Plan, path: Path) -> None:
    """Throughput over splits and over eta, with the synchronous baselines. PNG."""
    from areal_hpc.observe import plots

    splits = [(100 * (1 - c.num_training / found.wanted.gpus), c.tokens_per_s) for c in found.splits]
    baselines = {("colocated" if c.colocated else "same split, eta = 0"): c.tokens_per_s for c in found.synchronous}
    plots.plan(splits, [(c.eta, c.tokens_per_s) for c in found.etas], baselines, path)
