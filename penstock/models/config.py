"""Defines the settings of an architecture, and typed reading of settings from a file. Imports no torch.

`huggingface_config.py` and `gguf_config.py` read the settings that most architectures share; settings of one family
alone are read in the family's file.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.core.errors import ModelLoadError

RopeKind = Literal["linear", "ntk", "llama3", "yarn", "longrope", "proportional"]
GatedActivationName = Literal["silu", "gelu_tanh"]
# Activations of gated MLPs, each one step for a backend.
ActivationName = GatedActivationName | Literal["clamped_swiglu", "relu", "limited_silu"]
PlainActivationName = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]  # of MLPs without a gate

# No size in a model's settings comes near this; it keeps a damaged file from asking for absurd memory.
ALIBI_COLUMNS = 8  # of a head in the cache, beside its own; see alibi.py
_LARGEST_SIZE = 1 << 24

_ACTIVATIONS: dict[str, GatedActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_PLAIN_ACTIVATIONS: dict[str, PlainActivationName] = {
    **_ACTIVATIONS,
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


class NotNative(ModelLoadError):
    """No native family does what the settings ask for. The code of transformers may."""


class UnknownArchitecture(NotNative):
    """No native family has the architecture."""


class MissingFeature(UnknownArchitecture):
    """No native family has the architecture, and the message says what the architecture needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Describes how a model was stretched past its first training context."""

    kind: RopeKind
    factor: float
    original_max_positions: int | None = None  # llama3, yarn and longrope
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn and longrope; None derives it from `factor`
    truncate: bool = True  # yarn: round the band limits to whole dimensions
    rotated_pairs: int | None = None  # proportional: pairs after this many of them are not rotated
    short_divisors: tuple[float, ...] = ()  # longrope: of frequencies, in contexts up to the original length
    long_divisors: tuple[float, ...] = ()  # longrope: in longer contexts
    short_amplitude: float | None = None  # longrope: of cosines and sines with the short list
    long_amplitude: float | None = None  # ... with the long list; None takes `attention_factor`


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of Yarn for cosines and sines."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # the numbers of a head that are rotated; None rotates all


def axes_of_pairs(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Return for each pair of a head which position turns it: 0 for time, 1 for rows, 2 for columns."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The settings of a mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether a token's weights for its experts sum to 1
    dense_layers: frozenset[int] = frozenset()  # layers with one ordinary MLP instead
    shared_intermediate_size: int | None = None  # of an expert for every token, if there is one
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    num_groups: int = 1  # of experts, of which a token uses the best `kept_groups`
    kept_groups: int = 1
    groups_ranked_by: int = 1  # this many of the best experts of a group
    weight_scale: float = 1.0
    least_sum: float = 1e-20  # of weights, before they are normalized
    jitter: float = 0.0  # of sparsemixer

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise ModelLoadError(
                f"The model sends each token to {self.per_token} of {self.count} experts, more than there are."
            )
        size = self.count // self.num_groups
        if self.count % self.num_groups or not self.per_token <= self.kept_groups * size <= self.count:
            raise ModelLoadError(
                f"The model sends each token to {self.per_token} experts of {self.kept_groups} from "
                f"{self.num_groups} groups of {self.count} experts, which cannot be."
            )
        if self.num_groups > 1 and self.groups_ranked_by > size:
            raise ModelLoadError(
                f"The model ranks groups of {size} experts by their best {self.groups_ranked_by}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The settings of indexers, which choose the tokens that a token attends to."""

    num_heads: int
    head_dim: int
    top_k: int  # tokens that are chosen
    shared_layers: frozenset[int] = frozenset()  # that use what an earlier layer chose


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The sizes of attention over latents."""

    rank: int  # of a latent
    query_rank: int | None  # of queries; None makes queries of the hidden state
    rope_dim: int  # of the rotated part of a query and of the key that heads share
    plain_dim: int  # of the rest of a query
    value_dim: int
    interleaved: bool = True  # whether rotated pairs are stored as neighbours
    index: IndexConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """The settings of layers with a fixed state: short convolutions, Mamba-2, gated delta nets."""

    layers: frozenset[int]  # that have a state
    conv_width: int  # inputs that a convolution sees
    conv_bias: bool = False
    bias: bool = False  # of the projection into the layer
    output_bias: bool = False
    num_heads: int = 1
    head_dim: int = 1
    num_groups: int = 1  # of Mamba-2's scans and norms; of a gated delta net, the key heads
    state_size: int = 1  # of a group; of a gated delta net, the size of a key head
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_norm: bool = True
    norm_eps: float | None = None  # None: that of the other norms
    gates_first: bool = True  # the gate comes before the norm
    largest_rate: float = 1.0  # of a gated delta net

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ModelLoadError(
                f"The model's {self.num_heads} state-space heads cannot be divided by "
                f"{self.num_groups} groups."
            )
        if not self.layers:
            raise ModelLoadError(
                "The model has no layer with a fixed state, though its architecture is made of them."
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
    rope_axes: tuple[
        int, ...
    ] = ()  # of positions in three dimensions: which of them turns each pair of a head
    spare_rope_rows: int = 0  # after the positions, for tokens whose angles mix several rows
    unrotated_layers: frozenset[int] = frozenset()  # layers whose attention knows no positions
    slopes: tuple[float, ...] = ()  # of ALiBi, by head: what a score gains with each position of its key
    windows: tuple[int | None, ...]  # one per layer; None: full attention
    # An image's tokens attend to each other, in layers with a window only.
    sees_images_in_windows: bool = False
    attention_scale: float
    attention_softcap: float | None = None
    query_growth: float | None = None  # of queries, with the logarithm of their position
    query_step: int | None = None  # positions with the same growth; None: the length that the rope stretches
    qkv_limit: float | None = None  # of queries, keys and values, before they are rotated
    logit_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_norms: bool = False  # RMS norms of query and key heads, where only the settings tell
    attention_chunk: int | None = None  # tokens that attend to each other, in layers with rope
    tuned_from: float | None = None  # the position from which layers without rope scale queries ...
    tuning: float = 0.0  # ... and how much
    parallel_blocks: bool = False  # attention and MLP read the same residual
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    num_mtp_layers: int = 0  # layers after the last one that predict further tokens, which a drafter can use
    tie_embeddings: bool = False
    activation: ActivationName = "silu"
    plain_activation: PlainActivationName = "gelu"  # of architectures whose MLP has no gate
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual
    logit_scale: float = 1.0
    norm_offset: float = 0.0  # added to stored norm weights: 1 where the file holds weight - 1
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None

    @property
    def num_experts(self) -> int:
        return 0 if self.experts is None else self.experts.count

    def is_dense(self, index: int) -> bool:
        """Return whether a layer has one ordinary MLP, and no experts."""
        return self.experts is None or index in self.experts.dense_layers

    @property
    def has_equal_kv_heads(self) -> bool:
        """Return whether all layers have the same key-value heads, so that a rank has the same ones in each."""
        return True

    @property
    def cached_head_dim(self) -> int:
        """Return the size of a head in the KV cache."""
        return self.head_dim + (ALIBI_COLUMNS if self.slopes else 0)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"The model's {self.num_heads} attention heads cannot be divided by "
                f"{self.num_kv_heads} key-value heads."
            )
        if self.head_dim % 2:
            raise NotNative(
                f"The model's head size {self.head_dim} is odd, so it cannot be rotated in pairs."
            )


Settings = TypeVar("Settings", bound=ArchitectureConfig)


def extended(config: ArchitectureConfig, kind: type[Settings], **changes: Any) -> Settings:
    """Return the settings as those of a family that has more of them. `changes` are the further ones, and others that
    the family replaces."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)} | changes)


