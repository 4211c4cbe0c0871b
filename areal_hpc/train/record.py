"""What training rank 0 writes down: one row per step, trajectory, push and evaluation; every rank's phases; and the accounting at the end.

The row of a step is written when its push has settled, since confirmation and pause are part of it: the log is one step behind the training.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_hpc.config import Config
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.schema import OUTCOMES, TABLES, fitting
from areal_hpc.observe.state import RANK_STATE, process_state
from areal_hpc.observe.telemetry import Log
from areal_hpc.observe.timeline import Phases
from areal_hpc.topology import World
from areal_hpc.train.collect import EARLIER, Arrival
from areal_hpc.train.compose import Composer, Plan
from areal_hpc.train.diagnostics import BatchStats
from areal_hpc.train.flat import FlatSteps
from areal_hpc.train.publish import Push
from areal_hpc.train.saved import SavedAnswers
from areal_hpc.transport.evaluation import Evaluation, Result
from areal_hpc.transport.messages import Message
from areal_hpc.transport.trajectory import GRADED, Status

GRADED_VALUES = [int(status) for status in GRADED]


@dataclass(slots=True)
class Recorder:
    """The log and the progress display, fed by the training loop on training rank 0."""

    config: Config
    world: World
    log: Log
    progress: Progress
    phases: Phases
    saved: SavedAnswers | None = None
    """Answers saved for reading."""
    tokens_trained: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    accuracy_before: float | None = None
    """Of the first evaluation of the run, in whichever attempt."""
    logged_step: int = 0
    """The row of this step, and so of all before it, is in the log."""
    earlier_s: float = 0.0
    """Seconds of training in the attempts before this one, as far as they count."""
    finals: dict[int, Counter[str]] = field(default_factory=dict)
    """world rank -> counters of its last OBSERVED message."""
    _steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of the latest steps, without what their pushes still have to tell."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _step_began_at: float = 0.0
    _began_at: float = 0.0
    _gap_is_high: bool = False
    _flat: FlatSteps = field(init=False)

    def __post_init__(self) -> None:
        self._flat = FlatSteps(self.config.train.flat_alarm)

    def begin(self) -> None:
        """Training begins now."""
        self._step_began_at = self._began_at = time.monotonic()
        self._seconds = dict(self.phases.seconds)

    def elapsed_s(self) -> float:
        """Seconds of training since the run began, all attempts together."""
        return self.earlier_s + (time.monotonic() - self._began_at if self._began_at else 0.0)

    def step(
        self, step: int, plan: Plan, groups: list[Arrival], stats: BatchStats, composer: Composer, rejected: list[tuple[Arrival, str]] | None = None
    ) -> None:
        """A training step ended. Its trajectories are written now, its row when the push has settled.

        `rejected`: groups closed without training that belong to it; None: all that the composer has not handed out.
        """
        now = time.monotonic()
        table = np.concatenate([group.table for group in groups])
        tokens = int(table["num_tokens"].sum() + sum(group.prompt_tokens * len(group.table) for group in groups))
        self.tokens_trained += tokens
        graded = np.isin(table["status"], GRADED_VALUES)
        trained = plan.weight_S > 0
        ages = plan.age_S[trained] if trained.any() else np.zeros(1, int)
        outcomes = self._trajectories(step, plan, groups, composer.take_rejected() if rejected is None else rejected, table)
        ledger, eta = composer.ledger, self.config.staleness.eta
        spent = self._phase_seconds()
        wall_s, train_s = now - self._step_began_at, spent["train"] + spent["prox"]
        self._watch_gap(step, stats)
        self._watch_flat(step, table["reward"][graded], plan.advantage_S[trained])
        self._steps[step] = {
            "step": step,
            "policy_version": plan.policy_version + 1,
            "wall_s": wall_s,
            "tokens": tokens,
            "trajectories": len(table),
            "tokens_per_s": tokens / wall_s,
            "reward_mean": float(table["reward"][graded].mean()),
            "accuracy": float((table["status"][graded] == int(Status.RIGHT)).mean()),
            "staleness_max": int(ages.max()),
            "staleness_mean": float(ages.mean()),
            "staleness_bound": -1 if eta == float("inf") else int(eta),
            "generation_wait_s": spent["wait_data"],
            "collect_s": spent["collect"],
            "train_s": train_s,
            "loss": stats.loss,
            "entropy": stats.entropy,
            "grad_norm": stats.grad_norm,
            "lr": stats.lr,
            "ratio_mean": stats.ratio_mean,
            "ratio_max": stats.ratio_max,
            "behav_ratio_mean": stats.prox_behav_mean,
            "behav_ratio_max": stats.prox_behav_max,
            "clipped_share": stats.clipped_share,
            "behav_cut_share": stats.cut_share,
            "kl_behav": stats.kl_behav,
            "kl_reference": stats.kl_ref,
            "effective_share": stats.effective_share,
            "logprob_gap": stats.logprob_gap,
            "truncated_share": float((table["status"] == int(Status.TRUNCATED)).mean()),
            "failed": outcomes["failed"],
            "dropped": outcomes["dropped"],
            "filtered": outcomes["filtered"],
            "masked": outcomes["masked"],
            "penalised": plan.num_penalised,
            "overlong": plan.num_overlong,
            "skipped_updates": stats.num_skipped,
            "trained_tokens": stats.train_tokens,
            "trained_tokens_per_s": stats.train_tokens / wall_s,
            "mfu": stats.model_flops / (train_s * stats.peak_flops) if train_s > 0 else float("nan"),
            "peak_memory_bytes": stats.peak_memory_bytes,
            "answer_tokens_mean": float(table["num_tokens"].mean()),
            "closed_tickets": len(ledger.closed),
            "submitted_limit": -1 if eta == float("inf") else ledger.limit,
            "waiting_groups": len(ledger.waiting),
            "end_s": now,
        }
        self._step_began_at = now

    def _watch_gap(self, step: int, stats: BatchStats) -> None:
        """Say, once per crossing, that engine and trainer disagree on the log-probabilities of one and the same version."""
        limit, gap = self.config.train.logprob_alarm, stats.logprob_gap
        if limit == 0 or math.isnan(gap) or (gap > limit) == self._gap_is_high:
            return
        self._gap_is_high = gap > limit
        text = f"step {step}: engine and trainer differ by {gap:.3g} nats per token of the same version ({stats.num_gap_tokens} tokens), "
        text += f"above train.logprob_alarm={limit:g}" if self._gap_is_high else f"no longer above train.logprob_alarm={limit:g}"
        self.log.event(self.world.world_rank, "logprob_alarm" if self._gap_is_high else "logprob_alarm_over", text)
        self.progress.message(f"warning: {text}" if self._gap_is_high else text)

    def _watch_flat(self, step: int, rewards: np.ndarray, advantages: np.ndarray) -> None:
        """Say, once per run of such steps, that there is nothing to learn from: and when that is over."""
        for kind, text in self._flat.look(step, rewards, advantages):
            self.log.event(self.world.world_rank, kind, text)
            self.progress.message(f"warning: {text}" if kind == "flat" else text)

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds in each phase since the last call; the intervals themselves go to the log."""
        self.log.append("timeline", self.phases.drain())
        before, self._seconds = self._seconds, dict(self.phases.seconds)
        return {name: seconds - before[name] for name, seconds in self._seconds.items()}

    def push_settled(self, push: Push) -> None:
        """All ranks have confirmed: the push is written, and the row of the step that made the version."""
        self.log.append("pushes", push.row() | {"announced_s": push.started_at})
        step = self._steps.pop(push.version, None)
        if step is None:
            return
        row = step | {"push_s": push.pack_s + push.transfer_s, "pause_s": max(push.pause_s.values(), default=0.0)}
        self.log.append("steps", row)
        self.logged_step = push.version
        self.progress.step(row)
        waiting = row["waiting_groups"]
        now = {"rank": self.world.world_rank, "role": 1, "time_s": time.monotonic(), "running": 0, "queued": 0, "waiting": waiting, "prefill_tokens": 0}
        self.log.append("ranks", now | {"tokens": self.tokens_trained} | process_state(self.phases))
        self.log.flush()

    def _trajectories(self, step: int, plan: Plan, groups: list[Arrival], rejected: list[tuple[Arrival, str]], table: np.ndarray) -> Counter[str]:
        """Rows of /trajectories for the batch and for what was closed without training; returns the number of each outcome."""
        rows = np.concatenate([self._rows(step, group, plan.policy_version) for group in groups])
        trained_S = plan.weight_S > 0
        graded_S = np.isin(table["status"], GRADED_VALUES)
        rows["outcome"] = np.select([trained_S, graded_S], [OUTCOMES.index("trained"), OUTCOMES.index("masked")], OUTCOMES.index("failed"))
        rows["advantage"] = np.where(trained_S, plan.advantage_S, np.nan)
        rows = np.concatenate([rows, *self._rejected_rows(step, plan.policy_version, rejected)])
        self._append_trajectories(rows)
        return Counter({OUTCOMES[outcome]: int(count) for outcome, count in zip(*np.unique(rows["outcome"], return_counts=True), strict=True)})

    def rejected(self, step: int, groups: list[tuple[Arrival, str]]) -> None:
        """Rows of groups that were closed without training after the last step."""
        if rows := self._rejected_rows(step, step, groups):
            self._append_trajectories(np.concatenate(rows))

    def _append_trajectories(self, rows: np.ndarray) -> None:
        self.log.append("trajectories", rows)
        if self.saved is not None:
            self.saved.closed(rows)

    def _rejected_rows(self, step: int, version: int, rejected: list[tuple[Arrival, str]]) -> list[np.ndarray]:
        found = []
        for group, reason in rejected:
            rows = self._rows(step, group, version)
            closed = OUTCOMES.index("filtered" if reason == "filtered" else "dropped")
            rows["outcome"] = np.where(np.isin(group.table["status"], GRADED_VALUES), closed, OUTCOMES.index("failed"))
            rows["advantage"] = np.nan
            found.append(rows)
        return found

    def _rows(self, step: int, group: Arrival, version: int) -> np.ndarray:
        """Without outcome and advantage. Arrays and no dictionaries: this is the one table that grows with the batch."""
        table, rows = group.table, np.zeros(len(group.table), TABLES["trajectories"].dtype)
        rows["ticket"] = group.ticket
        rows["generation_rank"] = EARLIER if group.generation_rank == EARLIER else self.world.generation_ranks[group.generation_rank]
        rows["batch"] = step
        rows["prompt_tokens"] = group.prompt_tokens
        rows["answer_tokens"], rows["sampled_tokens"], rows["turns"] = table["num_tokens"], table["num_sampled"], table["num_turns"]
        rows["age"] = version - table["version_min"].astype(np.int64)
        rows["waited_s"] = group.waited_s
        for name in ("sample", "version_min", "version_max", "reward", "status", "generated_s", "graded_s"):
            rows[name] = table[name]
        return rows

    def evaluation(self, evaluation: Evaluation) -> None:
        """All shares of an evaluation are here."""
        self.evaluations.append(evaluation)
        if self.accuracy_before is None:
            self.accuracy_before = evaluation.accuracy
        when = {"policy_version": evaluation.version, "step": evaluation.version}
        rest = {"seconds": evaluation.seconds, "temperature": self.config.evaluation.temperature}
        self.log.append("evaluations", when | _numbers(evaluation.total) | rest)
        rows = [when | {"source": fitting("evaluation_sources", "source", result.source)} | _numbers(result) for result in evaluation.sources]
        self.log.append("evaluation_sources", rows)
        if self.saved is not None:
            self.saved.evaluated(evaluation.version)
        total = evaluation.total
        self.progress.evaluation(evaluation.version, total.accuracy, total.num_problems, f"pass@{total.k} {100 * total.pass_k:.1f} %" if total.k > 1 else "")

    def finish_samples(self) -> None:
        """Say what became of the answers saved for reading."""
        if self.saved is not None:
            self.log.event(self.world.world_rank, "samples", self.saved.finish())
            if self.saved.num_lost:
                self.progress.message(f"warning: {self.saved.finish()}")

    def observed(self, message: Message) -> None:
        """Phases and counters of another rank."""
        body = message.body
        self.log.append("timeline", body["phases"])
        row = {name: body[name] for name in RANK_STATE}
        self.lanes(body.get("ring", []))
        role = 1 if message.source in self.world.training_ranks else 0
        when = {"rank": message.source, "time_s": time.monotonic()}
        self.log.append("ranks", row | when | {"role": role})
        if "grading" in body:
            self.log.append("graders", body["grading"] | when)
        if body["final"]:
            self.finals[message.source] = Counter(body["counters"])

    def lanes(self, rows: list[dict[str, Any]]) -> None:
        """State of the lanes of one training rank (`transport.lanes.Incoming.rows`)."""
        self.log.append("ring", rows)

    def account(self, composer: Composer, *, finished: bool = True) -> dict[str, int]:
        """Where every group admitted in this and earlier attempts went. Raises RuntimeError if one is unaccounted for (rank counters against the ledger).

        Of a run that was stopped, groups closed after its checkpoint are counted but not written to the log: they come again when it is resumed.
        """
        total: Counter[str] = Counter()
        for counters in self.finals.values():
            total += counters
        ledger = composer.ledger
        closed, resumed = ledger.num_closed, composer.resumed
        found = {
            "admitted": resumed.total + total["admitted_groups"],
            "trained": closed["trained"],
            "dropped": closed["stale"],
            "filtered": closed["filtered"],
            "failed": closed["failed"],
            "waiting": len(ledger.waiting),
            "in_ring": resumed.closed + resumed.waiting + total["pushed_groups"] - composer.num_arrived,
            "unfinished": total["unfinished_groups"],
        }
        if (
            found["admitted"] != sum(found.values()) - found["admitted"]
            or found["in_ring"] < 0
            or composer.num_arrived != len(ledger.closed) + len(ledger.waiting)
        ):
            raise RuntimeError(f"groups do not add up: {found}, {composer.num_arrived} arrived")
        if finished:
            self.rejected(ledger.policy_version, composer.take_rejected())
        self.log.event(self.world.world_rank, "accounting", " ".join(f"{name}={count}" for name, count in found.items()))
        self.log.event(self.world.world_rank, "counters", " ".join(f"{name}={count}" for name, count in sorted(total.items())))
        if self.config.environment.name:
            said = {name: count for name, count in total.items() if name in ("replies", "environment_failed") or name.startswith("python_")}
            self.progress.message(f"environment {self.config.environment.name}: " + ", ".join(f"{count} {name}" for name, count in said.items()))
        return found


def _numbers(result: Result) -> dict[str, Any]:
    """Columns that /evaluations and /evaluation_sources share."""
    names = ("num_problems", "k", "correct", "accuracy", "ci95", "ci_low", "ci_high", "pass_k", "majority_k", "answer_tokens_mean")
    return {name: getattr(result, name) for name in (*names, "truncated", "no_answer", "ungraded")}
