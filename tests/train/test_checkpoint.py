"""What a checkpoint holds of the trainer: bit-equal continuation, atomic replacement, disks that refuse, export that `transformers` reads."""

import subprocess

import numpy as np
import pytest
import torch

from areal_hpc import checkpoints
from areal_hpc.checkpoints import partial_of
from areal_hpc.config import ConfigError
from areal_hpc.models import hf
from areal_hpc.models.decoder import Packed
from areal_hpc.train import checkpoint

from .cases import TINY, local_batch, save_checkpoint, tiny_trainer, trajectories

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single rank needs no process group
META = {"step": 2, "closed": [[0, 3]], "fingerprint": "abc"}


@pytest.fixture
def trained():
    trainer = tiny_trainer()
    for seed in range(2):
        trainer.train_batch(local_batch(trajectories(seed), num_minibatches=2))
    return trainer


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.full_state()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_resumed_run_continues_bit_for_bit(tmp_path, trained):
    folder = tmp_path / "step-000002"
    save_checkpoint(folder, trained, META)
    resumed = tiny_trainer()
    assert checkpoint.load_checkpoint(folder, resumed) == {"format": checkpoints.FORMAT} | META
    assert same(weights(resumed), weights(trained))
    assert (resumed.policy_version, resumed.num_updates) == (2, 4)
    stats = [t.train_batch(local_batch(trajectories(9), num_minibatches=2)) for t in (trained, resumed)]
    assert stats[0] == stats[1]
    assert same(weights(resumed), weights(trained))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000002"]  # nothing temporary stays
    assert checkpoints.fault(folder) == ""


def test_the_copy_is_of_the_cut(tmp_path, trained):
    """Training goes on between the copy and the writing of it: the files hold the parameters of the moment of the copy."""
    state, before = checkpoint.copy_state(trained), weights(trained)
    trained.train_batch(local_batch(trajectories(5)))
    assert not same(weights(trained), before)
    partial = partial_of(tmp_path / "step-000002")
    files = checkpoint.write_parameters(partial, state, 0, None) + checkpoint.write_model_files(partial, TINY, {})
    checkpoints.finish(tmp_path / "step-000002", files, META)
    resumed = tiny_trainer()
    checkpoint.load_checkpoint(tmp_path / "step-000002", resumed)
    assert same(weights(resumed), before) and resumed.policy_version == 2


def test_a_full_disk_is_an_error_with_a_reason_and_nothing_worse(tmp_path, trained):
    """ENOSPC in the middle of torch's writer: OSError, no crash; with room again the same call succeeds."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        with pytest.raises(OSError, match="No space left on device"):
            checkpoint.write_parameters(disk / "step.tmp", checkpoint.copy_state(trained), 0, None)
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        save_checkpoint(disk / "step", trained, META)
        assert checkpoints.fault(disk / "step") == ""
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_incomplete_checkpoint_is_refused_and_the_old_one_survives(tmp_path, trained):
    folder = tmp_path / "step-000002"
    save_checkpoint(folder, trained, META)
    saved = weights(trained)
    trained.train_batch(local_batch(trajectories(2)))
    with pytest.raises(TypeError):
        save_checkpoint(folder, trained, {"not JSON": object()})
    assert same(dict(checkpoint.load_weights_from(folder)), saved)
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        checkpoint.read_meta(tmp_path / "step-000002.tmp")
    save_checkpoint(folder, trained, META)  # over the rest of the failed attempt
    assert same(dict(checkpoint.load_weights_from(folder)), weights(trained))


def test_export_loads_in_transformers_with_equal_logprobs(tmp_path, trained):
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path / "step", trained, META, {"tokenizer_config.json": b"{}"})
    checkpoint.export_checkpoint(tmp_path / "step", tmp_path / "out")
    checkpoint.save_model(tmp_path / "model", trained, TINY, {"tokenizer_config.json": b"{}"})
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == b"{}"
    tokens = np.arange(1, 20) % TINY.vocab_size
    with torch.no_grad():
        ours = trained.model.decoder(Packed.build([tokens], [1]), temperature=1.0).logprobs_M
        for folder in ("out", "model"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            logits = model(torch.tensor(tokens)[None]).logits[0, :-1]
            theirs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            assert same(dict(hf.load_weights(tmp_path / folder)), weights(trained))
            assert same(dict(checkpoint.load_weights_from(tmp_path / folder)), weights(trained))