_READ: ContextVar[set[str] | None] = ContextVar("names of settings that are read", default=None)


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Record the names of the settings that are looked for, whether a file has them or not."""
    names: set[str] = set()
    token = _READ.set(names)
    try:
        yield names
    finally:
        _READ.reset(token)


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
        if (names := _READ.get()) is not None:
            names.add(key)
        return self.values.get(self._prefix + key)

    def has(self, key: str) -> bool:
        return self.raw(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a positive integer that can be a size of a model."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
            raise self._wrong(key, value, f"a whole number from 1 to {_LARGEST_SIZE:,}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

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

    def switch(self, key: str, default: bool) -> bool:
        """Read a flag of which a null means false, and not the default."""
        return self.flag(key, default and self._prefix + key not in self.values)

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
            raise NotNative(
                f"{self.where} asks for the activation {name!r}; known are {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[name]

    def plain_activation(self, key: str, default: str) -> PlainActivationName:
        name = self.text(key, default)
        if name not in _PLAIN_ACTIVATIONS:
            raise NotNative(
                f"{self.where} asks for the activation {name!r}; known are {', '.join(_PLAIN_ACTIVATIONS)}."
            )
        return _PLAIN_ACTIVATIONS[name]

    def require_silu(self, key: str = "hidden_act") -> None:
        """Refuse layers with a fixed state that have another activation than all published ones."""
        if self.text(key, "silu") not in ("silu", "swish"):
            raise NotNative(f"{self.where} asks for {key} {self.raw(key)!r}; layers with a state know silu.")

    def numbers(self, key: str, *, positive: bool = True) -> tuple[float, ...]:
        """Read a list of positive numbers, or of any finite numbers."""
        value = self._required(key, None)
        if not isinstance(value, list) or not all(
            isinstance(each, int | float)
            and not isinstance(each, bool)
            and (0.0 if positive else -math.inf) < each < math.inf
            for each in value
        ):
            raise self._wrong(key, value, f"a list of {'positive' if positive else 'finite'} numbers")
        return tuple(float(each) for each in value)

    def with_usual(self, **usual: Any) -> Fields:
        """Return the same settings with values for keys that the file does not have."""
        return Fields({**usual, **self.values}, self.where, prefix=self._prefix)

    def with_usual_for_nulls(self, **usual: Any) -> Fields:
        """Return the same settings with values for keys that the file does not have, or has as a null."""
        given = {key: value for key, value in self.values.items() if value is not None}
        return Fields({**usual, **given}, self.where, prefix=self._prefix)

    def changed(self, **values: Any) -> Fields:
        """Return the same settings with other values."""
        return Fields({**self.values, **values}, self.where, prefix=self._prefix)

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """Return the same settings with other keys: `names` gives the key that is in the file for a usual key."""
        found = {usual: self.raw(own) for usual, own in names.items() if self.has(own)}
        return Fields({**self.values, **found}, self.where, prefix=self._prefix)

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


@contextlib.contextmanager
def sound_settings(where: str) -> Iterator[None]:
    """Refuse settings of types or sizes that no reader has looked for."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelLoadError(
            f"{where} has settings that do not fit together: {str(error) or type(error).__name__}.",
            hint="Fetch the file again.",
        ) from error


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
