r"""Formats of the data sets that people bring: each turns a row into the same few fields, or says in a RowError why it cannot.

    format         recognised by                                        reference answers (golds)
    humaneval      prompt, entry_point, test                            tests (asserts)
    livecodebench  question_content, public_test_cases                  public and private tests
    verl           prompt, reward_model (also DAPO, ToRL)               reward_model.ground_truth: text, number, list of either, or tests
    areal          prompt, solutions or input_output                    each of `solutions`: its last box; or tests
    deepcoder      problem, tests                                       tests, in the shapes of TACO, PrimeIntellect and LiveCodeBench
    trl            prompt or messages as a conversation, solution       its last box, or the text behind "####", or the whole of it; also `answer`
    math           problem, solution                                    last box of the solution
    deepscaler     problem, answer (also MATH-500, open-r1)             the answer, or each of a list
    gsm8k          question, answer with "#### "                        what stands behind the last "#### "
    native         question, and kind, tests or golds                   as their names say: kind is math or code, golds a list
    plain          question, problem or prompt; answer or solution      the answer, or what stands behind its "#### "

The names of files play no part: the first rows vote (`detect`). A row is adapted without regard to the others. Keys that no format knows are ignored, and so are
nulls (files with a fixed schema fill absent keys with them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from areal_hpc.data import code_tests
from areal_hpc.data.files import RowError, as_row_error

Fields = Mapping[str, Any]
Messages = tuple[tuple[str, str], ...]

QUESTION_KEYS = ("question", "problem", "prompt")
ANSWER_KEYS = ("answer", "solution")
GOLD_MARKER = "#### "
MAX_UNMARKED_CHARS = 512
"""A longer text without a box or marker is a worked solution, not an answer."""
ROLES = ("system", "user", "assistant")
CODE_ABILITIES = frozenset({"code", "coding", "codegen", "programming"})
COLUMNS = (
    frozenset({*QUESTION_KEYS, *ANSWER_KEYS, "messages", "ground_truth", "kind", "golds", "source"})
    | {"reward_model", "data_source", "ability", "extra_info"}
    | {"solutions", "task", "input_output", "language", "timeout", "memory"}
    | {"question_content", "public_test_cases", "private_test_cases", "platform", "starter_code", "metadata", "tests"}
    | {"entry_point", "test", "canonical_solution"}
)
"""Every key that some format reads or is recognised by."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A row in the terms of this package."""

    question: str
    golds: tuple[str, ...] = ()
    """Reference answers, of which any is right; none for programs."""
    kind: Literal["math", "code"] = "math"
    tests: str = ""
    """Packed tests of a program (`code_tests`)."""
    messages: Messages = ()
    """(role, content) of a prompt that is more than one user message; otherwise empty."""
    origin: str = ""
    """Data set that the row names; empty where it names none."""
    solution: str = ""
    """Worked solution whose last line is "#### ANSWER"; of a program, an answer that holds it."""
    notes: tuple[str, ...] = ()
    """What was changed on the way, to be counted."""


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    matches: Callable[[Fields], bool]
    adapt: Callable[[Fields], Adapted]


def detect(rows: Iterable[Any]) -> Format:
    """The format that most of these rows are recognised as; plain if none is."""
    votes: dict[str, int] = {}
    for row in rows:
        if isinstance(row, dict):
            known = _without_nulls(row)
            found = next((format_.name for format_ in FORMATS.values() if format_.matches(known)), None)
            if found:
                votes[found] = votes.get(found, 0) + 1
    return max((FORMATS[name] for name in FORMATS if name in votes), key=lambda format_: votes[format_.name], default=FORMATS["plain"])


