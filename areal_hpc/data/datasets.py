"""Problems: where the questions come from, which are held out, and what counts as a right answer.

1. Read: reasoning-gym tasks mixed in equal parts (problem j belongs to task j mod number of tasks), or a JSON-lines file of questions and answers.
2. Keep every distinct question once; two questions are the same when they differ only in case and white space.
3. Split by the hash of the normalised question, so that no question ever stands on both sides and a question keeps its side when a file grows.
4. Fingerprint what came out: the data state of a checkpoint is {tickets closed} under this fingerprint.

Light on purpose (no torch, no MPI, no numpy): the launcher loads the data to validate it, and so does every grader.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from areal_hpc.config import ConfigError, Data, existing_file
from areal_hpc.data import reasoning_tasks

FILE_SOURCE = "file"
QUESTION_KEYS = ("question", "problem", "prompt")
ANSWER_KEYS = ("answer", "solution")
GOLD_MARKER = "#### "


@dataclass(frozen=True, slots=True)
class Problem:
    index: int
    """Row number of the file (from 0, blank lines not counted) or index of the generated item."""
    question: str
    answer: str
    source: str
    """Name of the reasoning-gym task, or "file"."""
    solution: str = ""
    """Worked solution that came with the data (GSM8K style, its last line is "#### ANSWER"); empty when there is none."""
    metadata: Mapping[str, Any] | None = None
    """What the task's scorer reads besides the answer; None for most tasks."""


@dataclass(frozen=True, slots=True)
class Problems:
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    fingerprint: str
    """SHA-256 (hexadecimal) over sides, sources, questions and answers, in order."""
    num_duplicates: int = 0
    """Problems left out because their question was there before (of two answers the first stays)."""


def load_problems(data: Data) -> Problems:
    """The training and held-out problems that `data` describes: a function of the configuration and the files alone.

    Raises ConfigError, in one line, for a missing file, a malformed row ("FILE:LINE: reason"), an unknown task or refused options, an empty data set,
    or a split that leaves one side empty.
    """
    problems = _read_jsonl("data.path", data.path) if data.path else _generate(data)
    distinct = _distinct(problems)
    if not distinct:
        raise ConfigError(f"data.path={data.path}: no problem in it" if data.path else f"data.size={data.size}: no problem generated")
    num_read, num_distinct = len(problems), len(distinct)
    if data.heldout_path:
        held = _read_jsonl("data.heldout_path", data.heldout_path)
        heldout = _distinct(held)
        if not heldout:
            raise ConfigError(f"data.heldout_path={data.heldout_path}: no held-out problem in it")
        num_read, num_distinct = num_read + len(held), num_distinct + len(heldout)
        train = {key: problem for key, problem in distinct.items() if key not in heldout}
        num_distinct -= len(distinct) - len(train)
        if not train:
            raise ConfigError(f"data.heldout_path={data.heldout_path} holds every question of the training data; no training question is left")
    else:
        train, heldout = _split(distinct, data.heldout_fraction)
    sides = {"train": tuple(train.values()), "heldout": tuple(heldout.values())}
    return Problems(**sides, fingerprint=_fingerprint(sides), num_duplicates=num_read - num_distinct)


def score(problem: Problem, answer: str | None) -> float:
    """Score of an extracted answer, 1.0 = right (only that counts as right; some tasks pay partial credit below it).

    reasoning-gym problems: the task's own scorer. File problems: equal text after normalisation, or equal value where both are plain numbers.
    """
    if answer is None:
        return 0.0
    if problem.source == FILE_SOURCE:
        return float(_same_answer(problem.answer, answer))
    entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
    return float(reasoning_tasks.scorer(problem.source)(answer, entry))


# ---- reading


