"""What there is to optimise: each objective's formula, source and published defaults, and which options it uses.

No torch here: a login node prints and checks configurations. `train/loss.py` holds the functions under the same names. An option that is left at `auto` takes
the objective's own value; one that the user sets although the objective does not use it is an error, never ignored. docs/objectives.md is the table for users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from areal_hpc.config import Config, Train

AUTO: Literal["auto"] = "auto"
DEFAULT_CAP = 2.0
"""Cap of pi_prox / pi_behav when it is truncated or masked."""
DEFAULT_FINAL_LR_SHARE = 0.1
DEFAULT_MAX_FILTERED = 50
"""Batches' worth of groups that may be filtered in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """An objective and its published defaults. u = pi_theta / pi_old, A = advantage, w = pi_prox / pi_behav."""

    formula: str
    """Loss of one token, to be minimised."""
    paper: str
    old_policy: Literal["prox", "behav"]
    """What u is measured against. With prox the loss of each token is multiplied by the constant w."""
    old_is_fixed: bool = False
    """The old policy is what defines this objective: the option may only repeat it."""
    aggregation: Literal["token", "sequence", "sequence-sum", "batch"]
    advantage: str
    clip: tuple[float, float] | None
    """(low, high) of the clip range [1 - low, 1 + high]; None: nothing is clipped."""
    takes_dual_clip: bool = False
    dynamic_sampling: bool = False
    overlong_buffer_share: float = 0.0
    """Share of generation.max_new_tokens over which long answers are penalised."""


