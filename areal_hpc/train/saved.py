"""Answers saved for reading, on training rank 0: texts that generation ranks sent meet what the log knows of them, and become files (observe/samples.py).

Texts of a training group and its end (trained, dropped, ...) come in either order. Nothing here can end a run: a disk that refuses a file is reported once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.config import Config
from areal_hpc.data.datasets import Problems
from areal_hpc.observe import samples
from areal_hpc.observe.schema import OUTCOMES
from areal_hpc.transport.samples import AnswerText, Piece, is_saved


@dataclass(slots=True)
class SavedAnswers:
    """Lifecycle: (`receive` | `evaluated` | `closed`)* -> `finish`."""

    config: Config
    problems: Problems
    folder: Path
    """attempt-K/samples."""
    num_saved: int = 0
    num_lost: int = 0
    """Answers that no disk took."""
    error: str = ""
    _evaluations: dict[int, list[AnswerText]] = field(default_factory=dict)
    _groups: dict[int, list[AnswerText]] = field(default_factory=dict)
    """ticket -> texts of a group that is not closed yet."""
    _closed: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """ticket -> its rows of /trajectories, while its texts are on their way."""

    def receive(self, piece: Piece) -> None:
        """Texts came. Those of an evaluation all come before its last share."""
        (self._evaluations if piece.kind == "evaluation" else self._groups).setdefault(piece.number, []).extend(piece.answers)
        if piece.kind == "training":
            self._join([piece.number])

    def evaluated(self, version: int) -> None:
        """All shares of an evaluation are here."""
        found = sorted(self._evaluations.pop(version, []), key=lambda answer: (answer.problem, answer.sample))
        rows = [samples.record(answer, self.problems.heldout[answer.problem], kind="evaluation", version=version) for answer in found]
        self._write(samples.file_name("evaluation", version), rows)

    def closed(self, rows: np.ndarray) -> None:
        """Rows of /trajectories of groups that ended, all rows of a group in one call."""
        names = rows.dtype.names or ()
        ended = {
            ticket: [dict(zip(names, row, strict=True)) for row in rows[rows["ticket"] == ticket].tolist()]
            for ticket in dict.fromkeys(rows["ticket"].tolist())
            if is_saved(ticket, self.config)
        }
        self._closed |= ended
        self._join(list(ended))

    def _join(self, tickets: list[int]) -> None:
        """Write the groups among these of which texts and end are known."""
        complete = [t for t in tickets if t in self._closed and len(self._groups.get(t, [])) == self.config.train.group_size]
        of_step: dict[int, list[dict[str, Any]]] = {}
        for ticket in complete:
            texts = {answer.sample: answer for answer in self._groups.pop(ticket)}
            for row in self._closed.pop(ticket):
                answer = texts[row["sample"]]
                about = {"kind": "training", "step": row["batch"], "ticket": ticket, "outcome": OUTCOMES[row["outcome"]], "age": row["age"]}
                numbers = {name: None if math.isnan(row[name]) else row[name] for name in ("reward", "advantage")}
                of_step.setdefault(row["batch"], []).append(samples.record(answer, self.problems.train[answer.problem], **about, **numbers))
        for step, found in of_step.items():
            self._write(samples.file_name("training", step), found)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        try:
            samples.add_records(self.folder / name, rows)
            self.num_saved += len(rows)
        except OSError as error:
            self.num_lost += len(rows)
            if not self.error:
                self.error = str(error)
                print(
                    f"areal-hpc: WARNING: answers for reading cannot be saved ({error}); the run goes on without, and counts them", file=sys.stderr, flush=True
                )

    def finish(self) -> str:
        """What became of them, in one line for the log."""
        unfinished = sum(map(len, self._groups.values()))
        lost = f", {self.num_lost} lost ({self.error})" if self.num_lost else ""
        return f"{self.num_saved} answers saved for reading, {unfinished} of groups that were not closed{lost}"
