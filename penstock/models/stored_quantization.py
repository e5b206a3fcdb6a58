"""Reads from settings which kind of quantized weights a Hugging Face checkpoint holds. Imports no torch.

Kinds that cannot be read are refused here, by name, before anything is loaded. `quantized_source.py` knows the layout
of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields, read_settings

_HINT = "Use the unquantized checkpoint with --quantization int8, int4 or fp8, or a GGUF file."
# Known by name, for the sentence of the refusal.
_REFUSED = {
    "bitnet": "BitNet",
    "aqlm": "AQLM",
    "quip": "QuIP",
    "eetq": "EETQ",
    "torchao": "torchao",
    "mlx": "MLX",
}
# Files in which tools described what config.json does not, and the method that each stands for.
_OWN_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
_AUTO_ROUND_LAYOUTS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
)
_MXFP8_BLOCK = (1, 32)
_FLOAT4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_MIXED = "mixed-precision"  # each group of layers names a format of its own


@dataclass(frozen=True, slots=True)
class AWQ:
    """Four bits, packed along the outputs in AWQ's own order."""

    group: int | None  # None: one scale for a whole row


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Two to eight bits, packed along the inputs, which may be grouped in the order of their activations."""

    bits: int  # 2, 3, 4 or 8
    group: int | None
    zero_bias: int  # 0 or 1: the first version of the format stores zero points less 1
    has_order: bool = False  # each matrix says which group an input belongs to


@dataclass(frozen=True, slots=True)
class Scaled:
    """Plain float8 or int8 matrices with scales beside them: for a tensor, a row, or a block of this shape."""

    block: tuple[int, int] | None = None  # outputs, inputs


@dataclass(frozen=True, slots=True)
class Compressed:
    """compressed-tensors: codes packed along the inputs, in groups, four-bit floats, or as in `Scaled`. The tensors
    of a matrix show which; layers may differ."""

    bits: Literal[4, 8]  # of the first kind of matrices that the settings describe
    scaled: Scaled
    rounds_inputs: bool = False  # int8 weights that were made for int8 activations
    groups: frozenset[int] = frozenset()  # inputs with one scale


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Stacked experts in float4 (e2m1), each 32 inputs with a power of two. Everything else is plain."""


