"""What a run is: frozen dataclasses, each field with its unit, and one `check` that a user's mistake cannot pass.

No heavy import here: a login node without torch or MPI reads, prints and checks configurations.
Symbols (paper arXiv 2505.24298): B = batch_size, n = group_size, eta = max_staleness, i = policy_version.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal_hpc import objectives

SAFE_TASKS = (  # reasoning-gym tasks whose scorer does not execute model text
    "base_conversion",
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "count_bits",
    "decimal_arithmetic",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "letter_counting",
    "products",
    "simple_equations",
    "spell_backward",
    "time_intervals",
)


class ConfigError(ValueError):
    """A user's mistake: one line with the value, the rule and the choices. Ends the program with exit status 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    num_ranks: int = 2
    """MPI ranks that the local launcher starts (under srun or mpiexec their number wins)."""
    generation_fraction: float = 0.75
    """Share of the ranks that generate; the rest trains. Both roles get at least one rank."""
    mode: Literal["split", "colocated"] = "split"
    """split: some ranks generate while the others train. colocated: all generate a batch, then all train on it, in turn; the synchronous baseline (eta 0, embedded
    engine), without checkpoints and tape."""
    threads_per_rank: int = 1
    """CPU threads of each rank (OMP_NUM_THREADS); ranks that share cores want 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    path: str = ""
    """Hugging Face folder (config.json, *.safetensors, tokenizer.json). Empty: build the small model described below and warm-start it."""
    num_layers: int = 4
    """Layers of the model that is built when `path` is empty."""
    hidden_size: int = 128
    """Width of the model that is built when `path` is empty."""
    num_heads: int = 4
    """Query heads of the model that is built when `path` is empty."""
    num_kv_heads: int = 2
    """Key/value heads of the model that is built when `path` is empty."""
    intermediate_size: int = 384
    """Width of the feed-forward layers of the model that is built when `path` is empty."""
    warmstart_steps: int = 340
    """Supervised steps on worked solutions before the run, when `path` is empty; 0 leaves random weights."""
    warmstart_batch_size: int = 64
    """Worked solutions in one supervised step."""
    warmstart_direct_steps: int = 40
    """The last of the supervised steps, in which most solutions state the answer alone: a habit that mostly fails, and that reinforcement learning has to undo."""
    warmstart_lr: float = 1e-2
    """Peak learning rate of the supervised steps (cosine to 10 %)."""
    warmstart_seed: int = 0
    """Seed of the model that is built: kept apart from the run's seed, as a pre-trained model would be."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights are float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    path: str = ""
    """File, folder or glob with problems: JSON, JSON-lines (also gzipped) or parquet; the content says which data set's format it is. Empty: reasoning-gym tasks."""
    heldout_path: str = ""
    """Files for evaluation, named in the same ways. Empty: a share of the questions, chosen by the hash of their text, is held out."""
    heldout_fraction: float = 0.1
    """Share of distinct questions held out when no held-out file is given."""
    tasks: tuple[str, ...] = ("chain_sum",)
    """reasoning-gym tasks, mixed in equal parts unless task_weights says otherwise."""
    task_weights: tuple[float, ...] = ()
    """Shares of the tasks, in their order, in any unit (3 1 is three quarters and one). Empty: equal parts."""
    task_options: tuple[str, ...] = ()
    """Options of single tasks, for difficulty: TASK.OPTION=VALUE, such as gcd.max_value=50 (the names are reasoning-gym's)."""
    size: int = 20000
    """Problems generated over all tasks."""
    seed: int = 42
    """Seed of the reasoning-gym generators (the data set, not the run)."""
    min_terms: int = 2
    """Fewest terms of a chain_sum, products or basic_arithmetic problem."""
    max_terms: int = 5
    """Most terms of a chain_sum, products or basic_arithmetic problem."""
    max_digits: int = 2
    """Most digits of a number in a chain_sum, products or basic_arithmetic problem."""
    worked: Literal["steps", "python"] = "steps"
    """What worked solutions of the small model's warm start look like: one line per operation, or a call of the python environment and the answer behind its output."""
    suffix: str = "\n"
    """Text put after each question to form the prompt (the small model's turn marker); in a chat template without the white space at its end."""
    system_prompt: str = ""
    """System message of every prompt, instead of one that the data brings; text before the question where no chat template is used."""
    chat_template: Literal["auto", "none"] = "auto"
    """auto: the chat template of the model's folder, if it has one; none: the question's text alone."""
    max_prompt_tokens: int = 128
    """Longest prompt, in tokens of the model. Problems with a longer one are counted and left out before the run."""
    skip_invalid: bool = False
    """Count and leave out rows that cannot be used, instead of stopping at the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    engine: Literal["embedded", "vllm"] = "embedded"
    """Generation engine: our own, or vLLM in the rank's process (env/bootstrap vllm)."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    max_new_tokens: int = 128
    """Longest answer in tokens; a longer one is cut and counted as truncated."""
    max_num_running: int = 64
    """Sequences decoded together on one rank (slots of the KV cache)."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running sequences when weights change: recomputed (the paper) or kept."""
    on_update: Literal["interrupt", "drain"] = "interrupt"
    """interrupt: new weights are taken between two tokens (the paper). drain: no answer begins until those that run have ended, then they are taken: what
    interruption is compared with, and an answer has one version. The longest must end within transport.push_deadline_s: the push after next waits for it."""
    imposed_mean: float = 0.0
    """Benchmarks only: every answer gets a length by lot, the same for a ticket and sample in every mode, log-normal with this mean, cut at max_new_tokens; it goes on
    to it whatever is sampled. 0: answers end when the model ends them."""
    imposed_sigma: float = 0.85
    """Standard deviation of the logarithm of imposed lengths; 0: all alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    max_staleness: int | Literal["inf"] = 4
    """eta: versions that a trajectory may lag. 0 is synchronous, 1 is one-step overlap, inf has no gate."""
    mode: Literal["count", "dropless", "drop", "mask"] = "count"
    """count: eq. 3 alone (the paper). The others bound the age of every trained trajectory by eta: dropless waits, drop discards, mask trains with zero weight."""

    @property
    def eta(self) -> float:
        return math.inf if self.max_staleness == "inf" else float(self.max_staleness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    num_steps: int = 100
    """Training steps, each on one global batch; policy versions of the run."""
    batch_size: int = 64
    """B: trajectories in one global batch."""
    group_size: int = 8
    """n: answers sampled for one prompt; divides batch_size."""
    num_minibatches: int = 1
    """PPO mini-batches (optimiser updates) per global batch; divides the number of groups."""
    objective: Literal["decoupled", "ppo", "grpo", "dr-grpo", "rloo", "dapo", "gspo", "cispo"] = "decoupled"
    """What is optimised, with its published defaults (docs/objectives.md): options at `auto` take them. decoupled: eq. 5 of the paper."""
    old_policy: Literal["auto", "prox", "behav"] = "auto"
    """What the ratio is measured against: the parameters before this step (weighted by pi_prox / pi_behav), or the policy that sampled."""
    aggregation: Literal["auto", "token", "sequence", "sequence-sum", "batch"] = "auto"
    """Mean over the tokens of a mini-batch; over answers of their token means; over answers of their token sums; the last divided by max_new_tokens."""
    advantage: Literal["auto", "group", "group+batch", "mean", "mean+batch", "leave-one-out", "leave-one-out+batch", "batch"] = "auto"
    """Reward minus the group's mean over its deviation; minus its mean; minus the mean of the others. +batch: then over the deviation of the batch. batch: no groups."""
    clip_low: float | Literal["auto"] = "auto"
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float | Literal["auto"] = "auto"
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | Literal["none"] = "none"
    """Ratio above which tokens with A < 0 stop counting (arXiv 1912.09729, there 3)."""
    prox: Literal["auto", "recompute", "loglinear"] = "auto"
    """pi_prox: recomputed once per batch (the paper), or interpolated between pi_behav and pi_theta by staleness, without a forward pass (arXiv 2512.06547)."""
    behav_weight: Literal["auto", "full", "truncated", "masked"] = "auto"
    """pi_prox / pi_behav as it is; at most behav_cap; or 0 above behav_cap."""
    behav_level: Literal["auto", "token", "sequence"] = "auto"
    """That weight for each token, or the product over its answer's tokens."""
    behav_cap: float | Literal["auto"] = "auto"
    """Largest weight (auto: 2)."""
    kl_coef: float = 0.0
    """Coefficient of the penalty for KL(pi_theta || reference), per nat; 0: no reference model. GRPO's paper has 0.04."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Estimate of that KL at each token (auto: k3)."""
    reference_path: str = ""
    """Reference model: a Hugging Face folder or a checkpoint. Empty: version 0 of this run."""
    truncated: Literal["train", "mask", "penalise"] = "train"
    """Answers that reached generation.max_new_tokens: trained with their grade, kept out of the step (and of all statistics), or given reward.wrong."""
    overlong_buffer: int | Literal["auto"] = "auto"
    """Last tokens before the length limit in which the reward falls linearly (auto: a fifth of it for dapo, else 0: none)."""
    overlong_penalty: float | Literal["auto"] = "auto"
    """How far it falls at the limit, in units of reward (auto: half the distance of right and wrong)."""
    min_group_size: int = 1
    """Fewest answers of a group that must be left to train (graded, not masked); smaller groups are filtered out and replaced."""
    dynamic_sampling: Literal["auto", "refill", "none"] = "auto"
    """Filter out groups whose rewards are all equal, and generate others in their place (auto: refill for dapo)."""
    max_filtered: int | Literal["auto"] = "auto"
    """Batches' worth of groups that may be filtered out between two steps before the run ends with an error (auto: 50)."""
    lr: float = 2e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimiser updates over which the learning rate rises linearly."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate from the warm-up to the last update of num_steps."""
    final_lr_share: float | Literal["auto"] = "auto"
    """Share of the peak that cosine and linear end at (auto: 0.1)."""
    weight_decay: float = 0.05
    """Decoupled weight decay of AdamW (matrices only)."""
    adam_beta1: float = 0.9
    """First beta of AdamW."""
    adam_beta2: float = 0.95
    """Second beta of AdamW."""
    adam_eps: float = 1e-5
    """Epsilon of AdamW."""
    adam_kernel: Literal["fused", "foreach"] = "fused"
    """PyTorch's implementation of AdamW."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down."""
    max_skipped_updates: int = 3
    """Updates in a row skipped for a loss or gradient that is not finite, after which the run ends with an error."""
    flat_alarm: int = 10
    """Steps in a row with one and the same reward for every answer, or with every advantage zero, at which the run says so; 0: never."""
    logprob_alarm: float = 0.05
    """Nats: mean difference between the log-probabilities of trainer and engine for one version above which the run says so; 0: never."""
    microbatch_tokens: int = 4096
    """C of Algorithm 1: tokens in one packed micro-batch."""
    min_microbatches: int = 1
    """k_min of Algorithm 1: fewest micro-batches per mini-batch and rank."""
    attention: Literal["auto", "varlen", "buckets"] = "auto"
    """varlen: packed kernels (GPU and bfloat16; flash-attn where installed, else torch's). buckets: padded rectangles. auto: varlen where it can run."""
    activation_checkpointing: Literal["none", "layer"] = "none"
    """layer: only the input of each layer is kept for the backward, which computes the rest again: less memory, a third more work."""
    cpu_offload: bool = False
    """Master weights, gradients and AdamW's state live in host memory; layers visit the GPU."""
    replicas: int = 1
    """Copies of the model on the training ranks (HSDP): each is cut over their number / replicas, of which there is a whole number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    right: float = 5.0
    """Reward of a right answer, on its last token."""
    wrong: float = -5.0
    """Reward of a wrong or missing answer, on its last token."""
    custom: str = ""
    """`module:function` called as f(problem, answer_text) -> float in the grading process, 1.0 meaning right; empty: the data's own scorer."""
    deadline_s: float = 5.0
    """Seconds one answer may be graded by `custom` or by a task's own scorer, from the moment a worker takes it; then it is killed and the answer counted as failed."""
    num_graders: int = 0
    """Grader processes of one generation rank; 0: half of the rank's cores beyond two, at least one."""
    math_cpu_s: float = 2.0
    """Processor seconds that one mathematical answer may cost; then its grader is killed and the answer is wrong (status timeout)."""
    math_percent: Literal["lenient", "strict"] = "lenient"
    """lenient: 25% is right for 25 and for 0.25, and the reverse; strict: 25% is 0.25."""
    math_units: Literal["lenient", "strict"] = "lenient"
    """lenient: a unit may be missing on one side (two different ones are wrong); strict: it may not."""
    math_vectors: Literal["lenient", "strict"] = "lenient"
    """lenient: a column, a row, (1, 2) and <1, 2> are the same vector; strict: the notation counts."""
    math_intervals: Literal["lenient", "strict"] = "lenient"
    """lenient: an interval may be given as an inequality, and the reverse; strict: the notation counts."""
    math_bases: Literal["lenient", "strict"] = "lenient"
    """lenient: the subscript that names the base of a number may be missing in the answer; strict: it may not."""
    math_answer: Literal["box", "statement"] = "statement"
    """What marks a mathematical answer: a box or "####"; statement: without these, also "the answer is ..." or "Answer: ..."."""
    code_sandbox: Literal["auto", "bubblewrap", "landlock", "seccomp", "limits"] = "auto"
    """Isolation of model-written programs; auto: the strongest that holds on this machine. limits: none, programs can do what this user can."""
    code_floor: Literal["bubblewrap", "landlock", "seccomp", "limits"] = "seccomp"
    """Weakest isolation to run programs at; where less holds, the run is refused."""
    code_cpu_s: float = 6.0
    """CPU seconds of one test of a program, where the problem does not say; wall-clock seconds are twice that and one more."""
    code_wall_s: float = 60.0
    """Wall-clock seconds of one program over all its tests."""
    code_memory_mib: int = 512
    """MiB of address space of a program beyond the interpreter's, where the problem does not say."""
    code_output_kib: int = 1024
    """KiB that a program may print in one test, or return from one call."""
    code_max_tests: int = 20
    """Tests of one problem that are run, chosen the same for every answer."""
    code_packages: tuple[str, ...] = ("numpy",)
    """Packages that programs may import besides the standard library, where they are installed."""
    max_failure_rate: float = 0.2
    """Share of answers that could not be graded above which the run ends with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    name: str = ""
    """Who answers the model between two turns: python runs the program that ends a turn and shows its output; `module:function` is called as
    f(problem, turns) -> str | None in a grading process. Empty: nobody, an answer is one turn."""
    max_turns: int = 4
    """Most model turns of one answer; the last is graded, whatever it ends in. generation.max_new_tokens bounds all turns together, the environment's texts included."""
    deadline_s: float = 60.0
    """Seconds the environment may take over one turn; then its process is killed and the answer counts as failed."""
    python_cpu_s: float = 4.0
    """CPU seconds of one program that the python environment runs; wall-clock seconds are twice that and one more. Memory and isolation: reward.code_*."""
    python_output_chars: int = 2000
    """Characters of a program's output that the model is shown; of more, beginning and end, with a note between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    num_problems: int = 512
    """Held-out problems per evaluation (the first ones of the held-out set)."""
    num_samples: int = 1
    """k: answers sampled for each of them; above 1 an evaluation also gives pass@k and majority@k."""
    every: int = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    temperature: float = 1.0
    """Sampling temperature of evaluations; 0 is greedy."""
    save_samples: int = 64
    """Held-out problems per evaluation whose answers are saved for reading, in attempt-K/samples; 0: none."""
    save_training_groups: int = 4
    """Groups whose answers are saved for reading, out of each of about 50 batches spread over the run; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    lane_bytes: int = 16 << 20
    """Bytes of the shared-memory lane of one generation rank; a record (one group) may take a quarter. A lane between two nodes takes them on both."""
    lanes: Literal["auto", "forwarded"] = "auto"
    """auto: shared memory between ranks of one node, MPI messages between nodes; forwarded: MPI messages everywhere (slower: to try them on one node)."""
    silence_deadline_s: float = 120.0
    """Seconds without a sign of life after which training, while it waits for data, takes a generation rank of another node for dead."""
    bucket_bytes: int = 16 << 20
    """Bytes of one weight bucket: what one broadcast moves; a generation rank has four for each training rank."""
    push: Literal["all-roots", "single-root"] = "all-roots"
    """all-roots: every training rank sends the rows it owns. single-root: they are gathered to training rank 0, which sends all (the baseline)."""
    push_path: Literal["auto", "network"] = "auto"
    """auto: on the training ranks' own node, without a GPU, weights are shared memory; network: Gloo or NCCL everywhere."""
    staging: Literal["auto", "on", "off"] = "auto"
    """Whether weights arrive in spare memory while decoding goes on, or decoding pauses. auto: on where that takes at most 25 % of what the KV cache could have."""
    push_deadline_s: float = 120.0
    """Seconds within which every generation rank must confirm a new version."""
    data_deadline_s: float = 600.0
    """Seconds that training waits for a batch without receiving any trajectory."""
    start_deadline_s: float = 600.0
    """Seconds within which all ranks must be ready (model built, engines up)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchdog:
    enabled: bool = True
    """Every rank watches the others: one that dies, falls silent or stays in a phase beyond its deadline ends the run with its name (docs/failures.md)."""
    silence_s: float = 30.0
    """Seconds without a heartbeat (a stopped process, an interpreter that something holds) after which a rank counts as hung; at its start transport.start_deadline_s."""
    phase_floor_s: float = 120.0
    """Shortest deadline of a phase: seconds between two signs of life of a rank's main loop; the first time in each phase has transport.start_deadline_s."""
    phase_factor: float = 10.0
    """Deadline of a phase in units of the longest time between two signs of life that this run has seen in it, where that is longer."""
    stop_deadline_s: float = 300.0
    """Seconds that a run may take from a signal to its end, checkpoint included; then it ends hard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    log_fallback: str = ""
    """Folder, on another disk, for the text form of the log when neither log.h5 nor a text file beside it can be written. Empty: standard error takes the rest."""
    log_retry_s: float = 30.0
    """Seconds between two attempts to write log.h5 again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    every: int = 50
    """Steps between checkpoints, from which `--resume` goes on; the last step has one as well. 0: only when a signal stops the run."""
    keep: int = 2
    """Newest complete checkpoints that stay; older ones are deleted once a new one is complete."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this stay for ever; 0: none for that reason."""
    deadline_s: float = 1800.0
    """Seconds from the cut until every file is on the disk; a save that takes longer is given up, with a warning, and training goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    record: Literal["none", "order", "tokens"] = "order"
    """What `areal-hpc replay` will find. order: what happened when, and hashes: enough to generate and train again; tokens: what was trained as well, so that
    training can be repeated alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walltime:
    stop_before_s: float = 300.0
    """Seconds kept free before the batch job ends, besides the longest step, for the last checkpoint; a tenth of its time at most. 0: stop at signals only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    recipe: str = "laptop"
    """Name of the recipe this configuration came from."""
    run_dir: str = ""
    """Folder of the run; empty: runs/RECIPE-TIME."""
    init_from: str = ""
    """Start from the weights and tokenizer of this Hugging Face folder or checkpoint instead of `model.path`."""
    seed: int = 0
    """Seed of everything random in the run: tickets, sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models live; auto: CUDA if this rank sees a GPU."""
    topology: Topology = field(default_factory=Topology)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    generation: Generation = field(default_factory=Generation)
    staleness: Staleness = field(default_factory=Staleness)
    train: Train = field(default_factory=Train)
    reward: Reward = field(default_factory=Reward)
    environment: Environment = field(default_factory=Environment)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    transport: Transport = field(default_factory=Transport)
    watchdog: Watchdog = field(default_factory=Watchdog)
    storage: Storage = field(default_factory=Storage)
    log: Log = field(default_factory=Log)
    walltime: Walltime = field(default_factory=Walltime)

    @property
    def groups_per_batch(self) -> int:
        """B / n."""
        return self.train.batch_size // self.train.group_size

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus longest answer."""
        return self.data.max_prompt_tokens + self.generation.max_new_tokens

    @property
    def model_source(self) -> str:
        """Folder that the first weights are read from; empty when the small model is built."""
        return self.init_from or self.model.path


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _divisors_near(total: int, wanted: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d <= wanted), default=divisors[0])
    above = min((d for d in divisors if d >= wanted), default=divisors[-1])
    return f"{below}" if below == above else f"{below} or {above}"


