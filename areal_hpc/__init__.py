"""areal_hpc: fully asynchronous reinforcement learning of reasoning models as one MPI job."""

__version__ = "0.1.0"
