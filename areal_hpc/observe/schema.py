"""The tables of `log.h5` and of the tapes `tape-RRRR.h5`: columns, units, definitions. The one place that fixes the file formats.

1. A `Table` is a tuple of `Column`s; its numpy compound dtype is what HDF5 stores (fixed width only: variable-length types break under SWMR).
2. `to_rows` turns one dict, a list of dicts or a structured array into rows of that dtype and refuses what would lose something:
   an unknown or missing column, a fraction in an integer column, a number out of range, a string that is too long.
3. `listing` renders everything as Markdown; docs/file_format.md holds that text, and a test compares the two.

    python -m areal_hpc.observe.schema        # prints the listing
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_hpc.transport.trajectory import Status

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes away; new tables and columns do not raise it."""

ROLES = ("generation", "training")
GENERATION_PHASES = ("start", "decode", "gated", "swap", "ring_full", "evaluate", "idle", "stop")
TRAINING_PHASES = ("start", "wait_data", "collect", "prox", "train", "pack", "push_wait", "evaluate", "save", "log", "stop", "decode", "swap")
"""The last two of colocated ranks only."""
PHASES = GENERATION_PHASES + tuple(name for name in TRAINING_PHASES if name not in GENERATION_PHASES)
"""Names of the numbers in /timeline; a later version only appends."""
PHASES_OF_ROLE = {"generation": GENERATION_PHASES, "training": TRAINING_PHASES}
BUSY = {"generation": ("decode", "swap", "evaluate"), "training": ("collect", "prox", "train", "pack", "decode", "swap")}
"""Phases in which a rank of the role works; in the others it waits, starts, saves or stops."""
PAUSED = ("swap",)
"""Of these, those in which decoding stands still for new weights."""
LANE_WAYS = ("shared memory", "forwarded")
OUTCOMES = ("trained", "dropped", "failed", "masked", "filtered")
SAVE_OUTCOMES = ("complete", "failed", "skipped_busy", "skipped_no_room")
STATUSES = tuple(status.name.lower() for status in Status)
CALLS = ("add", "finish", "swap", "abort", "lease")
"""Names of the numbers in /calls."""

