"""Answers saved for reading: JSON-lines files in attempt-K/samples, and one self-contained HTML page over all of them.

    evaluation-000050.jsonl   answers of the evaluation of version 50
    training-000051.jsonl     answers of groups that step 51 closed

One object per line (`record`); docs/file_format.md says what its keys mean. A file appears, and grows, by a rename: a reader never sees half of one.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.data.datasets import Problem
from areal_hpc.transport.evaluation import source_of
from areal_hpc.transport.samples import ENVIRONMENT_MARK, MODEL_MARK, AnswerText

FOLDER = "samples"
MAX_PAGE_BYTES = 24 << 20
"""Of answers on the page; beyond it the files hold more than the page, and the page says so."""
STATUS_SHOWN = 24
_NAME = re.compile(r"(evaluation|training)-(\d{6,})\.jsonl")
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters would be errors in HTML: shown by their pictures."""


def record(answer: AnswerText, problem: Problem, **about: Any) -> dict[str, Any]:
    """One line of a file: what is known of an answer, as plain data. `about`: kind, version or step, and what the log adds."""
    return {
        **about,
        "source": source_of(problem),
        "problem": answer.problem,
        "sample": answer.sample,
        "prompt": problem.question,
        "gold": problem.accepted[0] if len(problem.accepted) == 1 else list(problem.accepted),
        "answer": answer.answer,
        "answer_chars": answer.answer_chars,
        "extracted": answer.extracted,
        "status": answer.status.name.lower(),
        "score": answer.score,
        "tokens": answer.tokens,
        "version_min": answer.version_min,
        "version_max": answer.version_max,
    }


def file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.jsonl"


def add_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Put records behind those that the file has. Raises OSError; the file is then as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    before = path.read_bytes() if path.exists() else b""
    try:
        unfinished.write_bytes(before + "".join(json.dumps(row) + "\n" for row in records).encode())  # ASCII: also a lone surrogate is kept
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sample_files(folder: Path) -> list[Path]:
    """Sample files of a run folder or an evaluation's folder: all attempts, in order; evaluations before training."""
    found = [path for pattern in (f"{FOLDER}/*.jsonl", f"attempt-*/{FOLDER}/*.jsonl") for path in folder.glob(pattern) if _NAME.fullmatch(path.name)]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[str, int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    attempt = path.parent.parent.name.removeprefix("attempt-")
    return match[1], int(match[2]), int(attempt) if attempt.isdigit() else 0


def read_records(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError that names file and line for what is no record."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict) or "answer" not in row:
            raise ValueError(f"{path}:{number}: not a saved answer")
        records.append(row)
    return records


# ---- the page


@dataclass(frozen=True, slots=True)
class _Entry:
    """One answer as HTML."""

    text: str
    where: str
    status: str
    source: str


def write_page(folder: Path, page: Path, title: str) -> int:
    """Write the page over all sample files of `folder`; returns the number of answers on it. Without any file nothing is written.

    Newest evaluations first, then the newest training groups, until MAX_PAGE_BYTES. Raises ValueError for a damaged file.
    """
    files = sample_files(folder)
    if not files:
        return 0
    entries: list[_Entry] = []
    used, num_left = 0, 0
    for path in sorted(files, key=lambda path: (_order(path)[0] == "training", -_order(path)[1], -_order(path)[2])):
        for row in read_records(path):
            entry = _entry(row, path.parent.parent.name)
            if num_left or used + len(entry.text) > MAX_PAGE_BYTES:
                num_left += 1
                continue
            entries.append(entry)
            used += len(entry.text)
    left = f"{num_left} more answers are in {FOLDER}/*.jsonl only: the page holds {MAX_PAGE_BYTES >> 20} MiB." if num_left else ""
    parts = {
        "title": _text(title),
        "note": _text(f"{len(entries)} answers in {len(files)} files. {left}".strip()),
        "places": _options([entry.where for entry in entries]),
        "statuses": _options([entry.status for entry in entries]),
        "sources": _options([entry.source for entry in entries]),
        "entries": "\n".join(entry.text for entry in entries),
    }
    template = (Path(__file__).with_name("samples.html")).read_text()
    pieces = re.split(r"<!-- (\w+) -->", template)  # filled in one pass: a text that looks like a mark is not one
    page.write_text("".join(parts[piece] if position % 2 else piece for position, piece in enumerate(pieces)), encoding="utf-8")
    return len(entries)


def _text(value: object) -> str:
    """As HTML text or attribute value: escaped, control characters visible, what UTF-8 cannot hold as a \\u escape."""
    plain = value if isinstance(value, str) else json.dumps(value)
    return html.escape(plain.translate(_CONTROL).encode("utf-8", "backslashreplace").decode(), quote=True)


def _with_turns(text: str) -> str:
    """Escaped text of an answer in which an environment's texts stand out (`transport.samples.joined_turns`)."""
    return re.sub(rf"{ENVIRONMENT_MARK}\n(.*?)\n{MODEL_MARK}", r'<span class="environment">\1</span>', text, flags=re.DOTALL)


def _options(values: list[str]) -> str:
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    return "".join(f'<option value="{_text(value)}">{_text(value)} ({count})</option>' for value, count in counts.items())


def _entry(row: dict[str, Any], attempt: str) -> _Entry:
    kind = str(row.get("kind", ""))
    number = row.get("version" if kind == "evaluation" else "step")
    place = f"{kind} of version {number}" if kind == "evaluation" else f"training step {number}"
    where = f"{place}, {attempt}" if attempt.startswith("attempt-") and attempt != "attempt-1" else place
    status, source = str(row.get("status", "")), str(row.get("source", ""))
    grade = "right" if status == "right" else "wrong"
    versions = f"{row.get('version_min')}" if row.get("version_min") == row.get("version_max") else f"{row.get('version_min')} to {row.get('version_max')}"
    facts = {name: row[name] for name in ("ticket", "score", "reward", "advantage", "outcome", "age", "tokens", "answer_chars") if row.get(name) is not None}
    shown = [*(f"{name.replace('_', ' ')} {_number(value)}" for name, value in facts.items()), f"policy version {versions}"]
    extracted = row.get("extracted")
    blocks = [
        ("prompt", row.get("prompt", "")),
        ("answer", row["answer"]),
        ("extracted", "(none)" if extracted is None else extracted),
        ("gold", row.get("gold")),
    ]
    head = f"{source} {row.get('problem')}.{row.get('sample')}"
    body = "".join(f"<h3>{name}</h3><pre>{_with_turns(_text(value)) if name == 'answer' else _text(value)}</pre>" for name, value in blocks)
    preview = " ".join(str(row.get("prompt", "")).split())[:100]
    attributes = f'data-where="{_text(where)}" data-status="{_text(status)}" data-grade="{grade}" data-source="{_text(source)}"'
    summary = (
        f'<summary><b class="{grade}">{_text(status[:STATUS_SHOWN])}</b> <span>{_text(head)}</span> <q>{_text(preview)}</q> <i>{_text(where)}</i></summary>'
    )
    return _Entry(f'<details class="sample" {attributes}>{summary}<p>{_text(", ".join(shown))}</p>{body}</details>', where, status, source)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
