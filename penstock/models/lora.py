"""Reads and checks LoRA adapters that PEFT wrote, and stacks them like the model's own matrices.

An adapter adds `scale * B @ A` to some matrices of every layer. The model stacks several matrices into one product
(queries, keys and values, for example), and a rank of several has a part of each. Knows no batch and no backend.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import InvalidRequest
from penstock.core.hashing import CONFIG_FILE, WEIGHTS_FILE
from penstock.kernels.adapted import Delta
from penstock.models.weights import NamedProduct

Number = TypeVar("Number", int, float)

ADAPTABLE = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj"),
    *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),  # Gemma 4
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("before_proj", "after_proj", "inner_proj", "input_proj", "write_proj", "read_proj", "step_proj"),
    *("query_proj", "key_proj", "value_proj", "rate_proj"),
    *("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),  # Kimi Linear
    *("delta_q_proj", "f_proj", "g_proj"),  # Ling 3
    *("v_proj_current", "v_proj_delayed"),  # Zaya
    *("kv_proj", "o_b_proj"),  # DeepSeek V4
)
_PREFIX = "base_model.model."
_LEFT, _RIGHT = ".lora_A.weight", ".lora_B.weight"
# Settings that change the meaning of the matrices, or add weights beside them, are refused and not ignored.
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",  # applies behind these tokens only
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
# Ways to begin training that take a part out of the model's own weights, which PEFT does again at load.
_CHANGE_THE_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    rank: int  # the largest of its matrices
    deltas: Mapping[int, Delta]  # by the product's index


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The settings of `adapter_config.json` that change the computation."""

    rank: int
    alpha: float
    has_root_scale: bool
    ranks: Mapping[str, int]  # exceptions, by patterns that the end of a module's name matches
    alphas: Mapping[str, float]

    def scale(self, module: str) -> float:
        rank = _exception(self.ranks, module, self.rank)
        alpha = _exception(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.has_root_scale else rank)


