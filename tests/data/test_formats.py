"""Every format of data sets: a clean row gives the right fields, a dirty one a RowError that says why; nothing else ever comes out of an adapter."""

import base64
import json
import pickle
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.data import code_tests, formats
from areal_hpc.data.files import RowError

USER = [{"role": "user", "content": "What is 6*7?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
STDIN = {"inputs": ["3\n"], "outputs": ["9\n"]}
PACKED_STDIN = {"kind": "stdin", **STDIN}
LCB_STDIN = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
LCB_CALL = json.dumps([{"input": '[1, 2]\n"a"', "output": '"5"', "testtype": "functional"}])
HUMANEVAL = {"task_id": "T/0", "prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}
PICKLED = base64.b64encode(zlib.compress(pickle.dumps(LCB_STDIN))).decode()


def verl(truth, **more):
    return {"data_source": "math_dapo", "prompt": USER, "ability": "MATH", "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def areal(**more):
    return {"task": "math", "query_id": "q1", "prompt": "2+5?", "solutions": ["\\boxed{7}"], **more}


def areal_code(tests=STDIN, **more):
    return {"task": "code", "query_id": 1, "prompt": "Square n.", "input_output": json.dumps(tests), "language": "PYTHON", **more}


def lcb(public=LCB_STDIN, private="[]", **more):
    return {"question_title": "t", "question_content": "Add.", "public_test_cases": public, "private_test_cases": private, "metadata": "{}", **more}


def deepcoder(tests, **more):
    return {"problem": "Print a+b.", "tests": tests, "starter_code": "", **more}


def adapt(row):
    """By the format that the row alone is recognised as."""
    format_ = formats.detect([row])
    return format_.name, formats.adapt(format_, row)


CLEAN_MATH = {
    "gsm8k": ({"question": "q?", "answer": "3*7=<<3*7=21>>21 pens.\n#### 17"}, "gsm8k", ["17"]),
    "gsm8k, thousands and dollars": ({"question": "q?", "answer": "x\n#### $1,234"}, "gsm8k", ["1234"]),
    "gsm8k, negative": ({"question": "q?", "answer": "x\n#### -1,234.50"}, "gsm8k", ["-1234.50"]),
    "gsm8k, no space": ({"question": "q?", "answer": "x\n####17\n"}, "gsm8k", ["17"]),
    "gsm8k, two markers": ({"question": "q?", "answer": "#### 1\n#### 2"}, "gsm8k", ["2"]),
    "gsm8k, annotated gold": ({"question": "q?", "answer": "x\n#### <<20-3=17>>17"}, "gsm8k", ["17"]),
    "math": ({"problem": "q?", "level": "Level 3", "type": "Algebra", "solution": "So $x=\\boxed{4}$."}, "math", ["4"]),
    "math, several boxes": ({"problem": "q?", "level": 3, "solution": "\\boxed{1} then \\boxed{\\frac{1}{2}}."}, "math", ["\\frac{1}{2}"]),
    "math, fbox": ({"problem": "q?", "solution": "\\fbox{9}"}, "math", ["9"]),
    "math, no braces": ({"problem": "q?", "solution": "$\\boxed 4.$"}, "math", ["4"]),
    "math, box in a box": ({"problem": "q?", "solution": "\\boxed{\\fbox{3}+1}"}, "math", ["\\fbox{3}+1"]),
    "math, escaped braces": ({"problem": "q?", "solution": "\\boxed{\\{1,2\\}}"}, "math", ["\\{1,2\\}"]),
    "math, drawing": ({"problem": "q?", "solution": '\\boxed{5} [asy] label("\\boxed{6}"); [/asy]'}, "math", ["5"]),
    "math-500": ({"problem": "q?", "solution": "\\boxed{4}", "answer": "\\frac12", "subject": "Algebra", "level": 2}, "deepscaler", ["\\frac12"]),
    "deepscaler": ({"problem": "q?", "answer": "120", "solution": ".."}, "deepscaler", ["120"]),
    "deepscaler, number": ({"problem": "q?", "answer": 120, "solution": ".."}, "deepscaler", ["120"]),
    "deepscaler, float": ({"problem": "q?", "answer": 0.5, "solution": ".."}, "deepscaler", ["0.5"]),
    "deepscaler, list": ({"problem": "q?", "answer": ["1/2", "0.5", "1/2"], "solution": ".."}, "deepscaler", ["1/2", "0.5"]),
    "verl": (verl("42", extra_info={"index": "7f0c"}), "verl", ["42"]),
    "verl, int": (verl(42, extra_info={"index": 3, "answer": None}), "verl", ["42"]),
    "verl, list": (verl(["42", 42, "42.0"]), "verl", ["42", "42.0"]),
    "verl, list as JSON": (verl('["42", "84/2"]'), "verl", ["42", "84/2"]),
    "verl, text as JSON": (verl('"42"'), "verl", ["42"]),
    "verl, an interval is no list": (verl("[1, 2]"), "verl", ["[1, 2]"]),
    "verl, a set is no object": (verl("{1, 2}"), "verl", ["{1, 2}"]),
    "verl, boxed": (verl("\\boxed{42}"), "verl", ["42"]),
    "verl, reward_model as JSON": (verl("") | {"reward_model": '{"ground_truth": "42", "style": "rule-lighteval/MATH_v2"}'}, "verl", ["42"]),
    "verl, prompt as text": (verl("42") | {"prompt": "What is 6*7?"}, "verl", ["42"]),
    "verl, parts": (verl("42") | {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is 6*7?"}]}]}, "verl", ["42"]),
    "areal": (areal(), "areal", ["7"]),
    "areal, no task, qid": ({"qid": 3, "prompt": "2+5?", "solutions": ["\\boxed{7}"]}, "areal", ["7"]),
    "areal, letter beside value": (areal(solutions=["long .. \\boxed{7} so \\boxed{B}", "\\boxed{7}"]), "areal", ["B", "7"]),
    "areal, no box": (areal(solutions=["7"]), "areal", ["7"]),
    "trl": ({"prompt": USER, "solution": "So $\\boxed{42}$"}, "trl", ["42"]),
    "trl, dollars": ({"prompt": USER, "solution": "$42$"}, "trl", ["42"]),
    "trl, messages": ({"messages": USER, "answer": "x\n#### 42"}, "trl", ["42"]),
    "trl, prompt as text": ({"prompt": "What is 6*7?", "solution": "\\boxed{42}"}, "trl", ["42"]),
    "open-r1": ({"problem": "q?", "solution": "long", "answer": "42", "generations": ["a"]}, "deepscaler", ["42"]),
    "native": ({"question": "q?", "golds": ["1/2", "0.5"], "kind": "math"}, "native", ["1/2", "0.5"]),
    "plain": ({"prompt": "q?", "answer": " 42 "}, "plain", ["42"]),
    "plain, nulls of a fixed schema": ({"problem": None, "question": "q?", "answer": "42", "tests": None, "reward_model": None}, "plain", ["42"]),
}


@pytest.mark.parametrize("name", CLEAN_MATH)
def test_answers(name):
    row, format_name, golds = CLEAN_MATH[name]
    found, adapted = adapt(row)
    assert (found, list(adapted.golds), adapted.kind, adapted.tests) == (format_name, golds, "math", "")
    assert adapted.question in ("q?", "2+5?", "What is 6*7?")


TWO_STDIN = {"kind": "stdin", "inputs": ["1 2\n", "1 2\n"], "outputs": ["3\n", "3\n"]}
CALL = {"kind": "call", "fn_name": "f"}
CLEAN_CODE = {
    "areal": (areal_code(), "areal", PACKED_STDIN),
    "areal, fn_name": (areal_code({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}), "areal", CALL | {"inputs": [[1, 2]], "outputs": [[3]]}),
    "areal, empty fn_name and remote": (areal_code(STDIN | {"fn_name": "", "remote": False}), "areal", PACKED_STDIN),
    "areal, limits": (areal_code(timeout=4, memory=256), "areal", PACKED_STDIN | {"timeout": 4, "memory": 256}),
    "areal, object": (areal_code() | {"input_output": STDIN}, "areal", PACKED_STDIN),
    "verl, JSON text": (verl(json.dumps(STDIN), ability="code"), "verl", PACKED_STDIN),
    "verl, struct with nulls": (verl(STDIN | {"fn_name": None}), "verl", PACKED_STDIN),
    "verl, list of tests": (verl(LCB_STDIN), "verl", {"kind": "stdin", "inputs": ["1 2\n"], "outputs": ["3\n"]}),
    "lcb, stdin, public and private": (lcb(private=LCB_STDIN), "livecodebench", TWO_STDIN),
    "lcb, private missing": (lcb(private=None), "livecodebench", {"kind": "stdin", "inputs": ["1 2\n"], "outputs": ["3\n"]}),
    "lcb, functional": (lcb(LCB_CALL, metadata='{"func_name": "f"}'), "livecodebench", CALL | {"inputs": [[[1, 2], "a"]], "outputs": ['"5"']}),
    "deepcoder, taco": (deepcoder(STDIN), "deepcoder", PACKED_STDIN),
    "deepcoder, taco lines": (deepcoder({"inputs": [["1", "2"]], "outputs": [["3"]]}), "deepcoder", {"kind": "stdin", "inputs": ["1\n2"], "outputs": ["3"]}),
    "deepcoder, taco function": (
        deepcoder(json.dumps({"inputs": [["ab"], ["5"]], "outputs": ["yes", "5"], "fn_name": "f"})),
        "deepcoder",
        CALL | {"inputs": [["ab"], ["5"]], "outputs": ['"yes"', "5"]},
    ),
    "deepcoder, primeintellect": (
        deepcoder([{"type": "function_call", "input": [1], "output": [1, 2], "fn_name": "f"}]),
        "deepcoder",
        CALL | {"inputs": [[1]], "outputs": ["[1, 2]"]},
    ),
    "deepcoder, lcb": (deepcoder(LCB_CALL, metadata={"func_name": "f"}), "deepcoder", CALL | {"inputs": [[[1, 2], "a"]], "outputs": ['"5"']}),
    "deepcoder, codeforces": (
        deepcoder([{"input": "1\n", "output": "2\n", "testtype": "stdin_stdout"}]),
        "deepcoder",
        {"kind": "stdin", "inputs": ["1\n"], "outputs": ["2\n"]},
    ),
    "humaneval": (HUMANEVAL, "humaneval", {"kind": "asserts", **{key: HUMANEVAL[key] for key in ("entry_point", "test", "prompt")}}),
    "native": ({"question": "q?", "kind": "code", "answer": "x", "tests": json.dumps(STDIN)}, "native", PACKED_STDIN),
}


@pytest.mark.parametrize("name", CLEAN_CODE)
def test_programs(name):
    row, format_name, tests = CLEAN_CODE[name]
    found, adapted = adapt(row)
    assert (found, json.loads(adapted.tests), adapted.kind, adapted.golds) == (format_name, tests, "code", ())


DIRTY = {
    "gsm8k, no marker": ({"question": "q?", "answer": "He has 17."}, "gsm8k", "no '#### ' before the answer"),
    "gsm8k, nothing behind": ({"question": "q?", "answer": "x\n#### "}, "gsm8k", "the answer is empty"),
    "gsm8k, number": ({"question": "q?", "answer": float("nan")}, "gsm8k", "found float"),
    "math, no box": ({"problem": "q?", "solution": "So x=4."}, "math", "no box in the solution"),
    "math, open box": ({"problem": "q?", "solution": "\\boxed{4} or \\boxed{4"}, "math", "braces do not balance"),
    "math, empty box": ({"problem": "q?", "solution": "\\boxed{ }"}, "math", "the last box is empty"),
    "deepscaler, null": ({"problem": "q?", "answer": None, "solution": None}, "deepscaler", "found None"),
    "deepscaler, bool": ({"problem": "q?", "answer": True}, "deepscaler", "found bool"),
    "deepscaler, no answers": ({"problem": "q?", "answer": []}, "deepscaler", "list of answers is empty"),
    "deepscaler, bool among answers": ({"problem": "q?", "answer": ["1", False]}, "deepscaler", "found bool"),
    "verl, null": (verl(None), "verl", "missing or null"),
    "verl, object": (verl({"target": 98, "numbers": [1]}), "verl", "object without tests; its keys are 'target', 'numbers'"),
    "verl, empty": (verl(" "), "verl", "the answer is empty"),
    "verl, bool": (verl(True), "verl", "found bool"),
    "verl, judged by a model": (verl("42") | {"reward_model": {"style": "model", "ground_truth": "42"}}, "verl", "asks a model"),
    "verl, reward_model is a list": (verl("42") | {"reward_model": [1]}, "verl", "reward_model must be an object"),
    "verl, broken JSON": (verl("42") | {"reward_model": "{"}, "verl", "reward_model is not JSON"),
    "verl, code without tests": (verl("print(1)", ability="code"), "verl", "tests are not JSON"),
    "verl, no messages": (verl("42") | {"prompt": []}, "verl", "list of messages, found none"),
    "verl, a message is text": (verl("42") | {"prompt": ["hi"]}, "verl", "each message needs a role"),
    "verl, content is null": (verl("42") | {"prompt": [{"role": "user", "content": None}]}, "verl", "content of a message must be text"),
    "verl, an image": (verl("42") | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "verl", "content of a message must be text"),
    "verl, ends with an answer": (verl("42") | {"prompt": [*USER, {"role": "assistant", "content": "42"}]}, "verl", "must be the user's"),
    "areal, no solutions": (areal(solutions=[]), "areal", "list of texts, found none"),
    "areal, solution is null": (areal(solutions=[None]), "areal", "found None"),
    "areal, long text without a box": (areal(solutions=["so " * 400]), "areal", "no answer but a solution"),
    "areal, unknown task": (areal(task="stem"), "areal", "task='stem' is neither"),
    "areal, other language": (areal_code(language="CPP"), "areal", "only Python"),
    "areal, tests cut": (areal_code() | {"input_output": '{"inputs": ["1"'}, "areal", "tests are not JSON"),
    "areal, tests missing": (areal_code() | {"input_output": None}, "areal", "must be an object with inputs and outputs"),
    "areal, uneven": (areal_code({"inputs": ["1", "2"], "outputs": ["1"]}), "areal", "2 inputs for 1 outputs"),
    "areal, none": (areal_code({"inputs": [], "outputs": []}), "areal", "no tests"),
    "areal, numbers for lines": (areal_code({"inputs": [1], "outputs": [1]}), "areal", "must be text, found int"),
    "areal, negative limit": (areal_code(timeout=-1), "areal", "timeout=-1"),
    "areal, two user turns": (areal(prompt="<|user|>a<|assistant|>b<|user|>c"), "areal", "several user turns"),
    "areal, begun answer": (areal(prompt="<|user|>a<|assistant|>Sure, 7"), "areal", "beginning of an answer"),
    "areal, tokens alone": (areal(prompt="<|user|><|assistant|>"), "areal", "the question is empty"),
    "lcb, pickled": (lcb(private=PICKLED), "livecodebench", "unpickling can run code"),
    "lcb, pickled, public": (lcb(public=PICKLED), "livecodebench", "pickle.loads.zlib.decompress"),
    "lcb, none": (lcb("[]"), "livecodebench", "no tests"),
    "lcb, no function": (lcb(LCB_CALL), "livecodebench", "without the name of the function"),
    "lcb, both kinds": (lcb(LCB_STDIN, LCB_CALL, metadata='{"func_name": "f"}'), "livecodebench", "some tests feed standard input"),
    "lcb, no object": (lcb("3"), "livecodebench", "must be a list of tests"),
    "lcb, argument cut": (
        lcb('[{"input": "[1", "output": "1", "testtype": "functional"}]', metadata='{"func_name": "f"}'),
        "livecodebench",
        "an argument of a call is not JSON",
    ),
    "deepcoder, no output": (deepcoder([{"input": "1"}]), "deepcoder", "object with input and output"),
    "deepcoder, other type": (deepcoder([{"input": "1", "output": "1", "testtype": "web"}]), "deepcoder", "'web' is neither stdin nor functional"),
    "deepcoder, bytes of a pickle": (deepcoder(pickle.dumps([1])), "deepcoder", "unpickling can run code"),
    "deepcoder, name is code": (deepcoder({"inputs": [[1]], "outputs": [[1]], "fn_name": "f(); g"}), "deepcoder", "is no name of a function"),
    "deepcoder, no test at all": (deepcoder(None), "deepcoder", "no tests"),
    "humaneval, no check": (HUMANEVAL | {"test": "assert add(1, 2) == 3"}, "humaneval", "defines no function check"),
    "humaneval, syntax": (HUMANEVAL | {"test": "def check(candidate:\n"}, "humaneval", "test is not Python"),
    "humaneval, other name": (HUMANEVAL | {"entry_point": "sub"}, "humaneval", "the prompt has no sub"),
    "humaneval, no name": (HUMANEVAL | {"entry_point": "1x"}, "humaneval", "is no name of a function"),
    "humaneval, test missing": (HUMANEVAL | {"test": None}, "humaneval", "no test"),
    "trl, no solution": ({"prompt": USER}, "trl", "no 'solution'"),
    "trl, null": ({"prompt": USER, "solution": None}, "trl", "found None"),
    "native, kind": ({"question": "q?", "kind": "video", "answer": "1"}, "native", "kind='video'"),
    "native, solution that is no text": ({"question": "q?", "kind": "code", "tests": STDIN, "solution": 1}, "native", "the solution of a program must be text"),
    "native, code without tests": ({"question": "q?", "kind": "code", "answer": "1"}, "native", "must be an object or a list, found NoneType"),
    "plain, surrogate in an answer": ({"question": "q?", "answer": "\ud800"}, "plain", "surrogates not allowed"),
    "surrogate in a message": (verl("42") | {"prompt": [{"role": "system", "content": "\ud800"}, *USER]}, "verl", "surrogates not allowed"),
    "no object": (["q?", "1"], "plain", "expected an object"),
}


@pytest.mark.parametrize("name", DIRTY)
def test_dirty_rows(name):
    row, format_name, reason = DIRTY[name]
    with pytest.raises(RowError, match=reason) as caught:
        formats.adapt(formats.FORMATS[format_name], row)
    assert caught.value.kind and len(caught.value.kind) < 40 and "\n" not in str(caught.value)


def test_every_format_has_clean_and_dirty_rows():
    assert {name for _, name, _ in CLEAN_MATH.values()} | {name for _, name, _ in CLEAN_CODE.values()} == set(formats.FORMATS)
    assert {name for _, name, _ in DIRTY.values()} == set(formats.FORMATS)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize("packed", [pickle.dumps(Bomb()), base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode(), zlib.compress(pickle.dumps(Bomb()))])
def test_nothing_is_unpickled(packed):
    with pytest.raises(RowError, match="refused") as caught:
        code_tests.pack(packed)
    assert caught.value.kind == "pickled tests"


# ---- conversations


def test_a_conversation_keeps_its_messages_and_a_single_question_has_none():
    assert adapt(verl("42"))[1].messages == ()
    found = adapt(verl("42") | {"prompt": SYSTEM})[1]
    assert found.question == "What is 6*7?" and found.messages == (("system", "Be brief."), ("user", "What is 6*7?"))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "6*7?"}]
    assert adapt({"prompt": turns, "solution": "42"})[1].question == "user: Hi\n\nassistant: Yes?\n\nuser: 6*7?"


def test_the_data_set_that_a_row_names_is_kept():
    assert adapt(verl("42"))[1].origin == "math_dapo"
    assert adapt({"problem": "q?", "answer": "1", "source": "olympiads"})[1].origin == "olympiads"
    assert adapt(lcb(platform="leetcode"))[1].origin == "leetcode"


@pytest.mark.parametrize(
    ("prompt", "question", "system"),
    [
        ("<|user|>2+5?", "2+5?", ""),
        ("<｜User｜>2+5?<｜Assistant｜><think>\n", "2+5?", ""),
        ("<｜begin▁of▁sentence｜><|User|>2+5?<|Assistant|>", "2+5?", ""),
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+5?<|im_end|>\n<|im_start|>assistant\n", "2+5?", "Be brief."),
        ("Is 2 <|x|> 3 a token? <think>", "Is 2 <|x|> 3 a token? <think>", ""),
    ],
)
def test_chat_tokens_of_areal_prompts(prompt, question, system):
    found = adapt(areal(prompt=prompt))[1]
    assert found.question == question and found.messages == ((("system", system), ("user", question)) if system else ())
    assert bool(found.notes) == (prompt != question)


def test_unusable_solutions_are_counted_where_others_can_be_used():
    found = adapt(areal(solutions=["so " * 400, "\\boxed{7}", None]))[1]
    assert found.golds == ("7",) and len(found.notes) == 2


def test_starter_code_is_part_of_the_question():
    assert adapt(lcb(starter_code="class Solution:\n    pass\n"))[1].question == "Add.\n\nStart from this code:\n```python\nclass Solution:\n    pass\n```"


def test_tests_nested_too_deeply_are_a_fault_of_the_row():
    deep = "[" * 50_000 + "]" * 50_000
    for tests in (deep, json.dumps({"inputs": [deep], "outputs": ["1"], "fn_name": "f"})):
        with pytest.raises(RowError, match=r"nested too deeply|recursion"):
            formats.adapt(formats.FORMATS["deepcoder"], deepcoder(tests))


# ---- recognising formats


def test_most_of_the_first_rows_decide():
    rows = [{"x": 1}, {"question": "q?", "answer": 7}, verl("1"), "junk", verl("2")]
    assert formats.detect(rows).name == "verl"
    assert formats.detect([{"x": 1}, 3, None]).name == formats.detect([]).name == "plain"


# ---- whatever the rows


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats()
    | st.sampled_from(["", "q", "\\boxed{", "\\boxed{7}", "#### 7", "[", '["1"]', "{}", LCB_STDIN, PICKLED, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "ground_truth", "inputs", "outputs", "input", "output", "fn_name", "text"]), inner, max_size=4)
    ),
    max_leaves=6,
)
ROWS = st.dictionaries(st.sampled_from(sorted(formats.COLUMNS)), VALUES, max_size=8)


@settings(max_examples=300, deadline=None)
@given(row=ROWS | VALUES, name=st.sampled_from(sorted(formats.FORMATS)))
def test_an_adapter_gives_a_usable_problem_or_a_row_error(row, name):
    formats.detect([row])
    try:
        found = formats.adapt(formats.FORMATS[name], row)
    except RowError:
        return
    assert found.question.strip() and all(found.golds)
    assert bool(found.golds) == (found.kind == "math") and bool(found.tests) == (found.kind == "code")
    if found.tests:
        tests = json.loads(found.tests)
        assert tests["kind"] in ("stdin", "call", "asserts")
        assert code_tests.pack(tests | {"kind": None}) == found.tests  # packing again changes nothing


@settings(deadline=None)
@given(st.text("\\boxed{} 4fx$", max_size=40))
def test_the_last_box_balances(text):
    try:
        box = formats.last_box(text)
    except RowError:
        assert "\\boxed" in text
        return
    assert (box is None) == ("\\boxed" not in text or not any(not text[i + 6 : i + 7].isalpha() for i in range(len(text)) if text.startswith("\\boxed", i)))
    if box is not None:
        assert box and box in text
