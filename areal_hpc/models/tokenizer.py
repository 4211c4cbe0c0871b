"""Tokenizers in Hugging Face format: read from a model's folder, or built for the small model from the characters of its problems.

The built one has one token per character (per byte of a character outside ASCII), plus one for each phrase that all questions of a source share (a reasoning-gym
task wraps its numbers in the same words every time) and one for the answer marker: prompts stay as short as their content. Decoding is the exact inverse of
encoding for texts without unknown characters. It is a byte-level BPE without merges, not a plain word list, because transformers 5 replaces whatever a folder
of model type qwen2 holds by a byte-level BPE over its vocabulary: this one reads the same either way.

Only the `tokenizers` package is imported here; `transformers.AutoTokenizer` reads the saved folder as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from areal_hpc.config import ConfigError
from areal_hpc.data.datasets import GOLD_MARKER, Problem, Problems

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WORKED_CHARACTERS = "0123456789+-*/%=(). \n#"
MIN_PHRASE_CHARS = 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")


class Tokenizer:
    """Text <-> int32 token ids. Texts may hold the names of special tokens ("<eos>"): they are read as those tokens, as Hugging Face does."""

    def __init__(self, files: dict[str, bytes], stop_tokens: Sequence[str | int]) -> None:
        """`files`: name -> content, tokenizer.json among them; `stop_tokens`: names or ids that end an answer, the end-of-sequence token first."""
        self.files = files
        """What `save` writes, byte for byte."""
        self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        unknown_stops = [token for token in stop_tokens if isinstance(token, str) and token not in known]
        assert not unknown_stops, f"unknown stop tokens {unknown_stops}"
        ids = [known[token] if isinstance(token, str) else token for token in stop_tokens]
        self.eos_token_id: int = ids[0]
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(set(ids)))
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown_id = self._tokenizer.token_to_id(unknown) if unknown else None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder. Raises ConfigError when tokenizer.json or an end-of-sequence token is missing or unreadable.

        End tokens: `eos_token` of tokenizer_config.json and every `eos_token_id` of generation_config.json and config.json.
        """
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; a model folder holds config.json, *.safetensors and tokenizer.json")
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        settings = {name: _read_json(folder / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")}
        eos = settings["tokenizer_config.json"].get("eos_token")
        stops: list[str | int] = [] if eos is None else [eos["content"] if isinstance(eos, dict) else eos]
        for name in ("generation_config.json", "config.json"):
            found = settings[name].get("eos_token_id")
            stops += [] if found is None else found if isinstance(found, list) else [found]
        if not stops:
            raise ConfigError(f"{folder}: no end-of-sequence token; give eos_token in tokenizer_config.json or eos_token_id in generation_config.json")
        try:
            return cls(files, stops)
        except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
            raise ConfigError(f"{folder}/tokenizer.json: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included (a model's embedding may be padded beyond it)."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def pad_token_id(self) -> int:
        """The token named <pad>, or the end-of-sequence token where a model has none."""
        found = self._tokenizer.token_to_id(PAD)
        return self.eos_token_id if found is None else found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids, int32 [T]; with the special tokens that the model puts around a text (the built tokenizer puts none)."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=skip_special_tokens)

    def count_unknown(self, tokens: Sequence[int] | np.ndarray) -> int:
        """How many of the tokens stand for characters that the vocabulary lacks (0 for byte-level tokenizers, which lack none)."""
        return 0 if self._unknown_id is None else int(np.count_nonzero(np.asarray(tokens) == self._unknown_id))

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into a folder that `from_folder` and `transformers.AutoTokenizer` read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def build(problems: Problems, extra_characters: str = "", extra_phrases: Sequence[str] = ()) -> Tokenizer:
    """The character tokenizer for these problems; `extra_characters` occur beside them (the prompt suffix), `extra_phrases` are one token each.

    Deterministic: ids follow sorted order, phrases come last.
    """
    every = [*problems.train, *problems.heldout]
    texts = (text for problem in every for text in (problem.question, problem.answer, problem.solution))
    characters = "".join(set(WORKED_CHARACTERS + extra_characters).union(*texts))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = sorted({symbol for word, _ in byte_level.pre_tokenize_str(characters) for symbol in word})  # one printable character for each byte
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNK, *symbols])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in (GOLD_MARKER, *shared_phrases(every), *extra_phrases)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2)}
    return Tokenizer({name: content.encode() for name, content in files.items()}, [EOS])


def shared_phrases(problems: Iterable[Problem]) -> list[str]:
    """What all questions of a source begin and end with, cut back to the last (first) character that is not a letter or digit; short ones do not pay."""
    questions: dict[str, set[str]] = {}
    for problem in problems:
        questions.setdefault(problem.source, set()).add(problem.question)
    phrases = set()
    for texts in questions.values():
        if len(texts) > 1:
            head = os.path.commonprefix(list(texts))
            rest = [text[len(head) :] for text in texts]
            tail = os.path.commonprefix([text[::-1] for text in rest])
            phrases |= {_whole_words(head), _whole_words(tail)[::-1]}
    return sorted(phrase for phrase in phrases if len(phrase) >= MIN_PHRASE_CHARS)


def _whole_words(prefix: str) -> str:
    while prefix and prefix[-1].isalnum():
        prefix = prefix[:-1]
    return prefix
