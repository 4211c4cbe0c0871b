"""The cases of math_cases.jsonl (distilled from public issues) and math_more.jsonl (written for this grader, by kind of answer), for the tests beside it."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def rows(name):
    """The decided rows of a file; those with expected null have no right verdict."""
    found = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    return [row for row in found if row["expected"] is not None]


def wrongly_graded(cases, statuses):
    """[(case, status)] where a reward was given against the expectation or withheld."""
    return [(case, status) for case, status in zip(cases, statuses, strict=True) if (status == "right") != case["expected"]]
