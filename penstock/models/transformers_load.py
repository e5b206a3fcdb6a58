"""Loads a decoder of the transformers library: builds its modules without memory for weights, and fills them from the
checkpoint, one tensor at a time. The only file that knows how names of a checkpoint become names of modules."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.core.engine_config import Quantization
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import DenseWeight, Ops
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig
from penstock.models.quantized_floats import open_folder
from penstock.models.quantized_source import QuantizedSource, SafetensorsSource
from penstock.models.sharding import WHOLE, Shard
from penstock.models.stored_quantization import StoredQuantization, stored_quantization
from penstock.models.transformers_model import (
    PAGED,
    NeedsWeight,
    PackedModule,
    PackedTable,
    TransformersModel,
    attend,
    decoder_name,
    pack_norms,
)
from penstock.models.transformers_probe import RECORDING, Recording, check_rope, probe, recorded_mask
from penstock.models.weights import NamedProduct, OnProgress, RandomSource, WeightLoader, WeightSource

logger = logging.getLogger(__name__)

_OLDEST = 5  # the first major version that names its conversions of checkpoints
# What quantized layouts store in place of `weight`.
_STANDS_FOR_WEIGHT = re.compile(r"\.(qweight|weight_packed|W_q)$")


def library() -> Any:
    """Import transformers, with our attention in its registry. Raises ModelLoadError if it is not installed."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelLoadError(
            "This architecture is not native, and the package transformers, which may know it, is not installed.",
            hint="Install penstock-llm[transformers].",
        ) from error
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        raise ModelLoadError(
            f"Transformers {transformers.__version__} is too old to serve models with; {_OLDEST}.0 is needed.",
            hint="Install penstock-llm[transformers].",
        )
    transformers.AttentionInterface.register(PAGED, attend)
    transformers.AttentionInterface.register(RECORDING, attend)
    transformers.AttentionMaskInterface.register(RECORDING, recorded_mask)
    return transformers


def read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Read a folder's settings as transformers does. Raises ModelLoadError where it has no decoder for them."""
    transformers = library()
    raw = Fields(transformers.PretrainedConfig.get_config_dict(folder)[0], str(folder / "config.json"))
    model_type = raw.raw("model_type")
    own_code = raw.raw("auto_map")
    known = model_type in transformers.CONFIG_MAPPING
    if not known and own_code and not trust_remote_code:
        raise ModelLoadError(
            f"The model in {folder} brings Python code of its own, which is not run unasked.",
            hint="Read the code, then add --trust-remote-code.",
        )
    named = raw.raw("architectures")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    if classes and not own_code and not any(hasattr(transformers, name) for name in classes):
        raise ModelLoadError(f"Transformers {transformers.__version__} has no class {classes[0]}.")
    if not known and not own_code:
        raise ModelLoadError(
            f"Transformers {transformers.__version__} does not know the model type {model_type!r}."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the settings make of transformers' code
        raise ModelLoadError(
            f"Transformers cannot read {folder / 'config.json'}: {_reason(error)}."
        ) from error
    is_decoder = type(config) in transformers.AutoModelForCausalLM._model_mapping or bool(own_code)
    if not is_decoder or getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"Transformers has no decoder for the model type {model_type!r}.")
    return config


def architecture_config(config: Any, where: str) -> ArchitectureConfig:
    """Describe the model as far as its settings go. A recorded pass replaces the numbers of layers and heads."""
    text = config.get_text_config()
    fields = Fields({**text.to_dict(), **_mapped(text)}, where)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", 1)
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", max(2, hidden_size // num_heads // 2 * 2))
    bos_token_ids = fields.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=fields.text("model_type"),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,  # of no use: the modules have their own
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings", 2048),
        norm_eps=1e-6,
        rope=RopeConfig(1.0),
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=str(text.dtype).removeprefix("torch.") if getattr(text, "dtype", None) else None,
    )


# Settings that some configurations keep under other names.
_MAPPED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _mapped(text: Any) -> dict[str, Any]:
    """Return these settings. Transformers raises errors of its own for settings that differ between layers."""
    found = {}
    for name in _MAPPED:
        with contextlib.suppress(Exception):
            found[name] = getattr(text, name, None)
    return found


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
        return cls(path, settings, config, stored_quantization(fields), trust_remote_code)

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
        filling = _Filling(network, source, loader, stored_names(network, source))
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        filling.fill()
        pack_norms(network, ops)
        model = TransformersModel(
            network,
            self.config,
            ops,
            max_model_len=max_model_len,
            num_parameters=num_parameters,
            weight_bytes=loader.weight_bytes + filling.plain_bytes,
        )
        while True:
            try:
                recording = probe(model, ops)
                break
            except NeedsWeight as need:
                filling.unpack(need.name)
        model.products = filling.products(recording)
        return model


