"""Recipes: functions that return a complete configuration. `areal-hpc run NAME` starts from one; options change single fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from areal_hpc.config import Config, ConfigError, Data, Environment, Evaluation, Generation, Model, Reward, Staleness, Topology, Train, Transport, Watchdog

PROGRAMS = Path(__file__).parent / "data" / "programs.jsonl"
"""Small programming problems with tests and solutions, written for this package."""


def laptop() -> Config:
    """What `make demo` runs: a 1 M parameter model, warm-started on the spot, learns to write out sums step by step, on two cores."""
    return Config(
        recipe="laptop",
        data=Data(tasks=("chain_sum",), min_terms=3, max_terms=6, max_digits=1, max_prompt_tokens=64),
        generation=Generation(max_new_tokens=96, max_num_running=64),
        staleness=Staleness(max_staleness=4),
        train=Train(num_steps=150, batch_size=128, group_size=8, lr=5e-5, warmup_steps=10),
        evaluation=Evaluation(num_problems=512, every=50),
        topology=Topology(num_ranks=2),
    )


def smoke() -> Config:
    """A few steps of a tiny model on any machine, in seconds: is everything installed?"""
    return Config(
        recipe="smoke",
        model=Model(
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=128,
            warmstart_steps=5,
            warmstart_direct_steps=0,
            warmstart_batch_size=16,
        ),
        data=Data(size=600, max_terms=3, max_digits=1),
        generation=Generation(max_new_tokens=32, max_num_running=16),
        staleness=Staleness(max_staleness=2),
        train=Train(num_steps=4, batch_size=16, group_size=4, lr=1e-3),
        evaluation=Evaluation(num_problems=32),
        topology=Topology(num_ranks=3),
    )


def tiny_vllm() -> Config:
    """The task and model of `laptop` with vLLM as the engine, in its own environment (env/bootstrap vllm): thirty steps."""
    base = laptop()
    return replace(
        base,
        recipe="tiny-vllm",
        generation=replace(base.generation, engine="vllm"),
        train=replace(base.train, num_steps=30),
        evaluation=replace(base.evaluation, num_problems=256, every=0),
    )


def mixed() -> Config:
    """Three tasks at once with the small model of `laptop`, by weight and each at a difficulty of its own: does getting better at one cost another?"""
    return Config(
        recipe="mixed",
        data=Data(
            tasks=("chain_sum", "products", "gcd"),
            task_weights=(2, 1, 1),
            task_options=("chain_sum.min_terms=3", "chain_sum.max_terms=5", "products.max_terms=2", "products.max_digits=2", "gcd.max_value=99"),
            max_digits=1,
            max_prompt_tokens=64,
        ),
        generation=Generation(max_new_tokens=96, max_num_running=64),
        staleness=Staleness(max_staleness=4),
        train=Train(num_steps=150, batch_size=128, group_size=8, lr=5e-5, warmup_steps=10),
        evaluation=Evaluation(num_problems=512, every=50),
        topology=Topology(num_ranks=2),
    )


def tool() -> Config:
    """The small model may have Python do its sums: warm-started on answers that call the python environment, and then on guesses alone; it learns when to call."""
    return Config(
        recipe="tool",
        model=Model(num_layers=2, hidden_size=64, intermediate_size=128, warmstart_steps=160, warmstart_direct_steps=30, warmstart_batch_size=32),
        data=Data(tasks=("chain_sum",), size=4000, worked="python", min_terms=2, max_terms=4, max_digits=1, max_prompt_tokens=48),
        environment=Environment(name="python", max_turns=3),
        generation=Generation(max_new_tokens=80, max_num_running=64),
        staleness=Staleness(max_staleness=2),
        train=Train(num_steps=20, batch_size=64, group_size=8, lr=2e-4, warmup_steps=5),
        evaluation=Evaluation(num_problems=128),
        topology=Topology(num_ranks=2),
    )


def code() -> Config:
    """Programs for two dozen small problems, run in a sandbox against their tests. The small model has learned solutions of the training problems, not to program."""
    return Config(
        recipe="code",
        model=Model(num_layers=2, hidden_size=64, intermediate_size=128, warmstart_steps=80, warmstart_direct_steps=0, warmstart_batch_size=32),
        data=Data(path=str(PROGRAMS), heldout_fraction=0.2, max_prompt_tokens=96),
        generation=Generation(max_new_tokens=128, max_num_running=32),
        staleness=Staleness(max_staleness=2),
        train=Train(num_steps=10, batch_size=32, group_size=8, lr=2e-4, warmup_steps=5),
        reward=Reward(code_cpu_s=2.0),
        evaluation=Evaluation(num_problems=16, num_samples=4),
        topology=Topology(num_ranks=2),
    )


def areal_64gpu() -> Config:
    """The paper's setting on 64 GPUs (48 generate, 16 train); needs --model.path, and --data.path for real problems (slurm/areal_64gpu.sh)."""
    return Config(
        recipe="areal-64gpu",
        model=Model(dtype="bfloat16", warmstart_steps=5, warmstart_direct_steps=0, warmstart_batch_size=16),
        data=Data(max_prompt_tokens=1024),
        generation=Generation(max_new_tokens=27648, max_num_running=64),
        staleness=Staleness(max_staleness=4),
        train=Train(num_steps=250, batch_size=8192, group_size=16, num_minibatches=4, lr=2e-5, microbatch_tokens=32768, activation_checkpointing="layer"),
        evaluation=Evaluation(num_problems=512, every=25),
        topology=Topology(num_ranks=64, generation_fraction=0.75),
        transport=Transport(lane_bytes=32 << 20, data_deadline_s=3600, push_deadline_s=300, start_deadline_s=1800),
        watchdog=Watchdog(
            stop_deadline_s=840
        ),  # a minute before the end of a job that is told fifteen before it: the step under way, and a checkpoint of 18 GB
    )


def areal_64gpu_sync() -> Config:
    """The synchronous twin of areal-64gpu: the same code with eta = 0, each batch generated by the version that it trains."""
    return replace(areal_64gpu(), recipe="areal-64gpu-sync", staleness=Staleness(max_staleness=0))


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__.replace("_", "-"): recipe for recipe in (laptop, smoke, tiny_vllm, mixed, tool, code, areal_64gpu, areal_64gpu_sync)
}


def recipe(name: str) -> Config:
    """The configuration of a recipe. Raises ConfigError with the names there are."""
    if name not in RECIPES:
        import difflib

        near = difflib.get_close_matches(name, RECIPES, n=1)
        raise ConfigError(f"unknown recipe '{name}'{f'; did you mean {near[0]}?' if near else ''}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]()
