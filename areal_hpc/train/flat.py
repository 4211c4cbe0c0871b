"""Steps that teach nothing: every answer has the same reward, or every advantage is zero. One such step is chance, many in a row are a fault of data, reward or model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class FlatSteps:
    """Counts such steps in a row. Example: `for kind, text in flat.look(step, rewards, advantages): log.event(...)`."""

    num_steps: int
    """In a row, from which on it is said; 0: never."""
    num_flat: int = 0

    def look(self, step: int, rewards: np.ndarray, advantages: np.ndarray) -> list[tuple[str, str]]:
        """(kind, text) of what is to be said after a step with these rewards (of graded answers) and advantages (of trained ones): nothing, or one thing."""
        same = len(rewards) > 0 and bool((rewards == rewards[0]).all())
        if not same and advantages.any():
            told, self.num_flat = 0 < self.num_steps <= self.num_flat, 0
            return [("flat_over", f"step {step}: rewards differ again, and there are advantages")] if told else []
        self.num_flat += 1
        if self.num_flat != self.num_steps:
            return []
        what = f"every answer had reward {rewards[0]:g} in the last step, and" if same else "rewards differ, but never within a group:"
        return [("flat", f"step {step}: {what} no advantage was other than zero for {self.num_flat} steps: nothing is learnt (train.flat_alarm)")]