Rows = np.ndarray | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What `append` takes: a structured array, one row as a dict, or a list of such dicts."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `names[k]` says what the number k means, where the numbers are an enumeration."""

    name: str
    dtype: str
    unit: str
    definition: str
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Unit, definition and names in one line: the attribute that a reader of the file sees."""
        names = f" ({', '.join(f'{k} {name}' for k, name in enumerate(self.names))})" if self.names else ""
        return f"[{self.unit}] {self.definition}{names}"

    @property
    def numpy(self) -> np.dtype:
        """As stored; strings are marked UTF-8 for h5py."""
        return np.dtype(self.dtype, metadata={"h5py_encoding": "utf-8"}) if self.dtype.startswith("S") else np.dtype(self.dtype)

    @property
    def type_name(self) -> str:
        """As documented: int32, float64, 240 bytes."""
        return f"{self.dtype[1:]} bytes" if self.dtype.startswith("S") else np.dtype(self.dtype).name


@dataclass(frozen=True, slots=True)
class Table:
    """One data set of the file. `split`: the text column whose long values continue in further rows."""

    name: str
    definition: str
    chunk_rows: int
    columns: tuple[Column, ...]
    split: str = ""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype([(column.name, column.numpy) for column in self.columns])

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def _steps() -> Table:
    c = Column
    return Table(
        "steps",
        "one row per training step (one global batch)",
        64,
        (
            c("step", "<i4", "1", "number of the step, from 1"),
            c("policy_version", "<i4", "version", "version that the step made"),
            c("wall_s", "<f8", "s", "duration: from the end of the previous step (or the start of training) to the end of this one"),
            c("tokens", "<i8", "token", "prompt and answer tokens of the trained global batch"),
            c("trajectories", "<i4", "1", "trajectories in the global batch (B)"),
            c("tokens_per_s", "<f8", "token/s", "tokens / wall_s"),
            c("reward_mean", "<f8", "1", "mean reward of the graded trajectories"),
            c("accuracy", "<f8", "1", "share of right answers among the graded ones"),
            c("staleness_max", "<i4", "version", "largest age of a trained trajectory: version trained minus version of its first token"),
            c("staleness_mean", "<f8", "version", "mean age of the trained trajectories"),
            c("staleness_bound", "<i4", "version", "eta = staleness.max_staleness; -1: inf"),
            c("generation_wait_s", "<f8", "s", "training waited for generation: no complete batch was there"),
            c("collect_s", "<f8", "s", "moving the payloads to their training ranks (Alltoallv) and packing them"),
            c("train_s", "<f8", "s", "log-probabilities under reference model and pi_prox, forward, backward, optimiser"),
            c("push_s", "<f8", "s", "the new weights on their way: packing, and receiving and checking at the slowest generation rank"),
            c("pause_s", "<f8", "s", "decoding stood still for the swap of this version: largest over the generation ranks"),
            c("loss", "<f8", "1", "losses of the mini-batches, weighted by what each was divided by (trained tokens or answers)"),
            c("entropy", "<f8", "nat", "mean entropy of the policy at the trained tokens"),
            c("grad_norm", "<f8", "1", "mean gradient norm before clipping"),
            c("lr", "<f8", "1", "learning rate of the last update"),
            c(
                "ratio_mean",
                "<f8",
                "1",
                "mean over the trained tokens of pi_theta / pi_old as the objective uses it; pi_old is pi_prox, or pi_behav (train.old_policy)",
            ),
            c("ratio_max", "<f8", "1", "largest of those"),
            c("behav_ratio_mean", "<f8", "1", "mean of pi_old / pi_behav over the trained tokens"),
            c("behav_ratio_max", "<f8", "1", "largest pi_old / pi_behav"),
            c("clipped_share", "<f8", "1", "share of the trained tokens whose gradient the clip changed"),
            c("behav_cut_share", "<f8", "1", "share of the trained tokens whose pi_prox / pi_behav was truncated or masked (train.behav_cap)"),
            c("kl_behav", "<f8", "nat", "estimate of KL(pi_behav || pi_theta) at the trained tokens (k3)"),
            c("kl_reference", "<f8", "nat", "estimate of KL(pi_theta || reference) at the trained tokens (k3); not a number without a reference model"),
            c("effective_share", "<f8", "1", "effective sample size over trained tokens: (sum w)^2 / (N sum w^2), w = pi_theta / pi_behav"),
            c("logprob_gap", "<f8", "nat", "mean |log pi_prox - log pi_behav| at tokens sampled by the version just trained; not a number when there is none"),
            c("truncated_share", "<f8", "1", "share of the batch's answers that reached the length limit"),
            c("failed", "<i8", "trajectory", "failed (not graded) since the previous step"),
            c(
                "filtered",
                "<i8",
                "trajectory",
                "graded, but their group was filtered out since the previous step: equal rewards, or too few answers left to train",
            ),
            c("dropped", "<i8", "trajectory", "dropped as too old since the previous step"),
            c(
                "masked",
                "<i8",
                "trajectory",
                "zero weight since the previous step: too old (staleness.mode mask) or at the length limit (train.truncated mask)",
            ),
            c("penalised", "<i8", "trajectory", "of the batch, trained with reward.wrong for reaching the length limit (train.truncated penalise)"),
            c("overlong", "<i8", "trajectory", "of the batch, trained with a reward lowered by the overlong buffer"),
            c("skipped_updates", "<i4", "1", "optimiser updates skipped because the loss or the gradient was not finite"),
            c("trained_tokens", "<i8", "token", "answer tokens with weight above zero"),
            c("trained_tokens_per_s", "<f8", "token/s", "trained_tokens / wall_s"),
            c("mfu", "<f8", "1", "model FLOPs of forward and backward over the trained trajectories / (train_s * peak FLOP/s of all training ranks' devices)"),
            c(
                "peak_memory_bytes",
                "<i8",
                "byte",
                "most memory a training process has held so far (GPU: allocated, CPU: resident), largest over training ranks",
            ),
            c("answer_tokens_mean", "<f8", "token", "mean answer length of the batch"),
            c("closed_tickets", "<i8", "group", "groups trained, dropped, filtered or failed since the run began"),
            c("submitted_limit", "<i8", "group", "tickets that the gate had released at the end of the step; -1: no limit"),
            c("waiting_groups", "<i4", "group", "finished groups that waited for training at the end of the step"),
            c("end_s", "<f8", "s", "end of the step on the run's clock"),
        ),
    )


def _trajectories() -> Table:
    c = Column
    return Table(
        "trajectories",
        "one row per closed trajectory",
        1024,
        (
            c("ticket", "<i8", "1", "number of its group"),
            c("sample", "<i4", "1", "number within the group"),
            c("generation_rank", "<i4", "rank", "world rank that generated it; -1: it was finished in an earlier attempt"),
            c("batch", "<i4", "1", "step that closed it"),
            c("prompt_tokens", "<i4", "token", "length of the prompt"),
            c("answer_tokens", "<i4", "token", "length of the answer, stop tokens and the texts of an environment included"),
            c("sampled_tokens", "<i4", "token", "of these, the model's own: the ones that train"),
            c("turns", "<i4", "1", "turns of the model"),
            c("version_min", "<i4", "version", "version of its first token"),
            c("version_max", "<i4", "version", "version of its last token"),
            c("age", "<i4", "version", "version trained minus version_min"),
            c("reward", "<f4", "1", "reward as graded, before any penalty; not a number when not graded"),
            c("status", "u1", "1", "verdict", STATUSES),
            c("outcome", "u1", "1", "how it was closed", OUTCOMES),
            c("advantage", "<f4", "1", "advantage it was trained with; not a number when not trained"),
            c("generated_s", "<f4", "s", "from admission to the last token"),
            c("graded_s", "<f4", "s", "from the last token to the verdict"),
            c("waited_s", "<f4", "s", "from its group's arrival at training rank 0 to the batch that took it, or to its rejection"),
        ),
    )


def _result_columns() -> tuple[Column, ...]:
    """What an evaluation found, over all problems or those of one source (transport/evaluation.py; formulas: metrics.py)."""
    c = Column
    return (
        c("num_problems", "<i4", "1", "held-out problems"),
        c("k", "<i4", "1", "answers to each problem"),
        c("correct", "<i4", "1", "answers graded right; what could not be graded counts as wrong"),
        c("accuracy", "<f8", "1", "avg@k: correct / (num_problems * k)"),
        c("ci95", "<f8", "1", "half width of the 95 % interval of the accuracy"),
        c("ci_low", "<f8", "1", "lower end of that interval: Wilson's at the effective number of answers, since those to one problem are not independent"),
        c("ci_high", "<f8", "1", "upper end"),
        c("pass_k", "<f8", "1", "pass@k: share of problems with a right answer among their k"),
        c(
            "majority_k",
            "<f8",
            "1",
            "majority@k: share of problems whose most frequent answer is right; a tie counts with its share, a missing answer has no vote; "
            "not a number where answers cannot be compared (programs)",
        ),
        c("answer_tokens_mean", "<f8", "token", "mean answer length"),
        c("truncated", "<i4", "1", "answers cut at the length limit before they were complete"),
        c("no_answer", "<i4", "1", "answers without a marked result"),
        c("ungraded", "<i4", "1", "answers that could not be graded"),
    )


def _small_tables() -> tuple[Table, ...]:
    c = Column
    return (
        Table(
            "timeline",
            "what each rank did: intervals without gap or overlap",
            1024,
            (
                c("rank", "<i4", "rank", "world rank"),
                c("role", "u1", "1", "role of the rank", ROLES),
                c("phase", "u1", "1", "phase", PHASES),
                c("start_s", "<f8", "s", "begin on the run's clock"),
                c("stop_s", "<f8", "s", "end on the run's clock"),
            ),
        ),
        Table(
            "evaluations",
            "one row per evaluation on the held-out set",
            64,
            (
                c("policy_version", "<i4", "version", "version evaluated"),
                c("step", "<i4", "1", "training steps finished when the evaluation began"),
                *_result_columns(),
                c("seconds", "<f8", "s", "duration"),
                c("temperature", "<f8", "1", "sampling temperature; 0: greedy"),
            ),
        ),
        Table(
            "evaluation_sources",
            "one row per evaluation and source of problems",
            64,
            (
                c("policy_version", "<i4", "version", "version evaluated"),
                c("step", "<i4", "1", "training steps finished when the evaluation began"),
                c("source", "S64", "text", "source of the problems (UTF-8); a longer name ends in ... and 8 digits that tell it from others"),
                *_result_columns(),
            ),
        ),
        Table(
            "pushes",
            "one row per weight push",
            64,
            (
                c("version", "<i4", "version", "version pushed"),
                c("announced_s", "<f8", "s", "when training rank 0 announced it, on the run's clock"),
                c("bytes", "<i8", "byte", "bytes that every receiver got"),
                c("pack_s", "<f8", "s", "copying the shards into the send buffers or the shared image, and their checksums"),
                c("transfer_s", "<f8", "s", "from the announcement to checked bytes, at the slowest receiver"),
                c("stage_max_s", "<f8", "s", "of which the receiver's own work between decode steps, checksums and copies: largest over the generation ranks"),
                c("confirm_s", "<f8", "s", "from then until training rank 0, which trains meanwhile, had read every confirmation"),
                c("pause_max_s", "<f8", "s", "decoding stood still for the swap: largest over the generation ranks"),
                c("resent", "<i4", "1", "buckets that arrived damaged and were sent once more"),
                c("checksum", "<u8", "1", "checksum that all ranks agreed on"),
            ),
        ),
        Table(
            "checkpoints",
            "one row per checkpoint that was due, when it is complete or given up",
            64,
            (
                c("step", "<i4", "1", "training step of the cut"),
                c("begun_s", "<f8", "s", "the cut, on the run's clock"),
                c("seconds", "<f8", "s", "from the cut until it was complete or given up; training and generation went on"),
                c("bytes", "<i8", "byte", "size of all its files; 0 unless complete"),
                c("waiting_groups", "<i4", "1", "finished groups in it, in lanes and at training ranks"),
                c("unfinished_groups", "<i4", "1", "groups in it that were being generated"),
                c("unfinished_tokens", "<i8", "token", "answer tokens of those"),
                c("outcome", "u1", "1", "what became of it", SAVE_OUTCOMES),
            ),
        ),
        Table(
            "events",
            "what happened besides: start, save, failure, warning; a long text continues in the following rows",
            64,
            (
                c("time_s", "<f8", "s", "when, on the run's clock"),
                c("rank", "<i4", "rank", "world rank"),
                c("kind", "S24", "text", "kind of event"),
                c("text", "S240", "text", "what happened (UTF-8)"),
            ),
            split="text",
        ),
        Table(
            "ranks",
            "state of each rank, about once per step",
            256,
            (
                c("rank", "<i4", "rank", "world rank"),
                c("role", "u1", "1", "role of the rank", ROLES),
                c("time_s", "<f8", "s", "when, on the run's clock"),
                c("tokens", "<i8", "token", "generation: tokens decoded since the start; training: tokens trained"),
                c("prefill_tokens", "<i8", "token", "generation: tokens whose cache was computed at admission or after new weights, since the start"),
                c("running", "<i4", "1", "sequences being decoded"),
                c("queued", "<i4", "1", "sequences that wait for a free slot of the engine"),
                c("waiting", "<i4", "1", "groups that wait at the rank: to be decoded (generation), to be trained (training)"),
                c("busy_s", "<f8", "s", "since the start, in phases in which the rank works"),
                c("wait_s", "<f8", "s", "since the start, in all other phases but pause_s"),
                c("pause_s", "<f8", "s", "since the start, decoding stood still for new weights; busy_s + wait_s + pause_s is the rank's wall time"),
                c("rss_bytes", "<i8", "byte", "resident memory of the process"),
                c("gpu_memory_bytes", "<i8", "byte", "memory in use on its GPU (NVML); 0 without"),
                c("gpu_utilisation", "<f8", "1", "share of the last sample period in which its GPU was busy (NVML); not a number without"),
                c("gpu_power_w", "<f8", "W", "power of its GPU (NVML); not a number without"),
            ),
        ),
        Table(
            "clocks",
            "the clock of each node without training rank 0 against the run's clock, at the start and at the end of the attempt",
            64,
            (
                c("node", "<i4", "1", "number of the node, in the order of their lowest ranks"),
                c("time_s", "<f8", "s", "when, on the run's clock"),
                c("offset_s", "<f8", "s", "what must be added to the node's times then: the drift since the start, at which it is 0"),
                c("error_s", "<f8", "s", "half the round trip of the measurement; 0 at the start, where it is not known"),
            ),
        ),
        Table(
            "graders",
            "the reward service of each generation rank, about once per step; counts are sums since the start, those of evaluations included",
            64,
            (
                c("time_s", "<f8", "s", "when, on the run's clock"),
                c("rank", "<i4", "rank", "world rank"),
                c("pending", "<i8", "1", "answers submitted and not graded yet, now"),
                *(c(status, "<i8", "1", f"verdicts with the status {status}") for status in STATUSES),
                c("fast", "<i8", "1", "decided by rule or by our own grammar"),
                c("cache_hits", "<i8", "1", "mathematical answers that had been graded before"),
                c("fallback", "<i8", "1", "mathematical answers that went to math-verify"),
                c("killed", "<i8", "1", "graders killed at a limit"),
                c("died", "<i8", "1", "graders that ended by themselves"),
                c("recycled", "<i8", "1", "graders replaced for their age"),
                c("backpressure", "<i8", "1", "times that the service's queue was found full"),
            ),
        ),
        Table(
            "ring",
            "state of each lane, about once per step; counts and seconds are sums since the start",
            256,
            (
                c("time_s", "<f8", "s", "when, on the run's clock"),
                c("lane", "<i4", "1", "number of the lane: the generation rank (0, 1, ...) that writes it"),
                c("rank", "<i4", "rank", "world rank that reads it"),
                c("way", "u1", "1", "how records travel", LANE_WAYS),
                c("records", "<i8", "1", "records read"),
                c("bytes", "<i8", "byte", "payload bytes read"),
                c("markers", "<i8", "1", "markers read"),
                c("checksum_errors", "<i8", "1", "damaged records, counted and not delivered"),
                c("used_bytes", "<i8", "byte", "bytes in use now, beside the reader"),
                c("high_water_bytes", "<i8", "byte", "most bytes in use at a commit, beside the reader"),
                c("full_waits", "<i8", "1", "times the writer found its lane full"),
                c("full_wait_s", "<f8", "s", "time from finding it full until there was room"),
                c("credit_waits", "<i8", "1", "times the forwarder had to wait for the reader to give space back; 0 in shared memory"),
                c("credit_wait_s", "<f8", "s", "time of those waits"),
                c("silent_s", "<f8", "s", "since the writer was last heard of (shared memory: since it last touched the lane); infinite: not yet"),
            ),
        ),
    )


def _generation_tape() -> tuple[Table, ...]:
    c = Column
    return (
        Table(
            "calls",
            "one row for each thing that happened to the engine of this rank, in order",
            1024,
            (
                c("step", "<i8", "1", "engine steps begun before it; an answer finished within the last of them"),
                c("kind", "u1", "1", "what happened: requests added, an answer finished, weights swapped, requests aborted, tickets leased", CALLS),
                c(
                    "number",
                    "<i8",
                    "1",
                    "add, finish: (first) request, ticket * n + sample (evaluations: 2^60 + problem * k + sample); swap: version; lease: first ticket; abort: 0",
                ),
                c("count", "<i4", "1", "add, abort: requests; finish: tokens; lease: tickets; swap: 0"),
                c("version", "<i4", "version", "policy version in use (of a lease: the version that its tickets may start under)"),
                c(
                    "digest",
                    "<u8",
                    "1",
                    "BLAKE2b, 64 bits. add: prompt and tokens begun; finish: tokens, log-probabilities, versions; abort: request numbers; else 0",
                ),
            ),
        ),
    )


def _training_tape() -> tuple[Table, ...]:
    """In the order in which they are written: a step whose checksums are there is there as a whole."""
    c = Column
    return (
        Table(
            "prompt_tokens",
            "prompts of the trajectories of /batches, back to back (log.record tokens)",
            4096,
            (c("token", "<i4", "1", "token"),),
        ),
        Table(
            "answer_tokens",
            "answers of the trajectories of /batches, back to back (log.record tokens)",
            4096,
            (
                c("token", "<i4", "1", "token"),
                c("logprob", "<f4", "nat", "its log-probability under the policy that sampled it"),
                c("version", "<i4", "version", "policy version that sampled it"),
                c("sampled", "u1", "1", "1: sampled by the model, 0: put there by an environment"),
            ),
        ),
        Table(
            "batches",
            "one row per trajectory that this rank trained, in order",
            1024,
            (
                c("step", "<i4", "1", "training step"),
                c("ticket", "<i8", "1", "number of its group"),
                c("sample", "<i4", "1", "number within the group"),
                c("minibatch", "<i4", "1", "mini-batch"),
                c("microbatch", "<i4", "1", "micro-batch of the mini-batch"),
                c("advantage", "<f8", "1", "advantage"),
                c("weight", "<f4", "1", "factor of its loss; 0: masked"),
                c("reward", "<f4", "1", "reward as graded; not a number when not graded"),
                c("status", "u1", "1", "verdict", STATUSES),
                c("num_prompt", "<i4", "token", "length of the prompt"),
                c("num_answer", "<i4", "token", "length of the answer"),
                c("digest", "<u8", "1", "BLAKE2b, 64 bits, over prompt, tokens, log-probabilities, versions, reward and verdict"),
            ),
        ),
        Table(
            "minibatches",
            "one row per mini-batch",
            256,
            (
                c("step", "<i4", "1", "training step"),
                c("minibatch", "<i4", "1", "mini-batch"),
                c("num_microbatches", "<i4", "1", "micro-batches on every rank"),
                c("trained_tokens", "<i8", "token", "answer tokens that count, over all ranks"),
                c("denominator", "<i8", "1", "what the summed loss is divided by"),
            ),
        ),
        Table(
            "tensors",
            "checksums of this rank's rows of every parameter: before the first step and after each",
            1024,
            (
                c("step", "<i4", "1", "training step; 0: the weights that training began with"),
                c("tensor", "<i4", "1", "number of the parameter: line of the attribute `tensors`, from 0"),
                c("crc32c", "<u4", "1", "CRC32C of the float32 values"),
            ),
        ),
    )


TABLES = {table.name: table for table in (_steps(), _trajectories(), *_small_tables())}
"""Those of `log.h5`."""
GENERATION_TAPE = {table.name: table for table in _generation_tape()}
TRAINING_TAPE = {table.name: table for table in _training_tape()}
ALL_TABLES = TABLES | GENERATION_TAPE | TRAINING_TAPE


def table_of(name: str) -> Table:
    """Raises ValueError with the tables that exist."""
    if name not in ALL_TABLES:
        raise ValueError(f"no table '{name}'; tables: {', '.join(ALL_TABLES)}")
    return ALL_TABLES[name]


def to_rows(name: str, rows: Rows) -> np.ndarray:
    """[n] structured rows of table `name`. Raises ValueError for anything that the table could not hold exactly."""
    table = table_of(name)
    if isinstance(rows, np.ndarray):
        if rows.dtype == table.dtype:
            return np.atleast_1d(rows).copy()
        _same_columns(table, rows.dtype.names or ())
        values: dict[str, Any] = {column: np.atleast_1d(rows)[column] for column in table.column_names}
    else:
        records = [rows] if isinstance(rows, Mapping) else list(rows)
        for record in records:
            _same_columns(table, record)
        records = _split_long_text(table, records)
        values = {column: [record[column] for record in records] for column in table.column_names}
    out = np.zeros(len(values[table.column_names[0]]), table.dtype)
    for column in table.columns:
        out[column.name] = _exact(table, column, values[column.name])
    return out


def _same_columns(table: Table, names: Sequence[str] | Mapping[str, Any]) -> None:
    missing = [name for name in table.column_names if name not in names]
    unknown = [name for name in names if name not in table.column_names]
    if missing or unknown:
        raise ValueError(f"/{table.name}: missing columns {missing}, unknown columns {unknown}")


def _split_long_text(table: Table, records: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not table.split:
        return records
    width = table.dtype[table.split].itemsize
    return [{**record, table.split: part} for record in records for part in split_utf8(str(record[table.split]), width)]


def split_utf8(text: str, width_bytes: int) -> list[str]:
    """`text` in parts of at most `width_bytes` bytes of UTF-8; no character is cut and none is lost."""
    parts: list[str] = []
    part: list[str] = []
    used = 0
    for character in text:
        size = len(character.encode())
        if used + size > width_bytes:
            parts.append("".join(part))
            part, used = [], 0
        part.append(character)
        used += size
    return [*parts, "".join(part)]


def fitting(table: str, column: str, text: str) -> str:
    """`text` if the column can hold it, else its beginning, "..." and 8 hexadecimal digits of its hash."""
    width, data = table_of(table).dtype[column].itemsize, text.encode("utf-8", "backslashreplace")
    if len(data) <= width:
        return data.decode()
    return f"{data[: width - 11].decode(errors='ignore')}...{hashlib.sha256(data).hexdigest()[:8]}"


def _exact(table: Table, column: Column, values: Any) -> np.ndarray:
    dtype, where = column.numpy, f"/{table.name}.{column.name}"
    if dtype.kind == "S":
        encoded = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        longest = max(encoded, key=len, default=b"")
        if len(longest) > dtype.itemsize:
            raise ValueError(f"{where}: {longest!r} takes {len(longest)} bytes; at most {dtype.itemsize} fit")
        return np.array(encoded, dtype)
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iufb":
        raise ValueError(f"{where}: numbers expected, not {array.dtype}")
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if not np.all(np.isfinite(array)) or np.any(array != np.trunc(array)) or array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"{where}: integers from {limits.min} to {limits.max} expected, got {array[:8].tolist()}")
    return array.astype(dtype)


def listing() -> str:
    """All tables as Markdown."""
    lines = [f"Schema version {SCHEMA_VERSION}."]
    for table in ALL_TABLES.values():
        if table.name == "calls":
            lines += ["", "## Tapes", "", "Generation ranks write `/calls`, training ranks the other tables; what they are for: [replay.md](replay.md)."]
        lines += ["", f"### `/{table.name}`: {table.definition}", "", "| column | type | unit | definition |", "| --- | --- | --- | --- |"]
        for column in table.columns:
            unit_and_definition = column.text.removeprefix(f"[{column.unit}] ").replace("|", "\\|")
            lines.append(f"| `{column.name}` | {column.type_name} | {column.unit} | {unit_and_definition} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
