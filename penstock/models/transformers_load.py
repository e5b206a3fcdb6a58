"""Loads a decoder of the transformers library: builds its modules without memory for weights, and has them filled
from the checkpoint."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from penstock.core.engine_config import Quantization
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import Ops
from penstock.models.config import ArchitectureConfig, Fields, MissingFeature, UnknownArchitecture
from penstock.models.quantized_floats import open_folder
from penstock.models.sharding import WHOLE, Shard
from penstock.models.stored_quantization import StoredQuantization, folder_quantization
from penstock.models.transformers_config import (
    architecture_config,
    auto_class,
    first_line,
    library,
    read_config,
)
from penstock.models.transformers_model import NeedsWeight, TransformersModel, decoder_name, pack_norms
from penstock.models.transformers_probe import check_rope, probe
from penstock.models.transformers_weights import ModuleFiller, stored_names
from penstock.models.weights import OnProgress, WeightLoader, WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransformersCheckpoint:
    """A folder that transformers' code runs, whose settings have been read, and whose weights have not."""

    path: Path
    settings: Any  # transformers' own
    config: ArchitectureConfig
    quantization: StoredQuantization | None
    trust_remote_code: bool
    unknown: ModelLoadError | None = None  # why the model is not native

    @classmethod
    def open(cls, path: Path, fields: Fields, *, trust_remote_code: bool) -> Self:
        settings = read_config(path, trust_remote_code=trust_remote_code)
        config = architecture_config(settings, fields.where)
        return cls(path, settings, config, folder_quantization(path, fields), trust_remote_code)

    @classmethod
    def instead_of_native(
        cls, path: Path, fields: Fields, unknown: ModelLoadError, trust_remote_code: bool
    ) -> Self:
        """Open a folder whose architecture is not native. If that fails, the error names both reasons."""
        try:
            opened = cls.open(path, fields, trust_remote_code=trust_remote_code)
        except ModelLoadError as error:
            raise _both_reasons(unknown, error) from error
        return replace(opened, unknown=unknown)

    def source(self, *, is_pickled: bool = False) -> WeightSource:
        return open_folder(self.path, self.quantization, is_pickled=is_pickled)

    def load(
        self,
        source: WeightSource,
        ops: Ops,
        max_model_len: int,
        shard: Shard = WHOLE,
        quantization: Quantization | None = None,
        on_progress: OnProgress | None = None,
    ) -> TransformersModel:
        try:
            return self._load(source, ops, max_model_len, shard, quantization, on_progress)
        except ModelLoadError as error:
            if self.unknown is None:
                raise
            raise _both_reasons(self.unknown, error) from error

    def _load(
        self,
        source: WeightSource,
        ops: Ops,
        max_model_len: int,
        shard: Shard,
        quantization: Quantization | None,
        on_progress: OnProgress | None,
    ) -> TransformersModel:
        refuse_shards(shard)
        check_rope(self.settings, max_model_len)
        network = _skeleton(self.settings, ops.dtype, self.trust_remote_code)
        loader = WeightLoader(source, ops, quantization=quantization, on_progress=on_progress)
        names = stored_names(network, source)
        filler = ModuleFiller(network, source, loader, names, used=_text_parts(network))
        num_parameters = filler.num_parameters
        filler.fill()
        pack_norms(network, ops)
        model = TransformersModel(
            network,
            self.config,
            ops,
            max_model_len=max_model_len,
            num_parameters=num_parameters,
            weight_bytes=loader.weight_bytes + filler.plain_bytes,
        )
        while True:
            try:
                recording = probe(model, ops)
                break
            except NeedsWeight as need:
                filler.unpack(need.name)
        model.products = filler.products(recording)
        return model


def _both_reasons(unknown: ModelLoadError, error: ModelLoadError) -> ModelLoadError:
    """Return an error that says why a model runs neither by transformers' code nor natively, and what to do."""
    hint = error.hint or "Run the model in another server, and name that server with --external."
    if isinstance(unknown, MissingFeature):
        return ModelLoadError(unknown.message, hint=hint)
    if isinstance(unknown, UnknownArchitecture):
        return ModelLoadError(f"{error.message} The architecture is not native, either.", hint=hint)
    return ModelLoadError(f"{unknown.message} {error.message}", hint=hint)


def refuse_shards(shard: Shard) -> None:
    if shard != WHOLE:
        raise ConfigError(
            "A model that runs by transformers' code cannot be sharded over ranks.",
            hint="Leave --tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel out.",
        )


@contextmanager
def _without_memory() -> Iterator[None]:
    """Give parameters of new modules no memory. Buffers, such as tables of angles, are computed as always."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:  # tied parameters stay one
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _text_parts(network: Any) -> tuple[str, ...]:
    """Return what the names of the parts that texts go through begin with. A model of texts and images gets texts
    alone, so its towers have no weights."""
    if auto_class(network.config) is not library().AutoModelForImageTextToText:
        return ("",)
    logger.warning("%s takes text only: its images are not supported", type(network).__name__)
    parts = network.get_decoder(), network.get_input_embeddings(), network.get_output_embeddings()
    return tuple(
        f"{name}." for name, module in network.named_modules() if any(module is part for part in parts)
    )


def _skeleton(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Build the model with parameters that have a shape and no memory."""
    transformers = library()
    config.use_cache = False
    try:
        with _without_memory():
            network = (auto_class(config) or transformers.AutoModelForCausalLM).from_config(
                config, attn_implementation="eager", dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # transformers' code may raise any error for odd settings
        raise ModelLoadError(f"Transformers cannot build the model: {first_line(error)}.") from error
    if not type(network)._can_set_attn_implementation() or decoder_name(network) is None:
        raise ModelLoadError(
            f"Transformers runs {type(network).__name__} with attention of its own, which cannot be replaced "
            "by paged attention."
        )
    if _has_own_cache(network):
        raise ModelLoadError(
            f"Transformers runs {type(network).__name__} with a cache of its own kind, so what a token sees may "
            "depend on more than its position."
        )
    network.eval().requires_grad_(False)
    return network


def _has_own_cache(network: Any) -> bool:
    """Return whether the file with the model's class has a class of caches, too."""
    caches, here = importlib.import_module("transformers.cache_utils"), type(network).__module__
    return any(
        isinstance(each, type)
        and issubclass(each, caches.Cache | caches.CacheLayerMixin)
        and each.__module__ == here
        for each in vars(sys.modules[here]).values()
    )
