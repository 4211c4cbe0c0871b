"""A user's mistakes: exit status 2, one line on stderr that names the value and the way out, nothing written, no rank started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_hpc.cli import main


@pytest.fixture(autouse=True)
def _no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that slips through must fail the test, not start a job."""

    def refuse(config: object) -> int:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr("areal_hpc.launch.local.LocalJob", refuse)


MISTAKES = {
    "no command": ([], None),
    "unknown command": (["rum"], "did you mean run?"),
    "no recipe": (["run"], "needs a recipe"),
    "unknown recipe": (["run", "labtop"], "did you mean laptop?"),
    "unknown option": (["run", "laptop", "--train.batchsize", "8"], "'--train.batchsize'; did you mean '--train.batch-size'?"),
    "unknown section": (["run", "laptop", "--trian.num-steps", "8"], "did you mean '--train.num-steps'?"),
    "not a number": (["run", "laptop", "--train.num-steps", "many"], "many"),
    "not a choice": (["run", "laptop", "--staleness.mode", "dropp"], "dropless"),
    "one rank": (["run", "laptop", "--topology.num-ranks", "1"], "use 2 or more"),
    "too many training ranks": (["run", "laptop", "--topology.num-ranks", "4000"], "1000 training ranks"),
    "fraction": (["run", "laptop", "--topology.generation-fraction", "1.5"], "between 0 and 1"),
    "group size": (["run", "laptop", "--train.batch-size", "30"], "use batch_size 24 or 32"),
    "mini-batches": (["run", "laptop", "--train.num-minibatches", "3"], "does not divide"),
    "negative staleness": (["run", "laptop", "--staleness.max-staleness", "-1"], "must be 0, 1, 2, ... or inf"),
    "hard bound without a bound": (["run", "laptop", "--staleness.mode", "drop", "--staleness.max-staleness", "inf"], "finite max_staleness"),
    "unsafe task": (["run", "laptop", "--data.tasks", "countdown"], "can be scored safely"),
    "small lane": (["run", "laptop", "--transport.lane-bytes", "1000"], "use at least"),
    "tiny buckets": (["run", "laptop", "--transport.bucket-bytes", "1"], "at least 65536"),
    "huge lanes": (["run", "laptop", "--transport.lane-bytes", "999999999999"], "/dev/shm"),
    "custom reward without a function": (["run", "laptop", "--reward.custom", "foo"], "module:function"),
    "custom reward that is not there": (["run", "laptop", "--reward.custom", "no_such_module_here:f"], "no module 'no_such_module_here'"),
    "no GPU": (["run", "laptop", "--device", "cuda"], "no NVIDIA GPU"),
    "recipe as an option": (["run", "laptop", "--recipe", "foo"], "unknown recipe 'foo'"),
    "config without a file": (["run", "laptop", "--config"], "needs a file"),
    "zero steps": (["run", "laptop", "--train.num-steps", "0"], "must be above zero"),
    "missing data": (["run", "laptop", "--data.path", "no/such.jsonl"], "no/such.jsonl"),
    "missing model": (["run", "laptop", "--model.path", "no/such/model"], "no/such/model"),
    "missing start": (["run", "laptop", "--init-from", "no/such/model"], "no/such/model"),
    "missing yaml": (["run", "laptop", "--config", "no.yaml"], "no.yaml"),
    "report of nothing": (["report", "no/such/run"], "no/such/run"),
    "report without a run": (["report"], "RUN [RUN2 ...]"),
    "report twice": (["report", "runs/a", "runs/b", "runs/a"], "runs/a twice"),
    "report with another option": (["report", "runs/a", "--format", "pdf"], "--out DIR"),
    "trace of nothing": (["trace", "no/such/run"], "no/such/run"),
    "trace to another form": (["trace", "runs/a", "--out", "a.txt"], ".json.gz"),
    "convert without a form": (["convert", "runs/a"], "choose one of csv, tensorboard, wandb"),
    "convert to another form": (["convert", "runs/a", "--to", "xls"], "'xls'"),
    "index of nothing": (["index", "no/such/run"], "no/such/run"),
    "watch without a run": (["watch", "--once"], "one run folder"),
    "watch of nothing": (["watch", "no/such/run", "--once"], "no/such/run"),
    "watch too often": (["watch", "no/such/run", "--every", "0"], "from 0.1 to 3600"),
    "watch with another option": (["watch", "no/such/run", "--follow"], "there are: --once, --every"),
    "eval of nothing": (["eval", "no/such/run"], "no such folder"),
    "export of nothing": (["export", "no/such", "out"], "no such checkpoint"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_status_2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if name == "no GPU" and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    args, expected = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capfd.readouterr()
    if expected is not None:
        assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
        assert expected in said.err
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


DATA = {
    "malformed line": ('{"question": "1+1", "answer": "2"}\n{"question": "1+2" "answer": "3"}\n', "data.jsonl:2"),
    "no answer": ('{"question": "1+1", "answer": "2"}\n{"question": "1+2"}\n', "data.jsonl:2"),
    "empty": ("", "data.jsonl"),
    "prompt too long": ("".join(f'{{"question": "{str(k) * 300}?", "answer": "2"}}\n' for k in range(9)), "max_prompt_tokens"),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    text, expected = DATA[name]
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(text)
    assert main(["run", "laptop", "--data.path", "data.jsonl", "--model.warmstart-steps", "0"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and expected in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  batchsize: 8\n", "did you mean 'batch_size'?"),
        ("trian:\n  batch_size: 8\n", "did you mean 'train'?"),
        ("train: 8\n", "is a section"),
        ("train:\n  batch_size: many\n", "expected int"),
        ("train:\n  objective: reinforce\n", "'decoupled' or 'ppo' or 'grpo'"),
        ("- 1\n", "expected sections"),
        ("train: {num_steps: 3, num_steps: 4}\n", "key 'num_steps' stands 2 times"),
        ("train: [\n", "c.yaml"),
    ],
)
def test_bad_yaml(text: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert main(["run", "laptop", "--config", str(tmp_path / "c.yaml")]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and expected in said, said


def test_damaged_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes instead of YAML, and weights that end early."""
    (tmp_path / "c.yaml").write_bytes(bytes(range(256)))
    assert main(["run", "laptop", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "not a text file" in capfd.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    assert main(["run", "laptop", "--model.path", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "model.safetensors" in said


def test_existing_run_is_not_touched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attempt-1").mkdir()
    assert main(["run", "smoke", "--run-dir", str(tmp_path), "--model.warmstart-steps", "0"]) == 2
    assert "holds a run already" in capfd.readouterr().err


def test_print_config_round_trip(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What --print-config shows can be fed back and gives the same; options win over the file, the file over the recipe."""
    options = ["--train.num-steps", "7", "--staleness.max-staleness", "inf", "--data.tasks", "gcd", "lcm", "--train.lr", "1e-3"]
    assert main(["run", "laptop", *options, "--print-config"]) == 0
    first = capfd.readouterr().out
    (tmp_path / "c.yaml").write_text(first)
    assert main(["run", "smoke", "--config", str(tmp_path / "c.yaml"), "--print-config"]) == 0
    assert capfd.readouterr().out == first
    assert main(["run", "laptop", "--config", str(tmp_path / "c.yaml"), "--train.num-steps", "9", "--print-config"]) == 0
    changed = yaml.safe_load(capfd.readouterr().out)
    assert changed["train"]["num_steps"] == 9 and changed["train"]["lr"] == 1e-3 and changed["staleness"]["max_staleness"] == "inf"


def test_control_plane_imports_no_heavy_stack() -> None:
    """Help, recipes and configuration work where torch and MPI are missing."""
    code = (
        "import sys, areal_hpc.cli as cli; cli.main(['--help']); cli.main(['recipes']); cli.main(['run', 'laptop', '--print-config']); "
        "sys.exit(','.join(sorted(set(sys.modules) & {'torch', 'mpi4py', 'transformers', 'h5py', 'numpy', 'reasoning_gym'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "", f"imported: {done.stderr}"
