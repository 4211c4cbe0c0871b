"""Shape of a decoder of the Llama / Qwen family, read from and written to Hugging Face's `config.json`.

What is supported is checked here, once: an architecture or option that `Decoder` does not compute is refused by name, never approximated.
No torch here, so that the control plane can read model shapes on a login node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_hpc.config import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    model_type: str
    """One of `ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    """Longest context in tokens that the weights were trained for."""
    sliding_window: int | None = None
    """Attention window in tokens; contexts up to it are computed exactly, longer ones refused (see `max_context_tokens`)."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    """Standard deviation of random first weights."""

    @property
    def attention_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is RMS-normalised before the rotation."""
        return self.model_type == "qwen3"

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that is computed exactly as Hugging Face would."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens as a tuple, possibly empty."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """From the content of `config.json` (written by any transformers since 4.40). Raises ConfigError for what `Decoder` does not compute."""
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ConfigError(f"config.json: model_type={model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
        _refuse_variants(config)
        num_heads = config["num_attention_heads"]
        rope = _rope_parameters(config)
        windowed = model_type == "mistral" or (model_type.startswith("qwen") and config.get("use_sliding_window", False))
        eos = config.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=Llama3Rope(**{key: rope[key] for key in _ROPE_KEYS}) if rope["rope_type"] == "llama3" else None,
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            max_position_embeddings=config.get("max_position_embeddings", 32768),
            sliding_window=config.get("sliding_window") if windowed else None,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=config.get("pad_token_id"),
            initializer_range=config.get("initializer_range", 0.02),
        )

    def to_hf(self) -> dict[str, Any]:
        """Content of `config.json`, readable by transformers 4 and 5 and by vLLM. `from_hf(to_hf())` gives an equal object."""
        scaling = self.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if scaling is not None:
            rope |= {"rope_type": "llama3"} | {key: getattr(scaling, key) for key in _ROPE_KEYS}
        config = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {key: value for key, value in rope.items() if key != "rope_theta"},
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "initializer_range": self.initializer_range,
            "attention_dropout": 0.0,
            "dtype": "float32",
            "torch_dtype": "float32",
            "use_cache": True,
        }
        if self.model_type == "mistral" or self.sliding_window is not None:
            config["sliding_window"] = self.sliding_window
        if self.model_type.startswith("qwen"):
            config["use_sliding_window"] = self.sliding_window is not None
            config["max_window_layers"] = 0 if self.sliding_window is not None else self.num_hidden_layers
        if self.model_type in ("llama", "qwen3"):
            config["attention_bias"] = False
        return config


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; older ones `rope_theta` and `rope_scaling` (whose type key was once called `type`)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if rope["rope_type"] not in ("default", "llama3"):
        raise ConfigError(f"config.json: rope_type={rope['rope_type']!r} is not supported; supported are default, llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not supported; only 1.0 is")
    return rope


def _refuse_variants(config: dict[str, Any]) -> None:
    wanted = {"hidden_act": "silu", "mlp_bias": False}
    if config["model_type"] != "qwen2":
        wanted["attention_bias"] = False
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={config[key]!r} is not supported for {config['model_type']}; only {value!r} is")
    if config.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is set; only unquantised weights can be trained")
