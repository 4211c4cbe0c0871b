"""The learning rate: a function of the updates done, so that a resumed run goes on where it stopped."""

from __future__ import annotations

import math

from areal_hpc.config import Train
from areal_hpc.objectives import settings


def learning_rate(train: Train, num_updates: int) -> float:
    """Of the update that follows `num_updates` finished ones: linear warm-up over `warmup_steps`, then the schedule.

    cosine and linear reach `final_lr_share` of the peak at the last of num_steps * num_minibatches updates (skipped ones do not count) and stay there.
    """
    warm = train.lr * min(1.0, (num_updates + 1) / max(1, train.warmup_steps))
    share = settings(train).final_lr_share
    if share is None or num_updates < train.warmup_steps:
        return warm
    last = train.num_steps * train.num_minibatches - 1
    progress = min(1.0, (num_updates - train.warmup_steps) / max(1, last - train.warmup_steps))
    fallen = 0.5 * (1 - math.cos(math.pi * progress)) if train.schedule == "cosine" else progress
    return train.lr * (1 - (1 - share) * fallen)
