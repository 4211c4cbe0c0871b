"""Problems: where the questions come from, which are held out, and what counts as a right answer.

1. Read: reasoning-gym tasks mixed by weight (equal parts: problem j belongs to task j mod number of tasks), or files (`files`) in any of the known `formats`.
2. Check: every reference answer and every test is parsed. A row that cannot be used stops the run, or is counted (data.skip_invalid).
3. Keep every distinct question once; two questions are the same when they differ only in case and white space.
4. Split by the hash of the normalised question, so that no question ever stands on both sides and a question keeps its side when a file grows.
5. Leave out over-long prompts, where a model says what is too long (`without_overlong`): afterwards, so that sides do not depend on the model.
6. Fingerprint what came out: the data state of a checkpoint is {tickets closed} under this fingerprint.

Light on purpose (no torch, no MPI, no numpy unless parquet is read): the launcher loads the data to validate it, and so does every grader.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from areal_hpc.config import ConfigError, Data
from areal_hpc.data import files, formats, reasoning_tasks
from areal_hpc.data.files import RowError
from areal_hpc.data.formats import GOLD_MARKER as GOLD_MARKER
from areal_hpc.data.formats import normalised_answer as normalised_answer
from areal_hpc.reward.math import check_gold

FILE_SOURCE = "file"
MAX_LOGGED_FILES = 100
"""Files of the data that the log names: an attribute of HDF5 holds 64 KiB."""
NUM_SNIFFED_ROWS = 16
"""First rows of a file that decide about its format."""


@dataclass(frozen=True, slots=True)
class Problem:
    index: int
    """Number of the row among those read (from 0, blank lines not counted) or index of the generated item."""
    question: str
    """What tells problems apart: the user's text, or the whole conversation where `messages` has several turns."""
    answer: str
    """The first reference answer; empty for programs."""
    source: str
    """Name of the reasoning-gym task, or "file"."""
    solution: str = ""
    """Worked solution that came with the data (GSM8K style, its last line is "#### ANSWER"); empty when there is none."""
    metadata: Mapping[str, Any] | None = None
    """What the task's scorer reads besides the answer; None for most tasks."""
    kind: Literal["math", "code", "rg"] = "math"
    """Which grader it is for: mathematical answers, programs, or the reasoning-gym task's own scorer."""
    golds: tuple[str, ...] = ()
    """Reference answers, of which any is right; empty: `answer` is the only one."""
    tests: str = ""
    """Tests of a program, packed (areal_hpc.data.code_tests); empty for other kinds."""
    messages: formats.Messages = ()
    """(role, content) of the prompt where the data gives more than one user message; the last is the user's."""
    origin: str = ""
    """Data set that the row names (verl's data_source, LiveCodeBench's platform); otherwise the name of its format."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """All reference answers."""
        return self.golds or ((self.answer,) if self.answer else ())


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    format: str
    """Name in `formats.FORMATS`."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of every row: num_read = num_kept + num_duplicates + num_overlong + num_invalid."""

    num_read: int = 0
    """Rows of files (blank lines are none), or items generated."""
    num_kept: int = 0
    num_duplicates: int = 0
    """Questions that were there before, or that are held out: of several answers the first stays."""
    num_conflicting: int = 0
    """Those among the duplicates of one side whose reference answers or tests differ from the first's."""
    num_overlong: int = 0
    """Prompts above data.max_prompt_tokens."""
    invalid: Mapping[str, int] = field(default_factory=dict)
    """Kind of fault -> rows (data.skip_invalid)."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Kind of fault -> the first such row and what is wrong with it."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What was changed in rows that were kept -> how often."""
    files: tuple[FileReport, ...] = ()
    ignored_files: tuple[str, ...] = ()
    """Files of a folder that hold no data."""

    @property
    def num_invalid(self) -> int:
        return sum(self.invalid.values())

    def lines(self) -> list[str]:
        """For the start of a run: one line of numbers, then one for each thing worth a look."""
        found = [f"{self.num_read} problems read, {self.num_kept} kept{self._left_out()}"]
        found += [f"  {count} x {kind}; first: {self.examples[kind]}" for kind, count in sorted(self.invalid.items())]
        if self.num_conflicting:
            found.append(f"  {self.num_conflicting} repeated questions have another answer than the first, which stays")
        found += [f"  {count} x {note}" for note, count in sorted(self.notes.items())]
        found += [f"  {line}" for line in self._file_lines()]
        return found

    def _left_out(self) -> str:
        counts = {"repeated": self.num_duplicates, "over-long": self.num_overlong, "invalid": self.num_invalid}
        return "".join(f", {count} {what}" for what, count in counts.items() if count)

    def _file_lines(self) -> list[str]:
        by_format: dict[str, list[FileReport]] = {}
        for file in self.files:
            by_format.setdefault(file.format, []).append(file)
        found = [
            f"{name}: {sum(file.num_rows for file in group)} rows of {group[0].path}{f' and {len(group) - 1} more files' if group[1:] else ''}"
            for name, group in by_format.items()
        ]
        if self.ignored_files:
            found.append(f"no data in {', '.join(self.ignored_files[:3])}{f' and {len(self.ignored_files) - 3} more' if self.ignored_files[3:] else ''}")
        return found

    def attributes(self) -> dict[str, int | str]:
        """For the log: counts by name, the rest as JSON text."""
        numbers = {name: getattr(self, name) for name in ("num_read", "num_kept", "num_duplicates", "num_conflicting", "num_overlong", "num_invalid")}
        numbers["num_files"] = len(self.files)
        texts = {
            "invalid": dict(self.invalid),
            "notes": dict(self.notes),
            "files": [[file.path, file.format, file.num_rows] for file in self.files[:MAX_LOGGED_FILES]],
        }
        return numbers | {name: json.dumps(value) for name, value in texts.items()}