def check(config: Config) -> None:
    """Every rule that needs no file and no rank. Raises ConfigError (value, rule, choice)."""
    train, staleness, data = config.train, config.staleness, config.data
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if dataclasses.is_dataclass(part):
            _check_positive(section.name, part)
    n = train.group_size
    _require(
        train.batch_size % n == 0,
        f"train.group_size={n} does not divide train.batch_size={train.batch_size}; "
        f"use batch_size {max(n, train.batch_size // n * n)} or {(train.batch_size // n + 1) * n}",
    )
    groups = config.groups_per_batch
    _require(
        groups % train.num_minibatches == 0,
        f"train.num_minibatches={train.num_minibatches} does not divide the {groups} groups of a batch; use {_divisors_near(groups, train.num_minibatches)}",
    )
    _require(staleness.max_staleness == "inf" or staleness.max_staleness >= 0, f"staleness.max_staleness={staleness.max_staleness} must be 0, 1, 2, ... or inf")
    _require(
        staleness.mode == "count" or staleness.max_staleness != "inf",
        f"staleness.mode={staleness.mode} bounds the age by max_staleness, which is inf; use mode count or a finite max_staleness",
    )
    _require(
        config.generation.on_update == "interrupt" or config.transport.staging != "off",
        "generation.on_update=drain needs the weights in use until answers have ended, but transport.staging=off overwrites them; use --transport.staging on",
    )
    _require(
        config.topology.mode == "split" or staleness.eta == 0,
        f"topology.mode=colocated generates and trains in turn, so staleness.max_staleness={staleness.max_staleness} cannot be used; use --staleness.max-staleness 0",
    )
    _require(
        config.topology.mode == "split" or config.generation.engine == "embedded",
        f"topology.mode=colocated works with generation.engine=embedded, not {config.generation.engine}; change one of them",
    )
    senseless = objectives.mistake(config)
    _require(senseless is None, str(senseless))
    for task in data.tasks:
        _require(task in SAFE_TASKS, f"data.tasks: '{task}' is not one of the tasks that can be scored safely: {', '.join(SAFE_TASKS)}")
    _require(bool(data.path or data.tasks), "data.tasks is empty and no data.path is given")
    weights = data.task_weights
    _require(
        not weights or len(weights) == len(data.tasks),
        f"data.task_weights has {len(weights)} values for the {len(data.tasks)} tasks of data.tasks; give one for each task, or none",
    )
    for weight in weights:
        _require(math.isfinite(weight) and weight > 0, f"data.task_weights={weight} must be finite and above zero; leave a task out of data.tasks instead")
    for option in data.task_options:
        task = option.partition(".")[0]
        _require(
            task in data.tasks and 0 < option.find(".") < option.find("=") - 1,
            f"data.task_options: '{option}' is not TASK.OPTION=VALUE with a task of data.tasks ({', '.join(data.tasks)}), such as gcd.max_value=50",
        )
    _require(data.min_terms <= data.max_terms, f"data.min_terms={data.min_terms} is above data.max_terms={data.max_terms}")
    steps, direct = config.model.warmstart_steps, config.model.warmstart_direct_steps
    _require(steps == 0 or direct <= steps, f"model.warmstart_direct_steps={direct} are the last of model.warmstart_steps={steps}; use at most that many")
    _require(0 < data.heldout_fraction < 1, f"data.heldout_fraction={data.heldout_fraction} must lie between 0 and 1")
    _require(
        config.transport.bucket_bytes >= 1 << 16, f"transport.bucket_bytes={config.transport.bucket_bytes}: at least 65536, or the push drowns in broadcasts"
    )
    _require(
        config.transport.silence_deadline_s >= 3,
        f"transport.silence_deadline_s={config.transport.silence_deadline_s:g}: signs of life come once a second; use 3 or more",
    )
    watchdog = config.watchdog
    _require(
        2 <= watchdog.silence_s < watchdog.phase_floor_s,
        f"watchdog.silence_s={watchdog.silence_s:g} must be 2 or more (hearts beat twice a second) and below watchdog.phase_floor_s={watchdog.phase_floor_s:g}: "
        "a rank that stands still is to be found before those that wait for it",
    )
    _require(watchdog.phase_factor >= 1, f"watchdog.phase_factor={watchdog.phase_factor:g} must be 1 or more: what a phase took once it may take again")
    evaluation = config.evaluation
    _require(
        evaluation.num_samples == 1 or evaluation.temperature > 0,
        f"evaluation.num_samples={evaluation.num_samples} at evaluation.temperature=0 would give equal answers; use a temperature above 0, or num_samples 1",
    )
    environment = config.environment
    _require(
        environment.name in ("", "python") or environment.name.count(":") == 1,
        f"environment.name={environment.name} is neither python nor module:function",
    )
    _require(
        not environment.name or environment.max_turns > 1,
        f"environment.max_turns={environment.max_turns}: no turn is left to answer the environment; use 2 or more",
    )
    _require(
        environment.name != "python" or environment.deadline_s >= 4 * environment.python_cpu_s + 2,
        f"environment.deadline_s={environment.deadline_s:g} is too short for two attempts at a program of environment.python_cpu_s={environment.python_cpu_s:g}; "
        f"use {4 * environment.python_cpu_s + 2:g} or more",
    )
    custom = config.reward.custom
    _require(not custom or custom.count(":") == 1, f"reward.custom={custom} must name module:function")
    largest = record_bytes(config)
    _require(
        largest <= config.transport.lane_bytes // 4,
        f"transport.lane_bytes={config.transport.lane_bytes}: a group of {n} answers can take {largest} bytes, more than a quarter of a lane; use at least {4 * largest}",
    )
    model = config.model
    _require(
        not (train.cpu_offload and config.device == "cpu"),
        "train.cpu_offload keeps weights off the GPU, but device=cpu; leave it out, or use --device cuda",
    )
    _require(
        train.attention != "varlen" or (config.device != "cpu" and (model.dtype == "bfloat16")),
        f"train.attention=varlen needs a GPU and --model.dtype bfloat16, not device={config.device} and {model.dtype}; use auto or buckets",
    )
    _require(
        model.hidden_size % model.num_heads == 0 and model.num_heads % model.num_kv_heads == 0,
        f"model.hidden_size={model.hidden_size}, num_heads={model.num_heads}, num_kv_heads={model.num_kv_heads}: each must divide the one before",
    )
    check_layout(config, config.topology.num_ranks)


