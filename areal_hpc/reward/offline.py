"""Grading without a run: `areal-hpc grade FILE.jsonl` reads rows, grades them by the same killable service, and prints one JSON object for each.

    {"gold": "\\\\frac{1}{2}", "answer": "... so \\\\boxed{0.5}."}               mathematics; gold may be a number, or a list of which any will do
    {"kind": "code", "tests": ..., "answer": "... ```python ... ```"}        a program

Results come in the order of the rows. A row that is JSON but cannot be graded is reported in its place, with a reason; a line that is not JSON ends the command before
anything is graded, or (skip_invalid) is reported too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areal_hpc.config import ConfigError, Reward
from areal_hpc.reward.service import RewardService, Verdict
from areal_hpc.reward.verdict import Graded, Outcome

MAX_AHEAD = 512
"""Rows handed to the service beyond the last one that is finished."""
STALL_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the input."""

    line: int
    kind: Literal["math", "code", ""] = ""
    """Empty: not gradable, see `problem`."""
    reference: Any = None
    answer: str = ""
    problem: Graded | None = None


def read_rows(path: str, skip_invalid: bool = False) -> list[Row]:
    """The rows of a JSON-lines file ("-": standard input); blank lines are none. Raises ConfigError "FILE:LINE: reason" at a line that is not JSON."""
    try:
        if path == "-":
            lines = sys.stdin.buffer.read().splitlines()
        else:
            with open(path, "rb") as file:
                lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        content = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        if not content:
            continue
        try:
            rows.append(_row(number, _parsed(content)))
        except ValueError as error:
            if not skip_invalid:
                raise ConfigError(f"{'standard input' if path == '-' else path}:{number}: {error}; --skip-invalid reports such lines and goes on") from error
            rows.append(Row(number, problem=Graded.of(Outcome.INFRA_ERROR, None, f"line {number}: {error}")))
    return rows


def _parsed(content: bytes) -> Any:
    """Raises ValueError with the reason."""
    try:
        return json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None


def _row(number: int, values: Any) -> Row:
    def bad(status: Outcome, reason: str) -> Row:
        return Row(number, problem=Graded.of(status, None, f"line {number}: {reason}"))

    if not isinstance(values, dict):
        return bad(Outcome.INFRA_ERROR, f"expected an object with gold and answer, found {type(values).__name__}")
    kind = values.get("kind", "math")
    if kind not in ("math", "code"):
        return bad(Outcome.INFRA_ERROR, f"kind {kind!r} is neither math nor code")
    key = "gold" if kind == "math" else "tests"
    if key not in values:
        return bad(Outcome.GOLD_BAD, f"no '{key}'")
    reference = values[key]
    if kind == "math":
        golds = [_as_text(each) for each in (reference if isinstance(reference, list) else [reference])]
        if not golds or None in golds:
            return bad(Outcome.GOLD_BAD, "gold must be text, a number, or a list of these")
        reference = golds
    answer = values.get("answer")
    if not isinstance(answer, str):
        return bad(Outcome.INFRA_ERROR, "no 'answer'" if answer is None else f"the answer must be text, found {type(answer).__name__}")
    return Row(number, kind, reference, _encodable(answer))


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return _encodable(value)
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _encodable(text: str) -> str:
    """Lone surrogates, which JSON can hold and UTF-8 cannot, as question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def grade_rows(rows: list[Row], reward: Reward) -> Iterator[dict[str, Any]]:
    """One result per row, in order: line, reward, status, extracted, seconds, reason (where there is one)."""
    kinds = sorted({row.kind for row in rows if row.kind})
    if not kinds:
        yield from (_result(row, row.problem, 0.0) for row in rows if row.problem)
        return
    num_graders = reward.num_graders or min(len(os.sched_getaffinity(0)), len(rows))
    with RewardService.start() as service:
        service.configure(None, dataclasses.replace(reward, num_graders=num_graders, custom=""), kinds)
        done: dict[int, dict[str, Any]] = {}
        next_out = next_in = 0
        while next_out < len(rows):
            while next_in < len(rows) and next_in < next_out + MAX_AHEAD:
                row = rows[next_in]
                if row.kind:
                    service.submit_reference(next_in, row.kind, row.reference, row.answer)
                else:
                    done[next_in] = _result(row, row.problem, 0.0)
                next_in += 1
            if next_out not in done:
                verdicts = service.wait(STALL_S)
                if not verdicts:
                    raise TimeoutError(f"waited {STALL_S:g} s for the verdict on line {rows[next_out].line}")
                done |= {verdict.job_id: _result(rows[verdict.job_id], _graded(verdict), verdict.seconds) for verdict in verdicts}
            while next_out in done:
                yield done.pop(next_out)
                next_out += 1


def _graded(verdict: Verdict) -> Graded:
    return Graded(verdict.score, Outcome[verdict.status.name], verdict.extracted, verdict.reason)


def _result(row: Row, graded: Graded | None, seconds: float) -> dict[str, Any]:
    assert graded is not None
    result = {"line": row.line, "reward": graded.reward, "status": str(graded.status), "extracted": graded.extracted, "seconds": round(seconds, 6)}
    return result | ({"reason": graded.reason} if graded.reason else {})


def summary(results: Iterable[dict[str, Any]]) -> str:
    """One line: rows by status."""
    counts = Counter(result["status"] for result in results)
    return f"{counts.total()} rows: " + ", ".join(f"{count} {status}" for status, count in counts.most_common())
