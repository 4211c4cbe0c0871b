"""Hugging Face folders: what we write transformers reads, and the other way round; damage is named; writing is atomic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from areal_hpc.config import ConfigError
from areal_hpc.models import hf
from areal_hpc.models.decoder import Packed
from tests.models.tiny import ARCHITECTURES, reference_model, weights_of

TOKENS = torch.arange(20) % 7


def logprobs_of(decoder: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return decoder(Packed.build([TOKENS], [1]), temperature=1.0).logprobs_M


def reference_logprobs(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(TOKENS[None]).logits[0, :-1], -1).gather(1, TOKENS[1:, None]).squeeze(1)


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 4096], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_reads_what_we_write(name: str, max_file_bytes: int, tmp_path: Path) -> None:
    reference = reference_model(name)
    config = hf.DecoderConfig.from_hf(reference.config.to_dict())
    hf.save(tmp_path / "out", config.to_hf(), weights_of(reference), {"tokenizer.json": b"{}"}, max_file_bytes=max_file_bytes)
    assert (tmp_path / "out" / hf.INDEX_FILE).exists() == (max_file_bytes == 4096)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(reference_logprobs(again), reference_logprobs(reference))
    torch.testing.assert_close(logprobs_of(hf.load_decoder(tmp_path / "out")), reference_logprobs(reference), atol=1e-5, rtol=0)
    assert hf.tokenizer_files(tmp_path / "out") == {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_we_read_what_transformers_writes(name: str, tmp_path: Path) -> None:
    reference = reference_model(name)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    torch.testing.assert_close(logprobs_of(hf.load_decoder(tmp_path)), reference_logprobs(reference), atol=1e-5, rtol=0)


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = hf.DecoderConfig.from_hf(reference_model("qwen2-tied").config.to_dict())
    first, again, other = (dict(hf.build_random(config, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert first["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    reference = reference_model("qwen2-tied")
    hf.save(folder, hf.DecoderConfig.from_hf(reference.config.to_dict()).to_hf(), weights_of(reference))
    return dict(hf.load_weights(folder))


def rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    hf.save(folder, json.loads((folder / "config.json").read_text()), weights.items())


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    weights = saved(tmp_path / "m")
    norm = "model.norm.weight"
    rewrite(tmp_path / "m", {name: tensor for name, tensor in weights.items() if name != norm})
    with pytest.raises(ConfigError, match=f"1 weights are missing, first {norm}"):
        hf.load_decoder(tmp_path / "m")
    rewrite(tmp_path / "m", weights | {"model.extra": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"unknown weight model\.extra"):
        hf.load_decoder(tmp_path / "m")
    rewrite(tmp_path / "m", weights | {norm: torch.zeros(5)})
    with pytest.raises(ConfigError, match=r"norm\.weight has shape \(5,\), config\.json needs \(32,\)"):
        hf.load_decoder(tmp_path / "m")
    rewrite(tmp_path / "m", weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    hf.load_decoder(tmp_path / "m")  # a tied head saved twice is what some tools write


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        hf.load_config(tmp_path)
    saved(tmp_path / "m")
    weights_file = tmp_path / "m" / hf.SINGLE_FILE
    weights_file.write_bytes(weights_file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors: "):
        hf.load_decoder(tmp_path / "m")
    weights_file.unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: no such file"):
        hf.load_decoder(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        hf.load_config(tmp_path / "m")


def test_a_failed_save_leaves_the_old_model(tmp_path: Path) -> None:
    before = saved(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(32)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hf.save(tmp_path / "m", config, breaks())
    after = dict(hf.load_weights(tmp_path / "m"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved(tmp_path / "m")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"], "nothing half-written is left beside the model"
