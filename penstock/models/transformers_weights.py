"""Fills the modules of a transformers decoder from a checkpoint, one tensor at a time. The only file that knows how
names of a checkpoint become names of modules."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight
from penstock.models.quantized_source import QuantizedSource
from penstock.models.random_weights import RandomSource
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.transformers_config import first_line
from penstock.models.transformers_model import PackedModule, PackedTable
from penstock.models.transformers_probe import Recording
from penstock.models.weights import NamedProduct, WeightLoader, WeightSource

logger = logging.getLogger(__name__)

# The names that quantized layouts store in place of `weight`.
_STANDS_FOR_WEIGHT = re.compile(r"\.(qweight|weight_packed|W_q)$")


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The sources of a model's parameters: one stored tensor, or several that transformers converts."""

    direct: Mapping[str, str]  # parameter -> stored name
    converted: Mapping[str, Any]  # first parameter -> transformers' converter with its tensors


def stored_names(network: Any, source: WeightSource) -> StoredNames:
    """Apply transformers' table of renamed and merged tensors to the names of a checkpoint."""
    if isinstance(source, RandomSource):
        return StoredNames({name: name for name in network.state_dict()}, {})
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = network.state_dict()
    prefix = network.base_model_prefix
    direct: dict[str, str] = {}
    converted: dict[str, Any] = {}
    for stored in sorted(source.names(), key=loading.dot_natural_key):
        name = _STANDS_FOR_WEIGHT.sub(".weight", stored)
        renamed = (
            (each, pattern)
            for within in _names_within(name)
            for target, pattern in (loading.rename_source_key(within, renamings, converters, prefix, wanted),)
            for each in _names_within(target)
        )
        unchanged = ((each, None) for each in _names_within(name))
        target, pattern = next(
            (each for each in chain(renamed, unchanged) if each[0] in wanted), (None, None)
        )
        if target is None:
            continue
        if pattern is None:
            direct[target] = name
        else:
            entry = converted.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            entry.add_tensor(target, name, pattern, _reader(source, name))
    return StoredNames(direct, converted)


# The prefixes of text models within larger models. Sources leave them out of names.
_PREFIXES = ("model.language_model.", "model.text_model.")


def _names_within(name: str) -> Iterator[str]:
    """Yield the name of a parameter, and its names within larger models."""
    yield name
    if name.startswith("model."):
        yield from (name.replace("model.", prefix, 1) for prefix in _PREFIXES)


def _reader(source: WeightSource, name: str) -> Callable[[], Tensor]:
    """Return what reads a tensor that transformers merges with others. A quantized one is unpacked for that."""
    if isinstance(source, QuantizedSource) and source.is_quantized(name):
        return lambda: _stored_tensor(source, name, source.shape(name))
    return lambda: _stored_tensor(source, name)


