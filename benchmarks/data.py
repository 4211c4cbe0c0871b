"""Loading data sets: seconds for 100,000 rows of each container and format, and for measuring their prompts in a model's tokens.

.venv/bin/python benchmarks/data.py [--rows 100000] [--repeat 3]     # about two minutes; medians; the last line is one JSON object

Rows are as long as those of the data sets they stand for: worked solutions of a few hundred characters, programs with five tests. All questions differ.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from areal_hpc.config import Data
from areal_hpc.data.datasets import Problems, load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.models.tokenizer import build
from areal_hpc.observe.telemetry import hardware

PROSE = "A worked solution goes on for a while before it says what it has found, as this one does. "
CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def gsm8k(row: int) -> dict[str, Any]:
    return {"question": f"{PROSE}What is {row} plus 1?", "answer": f"{PROSE * 2}\n{row}+1=<<{row}+1={row + 1}>>{row + 1}\n#### {row + 1:,}"}


def math(row: int) -> dict[str, Any]:
    return {"problem": f"{PROSE}Halve ${row}$.", "level": "Level 3", "type": "Algebra", "solution": f"{PROSE * 4}So it is $\\boxed{{\\frac{{{row}}}{{2}}}}$."}


def verl(row: int) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{PROSE * 2}What is {row} times 7?"}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": str(7 * row)},
        "extra_info": {"index": f"{row:x}", "split": "train"},
    }


def areal_code(row: int) -> dict[str, Any]:
    tests = {"inputs": [f"{row} {k}\n" for k in range(5)], "outputs": [f"{row + k}\n" for k in range(5)], "fn_name": ""}
    return {
        "task": "code",
        "query_id": row,
        "prompt": f"{PROSE}Read two numbers, print their sum ({row}).",
        "input_output": json.dumps(tests),
        "language": "PYTHON",
    }


FORMATS: dict[str, Callable[[int], dict[str, Any]]] = {"gsm8k": gsm8k, "math": math, "verl": verl, "areal-code": areal_code}


def medians_s(name: str, action: Callable[[], object], repeat: int) -> dict[str, float]:
    """Medians over `repeat` calls: seconds on the clock, and of CPU (what they would be on idle cores)."""
    wall, cpu = [], []
    for _ in range(repeat):
        began_at, cpu_before = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - began_at)
        cpu.append(time.process_time() - cpu_before)
    return {f"{name}_s": statistics.median(wall), f"{name}_cpu_s": statistics.median(cpu)}


def loaded(path: Path, num_rows: int) -> Problems:
    """The problems of a file, all of whose rows must have been kept."""
    problems = load_problems(Data(path=str(path), max_prompt_tokens=4096))
    assert problems.report.num_kept == num_rows, problems.report.lines()
    return problems


def main() -> None:
    """Print one line per way, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, row_of in FORMATS.items():
            rows = [row_of(row) for row in range(args.rows)]
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            lines, packed, columns = (Path(folder) / f"{name}.{kind}" for kind in ("jsonl", "jsonl.gz", "parquet"))
            lines.write_bytes(text)
            packed.write_bytes(gzip.compress(text, 1))
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), columns)
            for path in (lines, packed, columns):
                found |= medians_s(path.name, lambda path=path: loaded(path, args.rows), args.repeat)  # type: ignore[misc]
        problems = loaded(Path(folder) / "verl.jsonl", args.rows)
    tokenizer = build(problems, "\n")
    settings = json.loads(tokenizer.files["tokenizer_config.json"]) | {"chat_template": CHAT}
    tokenizer.files["tokenizer_config.json"] = json.dumps(settings).encode()
    for what, limit in {"short": 4096, "counted": 64}.items():  # below the limit by its length alone; every prompt tokenised
        prompts = Prompts(Data(max_prompt_tokens=limit), tokenizer)
        found |= medians_s(f"prompts_{what}", lambda prompts=prompts: sum(map(prompts.is_overlong, problems.train)), args.repeat)  # type: ignore[misc]
    for way, seconds in found.items():
        print(f"{way:24s} {seconds:7.2f} s   {args.rows / seconds:10,.0f} rows/s")
    print(json.dumps({"benchmark": "data", "rows": args.rows, "repeat": args.repeat, "hardware": hardware(), **found}))


if __name__ == "__main__":
    main()