def _check_positive(section: str, part: object) -> None:
    may_be_zero = {
        "num_graders",
        "warmstart_steps",
        "warmstart_direct_steps",
        "warmup_steps",
        "weight_decay",
        "every",
        "keep_every",
        "save_samples",
        "save_training_groups",
        "kl_coef",
        "overlong_buffer",
        "final_lr_share",
        "logprob_alarm",
        "flat_alarm",
        "stop_before_s",
        "imposed_mean",
        "imposed_sigma",
    }
    any_sign = {"right", "wrong", "seed", "warmstart_seed", "max_staleness"}
    for item in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, item.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            zero_ok = item.name in may_be_zero or (section == "evaluation" and item.name == "temperature")
            _require(math.isfinite(value), f"{section}.{item.name}={value} must be finite")
            if item.name not in any_sign:
                _require(value > 0 or (zero_ok and value == 0), f"{section}.{item.name}={value} must be {'zero or more' if zero_ok else 'above zero'}")


def num_training_ranks(num_ranks: int, generation_fraction: float) -> int:
    """T, at least 1 and at most num_ranks - 1 (64 ranks at 0.75 -> 16)."""
    _require(num_ranks >= 2, f"topology.num_ranks={num_ranks}: one rank generates and one trains at the least; use 2 or more")
    _require(0 < generation_fraction < 1, f"topology.generation_fraction={generation_fraction} must lie between 0 and 1")
    return min(num_ranks - 1, max(1, round(num_ranks * (1 - generation_fraction))))