def adapt(format_: Format, row: Any) -> Adapted:
    """Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("no object", f"expected an object with question and answer, found {type(row).__name__}")
    try:
        adapted = format_.adapt(row)
        "".join((adapted.question, adapted.solution, *adapted.golds, *(text for message in adapted.messages for text in message))).encode()
    except UnicodeEncodeError as error:  # a lone surrogate ("\ud800" in JSON)
        raise RowError("not UTF-8", str(error)) from error
    except RecursionError as error:
        raise RowError("not JSON", f"nested too deeply ({error})") from error
    source = row.get("source")
    return adapted if adapted.origin or not source or not isinstance(source, str) else replace(adapted, origin=source)


# ---- parts of rows


def _without_nulls(row: Fields) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def _first_value(row: Fields, keys: tuple[str, ...], kind: str) -> Any:
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    if any(key in row for key in keys):
        return None
    raise RowError(kind, f"no '{keys[0]}' (nor {', '.join(keys[1:])}) among the keys {', '.join(map(repr, row)) or '(none)'}")


def _question(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("no question", f"the question must be text, found {type(value).__name__}")
    if not value.strip():
        raise RowError("no question", "the question is empty")
    return value


def _answer_text(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        try:
            return str(value)
        except ValueError as error:  # more digits than Python prints
            raise RowError("no answer", f"the answer: {error}") from error
    if not isinstance(value, str):
        raise RowError("no answer", f"the answer must be text or a number, found {value if value is None else type(value).__name__}")
    return value


def _object(row: Fields, key: str) -> dict[str, Any]:
    """A nested object, which may be JSON text; empty where it is missing."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError(f"bad {key}", f"{key} is {as_row_error(error)}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"bad {key}", f"{key} must be an object, found {type(value).__name__}")
    return _without_nulls(value)


def _name(row: Fields, key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def _messages(value: Any) -> Messages:
    """Of a conversation that ends with the user's turn."""
    if not isinstance(value, list) or not value:
        raise RowError("bad prompt", f"the prompt must be a list of messages, found {'none' if value == [] else type(value).__name__}")
    found = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise RowError("bad prompt", f"each message needs a role ({', '.join(ROLES)}), found {role!r:.60}")
        found.append((message["role"], _content(message.get("content"))))
    if found[-1][0] != "user":
        raise RowError("bad prompt", f"the last message is the {found[-1][0]}'s, and must be the user's")
    return tuple(found)


def _content(value: Any) -> str:
    """Text, or a list of parts of which all are text."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise RowError("bad prompt", f"the content of a message must be text, found {type(value).__name__}")
    return value


def _conversation(value: Any) -> tuple[str, Messages]:
    """(question, messages) of a prompt. The question is the user's text, or the whole conversation without the system message; it tells prompts apart."""
    if isinstance(value, str):
        return _question(value), ()
    messages = _messages(value)
    turns = [(role, content) for role, content in messages if role != "system"]
    if len(turns) == 1:
        return _question(turns[0][1]), messages if len(messages) > 1 else ()
    return _question("\n\n".join(f"{role}: {content}" for role, content in turns)), messages


# ---- reference answers

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})*|[^\s{}$\\,;]+")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_MARKED = re.compile(r"####[ \t]*")


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed or \fbox that stands in no other; None without one. Raises RowError for one that is empty or does not end."""
    found = None
    position = 0
    while match := _BOX.search(text, position):
        if text[match.end() : match.end() + 1] == "{":
            stop = _closing_brace(text, match.end())
            found = None if stop is None else text[match.end() + 1 : stop].strip()
            position = match.end() if stop is None else stop + 1
        else:  # \boxed 4
            argument = _UNBRACED.match(text, match.end())
            found = argument[0].rstrip(".") if argument else None
            position = match.end()
        if not found:
            rest = _BOX.search(text, position)
            if rest is None:
                raise RowError("bad box", "the last box is empty or its braces do not balance")
    return found


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


_GROUPED = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]+)?")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")


def normalised_answer(text: str) -> str:
    """White space collapsed, dollar signs gone, and commas gone where they group thousands ("1,234" but not "1,2")."""
    text = " ".join(text.replace("$", "").split())
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def is_plain_number(text: str) -> bool:
    """Digits with a sign or point, nothing else."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


def _behind_marker(answer: str) -> str | None:
    """What stands behind the last "####", on its line; None without a marker."""
    if "####" not in answer:
        return None
    marker = list(_MARKED.finditer(answer))[-1]
    return normalised_answer(_ANNOTATION.sub("", answer[marker.end() :].partition("\n")[0]))


