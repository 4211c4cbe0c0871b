"""The built model: read by `transformers` with the same loss, learns, cached under its settings, safe when two processes build it at once."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from areal_hpc.config import ConfigError, Data, Environment, Model, Reward
from areal_hpc.data.datasets import load_problems
from areal_hpc.data.prompts import Prompts
from areal_hpc.data.worked import worked_turns
from areal_hpc.models import hf
from areal_hpc.models.decoder import Packed
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.reward.environments import PythonTool
from areal_hpc.train import warmstart

MODEL = Model(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    warmstart_steps=60,
    warmstart_direct_steps=0,
    warmstart_batch_size=16,
    warmstart_lr=2e-3,
)
DATA = Data(size=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return warmstart.cached_model(MODEL, DATA, tmp_path_factory.mktemp("cache"), num_threads=1)


def test_learned_and_equal_to_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens, theirs, problems = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder), load_problems(DATA)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokens.eos_token_id
    reference, examples = [], [warmstart.example(problem, tokens, Prompts(DATA, tokens), with_steps=True) for problem in problems.heldout[:16]]
    for problem, (sequence, prompt, learned) in zip(problems.heldout, examples, strict=False):
        assert theirs(problem.question + DATA.suffix).input_ids == sequence[:prompt].tolist()
        assert sequence[-1] == tokens.eos_token_id and learned.all()
        labels = torch.tensor(np.where(np.arange(len(sequence)) < prompt, -100, sequence))[None]
        reference.append((float(model(torch.tensor(sequence)[None].long(), labels=labels.long()).loss.detach()), len(sequence) - prompt))
    expected = sum(loss * count for loss, count in reference) / sum(count for _, count in reference)
    sequences, prompt_lengths, _ = zip(*examples, strict=True)
    packed = Packed.build(sequences, prompt_lengths)
    with torch.no_grad():
        trained = -float(hf.load_decoder(folder)(packed).logprobs_M.mean())
        untrained = -float(hf.build_random(hf.load_config(folder), MODEL.warmstart_seed)(packed).logprobs_M.mean())
    assert trained == pytest.approx(expected, rel=1e-5)
    assert trained < 0.6 * untrained


@pytest.mark.parametrize("shape", [(32, 32), (64, 24), (24, 64)])
def test_muon_keeps_singular_vectors_and_levels_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    level = (u.T @ warmstart.orthogonalised(matrix) @ vh.T).numpy()  # diagonal if the singular vectors are the same
    np.testing.assert_allclose(level, np.diag(np.diag(level)), atol=1e-4)
    assert np.median(np.diag(level)) == pytest.approx(0.95, abs=0.25)
    assert np.diag(level).max() < 1.3


def test_cache_depends_on_the_settings(folder, tmp_path):
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert warmstart.cached_model(MODEL, DATA, folder.parent, num_threads=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1", "answer": "1+1=2\n#### 2"}))
    settings = [(MODEL, DATA), (dataclasses.replace(MODEL, warmstart_seed=1), DATA), (MODEL, dataclasses.replace(DATA, seed=1))]
    keys = [warmstart.cache_key(*pair) for pair in (*settings, (MODEL, dataclasses.replace(DATA, path=str(rows))))]
    rows.write_text(json.dumps({"question": "1+1", "answer": "1+1=3\n#### 3"}))
    keys.append(warmstart.cache_key(MODEL, dataclasses.replace(DATA, path=str(rows))))
    assert len(set(keys)) == 5


def test_the_loser_of_a_race_takes_the_winners_model(tmp_path, monkeypatch):
    """The second builder starts after the first has found the cache empty, and finishes before it."""
    build, inner = warmstart.warmstart, []
    model = dataclasses.replace(MODEL, warmstart_steps=1)

    def overtaken(*args):
        if not inner:
            inner.append(None)
            inner[0] = warmstart.cached_model(model, DATA, tmp_path, num_threads=1)
            (inner[0] / "winner").touch()
        build(*args)

    monkeypatch.setattr(warmstart, "warmstart", overtaken)
    outer = warmstart.cached_model(model, DATA, tmp_path, num_threads=1)
    assert inner == [outer]
    assert (outer / "winner").exists()
    assert list(tmp_path.iterdir()) == [outer]


def test_zero_steps_leave_random_weights_and_need_no_solutions(tmp_path):
    data = dataclasses.replace(DATA, tasks=("letter_counting",))
    with pytest.raises(ConfigError, match="no worked solution"):
        warmstart.cached_model(MODEL, data, tmp_path, num_threads=1)
    assert list(tmp_path.iterdir()) == []
    folder = warmstart.cached_model(dataclasses.replace(MODEL, warmstart_steps=0), data, tmp_path, num_threads=1)
    expected = hf.build_random(hf.load_config(folder), MODEL.warmstart_seed)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in hf.load_weights(folder))


def test_what_an_environment_says_is_read_and_not_learned():
    """data.worked=python: each turn of the model ends with the end token, the output of its program is what the tool would give, and only the model's turns count."""
    data = Data(size=60, worked="python")
    problems = load_problems(data)
    tokens = warmstart.build_tokenizer(problems, data)
    prompts = Prompts(data, tokens)
    tool = PythonTool(Environment(name="python"), Reward())
    try:
        for problem in problems.train[:5]:
            sequence, prompt, learned_R = warmstart.example(problem, tokens, prompts, with_steps=True, style=data.worked)
            parts = np.split(sequence[prompt:], np.flatnonzero(np.diff(learned_R.astype(int))) + 1)
            assert len(parts) == 3 and learned_R[0]
            assert parts[0][-1] == parts[2][-1] == tokens.eos_token_id
            call, shown, answer = (tokens.decode(part) for part in parts)
            assert tool(problem, (call,)) == shown and answer == f"#### {problem.answer}"
            assert tokens.count_unknown(sequence) == 0
            _, _, direct_R = warmstart.example(problem, tokens, prompts, with_steps=False, style=data.worked)
            assert direct_R.all() and len(direct_R) < len(learned_R)
    finally:
        tool.close()
    with pytest.raises(ConfigError, match=r"data\.worked=python.*chain_sum"):
        worked_turns(load_problems(Data(tasks=("gcd",), size=20)).train[0], "python")