def _both_reasons(unknown: ModelLoadError, error: ModelLoadError) -> ModelLoadError:
    """Say why a model runs neither natively nor by transformers' code, and what is left."""
    hint = error.hint or "Run the model in another server, and name that server with --external."
    return ModelLoadError(f"{unknown.message} {error.message}", hint=hint)


def refuse_shards(shard: Shard) -> None:
    if shard != WHOLE:
        raise ConfigError(
            "A model that runs by transformers' code cannot be shared out over ranks.",
            hint="Leave --tensor-parallel-size and --pipeline-parallel-size out.",
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


def _skeleton(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Build the model with parameters that have a shape and no memory."""
    transformers = library()
    config.use_cache = False
    try:
        with _without_memory():
            network = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # whatever the settings make of transformers' code
        raise ModelLoadError(f"Transformers cannot build the model: {_reason(error)}.") from error
    if not type(network)._can_set_attn_implementation() or decoder_name(network) is None:
        raise ModelLoadError(
            f"Transformers runs {type(network).__name__} with attention of its own, which cannot be replaced "
            "by paged attention."
        )
    network.eval().requires_grad_(False)
    return network


@dataclass(frozen=True, slots=True)
class StoredNames:
    """Where the parameters of a model come from: one stored tensor, or several that transformers converts."""

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
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        found = _wanted_name(target, wanted)
        if found is None:
            found, pattern = _wanted_name(name, wanted), None
        if found is None:
            continue
        target = found
        if pattern is None:
            direct[target] = name
        else:
            entry = converted.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            entry.add_tensor(target, name, pattern, _reader(source, name))
    return StoredNames(direct, converted)


# The places of text models within others. Sources leave them out of names.
_PLACES = ("model.language_model.", "model.text_model.")


def _wanted_name(name: str, wanted: Mapping[str, Any]) -> str | None:
    """Return the parameter that has this name, or has it within a larger model."""
    names = (name, *(name.replace("model.", place, 1) for place in _PLACES if name.startswith("model.")))
    return next((each for each in names if each in wanted), None)


def _reader(source: WeightSource, name: str) -> Callable[[], Tensor]:
    if isinstance(source, QuantizedSource) and source.is_quantized(name):
        raise ModelLoadError(f"{name} is quantized, and transformers would have to merge it with others.")
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
class _Filling:
    """Puts the weights of a checkpoint into the modules of a model."""

    network: Any
    source: WeightSource
    loader: WeightLoader
    names: StoredNames
    plain_bytes: int = 0
    packed: dict[str, NamedProduct] = field(default_factory=dict)  # by module
    originals: dict[str, nn.Module] = field(default_factory=dict)  # of packed modules, without memory
    tied: dict[str, str] = field(default_factory=dict)  # parameter -> the parameter that it is

    def __post_init__(self) -> None:
        self.tied = self._tied()

    def fill(self) -> None:
        tied = self.tied
        whole = self._in_float32()
        self._pack_head()
        for name, module in list(self.network.named_modules()):
            is_packable = (
                type(module) is nn.Linear
                and f"{name}.weight" in self.names.direct
                and f"{name}.weight" not in tied
                and not (whole and whole.search(f"{name}.weight"))
            )
            if is_packable:
                self._pack(name, module)
        for target, converter in self.names.converted.items():
            self._convert(target, converter)
        for name, parameter in list(self.network.named_parameters(remove_duplicate=False)):
            if parameter.is_meta and name not in tied:
                self._put(name, self._read(name, tuple(parameter.shape)))
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
            bias = self.source.vector(self.names.direct[f"{name}.bias"], head.out_features)
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
            made = converter.convert(target, model=self.network, config=self.network.config)
        except Exception as error:
            raise ModelLoadError(f"Transformers cannot convert {target}: {_reason(error)}.") from error
        for name, value in made.items():
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
        whole = self._in_float32()
        dtype = self.loader.ops.dtype
        if not value.is_floating_point():
            dtype = value.dtype
        elif leaf in module._buffers or (whole and whole.search(name)):
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


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
