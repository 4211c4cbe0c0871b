"""Answers graded per core-second, beside math-verify as others call it.

.venv/bin/python benchmarks/rewards.py            # about a minute and a half; medians of 3; the last line is one JSON object

The mix: 3,000 answers, 80 % whole numbers, 12 % fractions, 5 % roots, 3 % ordered pairs, each at the end of 2,000 characters of reasoning; a third of them wrong.
Every reference occurs once, so no verdict comes from a cache. Seconds are processor time of the process that grades.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable

from areal_hpc.observe.telemetry import hardware

os.environ["SYMPY_GROUND_TYPES"] = "python"

REASONING = "First we add the two numbers, then we look at what is left over, and so on. " * 26
NUM_ANSWERS = 3000
Case = tuple[str, str, bool]


def mixed_cases(num: int, seed: int = 0) -> list[Case]:
    """(reference, text of the answer, right or not)."""
    draw = random.Random(seed)
    cases = []
    for index in range(num):
        right = draw.random() < 2 / 3
        kind, k, off = draw.random(), 10 * index + draw.randrange(10), 0 if right else 1
        if kind < 0.80:
            gold, answer = str(k), str(k + off)
        elif kind < 0.92:
            gold, answer = f"\\frac{{{k + 1}}}{{7}}", f"\\frac{{{2 * (k + 1 + off)}}}{{14}}"
        elif kind < 0.97:
            gold, answer = f"2\\sqrt{{{k + 2}}}", f"\\sqrt{{{4 * (k + 2 + off)}}}"
        else:
            gold, answer = f"({k},-{k})", f"({k},-{k + off})"
        cases.append((gold, f"{REASONING}So the answer is $\\boxed{{{answer}}}$.", right))
    return cases


def per_core_s(grade: Callable[[str, str], bool], cases: list[Case]) -> tuple[float, int]:
    """(answers per second of processor time, wrong verdicts)."""
    began_s = time.process_time()
    wrong = sum(grade(gold, text) != right for gold, text, right in cases)
    return len(cases) / (time.process_time() - began_s), wrong


def ours() -> Callable[[str, str], bool]:
    """A new grader with an empty cache."""
    from areal_hpc.reward.math import MathGrader
    from areal_hpc.reward.verdict import Outcome

    grader = MathGrader()
    return lambda gold, text: grader.grade(gold, text).status is Outcome.RIGHT


def as_verl() -> Callable[[str, str], bool]:
    """Reference in a box; text by expression and LaTeX extraction; its wrapper `math_metric`."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def grade(gold: str, text: str) -> bool:
        expected = parse(f"\\boxed{{{gold}}}", extraction_config=[LatexExtractionConfig()])
        found = parse(text, extraction_config=[ExprExtractionConfig(), LatexExtractionConfig()])
        return bool(verify(expected, found))

    return grade


def as_trl() -> Callable[[str, str], bool]:
    """Boxes first, no extraction without an anchor, first match."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=NormalizationConfig(units=True))]

    def grade(gold: str, text: str) -> bool:
        return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(text, extraction_config=config, extraction_mode="first_match")))

    return grade


def math_rates() -> dict[str, float]:
    """Ours on the whole mix; math-verify on a tenth of it."""
    cases = mixed_cases(NUM_ANSWERS)
    found: dict[str, float] = {}
    for name, make, some in (("ours", ours, cases), ("math_verify_as_verl", as_verl, cases[::10]), ("math_verify_as_trl", as_trl, cases[::10])):
        make()("\\sqrt{8}", "\\boxed{2\\sqrt{2}}")  # imports and first parse
        rounds = [per_core_s(make(), some) for _ in range(3)]
        found[f"{name}_answers_per_core_s"] = statistics.median(rate for rate, _ in rounds)
        found[f"{name}_wrong_verdicts"] = max(wrong for _, wrong in rounds) / len(some)
    return found


def service_cpu_s(cases: list[Case]) -> float:
    """Processor seconds of everything (this process, server, one grader) from start to end of a service that grades the cases."""
    from areal_hpc.config import Reward
    from areal_hpc.reward.service import RewardService

    began_s = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    with RewardService.start() as service:
        service.configure(None, Reward(num_graders=1), ["math"])
        while not service.wait_ready(120.0):
            pass
        for job_id, (gold, text, _) in enumerate(cases):
            service.submit_reference(job_id, "math", gold, text)
            while service.num_pending >= 256:
                service.wait(60.0)
        while service.num_pending:
            service.wait(60.0)
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began_s


def service_rate() -> dict[str, float]:
    """The same mix through the service, start-up not counted."""
    cases = mixed_cases(2 * NUM_ANSWERS)
    rates = [NUM_ANSWERS / (service_cpu_s(cases) - service_cpu_s(cases[:NUM_ANSWERS])) for _ in range(3)]
    return {"service_answers_per_core_s": statistics.median(rates)}


def hostile_cost() -> dict[str, float]:
    """Wall seconds from submission to verdict of an answer that math-verify would work on for ever, and of the healthy one behind it."""
    from areal_hpc.config import Reward
    from areal_hpc.reward.service import RewardService

    late, next_right = [], []
    with RewardService.start() as service:
        service.configure(None, Reward(num_graders=1), ["math"])
        service.wait_ready(120.0)
        for _ in range(3):
            time.sleep(4.0)  # the spare is warm
            began_s = time.perf_counter()
            service.submit_reference(0, "math", "5", "\\boxed{\\sum_{n=1}^{9999} n^{n}}")
            service.submit_reference(1, "math", "5", "\\boxed{5}")
            seconds = {}
            while service.num_pending:
                seconds |= {verdict.job_id: time.perf_counter() - began_s for verdict in service.wait(60.0)}
            late.append(seconds[0])
            next_right.append(seconds[1] - seconds[0])
    return {"hostile_answer_s": statistics.median(late), "next_answer_after_s": statistics.median(next_right)}


def main() -> None:
    """Print one line per number, then the JSON object."""
    found = math_rates() | service_rate() | hostile_cost()
    for name, value in found.items():
        print(f"{name:44s} {value:.3f}")
    print(json.dumps({"benchmark": "rewards", "hardware": hardware(), **found}))


if __name__ == "__main__":
    main()
