"""The character tokenizer, and reading Hugging Face folders; `transformers` is the independent reader."""

import json
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.config import ConfigError, Data
from areal_hpc.data.datasets import Problem, Problems, load_problems
from areal_hpc.data.worked import worked_solution
from areal_hpc.models.tokenizer import Tokenizer, build, shared_phrases

TASKS = ("chain_sum", "gcd", "lcm", "products", "basic_arithmetic")
ALPHABET = string.ascii_letters + string.digits + " \n+-*/=%().,:#é€"
PRINTED = Problems((Problem(0, ALPHABET, "1", "file"),), (), "")


@pytest.fixture(scope="module")
def problems():
    return load_problems(Data(tasks=TASKS, size=1000))


@pytest.fixture(scope="module")
def tokenizer(problems):
    return build(problems, "\n")


def test_problems_and_worked_solutions_come_back_unchanged_and_prompts_are_short(problems, tokenizer):
    for problem in [*problems.train, *problems.heldout]:
        prompt, solution = problem.question + "\n", worked_solution(problem)
        prompt_P, tokens_R = tokenizer.encode(prompt), tokenizer.encode(solution)
        assert prompt_P.dtype == np.int32
        assert tokenizer.decode(prompt_P) == prompt and tokenizer.decode(tokens_R) == solution
        assert tokenizer.count_unknown(np.concatenate([prompt_P, tokens_R])) == 0
        assert tokenizer.eos_token_id not in tokens_R
        content = sum(character.isdigit() or character in "+-*/()" for character in problem.question)
        assert len(prompt_P) <= 2 * content + 6  # the numbers and the spaces between them: the words around them are single tokens
    assert tokenizer.vocab_size < 80


@given(st.text(ALPHABET))
def test_decoding_inverts_encoding(text):
    tokenizer = build(PRINTED)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.count_unknown(tokens) == 0


def test_unknown_characters_are_counted(tokenizer):
    assert tokenizer.count_unknown(tokenizer.encode("1@2~3")) == 2


def test_shared_phrases_end_at_words_and_are_found_per_source():
    questions = ["Add the numbers 12 and 13, please.", "Add the numbers 15 and 1, please.", "Add the numbers 1 and 133, please."]
    assert shared_phrases([Problem(i, q, "", "a") for i, q in enumerate(questions)]) == [", please.", "Add the numbers "]
    assert shared_phrases([Problem(0, "Only one question here.", "", "a")]) == []
    assert shared_phrases([Problem(0, "Same words.", "", "a"), Problem(1, "Same words.", "", "b")]) == []


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", ""])
def test_auto_tokenizer_reads_the_saved_folder(tmp_path, problems, tokenizer, model_type):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": tokenizer.vocab_size}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for problem in problems.train[:50]:
        text = f"{problem.question}\n{worked_solution(problem)}<eos>"
        tokens = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == tokens.tolist()
        assert tokens[-1] == theirs.eos_token_id == tokenizer.eos_token_id
        assert theirs.decode(tokens) == text
    assert theirs.pad_token_id == tokenizer.pad_token_id and len(theirs) == tokenizer.vocab_size


def test_saving_and_reading_keeps_every_byte(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "a")
    again = Tokenizer.from_folder(tmp_path / "a")
    assert (again.vocab_size, again.eos_token_id, again.stop_token_ids) == (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.stop_token_ids)
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer.from_folder(tmp_path / "a").save(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}, "generation_config.json": {"eos_token_id": [2, 1]}}, (1, 2)),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, (1, 2)),
        ({"config.json": {"eos_token_id": 2}}, (2,)),
    ],
)
def test_stop_tokens_of_a_folder(tmp_path, tokenizer, files, stops):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = Tokenizer.from_folder(tmp_path)
    assert found.stop_token_ids == stops
    assert found.eos_token_id == (1 if "tokenizer_config.json" in files else 2)


def test_folders_that_hold_no_tokenizer(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "absent")
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: "):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ConfigError, match="unknown stop tokens"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json: "):
        Tokenizer.from_folder(tmp_path)
