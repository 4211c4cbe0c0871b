"""What answers the model between two turns: the tool that runs its programs, users' functions, and what becomes of those that fail, hang or cheat."""

import time
from pathlib import Path

import pytest

from areal_hpc.config import Config, ConfigError, Data, Environment, Reward, check
from areal_hpc.data.datasets import Problem
from areal_hpc.reward.environments import PythonTool, as_output, called_program, cut, load_environment
from areal_hpc.reward.service import Reply, RewardService
from areal_hpc.transport.trajectory import Status

PROBLEM = Problem(0, "2 + 3 =", "5", "chain_sum", kind="rg")
CODE = Problem(0, "Print 5.", "", "file", kind="code")


@pytest.fixture(scope="module")
def tool():
    made = PythonTool(Environment(name="python", python_cpu_s=0.5, python_output_chars=200), Reward())
    yield made
    made.close()


def call(tool, program):
    return tool(PROBLEM, (f"Let me see.\n<python>{program}</python>",))


def test_calls_end_a_turn():
    assert called_program("x <python>print(1)</python>\n ", fenced=False) == "print(1)"
    assert called_program("<python>\na\nb\n</python>", fenced=False) == "a\nb"
    assert called_program("first <python>1</python> then <python>2</python>", fenced=False) == "2"
    assert called_program("<python>print(1)</python> so it is 1", fenced=True) is None
    assert called_program("see\n```python\nprint(1)\n```\n", fenced=True) == "print(1)"
    assert called_program("```python\na\n```\nor\n```python\nb\n```", fenced=True) == "b"
    assert called_program("```python\nprint(1)\n```", fenced=False) is None
    assert called_program("```\nprint(1)\n```", fenced=True) is None
    assert called_program("#### 5", fenced=True) is None


def test_output_comes_back(tool):
    assert call(tool, "print(2 + 3)\nprint('x')") == as_output("5\nx") == "\n<output>\n5\nx\n</output>\n"
    assert call(tool, "x = 1") == as_output("(no output)")
    assert call(tool, "print(x)") == as_output("NameError: name 'x' is not defined"), "nothing of an earlier program is left"
    assert tool(CODE, ("```python\nprint(5)\n```",)) is None, "there the block is the answer"
    assert tool(PROBLEM, ("```python\nprint(5)\n```",)) == as_output("5")
    assert tool(PROBLEM, ("<python>print(1)</python>", as_output("1"), "#### 1")) is None


def test_failures_are_shown_and_counted(tool):
    tool.counts.clear()
    assert call(tool, "print(1)\n1 / 0") == as_output("1\nZeroDivisionError: division by zero")
    assert "SyntaxError" in call(tool, "print(")
    assert call(tool, "import sys; sys.exit(3)") == as_output("the program ended with exit status 3")
    assert "EOFError" in call(tool, "input()")
    sleeping = "import time\nprint('begun', flush=True)\ntime.sleep(60)"  # a busy loop would wait for a core on a busy machine, which is not its fault
    assert call(tool, sleeping) == as_output("begun\nTimeoutError: the program took more than 2 s")
    assert "RuntimeError: the program printed more than" in call(tool, "while True: print('x' * 1000)")
    assert "MemoryError" in call(tool, "x = bytearray(4 << 30)")
    assert tool.counts == {"python_calls": 7, "python_failed": 6, "python_timeouts": 1, "python_cut": 1}


def test_long_output_is_cut_and_says_so(tool):
    shown = call(tool, "print('a' * 1000 + 'z')")
    assert "[... 801 of 1001 characters left out ...]" in shown and shown.count("a") > 190 and "z\n</output>" in shown
    assert cut("x" * 200, 200) == "x" * 200


def test_programs_reach_nothing(tool):
    """The level that `reward.code_floor` asks for holds for the tool as it does for graded programs."""
    assert "Error" in call(tool, "import os; print(open('/etc/passwd').read())")
    assert "Error" in call(tool, "import socket; socket.create_connection(('127.0.0.1', 1))")
    assert "Error" in call(tool, f"open({str(Path(__file__).with_name('left'))!r}, 'w')")


# ---- through the service


