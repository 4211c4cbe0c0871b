"""Recipes: functions that return a complete configuration. `areal-hpc run NAME` starts from one; options change single fields."""

from __future__ import annotations

from collections.abc import Callable

from areal_hpc.config import Config, ConfigError, Data, Evaluation, Generation, Model, Staleness, Topology, Train


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


RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__.replace("_", "-"): recipe for recipe in (laptop, smoke, mixed)}


def recipe(name: str) -> Config:
    """The configuration of a recipe. Raises ConfigError with the names there are."""
    if name not in RECIPES:
        import difflib

        near = difflib.get_close_matches(name, RECIPES, n=1)
        raise ConfigError(f"unknown recipe '{name}'{f'; did you mean {near[0]}?' if near else ''}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]()
