"""The documented format is the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from areal_hpc.observe import schema
from areal_hpc.transport.trajectory import Status

ROOT = Path(__file__).parents[2]


def test_documentation_lists_the_schema() -> None:
    documented = (ROOT / "docs" / "file_format.md").read_text().split("<!-- schema -->\n")[1]
    assert documented == schema.listing(), "run `python -m areal_hpc.observe.schema` and paste its output below the mark"


def test_columns_that_users_rely_on_are_there() -> None:
    promised = {"step", "policy_version", "wall_s", "tokens", "trajectories", "tokens_per_s", "reward_mean", "staleness_max", "staleness_mean"}
    assert promised | {"generation_wait_s", "collect_s", "train_s", "push_s", "pause_s"} <= set(schema.TABLES["steps"].column_names)
    assert schema.TABLES["timeline"].column_names == ("rank", "role", "phase", "start_s", "stop_s")


def test_every_column_has_a_unit_a_definition_and_a_fixed_width() -> None:
    for table in schema.TABLES.values():
        assert len(set(table.column_names)) == len(table.columns)
        for column in table.columns:
            assert column.unit and column.definition
            assert column.numpy.kind in "iufS" and column.numpy.itemsize > 0
            unit_in_name = {"_s": "s", "_bytes": "byte", "_tokens": "token"}
            for suffix, unit in unit_in_name.items():
                assert not column.name.endswith(suffix) or column.unit.split("/")[-1] == unit, f"{table.name}.{column.name} is in {column.unit}"


def test_numbers_of_enumerations_never_move() -> None:
    """Old files hold these numbers."""
    first = (
        "start",
        "decode",
        "gated",
        "swap",
        "ring_full",
        "evaluate",
        "idle",
        "stop",
        "wait_data",
        "collect",
        "prox",
        "train",
        "pack",
        "push_wait",
        "save",
        "log",
    )
    assert schema.PHASES[: len(first)] == first
    assert schema.ROLES == ("generation", "training")
    assert schema.OUTCOMES == ("trained", "dropped", "failed", "masked", "filtered")
    assert all(schema.STATUSES[status] == status.name.lower() for status in Status)


def test_every_value_that_fits_is_kept_exactly() -> None:
    limits = {"i": np.iinfo(np.int64).max, "u": np.iinfo(np.uint64).max}
    row = {column.name: 1 for column in schema.TABLES["pushes"].columns} | {"bytes": limits["i"], "checksum": limits["u"]}
    stored = schema.to_rows("pushes", row)[0]
    assert int(stored["bytes"]) == limits["i"] and int(stored["checksum"]) == limits["u"]