def check_layout(config: Config, num_ranks: int) -> None:
    """Rules that depend on the number of ranks; called by the launcher, and again by each rank with the real number."""
    num_training = num_training_ranks(num_ranks, config.topology.generation_fraction)
    if config.topology.mode == "colocated":
        num_training = num_ranks
    replicas = config.train.replicas
    _require(
        num_training % replicas == 0,
        f"train.replicas={replicas} does not divide the {num_training} training ranks; use {_divisors_near(num_training, replicas)}",
    )
    trajectories = config.train.batch_size // config.train.num_minibatches
    _require(
        trajectories >= num_training * config.train.min_microbatches,
        f"{num_training} training ranks x min_microbatches={config.train.min_microbatches} need that many trajectories in a mini-batch, which has {trajectories}; "
        f"use --train.batch-size {num_training * config.train.min_microbatches * config.train.num_minibatches} or more, or --topology.generation-fraction closer to 1",
    )


def record_bytes(config: Config) -> int:
    """Upper bound of one ring record (a group): header, sample table, token, log-probability, version and loss mask columns."""
    per_sample = 64 + 4 * config.max_context_tokens + 9 * config.generation.max_new_tokens
    return 64 + config.train.group_size * per_sample + 7 * 64


def to_dict(config: Config) -> dict:
    """Plain nested dictionary, ready for YAML."""
    return dataclasses.asdict(config)


def existing_file(option: str, path: str) -> Path:
    """The file as a Path. Raises ConfigError when it is missing."""
    found = Path(path)
    _require(found.is_file(), f"{option}={path}: no such file")
    return found
