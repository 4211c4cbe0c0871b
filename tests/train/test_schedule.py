"""Learning rates against the formulas."""

import math

import numpy as np
import pytest

from areal_hpc.config import Train
from areal_hpc.train.schedule import learning_rate

from .cases import local_batch, tiny_trainer, trajectories


def rates(num_updates=100, **options):
    train = Train(lr=2.0, **options)
    return np.array([learning_rate(train, n) for n in range(num_updates)])


def test_constant_after_the_warm_up():
    np.testing.assert_allclose(rates(6, warmup_steps=4), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert (rates(6) == 2.0).all()


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_from_the_peak_to_the_final_share(schedule):
    """20 steps of 2 updates, 10 of them warm-up: update 10 has the peak, update 39, the last one, 30 % of it; then it stays."""
    found = rates(60, schedule=schedule, final_lr_share=0.3, warmup_steps=10, num_steps=20, num_minibatches=2)
    progress = np.arange(30) / 29
    falling = {"cosine": 0.3 + 0.7 * (1 + np.cos(math.pi * progress)) / 2, "linear": 1 - 0.7 * progress}[schedule]
    np.testing.assert_allclose(found[:10], 2 * np.arange(1, 11) / 10)
    np.testing.assert_allclose(found[10:40], 2 * falling)
    np.testing.assert_allclose(found[40:], 0.6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_final_share_is_a_tenth_unless_set(schedule):
    assert rates(10, schedule=schedule, num_steps=10)[-1] == pytest.approx(0.2)
    assert rates(1, schedule=schedule, num_steps=1)[0] == 2.0
    assert rates(5, schedule=schedule, num_steps=2, warmup_steps=5)[-1] == 2.0  # all warm-up


def test_a_resumed_trainer_goes_on_where_it_stopped():
    """The rate depends on the updates done alone, which the checkpoint keeps."""
    batch, options = local_batch(trajectories(0)), {"schedule": "cosine", "num_steps": 6}
    whole, first, second = (tiny_trainer(**options) for _ in range(3))
    expected = [whole.train_batch(batch).lr for _ in range(6)]
    found = [first.train_batch(batch).lr for _ in range(3)]
    state = second.state_dict()
    for name, tensor in first.state_dict().items():
        state[name].copy_(tensor)
    second.load_state_dict(state)
    assert found + [second.train_batch(batch).lr for _ in range(3)] == expected
    assert len(set(expected)) == 5  # two of warm-up, the second of them the peak, where the cosine begins
