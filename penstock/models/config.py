"""Reads the settings of an architecture from a Hugging Face `config.json` or from GGUF metadata. Imports no torch.

Settings of one architecture alone are read in the architecture's file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import ModelLoadError
from penstock.models.gguf_file import GGUFFile

RopeKind = Literal["linear", "llama3", "yarn"]
ActivationName = Literal["silu", "gelu_tanh"]

# No size in a model's settings comes near this; it keeps a damaged file from asking for absurd memory.
_LARGEST_SIZE = 1 << 24

_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Describes how a model was stretched past its first training context."""

    kind: RopeKind
    factor: float
    original_max_positions: int | None = None  # llama3 and yarn
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None derives it from `factor`
    truncate: bool = True  # yarn: round the band limits to whole dimensions


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The settings of a mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether a token's weights for its experts sum to 1
    dense_layers: frozenset[int] = frozenset()  # layers with one ordinary MLP instead
    shared_intermediate_size: int | None = None  # of an expert for every token, if there is one

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise ModelLoadError(
                f"The model sends each token to {self.per_token} of {self.count} experts, more than there are."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureConfig:
    architecture: str  # a name of the registry
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of layers with a window, if different
    windows: tuple[int | None, ...]  # one per layer; None sees the whole context
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    tie_embeddings: bool = False
    activation: ActivationName = "silu"
    norm_offset: float = 0.0  # added to stored norm weights: 1 where the file holds weight - 1
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"The model's {self.num_heads} attention heads cannot be shared out over "
                f"{self.num_kv_heads} key-value heads."
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"The model's head size {self.head_dim} is odd, so it cannot be rotated in pairs."
            )


class Fields:
    """Reads typed values from a mapping of settings; a wrong or missing one is a ModelLoadError that names it.

    `where` is the file for the message, `prefix` is put before every key (GGUF keys start with the architecture).
    A key that is there with the value None counts as absent.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def raw(self, key: str) -> Any:
        return self.values.get(self._prefix + key)

    def has(self, key: str) -> bool:
        return self.raw(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a positive whole number that can be a size of a model."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
            raise self._wrong(key, value, f"a whole number from 1 to {_LARGEST_SIZE:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive, finite number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one token id, a list of them, or none."""
        value = self.raw(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def activation(self, key: str, default: str) -> ActivationName:
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise ModelLoadError(
                f"{self.where} asks for the activation {name!r}; known are {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[name]

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.where} has no {self._prefix}{key}.")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.where} has {self._prefix}{key} = {value!r:.80}, which is not {expected}."
        )


def read_settings(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that holds an object; None when there is no such file. Raises ModelLoadError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON.", hint="Fetch the file again.") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold an object of settings.")
    return values


def common_huggingface_config(fields: Fields, architecture: str) -> ArchitectureConfig:
    """Read the settings that most decoders have. An architecture replaces its differences."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope = rope_config(rope_parameters(fields), fields, max_positions)
    bos_token_ids = fields.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=stretched_positions(rope, max_positions),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        activation=fields.activation("hidden_act", "silu"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=fields.raw("dtype") or fields.raw("torch_dtype"),
    )


def layer_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Return the windows by `layer_types`, or None when the file does not list them."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelLoadError(f"{fields.where} lists layer_types that do not match its {num_layers} layers.")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelLoadError(f"{fields.where} has a layer of unknown kind {sorted(map(str, unknown))[0]!r}.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen_windows(fields: Fields, config: ArchitectureConfig) -> ArchitectureConfig:
    """Apply Qwen's rule: windows only when `use_sliding_window` is set, and not in the first `max_window_layers`."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return config
    window = fields.integer("sliding_window")
    windows = layer_windows(fields, config.num_layers, window)
    if windows is None:
        first = fields.integer("max_window_layers", 28)
        windows = tuple(window if index >= first else None for index in range(config.num_layers))
    return dataclasses.replace(config, windows=windows)


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """Return the rope settings as one mapping: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.raw(key)
        if isinstance(value, dict):
            return value
        if value is not None:
            raise ModelLoadError(f"{fields.where} has {key} that is not an object.")
    return {}


def rope_config(
    parameters: Mapping[str, Any], fields: Fields, max_positions: int, *, default_theta: float = 10000.0
) -> RopeConfig:
    rope = Fields(parameters, f"The rope settings of {fields.where}")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(
            f"{fields.where} rotates only part of each head, which no known architecture does."
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, RopeScaling(kind="linear", factor=rope.number("factor")))
    original = rope.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_max_positions=original,
            low_frequency_factor=rope.number("low_freq_factor"),
            high_frequency_factor=rope.number("high_freq_factor"),
        )
        return RopeConfig(theta, scaling)
    if kind == "yarn":
        if rope.has("mscale") or rope.has("mscale_all_dim"):
            raise ModelLoadError(
                f"{fields.where} scales yarn rope by mscale, which no known architecture does."
            )
        scaling = RopeScaling(
            kind="yarn",
            factor=rope.number("factor", max_positions / original),
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            truncate=rope.flag("truncate", True),
        )
        return RopeConfig(theta, scaling)
    raise ModelLoadError(
        f"{fields.where} asks for rope scaling of kind {kind!r}; known are default, linear, llama3 and yarn."
    )


def stretched_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return the context length. Yarn checkpoints may state the length before stretching."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn" or scaling.original_max_positions is None:
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))


def metadata_fields(file: GGUFFile) -> Fields:
    """Return the metadata below the file's architecture: `attention.head_count` reads
    `llama.attention.head_count`."""
    return Fields(file.metadata, file.path.name, prefix=f"{file.architecture}.")


def mixture_in_gguf(file: GGUFFile) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path.name} holds a mixture of experts, which is read from safetensors only.",
        hint="Give the folder of the original checkpoint.",
    )


def common_gguf_config(file: GGUFFile, architecture: str) -> ArchitectureConfig:
    fields = metadata_fields(file)
    if fields.raw("expert_count"):  # files of Mixtral call themselves "llama"
        raise mixture_in_gguf(file)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path.name} has keys and values of different sizes.")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(
            f"{file.path.name} rotates only part of each head, which no known architecture does."
        )
    tokenizer = Fields(file.metadata, file.path.name, prefix="tokenizer.ggml.")
    bos_token_ids = tokenizer.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, hidden_size),
        max_positions=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields),
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tokenizer.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )


def _vocab_size(file: GGUFFile, hidden_size: int) -> int:
    """Return the rows of the embedding table: the metadata may lack the size, or count without padding rows."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(f"{file.path.name} has no tensor token_embd.weight.")
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ModelLoadError(
            f"{file.path.name} has token_embd.weight of shape {list(table.shape)} "
            f"where the embedding length is {hidden_size}."
        )
    return table.shape[0]


def _rope(fields: Fields) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta, RopeScaling(kind="linear", factor=factor))
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
        return RopeConfig(theta, RopeScaling(kind="yarn", factor=factor, original_max_positions=original))
    raise ModelLoadError(
        f"{fields.where} asks for rope scaling of kind {kind!r}; known are none, linear and yarn."
    )
