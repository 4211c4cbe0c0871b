"""State of a process's random number generators as plain arrays: Python's, NumPy's, torch's, and that of its GPU.

Nothing that decides what a run computes draws from them: sampling is counter-based (seed, ticket, sample, position), so its state is the position. They are saved
for what users plug in: a reward or an environment may draw in the rank's process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def capture() -> dict[str, np.ndarray]:
    """Copies of all states."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=True)  # noqa: NPY002  (the generator that plugged-in code uses by default)
    assert isinstance(numpy_state, tuple)
    found = {
        "python": np.array(internal, np.int64),
        "python_gauss": np.array([version, float("nan") if gauss is None else gauss]),
        "numpy": np.asarray(numpy_state[1], np.uint32),
        "numpy_gauss": np.array([float(part) for part in numpy_state[2:]]),
        "torch": torch.get_rng_state().numpy().copy(),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return found


def restore(state: Mapping[str, np.ndarray]) -> None:
    """Go on from a captured state; that of a GPU is taken over where there is one on both sides."""
    version, gauss = state["python_gauss"].tolist()
    random.setstate((int(version), tuple(state["python"].tolist()), None if np.isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", state["numpy"], int(position), int(has_gauss), cached))  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"].copy()))
