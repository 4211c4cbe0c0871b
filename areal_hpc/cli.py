"""The command line of `areal-hpc`; `USAGE` lists its commands. Heavy imports come after the arguments are understood.

Exit status: 0 done; 2 the configuration or data is wrong (one line, no traceback); 3 done, but the log is incomplete (a disk was full);
75 stopped on a signal with a complete checkpoint; anything else a failure.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_hpc import __version__
from areal_hpc.config import Config, ConfigError, check

USAGE = """usage: areal-hpc COMMAND ...

  run RECIPE [--section.option value ...]   train; under srun or mpiexec be one rank, otherwise start the ranks here
                                            --print-config shows the result and stops, --check checks it and the data and stops, --config FILE.yaml overrides many options
                                            --run-dir RUN --resume goes on from the newest complete checkpoint of RUN
  replay RUN [--level train|full]           do again what a run recorded (--log.record) and compare bit for bit: 0 equal, 1 different
                                            --attempt K, --steps N, --grade-again, --force (another machine)
  watch RUN                                 what a run is doing, from another shell, also after it died; --once, --every SECONDS
  report RUN [RUN2 ...]                     one HTML page of plots and tables, and saved answers, in RUN/report; several: compared, in --out DIR
  eval RUN_OR_MODEL [--section.option ...]  accuracy on the held-out set; --num-samples K: K answers to each problem (avg@k, pass@k, majority@k)
                                            --temperature T, --data gsm8k-100 | humaneval-164 | reasoning-gym, --out DIR
  generate RUN_OR_MODEL PROMPTS.jsonl       answers to prompts, by either engine; --num-samples K, --temperature T, --out FILE
                                            under srun or mpiexec each rank has its share
  grade FILE.jsonl [--reward.option ...]    rewards of gold/answer pairs or programs, one JSON object per line; - reads standard input
                                            --skip-invalid reports lines that are not JSON instead of stopping
  simulate MODEL_OR_RECIPE [--gpus N ...]   predicted throughput, asynchronous beside synchronous; --from-run RUN: of other settings of a run; --json
  plan --model 7b --gpus 64 [...]           best split, staleness and batch, what bounds them, memory, the sbatch line; --plot FILE, --json
  trace RUN [--out FILE]                    what all ranks did, on one clock, for ui.perfetto.dev or chrome://tracing: RUN/report/trace.json.gz
  convert RUN --to csv|tensorboard|wandb    the log for other tools, offline; --out DIR, --follow: while the run goes on
  index RUN                                 RUN/index.h5: the tables of all attempts as one, by HDF5 virtual datasets
  export CHECKPOINT DIR                     a checkpoint in Hugging Face format
  submit RECIPE [--nodes N ...] [options]   the same as a Slurm job through submitit; --dry-run prints the script, --test-only asks Slurm about it, --help
  doctor [--json]                           what this machine has, each with a verdict and a mend; under srun or mpiexec: between the ranks
  recipes                                   the recipes there are