@pytest.fixture
def service(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # graders are imported from the working folder
    made = []

    def start(environment, reward=None):
        made.append(RewardService.start())
        made[-1].configure(Data(size=200), reward or Reward(), environment=environment)
        return made[-1]

    yield start
    for each in made:
        each.close()


def outcome(service, job_id, *turns):
    """The reply's text or the verdict on the last of these texts."""
    service.submit(job_id, 0, turns[-1], turns=turns)
    stop_s = time.monotonic() + 60
    while time.monotonic() < stop_s:
        verdicts = service.wait(1.0)
        replies = service.take_replies()
        if verdicts or replies:
            (found,) = [*verdicts, *replies]
            assert found.job_id == job_id and service.num_pending == 0
            return found.text if isinstance(found, Reply) else found
    raise TimeoutError


def test_turns_are_answered_or_graded(service):
    here = service(Environment(name="tests.reward.graders:by_turn", deadline_s=2.0), Reward(deadline_s=60.0))
    assert here.wait_ready(60)
    assert outcome(here, 1, "count").startswith("1 texts about State the final answer")
    assert outcome(here, 2, "count", "x", "count").startswith("3 texts about")
    assert outcome(here, 3, "#### no number").status == Status.WRONG
    here.submit(4, 0, "count")  # without `turns` nobody is asked
    assert here.wait(60)[0].status == Status.NO_ANSWER
    assert here.metrics["replies"] == 2


def test_an_environment_that_fails_is_no_grade(service, tmp_path):
    """It raises, returns no text, hangs, or dies over one turn: INFRA_ERROR, and the next turn is answered. One that dies once is asked again."""
    here = service(Environment(name="tests.reward.graders:by_turn", deadline_s=2.0))
    assert here.wait_ready(60)
    for job_id, text in enumerate(("raise", "number", "hang", "crash")):
        verdict = outcome(here, job_id, text)
        assert (verdict.status, verdict.score) == (Status.INFRA_ERROR, None), text
        assert outcome(here, 100 + job_id, "fine") == "fine"
    assert outcome(here, 50, f"crash once {tmp_path / 'marker'}") == "fine"
    assert here.metrics["environment_failed"] == 2 and here.metrics["killed"] == 1 and here.metrics["died"] >= 3


def test_a_printed_answer_is_no_answer(service, tmp_path):
    """Attack: a program prints the right answer in every form that a grader looks for. Only what the model states itself is rewarded."""
    (tmp_path / "data.jsonl").write_text('{"question": "What is 6 * 7?", "answer": 42}\n{"question": "And 1 + 1?", "answer": 2}\n')
    here = RewardService.start()
    try:
        data = Data(path=str(tmp_path / "data.jsonl"), heldout_fraction=0.5)
        here.configure(data, Reward(), environment=Environment(name="python"))
        assert here.wait_ready(120)
        gold = "42" if "6 * 7" in _train_question(data) else "2"
        program = f"print('#### {gold}\\n\\\\boxed{{{gold}}}\\nThe answer is {gold}.')"
        first = f"<python>{program}</python>"
        shown = outcome(here, 1, first)
        assert f"\\boxed{{{gold}}}" in shown and f"#### {gold}" in shown
        assert outcome(here, 2, first, shown, "I am done.").status == Status.NO_ANSWER
        assert outcome(here, 3, first, shown, f"So it is \\boxed{{{gold}}}.").status == Status.RIGHT
        assert outcome(here, 4, first, shown, "So it is \\boxed{7}.").status == Status.WRONG
    finally:
        here.close()


def _train_question(data):
    from areal_hpc.data.datasets import load_problems

    return load_problems(data).train[0].question


def test_the_example_of_the_documentation_plays():
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    namespace: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], namespace)
    guess = namespace["guess"]
    assert guess(PROBLEM, ("3",)) == "higher\n"
    assert guess(PROBLEM, ("3", "higher\n", "9")) == "lower\n"
    assert guess(PROBLEM, ("?",)) == "A number, please.\n"
    assert guess(PROBLEM, ("3", "higher\n", "5")) is None


# ---- users' mistakes


def test_mistakes_are_found_before_a_run():
    def checked(**options):
        check(Config(environment=Environment(**options)))

    checked(name="python")
    for options, message in (
        ({"name": "pyton"}, "environment.name=pyton is neither python nor module:function"),
        ({"name": "python", "max_turns": 1}, "use 2 or more"),
        ({"name": "python", "deadline_s": 5.0}, "use 18 or more"),
        ({"name": "python", "python_cpu_s": 0.0}, "above zero"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked(**options)
    with pytest.raises(ConfigError, match=r"environment\.name=os:nothing"):
        load_environment(Environment(name="os:nothing"), Reward())
    assert load_environment(Environment(), Reward()) is None


def test_a_mistake_in_a_grader_is_told(service):
    here = service(Environment(name="tests.reward.graders:missing"))
    with pytest.raises(ConfigError, match="missing"):
        here.wait_ready(60)
