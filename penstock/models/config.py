"""The settings of an architecture, whatever file format they came in.

Does not know how any one architecture reads its own settings: that is in the architecture's file. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import ModelLoadError

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
    """How a model was stretched past the context it was first trained on."""

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
    """Of a mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether a token's weights for its experts sum to 1
    dense_layers: frozenset[int] = frozenset()  # that have one ordinary MLP instead
    shared_intermediate_size: int | None = None  # of an expert for every token, where there is one

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
    local_rope: RopeConfig | None = None  # of layers with a window, where those differ
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
        """A positive whole number that can be a size of a model."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
            raise self._wrong(key, value, f"a whole number from 1 to {_LARGEST_SIZE:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
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
        """One token id, a list of them, or none."""
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
