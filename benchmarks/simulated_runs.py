"""The simulator against short runs of ours: costs fitted from one job's log, throughput and mean staleness of others predicted, then measured.

    .venv/bin/python benchmarks/simulated_runs.py [--steps 60]        # seven jobs of two ranks, about three minutes on 2 free cores

The model is small and random (no warm start, no evaluation worth the name); the fit sees eta = 2 and B = 32 only. Held out: eta 0, 1 and 4, B = 64, answers cut at
half the length. The last row is the fitted job again: its error is the machine's own. Ranks must have cores of their own: on a machine that others use, times say
little, and the load is printed. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from areal_hpc.config import Config, Data, Evaluation, Generation, Model, Staleness, Topology, Train
from areal_hpc.config_io import save_yaml
from areal_hpc.observe.telemetry import hardware
from areal_hpc.simulate import fit

AIM = 0.10


def base(steps: int) -> Config:
    """The job that is fitted."""
    return Config(
        recipe="smoke",
        model=Model(warmstart_steps=0, warmstart_direct_steps=0),
        data=Data(size=2000, max_terms=3, max_digits=1, max_prompt_tokens=64),
        generation=Generation(max_new_tokens=96, max_num_running=32),
        staleness=Staleness(max_staleness=2),
        train=Train(num_steps=steps, batch_size=32, group_size=4, lr=1e-6),
        evaluation=Evaluation(num_problems=1, save_samples=0, save_training_groups=0),
        topology=Topology(num_ranks=2),
    )


def settings(config: Config) -> dict[str, Config]:
    """Held-out settings by name."""
    return {
        "eta = 0": replace(config, staleness=Staleness(max_staleness=0)),
        "eta = 1": replace(config, staleness=Staleness(max_staleness=1)),
        "eta = 4": replace(config, staleness=Staleness(max_staleness=4)),
        "B = 64": replace(config, train=replace(config.train, batch_size=64)),
        "answers cut at 48": replace(config, generation=replace(config.generation, max_new_tokens=48)),
        "the fitted job again": replace(config, seed=1),
    }


def run(config: Config, run_dir: Path) -> None:
    """One job. Raises CalledProcessError when it fails."""
    described = run_dir.with_name(run_dir.name + ".yaml")
    save_yaml(replace(config, run_dir=str(run_dir)), described)
    command = [sys.executable, "-m", "areal_hpc", "run", "smoke", "--config", str(described)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    config = base(parser.parse_args().steps)
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "fitted")
        fitted = fit.fit(Path(folder) / "fitted")
        print("fitted: " + ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in fitted.parameters().items()))
        print(f"{'held out':20s} {'tokens/s':>10s} {'predicted':>10s} {'error':>8s} {'age':>6s} {'predicted':>10s} {'error':>8s}")
        for name, changed in {"(the fitted job)": config, **settings(config)}.items():
            run_dir = Path(folder) / (name.strip("()").replace(" ", "-") if changed is not config else "fitted")
            if changed is not config:
                run(changed, run_dir)
            measured, predicted = fit.fit(run_dir), fit.predict(fitted.job(changed))
            errors = [predicted.tokens_per_s / measured.tokens_per_s - 1, predicted.staleness_mean - measured.staleness_mean]
            relative = errors[1] / measured.staleness_mean if measured.staleness_mean else errors[1]
            print(
                f"{name:20s} {measured.tokens_per_s:10,.0f} {predicted.tokens_per_s:10,.0f} {100 * errors[0]:+7.1f}% "
                f"{measured.staleness_mean:6.2f} {predicted.staleness_mean:10.2f} {100 * relative:+7.1f}%",
                flush=True,
            )
            rows.append(
                {"setting": name, "held_out": changed is not config, "tokens_per_s": measured.tokens_per_s, "predicted_tokens_per_s": predicted.tokens_per_s}
                | {
                    "error": errors[0],
                    "staleness_mean": measured.staleness_mean,
                    "predicted_staleness_mean": predicted.staleness_mean,
                    "staleness_error": relative,
                }
            )
    held = [row for row in rows if row["held_out"]]
    within = sum(bool(abs(row["error"]) <= AIM and abs(row["staleness_error"]) <= AIM) for row in held)
    print(f"{within} of {len(held)} held-out settings within {100 * AIM:.0f} %; load of the machine before: {load:.1f}")
    print(
        json.dumps(
            {"benchmark": "simulated_runs", "hardware": hardware(), "load_before": load, "parameters": fitted.parameters(), "rows": rows, "within": within}
        )
    )


if __name__ == "__main__":
    main()
