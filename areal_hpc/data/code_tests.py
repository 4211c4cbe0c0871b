"""Tests of programs, out of whatever shape a data set has them in, checked and packed into one: JSON text with the keys below.

    {"kind": "stdin", "inputs": [text, ...], "outputs": [text, ...]}
        standard input and expected standard output of each run
    {"kind": "call", "fn_name": name, "inputs": [[argument, ...], ...], "outputs": [expected, ...]}
        calls of a function, or of a method of `Solution`; an expected value is its JSON text, or a list of one element where the data leaves open whether
        the list or its element is meant (TACO)
    {"kind": "asserts", "entry_point": name, "test": source of check(candidate), "prompt": source, "canonical_solution": source}
        HumanEval; the last two may be missing

and, where the data says so, "timeout" (CPU seconds of one test) and "memory" (MiB). The tests stay packed: there can be gigabytes of them, and most problems wait.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from areal_hpc.data.files import RowError, as_row_error

STDIN_TYPES = frozenset({"stdin", "stdin_stdout"})
CALL_TYPES = frozenset({"functional", "function_call", "call"})
UNPACK_HINT = (
    "packed with pickle (base64, zlib): unpickling can run code, so it is refused; "
    "convert it once, where you trust the file: pickle.loads(zlib.decompress(base64.b64decode(TEXT))) gives the JSON text to put there"
)
_BAD = "bad tests"
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{16,}={0,2}\s*")


def parse(value: Any) -> Any:
    """Tests that may be JSON text, as objects. Raises RowError for other texts; for packed ones with a hint how to convert them."""
    if isinstance(value, bytes):
        if value[:1] == b"\x80" or value[:1] == b"\x78":  # pickle from protocol 2 on; zlib
            raise RowError("pickled tests", f"tests are {UNPACK_HINT}")
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RowError(_BAD, f"tests are neither text nor JSON: {error}") from error
    if not isinstance(value, str):
        return value
    if value and value.lstrip()[:1] not in ("[", "{", '"') and _BASE64.fullmatch(value):
        raise RowError("pickled tests", f"tests are {UNPACK_HINT}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError("tests are not JSON", f"tests are {as_row_error(error)}") from error


def pack(value: Any, function: str = "") -> str:
    """The packed tests of a problem. `function`: its name where it stands beside the tests. Raises RowError."""
    value = parse(value)
    if isinstance(value, list):
        return _pack_columns(*_columns(value, function))
    if not isinstance(value, dict):
        raise RowError(_BAD, f"tests must be an object or a list, found {type(value).__name__}")
    if value.get("entry_point") is not None and value.get("test") is not None:
        return pack_asserts(value)
    if value.get("inputs") is None or value.get("outputs") is None:
        raise RowError(_BAD, f"tests have no inputs and outputs, but {', '.join(map(repr, value)) or 'nothing'}")
    name = value.get("fn_name") or function
    return _pack_columns(value["inputs"], value["outputs"], name, _limits(value))


def pack_asserts(value: dict[str, Any]) -> str:
    """HumanEval's: the sources must parse, and `test` define check."""
    texts = {key: value.get(key) for key in ("entry_point", "test", "prompt", "canonical_solution")}
    for key, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise RowError(_BAD, f"{key} must be text, found {type(text).__name__}")
    entry_point, test = str(texts["entry_point"]), str(texts["test"])
    if not entry_point.isidentifier():
        raise RowError(_BAD, f"entry_point={entry_point!r:.60} is no name of a function")
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError(_BAD, f"test is not Python: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
        raise RowError(_BAD, "test defines no function check")
    if texts["prompt"] and not re.search(rf"\b{re.escape(entry_point)}\b", texts["prompt"]):
        raise RowError(_BAD, f"the prompt has no {entry_point}, which the test calls")
    return json.dumps({"kind": "asserts", **{key: text for key, text in texts.items() if text is not None}, **_limits(value)})


def _limits(value: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key in ("timeout", "memory"):
        limit = value.get(key)
        if limit:
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
                raise RowError(_BAD, f"{key}={limit!r:.60} of the tests must be a number above zero")
            found[key] = limit
    return found


def _columns(rows: list[Any], function: str) -> tuple[list[Any], list[Any], str]:
    """(inputs, outputs, function) of tests that stand one by one."""
    kinds = set()
    for row in rows:
        if not isinstance(row, dict) or row.get("input") is None or row.get("output") is None:
            raise RowError(_BAD, "each test must be an object with input and output")
        function = function or str(row.get("fn_name") or row.get("func_name") or "")
        kinds.add(str(row.get("testtype") or row.get("type") or "stdin"))
    unknown = kinds - STDIN_TYPES - CALL_TYPES
    if unknown:
        raise RowError(_BAD, f"testtype {', '.join(sorted(unknown))!r:.60} is neither stdin nor functional")
    if kinds & STDIN_TYPES and kinds & CALL_TYPES:
        raise RowError(_BAD, "some tests feed standard input, others call a function")
    if kinds & CALL_TYPES and not function:
        raise RowError(_BAD, "functional tests without the name of the function")
    return [row["input"] for row in rows], [row["output"] for row in rows], function if kinds & CALL_TYPES else ""


def _pack_columns(inputs: Any, outputs: Any, function: Any, limits: dict[str, float] | None = None) -> str:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise RowError(_BAD, f"inputs and outputs must be lists, found {type(inputs).__name__} and {type(outputs).__name__}")
    if len(inputs) != len(outputs):
        raise RowError(_BAD, f"{len(inputs)} inputs for {len(outputs)} outputs")
    if not inputs:
        raise RowError("no tests")
    packed: dict[str, Any]
    if not function:
        packed = {"kind": "stdin", "inputs": [_lines(text) for text in inputs], "outputs": [_lines(text) for text in outputs]}
    else:
        if not isinstance(function, str) or not _NAME.fullmatch(function):
            raise RowError(_BAD, f"fn_name={function!r:.60} is no name of a function")
        packed = {"kind": "call", "fn_name": function, "inputs": [_arguments(given) for given in inputs], "outputs": [_expected(value) for value in outputs]}
    return json.dumps(packed | (limits or {}))


def _lines(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise RowError(_BAD, f"a test's input or output must be text, found {type(value).__name__}")
    return value


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise RowError(_BAD, f"a call's arguments must be a list or one JSON value per line, found {type(value).__name__}")
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RowError(_BAD, f"an argument of a call is {as_row_error(error)}") from error


def _expected(value: Any) -> Any:
    """JSON text of the value; a text that is no JSON stands for itself."""
    if isinstance(value, list) and len(value) == 1:
        return value
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value)
        return value
    return json.dumps(value)
