"""Grading functions that users might write badly, for test_service.py (`custom="tests.reward.graders:NAME"`)."""

import os
import subprocess
import time
from pathlib import Path


def by_text(problem, text):
    """Does what the answer says: the answers steer the grader, the way a hostile answer would."""
    if text == "hang":
        while True:
            pass
    if text.startswith("sleep in a child "):
        child = subprocess.Popen(["sleep", "600"])
        Path(text.removeprefix("sleep in a child ")).write_text(str(child.pid))
        child.wait()
    if text == "crash":
        os._exit(7)
    if text.startswith("crash once "):
        marker = text.removeprefix("crash once ")
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(7)
    if text == "raise":
        raise RuntimeError("the grading function is broken")
    if text == "slow":
        time.sleep(0.2)
    if text == "environment":
        return float(not any(name.startswith(("PMI", "OMPI", "SLURM", "MPI")) for name in os.environ) and os.environ["OMP_NUM_THREADS"] == "1")
    if text == "shout":
        print("x" * 100_000, flush=True)
    return {"none": None, "nan": float("nan"), "infinite": float("inf"), "text": "1.0", "half": 0.5, "true": True, "minus": -1}.get(text, 1.0)


def always(problem, turns):
    """An environment that has something to say to every turn."""
    assert len(turns) % 2 == 1
    return "+1\n"


def slow_for_some(problem, turns):
    """The later a problem stands, the sooner its environment is done."""
    time.sleep(0.05 if problem.index % 2 == 0 else 0.0)
    return "+1\n"


def by_turn(problem, turns):
    """An environment that does what the model's turn says."""
    text = turns[-1]
    if text == "count":
        return f"{len(turns)} texts about {problem.question}"
    if text == "number":
        return 7
    return None if text.startswith("####") else by_text(problem, text) and "fine"
