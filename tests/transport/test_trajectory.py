"""The ring record of a group: what goes in comes out, bit for bit, whatever the lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import Config, Data, Generation, Train, record_bytes
from areal_hpc.transport.trajectory import ALIGNMENT, Group, Status, Trajectory, group_bytes, read_group, read_table, record_size, write_group


def make_group(ticket: int, prompt_length: int, lengths: list[int], seed: int) -> Group:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 2**31 - 1, prompt_length).astype(np.int32)
    return Group(
        ticket,
        tuple(
            Trajectory(
                ticket=ticket,
                sample=int(sample),
                prompt_P=prompt,
                tokens_R=rng.integers(0, 2**31 - 1, length).astype(np.int32),
                logprobs_R=-rng.exponential(size=length).astype(np.float32),
                versions_R=np.sort(rng.integers(0, 9, length)).astype(np.int32),
                loss_mask_R=rng.random(length) < 0.5,
                num_turns=int(rng.integers(1, 9)),
                reward=float(rng.choice([5.0, -5.0, np.nan])),
                status=Status(int(rng.integers(len(Status)))),
                generated_s=float(np.float32(rng.random())),
                graded_s=float(np.float32(rng.random())),
            )
            for sample, length in zip(rng.permutation(len(lengths)), lengths, strict=True)
        ),
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**50), st.integers(1, 70), st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(0, 2**32))
def test_round_trip(ticket: int, prompt_length: int, lengths: list[int], seed: int) -> None:
    group = make_group(ticket, prompt_length, lengths, seed)
    size = group_bytes(group)
    assert size % ALIGNMENT == 0
    buffer = np.full(size + 64, 0xAB, np.uint8)
    write_group(group, buffer[:size])
    assert (buffer[size:] == 0xAB).all(), "written beyond the record"
    assert record_size(buffer) == size
    back = read_group(buffer[:size])
    assert back.ticket == ticket
    for found, expected in zip(back.trajectories, group.trajectories, strict=True):
        for name in ("prompt_P", "tokens_R", "logprobs_R", "versions_R", "loss_mask_R"):
            assert getattr(found, name).dtype == getattr(expected, name).dtype
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes()
        for name in ("ticket", "sample", "status", "generated_s", "graded_s", "num_tokens", "num_sampled", "num_turns", "start_version"):
            assert getattr(found, name) == getattr(expected, name)
        np.testing.assert_equal(found.reward, expected.reward)
    read_ticket, prompt_tokens, table = read_table(buffer[:size])
    assert (read_ticket, prompt_tokens) == (ticket, prompt_length)
    assert table["num_tokens"].tolist() == lengths
    assert table["num_sampled"].tolist() == [int(t.loss_mask_R.sum()) for t in group.trajectories]
    assert int(table["version_min"].min()) == group.start_version
    buffer[:] = 0  # the slot is released and written again: what was read are copies
    assert back.trajectories[0].tokens_R.tobytes() == group.trajectories[0].tokens_R.tobytes()


def test_record_bound_of_the_configuration_holds() -> None:
    """`config.record_bytes` is what the lane is checked against before a run: no group may be larger."""
    config = Config(data=Data(max_prompt_tokens=33), generation=Generation(max_new_tokens=77), train=Train(batch_size=7, group_size=7))
    largest = make_group(0, 33, [77] * 7, 0)
    assert group_bytes(largest) <= record_bytes(config)