def _golds(value: Any) -> tuple[str, ...]:
    """Reference answers out of text, a number, a list of these, or such a list or text as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ('"', "["):
        value = _unpacked(value)
    if isinstance(value, list):
        if not value:
            raise RowError("no answer", "the list of answers is empty")
        return tuple(dict.fromkeys(_reference(_answer_text(item)) for item in value))
    return (_reference(_answer_text(value)),)


def _unpacked(text: str) -> Any:
    """JSON of a text or of a list of texts; anything else, such as the interval [1, 2], is meant as it stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) or (value and isinstance(value, list) and all(isinstance(item, str) for item in value)) else text


def _reference(text: str) -> str:
    """The answer in a text that may be a worked solution."""
    marked = _behind_marker(text)
    if marked is None:
        marked = last_box(_DRAWING.sub("", text))
    if marked is None:
        marked = text.strip()
        if len(marked) > MAX_UNMARKED_CHARS:
            raise RowError("no answer", f"{len(marked)} characters without a box or '####' are no answer but a solution")
        if len(marked) > 2 and marked[0] == marked[-1] == "$" and "$" not in marked[1:-1]:
            marked = marked[1:-1].strip()
    if not marked:
        raise RowError("no answer", "the answer is empty")
    return marked


# ---- questions with answers


def _adapt_plain(row: Fields) -> Adapted:
    question = _question(_first_value(row, QUESTION_KEYS, "no question"))
    answer = _answer_text(_first_value(row, ANSWER_KEYS, "no answer"))
    marked = GOLD_MARKER in answer
    if marked:
        gold = _behind_marker(answer)
    elif row.get("answer") is None:
        gold = last_box(_DRAWING.sub("", answer)) or answer.strip()
    else:
        gold = answer.strip()
    if not gold:
        raise RowError("no answer", "the answer is empty")
    return Adapted(question, (gold,), solution=answer if marked else "")


def _adapt_gsm8k(row: Fields) -> Adapted:
    question = _question(_first_value(row, QUESTION_KEYS, "no question"))
    answer = _answer_text(_first_value(row, ANSWER_KEYS, "no answer"))
    gold = _behind_marker(answer)
    if gold is None:
        gold = normalised_answer(answer)
        if not is_plain_number(gold):
            raise RowError("no answer", "no '#### ' before the answer, as in the first rows of the file, and it is not a number alone")
    if not gold:
        raise RowError("no answer", "the answer is empty")
    return Adapted(question, (gold,), solution=answer if GOLD_MARKER in answer else "")


def _adapt_native(row: Fields) -> Adapted:
    kind = row.get("kind") or ("code" if row.get("tests") is not None else "math")
    if kind == "code":
        solution = "" if row.get("solution") is None else row["solution"]
        if not isinstance(solution, str):
            raise RowError("bad solution", f"the solution of a program must be text, found {type(solution).__name__}")
        return Adapted(_question(row.get("question")), kind="code", tests=code_tests.pack(row.get("tests")), solution=solution)
    if kind != "math":
        raise RowError("unknown kind", f"kind={kind!r:.60} is neither math nor code")
    return Adapted(_question(row.get("question")), _golds(row["golds"])) if row.get("golds") is not None else _adapt_plain(row)


def _adapt_math(row: Fields) -> Adapted:
    if row.get("answer") is not None:
        return _adapt_deepscaler(row)
    question = _question(_first_value(row, QUESTION_KEYS, "no question"))
    box = last_box(_DRAWING.sub("", _answer_text(_first_value(row, ("solution", "answer"), "no answer"))))
    if box is None:
        raise RowError("no answer", "no box in the solution")
    return Adapted(question, (box,))


def _adapt_deepscaler(row: Fields) -> Adapted:
    if not isinstance(row.get("answer"), list):
        return _adapt_plain(row)
    return Adapted(_question(_first_value(row, QUESTION_KEYS, "no question")), _golds(row["answer"]))


def _adapt_trl(row: Fields) -> Adapted:
    question, messages = _conversation(_first_value(row, ("prompt", "messages", "question", "problem"), "no question"))
    return Adapted(question, _golds(_first_value(row, ("solution", "answer", "ground_truth"), "no answer")), messages=messages)


