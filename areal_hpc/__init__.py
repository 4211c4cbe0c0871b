"""areal_hpc: fully asynchronous reinforcement learning of reasoning models as one MPI job."""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`areal_hpc.submit`, loaded when it is asked for: everything imports this package, and only who submits jobs needs submitit."""
    if name == "submit":
        return importlib.import_module("areal_hpc.launch.slurm").submit
    raise AttributeError(f"module 'areal_hpc' has no attribute '{name}'")