CLIPPED = "-min(u A, clip(u, 1-low, 1+high) A)"
OBJECTIVES: dict[str, Objective] = {
    "decoupled": Objective(
        formula=f"w * {CLIPPED}, u = pi_theta / pi_prox",
        paper="arXiv 2505.24298, eq. 5",
        old_policy="prox",
        old_is_fixed=True,
        aggregation="token",
        advantage="group+batch",
        clip=(0.2, 0.2),
        takes_dual_clip=True,
    ),
    "ppo": Objective(
        formula=f"{CLIPPED}, u = pi_theta / pi_behav",
        paper="arXiv 1707.06347; 2505.24298, eq. 2",
        old_policy="behav",
        old_is_fixed=True,
        aggregation="token",
        advantage="group+batch",
        clip=(0.2, 0.2),
        takes_dual_clip=True,
    ),
    "grpo": Objective(
        formula=CLIPPED, paper="arXiv 2402.03300", old_policy="behav", aggregation="sequence", advantage="group", clip=(0.2, 0.2), takes_dual_clip=True
    ),
    "dr-grpo": Objective(
        formula=CLIPPED, paper="arXiv 2503.20783", old_policy="behav", aggregation="batch", advantage="mean", clip=(0.2, 0.2), takes_dual_clip=True
    ),
    "rloo": Objective(
        formula="-w A log pi_theta", paper="arXiv 2402.14740", old_policy="prox", aggregation="sequence-sum", advantage="leave-one-out", clip=None
    ),
    "dapo": Objective(
        formula=CLIPPED,
        paper="arXiv 2503.14476",
        old_policy="behav",
        aggregation="token",
        advantage="group",
        clip=(0.2, 0.28),
        takes_dual_clip=True,
        dynamic_sampling=True,
        overlong_buffer_share=0.2,
    ),
    "gspo": Objective(
        formula=f"{CLIPPED}, u = (product of the answer's token ratios)^(1/length)",
        paper="arXiv 2507.18071",
        old_policy="behav",
        aggregation="sequence",
        advantage="group",
        clip=(3e-4, 4e-4),
    ),
    "cispo": Objective(
        formula="-sg(clip(u, 1-low, 1+high)) A log pi_theta",
        paper="arXiv 2506.13585; cap 5: 2510.13786",
        old_policy="behav",
        aggregation="token",
        advantage="group",
        clip=(1.0, 4.0),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of `Train` with every `auto` resolved: what trainer and composer work with."""

    objective: str
    old_policy: str
    aggregation: str
    advantage: str
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    prox: str | None
    behav_weight: str | None
    behav_level: str | None
    behav_cap: float | None
    kl_estimator: str | None
    final_lr_share: float | None
    dynamic_sampling: str
    max_filtered: int | None


def settings(train: Train) -> Settings:
    """Resolve `auto`; None marks an option that is not used."""
    chosen = OBJECTIVES[train.objective]
    old_policy = chosen.old_policy if train.old_policy == "auto" else train.old_policy
    weighted = old_policy == "prox"
    weight = ("full" if train.behav_weight == "auto" else train.behav_weight) if weighted else None
    sampling = ("refill" if chosen.dynamic_sampling else "none") if train.dynamic_sampling == "auto" else train.dynamic_sampling
    low, high = chosen.clip or (None, None)
    return Settings(
        objective=train.objective,
        old_policy=old_policy,
        aggregation=chosen.aggregation if train.aggregation == "auto" else train.aggregation,
        advantage=chosen.advantage if train.advantage == "auto" else train.advantage,
        clip_low=low if train.clip_low == "auto" else train.clip_low,
        clip_high=high if train.clip_high == "auto" else train.clip_high,
        dual_clip=None if train.dual_clip == "none" else train.dual_clip,
        prox=("recompute" if train.prox == "auto" else train.prox) if weighted else None,
        behav_weight=weight,
        behav_level=("token" if train.behav_level == "auto" else train.behav_level) if weighted else None,
        behav_cap=(DEFAULT_CAP if train.behav_cap == "auto" else train.behav_cap) if weight in ("truncated", "masked") else None,
        kl_estimator=("k3" if train.kl_estimator == "auto" else train.kl_estimator) if train.kl_coef > 0 else None,
        final_lr_share=(DEFAULT_FINAL_LR_SHARE if train.final_lr_share == "auto" else train.final_lr_share) if train.schedule != "constant" else None,
        dynamic_sampling=sampling,
        max_filtered=(DEFAULT_MAX_FILTERED if train.max_filtered == "auto" else train.max_filtered) if filters(train, sampling) else None,
    )


def filters(train: Train, dynamic_sampling: str) -> bool:
    """Whether finished groups can be closed for a reason of the objective: no contrast, or too few answers left to train."""
    return dynamic_sampling == "refill" or train.min_group_size > 1 or train.truncated == "mask"


def overlong(config: Config) -> tuple[int, float]:
    """(tokens of the overlong buffer, penalty at the length limit in units of reward); (0, 0.0) without. DAPO's penalty is 1 for rewards of +-1: half their distance."""
    share = OBJECTIVES[config.train.objective].overlong_buffer_share
    buffer = int(share * config.generation.max_new_tokens) if config.train.overlong_buffer == "auto" else config.train.overlong_buffer
    if buffer == 0:
        return 0, 0.0
    half = abs(config.reward.right - config.reward.wrong) / 2
    return buffer, half if config.train.overlong_penalty == "auto" else config.train.overlong_penalty


def denominator(aggregation: str, trained_tokens: int, trained_sequences: int, max_new_tokens: int) -> int:
    """What the summed loss of a mini-batch is divided by, over all ranks.

    token: trained tokens. sequence (each token's loss divided by its answer's length first) and sequence-sum: trained answers.
    batch: trained answers * the longest answer there could be, a constant per answer.
    """
    return {
        "token": trained_tokens,
        "sequence": trained_sequences,
        "sequence-sum": trained_sequences,
        "batch": trained_sequences * max_new_tokens,
    }[aggregation]


def resolved_options(config: Config) -> dict[str, str]:
    """Value behind each `auto` of the train section, as text; for options that nothing uses: unused."""
    found = settings(config.train)
    buffer, penalty = overlong(config)
    values = {name: getattr(found, name) for name in found.__slots__} | {"overlong_buffer": buffer, "overlong_penalty": penalty if buffer else None}
    return {name: "unused" if value is None else f"{value}" for name, value in values.items() if getattr(config.train, name) == AUTO}


def mistake(config: Config) -> str | None:
    """The first combination of options that makes no sense, as one line (value, rule, choice); None if there is none."""
    return next((text for wrong, text in _rules(config) if wrong), None)


def _rules(config: Config) -> list[tuple[bool, str]]:
    """(broken, message) of every rule. An option that is set (not `auto`, not none) must be used."""
    train, chosen = config.train, OBJECTIVES[config.train.objective]
    found, (buffer, _) = settings(train), overlong(config)
    name = f"train.objective={train.objective}"
    with_clip = ", ".join(key for key, objective in OBJECTIVES.items() if objective.clip)
    with_dual = ", ".join(key for key, objective in OBJECTIVES.items() if objective.takes_dual_clip)
    other_old = {"prox": "ppo", "behav": "decoupled"}[chosen.old_policy]
    weighs_nothing = (
        f"needs pi_prox / pi_behav, which old_policy={found.old_policy} of {name} does not have; use --train.old-policy prox or objective decoupled"
    )
    if train.objective == "ppo":
        weighs_nothing = f"needs pi_prox / pi_behav, which {name} does not have; use --train.objective decoupled"

    def is_set(option: str) -> bool:
        return getattr(train, option) not in (AUTO, "none")

    return [
        (
            chosen.old_is_fixed and found.old_policy != chosen.old_policy,
            f"train.old_policy={train.old_policy}: {name} is defined by {chosen.old_policy}; use --train.objective {other_old}",
        ),
        *(
            (chosen.clip is None and is_set(option), f"train.{option}={getattr(train, option)}: {name} clips nothing; leave it at auto, or use {with_clip}")
            for option in ("clip_low", "clip_high")
        ),
        (found.clip_low is not None and found.clip_low > 1, f"train.clip_low={train.clip_low}: a ratio cannot fall below 0; use at most 1"),
        (is_set("dual_clip") and not chosen.takes_dual_clip, f"train.dual_clip={train.dual_clip} is not used by {name}; use none, or one of {with_dual}"),
        (
            found.dual_clip is not None and found.dual_clip <= 1,
            f"train.dual_clip={train.dual_clip} bounds a ratio from above; use more than 1 (the paper: 3), or none",
        ),
        *(
            (found.old_policy != "prox" and is_set(option), f"train.{option}={getattr(train, option)} {weighs_nothing}")
            for option in ("prox", "behav_weight", "behav_level", "behav_cap")
        ),
        (
            is_set("behav_cap") and found.behav_cap is None,
            f"train.behav_cap={train.behav_cap} is not used by behav_weight={found.behav_weight}; use --train.behav-weight truncated or masked",
        ),
        (is_set("kl_estimator") and train.kl_coef == 0, f"train.kl_estimator={train.kl_estimator} is not used while train.kl_coef is 0; set --train.kl-coef"),
        (
            bool(train.reference_path) and train.kl_coef == 0,
            f"train.reference_path={train.reference_path} is not used while train.kl_coef is 0; set --train.kl-coef",
        ),
        (
            is_set("final_lr_share") and train.schedule == "constant",
            f"train.final_lr_share={train.final_lr_share} is not used by schedule=constant; use --train.schedule cosine or linear",
        ),
        (found.final_lr_share is not None and found.final_lr_share > 1, f"train.final_lr_share={train.final_lr_share} is a share of the peak; use at most 1"),
        (
            is_set("overlong_penalty") and buffer == 0,
            f"train.overlong_penalty={train.overlong_penalty} is not used without a buffer; set --train.overlong-buffer",
        ),
        (
            buffer > config.generation.max_new_tokens,
            f"train.overlong_buffer={buffer} exceeds generation.max_new_tokens={config.generation.max_new_tokens}; use at most that many",
        ),
        (
            train.min_group_size > train.group_size,
            f"train.min_group_size={train.min_group_size} exceeds train.group_size={train.group_size}: no group would ever train; use 1 to {train.group_size}",
        ),
        (
            found.dynamic_sampling == "refill" and found.advantage == "batch",
            "train.dynamic_sampling=refill drops groups of equal rewards, which train.advantage=batch can learn from; use another advantage, or none",
        ),
        (
            is_set("max_filtered") and found.max_filtered is None,
            f"train.max_filtered={train.max_filtered} is not used: nothing filters groups; "
            "set --train.dynamic-sampling refill, --train.min-group-size or --train.truncated mask",
        ),
        (
            found.max_filtered is not None and config.staleness.max_staleness == "inf",
            "staleness.max_staleness=inf holds generation back by the number of held groups, which filtered ones would fill up; use a finite number with filters",
        ),
        (
            train.group_size == 1 and found.advantage != "batch",
            f"train.group_size=1 leaves nothing to compare within a group (advantage {found.advantage}); use --train.advantage batch",
        ),
    ]