@dataclass(frozen=True, slots=True)
class Float4:
    """Four-bit floats, two to a byte, with a scale for each 16 inputs (NVFP4) or 32 (MXFP4); other matrices as in
    `Scaled`. compressed-tensors and ModelOpt name the tensors differently."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """bitsandbytes: nf4, fp4 or int8, as the tensors of each matrix say."""


@dataclass(frozen=True, slots=True)
class HQQ:
    """HQQ: 1 to 8 bits in groups, as the tensors of each matrix say."""


StoredQuantization = AWQ | GPTQ | Scaled | Compressed | MXFP4 | Float4 | BitsAndBytes | HQQ


def folder_quantization(folder: Path, fields: Fields) -> StoredQuantization | None:
    """Return the quantization of a folder, whose `config.json` is `fields`: tools of 2023, and ModelOpt until 2025,
    described it in a file of their own."""
    found = stored_quantization(fields)
    if found is not None:
        return found
    for name, method in _OWN_FILES.items():
        settings = read_settings(folder / name)
        if settings is not None:
            nested = settings.get("quantization")  # of ModelOpt
            described = nested if isinstance(nested, dict) else settings
            return _described({"quant_method": method, **described}, fields, str(folder / name))
    return None


def stored_quantization(fields: Fields) -> StoredQuantization | None:
    """Return the quantization that config.json describes; None for plain weights."""
    settings = fields.raw("quantization_config") or fields.raw("quantization")  # the second of MLX alone
    if settings is None and isinstance(fields.raw("text_config"), dict):
        settings = fields.raw("text_config").get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{fields.where} has a quantization_config that is not an object.")
    if fields.has("quantization") and "quant_method" not in settings:
        settings = {"quant_method": "mlx", **settings}
    return _described(settings, fields, f"The quantization_config of {fields.where}")


def _described(settings: dict[str, Any], fields: Fields, where: str) -> StoredQuantization | None:
    inner = Fields(settings, where)
    method = inner.text("quant_method", "unknown")
    if method in _AUTO_ROUND:
        method = _packed_by_auto_round(inner)
    match method:
        case "awq":
            return _awq(inner)
        case "gptq":
            return _gptq(inner)
        case "fp8":
            return Scaled(_block(inner.raw("weight_block_size"), inner))
        case "mxfp8":
            return Scaled(_block(inner.raw("weight_block_size"), inner) or _MXFP8_BLOCK)
        case "fbgemm_fp8":
            return Scaled()
        case "compressed-tensors":
            _refuse_transforms(inner)
            return _compressed(inner)
        case "mxfp4":
            return MXFP4()
        case "modelopt":
            if "quant_algo" in settings and not inner.has("quant_algo"):
                return None  # only the KV cache was quantized
            return _modelopt(inner)
        case "bitsandbytes":
            return BitsAndBytes()
        case "hqq":
            return HQQ()
    shown = _REFUSED.get(method, repr(method))
    raise ModelLoadError(
        f"{fields.where} describes weights quantized by {shown}, which cannot be read; "
        "known are AWQ, GPTQ, fp8, MXFP4, MXFP8, compressed-tensors, ModelOpt, bitsandbytes and HQQ.",
        hint=_HINT,
    )


def _modelopt(fields: Fields) -> Float4 | Scaled:
    known = ("FP8", "NVFP4")
    algorithm = fields.text("quant_algo", "unknown")
    if algorithm != "MIXED_PRECISION":
        _require(fields, "quant_algo", algorithm, (*known, "MXFP8", "MIXED_PRECISION"))
        if algorithm == "NVFP4":
            return Float4()
        return Scaled(_MXFP8_BLOCK if algorithm == "MXFP8" else None)
    layers = fields.raw("quantized_layers")
    for name, layer in layers.items() if isinstance(layers, dict) else [("quantized_layers", layers)]:
        inner = Fields(layer if isinstance(layer, dict) else {}, f"{name} of {fields.where}")
        _require(inner, "quant_algo", inner.text("quant_algo", "unknown"), known)
    return Float4()


def _packed_by_auto_round(fields: Fields) -> str:
    """Return the method whose layout AutoRound has written."""
    packing = fields.text("packing_format", "unknown")
    _require(fields, "packing_format", packing, tuple(_AUTO_ROUND_LAYOUTS))
    return _AUTO_ROUND_LAYOUTS[packing]


def _awq(fields: Fields) -> AWQ:
    _require(fields, "bits", fields.integer("bits" if fields.has("bits") else "w_bit", 4), (4,))
    _require(fields, "version", fields.text("version", "gemm").lower(), ("gemm",))
    return AWQ(_group(fields, "group_size" if fields.has("group_size") else "q_group_size"))


def _gptq(fields: Fields) -> GPTQ:
    bits = fields.integer("bits")
    _require(fields, "bits", bits, (2, 3, 4, 8))
    layout = fields.text("checkpoint_format", "gptq")
    _require(fields, "checkpoint_format", layout, ("gptq", "gptq_v2"))
    group, zero_bias = _group(fields, "group_size"), 0 if layout == "gptq_v2" else 1
    return GPTQ(bits, group, zero_bias, has_order=fields.flag("desc_act", False) and group is not None)


def _refuse_transforms(fields: Fields) -> None:
    """Raise ModelLoadError for weights that are right only beside rotations of their inputs, which are not computed
    here."""
    transforms = fields.raw("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise ModelLoadError(
            f"{fields.where} describes rotated weights (transform_config), which cannot be read.", hint=_HINT
        )


def _compressed(fields: Fields) -> Compressed | Float4:
    """Read the kinds of all layers. Tensors show the kind of a matrix, so kinds need only be known ones."""
    layout = fields.text("format", "unknown")
    _require(fields, "format", layout, (*_COMPRESSED_FORMATS, *_FLOAT4_FORMATS, _MIXED))
    sparsity = fields.raw("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ModelLoadError(f"{fields.where} describes sparse weights, which cannot be read.", hint=_HINT)
    groups = fields.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        if layout in _FLOAT4_FORMATS:
            return Float4()
        raise ModelLoadError(f"{fields.where} has no config_groups.")
    kinds = [_weights(group, layout, fields) for group in groups.values()]
    integers = [kind for kind in kinds if kind is not None]
    if not integers:
        return Float4()
    blocks = {kind.scaled.block for kind in integers} - {None}
    if len(blocks) > 1:
        raise ModelLoadError(
            f"{fields.where} gives different layers blocks of different shapes, which cannot be read.",
            hint=_HINT,
        )
    return Compressed(
        integers[0].bits,
        Scaled(*blocks),
        rounds_inputs=all(kind.rounds_inputs for kind in integers),
        groups=frozenset().union(*(kind.groups for kind in integers)),
    )


def _weights(group: Any, layout: str, fields: Fields) -> Compressed | None:
    """Return the kind of matrices of one group of layers; None for four-bit floats."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelLoadError(f"{fields.where} has a group without a description of its weights.")
    if layout == _MIXED:
        layout = Fields(group, fields.where).text("format", "unknown")
        _require(fields, "format", layout, (*_COMPRESSED_FORMATS, *_FLOAT4_FORMATS))
    if layout in _FLOAT4_FORMATS:
        return None
    inner = Fields(weights, fields.where)
    kind, bits = inner.text("type", "int"), inner.integer("num_bits")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ModelLoadError(
            f"{fields.where} describes {kind} weights of {bits} bits, which cannot be read.", hint=_HINT
        )
    inputs = group.get("input_activations")
    rounds_inputs = isinstance(inputs, dict) and (inputs.get("type"), inputs.get("num_bits")) == ("int", 8)
    size = _group(inner, "group_size") if inner.has("group_size") else None
    return Compressed(
        8 if bits == 8 else 4,
        Scaled(_block(inner.raw("block_structure"), inner)),
        rounds_inputs=rounds_inputs and (kind, bits) == ("int", 8),
        groups=frozenset(() if size is None else (size,)),
    )


def _group(fields: Fields, key: str) -> int | None:
    return None if fields.raw(key) == -1 else fields.integer(key, 128)


def _block(value: Any, fields: Fields) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # as in "128x128"
        value = [int(side) if side.isdigit() else 0 for side in value.lower().split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(s, int) and s > 0 for s in value):
        raise ModelLoadError(f"{fields.where} has blocks of {value!r:.40}, which are not two sizes.")
    return value[0], value[1]


def _require(fields: Fields, key: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        readable = " and ".join(map(str, known)) if len(known) < 3 else ", ".join(map(str, known))
        raise ModelLoadError(
            f"{fields.where} has {key} {value!r}, which cannot be read; known: {readable}.", hint=_HINT
        )