def read_lora_config(folder: Path) -> LoRAConfig:
    """Read an adapter's settings. Raises InvalidRequest, because clients name adapters."""
    path = folder / CONFIG_FILE
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"{folder} has no {CONFIG_FILE}, so it is no LoRA adapter.",
            hint="Give a folder as PEFT writes it.",
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON.") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise InvalidRequest(f"{path} does not describe a LoRA adapter.")
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise InvalidRequest(f"The adapter in {folder} uses {name}, which is not supported.")
    start = str(fields.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGE_THE_MODEL):
        raise InvalidRequest(
            f"The adapter in {folder} was begun with {start}, which changes the model's own weights.",
            hint="Save the adapter with PEFT's path_initial_model_for_weight_conversion. If the served model is what "
            "training left of the original, set init_lora_weights to true.",
        )
    if fields.get("bias", "none") != "none":
        raise InvalidRequest(f"The adapter in {folder} trains biases, which is not supported.")
    try:
        for pattern in (*(fields.get("rank_pattern") or {}), *(fields.get("alpha_pattern") or {})):
            re.compile(pattern)
        return LoRAConfig(
            rank=_positive(fields["r"]),
            alpha=float(fields["lora_alpha"]),
            has_root_scale=bool(fields.get("use_rslora", False)),
            ranks={str(name): _positive(rank) for name, rank in (fields.get("rank_pattern") or {}).items()},
            alphas={str(name): float(alpha) for name, alpha in (fields.get("alpha_pattern") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise InvalidRequest(f"{path} lacks a usable rank or alpha.") from error


def adaptable_products(products: Sequence[NamedProduct]) -> list[NamedProduct]:
    """Return the products that adapters may change: of attention, of layers with states and of dense MLPs."""
    return [
        product for product in products if all(name.rsplit(".", 1)[-1] in ADAPTABLE for name in product.names)
    ]


Shapes: TypeAlias = Mapping[
    str, tuple[int, int]
]  # rows and columns of matrices, by the names that adapters use


def adaptable_shapes(products: Sequence[NamedProduct]) -> dict[str, tuple[int, int]]:
    return {
        place.name: (place.rows, product.columns)
        for product in adaptable_products(products)
        for place in product.adapted_places()
    }


def read_lora(
    folder: Path, products: Sequence[NamedProduct], max_rank: int, elsewhere: Shapes | None = None
) -> LoRAWeights:
    """Read the weights for a model's adaptable `products`. Raises InvalidRequest for an adapter that does not fit
    it. `elsewhere` are the matrices of other stages, which read their own part."""
    config = read_lora_config(folder)
    parts = _read_pairs(folder, config)
    rank = max((left.shape[0] for left, _ in parts.values()), default=0)
    if rank > max_rank:
        raise InvalidRequest(
            f"The adapter in {folder} has rank {rank}, more than the {max_rank} that are allowed.",
            hint="Raise --max-lora-rank.",
        )
    deltas = {}
    unused = set(parts)
    for name, shape in (elsewhere or {}).items():
        if name in unused:
            inner, outer = parts[name]
            _check_shape(name, (outer.shape[0], inner.shape[1]), shape, folder)
            unused.discard(name)
    is_used = len(unused) < len(parts)
    for index, product in enumerate(products):
        names = {place.name for place in product.adapted_places()}
        if not names.isdisjoint(parts):
            deltas[index] = _delta(product, parts, folder)
            unused -= names
    if unused:
        raise InvalidRequest(
            f"The adapter in {folder} changes {min(unused)}, which this model does not allow."
        )
    if not deltas and not is_used:
        raise InvalidRequest(f"The adapter in {folder} changes nothing.")
    return LoRAWeights(rank, deltas)


def _read_pairs(folder: Path, config: LoRAConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `A` and the scaled `B` of each module that has them."""
    path = folder / WEIGHTS_FILE
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                for end in (_LEFT, _RIGHT):
                    if name.startswith(_PREFIX) and name.endswith(end):
                        module = name.removeprefix(_PREFIX).removesuffix(end)
                        halves.setdefault(module, {})[end] = opened.get_tensor(name).to(torch.float32)
                        break
                else:
                    raise InvalidRequest(f"{path} has {name}, which is no part of a LoRA adapter.")
    except FileNotFoundError as error:
        raise InvalidRequest(f"{folder} has no {WEIGHTS_FILE}.") from error
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{path} cannot be read.", hint="Fetch the file again.") from error
    pairs = {}
    for module, pair in halves.items():
        if (
            len(pair) != len((_LEFT, _RIGHT))
            or any(half.dim() != 2 for half in pair.values())
            or pair[_LEFT].shape[0] != pair[_RIGHT].shape[1]
        ):
            raise InvalidRequest(f"{path} has half of {module} only, or in a shape of its own.")
        pairs[_module_name(module)] = pair[_LEFT], pair[_RIGHT] * config.scale(module)
    return pairs


def _delta(product: NamedProduct, pairs: Mapping[str, tuple[Tensor, Tensor]], folder: Path) -> Delta:
    """Return the change by an adapter of this rank's part of a product. The scale is part of the right matrices."""
    taken: list[tuple[Tensor, Tensor] | None] = []
    rows, columns = product.own_rows, product.own_columns
    for place, own in zip(product.adapted_places(), rows, strict=True):
        if place.name not in pairs:
            taken.append(None)
            continue
        inner, outer = pairs[place.name]
        _check_shape(place.name, (outer.shape[0], inner.shape[1]), (place.rows, product.columns), folder)
        outer = outer if place.order is None else outer[place.order]
        taken.append((inner[:, columns.start : columns.stop], outer[own.start : own.stop]))
    return Delta(tuple(map(len, rows)), len(columns), tuple(taken))


def _check_shape(name: str, found: tuple[int, int], needed: tuple[int, int], folder: Path) -> None:
    if found != needed:
        raise InvalidRequest(
            f"The adapter in {folder} was made for another model: {name} is {needed[0]} × {needed[1]} here."
        )


def _positive(value: Any) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(f"{number} is no rank")
    return number


def _module_name(name: str) -> str:
    """Return the module's name in a checkpoint of the text model alone, as in `safetensors_source`. Transformers has
    another name than files for the gates of LFM3's heads."""
    return name.replace("language_model.", "", 1).replace(".self_attn.g_proj", ".self_attn.gate_proj", 1)


def _exception(exceptions: Mapping[str, Number], module: str, usual: Number) -> Number:
    for pattern, value in exceptions.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return usual