areal-hpc run RECIPE --help lists all options with their meaning.
"""


OWN_HELP = ("run", "submit", "simulate", "plan")
"""Commands that explain their options themselves."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        **{"run": run, "replay": replay, "watch": watch, "report": report, "trace": trace, "convert": convert, "index": index},
        **{"eval": evaluate, "generate": generate, "grade": grade, "simulate": simulate, "plan": plan, "export": export},
        **{"submit": submit, "doctor": doctor, "recipes": recipes},
    }
    try:
        asks_for_help = any(argument in ("-h", "--help", "help") for argument in args[:2])
        if not args or (asks_for_help and (args[0] not in OWN_HELP or args in (["run", "-h"], ["run", "--help"]))):
            print(USAGE, end="")
            return 0 if args else 2
        if args[0] in ("-V", "--version"):
            print(__version__)
            return 0
        if args[0] not in commands:
            import difflib

            near = difflib.get_close_matches(args[0], commands, n=1)
            raise ConfigError(f"unknown command '{args[0]}'{f'; did you mean {near[0]}?' if near else ''}; there are: {', '.join(commands)}")
        return commands[args[0]](args[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


SLURM_PATIENCE_S = 3.0
"""Before a rank of a job step leaves for a mistake that all ranks find: at the first one that leaves Slurm kills the others, and reports that instead of status 2."""


def configure(args: list[str], command: str) -> tuple[Config, list[str]]:
    """Recipe, then --config file, then options. Returns the configuration and the flags that are not part of it."""
    from areal_hpc.config_io import load_yaml, parse_options, split_files
    from areal_hpc.recipes import recipe

    if not args or args[0].startswith("-"):
        raise ConfigError(f"areal-hpc {command} needs a recipe: areal-hpc {command} laptop")
    base = recipe(args[0])
    files, rest = split_files(args[1:])
    flags = [argument for argument in rest if argument in ("--print-config", "--check", "--resume")]
    options = [argument for argument in rest if argument not in flags]
    program = f"areal-hpc {command} {args[0]}"

    def overridden(config: Config) -> Config:
        for file in files:
            config = load_yaml(file, config)
        return parse_options(options, config, program)

    config = overridden(base)
    stored = _stored_config(config) if "--resume" in flags else None
    if stored is not None:
        from areal_hpc.launch.resume import check_unchanged

        config = overridden(stored)
        if args[0] != stored.recipe and not files:
            raise ConfigError(f"run_dir={config.run_dir} is a run of recipe {stored.recipe}, not {args[0]}")
        check_unchanged(stored, config)
    recipe(config.recipe)  # an option or a file may have changed the name
    return config, flags


def _stored_config(given: Config) -> Config | None:
    """The configuration of the run that `--resume` goes on with; None when there is no run yet. `given`: the recipe with files and options."""
    from areal_hpc.config_io import load_yaml

    if not given.run_dir:
        raise ConfigError("--resume needs the folder of the run: --run-dir RUN --resume")
    from areal_hpc.launch.resume import attempts_of

    run_dir = Path(given.run_dir)
    folders = [run_dir, *reversed(attempts_of(run_dir).values())]  # each attempt has a copy
    path = next((path for folder in folders if (path := folder / "config.yaml").exists()), None)
    if path is None and len(folders) > 1:
        raise ConfigError(f"run_dir={run_dir} has attempts and no config.yaml, so that nobody knows what to go on with; put it back, or choose another folder")
    return load_yaml(str(path), given, source="") if path is not None else None


def run(args: list[str]) -> int:
    """Be one rank, or check everything and start the ranks."""
    from areal_hpc.launch.local import is_rank, launch, world_rank_hint

    if is_rank():
        try:
            return _be_rank(args)
        except ConfigError as error:  # every rank finds the same mistake before MPI starts: one of them says it
            if world_rank_hint() == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            if "SLURM_STEP_ID" in os.environ:
                time.sleep(SLURM_PATIENCE_S)
                os._exit(2)  # mpi4py would turn the status into an abort, with lines of its own
            return 2
    config, flags = configure(args, "run")
    check(config)
    if "--print-config" in flags:
        from areal_hpc.config_io import as_yaml

        print(as_yaml(config), end="")
        return 0
    from areal_hpc.validate import check_inputs, check_shm

    fingerprint = check_inputs(config)
    if "--check" in flags:
        return 0
    check_shm(config)
    given = {argument.split("=")[0] for argument in args}
    resume = "--resume" in flags
    if "--config" in given and not resume and not given & {"--run-dir", "--run_dir"} and (Path(config.run_dir) / "attempt-1").exists():
        print(f"run_dir={config.run_dir} of the --config file holds its own run; this one goes to a new folder")
        config = dataclasses.replace(config, run_dir="")
    return launch(with_run_dir(config), resume=resume, fingerprint=fingerprint)


def with_run_dir(config: Config) -> Config:
    """The run directory made absolute; runs/RECIPE-TIME if none was given."""
    run_dir = Path(config.run_dir) if config.run_dir else Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return dataclasses.replace(config, run_dir=str(run_dir.absolute()))


def _be_rank(args: list[str]) -> int:
    config, flags = configure(args, "run")
    check(config)
    from areal_hpc.launch.local import is_done
    from areal_hpc.launch.resume import Attempt

    attempt = Attempt.from_environment()
    if attempt is not None:
        _say_that_it_starts(attempt.folder)
    from areal_hpc.run import agree_on_attempt, run_rank

    if attempt is None:  # nobody has checked the inputs for this rank
        from areal_hpc.validate import check_inputs

        fingerprint, resume = check_inputs(config), "--resume" in flags
        config = with_run_dir(config)
        if is_done(config, resume=resume):
            return 0
        run_rank(config, *agree_on_attempt(config, resume=resume, fingerprint=fingerprint))
    run_rank(config, attempt)


def _say_that_it_starts(attempt_dir: Path) -> None:
    """Before anything heavy is loaded: a rank that is killed from here on is named by the launcher. A disk that is full is for run_rank to complain of."""
    import contextlib

    from areal_hpc.launch.local import world_rank_hint
    from areal_hpc.observe.status import StatusFile, hold_lifeline, this_process

    hold_lifeline(world_rank_hint())
    with contextlib.suppress(OSError):
        StatusFile(attempt_dir, this_process(world_rank_hint(), phase="loading"))


def replay(args: list[str]) -> int:
    """Do again what a run recorded, and compare."""
    from areal_hpc.replay import main as replay_main

    return replay_main(args)


def watch(args: list[str]) -> int:
    """Show what a run is doing."""
    from areal_hpc.observe.watch import main as watch_main

    return watch_main(args)


def report(args: list[str]) -> int:
    """Write the report of a run, or the comparison of several, and print the summary."""
    names, given = _take(args, ("--out",))
    unknown = [name for name in names if name.startswith("-")]
    if unknown:
        raise ConfigError(f"unknown option '{unknown[0]}' of areal-hpc report; there is: --out DIR")
    if not names:
        raise ConfigError("areal-hpc report needs a run folder, or several to compare: areal-hpc report RUN [RUN2 ...] [--out DIR]")
    if len(set(names)) < len(names):
        raise ConfigError(f"areal-hpc report got {max(names, key=names.count)} twice; name each run once")
    from areal_hpc.observe.report import format_summary, summary, write_comparison, write_report

    folders, out = [Path(name) for name in names], Path(given["--out"]) if given else None
    if len(folders) == 1:
        path = write_report(folders[0], out)
        print(format_summary(summary(folders[0])))
    else:
        path = write_comparison(folders, out or folders[0].resolve().parent / f"comparison-{time.strftime('%Y%m%d-%H%M%S')}")
    print(f"report: {path.with_name('report.html')}")
    page = path.with_name("samples.html")
    if page.exists():
        print(f"answers: {page}")
    return 0


def trace(args: list[str]) -> int:
    """Write the timeline of all ranks."""
    from areal_hpc.observe.trace import main as trace_main

    return trace_main(args)


def convert(args: list[str]) -> int:
    """Write the log for another tool."""
    from areal_hpc.observe.convert import main as convert_main

    return convert_main(args)


def index(args: list[str]) -> int:
    """Join the attempts of a run in one file."""
    from areal_hpc.observe.index import main as index_main

    return index_main(args)


EVAL_FLAGS = {"--num-samples": "--evaluation.num-samples", "--temperature": "--evaluation.temperature"}
"""Short names of options of `areal-hpc eval`."""


def evaluate(args: list[str]) -> int:
    """A model, a checkpoint or the final model of a run on a packaged benchmark or the held-out set of a recipe (default: that of the run)."""
    if not args or args[0].startswith("-"):
        raise ConfigError("areal-hpc eval needs a run or model folder: areal-hpc eval RUN_OR_MODEL")
    from areal_hpc.config_io import load_yaml, parse_options
    from areal_hpc.data import packaged
    from areal_hpc.recipes import recipe

    target = Path(args[0])
    base = load_yaml(str(target / "config.yaml"), recipe("laptop")) if (target / "config.yaml").exists() else recipe("laptop")
    options, given = _take(args[1:], ("--data", "--out"))
    name = given.get("--data", "")
    if name:
        base = packaged.configured(name, base)
    options = ["=".join([EVAL_FLAGS.get(parts[0], parts[0]), *parts[1:]]) for parts in (argument.split("=", 1) for argument in options)]
    config = parse_options(options, base, "areal-hpc eval FOLDER")
    check(config)
    from areal_hpc.validate import model_folder

    folder = model_folder(target)
    rows = packaged.read(name) if name in packaged.PACKAGED else None
    out = _new_folder(given.get("--out", ""), target)
    from areal_hpc.evaluate import evaluate_model

    try:
        if rows is not None:
            packaged.write(rows, out / "problems.jsonl")
            config = packaged.with_file(config, out / "problems.jsonl")
        found = evaluate_model(config, folder, out)
    except ConfigError:
        import shutil

        shutil.rmtree(out)  # made above, and nothing in it is a result
        raise
    print(found.line)
    print(found.table)
    if found.left_out:
        print(found.left_out)
    print(f"results: {out}")
    return 0


def generate(args: list[str]) -> int:
    """Answers to the prompts of a file."""
    from areal_hpc.config_io import load_yaml, parse_options
    from areal_hpc.launch.local import is_rank, world_rank_hint
    from areal_hpc.recipes import recipe

    options, given = _take(args, ("--out", "--num-samples", "--temperature"))
    if len(options) < 2 or any(name.startswith("-") for name in options[:2]):
        raise ConfigError("areal-hpc generate needs a run or model folder and a file: areal-hpc generate RUN_OR_MODEL PROMPTS.jsonl")
    target, prompts = Path(options[0]), Path(options[1])
    base = load_yaml(str(target / "config.yaml"), recipe("laptop"), source="") if (target / "config.yaml").exists() else recipe("laptop")
    config = parse_options(options[2:], base, "areal-hpc generate FOLDER PROMPTS")
    check(config)
    num_samples = _number("--num-samples", given.get("--num-samples", "1"), int, "a whole number above zero", lambda n: n >= 1)
    temperature = _number("--temperature", given.get("--temperature", str(config.generation.temperature)), float, "zero or more", lambda t: t >= 0)
    from areal_hpc.generate import generate as answer_all
    from areal_hpc.validate import check_machine, model_folder

    try:
        check_machine(config)
        out = Path(given.get("--out", prompts.with_suffix(".answers.jsonl")))
        said = answer_all(config, model_folder(target), prompts, out, num_samples, temperature)
    except ConfigError:
        if is_rank() and world_rank_hint():
            return 2  # one of them says it
        raise
    if said:
        print(said)
    return 0


def grade(args: list[str]) -> int:
    """Grade the rows of a JSON-lines file; results to standard output, a summary to standard error."""
    if not args or (args[0].startswith("-") and args[0] != "-"):
        raise ConfigError("areal-hpc grade needs a file: areal-hpc grade FILE.jsonl (or - for standard input)")
    import json

    from areal_hpc.config_io import parse_options
    from areal_hpc.recipes import recipe
    from areal_hpc.reward.offline import grade_rows, read_rows, summary

    skip_invalid = "--skip-invalid" in args
    config = parse_options([argument for argument in args[1:] if argument != "--skip-invalid"], recipe("laptop"), "areal-hpc grade FILE.jsonl")
    check(config)
    results = []
    for result in grade_rows(read_rows(args[0], skip_invalid), config.reward):
        print(json.dumps(result), flush=True)
        results.append({"status": result["status"]})
    print(summary(results), file=sys.stderr)
    return 0


def _take(args: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(other arguments, value of each flag in `names` that is given, as `--flag VALUE` or `--flag=VALUE`)."""
    others: list[str] = []
    values: dict[str, str] = {}
    rest = iter(args)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name not in names:
            others.append(argument)
            continue
        values[name] = value or next(rest, "")
        if not values[name] or values[name].startswith("--"):
            raise ConfigError(f"{name} needs a value: {name} {name.removeprefix('--').upper()}")
    return others, values


def _number(option: str, text: str, kind: Callable[[str], Any], rule: str, ok: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not ok(value):
        raise ConfigError(f"{option} {text} must be {rule}")
    return value


def _new_folder(given: str, target: Path) -> Path:
    """Where an evaluation writes: the given folder, RUN/eval/TIME for a run, runs/eval-NAME-TIME for a model. Raises ConfigError when it holds something."""
    now = time.strftime("%Y%m%d-%H%M%S")
    is_run = (target / "config.yaml").exists()
    out = Path(given) if given else target / "eval" / now if is_run else Path("runs") / f"eval-{target.resolve().name}-{now}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not empty; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return out


def export(args: list[str]) -> int:
    """Convert a checkpoint to a Hugging Face folder."""
    if len(args) != 2:
        raise ConfigError("areal-hpc export needs a checkpoint and an output folder: areal-hpc export RUN/checkpoints/step-000100 DIR")
    source, out = Path(args[0]), Path(args[1])
    if not source.is_dir():
        raise ConfigError(f"{source}: no such checkpoint folder")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")
    from areal_hpc.train.checkpoint import export_checkpoint

    export_checkpoint(source, out)
    print(f"exported {source} to {out}")
    return 0


def simulate(args: list[str]) -> int:
    """Predict the throughput of a job."""
    from areal_hpc.simulate.command import simulate_command

    return simulate_command(args)


def plan(args: list[str]) -> int:
    """Recommend a split, a staleness and a batch."""
    from areal_hpc.simulate.command import plan_command

    return plan_command(args)


def submit(args: list[str]) -> int:
    """Submit a run as a Slurm job, or print what would be submitted."""
    from areal_hpc.launch.slurm import main as submit_main

    return submit_main(args, configure)


def doctor(args: list[str]) -> int:
    """Check this machine, or the ranks that were started."""
    from areal_hpc.doctor import main as doctor_main

    return doctor_main(args)


def recipes(args: list[str]) -> int:
    """List the recipes with their first line of documentation."""
    from areal_hpc.recipes import RECIPES

    for name, function in RECIPES.items():
        print(f"{name:12s} {(function.__doc__ or '').splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
