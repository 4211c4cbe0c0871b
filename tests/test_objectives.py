"""Options of the objectives: what is resolved, what is refused, and that docs/objectives.md says the same."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from areal_hpc import objectives
from areal_hpc.cli import main
from areal_hpc.config import Config, ConfigError, Staleness, Train, check
from areal_hpc.config_io import as_yaml

ROOT = Path(__file__).parents[1]


def test_documented_table_is_the_registry() -> None:
    rows = (ROOT / "docs" / "objectives.md").read_text().split("areal_hpc/objectives.py -->\n")[1].split("\n\n")[0].splitlines()[2:]
    found = {}
    for row in rows:
        name, *cells = (cell.strip().strip("`") for cell in row.strip("|").split("|"))
        found[name] = cells
    expected = {}
    for name, objective in objectives.OBJECTIVES.items():
        clip = ", ".join(str(bound) for bound in objective.clip) if objective.clip else "-"
        weighted = ["prox", "behav_weight"] if objective.old_policy == "prox" else []
        own = [*(["dual_clip"] if objective.takes_dual_clip else []), *weighted]
        own += ["dynamic_sampling", "overlong_buffer"] if objective.dynamic_sampling else []
        expected[name] = [objective.formula, objective.paper, objective.old_policy, objective.aggregation, objective.advantage, clip, ", ".join(own)]
    assert found == expected


def test_options_are_named_in_the_page() -> None:
    text = (ROOT / "docs" / "objectives.md").read_text()
    missing = [
        option
        for option in objectives.resolved_options(Config())
        if f"`{option}`" not in text and option not in ("clip_low", "clip_high", "kl_estimator", "old_policy", "final_lr_share")
    ]
    assert missing == []


def checked(**train: object) -> None:
    staleness = Staleness(max_staleness=train.pop("max_staleness", 4))  # type: ignore[arg-type]
    check(replace(Config(), train=Train(**train), staleness=staleness))  # type: ignore[arg-type]


REFUSED = {
    "old policy of decoupled": ({"old_policy": "behav"}, "use --train.objective ppo"),
    "old policy of ppo": ({"objective": "ppo", "old_policy": "prox"}, "use --train.objective decoupled"),
    "clip of rloo": ({"objective": "rloo", "clip_high": 0.2}, "clips nothing"),
    "clip below zero": ({"clip_low": 1.5}, "use at most 1"),
    "clip of zero": ({"clip_high": 0.0}, "must be above zero"),
    "dual clip of gspo": ({"objective": "gspo", "dual_clip": 3.0}, "not used by train.objective=gspo"),
    "dual clip of one": ({"dual_clip": 1.0}, "use more than 1"),
    "loglinear without prox": ({"objective": "ppo", "prox": "loglinear"}, "train.prox=loglinear needs pi_prox"),
    "weight without prox": ({"objective": "grpo", "behav_weight": "truncated"}, "use --train.old-policy prox"),
    "level without prox": ({"objective": "dapo", "behav_level": "sequence"}, "train.behav_level=sequence needs"),
    "cap of the full weight": ({"behav_cap": 3.0}, "use --train.behav-weight truncated or masked"),
    "estimator without penalty": ({"kl_estimator": "k2"}, "set --train.kl-coef"),
    "reference without penalty": ({"reference_path": "somewhere"}, "set --train.kl-coef"),
    "negative penalty": ({"kl_coef": -0.1}, "must be zero or more"),
    "final rate of constant": ({"final_lr_share": 0.2}, "use --train.schedule cosine or linear"),
    "final rate above the peak": ({"schedule": "linear", "final_lr_share": 1.2}, "use at most 1"),
    "overlong penalty without buffer": ({"overlong_penalty": 1.0}, "set --train.overlong-buffer"),
    "overlong penalty of dapo without buffer": ({"objective": "dapo", "overlong_buffer": 0, "overlong_penalty": 1.0}, "set --train.overlong-buffer"),
    "overlong buffer beyond the limit": ({"overlong_buffer": 1000}, "exceeds generation.max_new_tokens=128"),
    "group too small": ({"min_group_size": 9}, "use 1 to 8"),
    "no groups": ({"group_size": 1}, "use --train.advantage batch"),
    "filter with batch advantage": ({"objective": "dapo", "advantage": "batch"}, "train.advantage=batch can learn from"),
    "limit without filter": ({"max_filtered": 3}, "nothing filters groups"),
    "filter without gate": ({"objective": "dapo", "max_staleness": "inf"}, "use a finite number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_senseless_combinations_are_one_line(name: str) -> None:
    options, expected = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        checked(**options)
    assert expected in str(error.value) and "\n" not in str(error.value)


ACCEPTED: list[dict] = [{"objective": name} for name in objectives.OBJECTIVES]
ACCEPTED += [{"objective": name, "old_policy": "prox", "behav_weight": "masked", "behav_cap": 5.0} for name in objectives.OBJECTIVES if name != "ppo"]
ACCEPTED += [
    {"objective": "ppo", "old_policy": "behav"},
    {"objective": "gspo", "old_policy": "prox", "prox": "loglinear"},
    {"group_size": 1, "advantage": "batch"},
]
ACCEPTED += [{"kl_coef": 0.1, "kl_estimator": "k1"}, {"schedule": "cosine", "final_lr_share": 0.0}, {"truncated": "mask", "max_filtered": 3}]


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_sensible_combinations_pass(options: dict) -> None:
    checked(**options)


def test_print_config_shows_what_is_behind_auto(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "laptop", "--train.objective", "gspo", "--train.clip-high", "0.01", "--print-config"]) == 0
    shown = capfd.readouterr().out
    for line in ("clip_low: auto  # 0.0003", "clip_high: 0.01", "aggregation: auto  # sequence", "behav_cap: auto  # unused", "old_policy: auto  # behav"):
        assert f"\n  {line}\n" in shown


def test_a_stored_configuration_keeps_auto(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fed back with another objective, its defaults apply: the first one's numbers must not stick."""
    (tmp_path / "c.yaml").write_text(as_yaml(Config()))
    assert main(["run", "laptop", "--config", str(tmp_path / "c.yaml"), "--train.objective", "dapo", "--print-config"]) == 0
    shown = capfd.readouterr().out
    assert "\n  clip_high: auto  # 0.28\n" in shown
    assert yaml.safe_load(shown)["train"]["clip_high"] == "auto"


def test_every_auto_is_resolved() -> None:
    auto = {item.name for item in dataclasses.fields(Train) if item.default == "auto"} - {"attention"}  # which follows from the device
    assert set(objectives.resolved_options(Config())) == auto
    dapo = objectives.resolved_options(replace(Config(), train=Train(objective="dapo")))
    assert (dapo["dynamic_sampling"], dapo["overlong_buffer"], dapo["overlong_penalty"], dapo["max_filtered"]) == ("refill", "25", "5.0", "50")
