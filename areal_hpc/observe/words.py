"""What bounds a run, in words, and the next thing to try: from shares of time alone, so that the report, the live view and a log that still grows use the same judgement.

The better split rests on one assumption: the rank-seconds that each role works for a step stay the same when they are divided among more or fewer ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_hpc.observe.progress import FEW
from areal_hpc.observe.runs import Run, roles, share
from areal_hpc.observe.schema import BUSY

WORTH_IT = 1.05
"""Predicted gain in throughput below which another split is not advised."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares (0 to 1) of the training time, means over the ranks of a role."""

    waited: float
    """Training ranks waited for data."""
    gated: float
    """Generation ranks stood at the gate."""
    full: float
    """Generation ranks stood before a full ring."""
    pushed: float
    """Training ranks packed and pushed weights."""
    generation_busy: float
    training_busy: float
    num_generation: int
    num_training: int

    @classmethod
    def of(cls, run: Run) -> Shares | None:
        """None without a training step, or with one role only."""
        found = {
            "waited": share(run, "training", ("wait_data",)),
            "gated": share(run, "generation", ("gated",)),
            "full": share(run, "generation", ("ring_full",)),
            "pushed": share(run, "training", ("pack", "push_wait")),
            "generation_busy": share(run, "generation", BUSY["generation"]),
            "training_busy": share(run, "training", BUSY["training"]),
        }
        known = {name: value for name, value in found.items() if value is not None}
        of_role = list(roles(run).values())
        return cls(**known, num_generation=of_role.count("generation"), num_training=of_role.count("training")) if len(known) == len(found) else None

    @property
    def bound_by(self) -> str:
        """`generation`, `training` or `balanced`: the role that the other one waited for."""
        if max(self.waited, self.gated + self.full) < FEW:
            return "balanced"
        return "generation" if self.waited >= self.gated + self.full else "training"


@dataclass(frozen=True, slots=True)
class Split:
    """Another division of the same ranks."""

    num_generation: int
    num_training: int
    gain: float
    """Throughput of it over that of the run, if work divides evenly."""


def best_split(shares: Shares) -> Split:
    """The division of the run's ranks under which neither role waits longer than it must; the run's own if no other is better."""
    generation, training = shares.num_generation * shares.generation_busy, shares.num_training * shares.training_busy
    num_ranks = shares.num_generation + shares.num_training

    def seconds(num_generation: int) -> float:
        return max(generation / num_generation, training / (num_ranks - num_generation))

    now_s = seconds(shares.num_generation)
    best = min(range(1, num_ranks), key=lambda num: (seconds(num), abs(num - shares.num_generation)))
    return Split(best, num_ranks - best, now_s / seconds(best) if seconds(best) > 0 else 1.0)


def bottleneck(shares: Shares | None, eta: int, cores: int | None = None) -> str:
    """A few sentences: which role waited for which, how much, and what to try next.

    `eta`: the bound on staleness, -1 without one; `cores`: that the rank which wrote the log could use.
    """
    if shares is None:
        return "no training step finished, so nothing can be said about a bottleneck."
    facts = f"training ranks waited for data {percent(shares.waited)} of the time, generation ranks stood at the gate {percent(shares.gated)}"
    facts += f" and before a full ring {percent(shares.full)}" if shares.full >= 0.005 else ""
    if eta == 0:
        text = f"synchronous (max_staleness = 0), so the roles take turns: {facts}. A larger max_staleness lets them overlap."
    elif shares.bound_by == "balanced":
        text = f"balanced: {facts}. Only more ranks, or less work for a step, would make it faster."
    else:
        text = f"{shares.bound_by} bound: {facts}{_advice(shares)}"
    if shares.pushed >= 2 * FEW:
        text += f" Weight pushes took {percent(shares.pushed)} of the training ranks' time."
    num_ranks = shares.num_generation + shares.num_training
    if cores is not None and 0 < cores < num_ranks:
        text += f" All {num_ranks} ranks were seen from a node with {cores} usable cores: where ranks share a core, the work of one role slows the other."
    return text


def _advice(shares: Shares) -> str:
    if shares.bound_by == "generation" and shares.gated >= FEW:
        return ". A larger max_staleness would open the gate earlier."
    now, best = f"{shares.num_generation} + {shares.num_training}", best_split(shares)
    if best.gain >= WORTH_IT:
        fraction = best.num_generation / (best.num_generation + best.num_training)
        option = f"--topology.generation-fraction {fraction:.3g}"
        return f"; {best.num_generation} + {best.num_training} ranks would balance ({option}; it was {now}), for about {best.gain:.2f} x the tokens/s."
    if shares.bound_by == "generation":
        return f"; {now} is the best split of these ranks: add generation ranks, or let more sequences run on each (generation.max_num_running)."
    return f"; {now} is the best split of these ranks: add training ranks."


def percent(value: float) -> str:
    """0.614 -> 61 %."""
    return f"{100 * value:.0f} %"
