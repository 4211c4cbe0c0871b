"""Saved answers: files that are whole at any moment, and a page on which no text can be anything but text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from areal_hpc.config import ConfigError
from areal_hpc.data.datasets import Problem
from areal_hpc.observe import samples
from areal_hpc.observe.report import write_report
from areal_hpc.observe.schema import TABLES, fitting
from areal_hpc.observe.telemetry import Log
from areal_hpc.transport.samples import AnswerText, joined_turns
from areal_hpc.transport.trajectory import Status

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></details><h1>out</h1>",
    "<!-- entries --><!-- title -->",
    "]]>&lt;b&amp;<style>*{display:none}</style>",
    "control \x00 \x1b[31m \x7f and \u202e reversed \u2028 end",
    "lone surrogate \ud800",
    "' onmouseover='x' {{7*7}} ${7*7}",
]


class Page(HTMLParser):
    """What a browser would see: tags, and the text of every <pre> by sample."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.samples: list[dict[str, str | None]] = []
        self.texts: list[list[str]] = []
        self.attributes: set[str] = set()
        self._in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "details":
            self.samples.append(dict(attrs))
            self.texts.append([])
        if tag == "pre":
            self._in_pre = True
            self.texts[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_pre = self._in_pre and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_pre:
            self.texts[-1][-1] += data


def parse(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def row(text: str, status: Status = Status.WRONG, **about: object) -> dict:
    problem = Problem(3, f"Q {text}", text, text)
    answer = AnswerText.of(0, 1, text, text, status, 0.0, 9, (2, 4))
    return samples.record(answer, problem, **({"kind": "evaluation", "version": 2} | about))


def test_hostile_texts_stay_text(tmp_path: Path) -> None:
    plain = [row("harmless", Status.RIGHT)]
    hostile = [row(text) for text in HOSTILE]
    samples.add_records(tmp_path / "a" / "samples" / "evaluation-000002.jsonl", plain)
    samples.add_records(tmp_path / "b" / "samples" / "evaluation-000002.jsonl", plain + hostile)
    assert samples.write_page(tmp_path / "a", tmp_path / "a.html", "<i>title</i>") == 1
    assert samples.write_page(tmp_path / "b", tmp_path / "b.html", HOSTILE[0]) == 1 + len(HOSTILE)
    harmless, page = parse(tmp_path / "a.html"), parse(tmp_path / "b.html")
    assert set(page.tags) == set(harmless.tags) and page.attributes == harmless.attributes, "no text has become a tag or an attribute"
    assert page.tags.count("script") == 1 and page.tags.count("details") == page.tags.count("summary") == 1 + len(HOSTILE)
    for text, (prompt, answer, extracted, gold) in zip(HOSTILE, page.texts[1:], strict=True):
        shown = text.translate(samples._CONTROL).replace("\ud800", "\\ud800")
        assert (prompt, answer, extracted, gold) == (f"Q {shown}", shown, shown, shown)
    source = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in source and not any(word in source for word in ("http:", "https:", "innerHTML", "eval("))
    assert samples.read_records(tmp_path / "b" / "samples" / "evaluation-000002.jsonl") == plain + hostile, "files keep every character"


def test_page_over_all_attempts_with_what_filters_need(tmp_path: Path) -> None:
    samples.add_records(
        tmp_path / "attempt-1" / "samples" / "evaluation-000000.jsonl", [row("x", Status.RIGHT, version=0), row("y", Status.NO_ANSWER, version=0)]
    )
    training = {"kind": "training", "step": 7, "ticket": 61, "reward": -5.0, "advantage": 0.25, "outcome": "trained", "age": 1}
    samples.add_records(tmp_path / "attempt-2" / "samples" / "training-000007.jsonl", [row("z", **training)])
    samples.add_records(tmp_path / "attempt-2" / "samples" / "training-000007.jsonl", [row("z2", **training)])
    (tmp_path / "attempt-2" / "samples" / "training-000008.jsonl.9.tmp").write_text("{")  # of a writer that was killed
    assert samples.write_page(tmp_path, tmp_path / "page.html", "run") == 4
    page = parse(tmp_path / "page.html")
    keys = ("data-where", "data-status", "data-grade", "data-source")
    assert [tuple(sample[key] for key in keys) for sample in page.samples] == [
        ("evaluation of version 0", "right", "right", "x"),
        ("evaluation of version 0", "no_answer", "wrong", "y"),
        ("training step 7, attempt-2", "wrong", "wrong", "z"),
        ("training step 7, attempt-2", "wrong", "wrong", "z2"),
    ]
    text = (tmp_path / "page.html").read_text()
    assert "ticket 61" in text and "reward -5" in text and "advantage 0.25" in text and "policy version 2 to 4" in text
    assert '<option value="right">right (1)</option>' in text and "4 answers in 2 files." in text


def test_texts_of_an_environment_stand_out(tmp_path: Path) -> None:
    text = joined_turns(("I ask.", "<b>5</b>", "So 5.", "7", "#### 7"))
    samples.add_records(tmp_path / "samples" / samples.file_name("evaluation", 0), [row(text)])
    samples.write_page(tmp_path, tmp_path / "page.html", "run")
    page = (tmp_path / "page.html").read_text()
    assert 'I ask.\n<span class="environment">&lt;b&gt;5&lt;/b&gt;</span>\nSo 5.\n<span class="environment">7</span>\n#### 7</pre>' in page


def test_page_that_would_grow_too_large_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (0, 5):
        samples.add_records(tmp_path / "samples" / samples.file_name("evaluation", version), [row("x" * 1000, version=version)] * 3)
    monkeypatch.setattr(samples, "MAX_PAGE_BYTES", 20_000)
    shown = samples.write_page(tmp_path, tmp_path / "page.html", "run")
    assert 0 < shown < 6 and f"{6 - shown} more answers are in" in (tmp_path / "page.html").read_text()
    assert parse(tmp_path / "page.html").samples[0]["data-where"] == "evaluation of version 5", "the newest first"


def test_report_writes_the_page(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    Log.create(tmp_path / "attempt-1" / "log.h5", {}).close()
    assert "samples.html" not in write_report(tmp_path).read_text() and not (tmp_path / "report" / "samples.html").exists()
    file = tmp_path / "attempt-1" / "samples" / "evaluation-000000.jsonl"
    samples.add_records(file, [row("x")])
    assert "[1 answers to read](samples.html)" in write_report(tmp_path).read_text() and len(parse(tmp_path / "report" / "samples.html").samples) == 1
    file.write_text(json.dumps(row("x")) + "\nnot JSON\n")
    with pytest.raises(ConfigError, match=r"evaluation-000000\.jsonl:2"):
        write_report(tmp_path)


def test_long_names_of_sources_stay_apart() -> None:
    width = TABLES["evaluation_sources"].dtype["source"].itemsize
    names = ["short", "\u00e9" * 40, "\u00e9" * 40 + "2", "x" * width, "x" * width + "1", "\ud800"]
    stored = [fitting("evaluation_sources", "source", name) for name in names]
    assert len(set(stored)) == len(names) and all(len(name.encode()) <= width for name in stored)
    assert stored[0] == "short" and stored[3] == names[3] and "..." in stored[1]