def _generate(data: Data) -> list[Problem]:
    if not data.tasks:
        raise ConfigError("data.tasks is empty and no data.path is given")
    per_task = -(-data.size // len(data.tasks))
    generators = [reasoning_tasks.create_task(task, data, per_task) for task in data.tasks]
    problems = []
    for index in range(data.size):
        row, which = divmod(index, len(data.tasks))
        task = data.tasks[which]
        try:
            item = generators[which][row]
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(f"data.tasks: {task} cannot generate item {row} of data.seed={data.seed}: {error!r}; use another seed") from error
        metadata = item["metadata"] if task in reasoning_tasks.SCORED_BY_METADATA else None
        problems.append(Problem(index, item["question"], item["answer"], task, item["metadata"].get("answer_cot", ""), metadata))
    return problems


def _read_jsonl(option: str, path: str) -> list[Problem]:
    """One problem a line. Tolerates a byte-order mark, CRLF and blank lines; anything else it does not understand is an error with file and line."""
    problems: list[Problem] = []
    for number, line in _lines(existing_file(option, path)):
        try:
            question, answer = _parse_row(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        marked = GOLD_MARKER in answer
        gold = normalised_answer(answer.rpartition(GOLD_MARKER)[2].partition("\n")[0]) if marked else answer.strip()
        if not gold:
            raise ConfigError(f"{path}:{number}: the answer is empty")
        problems.append(Problem(len(problems), question, gold, FILE_SOURCE, answer if marked else ""))
    return problems


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, content) of the lines that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if content:
                yield number, content


def _parse_row(line: bytes) -> tuple[str, str]:
    """(question, answer) of one row. Raises ValueError with the reason."""
    try:
        row = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with question and answer, found {type(row).__name__}")
    question = _first_value(row, QUESTION_KEYS)
    if not isinstance(question, str):
        raise ValueError(f"the question must be text, found {type(question).__name__}")
    if not question.strip():
        raise ValueError("the question is empty")
    answer = _first_value(row, ANSWER_KEYS)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool) and answer == answer:
        answer = str(answer)
    if not isinstance(answer, str):
        raise ValueError(f"the answer must be text or a number, found {answer if answer is None else type(answer).__name__}")
    (question + answer).encode()  # a lone surrogate ("\ud800" in JSON) raises UnicodeEncodeError, which is a ValueError
    return question, answer


def _first_value(row: dict[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in row:
            return row[key]
    raise ValueError(f"no '{keys[0]}' (nor {', '.join(keys[1:])}) among the keys {', '.join(map(repr, row)) or '(none)'}")


# ---- splitting


def normalised_question(text: str) -> str:
    return " ".join(text.split()).casefold()


def _distinct(problems: Iterable[Problem]) -> dict[bytes, Problem]:
    """Hash of the normalised question -> its first problem, in order."""
    found: dict[bytes, Problem] = {}
    for problem in problems:
        found.setdefault(hashlib.sha256(normalised_question(problem.question).encode()).digest(), problem)
    return found


def _split(distinct: dict[bytes, Problem], fraction: float) -> tuple[dict[bytes, Problem], dict[bytes, Problem]]:
    """(train, held-out): held out are the hashes in the lowest `fraction` of their range. A small data set gives at least one question to each side."""
    if len(distinct) < 2:
        raise ConfigError(f"only {len(distinct)} distinct question: none is left to hold out; add questions or give --data.heldout-path")
    assert 0 < fraction < 1
    bound = max(min(distinct), int(fraction * 2**256).to_bytes(32, "big"))
    held = {key for key in distinct if key <= bound}
    if len(held) == len(distinct):
        held.remove(max(held))
    train = {key: problem for key, problem in distinct.items() if key not in held}
    return train, {key: problem for key, problem in distinct.items() if key in held}


def _fingerprint(sides: Mapping[str, Sequence[Problem]]) -> str:
    digest = hashlib.sha256()
    for side, problems in sides.items():
        digest.update(f"{side} {len(problems)}\n".encode())
        for problem in problems:
            digest.update(json.dumps((problem.source, problem.question, problem.answer)).encode())
    return digest.hexdigest()


# ---- comparing answers to file problems

_GROUPED = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]+)?")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_MAX_NUMBER_CHARS = 400


def normalised_answer(text: str) -> str:
    """White space collapsed, dollar signs gone, and commas gone where they group thousands ("1,234" but not "1,2")."""
    text = " ".join(text.replace("$", "").split())
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def _same_answer(gold: str, answer: str) -> bool:
    gold, answer = normalised_answer(gold), normalised_answer(answer)
    if gold == answer:
        return True
    plain = all(len(text) <= _MAX_NUMBER_CHARS and _PLAIN_NUMBER.fullmatch(text) for text in (gold, answer))
    return plain and Fraction(gold) == Fraction(answer)