def _adapt_verl(row: Fields) -> Adapted:
    question, messages = _conversation(_first_value(row, ("prompt", "messages"), "no question"))
    reward, origin = _object(row, "reward_model"), _name(row, "data_source")
    if reward.get("style") == "model":
        raise RowError("needs a judge", "reward_model.style='model' asks a model for the grade; only rules and tests are graded here")
    truth = reward.get("ground_truth")
    if truth is None:
        raise RowError("no answer", "reward_model.ground_truth is missing or null")
    if _is_code(row, truth):
        return Adapted(question, kind="code", tests=code_tests.pack(truth, _name(_object(row, "extra_info"), "fn_name")), messages=messages, origin=origin)
    if isinstance(truth, dict):
        raise RowError("no answer", f"reward_model.ground_truth is an object without tests; its keys are {', '.join(map(repr, truth)) or '(none)'}")
    return Adapted(question, _golds(truth), messages=messages, origin=origin)


def _is_code(row: Fields, truth: Any) -> bool:
    """Whether `ground_truth` holds tests: by what is in it, else by what the row says of itself."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = None
    if isinstance(truth, dict) and ({"inputs", "outputs"} <= truth.keys() or {"entry_point", "test"} <= truth.keys()):
        return True
    tests = isinstance(truth, list) and bool(truth) and all(isinstance(item, dict) for item in truth)
    return tests or _name(row, "ability").lower() in CODE_ABILITIES


# ---- AReaL: prompts may hold the tokens of somebody's chat template

_TOKEN = r"<[|｜][^|｜<>\n]{1,40}[|｜]>"
_USER = re.compile(r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\s*|<[|｜][Uu]ser[|｜]>\s*")
_END = re.compile(r"<[|｜](?:[Aa]ssistant|im_end|im_start|eot_id|end|end[_▁]of[_▁]sentence)[|｜]>")
_FILLING = re.compile(rf"(?:\s|{_TOKEN}|<s>|</s>|\bassistant\b|\bsystem\b|<think>)*")


def strip_chat_tokens(prompt: str) -> tuple[str, str]:
    """(user's text, system message) of a prompt that somebody has put into a chat template; the prompt itself where there is none.

    Raises RowError for several turns, or the beginning of an answer: these would be lost.
    """
    turns = list(_USER.finditer(prompt))
    if not turns:
        return prompt, ""
    if len(turns) > 1:
        raise RowError("bad prompt", "several user turns in one text with chat tokens; give a list of messages")
    ending = _END.search(prompt, turns[0].end())
    stop = ending.start() if ending else len(prompt)
    if not _FILLING.fullmatch(prompt, stop):
        raise RowError("bad prompt", "the prompt's chat tokens go on with the beginning of an answer")
    system = re.sub(rf"{_TOKEN}(?:system\n)?|<s>", "", prompt[: turns[0].start()]).strip()
    return prompt[turns[0].end() : stop].strip(), system


def _adapt_areal(row: Fields) -> Adapted:
    text = _question(_first_value(row, ("prompt", "question"), "no question"))
    stripped, system = strip_chat_tokens(text)
    question = _question(stripped)
    messages = (("system", system), ("user", question)) if system else ()
    notes = ("chat tokens taken off the prompt",) if stripped != text else ()
    task = row.get("task") or "math"
    if task == "code":
        language = row.get("language") or "PYTHON"
        if not isinstance(language, str) or not language.lower().startswith("py"):
            raise RowError("not Python", f"language={language!r:.60}: only Python programs are run")
        tests = code_tests.parse(row.get("input_output"))
        if not isinstance(tests, dict):
            raise RowError("no tests", f"input_output must be an object with inputs and outputs, found {type(tests).__name__}")
        limits = {key: row[key] for key in ("timeout", "memory") if row.get(key)}
        return Adapted(question, kind="code", tests=code_tests.pack(limits | tests), messages=messages, notes=notes)
    if task != "math":
        raise RowError("unknown task", f"task={task!r:.60} is neither math nor code")
    solutions = row.get("solutions")
    if not isinstance(solutions, list) or not solutions:
        raise RowError("no answer", f"solutions must be a list of texts, found {'none' if solutions == [] else type(solutions).__name__}")
    golds, unusable = _usable(solutions)
    return Adapted(question, golds, messages=messages, notes=notes + ("answer left out, as another of its row can be used",) * unusable)


def _usable(solutions: list[Any]) -> tuple[tuple[str, ...], int]:
    """(reference answers, number of solutions without one). Raises RowError when no solution has one."""
    golds, first = [], None
    for solution in solutions:
        try:
            golds.append(_reference(_answer_text(solution)))
        except RowError as error:
            first = first or error
    if first and not golds:
        raise first
    return tuple(dict.fromkeys(golds)), len(solutions) - len(golds)


# ---- programs


def _with_starter(question: str, row: Fields) -> str:
    starter = row.get("starter_code")
    if starter is None or starter == "":
        return question
    if not isinstance(starter, str):
        raise RowError("bad starter_code", f"starter_code must be text, found {type(starter).__name__}")
    return f"{question}\n\nStart from this code:\n```python\n{starter.rstrip()}\n```" if starter.strip() else question


def _adapt_humaneval(row: Fields) -> Adapted:
    prompt = _question(row.get("prompt"))
    missing = [key for key in ("entry_point", "test") if row.get(key) is None]
    if missing:
        raise RowError("no tests", f"no {' and no '.join(missing)}")
    return Adapted(prompt, kind="code", tests=code_tests.pack_asserts(dict(row)))


def _adapt_livecodebench(row: Fields) -> Adapted:
    question = _with_starter(_question(row.get("question_content")), row)
    tests = []
    for key in ("public_test_cases", "private_test_cases"):
        value = code_tests.parse(row.get(key) or None)
        if value is not None and not isinstance(value, list):
            raise RowError("bad tests", f"{key} must be a list of tests, found {type(value).__name__}")
        tests += value or []
    if not tests:
        raise RowError("no tests")
    return Adapted(question, kind="code", tests=code_tests.pack(tests, _name(_object(row, "metadata"), "func_name")), origin=_name(row, "platform"))


def _adapt_deepcoder(row: Fields) -> Adapted:
    question = _with_starter(_question(_first_value(row, QUESTION_KEYS, "no question")), row)
    tests = row.get("tests")
    if tests is None:
        raise RowError("no tests")
    return Adapted(question, kind="code", tests=code_tests.pack(tests, _name(_object(row, "metadata"), "func_name")))


# ---- recognising them


def _has(*keys: str) -> Callable[[Fields], bool]:
    return lambda row: all(key in row for key in keys)


def _is_trl(row: Fields) -> bool:
    prompt, solution = row.get("prompt", row.get("messages")), row.get("solution")
    if isinstance(prompt, list):
        return any(key in row for key in ("solution", "answer", "ground_truth"))
    return isinstance(row.get("prompt"), str) and isinstance(solution, str) and "\\boxed" in solution and "answer" not in row


FORMATS = {
    format_.name: format_
    for format_ in (
        Format("humaneval", _has("prompt", "entry_point", "test"), _adapt_humaneval),
        Format("livecodebench", _has("question_content", "public_test_cases"), _adapt_livecodebench),
        Format("verl", lambda row: "reward_model" in row and ("prompt" in row or "messages" in row), _adapt_verl),
        Format("areal", lambda row: isinstance(row.get("prompt"), str) and ("solutions" in row or "input_output" in row), _adapt_areal),
        Format("deepcoder", _has("problem", "tests"), _adapt_deepcoder),
        Format("trl", _is_trl, _adapt_trl),
        Format("math", lambda row: "problem" in row and "solution" in row and "answer" not in row, _adapt_math),
        Format("deepscaler", _has("problem", "answer"), _adapt_deepscaler),
        Format("native", lambda row: "question" in row and any(key in row for key in ("tests", "golds", "kind")), _adapt_native),
        Format("gsm8k", lambda row: "question" in row and isinstance(row.get("answer"), str) and "####" in row["answer"], _adapt_gsm8k),
        Format("plain", lambda row: any(key in row for key in QUESTION_KEYS) and any(key in row for key in ANSWER_KEYS), _adapt_plain),
    )
}
"""By name, the most specific first."""