@dataclass(frozen=True, slots=True)
class Problems:
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    fingerprint: str
    """SHA-256 (hexadecimal) over sides, sources, questions, answers, tests and messages, in order."""
    report: LoadReport = field(default_factory=LoadReport)
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Side -> where its problems stood before over-long prompts were left out; empty where none was."""

    @property
    def num_duplicates(self) -> int:
        """Problems left out because their question was there before."""
        return self.report.num_duplicates

    def position(self, side: Literal["train", "heldout"], index: int) -> int:
        """Where a grader finds problem `index`: graders load the data without a model, so with over-long prompts."""
        return self.positions[side][index] if side in self.positions else index


def load_problems(data: Data, is_overlong: Callable[[Problem], bool] | None = None) -> Problems:
    """The training and held-out problems that `data` describes: a function of the configuration and the files alone (and of `is_overlong`).

    Raises ConfigError, in one line, for a missing file, a malformed row ("FILE:LINE: reason"), an unknown task or refused options, an empty data set,
    or a split that leaves one side empty.
    """
    reading = _Reading(data)
    problems = reading.read("data.path", data.path) if data.path else _generate(data)
    distinct, num_conflicting = _distinct(problems)
    if not distinct:
        raise ConfigError(f"data.path={data.path}: no problem in it{reading.faults()}" if data.path else f"data.size={data.size}: no problem generated")
    num_read = len(problems)
    if data.heldout_path:
        held = reading.read("data.heldout_path", data.heldout_path)
        heldout, num_more = _distinct(held)
        if not heldout:
            raise ConfigError(f"data.heldout_path={data.heldout_path}: no held-out problem in it{reading.faults()}")
        num_read, num_conflicting = num_read + len(held), num_conflicting + num_more
        train = {key: problem for key, problem in distinct.items() if key not in heldout}
        if not train:
            raise ConfigError(f"data.heldout_path={data.heldout_path} holds every question of the training data; no training question is left")
    else:
        train, heldout = _split(distinct, data.heldout_fraction)
    sides = {"train": tuple(train.values()), "heldout": tuple(heldout.values())}
    num_kept = len(train) + len(heldout)
    report = LoadReport(
        num_read=num_read + reading.invalid.total(),
        num_kept=num_kept,
        num_duplicates=num_read - num_kept,
        num_conflicting=num_conflicting,
        invalid=dict(reading.invalid),
        examples=reading.examples,
        notes=dict(reading.notes),
        files=tuple(reading.files),
        ignored_files=tuple(reading.ignored_files),
    )
    found = Problems(sides["train"], sides["heldout"], _fingerprint(sides), report)
    return found if is_overlong is None else without_overlong(found, is_overlong, data.max_prompt_tokens)


def without_overlong(problems: Problems, is_overlong: Callable[[Problem], bool], limit: int) -> Problems:
    """The problems whose prompts fit, counted in the report. `limit`: data.max_prompt_tokens, for the message. Raises ConfigError when a side becomes empty."""
    sides = {"train": problems.train, "heldout": problems.heldout}
    kept = {side: [position for position, problem in enumerate(each) if not is_overlong(problem)] for side, each in sides.items()}
    num_overlong = sum(len(each) - len(kept[side]) for side, each in sides.items())
    if not num_overlong:
        return problems
    for side, each in sides.items():
        if each and not kept[side]:
            what = {"train": "training", "heldout": "held-out"}[side]
            raise ConfigError(f"data.max_prompt_tokens={limit}: the prompts of all {len(each)} {what} problems are longer; raise it")
    left = {side: tuple(each[position] for position in kept[side]) for side, each in sides.items()}
    report = replace(problems.report, num_kept=problems.report.num_kept - num_overlong, num_overlong=problems.report.num_overlong + num_overlong)
    positions: dict[str, Sequence[int]] = {side: tuple(problems.position(side, position) for position in kept[side]) for side in ("train", "heldout")}
    return Problems(left["train"], left["heldout"], _fingerprint(left), report, positions)


def score(problem: Problem, answer: str | None) -> float:
    """Score of an extracted answer, 1.0 = right (only that counts as right; some tasks pay partial credit below it).

    reasoning-gym problems: the task's own scorer. File problems: equal text after normalisation, or equal value where both are plain numbers, as any reference answer.
    Raises ValueError for programs: their tests say.
    """
    if problem.kind == "code":
        raise ValueError("a program is graded by its tests, not by comparison with an answer")
    if answer is None:
        return 0.0
    if problem.source == FILE_SOURCE:
        return float(any(_same_answer(gold, answer) for gold in problem.accepted))
    entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
    return float(reasoning_tasks.scorer(problem.source)(answer, entry))


# ---- reading


def _generate(data: Data) -> list[Problem]:
    if not data.tasks:
        raise ConfigError("data.tasks is empty and no data.path is given")
    turns = reasoning_tasks.turns(len(data.tasks), data.task_weights, data.size)
    sizes = Counter(turns)
    generators = [reasoning_tasks.create_task(task, data, sizes[which]) for which, task in enumerate(data.tasks)]
    problems = []
    rows = [itertools.count() for _ in data.tasks]
    for index, which in enumerate(turns):
        row, task = next(rows[which]), data.tasks[which]
        try:
            item = generators[which][row]
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(f"data.tasks: {task} cannot generate item {row} of data.seed={data.seed}: {error!r}; use another seed") from error
        metadata = item["metadata"] if task in reasoning_tasks.SCORED_BY_METADATA else None
        problems.append(Problem(index, item["question"], item["answer"], task, item["metadata"].get("answer_cot", ""), metadata, "rg", origin=task))
    return problems


class _Reading:
    """Rows of files as problems, and the account of them."""

    def __init__(self, data: Data) -> None:
        self._skip_invalid = data.skip_invalid
        self._checked: dict[str, str | None] = {}
        self.invalid: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.notes: Counter[str] = Counter()
        self.files: list[FileReport] = []
        self.ignored_files: list[str] = []

    def read(self, option: str, path: str) -> list[Problem]:
        """Raises ConfigError: nothing there, or (unless rows are skipped) the first row that cannot be used."""
        tables, ignored = files.find(option, path)
        self.ignored_files += [str(file) for file in ignored]
        problems: list[Problem] = []
        for table in tables:
            self._read_table(table, problems)
        return problems

    def _read_table(self, table: files.Table, problems: list[Problem]) -> None:
        rows = table.rows(formats.COLUMNS)
        first = list(itertools.islice(rows, NUM_SNIFFED_ROWS))
        format_ = formats.detect(row for _, row in first)
        num_rows = 0
        for number, row in itertools.chain(first, rows):
            num_rows += 1
            try:
                problems.append(self._problem(len(problems), format_, row))
            except RowError as error:
                where = f"{table.locate(number)}: {error}"
                if not self._skip_invalid:
                    raise ConfigError(where) from error
                self.invalid[error.kind] += 1
                self.examples.setdefault(error.kind, where)
        self.files.append(FileReport(str(table.path), format_.name, num_rows))

    def _problem(self, index: int, format_: formats.Format, row: Any) -> Problem:
        if isinstance(row, RowError):
            raise row
        found = formats.adapt(format_, row)
        answer = found.golds[0] if found.golds else ""
        golds = found.golds if len(found.golds) < 2 else self._readable(found.golds)
        for gold in golds:
            reason = self._reason(gold)
            if reason:
                raise RowError("unreadable answer", f"the answer {gold!r:.80} cannot be read: {reason}")
        answer = golds[0] if golds else ""
        self.notes.update(found.notes)
        origin = found.origin or format_.name
        return Problem(index, found.question, answer, FILE_SOURCE, found.solution, None, found.kind, golds, found.tests, found.messages, origin)

    def _readable(self, golds: tuple[str, ...]) -> tuple[str, ...]:
        """Of several reference answers those that can be read; all of them if none can, for the message."""
        left = tuple(gold for gold in golds if not self._reason(gold)) or golds
        if len(left) < len(golds):
            self.notes["answer left out, as another of its row can be used"] += len(golds) - len(left)
        return left

    def _reason(self, gold: str) -> str | None:
        if gold not in self._checked:
            self._checked[gold] = check_gold(gold)
        return self._checked[gold]

    def faults(self) -> str:
        """For the message that nothing is left."""
        return "".join(f"; {count} x {kind} ({self.examples[kind]})" for kind, count in self.invalid.items())


# ---- splitting


def normalised_question(text: str) -> str:
    return " ".join(text.split()).casefold()


def _distinct(problems: Iterable[Problem]) -> tuple[dict[bytes, Problem], int]:
    """(hash of the normalised question -> its first problem, in order; repetitions with another answer)."""
    found: dict[bytes, Problem] = {}
    num_conflicting = 0
    for problem in problems:
        first = found.setdefault(hashlib.sha256(normalised_question(problem.question).encode()).digest(), problem)
        num_conflicting += (first.answer, first.golds, first.tests) != (problem.answer, problem.golds, problem.tests)
    return found, num_conflicting


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
            if problem.tests or problem.messages or len(problem.golds) > 1:  # problems without keep the fingerprint that they had before these existed
                digest.update(json.dumps((problem.golds, problem.messages, len(problem.tests))).encode())
                digest.update(problem.tests.encode())
    return digest.hexdigest()


# ---- comparing answers to file problems

_MAX_NUMBER_CHARS = 400


def _same_answer(gold: str, answer: str) -> bool:
    gold, answer = normalised_answer(gold), normalised_answer(answer)
    if gold == answer:
        return True
    plain = all(len(text) <= _MAX_NUMBER_CHARS and formats.is_plain_number(text) for text in (gold, answer))
    return plain and Fraction(gold) == Fraction(answer)