def _stored_tensor(source: WeightSource, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if isinstance(source, SafetensorsSource):
        return source.tensor(name, shape)
    if isinstance(source, QuantizedSource):
        if shape is not None and len(shape) == 2:
            weight = source.matrix(name, *shape)
            return weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        return source.files.tensor(name, shape)
    assert shape is not None, "random weights have no shape of their own"
    if len(shape) == 1:
        return source.vector(name, shape[0])
    drawn = source.matrix(name, shape[0], math.prod(shape[1:]))
    assert isinstance(drawn, DenseWeight)
    return drawn.values.view(shape)


@dataclass(slots=True)
class ModuleFiller:
    """Puts the weights of a checkpoint into the modules of a model."""

    network: Any
    source: WeightSource
    loader: WeightLoader
    names: StoredNames
    plain_bytes: int = 0
    packed: dict[str, NamedProduct] = field(default_factory=dict)  # by module
    originals: dict[str, nn.Module] = field(default_factory=dict)  # of packed modules, without memory
    tied: dict[str, str] = field(default_factory=dict)  # parameter -> the parameter that it is
    used: tuple[str, ...] = ("",)  # what the names of modules and parameters begin with that are filled

    def __post_init__(self) -> None:
        self.tied = self._tied()

    @property
    def num_parameters(self) -> int:
        named = self.network.named_parameters()
        return sum(parameter.numel() for name, parameter in named if name.startswith(self.used))

    def fill(self) -> None:
        tied = self.tied
        float32_names = self._in_float32()
        self._pack_head()
        for name, module in list(self.network.named_modules()):
            is_packable = (
                type(module) is nn.Linear
                and name.startswith(self.used)
                and module.weight.numel() > 0  # of shared experts, of which there may be none
                and f"{name}.weight" in self.names.direct
                and f"{name}.weight" not in tied
                and not (float32_names and float32_names.search(f"{name}.weight"))
            )
            if is_packable:
                self._pack(name, module)
        for target, converter in self.names.converted.items():
            if target.startswith(self.used):
                self._convert(target, converter)
        for name, parameter in list(self.network.named_parameters(remove_duplicate=False)):
            if not parameter.is_meta or name in tied:
                continue
            if name.startswith(self.used):
                self._put(name, self._read(name, tuple(parameter.shape)))
            else:  # some models ask a tower where it is
                owner, _, leaf = name.rpartition(".")
                empty = torch.empty(0, device=self.loader.ops.device, dtype=self.loader.ops.dtype)
                setattr(self.network.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
        for name, first in tied.items():
            module, _, leaf = name.rpartition(".")
            owner = self.network.get_submodule(module)
            if leaf in owner._parameters:
                setattr(owner, leaf, self.network.get_parameter(first))
        self._fill_buffers()

    def _tied(self) -> dict[str, str]:
        """Return the parameters that are another one, and that other's name."""
        self.network.tie_weights()
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if other != name:
                tied[name] = other
        for name, other in list(tied.items()):
            # A checkpoint may hold either of the two.
            if other not in self.names.direct and name in self.names.direct:
                direct = dict(self.names.direct)
                direct[other] = direct.pop(name)
                self.names = StoredNames(direct, self.names.converted)
        return tied

    def _in_float32(self) -> re.Pattern[str] | None:
        """Return a pattern of the parameters that transformers keeps in float32 beside a shorter type."""
        plan = self.network._get_dtype_plan(self.loader.ops.dtype)
        kept = [name for name, dtype in plan.items() if dtype == torch.float32]
        return re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in kept)) if kept else None

    def _pack_head(self) -> None:
        """Pack the output head, and with it the embedding if the two are one."""
        tied = self.tied
        head, table = self.network.get_output_embeddings(), self.network.get_input_embeddings()
        if type(head) is not nn.Linear:
            return
        name, table_name = self._name_of(head), self._name_of(table)
        stored = tied.get(f"{name}.weight", f"{name}.weight")
        if stored not in self.names.direct:
            return
        shares = type(table) is nn.Embedding and stored == f"{table_name}.weight"
        if f"{name}.weight" in tied and not shares:
            return
        weight = self.source.matrix(self.names.direct[stored], head.out_features, head.in_features)
        bias = None
        if head.bias is not None:
            stored_bias = tied.get(f"{name}.bias", f"{name}.bias")
            bias = self.source.vector(self.names.direct[stored_bias], head.out_features)
        packed = self.loader.ops.pack_linear([weight], bias)
        self.loader.weight_bytes += packed.num_bytes
        self._replace(name, PackedModule(name, packed, is_head=True))
        if shares:
            embedding = self.loader.ops.pack_embedding(weight, tied=packed)
            self.loader.weight_bytes += embedding.num_bytes
            self._replace(table_name, PackedTable(table_name, embedding))

    def _pack(self, name: str, module: nn.Linear) -> None:
        stem = self.names.direct[f"{name}.weight"].removesuffix(".weight")
        packed = self.loader.linear(
            [stem], [module.out_features], module.in_features, bias=module.bias is not None
        )
        self.packed[name] = self.loader.products[-1]
        self._replace(name, PackedModule(name, packed))

    def unpack(self, name: str) -> None:
        """Give all modules of this name, in all layers, their weights back."""
        leaf = name.rpartition(".")[2]
        logger.info("the model's code reads the weights of %s itself: they are not packed", leaf)
        for each in [each for each in self.originals if each.rpartition(".")[2] == leaf]:
            original = self.originals.pop(each)
            self._replace(each, original)
            self.packed.pop(each, None)
            for part, parameter in original.named_parameters():
                full = self.tied.get(f"{each}.{part}", f"{each}.{part}")
                self._put(f"{each}.{part}", self._read(full, tuple(parameter.shape)))

    def products(self, recording: Recording) -> list[NamedProduct]:
        """Return the products that see all tokens of a step, which adapters can change."""
        return [self.packed[name] for name in self.packed if name in recording.whole_products]

    def _convert(self, target: str, converter: Any) -> None:
        try:
            converted = converter.convert(target, model=self.network, config=self.network.config)
        except Exception as error:
            raise ModelLoadError(f"Transformers cannot convert {target}: {first_line(error)}.") from error
        for name, value in converted.items():
            self._put(name, value[0] if isinstance(value, list) else value)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.names.direct:
            raise ModelLoadError(f"The checkpoint has no tensor for {name}.")
        if isinstance(self.source, RandomSource) and self._is_norm(name):
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        return _stored_tensor(self.source, self.names.direct[name], shape)

    def _is_norm(self, name: str) -> bool:
        return "norm" in type(self.network.get_submodule(name.rpartition(".")[0])).__name__.lower()

    def _put(self, name: str, value: Tensor) -> None:
        module_name, _, leaf = name.rpartition(".")
        module = self.network.get_submodule(module_name)
        known = getattr(module, leaf, None)
        if not isinstance(known, Tensor) or tuple(known.shape) != tuple(value.shape):
            shape = list(known.shape) if isinstance(known, Tensor) else None
            raise ModelLoadError(f"The checkpoint has {name} of shape {list(value.shape)}, not {shape}.")
        float32_names = self._in_float32()
        dtype = self.loader.ops.dtype
        if not value.is_floating_point():
            dtype = value.dtype
        elif leaf in module._buffers or (float32_names and float32_names.search(name)):
            dtype = torch.float32
        value = value.to(self.loader.ops.device, dtype)
        self.plain_bytes += value.nbytes
        setattr(module, leaf, value if leaf in module._buffers else nn.Parameter(value, requires_grad=False))

    def _fill_buffers(self) -> None:
        persistent = self.network.state_dict().keys()
        for name, buffer in list(self.network.named_buffers()):
            if name in persistent and name in self.names.direct:
                self._put(name, _stored_tensor(self.source, self.names.direct[name], tuple(buffer.shape)))
        for module in self.network.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(self.loader.ops.device)

    def _name_of(self, wanted: nn.Module) -> str:
        modules: Iterator[tuple[str, nn.Module]] = self.network.named_modules()
        return next(name for name, module in modules if module is wanted)

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        owner = self.network.get_submodule(parent)
        if isinstance(module, PackedModule | PackedTable):
            self.originals[name] = getattr(owner, leaf)
        setattr(owner, leaf, module)
